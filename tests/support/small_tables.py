"""Small tables with two features and a class, named kind."""

import csv
from pathlib import Path

ONE = [(float(i), 10.0 * i, "red" if i % 2 else "blue") for i in range(12)]


def write(path: Path, rows: list[tuple[float, float, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("a", "b", "kind"), *rows])
    return path
