"""Vectors on the wire, as they are or with fewer bits.

    none     raw little-endian float32
    16-bit   float16 under a power of two per block of 256 numbers, so that scaling itself loses nothing: each number
             arrives to within 2^-11 of itself, unless it is 2^-28 of its block's largest, or less
    8-bit    int8 in parts of 127 of the block's largest magnitude: each number arrives to within 1/254 of that

Any magnitude of float32 passes. Scales come first, then the numbers, all little-endian; the last block may be short.
A matrix is sent as its rows, one after the other, as a single vector.

What is not finite arrives as not finite, so that a node that diverged is seen as such, and spoils no other number of
its block; fewer bits do not say whether it was infinite or not a number. What is finite arrives as finite: no scale
is let in that a number could overflow with.
"""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError

Kind = Literal["none", "16-bit", "8-bit"]
Compression = Kind | Literal["auto"]
"""As it is agreed on; with auto, every broadcast says it."""
KINDS: tuple[Kind, ...] = get_args(Kind)

BLOCK = 256
"""Numbers that share a scale."""

_FLOAT, _HALF = np.dtype("<f4"), np.dtype("<f2")
_WIDTHS: dict[Kind, int] = {"none": 4, "16-bit": 2, "8-bit": 1}

_LARGEST_SCALES: dict[Kind, float] = {"16-bit": 2.0**112, "8-bit": float(np.finfo(np.float32).max)}
"""With these, no number overflows."""

_LARGEST_HALF = np.float32(np.finfo(np.float16).max)
_EXPONENTS = -126, 112  # of scales of halves: from the smallest normal float32 to the largest scale

_NOT_FINITE = -128  # as 8 bits say it


def encoded_size(kind: Kind, count: int) -> int:
    """Bytes that so many numbers take."""
    return _WIDTHS[kind] * count + (0 if kind == "none" else _FLOAT.itemsize * _scale_count(count))


def raw(vector: Float32) -> memoryview:
    """The bytes of a vector as it is, which are not copied."""
    return np.ascontiguousarray(vector, _FLOAT).reshape(-1).data.cast("B")


def encode(kind: Kind, vector: Float32) -> bytes:
    """A vector [n], or the rows of a matrix [rows, n]."""
    if kind == "none":
        return bytes(raw(vector))
    blocks = _in_blocks(vector.reshape(-1))
    largest = np.abs(blocks).max(axis=1)
    if np.isfinite(largest).all():
        scales, numbers = _rounded(kind, blocks, largest)
    else:
        broken = ~np.isfinite(blocks)
        blocks = np.where(broken, np.float32(0), blocks)
        scales, numbers = _rounded(kind, blocks, np.abs(blocks).max(axis=1))
        numbers[broken] = np.nan if kind == "16-bit" else _NOT_FINITE
    return scales.astype(_FLOAT, copy=False).tobytes() + numbers.reshape(-1)[: vector.size].tobytes()


def decode(kind: Kind, data: bytes | memoryview, count: int) -> Float32:
    """The numbers, [count], in memory of their own."""
    view = memoryview(data).cast("B")
    if view.nbytes != encoded_size(kind, count):
        raise PeerError(f"{count} numbers ({kind}) take {encoded_size(kind, count)} bytes, not {view.nbytes}")
    if kind == "none":
        return np.frombuffer(view, _FLOAT).astype(np.float32)
    head = _FLOAT.itemsize * _scale_count(count)
    scales = np.frombuffer(view[:head], _FLOAT).astype(np.float32)
    if not ((scales >= 0) & (scales <= _LARGEST_SCALES[kind])).all():
        raise PeerError(f"a scale of {kind} numbers that is negative, not finite or too large")
    with np.errstate(invalid="ignore"):  # of a peer's odd kinds of nan, and inf times 0
        raw = np.frombuffer(view[head:], _HALF if kind == "16-bit" else np.int8)
        numbers = raw.astype(np.float32)
        if kind == "8-bit":  # in parts of 1, which no scale makes overflow
            numbers /= np.float32(127)
            numbers[raw == _NOT_FINITE] = np.nan
        whole = count - count % BLOCK
        numbers[:whole].reshape(-1, BLOCK)[...] *= scales[: whole // BLOCK, None]
        if whole < count:
            numbers[whole:] *= scales[-1]
    return numbers


class ErrorFeedback:
    """Sends differences, and with each what was lost of those before it: what is lost never adds up.

    Its memory is forgotten when it is not finite, as when a node diverged: nothing finite would ever be sent again.
    """

    def __init__(self) -> None:
        self._lost: Float32 | None = None

    def forget(self) -> None:
        """Nothing is missing any more."""
        self._lost = None

    def send(self, kind: Kind, difference: Float32) -> bytes:
        if self._lost is not None and self._lost.shape != difference.shape:
            raise LocalError(f"a difference of shape {difference.shape} after one of {self._lost.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            meant = difference if self._lost is None else difference + self._lost
            data = encode(kind, meant)
            lost = meant - decode(kind, data, meant.size).reshape(meant.shape)
        self._lost = lost if np.isfinite(lost).all() else None
        return data


class BroadcastCompressor:
    """Lossy compression of broadcasts: what nodes will hold of a new w is what the aggregator goes on with."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._w: Float32 | None = None
        self._difference: bytes | None = None

    def quantize(self, w: Float32, before: Float32) -> Float32:
        if self.kind == "none":
            return w
        with np.errstate(over="ignore", invalid="ignore"):
            self._difference = encode(self.kind, w - before)
            self._w = before + decode(self.kind, self._difference, w.size)
        return self._w

    def difference(self, broadcast: Broadcast) -> bytes | None:
        """The difference to the broadcast before, where it is what was settled on."""
        return self._difference if self._w is broadcast.w else None


def _rounded(kind: Kind, blocks: Float32, largest: Float32) -> tuple[Float32, NDArray[Any]]:
    """The scales [blocks] and the numbers [blocks, 256], all finite, as they are sent."""
    if kind == "16-bit":
        # The largest becomes 2^14 to 2^15, which leaves the most room below it.
        scales = np.ldexp(np.float32(1), np.clip(np.frexp(largest)[1] - 15, *_EXPONENTS))
        numbers = blocks / scales[:, None]
        np.clip(numbers, -_LARGEST_HALF, _LARGEST_HALF, out=numbers)  # of what is close to the largest float32
        return scales, numbers.astype(_HALF)
    # One after the other, because 127 / scale overflows where a block's numbers are tiny.
    numbers = blocks / np.where(largest > 0, largest, np.float32(1))[:, None]
    numbers *= np.float32(127)
    return largest, np.rint(numbers, out=numbers).astype(np.int8)


def _in_blocks(vector: Float32) -> Float32:
    """[n] to [blocks, 256], with zeros after the end."""
    missing = -len(vector) % BLOCK
    return (np.append(vector, np.zeros(missing, np.float32)) if missing else vector).reshape(-1, BLOCK)


def _scale_count(count: int) -> int:
    return -(-count // BLOCK)
