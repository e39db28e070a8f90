"""Contents of a masked vector: all report values that the aggregator needs, as sums.

**Encoding.** Vectors consist of 64-bit integers that are added modulo 2^64: masks hide
integers perfectly, but not floats. The range of w's coordinates follows from the w that all
nodes received: 2^8 times its largest coordinate (at least 2^8), and more after an overflow.
A step is 2^-61 of that range (1e-16 of the values, far finer than float32), and the
integers can hold twice the range. Scalars are few and may be squares: each takes three
parts of 40 bits with space for carries, in steps of 2^-60, up to ±2^58.

**Plain rounds (`Contents`).** A member adds up its own nodes, each with weight
p_i = D_i / 2^scale, so that all weights together are at most 1:

    figures   the scalars of protocol/sums.py (losses, ρ̂, β̂, drift ...), three integers
    each slots     for the largest β̂ (see below), if β̂ was requested w         Σ p_i w_i,
    [parameters] tallies   results on test samples as counts and sums, if requested

A node whose report is not finite or out of range has weight 0 in all of these.

The largest β̂_i is not a sum. Each member writes its own β̂, its square and the count 1
into one random slot of many. The aggregator reads the largest value but not its owner. If
two members chose the same slot, the larger value follows from the sum and the squares; for
three or more this yields an upper bound. There are two independent sets of slots, and the
smaller result counts: it is too large only if both sets collide.

**Private rounds (`PrivateContents`).** Each member adds its share of the noise:

    counts    updates no longer than C, or than each octave: ±h for each node
    updates   Σ clip(Δ_i) in steps, if w is updated

Noise must never fall below the amount paid for. So m shares together have that amount, and
no sum of m or fewer vectors is ever opened, because each member can subtract its own share.
A share has standard deviation s = 2^20 steps (discrete_gaussian.py) and m of them √m s.
With a noise multiplier of σ, the sensitivity is S = √m s/σ steps: the length C of an
update, or the counts of one node. With n > m members the variance is n/m times as large.

Rounding is accounted for: an update of d coordinates is shortened to S - √d/2 steps before
rounding, so it is at most S long afterwards. h is rounded down. The sum of m shares is not
a discrete Gaussian itself, but its cost exceeds ρ = S²/2ms² by less than 10 m d exp(-π² s²)
(Kairouz, Liu and Steinke, 2021), and that is 0 in floating point.
"""

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64, UInt64
from fedbudget.evaluation.metrics import BINS, ClassCounts, ErrorSums, Tally
from fedbudget.protocol.features.node_privacy import (
    count_size,
    counted,
    multipliers,
)
from fedbudget.protocol.messages import (
    Broadcast,
    NormReport,
    PeerError,
    Private,
    PrivateRound,
    Report,
    ReportLayout,
    UpdateReport,
)
from fedbudget.protocol.sums import (
    ABSURD,
    NoisySums,
    Sums,
    add_up_in_numpy,
    column_names,
    columns_of,
)
from fedbudget.secure.discrete_gaussian import Randomness, discrete_gaussian
from fedbudget.secure.messages import Group, TallyShape

SHARE_BITS = 20
"""A noise share has a standard deviation of 2 to this power, in steps."""
PARTS = 3
"""Integers of one figure."""
LARGEST_FIGURE = 2.0**58
MOST_SCORED = 20
"""Most classes with score histograms, and so with AUC: empty bins are sent too."""

_SHRINK = 1 - 1e-9  # exceeds the rounding error of 64-bit floats
_STEPS = 2.0**61  # from 0 to the end of the range
_PART_BITS = 40
_FIGURE_BITS = 60  # binary places of a figure
_BATCH = 2**16
_MOST_BETA = 2.0**28  # larger values are capped
_SLOT = 1 + 2 * PARTS
_SLOT_SETS = 2


class OpenedSums(NamedTuple):
    """Sums over all members of a round.

    Args:
      sums: sums of their reports.
      tallies: test results, one for each evaluated w, or none.
      left_out: whether reports were left out, because they were not finite or too large.
    """

    sums: Sums | NoisySums
    tallies: tuple[Tally, ...] = ()
    left_out: bool = False


@dataclass(frozen=True)
class Contents:
    """Layout of a plain round.

    Args:
      layout: what nodes report.
      slots: for the largest β̂; 0 if it was not requested.
      parameters: 0 in the final round.
      largest: end of the range of w's coordinates.
      tallies: how many.
    """

    layout: ReportLayout
    slots: int
    parameters: int
    largest: float
    tally: TallyShape | None
    tallies: int
    sharers: ClassVar[int] = 0

    @classmethod
    def of(
        cls, broadcast: Broadcast, slots: int, tally: TallyShape | None, headroom: int = 8
    ) -> "Contents":
        layout = broadcast.report
        return cls(
            layout,
            slots=slots if "beta" in layout.numbers else 0,
            parameters=broadcast.w.size if "w" in layout.vectors else 0,
            largest=coordinate_range(broadcast.w, headroom),
            tally=tally,
            tallies=0 if tally is None else broadcast.tallies,
        )

    @property
    def length(self) -> int:
        """Integers in a vector."""
        tallies = 0 if self.tally is None else self.tallies * _tally_length(self.tally)
        slots = _SLOT_SETS * _SLOT * self.slots
        return self._figures + slots + self.parameters + tallies

    @property
    def _figures(self) -> int:
        """Integers of all figures."""
        return PARTS * len(column_names(self.layout))

    def encode(self, report: Report, group: Group, tallies: Sequence[Tally] = ()) -> UInt64:
        """Encode a member's contribution to the sums."""
        everyone = np.ones(len(report.nodes), bool)
        _, numbers = columns_of(report, self.layout, everyone)
        valid = _valid(report, numbers, self.largest)
        nodes = report.nodes[valid]
        weights = np.array(group.weights, np.float64)[valid] / 2.0**group.scale

        parts = [encode_figures(add_up_in_numpy(nodes, weights, numbers[valid]).tolist())]
        if self.slots:
            beta = _largest_beta(report.numbers["beta"], valid)
            parts += [_encode_slots(self.slots, beta) for _ in range(_SLOT_SETS)]
        if self.parameters:
            w = add_up_in_numpy(nodes, weights, report.vectors["w"][valid])
            parts.append(encode(w, self.largest))
        if self.tally is not None:
            known = tallies if len(tallies) == self.tallies else (None,) * self.tallies
            parts += [_encode_tally(self.tally, tally) for tally in known]
        return np.concatenate(parts)

    def open(
        self, broadcast: Broadcast, total: UInt64, nodes: Int64, sizes: Int64, scale: int
    ) -> OpenedSums:
        """Return the sums over all members' reports and test results.

        Args:
          broadcast: the broadcast of the round.
          total: the sum of all vectors.
          nodes: numbers of their nodes, ascending.
          sizes: weighted sample count of each.
          scale: of the group.
        """
        cuts = np.cumsum([self._figures, _SLOT_SETS * _SLOT * self.slots, self.parameters])
        figures, slots, w, tallies = np.split(total, cuts)
        names = column_names(self.layout)
        values = (decode_figures(figures) * 2.0**scale).tolist()
        numbers = dict(zip(names, values, strict=True))
        left_out = round(numbers["data"]) < sizes.sum()
        if not round(numbers["data"]):  # no report was finite
            numbers["data"] = float(sizes.sum())
            numbers["losses"] = numbers["best_losses"] = math.inf
        vectors = {}
        if self.parameters:
            vectors["w"] = decode(w, self.largest)[None] * 2.0**scale
        largest = None
        if self.slots:
            largest = _decode_largest(slots.reshape(_SLOT_SETS, -1, _SLOT))
        sums = Sums(
            round=broadcast.round,
            nodes=len(nodes),
            left_out=(),
            begins=nodes[:1],
            names=names,
            numbers=np.array([list(numbers.values())]),
            vectors=vectors,
            largest_beta=largest,
            report=Report(round=broadcast.round, nodes=nodes, sizes=sizes),
        )
        return OpenedSums(sums, self._decode_tallies(tallies), bool(left_out))

    def _decode_tallies(self, total: UInt64) -> tuple[Tally, ...]:
        if self.tally is None or not self.tallies:
            return ()
        decoded = [
            _decode_tally(self.tally, part) for part in np.split(total, self.tallies)
        ]
        return tuple([tally for tally in decoded if tally is not None])


@dataclass(frozen=True)
class PrivateContents:
    """Layout of a private round.

    Args:
      broadcast: the broadcast of the round.
      parameters: 0 if only norms were requested.
      sharers: m, the number of shares that have the noise paid for.
    """

    broadcast: Broadcast
    parameters: int
    sharers: int
    slots: ClassVar[int] = 0
    tally: ClassVar[TallyShape | None] = None
    tallies: ClassVar[int] = 0

    @classmethod
    def of(cls, broadcast: Broadcast, sharers: int) -> "PrivateContents":
        parameters = broadcast.w.size if isinstance(broadcast, PrivateRound) else 0
        return cls(broadcast, parameters, sharers)

    def __post_init__(self) -> None:
        if self.height < 1:
            assert isinstance(self.broadcast, Private)
            raise PeerError(
                f"a round of ρ = {self.broadcast.rho:g} needs more noise than 64 bits hold"
            )

    @property
    def length(self) -> int:
        """Integers in a vector."""
        return self._counts + self.parameters

    @property
    def largest(self) -> float:
        """S, the length in steps of an update of length C."""
        return self._deviation / multipliers(self.broadcast).updates

    @property
    def height(self) -> int:
        """h: the counts of one node have length S at most."""
        counts = multipliers(self.broadcast).counts
        return int(_SHRINK * self._deviation / counts / math.sqrt(self._counts))

    def encode(self, report: NormReport, random: Randomness = os.urandom) -> UInt64:
        """Encode a member's contribution to the sums, with its share of the noise."""
        vector = discrete_gaussian(self.length, SHARE_BITS, random)
        signs = np.rint(2 * counted(report, self.broadcast)).astype(np.int64)
        vector[: self._counts] += self.height * signs.sum(axis=0)
        if isinstance(report, UpdateReport):
            for update in report.updates:
                vector[self._counts :] += self.rounded(update)
        return vector.view(np.uint64)

    def rounded(self, update: Float32) -> Int64:
        """A clipped update in steps, at most S long; 0 if it is not finite."""
        limit = max(0.0, _SHRINK * self.largest - math.sqrt(len(update)) / 2)
        steps = np.multiply(update, self.largest / self._clip, dtype=np.float64)
        length = math.sqrt(float(np.square(steps).sum()))
        if not length < math.inf:
            return np.zeros(len(update), np.int64)
        if length:
            steps *= min(1.0, limit / length)
        return np.rint(steps).astype(np.int64)

    def open(
        self, broadcast: Broadcast, total: UInt64, nodes: Int64, sizes: Int64, scale: int
    ) -> OpenedSums:
        """Return the noisy sums over all members.

        Args:
          broadcast: the broadcast of the round.
          total: the sum of all vectors.
          nodes: numbers of their nodes.
          sizes, scale: not used; nodes weigh the same.
        """
        counts, updates = np.split(total.view(np.int64).astype(np.float64), [self._counts])
        w = updates * (self._clip / self.largest) if self.parameters else None
        counts = counts / (2 * self.height)
        return OpenedSums(NoisySums(broadcast.round, len(nodes), counts, w))

    @property
    def _clip(self) -> float:
        assert isinstance(self.broadcast, PrivateRound)
        return self.broadcast.clip

    @property
    def _counts(self) -> int:
        return count_size(self.broadcast)

    @property
    def _deviation(self) -> float:
        """Standard deviation of m shares together, in steps."""
        return math.sqrt(self.sharers) * 2.0**SHARE_BITS


# Integers.


def coordinate_range(w: Float32, headroom: int) -> float:
    """Largest coordinate that fits into a sum of vectors near w.

    Args:
      headroom: how many times a coordinate may double.

    >>> coordinate_range(np.array([0.5, -3.0], np.float32), 8)
    1024.0
    """
    most = float(np.abs(w).max(initial=1.0))
    return 2.0 ** (math.ceil(math.log2(most)) + headroom)


def encode(values: Float32 | Float64, largest: float) -> UInt64:
    """Round a vector to steps."""
    integers = np.empty(len(values), np.int64)
    for first in range(0, len(values), _BATCH):
        part = slice(first, first + _BATCH)
        scaled = np.multiply(values[part], _STEPS / largest, dtype=np.float64)
        np.rint(scaled, out=scaled)
        integers[part] = scaled
    return integers.view(np.uint64)


def decode(total: UInt64, largest: float) -> Float64:
    """Inverse of `encode`, for a sum."""
    return np.multiply(total.view(np.int64), largest / _STEPS, dtype=np.float64)


def encode_figures(figures: Sequence[float]) -> UInt64:
    """Encode each figure as `PARTS` integers.

    Raises:
      ValueError: a figure is not finite or too large.

    >>> decode_figures(encode_figures([1.5, -2e-9]) + encode_figures([2.25, 1e-9])).round(9)
    array([ 3.75e+00, -1.00e-09])
    """
    rows = np.empty((len(figures), PARTS), np.int64)
    for row, figure in zip(rows, figures, strict=True):
        if not abs(figure) <= LARGEST_FIGURE:
            raise ValueError(f"{figure} cannot be added up")
        whole = math.floor(math.ldexp(figure, _FIGURE_BITS))
        for part in range(PARTS - 1):
            row[part] = whole & (2**_PART_BITS - 1)
            whole >>= _PART_BITS
        row[-1] = whole
    return rows.reshape(-1).view(np.uint64)


def decode_figures(total: UInt64) -> Float64:
    """Inverse of `encode_figures`, for a sum."""
    figures = []
    for row in total.view(np.int64).reshape(-1, PARTS).tolist():
        whole = sum(part << (_PART_BITS * at) for at, part in enumerate(row))
        figures.append(whole / 2**_FIGURE_BITS)
    return np.array(figures, np.float64)


# Plain reports.


def _valid(report: Report, numbers: Float64, largest: float) -> Flags:
    """Whether each node's numbers are finite and in range."""
    valid = (np.abs(numbers) <= LARGEST_FIGURE / 2).all(axis=1)
    w = report.vectors.get("w")
    if w is not None:
        valid &= w.min(axis=1) >= -largest
        valid &= w.max(axis=1) <= largest
    return np.asarray(valid, bool)


def _largest_beta(beta: Float64, valid: Flags) -> float | None:
    plausible = beta[valid & (beta > 0) & (beta < ABSURD)]
    return min(_MOST_BETA, float(plausible.max())) if len(plausible) else None


def _encode_slots(slots: int, beta: float | None) -> UInt64:
    rows = np.zeros((slots, _SLOT), np.uint64)
    if beta is not None:
        row = rows[secrets.randbelow(slots)]
        row[0] = 1
        row[1:] = encode_figures([beta, beta * beta])
    return rows.reshape(-1)


def _decode_largest(slots: UInt64) -> float | None:
    """Largest β̂ from [sets, slots, integers of a slot]; None if all slots are empty."""
    results = [_largest_in(rows[rows[:, 0] > 0]) for rows in slots if rows[:, 0].any()]
    return min(results, default=None)


def _largest_in(taken: UInt64) -> float:
    figures = decode_figures(np.ascontiguousarray(taken[:, 1:]).reshape(-1))
    sums, squares = figures.reshape(-1, 2).T
    count = taken[:, 0].astype(np.float64)
    mean = sums / count
    variance = np.maximum(0.0, squares / count - mean * mean)
    bound = mean + np.sqrt(variance * (count - 1))  # Samuelson's inequality
    return float(np.where(count == 1, sums, bound).max())


# Test results.


def shape_of(tally: Tally) -> TallyShape:
    classes = tally.classes
    scores = None if classes is None else classes.scores
    return TallyShape(
        classes=0 if classes is None else len(classes.actual),
        scored=0 if scores is None or len(scores) > MOST_SCORED else len(scores),
        errors=tally.errors is not None,
        own=tuple(sorted(tally.own)),
    )


def _figure_count(shape: TallyShape) -> int:
    return 1 + 4 * shape.errors + len(shape.own)


def _tally_length(shape: TallyShape) -> int:
    counts = 1 + 3 * shape.classes + shape.scored * 2 * BINS
    return counts + PARTS * _figure_count(shape)


def _encode_tally(shape: TallyShape, tally: Tally | None) -> UInt64:
    """Encode test results; all 0 if they have another shape, or w has diverged."""
    nothing = np.zeros(_tally_length(shape), np.uint64)
    if tally is None or shape_of(tally) != shape:
        return nothing
    counts = [np.array([tally.samples])]
    if tally.classes is not None:
        counts += [tally.classes.actual, tally.classes.predicted, tally.classes.right]
        if shape.scored and tally.classes.scores is not None:
            counts.append(tally.classes.scores.reshape(-1))
    figures = [tally.samples * tally.loss]
    if (errors := tally.errors) is not None:
        squares = errors.spread + errors.targets**2 / tally.samples  # Σ y²
        figures += [errors.targets, squares, errors.absolute, errors.squared]
    figures += [tally.samples * tally.own[name] for name in shape.own]
    # A sum over 2^12 nodes still fits.
    if not all(abs(figure) <= LARGEST_FIGURE / 2**12 for figure in figures):
        return nothing
    return np.concatenate(
        [*counts, encode_figures(figures)], dtype=np.uint64, casting="unsafe"
    )


def _decode_tally(shape: TallyShape, total: UInt64) -> Tally | None:
    """Decode summed test results; None if no test sample was counted."""
    counts, figures = np.split(total, [len(total) - PARTS * _figure_count(shape)])
    whole = counts.astype(np.int64)
    samples = int(whole[0])
    if samples < 1:
        return None
    classes = None
    if shape.classes:
        _, per_class, histograms = np.split(whole, [1, 1 + 3 * shape.classes])
        actual, predicted, right = per_class.reshape(3, -1)
        scores = histograms.reshape(shape.scored, 2, BINS) if shape.scored else None
        classes = ClassCounts(actual, predicted, right, scores)
    loss, *own = decode_figures(figures).tolist()
    errors = None
    if shape.errors:
        targets, squares, absolute, squared, *own = own
        spread = max(0.0, squares - targets**2 / samples)
        errors = ErrorSums(targets, spread, absolute, squared)
    metrics = {name: value / samples for name, value in zip(shape.own, own, strict=True)}
    return Tally(samples, loss / samples, classes, errors, metrics)
