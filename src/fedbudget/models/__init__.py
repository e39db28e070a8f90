"""What is trained. `TorchModel` needs the extra `fedbudget[torch]`, and is imported when it is asked for."""

from typing import TYPE_CHECKING, Any

from fedbudget.models.base import Model, loss_over
from fedbudget.models.function import FunctionModel
from fedbudget.models.kmeans import KMeans
from fedbudget.models.linear import LinearRegression
from fedbudget.models.softmax import Softmax
from fedbudget.models.squared_svm import SquaredSvm

if TYPE_CHECKING:
    from fedbudget.models.torch_model import TorchModel

__all__ = ["FunctionModel", "KMeans", "LinearRegression", "Model", "Softmax", "SquaredSvm", "TorchModel", "loss_over"]


def __getattr__(name: str) -> Any:
    if name != "TorchModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedbudget.models.catalogue import require_torch

    require_torch("TorchModel")
    from fedbudget.models.torch_model import TorchModel

    return TorchModel
