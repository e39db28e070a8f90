"""Reads a `.npz`: arrays `x` [samples, ...], `y` [samples] where there is something to predict, `x_test`, `y_test`."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.columns import Columns, refuse_nan
from fedbudget.errors import UserError


def read_npz(path: Path) -> tuple[Columns, Columns | None]:
    """The samples to train on, and those to test on where the file has some. Nothing pickled is ever loaded."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not an .npz file; numpy.savez(path, x=..., y=...) writes one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {
                name: np.asarray(archive[name]) for name in archive.files if name in ("x", "y", "x_test", "y_test")
            }
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
    if x.dtype not in (np.uint8, np.float32, np.float64):
        x = x.astype(np.float32)
    if x.dtype != np.uint8:
        refuse_nan(name, x.view(), "sample")  # type: ignore[arg-type]
    if y is None:
        return Columns(x, shape=shape)
    if y.shape != (len(x),):
        raise UserError(f"{name}: y has shape {y.shape}, but x has {len(x)} samples")
    if y.dtype.kind in "US":
        return Columns(x, words=y.astype(np.str_), shape=shape)
    if y.dtype.kind not in "iufb":
        raise UserError(f"{name}: y must be numbers or words, not {y.dtype}")
    numbers = y.astype(np.float64)
    refuse_nan(name, numbers, "the target of sample")
    return Columns(x, numbers, shape=shape)
