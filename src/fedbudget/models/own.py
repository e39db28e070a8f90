"""A model of the user's own: any Python function that gives loss and gradient of a batch.

A model of a person's own, however it is given: as a `Model`, as a PyTorch module, or as what makes one of these.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedbudget import python_file
from fedbudget.arrays import Float32
from fedbudget.data.shards import Table
from fedbudget.errors import UserError, explained
from fedbudget.models.base import LoopModel, Model, Target
from fedbudget.models.description import in_words, require_no_arguments
from fedbudget.randomness import ALONE

LossAndGradient = Callable[[Float32, Float32, Float32], tuple[float, ArrayLike]]
"""(w [parameters], x [samples, features], y [samples]) to the mean loss and its gradient [parameters]."""

Predict = Callable[[Float32, Float32], ArrayLike]
"""(w, x) to a prediction for each sample, to be compared with y."""

PredictionMetric = Callable[[Float32, Float32], float]
"""(predictions, y) of all samples to a number."""


class FunctionModel(LoopModel):
    """Trains what a plain function describes.

    Args:
      function: loss and gradient of a batch.
      initial: w(0), [parameters].
      predict: how to predict y, for accuracy; without it a run has no accuracy.
      target: what y should hold; `raw` is the data's own numbers.
      metrics: functions (predictions, y) to a number, by name, for the test samples; they need `predict`.

    >>> import numpy as np
    >>> def mean_of_data(w, x, y):
    ...     return 0.5 * float(((x - w) ** 2).sum(axis=1).mean()), w - x.mean(axis=0)
    >>> model = FunctionModel(mean_of_data, initial=np.zeros(3), target="none")
    >>> model.parameters
    3
    """

    def __init__(
        self,
        function: LossAndGradient,
        *,
        initial: ArrayLike,
        predict: Predict | None = None,
        target: Target = "raw",
        metrics: Mapping[str, PredictionMetric] | None = None,
    ) -> None:
        if metrics and predict is None:
            raise UserError("metrics are of predictions; give `predict` too")
        self.function = function
        self._metrics = dict(metrics or {})
        self.predict = predict
        self.target: Target = target
        self._initial = np.array(initial, dtype=np.float32)
        if self._initial.ndim != 1 or not self._initial.size:
            raise UserError(
                f"initial must be a flat vector of parameters, not of shape {self._initial.shape}"
            )

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "function")

    @property
    def parameters(self) -> int:
        return int(self._initial.size)

    @property
    def loss_in_words(self) -> str:
        return in_words(self.function)

    def initial(self, seed: int) -> Float32:
        return self._initial.copy()

    def loss_and_gradient(
        self, w: Float32, x: Float32, y: Float32
    ) -> tuple[float, Float32]:
        with np.errstate(
            over="ignore"
        ):  # on the way to a number that is right, as in 1 / (1 + exp(-score))
            loss, gradient = self.function(w, x, y)
        gradient = np.asarray(gradient, dtype=np.float32)
        if gradient.shape != w.shape:
            raise UserError(
                f"{self.name} gave a gradient of shape {gradient.shape}; w has {w.shape}"
            )
        return float(loss), gradient

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        """Its predictions of y, [samples, 1]: a class is given by its number."""
        if self.predict is None:
            return None
        predicted = np.asarray(
            self.predict(w, table.scaled(np.arange(len(table)))), np.float32
        )
        return predicted.reshape(len(table), -1)

    def accuracy(self, w: Float32, table: Table) -> float | None:
        predicted = self.outputs(w, table)
        return None if predicted is None else float(np.mean(predicted[:, 0] == table.y))

    @property
    def own_metrics(self) -> tuple[str, ...]:
        return tuple(self._metrics)

    def metrics(self, w: Float32, table: Table) -> dict[str, float]:
        predicted = self.outputs(w, table) if self._metrics else None
        if predicted is None:
            return {}
        return {
            name: float(measure(predicted[:, 0], table.y))
            for name, measure in self._metrics.items()
        }


if TYPE_CHECKING:
    from torch import nn

    OwnModel = Model | nn.Module | Callable[[], Model | nn.Module]
    """What can be given for a model of one's own."""


def as_model(given: Any, *, device: str = "auto") -> Model:
    """The model that is meant.

    Args:
      given: a `Model` as it is; a module, or what makes one, as a `TorchModel` with its usual loss; or what makes a
        `Model` when it is called.
      device: where PyTorch computes, where that is not said by what is given.
    """
    if _is_model(given):
        return _complete(given)
    if _is_module(given):
        return _torch_model(given, device)
    if callable(given):
        require_no_arguments(given)
        with ALONE:  # a function may seed PyTorch
            made = given()
        if _is_model(made):
            return _complete(made)
        if _is_module(made):
            return _torch_model(given, device)
        given = made
    raise UserError(
        f"`model` must be a name, a PyTorch module or a model, not a {type(given).__name__}"
    )


def load_model(reference: str, *, device: str = "auto") -> Model:
    """The model that a name in a Python file stands for, `net.py:Net`."""
    given = python_file.load(reference)
    with explained(f"{reference} cannot be made"):
        try:
            return as_model(given, device=device)
        except UserError as error:
            raise UserError(f"{reference}: {error}") from None


def _is_model(given: Any) -> bool:
    return not isinstance(given, type) and all(
        hasattr(given, name) for name in ("descend", "losses", "parameters")
    )


def _complete(given: Any) -> Model:
    """The model, if it has all that a `Model` has."""
    missing = [
        name
        for name in vars(Model)
        if not name.startswith("_") and not hasattr(given, name)
    ]
    if missing:
        kind = type(given).__name__
        raise UserError(
            f"`model` {kind} has no {', '.join(missing)}; see fedbudget.models.Model for what they are"
        )
    return given  # type: ignore[no-any-return]


def _is_module(given: Any) -> bool:
    """A module, or a class of modules; where PyTorch is not loaded yet, nothing is."""
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", None)
    return module is not None and (
        isinstance(given, module) or (isinstance(given, type) and issubclass(given, module))
    )


def _torch_model(given: Any, device: str) -> Model:
    from fedbudget.models.torch.model import TorchModel

    return TorchModel(given, device=device)
