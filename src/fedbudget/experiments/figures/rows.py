"""The rows of a sweep's results, as plain dictionaries, and what is asked of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]
Rows = Sequence[Row]


def where(rows: Rows, **values: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def distinct(rows: Rows, name: str) -> list[Any]:
    """The values of a column, each once, in the order of their first row."""
    return list(dict.fromkeys(row[name] for row in rows if row[name] is not None))


def mean(rows: Rows, name: str) -> float:
    """The mean of a column over the rows that have a value in it; NaN where none has."""
    values = [row[name] for row in rows if row[name] is not None]
    return float(np.mean(values)) if values else float("nan")


def means(rows: Rows, over: str, values: Iterable[Any], name: str) -> list[float]:
    """The mean of a column for each value of another."""
    return [mean(where(rows, **{over: value}), name) for value in values]
