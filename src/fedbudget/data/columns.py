"""Samples as arrays, and the cells of a text column.

- Arrays from a `.npz` file or from Python are checked and flattened, not interpreted. A
  `.npz` has the arrays `x` [samples, ...] and `y` [samples], and optionally `x_test` and
  `y_test`.
- A cell is missing if it is empty or contains one of the usual markers, such as `NA`. A
  column holds numbers if at least half of its values are numbers. The other values then
  count as mistakes.
"""

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Flags, Float64, Int64, Samples
from fedbudget.errors import UserError

MISSING = frozenset(
    {"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "nat", "null", "nil", "?", "-", "."}
)
"""Markers of a missing value, in any case. `None` is one too, but `none` may be a word."""

_EXACT = 2**24  # float32 represents whole numbers up to this exactly

_DATES = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ]\S.*)?"  # 2024-05-31, with or without a time
    r"|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([T ]\S.*)?"  # 31.05.2024, 5/31/24
    r"|\d{1,2}[- ][A-Za-z]{3,9}\.?[-, ]+(\d{4}|\d{2})(\s.*)?"  # 31 May 2024
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}(\s.*)?"  # May 31, 2024
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?"  # a time of day
)


@dataclass(frozen=True)
class Columns:
    """Samples of one file or table.

    Args:
      x: features, [samples, features].
      targets: numbers or texts, [samples]; None without targets.
      shape: of one sample's features before flattening; empty if they were flat.
      integers: features were whole numbers, but not pixels.
    """

    x: Samples
    targets: Float64 | NDArray[np.str_] | None = None
    shape: tuple[int, ...] = ()
    integers: bool = False

    def rows(self, chosen: Int64) -> "Columns":
        """Return the chosen samples."""
        targets = None if self.targets is None else self.targets[chosen]
        return replace(self, x=self.x[chosen], targets=targets)

    @property
    def numbers(self) -> Float64 | None:
        """The targets if they are numbers."""
        numeric = self.targets is not None and self.targets.dtype.kind == "f"
        return cast(Float64, self.targets) if numeric else None

    @property
    def class_names(self) -> list[str] | None:
        """The target of each sample as a class name."""
        if self.numbers is not None:
            return list(map(class_name, self.numbers))
        return None if self.targets is None else list(map(str, self.targets))


def class_name(number: float) -> str:
    """Return a whole number as a class name; large ones keep all their digits."""
    return f"{number:.15g}"


def class_numbers(name: str, classes: Sequence[str], labels: Sequence[str]) -> Int64:
    """Return the index of each label in `classes`; refuse other labels.

    Args:
      name: of the data, for errors.
    """
    number = {label: index for index, label in enumerate(classes)}
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise UserError(f"{name}: class {unknown[0]!r} is not one of {', '.join(classes)}")
    return np.array([number[label] for label in labels], np.int64)


def read_npz(path: Path) -> tuple[Columns, Columns | None]:
    """Read the training samples, and the test samples if there are any; never unpickles."""
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path} is not an .npz file; numpy.savez(path, x=..., y=...) writes one"
        )
    damaged = (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = [name for name in ("x", "y", "x_test", "y_test") if name in archive]
            arrays = {name: np.asarray(archive[name]) for name in names}
    except damaged as error:
        raise UserError(f"{path} is not a readable .npz file: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if "x" not in arrays:
        raise UserError(f"{path} has no array named x")

    test = None
    if "x_test" in arrays:
        test = check_arrays(str(path), arrays["x_test"], arrays.get("y_test"))
    return check_arrays(str(path), arrays["x"], arrays.get("y")), test


def check_arrays(
    name: str, x: NDArray[np.generic], y: NDArray[np.generic] | None
) -> Columns:
    """Check features [samples, ...] and targets [samples], and flatten the features.

    Args:
      name: of the data, for errors.
    """
    if x.ndim < 2 or not x.size:
        raise UserError(f"{name}: features must be [samples, ...], not of shape {x.shape}")
    x = _without_objects(x)
    if x.dtype.kind not in "iufb":
        raise UserError(f"{name}: features must be numbers, not {x.dtype}")
    shape = x.shape[1:] if x.ndim > 2 else ()
    x = x.reshape(len(x), -1)
    integers = (
        x.dtype.kind in "iu" and x.dtype != np.uint8 and bool(np.abs(x).max() <= _EXACT)
    )
    if x.dtype not in (np.uint8, np.float32, np.float64):
        x = x.astype(np.float32)
    _require_finite(name, x, "sample")

    columns = Columns(x, None, shape, integers)
    if y is None:
        return columns
    if y.shape == (len(x), 1):
        raise UserError(f"{name}: y has shape {y.shape}; pass y.ravel(), [samples]")
    if y.shape != (len(x),):
        raise UserError(f"{name}: y has shape {y.shape}, but x has {len(x)} samples")
    y = _without_objects(y)
    if y.dtype.kind in "US":
        return replace(columns, targets=y.astype(np.str_))
    if y.dtype.kind not in "iufb":
        raise UserError(f"{name}: y must be numbers or text, not {y.dtype}")
    numbers = y.astype(np.float64)
    _require_finite(name, numbers, "the target of sample")
    return replace(columns, targets=numbers)


def _without_objects(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return Python objects as an array of texts or numbers if all of them are."""
    if values.dtype.kind != "O":
        return values
    if all(isinstance(each, str) for each in values.flat):
        return values.astype(np.str_)
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return values


def _require_finite(name: str, values: Samples, what: str) -> None:
    """Refuse NaN and infinity in values [rows, ...]; the error names the first such row."""
    if values.dtype.kind != "f":
        return
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(bad):
        raise UserError(
            f"{name}: {what} {bad[0]} is not finite (NaN or infinite); "
            f"{len(bad)} of {len(values)} samples are affected"
        )


@dataclass(frozen=True)
class ParsedCells:
    """The cells of one column.

    Args:
      numbers: the cells that are numbers, NaN elsewhere, [cells].
      words: counts of the texts that are neither numbers nor missing.
      missing: which cells are missing, [cells].
    """

    numbers: Float64
    words: Counter[str]
    missing: Flags

    @property
    def are_numbers(self) -> bool:
        """Whether at least half of the values are numbers; true if there are no values."""
        present = len(self.numbers) - int(self.missing.sum())
        return present >= 2 * self.words.total()


def parse_cells(texts: Sequence[str], markers: Collection[str] = ()) -> ParsedCells:
    """Classify each cell; texts must be stripped of blanks.

    Args:
      markers: further markers of a missing value, in exactly this spelling.
    """
    if markers:
        texts = ["" if text in markers else text for text in texts]
    try:
        numbers = np.array([float(text) for text in texts], np.float64)
        return ParsedCells(numbers, Counter(), np.isnan(numbers))
    except ValueError:
        pass
    numbers = np.full(len(texts), np.nan)
    words = Counter[str]()
    missing = np.array([is_missing(text) for text in texts], np.bool_)
    for index in np.flatnonzero(~missing).tolist():
        try:
            numbers[index] = float(texts[index])
        except ValueError:
            words[texts[index]] += 1
    return ParsedCells(numbers, words, missing)


def is_missing(text: str) -> bool:
    """Return whether a cell's text marks a missing value.

    >>> [is_missing(text) for text in ("", "NaN", "?", "None", "none", "0")]
    [True, True, True, True, False, False]
    """
    return text.lower() in MISSING or text == "None"


def looks_like_dates(words: Counter[str]) -> bool:
    """Return whether nine of ten texts could be dates or times of day.

    >>> looks_like_dates(Counter(["2024-05-31", "1/6/2024 12:30"]))
    True
    >>> looks_like_dates(Counter(["1-2 times", "May"]))
    False
    """
    dates = sum(count for text, count in words.items() if _DATES.fullmatch(text))
    return bool(words) and dates >= 0.9 * words.total()


def category_name(text: str) -> str:
    """Return a cell as a category name, with numbers and blanks in one spelling.

    >>> category_name("1.0"), category_name("1"), category_name("one")
    ('1', '1', 'one')
    """
    try:
        return class_name(float(text))
    except ValueError:
        return " ".join(text.split())
