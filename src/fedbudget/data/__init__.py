"""Datasets, and how they are distributed over nodes."""

from pathlib import Path

from fedbudget.data import files
from fedbudget.data.builtin import DATASETS
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.read_tables import PLAIN
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError, unknown


def load(
    name: str,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.2,
    data_dir: str | Path | None = None,
    standardise: bool | None = None,
) -> Dataset:
    """Load a dataset by its name (see builtin.py) or by its path (see files.py).

    Args:
      name: the name, or the path of a `.csv`, a `.npz` or a folder.
      options, test_share, standardise: only for your own data, as in `files.load`.
      data_dir: the folder to search first for a named dataset.
    """
    if name in DATASETS:
        if standardise is not None:
            raise UserError(f"`standardise` is for your own data; {name} is used unchanged")
        if options.classes is not None:
            raise UserError(f"`classes` is for your own data; {name} has its own classes")
        options.require_unused(name)
        return DATASETS[name](None if data_dir is None else Path(data_dir))
    path = Path(name)
    if path.suffix in (".csv", ".npz") or path.is_dir():
        return files.load(path, options, test_share=test_share, standardise=standardise)
    use = f"use {', '.join(DATASETS)}, or a path to a .csv, a .npz or a folder"
    raise unknown("dataset", name, DATASETS, use)


__all__ = ["DATASETS", "Dataset", "Part", "load"]
