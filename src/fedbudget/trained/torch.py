"""Export of a trained model to PyTorch.

Your own module becomes a `state_dict` for its class. A model that has a name becomes a
program of `torch.export`, which takes raw features and does not need fedbudget.
"""

import io
import json

import torch
from torch import Tensor, nn

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, as_user_error
from fedbudget.models.base import Model
from fedbudget.models.builtin import KMeans
from fedbudget.models.catalogue import MODELS
from fedbudget.models.description import NamedTensors
from fedbudget.models.torch.batches import call
from fedbudget.models.torch.model import TorchModel
from fedbudget.trained.model import TrainedModel

ABOUT = "fedbudget.json"
"""File within an exported program that describes its outputs."""


def to_torch(trained: TrainedModel) -> bytes:
    """Return a file for PyTorch: a state_dict or a program of torch.export."""
    file = io.BytesIO()
    samples = trained.samples
    if trained.name not in MODELS and isinstance(trained.model, TorchModel):
        torch.save(trained.model.trained(trained.w).state_dict(), file)
        return file.getvalue()

    body = module_of(trained.model, trained.w)
    numbers = example(samples)
    meaning = trained.meaning(int(body(numbers).shape[1]))
    whole = FromFeatures(body, samples, meaning.mean, meaning.deviation).eval()
    kind = torch.float32 if samples.standardization is None else torch.float64
    features = numbers.reshape(2, -1).to(kind)
    any_length = {0: torch.export.Dim("samples")}
    with as_user_error(f"{trained.name} cannot be exported to PyTorch"):
        program = torch.export.export(whole, (features,), dynamic_shapes=(any_length,))
    about = {
        "model": trained.name,
        "outputs": meaning.kind,
        "classes": meaning.classes,
        "features": trained.feature_names,
        "privacy": None if trained.privacy is None else trained.privacy.to_json(),
    }
    torch.export.save(program, file, extra_files={ABOUT: json.dumps(about)})
    return file.getvalue()


def module_of(model: Model, w: Float32) -> nn.Module:
    """Return the model as a module, from its input features to outputs."""
    if isinstance(model, TorchModel):
        if model.local_statistics:
            raise UserError(
                f"{model.name} normalizes by the statistics of a node's own samples, which "
                "are not in the model: export TorchModel.trained(w, shard=...) instead"
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
            f"{model.name} is Python code, which cannot be exported; export its tensors to "
            "numpy"
        )
    weight = tensors["weight"].reshape(-1, tensors["weight"].shape[-1])
    linear = nn.Linear(weight.shape[1], len(weight), bias="bias" in tensors)
    linear.load_state_dict(tensors | {"weight": weight})
    return nn.Sequential(nn.Flatten(), linear)


def example(samples: Dataset) -> Tensor:
    """Return two samples in the model's input format, to trace a module with."""
    shape = samples.shape or (samples.features,)
    kind = torch.int64 if samples.integers else torch.float32
    return torch.zeros((2, *shape), dtype=kind)


class Centres(nn.Module):
    """Score of each centre: -½ ‖x - centre‖²."""

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
    """From raw features to outputs. Real values are in their original unit."""

    feature_mean: Tensor | None
    feature_deviation: Tensor

    def __init__(
        self, module: nn.Module, samples: Dataset, mean: float, deviation: float
    ) -> None:
        super().__init__()
        self.module = module
        self.scale = samples.scale
        self.shape = samples.shape
        self.integers = samples.integers
        self.mean = mean
        self.deviation = deviation
        standard = samples.standardization
        mean_values = None if standard is None else torch.from_numpy(standard.mean)
        deviations = None if standard is None else torch.from_numpy(standard.deviation)
        self.register_buffer("feature_mean", mean_values)
        self.register_buffer("feature_deviation", deviations)

    def forward(self, features: Tensor) -> Tensor:
        if self.feature_mean is not None:
            features = (features - self.feature_mean) / self.feature_deviation
        numbers = features if self.integers else features.float() * self.scale
        if self.shape:
            numbers = numbers.reshape(-1, *self.shape)
        outputs: Tensor = self.module(numbers)
        if (self.mean, self.deviation) == (0, 1):
            return outputs
        return outputs.double() * self.deviation + self.mean
