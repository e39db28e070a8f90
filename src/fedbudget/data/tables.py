"""Reads samples from a `.csv` or a `.npz`: features, and targets where there are any; checked, but not yet interpreted.

A `.csv` has a header line, then numbers; the target is the last column, or the one named, and may hold words. A `.npz`
has arrays `x` [samples, ...], `y` [samples] where there is something to predict, `x_test` and `y_test`.
"""

import csv
import math
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Samples
from fedbudget.errors import UserError

_EXACT = 2**24  # whole numbers up to this are what they are in float32


@dataclass(frozen=True)
class Columns:
    """Samples of one file.

    Args:
      x: features, [samples, features].
      numbers: targets that are numbers, [samples].
      words: targets that are words, [samples].
      shape: of one sample's features before they were made flat; nothing where they always were.
      integers: features were whole numbers, and no pixels.
    """

    x: Samples
    numbers: NDArray[np.float64] | None = None
    words: NDArray[np.str_] | None = None
    shape: tuple[int, ...] = ()
    integers: bool = False

    def none(self) -> "Columns":
        """No samples, of the same kind."""
        numbers, words = (None if targets is None else targets[:0] for targets in (self.numbers, self.words))
        return Columns(self.x[:0], numbers, words, self.shape, self.integers)  # type: ignore[arg-type]

    @property
    def class_names(self) -> list[str] | None:
        """The target of each sample as the name of a class."""
        if self.words is not None:
            return [str(word) for word in self.words]
        return None if self.numbers is None else [class_name(number) for number in self.numbers]


def class_name(number: float) -> str:
    """A whole number as the name of a class; large ones keep all their digits."""
    return f"{number:.15g}"


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
    targets: dict[int, str] = {}  # by row
    for fields in lines:
        if not fields:
            continue
        row = f"{path}, row {lines.line_num}"
        if len(fields) != len(header):
            raise UserError(f"{row}: {len(fields)} fields, but the header has {len(header)}")
        texts = [text.strip() for text in fields]
        if "" in texts:
            raise UserError(f"{row}: the value of {header[texts.index('')]} is missing")
        targets[lines.line_num] = texts[where]
        features.append([_number(texts[index], row, name) for index, name in chosen])
    if not features:
        raise UserError(f"{path} has a header but no rows")
    try:
        numbers = np.array([float(text) for text in targets.values()])
    except ValueError:
        return Columns(np.array(features), words=np.array(list(targets.values())))
    for line, number in zip(targets, numbers, strict=True):
        if not math.isfinite(number):
            raise UserError(f"{path}, row {line}: the target is not finite")
    return Columns(np.array(features), numbers)


def _number(text: str, row: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{row}: {text!r} in column {column} is not a number") from None
    if not math.isfinite(value):
        raise UserError(f"{row}: {text} in column {column} is not finite")
    return value


def read_npz(path: Path) -> tuple[Columns, Columns | None]:
    """The samples to train on, and those to test on where the file has some. Nothing pickled is ever loaded."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not an .npz file; numpy.savez(path, x=..., y=...) writes one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: np.asarray(archive[name]) for name in ("x", "y", "x_test", "y_test") if name in archive}
    except (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not a readable .npz file: {error}") from None
    if "x" not in arrays:
        raise UserError(f"{path} has no array named x")
    test = checked(str(path), arrays["x_test"], arrays.get("y_test")) if "x_test" in arrays else None
    return checked(str(path), arrays["x"], arrays.get("y")), test


def checked(name: str, x: NDArray[np.generic], y: NDArray[np.generic] | None) -> Columns:
    """Features [samples, ...] and targets [samples], if they are fit for use."""
    if x.ndim < 2 or not x.size:
        raise UserError(f"{name}: features must be [samples, ...], not of shape {x.shape}")
    if x.dtype.kind not in "iufb":
        raise UserError(f"{name}: features must be numbers, not {x.dtype}")
    shape = x.shape[1:] if x.ndim > 2 else ()
    x = x.reshape(len(x), -1)
    integers = x.dtype.kind in "iu" and x.dtype != np.uint8 and bool(np.abs(x).max() <= _EXACT)
    if x.dtype not in (np.uint8, np.float32, np.float64):
        x = x.astype(np.float32)
    _refuse_nan(name, x, "sample")
    if y is None:
        return Columns(x, shape=shape, integers=integers)
    if y.shape != (len(x),):
        raise UserError(f"{name}: y has shape {y.shape}, but x has {len(x)} samples")
    if y.dtype.kind in "US":
        return Columns(x, words=y.astype(np.str_), shape=shape, integers=integers)
    if y.dtype.kind not in "iufb":
        raise UserError(f"{name}: y must be numbers or words, not {y.dtype}")
    numbers = y.astype(np.float64)
    _refuse_nan(name, numbers, "the target of sample")
    return Columns(x, numbers, shape=shape, integers=integers)


def _refuse_nan(name: str, values: Samples, what: str) -> None:
    """Values [rows, ...] must be finite; the error names the first row that is not."""
    if values.dtype.kind != "f":
        return
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(bad):
        raise UserError(f"{name}: {what} {bad[0]} is not finite (NaN or infinite); {len(bad)} in all are not")
