"""The models that go by a name."""

from collections.abc import Callable, Mapping

from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError
from fedbudget.models.base import KernelModel
from fedbudget.models.kmeans import KMeans
from fedbudget.models.linear import LinearRegression
from fedbudget.models.softmax import Softmax
from fedbudget.models.squared_svm import SquaredSvm

Build = Callable[[Dataset, int], KernelModel]
"""(dataset, clusters) to a model that fits its features and classes."""

MODELS: Mapping[str, Build] = {
    "svm": lambda dataset, _: SquaredSvm(dataset.features),
    "linear": lambda dataset, _: LinearRegression(dataset.features),
    "kmeans": lambda dataset, clusters: KMeans(dataset.features, clusters),
    "softmax": lambda dataset, _: Softmax(dataset.features, max(1, len(dataset.classes))),
}


def build(name: str, dataset: Dataset, *, clusters: int = 4) -> KernelModel:
    """A model by its name, of the size that the dataset needs."""
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}; use one of {', '.join(MODELS)}")
    if clusters < 1:
        raise UserError(f"clusters must be at least 1, not {clusters}")
    return MODELS[name](dataset, clusters)
