"""What is trained on: datasets, and how they are given to nodes."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fedbudget.data import digits, files
from fedbudget.data.dataset import Dataset, Part
from fedbudget.errors import UserError

DATASETS: Mapping[str, Callable[[], Dataset]] = {"digits": digits.load}
"""The datasets that go by a name."""


def load(name: str, *, target: str | None = None, test_share: float = 0.2) -> Dataset:
    """A dataset by its name, or the user's own from a path; see files.py."""
    if name in DATASETS:
        return DATASETS[name]()
    if Path(name).suffix in (".csv", ".npz") or Path(name).is_dir():
        return files.load(Path(name), target=target, test_share=test_share)
    raise UserError(f"unknown dataset {name!r}; use {', '.join(DATASETS)}, or a path to a .csv, a .npz or a folder")


__all__ = ["DATASETS", "Dataset", "Part", "load"]
