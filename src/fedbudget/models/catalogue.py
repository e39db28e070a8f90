"""The models that have a name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, unknown
from fedbudget.models.base import Model, ModelOptions
from fedbudget.models.builtin import KMeans, LinearRegression, Softmax, SquaredSvm
from fedbudget.settings.option import choices_text

_LEAST_SIDE = {"cnn": 1, "lenet": 16}
"""Smallest height and width of images, in pixels, for networks that need images."""


@dataclass(frozen=True)
class ModelEntry:
    """A model that has a name.

    Args:
      build: (dataset, options, device) to a model for the dataset's features and classes.
        The options include `class_weights`, if it `weights_classes`.
      options: its options with their defaults.
      weights_classes: whether its loss can weight classes.
    """

    build: Callable[[Dataset, dict[str, Any], str], Model]
    options: ModelOptions = field(default_factory=dict)
    weights_classes: bool = False


def build(
    name: str,
    dataset: Dataset,
    options: ModelOptions | None = None,
    *,
    device: str = "auto",
    class_weights: Sequence[float] = (),
) -> Model:
    """Create a model by its name, with the size that the dataset needs.

    Args:
      name: a key of `MODELS`.
      dataset: the samples to train on.
      options: values of the model's options; the defaults for those that are missing.
      device: device of PyTorch, for models that use it.
      class_weights: factor of the loss of each class's samples; 1 for all by default.
    """
    entry = _entry(name)
    if class_weights and not entry.weights_classes:
        able = [each for each, other in MODELS.items() if other.weights_classes]
        raise UserError(
            f"`model` {name} cannot weight classes: use {choices_text(able)} with "
            "`class_weights`"
        )
    chosen = dict(options or {})
    for option, value in chosen.items():
        if option not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise UserError(f"model {name} has no option {option}, only: {known}")
        expected = type(entry.options[option])
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise UserError(
                f"{option} of model {name} must be of type {expected.__name__}, "
                f"not {value!r}"
            )
    if entry.weights_classes:
        chosen["class_weights"] = tuple(class_weights)  # type: ignore[assignment]
    return entry.build(dataset, {**entry.options, **chosen}, device)


def default(dataset: Dataset) -> str:
    """Return the default model: softmax regression for classes, linear for numbers."""
    if dataset.store is not None:
        raise UserError(
            "samples that are read one by one need a custom PyTorch model: pass it as "
            "`model`"
        )
    if dataset.train.labels is not None:
        return "softmax"
    if dataset.train.values is not None:
        return "linear"
    raise UserError(
        f"{dataset.name} has nothing to predict; for clusters, use `model` kmeans"
    )


def options(name: str, settings: Mapping[str, Any]) -> ModelOptions:
    """Select the settings that are options of a model.

    >>> options("kmeans", {"model": "kmeans", "clusters": 7, "seed": 1})
    {'clusters': 7}
    >>> options("svm", {"clusters": 7})
    {}
    """
    return {
        option: settings[option] for option in _entry(name).options if option in settings
    }


def require_torch(what: str) -> None:
    """Raise a `UserError` with the extra to install if PyTorch is missing.

    Args:
      what: the feature that needs it.
    """
    if find_spec("torch") is None:
        raise UserError(
            f"{what} needs PyTorch; install it with: pip install 'fedbudget[torch]'"
        )


def _network(name: str, dataset: Dataset, options: dict[str, Any], device: str) -> Model:
    require_torch(f"`model` {name}")
    if name in _LEAST_SIDE and len(dataset.shape) != 3:
        raise UserError(
            f"`model` {name} needs images [channels, height, width]; {dataset.name} has "
            f"{dataset.features} features"
        )
    least = _LEAST_SIDE.get(name, 0)
    if min(dataset.shape[1:], default=0) < least:
        sides = " x ".join(map(str, dataset.shape[1:]))
        raise UserError(
            f"`model` {name} needs images of {least} x {least} or more; {dataset.name} has "
            f"{sides}"
        )
    from fedbudget.models.torch import networks
    from fedbudget.models.torch.model import TorchModel

    train = dataset.train
    real = name == "mlp" and train.labels is None and train.values is not None
    size: Any = dataset.features if name == "mlp" else dataset.shape
    outputs = 1 if real else max(1, len(dataset.classes))
    return TorchModel(
        partial(getattr(networks, name), size, outputs),
        name=name,
        target="real" if real else "classes",
        class_weights=options["class_weights"] or None,
        device=device,
    )


def _entry(name: str) -> ModelEntry:
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


MODELS: Mapping[str, ModelEntry] = {
    "svm": ModelEntry(lambda dataset, *_: SquaredSvm(dataset.features)),
    "linear": ModelEntry(lambda dataset, *_: LinearRegression(dataset.features)),
    "kmeans": ModelEntry(
        lambda dataset, options, _: KMeans(dataset.features, **options), KMeans.OPTIONS
    ),
    "softmax": ModelEntry(
        lambda dataset, options, _: Softmax(
            dataset.features,
            max(1, len(dataset.classes)),
            weights=options["class_weights"],
        ),
        weights_classes=True,
    ),
    "mlp": ModelEntry(partial(_network, "mlp"), weights_classes=True),
    "cnn": ModelEntry(partial(_network, "cnn"), weights_classes=True),
    "lenet": ModelEntry(partial(_network, "lenet"), weights_classes=True),
}
