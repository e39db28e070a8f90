"""Samples as arrays, from a `.npz` or from Python: features, and targets where there are any; checked, not interpreted.

A `.npz` has arrays `x` [samples, ...], `y` [samples] where there is something to predict, `x_test` and `y_test`.

What is in the cells of one column, as texts: numbers, words, dates, and nothing.

A cell is missing where it is empty, or says so in one of the ways that programs write it. A column is of numbers when
at least half of the cells that are there are; then the others are mistakes, which are counted and not taken for words.
"""

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float64, Samples
from fedbudget.errors import UserError

_EXACT = 2**24  # whole numbers up to this are what they are in float32


@dataclass(frozen=True)
class Columns:
    """Samples of one file or table.

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
        numbers, words = (
            None if targets is None else targets[:0]
            for targets in (self.numbers, self.words)
        )
        return Columns(self.x[:0], numbers, words, self.shape, self.integers)  # type: ignore[arg-type]

    @property
    def class_names(self) -> list[str] | None:
        """The target of each sample as the name of a class."""
        if self.words is not None:
            return [str(word) for word in self.words]
        return (
            None
            if self.numbers is None
            else [class_name(number) for number in self.numbers]
        )


def class_name(number: float) -> str:
    """A whole number as the name of a class; large ones keep all their digits."""
    return f"{number:.15g}"


def read_npz(path: Path) -> tuple[Columns, Columns | None]:
    """The samples to train on, and those to test on where the file has some. Nothing pickled is ever loaded."""
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path} is not an .npz file; numpy.savez(path, x=..., y=...) writes one"
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {
                name: np.asarray(archive[name])
                for name in ("x", "y", "x_test", "y_test")
                if name in archive
            }
    except (
        ValueError,
        KeyError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise UserError(f"{path} is not a readable .npz file: {error}") from None
    if "x" not in arrays:
        raise UserError(f"{path} has no array named x")
    test = (
        checked(str(path), arrays["x_test"], arrays.get("y_test"))
        if "x_test" in arrays
        else None
    )
    return checked(str(path), arrays["x"], arrays.get("y")), test


def checked(name: str, x: NDArray[np.generic], y: NDArray[np.generic] | None) -> Columns:
    """Features [samples, ...] and targets [samples], if they are fit for use."""
    if x.ndim < 2 or not x.size:
        raise UserError(f"{name}: features must be [samples, ...], not of shape {x.shape}")
    if x.dtype.kind not in "iufb":
        raise UserError(f"{name}: features must be numbers, not {x.dtype}")
    shape = x.shape[1:] if x.ndim > 2 else ()
    x = x.reshape(len(x), -1)
    integers = (
        x.dtype.kind in "iu" and x.dtype != np.uint8 and bool(np.abs(x).max() <= _EXACT)
    )
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
        raise UserError(
            f"{name}: {what} {bad[0]} is not finite (NaN or infinite); {len(bad)} in all are not"
        )


MISSING = frozenset(
    {"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "nat", "null", "nil", "?", "-", "."}
)
"""Ways to write that a value is missing, whatever their case; and `None`, which in lower case may be a word."""

_DATES = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ]\S.*)?"  # 2024-05-31, with or without a time of day
    r"|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([T ]\S.*)?"  # 31.05.2024, 5/31/24
    r"|\d{1,2}[- ][A-Za-z]{3,9}\.?[-, ]+(\d{4}|\d{2})(\s.*)?"  # 31 May 2024
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}(\s.*)?"  # May 31, 2024
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?"  # a time of day
)


@dataclass(frozen=True)
class CellKinds:
    """What the cells of a column are.

    Args:
      numbers: the cells that are numbers, NaN elsewhere, [cells].
      words: how often each text is there that is neither a number nor missing.
      missing: which cells are, [cells].
    """

    numbers: Float64
    words: Counter[str]
    missing: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @property
    def are_numbers(self) -> bool:
        """Whether the column is one of numbers, mistakes aside; one without any value may be."""
        words = self.words.total()
        return len(self.numbers) - int(self.missing.sum()) - words >= words


def is_missing(text: str) -> bool:
    """
    >>> [is_missing(text) for text in ("", "NaN", "?", "None", "none", "0")]
    [True, True, True, True, False, False]
    """
    return text.lower() in MISSING or text == "None"


def looks_like_dates(words: Counter[str]) -> bool:
    """Whether nine of ten texts could be dates, or times of day.

    >>> looks_like_dates(Counter(["2024-05-31", "1/6/2024 12:30"])), looks_like_dates(Counter(["1-2 times", "May"]))
    (True, False)
    """
    dates = sum(count for text, count in words.items() if _DATES.fullmatch(text))
    return bool(words) and dates >= 0.9 * words.total()


def kinds_of(texts: Sequence[str]) -> CellKinds:
    """What each cell is; texts have no blanks around them."""
    try:
        numbers = np.array([float(text) for text in texts], np.float64)
        return CellKinds(numbers, Counter(), np.isnan(numbers))
    except ValueError:
        pass
    numbers = np.full(len(texts), np.nan)
    words = Counter[str]()
    missing = np.zeros(len(texts), np.bool_)
    for place, text in enumerate(texts):
        if is_missing(text):
            missing[place] = True
            continue
        try:
            numbers[place] = float(text)
        except ValueError:
            words[text] += 1
    return CellKinds(numbers, words, missing)


def category_name(text: str) -> str:
    """A cell as the name of a category: a number is the same however it is written, and so are blanks.

    >>> category_name("1.0"), category_name("1"), category_name("one")
    ('1', '1', 'one')
    """
    try:
        return class_name(float(text))
    except ValueError:
        return " ".join(text.split())
