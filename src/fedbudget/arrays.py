"""Array types of the project. Docstrings give shapes, such as [nodes, parameters]."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32: TypeAlias = NDArray[np.float32]
"""Parameters and gradients."""

Float64: TypeAlias = NDArray[np.float64]
"""Losses, costs, estimates: everything that is summed."""

Int64: TypeAlias = NDArray[np.int64]
"""Sizes and node numbers."""

Int32: TypeAlias = NDArray[np.int32]
"""Row numbers of a table."""

Samples: TypeAlias = NDArray[Any]
"""Data as stored: uint8, float32 or float64."""

Flags: TypeAlias = NDArray[np.bool_]
"""One flag per node."""

UInt64: TypeAlias = NDArray[np.uint64]
"""Numbers that are added modulo 2^64."""


def require_shape(values: NDArray[Any], *shape: int) -> None:
    """Raise ValueError unless an array that was read from a file has this shape."""
    if values.shape != shape:
        raise ValueError(f"an array has the shape {values.shape}, not {shape}")
