"""Samples as arrays, from a `.npz` or from Python: features, and targets where there are any; checked, not interpreted.

A `.npz` has arrays `x` [samples, ...], `y` [samples] where there is something to predict, `x_test` and `y_test`.
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Samples
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
