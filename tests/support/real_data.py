"""The paper's real datasets, for the tests that want them; where they are not at hand,
those tests are skipped.
"""

import os
from pathlib import Path

import pytest

from fedbudget.data.published import dataset_named, files_in

_BESIDE_THE_PROJECT = Path(__file__).parents[3] / "shared" / "data"
PLACES = [
    Path(place)
    for place in (os.environ.get("FEDBUDGET_DATA"), _BESIDE_THE_PROJECT)
    if place
]


def folder_with(*names: str) -> Path:
    """The folder of data that has these datasets; skips the test when there is none."""
    for place in PLACES:
        if all(files_in(dataset_named(name), place) for name in names):
            return place
    pytest.skip(
        f"needs the real {' and '.join(names)}: set FEDBUDGET_DATA to a folder that has it"
    )
