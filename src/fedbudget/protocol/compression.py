"""Vectors on the wire, as they are or with fewer bits.

    none     raw little-endian float32
    16-bit   float16 under a power of two per block of 256 numbers, so that scaling itself loses nothing: each number
             arrives to within 2^-11 of itself, unless it is 2^-28 of its block's largest, or less
    8-bit    int8 in parts of 127 of the block's largest magnitude: each number arrives to within 1/254 of that

Any magnitude of float32 passes. Scales come first, then the numbers, all little-endian; the last block may be short.
Rows of a matrix have blocks of their own: what arrives of a node's vector does not depend on whose are sent with it.

What is not finite arrives as not finite, so that a node that diverged is seen as such, and spoils no other number of
its block; fewer bits do not say whether it was infinite or not a number. What is finite arrives as finite: no scale
is let in that a number could overflow with.

What is compressed are differences: of w to the w before it, of the w_i to w, and of their mean to w. A node adds to
each what was lost of those before it (`with_feedback`), so that what is lost never adds up, and goes on as if it had
come to where the others are told that it is (fleet.py). The aggregator goes on with the w that nodes hold.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32
from fedbudget.protocol.messages import VECTORS, Broadcast, LocalError, PeerError, Report

Kind = Literal["none", "16-bit", "8-bit"]
Compression = Kind | Literal["auto"]
"""As it is agreed on; with auto, every broadcast says it."""
KINDS: tuple[Kind, ...] = get_args(Kind)

BLOCK = 256
"""Numbers that share a scale."""

_FLOAT = np.dtype("<f4")
_HALF = np.dtype("<f2")
_WIDTHS: dict[Kind, int] = {"none": 4, "16-bit": 2, "8-bit": 1}

_LARGEST_SCALES: dict[Kind, float] = {
    "16-bit": 2.0**112,
    "8-bit": float(np.finfo(np.float32).max),
}
"""With these, no number overflows."""

_LARGEST_HALF = np.float32(np.finfo(np.float16).max)
_EXPONENTS = (
    -126,
    112,
)  # of scales of halves: from the smallest normal float32 to the largest scale

_NOT_FINITE = -128  # as 8 bits say it


def encoded_size(kind: Kind, count: int) -> int:
    """Bytes that so many numbers take."""
    return _WIDTHS[kind] * count + (
        0 if kind == "none" else _FLOAT.itemsize * _scale_count(count)
    )


def raw(vector: Float32) -> memoryview:
    """The bytes of a vector as it is, which are not copied."""
    return np.ascontiguousarray(vector, _FLOAT).reshape(-1).data.cast("B")


def saved_bytes(kind: Kind, rows: int, count: int) -> int:
    """Of so many vectors of so many numbers."""
    return rows * (encoded_size("none", count) - encoded_size(kind, count))


class Quantized(NamedTuple):
    """Vectors with fewer bits.

    Args:
      kind: how many; not `none`.
      scales: of each block, [rows, blocks].
      numbers: in parts of these, [rows, n].
    """

    kind: Kind
    scales: Float32
    numbers: NDArray[Any]

    @property
    def values(self) -> Float32:
        """What arrives, [rows, n], in memory of its own."""
        with np.errstate(invalid="ignore"):  # of a peer's odd kinds of nan, and inf times 0
            values = self.numbers.astype(np.float32)
            if self.kind == "8-bit":  # in parts of 1, which no scale makes overflow
                values /= np.float32(127)
                values[self.numbers == _NOT_FINITE] = np.nan
            rows, count = values.shape
            whole = count - count % BLOCK
            blocks = (
                values[:, :whole].reshape(rows, -1, BLOCK)
                * self.scales[:, : whole // BLOCK, None]
            )
            values[:, :whole] = blocks.reshape(rows, whole)
            if whole < count:
                values[:, whole:] *= self.scales[:, -1:]
        return values

    def to_bytes(self) -> bytes:
        return self.scales.astype(_FLOAT, copy=False).tobytes() + self.numbers.tobytes()


def quantize(kind: Kind, vectors: Float32) -> Quantized:
    """Vectors [rows, n] with fewer bits."""
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
    """A vector [n], or the rows of a matrix [rows, n]."""
    if kind == "none":
        return bytes(raw(vector))
    return quantize(kind, np.atleast_2d(vector)).to_bytes()


def decode(kind: Kind, data: bytes | memoryview, count: int, rows: int = 1) -> Float32:
    """The numbers of so many vectors, one after the other, [rows * count], in memory of their own."""
    view = memoryview(data).cast("B")
    if view.nbytes != rows * encoded_size(kind, count):
        raise PeerError(
            f"{count} numbers ({kind}) take {encoded_size(kind, count)} bytes, not {view.nbytes / rows:g}"
        )
    if kind == "none":
        return np.frombuffer(view, _FLOAT).astype(np.float32)
    head = _FLOAT.itemsize * rows * _scale_count(count)
    scales = np.frombuffer(view[:head], _FLOAT).astype(np.float32)
    if not ((scales >= 0) & (scales <= _LARGEST_SCALES[kind])).all():
        raise PeerError(
            f"a scale of {kind} numbers that is negative, not finite or too large"
        )
    raw = np.frombuffer(view[head:], _HALF if kind == "16-bit" else np.int8)
    return Quantized(
        kind, scales.reshape(rows, -1), raw.reshape(rows, count)
    ).values.reshape(-1)


def with_feedback(
    kind: Kind, differences: Float32, lost: Float32 | None
) -> tuple[Quantized, Float32]:
    """Differences [rows, n] as they are sent, each with what was lost of those before it; and what is lost now.

    What is not finite is not remembered, as of a node that diverged: nothing finite would ever be sent again.
    """
    if lost is not None and lost.shape != differences.shape:
        raise LocalError(
            f"differences of shape {differences.shape} after some of {lost.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        meant = differences if lost is None else differences + lost
        sent = quantize(kind, meant)
        lost = meant - sent.values
    finite = np.asarray(np.isfinite(lost).all(axis=1))
    return sent, lost if finite.all() else np.where(finite[:, None], lost, np.float32(0))


@dataclass(frozen=True)
class SentVectors:
    """The vectors of nodes' last reports, where they were sent with fewer bits.

    Args:
      lost: of their w_i, [nodes, parameters]; None where nothing was.
      vectors: by the field of the report.
    """

    lost: Float32 | None = None
    vectors: Mapping[str, Quantized] = field(default_factory=dict)

    def next(self, kind: Kind, w: Float32, start: Float32) -> "tuple[SentVectors, Float32]":
        """Those of a new report; and what arrives of its w_i, [nodes, parameters].

        Args:
          w: the w_i.
          start: the w that the aggregator knows, [parameters].
        """
        if kind == "none":
            return SentVectors(), w
        with np.errstate(over="ignore", invalid="ignore"):  # of a node that diverged
            sent, lost = with_feedback(kind, w - start, self.lost)
            return SentVectors(lost, {"w": sent}), start + sent.values

    def besides(self, name: str, vectors: Float32) -> "tuple[SentVectors, Float32]":
        """The same with other vectors of the report, by their field's name, and what arrives of these."""
        if not self.vectors:
            return self, vectors
        sent = quantize(self.vectors["w"].kind, vectors)
        return replace(self, vectors={**self.vectors, name: sent}), sent.values

    def encoded(self, report: Report) -> bytes | memoryview:
        """The report's vectors as they are sent; a single one that is sent as it is is not copied."""
        given = {
            name: vector
            for name in VECTORS
            if (vector := getattr(report, name)) is not None
        }
        sent = self.vectors
        parts = [
            sent[name].to_bytes() if name in sent else raw(vector)
            for name, vector in given.items()
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)


class BroadcastCompressor:
    """Lossy compression of broadcasts: what nodes will hold of a vector is what the aggregator goes on with."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        # What the coming broadcast is made of: w, and what the w_i were combined to.
        self._sent: deque[tuple[Float32, bytes]] = deque(maxlen=2)

    def quantize(self, vector: Float32, known: Float32) -> Float32:
        """What nodes will hold of a vector of which they are told the difference to one that they know, [n] each."""
        if self.kind == "none":
            return vector
        with np.errstate(over="ignore", invalid="ignore"):
            sent = quantize(self.kind, (vector - known)[None])
            held: Float32 = known + sent.values[0]
        self._sent.append((held, sent.to_bytes()))
        return held

    def differences(self, broadcast: Broadcast) -> dict[str, bytes]:
        """With which nodes come to hold what a broadcast says: of w, and of `mean` where there is one; none where they
        were not made just now.
        """
        said = {
            name: vector
            for name in ("w", "mean")
            if (vector := getattr(broadcast, name)) is not None
        }
        made = {
            name: data
            for name, held in said.items()
            for vector, data in self._sent
            if vector is held
        }
        return made if made.keys() == said.keys() else {}


def _rounded(kind: Kind, blocks: Float32, largest: Float32) -> tuple[Float32, NDArray[Any]]:
    """The scales [rows, blocks] and the numbers [rows, blocks, 256], all finite, as they are sent."""
    if kind == "16-bit":
        # The largest becomes 2^14 to 2^15, which leaves the most room below it.
        scales = np.ldexp(np.float32(1), np.clip(np.frexp(largest)[1] - 15, *_EXPONENTS))
        numbers = blocks / scales[..., None]
        np.clip(
            numbers, -_LARGEST_HALF, _LARGEST_HALF, out=numbers
        )  # of what is close to the largest float32
        return scales, numbers.astype(_HALF)
    # One after the other, because 127 / scale overflows where a block's numbers are tiny.
    numbers = blocks / np.where(largest > 0, largest, np.float32(1))[..., None]
    numbers *= np.float32(127)
    return largest, np.rint(numbers, out=numbers).astype(np.int8)


def _in_blocks(vectors: Float32) -> Float32:
    """[rows, n] to [rows, blocks, 256], with zeros after the end."""
    rows, count = vectors.shape
    missing = -count % BLOCK
    padded = (
        np.append(vectors, np.zeros((rows, missing), np.float32), axis=1)
        if missing
        else vectors
    )
    return padded.reshape(rows, -(-count // BLOCK), BLOCK)


def _scale_count(count: int) -> int:
    return -(-count // BLOCK)
