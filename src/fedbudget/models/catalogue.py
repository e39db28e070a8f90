"""The models that go by a name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, unknown
from fedbudget.models.base import Model, ModelOptions
from fedbudget.models.kmeans import KMeans
from fedbudget.models.linear import LinearRegression
from fedbudget.models.softmax import Softmax
from fedbudget.models.squared_svm import SquaredSvm

Build = Callable[[Dataset, dict[str, Any], str], Model]
"""(dataset, options, device) to a model that fits the dataset's features and classes."""


@dataclass(frozen=True)
class ModelEntry:
    """A model that goes by a name.

    Args:
      build: makes it.
      options: what may be chosen of it, with what is chosen otherwise.
    """

    build: Build
    options: ModelOptions = field(default_factory=dict)


def _cnn(dataset: Dataset, _: dict[str, Any], device: str) -> Model:
    require_torch("`model` cnn")
    if len(dataset.shape) != 3:
        raise UserError(
            f"`model` cnn needs images [channels, height, width]; {dataset.name} has {dataset.features} features"
        )
    from fedbudget.models.cnn import cnn
    from fedbudget.models.torch_model import TorchModel

    channels, height, width = dataset.shape
    classes = max(1, len(dataset.classes))
    return TorchModel(lambda: cnn((channels, height, width), classes), name="cnn", device=device)


def _mlp(dataset: Dataset, _: dict[str, Any], device: str) -> Model:
    require_torch("`model` mlp")
    from fedbudget.models.mlp import mlp
    from fedbudget.models.torch_model import TorchModel

    features, classes = dataset.features, max(1, len(dataset.classes))
    return TorchModel(lambda: mlp(features, classes), name="mlp", device=device)


MODELS: Mapping[str, ModelEntry] = {
    "svm": ModelEntry(lambda dataset, *_: SquaredSvm(dataset.features)),
    "linear": ModelEntry(lambda dataset, *_: LinearRegression(dataset.features)),
    "kmeans": ModelEntry(lambda dataset, options, _: KMeans(dataset.features, **options), KMeans.OPTIONS),
    "softmax": ModelEntry(lambda dataset, *_: Softmax(dataset.features, max(1, len(dataset.classes)))),
    "mlp": ModelEntry(_mlp),
    "cnn": ModelEntry(_cnn),
}


def build(name: str, dataset: Dataset, options: ModelOptions | None = None, *, device: str = "auto") -> Model:
    """A model by its name, of the size that the dataset needs.

    Args:
      options: what is chosen of it; the model's own choice where nothing is given.
      device: where PyTorch computes, for models that use it.
    """
    entry = _entry(name)
    for option, value in (options or {}).items():
        if option not in entry.options:
            raise UserError(f"model {name} has no option {option}, only: {', '.join(entry.options) or 'none'}")
        expected = type(entry.options[option])
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise UserError(f"{option} of model {name} must be of type {expected.__name__}, not {value!r}")
    return entry.build(dataset, {**entry.options, **(options or {})}, device)


def options(name: str, settings: Mapping[str, Any]) -> ModelOptions:
    """Of all settings, those that are options of this model.

    >>> options("kmeans", {"model": "kmeans", "clusters": 7, "seed": 1}), options("svm", {"clusters": 7})
    ({'clusters': 7}, {})
    """
    return {option: settings[option] for option in _entry(name).options if option in settings}


def _entry(name: str) -> ModelEntry:
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def require_torch(what: str) -> None:
    """Says which extra to install where PyTorch is missing."""
    if find_spec("torch") is None:
        raise UserError(f"{what} needs PyTorch; install it with: pip install 'fedbudget[torch]'")
