"""A trained model as PyTorch has it. Needs PyTorch.

A person's own module is a `state_dict`, for the class that they have. What goes by a name here is a program of
`torch.export`, which takes raw features and needs nothing of fedbudget.
"""

import io
import json
from typing import Any

import torch
from torch import Tensor, nn

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, explained
from fedbudget.models.base import Model
from fedbudget.models.builtin import KMeans
from fedbudget.models.catalogue import MODELS
from fedbudget.models.description import NamedTensors
from fedbudget.models.torch.batches import call
from fedbudget.models.torch.model import TorchModel
from fedbudget.trained.model import TrainedModel

ABOUT = "fedbudget.json"
"""The file within an exported program that says what its outputs are."""


class Centres(nn.Module):
    """How near to each centre samples are: -½ ‖x - centre‖²."""

    def __init__(self, centres: Tensor) -> None:
        super().__init__()
        self.centres = nn.Parameter(centres)

    def forward(self, x: Tensor) -> Tensor:
        return -0.5 * (x[:, None] - self.centres).square().sum(dim=2)


class RowOfOutputs(nn.Module):
    """A module whose output is [samples, outputs]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = call(self.module, x)
        return output.reshape(output.shape[0], -1)


class FromFeatures(nn.Module):
    """From features as they are outside to outputs; a real value in its own unit."""

    feature_mean: Tensor | None
    feature_deviation: Tensor

    def __init__(
        self, module: nn.Module, samples: Dataset, mean: float, deviation: float
    ) -> None:
        super().__init__()
        self.module = module
        how = samples.standardization
        self.scale = samples.scale
        self.shape = samples.shape
        self.integers = samples.integers
        self.mean = mean
        self.deviation = deviation
        self.register_buffer(
            "feature_mean", None if how is None else torch.from_numpy(how.mean)
        )
        self.register_buffer(
            "feature_deviation", None if how is None else torch.from_numpy(how.deviation)
        )

    def forward(self, features: Tensor) -> Tensor:
        if self.feature_mean is not None:
            features = (features - self.feature_mean) / self.feature_deviation
        numbers = features if self.integers else features.float() * self.scale
        outputs: Tensor = self.module(
            numbers.reshape(-1, *self.shape) if self.shape else numbers
        )
        return (
            outputs
            if (self.mean, self.deviation) == (0, 1)
            else outputs.double() * self.deviation + self.mean
        )


def module_of(model: Model, w: Float32) -> nn.Module:
    """The model as a module, from features as it sees them to outputs."""
    if isinstance(model, TorchModel):
        if model.local_statistics:
            raise UserError(
                f"{model.name} normalizes by the statistics of a node's own samples, which are not in the model: "
                "export TorchModel.trained(w, shard=...), which has them"
            )
        return RowOfOutputs(model.trained(w))
    tensors = {
        name: torch.from_numpy(each.copy())
        for name, each in NamedTensors.of(model).split(w).items()
    }
    if isinstance(model, KMeans):
        return nn.Sequential(nn.Flatten(), Centres(tensors["centres"]))
    if "weight" not in tensors:
        raise UserError(
            f"{model.name} is Python code, which cannot be exported; its tensors can, to numpy"
        )
    weight = tensors["weight"].reshape(-1, tensors["weight"].shape[-1])
    linear = nn.Linear(weight.shape[1], len(weight), bias="bias" in tensors)
    linear.load_state_dict(tensors | {"weight": weight})
    return nn.Sequential(nn.Flatten(), linear)


def example(samples: Dataset) -> Tensor:
    """Two samples as the model sees them, for programs that follow what becomes of them."""
    shape = samples.shape or (samples.features,)
    return torch.zeros(
        (2, *shape), dtype=torch.int64 if samples.integers else torch.float32
    )


def to_torch(trained: TrainedModel) -> bytes:
    """A file that PyTorch reads: of one's own module a state_dict, and otherwise a program of torch.export."""
    file = io.BytesIO()
    samples = trained.samples
    if trained.name not in MODELS and isinstance(trained.model, TorchModel):
        torch.save(trained.model.trained(trained.w).state_dict(), file)
        return file.getvalue()
    body = module_of(trained.model, trained.w)
    numbers = example(samples)
    meaning = trained.meaning(int(body(numbers).shape[1]))
    whole = FromFeatures(body, samples, meaning.mean, meaning.deviation).eval()
    features = numbers.reshape(2, -1).to(
        torch.float32 if samples.standardization is None else torch.float64
    )
    with explained(f"{trained.name} cannot be exported to PyTorch"):
        program = torch.export.export(
            whole, (features,), dynamic_shapes=({0: torch.export.Dim("samples")},)
        )
    about: dict[str, Any] = {
        "model": trained.name,
        "outputs": meaning.kind,
        "classes": meaning.classes,
    }
    about["features"] = trained.feature_names
    torch.export.save(program, file, extra_files={ABOUT: json.dumps(about)})
    return file.getvalue()
