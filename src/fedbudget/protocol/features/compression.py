"""Compression of vectors on the wire.

    none     raw little-endian float32
    16-bit   float16 with one power-of-two scale per block of 256 numbers, so scaling
    itself is
             exact. Relative error at most 2^-11, except for numbers of at most 2^-28 of
             their block's largest
    8-bit    int8, in units of 1/127 of the block's largest magnitude; error at most 1/254
    of it

All magnitudes of float32 are supported. Scales come first, then the numbers, all
little-endian. The last block may be short. Each row of a matrix has its own blocks, so the
result for one node does not depend on the other nodes sent with it.

A number that is not finite arrives as not finite, so the receiver sees that a node
diverged, and the other numbers of its block are unaffected. Compressed infinities and NaN
are not distinguished. A finite number arrives as finite: scales with which a number could
overflow are refused.

Differences are compressed: of w to the previous w, of the w_i to w, and of their mean to
w. A node adds the rounding error of the previous difference (`with_feedback`), so errors
do not accumulate. It then continues from the vector that the others receive (fleet.py).
The aggregator continues with the w that nodes receive.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32
from fedbudget.protocol.features.drift import DriftPart
from fedbudget.protocol.messages import Broadcast, Kind, LocalError, PeerError, Report

Compression = Kind | Literal["auto"]
"""Agreed compression; with auto, every broadcast states the kind."""
KINDS: tuple[Kind, ...] = get_args(Kind)

BLOCK = 256
"""Numbers per scale."""

_FLOAT = np.dtype("<f4")
_HALF = np.dtype("<f2")
_WIDTHS: dict[Kind, int] = {"none": 4, "16-bit": 2, "8-bit": 1}

_LARGEST_SCALES: dict[Kind, float] = {
    "16-bit": 2.0**112,
    "8-bit": float(np.finfo(np.float32).max),
}
"""Largest scales with which no number overflows."""

_LARGEST_HALF = np.float32(np.finfo(np.float16).max)
_EXPONENTS = (-126, 112)  # of float16 scales: smallest normal float32 to the largest scale
_NOT_FINITE = -128  # 8-bit code


def encoded_size(kind: Kind, count: int) -> int:
    """Return the number of bytes of `count` encoded numbers."""
    scales = 0 if kind == "none" else _FLOAT.itemsize * _scale_count(count)
    return _WIDTHS[kind] * count + scales


def raw(vector: Float32) -> memoryview:
    """Return the bytes of a vector without copying them."""
    return np.ascontiguousarray(vector, _FLOAT).reshape(-1).data.cast("B")


def saved_bytes(kind: Kind, rows: int, count: int) -> int:
    """Return the bytes that compression saves for `rows` vectors of `count` numbers."""
    return rows * (encoded_size("none", count) - encoded_size(kind, count))


class Quantized(NamedTuple):
    """Compressed vectors.

    Args:
      kind: the compression; not `none`.
      scales: scale of each block, [rows, blocks].
      numbers: numbers in units of their scale, [rows, n].
    """

    kind: Kind
    scales: Float32
    numbers: NDArray[Any]

    @property
    def values(self) -> Float32:
        """Return the decompressed vectors in new memory, [rows, n]."""
        with np.errstate(invalid="ignore"):  # NaN payloads from peers, and inf times 0
            values = self.numbers.astype(np.float32)
            if self.kind == "8-bit":
                values /= np.float32(127)  # first, so that no scale overflows
                values[self.numbers == _NOT_FINITE] = np.nan
            rows, count = values.shape
            whole = count - count % BLOCK
            blocks = values[:, :whole].reshape(rows, -1, BLOCK)
            scaled = blocks * self.scales[:, : whole // BLOCK, None]
            values[:, :whole] = scaled.reshape(rows, whole)
            if whole < count:
                values[:, whole:] *= self.scales[:, -1:]
        return values

    def to_bytes(self) -> bytes:
        return self.scales.astype(_FLOAT, copy=False).tobytes() + self.numbers.tobytes()


def quantize(kind: Kind, vectors: Float32) -> Quantized:
    """Compress vectors [rows, n]."""
    rows, count = vectors.shape
    blocks = _in_blocks(vectors)
    largest = np.abs(blocks).max(axis=2) if count else np.zeros((rows, 0), np.float32)
    if np.isfinite(largest).all():
        scales, numbers = _rounded(kind, blocks, largest)
    else:
        broken = ~np.isfinite(blocks)
        blocks = np.where(broken, np.float32(0), blocks)
        scales, numbers = _rounded(kind, blocks, np.abs(blocks).max(axis=2))
        numbers[broken] = np.nan if kind == "16-bit" else _NOT_FINITE
    return Quantized(kind, scales, numbers.reshape(rows, -1)[:, :count])


def encode(kind: Kind, vector: Float32) -> bytes:
    """Encode a vector [n], or the rows of a matrix [rows, n]."""
    if kind == "none":
        return bytes(raw(vector))
    return quantize(kind, np.atleast_2d(vector)).to_bytes()


def decode(kind: Kind, data: bytes | memoryview, count: int, rows: int = 1) -> Float32:
    """Decode `rows` vectors of `count` numbers into new memory, [rows * count].

    Raises:
      PeerError: the data have a wrong size or an invalid scale.
    """
    view = memoryview(data).cast("B")
    size = encoded_size(kind, count)
    if view.nbytes != rows * size:
        raise PeerError(
            f"{count} numbers ({kind}) take {size} bytes, not {view.nbytes / rows:g}"
        )
    if kind == "none":
        return np.frombuffer(view, _FLOAT).astype(np.float32)
    head = _FLOAT.itemsize * rows * _scale_count(count)
    scales = np.frombuffer(view[:head], _FLOAT).astype(np.float32).reshape(rows, -1)
    if not ((scales >= 0) & (scales <= _LARGEST_SCALES[kind])).all():
        raise PeerError(f"a {kind} scale is negative, not finite or too large")
    numbers = np.frombuffer(view[head:], _HALF if kind == "16-bit" else np.int8)
    return Quantized(kind, scales, numbers.reshape(rows, count)).values.reshape(-1)


def with_feedback(
    kind: Kind, differences: Float32, lost: Float32 | None
) -> tuple[Quantized, Float32]:
    """Compress differences [rows, n], corrected by the previous rounding errors.

    Errors that are not finite, such as those of a diverged node, are dropped. Otherwise
    the node could never send a finite vector again.

    Args:
      kind: the compression.
      differences: [rows, n].
      lost: previous rounding errors, [rows, n]; None at first.

    Returns:
      The compressed vectors, and the new rounding errors.
    """
    if lost is not None and lost.shape != differences.shape:
        raise LocalError(
            f"the shape of differences changed from {lost.shape} to {differences.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        exact = differences if lost is None else differences + lost
        sent = quantize(kind, exact)
        lost = exact - sent.values
    finite = np.asarray(np.isfinite(lost).all(axis=1))
    if not finite.all():
        lost = np.where(finite[:, None], lost, np.float32(0))
    return sent, lost


@dataclass(frozen=True)
class SentVectors:
    """Compressed vectors of the nodes' last reports.

    Args:
      lost: rounding errors of their w_i, [nodes, parameters]; None without compression.
      vectors: compressed vectors by field of the report.
    """

    lost: Float32 | None = None
    vectors: Mapping[str, Quantized] = field(default_factory=dict)

    def next(self, kind: Kind, w: Float32, start: Float32) -> "tuple[SentVectors, Float32]":
        """Compress the w_i of a new report.

        Args:
          kind: the compression.
          w: the w_i, [nodes, parameters].
          start: the w that the aggregator holds, [parameters].

        Returns:
          The new state, and the w_i as they arrive, [nodes, parameters].
        """
        if kind == "none":
            return SentVectors(), w
        with np.errstate(over="ignore", invalid="ignore"):  # diverged nodes
            sent, lost = with_feedback(kind, w - start, self.lost)
            return SentVectors(lost, {"w": sent}), start + sent.values

    def with_field(self, name: str, vectors: Float32) -> "tuple[SentVectors, Float32]":
        """Compress another field of the report; returns the new state and the received
        vectors."""
        if not self.vectors:
            return self, vectors
        sent = quantize(self.vectors["w"].kind, vectors)
        return replace(self, vectors={**self.vectors, name: sent}), sent.values

    def encoded(self, report: Report) -> bytes | memoryview:
        """Encode the vectors of a report; a single uncompressed vector is not copied."""
        parts: list[bytes | memoryview] = []
        for name, vector in report.vectors.items():
            sent = self.vectors.get(name)
            parts.append(raw(vector) if sent is None else sent.to_bytes())
        return parts[0] if len(parts) == 1 else b"".join(parts)


class BroadcastCompressor:
    """Compresses broadcasts; the aggregator continues with the vectors that nodes
    receive."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        # Vectors of the coming broadcast: w, and the combined w_i.
        self._sent: deque[tuple[Float32, bytes]] = deque(maxlen=2)

    def quantize(self, vector: Float32, known: Float32) -> Float32:
        """Return a vector as nodes receive it, sent as its difference to `known`, [n]
        each."""
        if self.kind == "none":
            return vector
        with np.errstate(over="ignore", invalid="ignore"):
            sent = quantize(self.kind, (vector - known)[None])
            held: Float32 = known + sent.values[0]
        self._sent.append((held, sent.to_bytes()))
        return held

    def differences(self, broadcast: Broadcast) -> list[tuple[Float32, bytes]]:
        """Return vectors of a broadcast, w first, with their encoded differences.

        The result is empty if these vectors were not compressed just now.
        """
        sent = []
        part = broadcast.by_kind.get(DriftPart)
        for held in (broadcast.w, None if part is None else part.mean):
            if held is None:
                continue
            data = next((data for vector, data in self._sent if vector is held), None)
            if data is None:
                return []
            sent.append((held, data))
        return sent


def _rounded(kind: Kind, blocks: Float32, largest: Float32) -> tuple[Float32, NDArray[Any]]:
    """Return the scales [rows, blocks] and the rounded, finite numbers [rows, blocks,
    256]."""
    if kind == "16-bit":
        # The largest becomes 2^14 to 2^15, which leaves the widest range below it.
        scales = np.ldexp(np.float32(1), np.clip(np.frexp(largest)[1] - 15, *_EXPONENTS))
        numbers = blocks / scales[..., None]
        # Numbers close to the largest float32 would overflow float16.
        np.clip(numbers, -_LARGEST_HALF, _LARGEST_HALF, out=numbers)
        return scales, numbers.astype(_HALF)
    # Two steps, because 127 / scale overflows if all numbers of a block are tiny.
    numbers = blocks / np.where(largest > 0, largest, np.float32(1))[..., None]
    numbers *= np.float32(127)
    return largest, np.rint(numbers, out=numbers).astype(np.int8)


def _in_blocks(vectors: Float32) -> Float32:
    """Reshape [rows, n] to [rows, blocks, 256], with zeros after the end."""
    rows, count = vectors.shape
    if missing := -count % BLOCK:
        vectors = np.append(vectors, np.zeros((rows, missing), np.float32), axis=1)
    return vectors.reshape(rows, _scale_count(count), BLOCK)


def _scale_count(count: int) -> int:
    return -(-count // BLOCK)
