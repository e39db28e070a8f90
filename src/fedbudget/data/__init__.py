"""What is trained on: datasets, and how they are given to nodes."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fedbudget.data import builtin, files
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.read_tables import PLAIN
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError, unknown

DATASETS: Mapping[str, Callable[[Path | None], Dataset]] = {
    "digits": builtin.digits,
    "mnist": builtin.mnist,
    "fashion-mnist": builtin.fashion_mnist,
    "cifar-10": builtin.cifar_10,
    "energy": builtin.energy,
    "user-knowledge": builtin.user_knowledge,
    "breast-cancer": builtin.breast_cancer,
    "diabetes": builtin.diabetes,
    "wine": builtin.wine,
    "mnist-small": builtin.mnist_small,
    "fashion-mnist-small": builtin.fashion_mnist_small,
}
"""The datasets that go by a name, from the folder of data that is given first."""


def load(
    name: str,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.2,
    data_dir: str | Path | None = None,
    standardise: bool | None = None,
) -> Dataset:
    """A dataset by its name (see find.py for where it is looked for), or the user's own from a path (see files.py)."""
    if name in DATASETS:
        if standardise is not None:
            raise UserError(
                f"`standardise` is for data of your own: {name} is used as it is"
            )
        if options.classes is not None:
            raise UserError(f"`classes` is for data of your own: those of {name} are known")
        options.require_none(name)
        return DATASETS[name](None if data_dir is None else Path(data_dir))
    if Path(name).suffix in (".csv", ".npz") or Path(name).is_dir():
        return files.load(
            Path(name), options, test_share=test_share, standardise=standardise
        )
    use = f"use {', '.join(DATASETS)}, or a path to a .csv, a .npz or a folder"
    raise unknown("dataset", name, DATASETS, use)


__all__ = ["DATASETS", "Dataset", "Part", "load"]
