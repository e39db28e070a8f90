"""The models that go by a name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, unknown
from fedbudget.models.base import Model, ModelOptions
from fedbudget.models.builtin import KMeans, LinearRegression, Softmax, SquaredSvm


@dataclass(frozen=True)
class ModelEntry:
    """A model that goes by a name.

    Args:
      build: (dataset, options, device) to a model that fits the dataset's features and classes.
      options: what may be chosen of it, with what is chosen otherwise.
    """

    build: Callable[[Dataset, dict[str, Any], str], Model]
    options: ModelOptions = field(default_factory=dict)


_LEAST_SIDE = {"cnn": 1, "lenet": 16}
"""Of images, in pixels, for networks that need images."""


def _network(name: str, dataset: Dataset, _: dict[str, Any], device: str) -> Model:
    require_torch(f"`model` {name}")
    if name in _LEAST_SIDE and len(dataset.shape) != 3:
        raise UserError(
            f"`model` {name} needs images [channels, height, width]; {dataset.name} has {dataset.features} features"
        )
    if min(dataset.shape[1:], default=0) < (least := _LEAST_SIDE.get(name, 0)):
        sides = " x ".join(map(str, dataset.shape[1:]))
        raise UserError(
            f"`model` {name} needs images of {least} x {least} or more; {dataset.name} has {sides}"
        )
    from fedbudget.models.torch import networks
    from fedbudget.models.torch.model import TorchModel

    number = (
        name == "mlp" and dataset.train.labels is None and dataset.train.values is not None
    )
    makes: dict[str, Callable[[Any, int], Any]] = {
        "mlp": networks.mlp,
        "cnn": networks.cnn,
        "lenet": networks.lenet,
    }
    make = partial(makes[name], dataset.features if name == "mlp" else dataset.shape)
    outputs = 1 if number else max(1, len(dataset.classes))
    return TorchModel(
        partial(make, outputs),
        name=name,
        target="real" if number else "classes",
        device=device,
    )


MODELS: Mapping[str, ModelEntry] = {
    "svm": ModelEntry(lambda dataset, *_: SquaredSvm(dataset.features)),
    "linear": ModelEntry(lambda dataset, *_: LinearRegression(dataset.features)),
    "kmeans": ModelEntry(
        lambda dataset, options, _: KMeans(dataset.features, **options), KMeans.OPTIONS
    ),
    "softmax": ModelEntry(
        lambda dataset, *_: Softmax(dataset.features, max(1, len(dataset.classes)))
    ),
    "mlp": ModelEntry(partial(_network, "mlp")),
    "cnn": ModelEntry(partial(_network, "cnn")),
    "lenet": ModelEntry(partial(_network, "lenet")),
}


def build(
    name: str,
    dataset: Dataset,
    options: ModelOptions | None = None,
    *,
    device: str = "auto",
) -> Model:
    """A model by its name, of the size that the dataset needs.

    Args:
      options: what is chosen of it; the model's own choice where nothing is given.
      device: where PyTorch computes, for models that use it.
    """
    entry = _entry(name)
    for option, value in (options or {}).items():
        if option not in entry.options:
            raise UserError(
                f"model {name} has no option {option}, only: {', '.join(entry.options) or 'none'}"
            )
        expected = type(entry.options[option])
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise UserError(
                f"{option} of model {name} must be of type {expected.__name__}, not {value!r}"
            )
    return entry.build(dataset, {**entry.options, **(options or {})}, device)


def default(dataset: Dataset) -> str:
    """What is trained where nobody has said it: softmax regression for classes, linear regression for numbers."""
    if dataset.store is not None:
        raise UserError(
            "samples that are read one by one need a PyTorch model of your own; give it as `model`"
        )
    if dataset.train.labels is not None:
        return "softmax"
    if dataset.train.values is not None:
        return "linear"
    raise UserError(
        f"{dataset.name} has nothing to predict; for clusters, use `model` kmeans"
    )


def options(name: str, settings: Mapping[str, Any]) -> ModelOptions:
    """Of all settings, those that are options of this model.

    >>> options("kmeans", {"model": "kmeans", "clusters": 7, "seed": 1}), options("svm", {"clusters": 7})
    ({'clusters': 7}, {})
    """
    return {
        option: settings[option] for option in _entry(name).options if option in settings
    }


def _entry(name: str) -> ModelEntry:
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def require_torch(what: str) -> None:
    """Says which extra to install where PyTorch is missing."""
    if find_spec("torch") is None:
        raise UserError(
            f"{what} needs PyTorch; install it with: pip install 'fedbudget[torch]'"
        )
