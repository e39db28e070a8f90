"""Small datasets, for many quick runs: three tables that come with scikit-learn, and images that are made smaller.

Which samples are tested on is the same everywhere and always. Tables are standardised by what is trained on.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedbudget.data import images
from fedbudget.data.dataset import Dataset, Part
from fedbudget.errors import needing

_TEST_SHARE = 5  # one in so many
_TRAIN, _TEST, _SIDE = 5000, 2000, 14


def breast_cancer(_: Path | None = None) -> Dataset:
    """569 patients, each with 30 measurements of the cells of a tumour, which is malignant or benign."""
    return _table("breast-cancer", "load_breast_cancer")


def diabetes(_: Path | None = None) -> Dataset:
    """442 patients, each with ten figures, to predict how far their diabetes has come a year later."""
    return _table("diabetes", "load_diabetes")


def wine(_: Path | None = None) -> Dataset:
    """178 wines of three growers, each with 13 measurements."""
    return _table("wine", "load_wine")


def mnist_small(data_dir: Path | None) -> Dataset:
    """5,000 and 2,000 of MNIST's images, with the means of 2x2 pixels."""
    return _smaller(images.mnist(data_dir), "mnist-small")


def fashion_mnist_small(data_dir: Path | None) -> Dataset:
    """The same of Fashion-MNIST."""
    return _smaller(images.fashion_mnist(data_dir), "fashion-mnist-small")


def _table(name: str, loader: str) -> Dataset:
    with needing(f"{name}, which comes with scikit-learn,"):
        from sklearn import datasets
    found = getattr(datasets, loader)()
    classes = tuple(map(str, getattr(found, "target_names", ())))
    labels = found.target.astype(np.int64) if classes else None
    everything = Part(found.data, labels, found.target.astype(np.float64))
    order = np.random.default_rng(0).permutation(len(everything))
    test, train = np.split(order, [len(order) // _TEST_SHARE])
    return Dataset(name, everything.rows(train), everything.rows(test), classes).standardised()


def _smaller(dataset: Dataset, name: str) -> Dataset:
    rng = np.random.default_rng(0)

    def part(full: Part, size: int) -> Part:
        rows = np.sort(rng.choice(len(full), min(size, len(full)), replace=False))
        pixels = np.asarray(full.x[rows]).reshape(-1, _SIDE, 2, _SIDE, 2).astype(np.float32).mean(axis=(2, 4))
        return replace(full.rows(rows), x=pixels.round().astype(np.uint8).reshape(len(rows), -1))

    train = part(dataset.train, _TRAIN)
    test = None if dataset.test is None else part(dataset.test, _TEST)
    return replace(dataset, name=name, train=train, test=test, shape=(1, _SIDE, _SIDE))
