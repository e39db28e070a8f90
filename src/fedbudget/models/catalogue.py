"""The models that go by a name."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, unknown
from fedbudget.models.base import Model
from fedbudget.models.kmeans import KMeans
from fedbudget.models.linear import LinearRegression
from fedbudget.models.softmax import Softmax
from fedbudget.models.squared_svm import SquaredSvm

Build = Callable[[Dataset, int, str], Model]
"""(dataset, clusters, device) to a model that fits its features and classes."""


def _cnn(dataset: Dataset, _: int, device: str) -> Model:
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


def _mlp(dataset: Dataset, _: int, device: str) -> Model:
    require_torch("`model` mlp")
    from fedbudget.models.mlp import mlp
    from fedbudget.models.torch_model import TorchModel

    features, classes = dataset.features, max(1, len(dataset.classes))
    return TorchModel(lambda: mlp(features, classes), name="mlp", device=device)


MODELS: Mapping[str, Build] = {
    "svm": lambda dataset, *_: SquaredSvm(dataset.features),
    "linear": lambda dataset, *_: LinearRegression(dataset.features),
    "kmeans": lambda dataset, clusters, _: KMeans(dataset.features, clusters),
    "softmax": lambda dataset, *_: Softmax(dataset.features, max(1, len(dataset.classes))),
    "mlp": _mlp,
    "cnn": _cnn,
}


def build(name: str, dataset: Dataset, *, clusters: int = 4, device: str = "auto") -> Model:
    """A model by its name, of the size that the dataset needs."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if clusters < 1:
        raise UserError(f"clusters must be at least 1, not {clusters}")
    return MODELS[name](dataset, clusters, device)


def require_torch(what: str) -> None:
    """Says which extra to install where PyTorch is missing."""
    if find_spec("torch") is None:
        raise UserError(f"{what} needs PyTorch; install it with: pip install 'fedbudget[torch]'")
