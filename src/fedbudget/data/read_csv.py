"""Reads a `.csv`: a header line, then numbers; the target is the last column, or the one named, and may hold words."""

import csv
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.data.columns import Columns
from fedbudget.errors import UserError


def read_csv(path: Path, target: str | None = None) -> Columns:
    """The samples of a file; an error names the row, as an editor counts them, and the column."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return parse_csv(file, path, target)


def parse_csv(text: Iterable[str], path: Path, target: str | None = None, *, without: tuple[str, ...] = ()) -> Columns:
    """The samples in the lines of a file.

    Args:
      path: what to call it in errors.
      without: columns that are left out.
    """
    lines = csv.reader(text)
    header = [name.strip() for name in next(lines, [])]
    if len(header) < 2:
        raise UserError(f"{path}: needs a header line with at least one feature and the target")
    if target is not None and target not in header:
        raise UserError(f"{path} has no column {target!r}; it has {', '.join(header)}")
    where = header.index(target) if target is not None else len(header) - 1
    chosen = [(index, name) for index, name in enumerate(header) if index != where and name not in without]
    features: list[list[float]] = []
    targets: list[str] = []
    rows: list[int] = []
    for fields in lines:
        if not fields:
            continue
        texts = _texts(path, lines.line_num, header, fields)
        targets.append(texts[where])
        rows.append(lines.line_num)
        features.append([_number(path, lines.line_num, name, texts[index]) for index, name in chosen])
    if not features:
        raise UserError(f"{path} has a header but no rows")
    return _columns(path, np.array(features), targets, rows)


def _texts(path: Path, row: int, header: list[str], fields: list[str]) -> list[str]:
    if len(fields) != len(header):
        raise UserError(f"{path}, row {row}: {len(fields)} fields, but the header has {len(header)}")
    texts = [text.strip() for text in fields]
    if "" in texts:
        raise UserError(f"{path}, row {row}: the value of {header[texts.index('')]} is missing")
    return texts


def _number(path: Path, row: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{path}, row {row}: {text!r} in column {column} is not a number") from None
    if not math.isfinite(value):
        raise UserError(f"{path}, row {row}: {text} in column {column} is not finite")
    return value


def _columns(path: Path, x: Float64, targets: list[str], rows: list[int]) -> Columns:
    try:
        numbers = np.array([float(text) for text in targets])
    except ValueError:
        return Columns(x, words=np.array(targets))
    for row, value in zip(rows, numbers, strict=True):
        if not math.isfinite(value):
            raise UserError(f"{path}, row {row}: the target is not finite")
    return Columns(x, numbers)
