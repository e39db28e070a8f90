"""Golden runs: reference settings reproduce the same model and rounds, bit for bit.

cells.py has the settings and hashes.json the reference hashes. running.py lists the fields
of a record that are not hashed, and stored.py the environment of the hashes.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from golden import stored
from golden.cell import Cell
from golden.cells import CELLS
from golden.running import run

pytestmark = [
    # Ray leaves sockets and processes to the garbage collector.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]
BY_NAME = {cell.name: cell for cell in CELLS}
EQUAL = [cell for cell in CELLS if cell.same_as or cell.same_w_as]


def parameter(cell: Cell) -> Any:
    marks = [] if cell.quick else [pytest.mark.slow]
    for package in ("ray", "flwr"):
        if package in cell.needs:
            group = {"ray": "ray", "flwr": "flower"}[package]
            marks.append(pytest.mark.xdist_group(group))
    return pytest.param(cell, id=cell.name, marks=marks)


@pytest.mark.parametrize("cell", [parameter(cell) for cell in CELLS])
def test_same_bits(cell: Cell, tmp_path: Path) -> None:
    """The run of a cell has the stored hashes."""
    for package in cell.needs:
        if find_spec(package) is None:
            pytest.skip(f"{cell.name} needs {package}")
    reference = stored.read()
    if differing := stored.difference(cell, reference):
        pytest.skip(f"the hashes hold for another environment: {differing}")
    expected = reference["runs"][cell.name]
    found = vars(run(cell, tmp_path))
    wrong = [name for name in ("w", "rounds") if found[name] != expected[name]]
    if wrong:
        pytest.fail(message(cell, wrong, expected, found, tmp_path), pytrace=False)


def message(
    cell: Cell,
    wrong: list[str],
    expected: dict[str, str],
    found: dict[str, str],
    folder: Path,
) -> str:
    """The failure message: the differing hashes, and how to inspect the run."""
    lines = [f"golden run {cell.name}: {' and '.join(wrong)} differ"]
    lines += [f"  {name}: {found[name]}, not {expected[name]}" for name in wrong]
    lines += [
        f"The run is in {folder / 'run'}.",
        f"Its hashed records are in {folder / 'records.jsonl'}.",
        "To compare, run this test with another --basetemp in a checkout of the last",
        "good commit, and diff the two files records.jsonl.",
        "If the change is intended, see tests/golden/regenerate.py.",
    ]
    return "\n".join(lines)


def test_cell_names_are_unique() -> None:
    """No two cells share a name, and hashes.json has exactly these."""
    assert len(BY_NAME) == len(CELLS)
    assert list(stored.read()["runs"]) == [cell.name for cell in CELLS]


@pytest.mark.parametrize("cell", EQUAL, ids=[cell.name for cell in EQUAL])
def test_equal_cells(cell: Cell) -> None:
    """The stored hashes of equivalent runs are equal."""
    runs = stored.read()["runs"]
    if cell.same_as is not None:
        assert runs[cell.name] == runs[cell.same_as]
    if cell.same_w_as is not None:
        assert runs[cell.name]["w"] == runs[cell.same_w_as]["w"]
