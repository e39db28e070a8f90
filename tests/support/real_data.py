"""The paper's real datasets; tests that need them are skipped if they are missing."""

import os
from pathlib import Path

import pytest

from fedbudget.data.published import dataset_named, files_in

_NEXT_TO_PROJECT = Path(__file__).parents[3] / "shared" / "data"
FOLDERS = [
    Path(folder)
    for folder in (os.environ.get("FEDBUDGET_DATA"), _NEXT_TO_PROJECT)
    if folder
]


def folder_with(*names: str) -> Path:
    """Return the data folder with these datasets; skip the test if there is none."""
    for folder in FOLDERS:
        if all(files_in(dataset_named(name), folder) for name in names):
            return folder
    pytest.skip(f"needs {' and '.join(names)}: set FEDBUDGET_DATA to their folder")
