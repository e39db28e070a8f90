"""Models that fedbudget can train. `TorchModel` needs the extra `fedbudget[torch]`."""

from typing import TYPE_CHECKING, Any

from fedbudget.models.base import Model, loss_over
from fedbudget.models.builtin import KMeans, LinearRegression, Softmax, SquaredSvm
from fedbudget.models.own import FunctionModel

if TYPE_CHECKING:
    from fedbudget.models.torch.model import TorchModel

__all__ = [
    "FunctionModel",
    "KMeans",
    "LinearRegression",
    "Model",
    "Softmax",
    "SquaredSvm",
    "TorchModel",
    "loss_over",
]


def __getattr__(name: str) -> Any:
    """Import `TorchModel` at its first use, so that other models work without PyTorch."""
    if name != "TorchModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedbudget.models.catalogue import require_torch

    require_torch("TorchModel")
    from fedbudget.models.torch.model import TorchModel

    return TorchModel
