"""Custom models: plain Python functions, PyTorch modules, and objects with a `Model`
interface.

`FunctionModel` trains a plain function. `as_model` accepts anything that the user may pass
as a model, and `load_model` reads it from a Python file.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedbudget import python_file
from fedbudget.arrays import Float32
from fedbudget.data.shards import Table
from fedbudget.errors import UserError, as_user_error
from fedbudget.models.base import LoopModel, Model, Rows, Target
from fedbudget.models.description import describe_function, require_no_arguments
from fedbudget.randomness import TORCH_RANDOM_LOCK

if TYPE_CHECKING:
    from torch import nn

    OwnModel = Model | nn.Module | Callable[[], Model | nn.Module]
    """Anything that the user may pass as a model."""

LossAndGradient = Callable[[Float32, Float32, Float32], tuple[float, ArrayLike]]
"""(w [parameters], x [samples, features], y [samples]) to mean loss, gradient
[parameters]."""

Predict = Callable[[Float32, Float32], ArrayLike]
"""(w, x) to a prediction of y for each sample."""

PredictionMetric = Callable[[Float32, Float32], float]
"""(predictions, y) of all samples to a number."""


class FunctionModel(LoopModel):
    """Trains a plain function.

    Args:
      function: returns loss and gradient of a batch.
      initial: w(0), [parameters].
      predict: predicts y; a run without it reports no accuracy.
      target: meaning of y; `raw` passes the values of the data unchanged.
      metrics: functions (predictions, y) to a number, by name, for the test samples. They
        need `predict`.

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
            raise UserError("metrics compare predictions with y; pass `predict` too")
        self.function = function
        self._metrics = dict(metrics or {})
        self.predict = predict
        self.target: Target = target
        self._initial = np.array(initial, dtype=np.float32)
        if self._initial.ndim != 1 or not self._initial.size:
            shape = self._initial.shape
            raise UserError(
                f"initial must be a flat vector of parameters, not of shape {shape}"
            )

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "function")

    @property
    def parameters(self) -> int:
        return int(self._initial.size)

    @property
    def loss_description(self) -> str:
        return describe_function(self.function)

    def initial(self, seed: int) -> Float32:
        return self._initial.copy()

    def batch_gradient(self, w: Float32, table: Table, rows: Rows) -> tuple[float, Float32]:
        # Intermediate results may overflow and still be right, as in 1 / (1 + exp(-score)).
        with np.errstate(over="ignore"):
            loss, values = self.function(w, table.scaled(rows), table.y[rows])
        gradient = np.asarray(values, dtype=np.float32)
        if gradient.shape != w.shape:
            raise UserError(
                f"{self.name} returned a gradient of shape {gradient.shape}; "
                f"w has {w.shape}"
            )
        return float(loss), gradient

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        """Return the predictions of y, [samples, 1]; a class is its number."""
        if self.predict is None:
            return None
        predicted = self.predict(w, table.scaled(np.arange(len(table))))
        return np.asarray(predicted, np.float32).reshape(len(table), -1)

    def accuracy(self, w: Float32, table: Table) -> float | None:
        predicted = self.outputs(w, table)
        return None if predicted is None else float(np.mean(predicted[:, 0] == table.y))

    def _predict(self, w: Float32, table: Table) -> tuple[Float32, Float32]:
        predicted = self.outputs(w, table)
        assert predicted is not None  # metrics need `predict`
        return predicted[:, 0], table.y


def as_model(given: Any, *, device: str = "auto") -> Model:
    """Convert what the user passed as a model to a `Model`.

    Args:
      given: a `Model`; a PyTorch module or its class, which becomes a `TorchModel` with the
        default loss; or a function without arguments that returns one of these.
      device: device of PyTorch for a module.
    """
    result = given
    if callable(given) and not _is_model(given) and not _is_module(given):
        require_no_arguments(given)
        with TORCH_RANDOM_LOCK:  # the function may seed PyTorch
            result = given()
    if _is_model(result):
        return _complete(result)
    if _is_module(result):
        from fedbudget.models.torch.model import TorchModel

        return TorchModel(given, device=device)
    kind = type(result).__name__
    if hasattr(result, "get_params") and hasattr(result, "fit"):
        raise UserError(
            f"`model` {kind} is an estimator of scikit-learn, whose `fit` cannot be split "
            "into local updates: use softmax (logistic regression), svm, linear, mlp or "
            "kmeans, or a PyTorch module; FedClassifier, FedRegressor and FedKMeans have "
            "the interface of scikit-learn"
        )
    raise UserError(f"`model` must be a name, a PyTorch module or a model, not a {kind}")


def load_model(reference: str, *, device: str = "auto") -> Model:
    """Load a model from a Python file.

    Args:
      reference: file and name, such as `net.py:Net`.
      device: device of PyTorch for a module.
    """
    given = python_file.load(reference)
    with as_user_error(f"{reference} cannot be created"):
        try:
            return as_model(given, device=device)
        except UserError as error:
            raise UserError(f"{reference}: {error}") from None


def _is_model(given: Any) -> bool:
    return not isinstance(given, type) and all(
        hasattr(given, name) for name in ("descend", "losses", "parameters")
    )


def _complete(given: Any) -> Model:
    """Return the model; raise a `UserError` if it lacks a part of `Model`."""
    required = [name for name in vars(Model) if not name.startswith("_")]
    missing = [name for name in required if not hasattr(given, name)]
    if missing:
        raise UserError(
            f"`model` {type(given).__name__} has no {', '.join(missing)}; "
            "fedbudget.models.Model describes them"
        )
    return given  # type: ignore[no-any-return]


def _is_module(given: Any) -> bool:
    """Return whether this is a PyTorch module or its class, without importing PyTorch."""
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", None)
    if module is None:
        return False
    return isinstance(given, module) or (
        isinstance(given, type) and issubclass(given, module)
    )
