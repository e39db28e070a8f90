"""Rewrite hashes.json from new golden runs.

    PYTHONPATH=tests python -m golden.regenerate            all cells
    PYTHONPATH=tests python -m golden.regenerate ray own    cells with such names
    PYTHONPATH=tests python -m golden.regenerate --check    compare, write nothing

Run it only in a commit that changes the method on purpose, and explain the change in the
commit message.
A failing golden test in any other commit is a bug in that commit.
"""

import sys
import tempfile
import time
from pathlib import Path

from golden import stored
from golden.cell import Cell
from golden.cells import CELLS
from golden.running import Hashes, run


def main(arguments: list[str]) -> int:
    """Run the cells one by one and return the exit code."""
    check = "--check" in arguments
    parts = [each for each in arguments if each != "--check"]
    known: dict[str, Hashes] = {}
    if stored.PATH.exists():
        reference = stored.read()
        known = {name: Hashes(**each) for name, each in reference["runs"].items()}
        if parts and reference["environment"] != stored.environment():
            print("The environment differs from the stored one; regenerate all cells.")
            return 2
    differing = 0
    for cell in CELLS:
        if parts and not any(part in cell.name for part in parts):
            continue
        began = time.perf_counter()
        found = _found(cell)
        same = known.get(cell.name) == found
        differing += not same
        seconds = time.perf_counter() - began
        print(f"{seconds:7.2f} s  {'same' if same else 'new '}  {cell.name}", flush=True)
        known[cell.name] = found
    if check:
        return int(differing > 0)
    stored.write({cell.name: known[cell.name] for cell in CELLS if cell.name in known})
    return 0


def _found(cell: Cell) -> Hashes:
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        return run(cell, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
