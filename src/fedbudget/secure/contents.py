"""Contents of a masked vector: all report values that the aggregator needs, as sums.

**Encoding.** Vectors consist of 64-bit integers that are added modulo 2^64: masks hide
integers perfectly, but not floats. The range of w's coordinates follows from the w that all
nodes received: 2^16 times its largest coordinate (at least 2^16). A step is 2^-61 of that
range (3e-14 of the values, far finer than float32), and the integers can hold twice the
range. Scalars are few and may be squares: each takes three parts of 40 bits with space for
carries, in steps of 2^-60, up to ±2^58.

**What a node decides itself.** The aggregator sends no weight, scale or range: a node
computes them from its own samples, the task, the group and w. Otherwise a weight of 0 for
all others, or a step so coarse that their values vanish, would leave one node in the sum.

**Plain rounds (`Contents`).** A member adds up its own nodes, each with weight
p_i = D_i / 2^scale (`weights_of`), so that all weights together are at most 1:

    figures   the scalars of protocol/sums.py (losses, ρ̂, β̂, drift ...), three integers
              each
    levels    for the largest β̂ (see below), if β̂ was requested
    w         Σ p_i w_i, [parameters]
    tallies   results on test samples as counts and sums, if requested

A node whose report is not finite or out of range has weight 0 in all of these. A member
without any other node, or whose loss on test samples is not finite, sends no vector
(`InvalidReport`): a zero in its place would make the sum that of fewer members.

The largest β̂_i is not a sum. There are eight levels for each factor of two. A member
writes a random 64-bit number into each level up to its own largest β̂, and 0 above. The sum
is not 0 up to the largest level of all members. The aggregator reads only that level: no
β̂_i, and not how many members reach a level.

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

**Private rounds that protect samples (`SampleContents`).** The vector has one part, and S
is the sensitivity of that part to one sample:

    sums      Σ clip(g_j) over all samples of a member, if w is updated
    octaves   Σ of the clamped log₂ of the norms, if only norms were requested

A sum has many samples, so no single contribution is rounded. A sample of norm C changes the
sum of its node by C, which is encoded as S - √d - e steps. Rounding moves each of the two
neighbouring sums by at most √d/2. So the integers differ by at most S, and the cost is
again ρ = S²/2ms². e covers float64: in any order of additions, a sum of n terms of norm C
is wrong by at most n² 2^-53 C. Regularization depends on w and n alone. It is added as an
integer: as a float, a large w would leave no digits to the gradients.
"""

import math
import os
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
from fedbudget.protocol.features.sample_privacy import OCTAVES
from fedbudget.protocol.messages import (
    Broadcast,
    NormReport,
    PeerError,
    Private,
    PrivateRound,
    Report,
    ReportLayout,
    SampleNormReport,
    SampleSumNormRound,
    SampleSumReport,
    SampleSumRound,
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
from fedbudget.secure.graph import MOST_NODES
from fedbudget.secure.messages import TallyShape

SHARE_BITS = 20
"""A noise share has a standard deviation of 2 to this power, in steps."""
PARTS = 3
"""Integers of one figure."""
LARGEST_FIGURE = 2.0**58
_LARGEST_SUM = LARGEST_FIGURE / 2**12  # of a tally: a sum over 2^12 nodes still fits
MOST_SCORED = 20
"""Most classes with score histograms, and so with AUC: empty bins are sent too."""

_SHRINK = 1 - 1e-9  # exceeds the rounding error of 64-bit floats
_MOST_STEPS = 2.0**61
_STEPS = 2.0**61  # from 0 to the end of the range
_PART_BITS = 40
_FIGURE_BITS = 60  # binary places of a figure
_BATCH = 2**16
_HEADROOM = 16  # doublings of w's largest coordinate that fit
_LEVELS_EACH = 8  # levels of β̂ for each factor of two
_LEAST_BETA = 2.0**-16  # of the lowest level
_LEVELS = 44 * _LEVELS_EACH  # larger values than 2^28 are in the highest


class InvalidReport(Exception):
    """No node of a member has a report that is finite and in range."""


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
      levels: of β̂; 0 if it was not requested.
      parameters: 0 in the final round.
      largest: end of the range of w's coordinates.
      tallies: how many.
    """

    layout: ReportLayout
    levels: int
    parameters: int
    largest: float
    tally: TallyShape | None
    tallies: int
    sharers: ClassVar[int] = 0

    @classmethod
    def of(cls, broadcast: Broadcast, tally: TallyShape | None) -> "Contents":
        layout = broadcast.report
        return cls(
            layout,
            levels=_LEVELS if "beta" in layout.numbers else 0,
            parameters=broadcast.w.size if "w" in layout.vectors else 0,
            largest=coordinate_range(broadcast.w),
            tally=tally,
            tallies=0 if tally is None else broadcast.tallies,
        )

    @property
    def length(self) -> int:
        """Integers in a vector."""
        tallies = 0 if self.tally is None else self.tallies * _tally_length(self.tally)
        return self._figures + self.levels + self.parameters + tallies

    @property
    def _figures(self) -> int:
        """Integers of all figures."""
        return PARTS * len(column_names(self.layout))

    def encode(self, report: Report, scale: int, tallies: Sequence[Tally] = ()) -> UInt64:
        """Encode a member's contribution to the sums.

        Args:
          report: of its nodes; `sizes` are their weights.
          scale: see `scale_of`.
          tallies: test results.

        Raises:
          InvalidReport: no node has a finite report in range, or a test loss is not.
        """
        # With zeros instead, the sum of test results could be that of one other member.
        losses = (
            [] if self.tally is None else [each.samples * each.loss for each in tallies]
        )
        if not all(abs(loss) <= _LARGEST_SUM for loss in losses):
            raise InvalidReport
        everyone = np.ones(len(report.nodes), bool)
        _, numbers = columns_of(report, self.layout, everyone)
        valid = _valid(report, numbers, self.largest)
        if not valid.any():
            raise InvalidReport
        nodes = report.nodes[valid]
        weights = report.sizes[valid] / 2.0**scale

        parts = [encode_figures(add_up_in_numpy(nodes, weights, numbers[valid]).tolist())]
        if self.levels:
            parts.append(_encode_beta(_largest_beta(report.numbers["beta"], valid)))
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
          scale: see `scale_of`.
        """
        cuts = np.cumsum([self._figures, self.levels, self.parameters])
        figures, levels, w, tallies = np.split(total, cuts)
        names = column_names(self.layout)
        values = (decode_figures(figures) * 2.0**scale).tolist()
        numbers = dict(zip(names, values, strict=True))
        left_out = round(numbers["data"]) < sizes.sum()
        vectors = {}
        if self.parameters:
            vectors["w"] = decode(w, self.largest)[None] * 2.0**scale
        sums = Sums(
            round=broadcast.round,
            nodes=len(nodes),
            left_out=(),
            begins=nodes[:1],
            names=names,
            numbers=np.array([list(numbers.values())]),
            vectors=vectors,
            largest_beta=_decode_beta(levels),
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


def nothing_finite(broadcast: Broadcast, nodes: Int64, sizes: Int64) -> Sums:
    """Sums of a plain round without a finite report.

    Args:
      broadcast: the broadcast of the round.
      nodes: numbers of the nodes that made it, ascending.
      sizes: weighted sample count of each.
    """
    numbers = dict.fromkeys(column_names(broadcast.report), 0.0)
    numbers["data"] = float(sizes.sum())
    numbers["losses"] = numbers["best_losses"] = math.inf
    vectors = {name: np.zeros((1, broadcast.w.size)) for name in broadcast.report.vectors}
    return Sums(
        round=broadcast.round,
        nodes=len(nodes),
        left_out=(),
        begins=nodes[:1],
        names=tuple(numbers),
        numbers=np.array([list(numbers.values())]),
        vectors=vectors,
        report=Report(round=broadcast.round, nodes=nodes, sizes=sizes),
    )


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
    tally: ClassVar[TallyShape | None] = None
    tallies: ClassVar[int] = 0

    @classmethod
    def of(cls, broadcast: Broadcast, sharers: int) -> "PrivateContents":
        """Return the layout of any private round with masks."""
        kind = cls
        if isinstance(broadcast, SampleSumRound | SampleSumNormRound):
            kind = SampleContents
        updates = isinstance(broadcast, PrivateRound | SampleSumRound)
        return kind(broadcast, broadcast.w.size if updates else 0, sharers)

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

    def encode(self, report: Report, random: Randomness = os.urandom) -> UInt64:
        """Encode a member's contribution to the sums, with its share of the noise."""
        return (self.values(report) + self.noise(1, random)).view(np.uint64)

    def noise(self, shares: int, random: Randomness = os.urandom) -> Int64:
        """Draw shares of the noise; return their sum, [length]."""
        drawn = discrete_gaussian(shares * self.length, SHARE_BITS, random)
        return np.asarray(drawn.reshape(shares, self.length).sum(axis=0))

    def values(self, report: Report) -> Int64:
        """Encode the contribution of a report without noise, [length]."""
        assert isinstance(report, NormReport)
        values = np.zeros(self.length, np.int64)
        signs = np.rint(2 * counted(report, self.broadcast)).astype(np.int64)
        values[: self._counts] = self.height * signs.sum(axis=0)
        if isinstance(report, UpdateReport):
            for update in report.updates:
                values[self._counts :] += self.rounded(update)
        return values

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


@dataclass(frozen=True)
class SampleContents(PrivateContents):
    """Layout of a private round that protects samples."""

    def __post_init__(self) -> None:
        if self.largest < 4 * math.sqrt(self.length):
            assert isinstance(self.broadcast, Private)
            raise PeerError(
                f"a round of ρ = {self.broadcast.rho:g} needs more noise than 64 bits hold"
            )

    @property
    def largest(self) -> float:
        """S, the change by one sample, in steps."""
        return self._deviation / min(multipliers(self.broadcast))

    def values(self, report: Report) -> Int64:
        values = np.zeros(self.length, np.int64)
        if isinstance(report, SampleSumReport):
            sums = report.sums
            w = self.broadcast.w.astype(np.float64)
            for decay in report.decay.tolist():
                values += _integers(decay * w * self._steps)
        else:
            assert isinstance(report, SampleNormReport)
            sums = report.octaves[:, None]
        for each, samples in zip(sums, report.sizes.tolist(), strict=True):
            values += self.in_steps(each, samples)
        return values

    def in_steps(self, total: Float64, samples: int) -> Int64:
        """The sum over a node's samples, in steps; a sample changes it by at most S."""
        moved = math.sqrt(self.length) / self.largest
        error = (samples + 1.0) ** 2 * 2.0**-52
        return _integers(total * (self._steps * max(0.0, _SHRINK - moved - error)))

    def open(
        self, broadcast: Broadcast, total: UInt64, nodes: Int64, sizes: Int64, scale: int
    ) -> OpenedSums:
        """Return the noisy sums over all members' samples.

        Args:
          broadcast: the broadcast of the round.
          total: the sum of all vectors.
          nodes: numbers of their nodes.
          sizes: sample count of each.
          scale: not used; samples weigh the same.
        """
        known = total.view(np.int64) / self._steps
        counts = np.zeros(0) if self.parameters else known
        updates = known if self.parameters else None
        samples = int(sizes.sum())
        return OpenedSums(NoisySums(broadcast.round, len(nodes), counts, updates, samples))

    @property
    def _steps(self) -> float:
        """Steps of a gradient of norm 1, or of an octave."""
        broadcast = self.broadcast
        most = broadcast.clip if isinstance(broadcast, SampleSumRound) else OCTAVES
        return self.largest / most

    @property
    def _counts(self) -> int:
        return 0 if self.parameters else 1


def _integers(steps: Float64) -> Int64:
    """Round to integers. Neighbouring values stay neighbours, however large they are."""
    known = np.clip(np.nan_to_num(steps), -_MOST_STEPS, _MOST_STEPS)
    return np.rint(known).astype(np.int64)


# Integers.


def weights_of(sizes: Int64, cap: int) -> Int64:
    """Weight of each node of a member: its number of samples, or less above a cap.

    Args:
      sizes: number of samples of each node.
      cap: largest number of samples of a member that counts.

    >>> weights_of(np.array([60, 20]), 40), weights_of(np.array([30]), 40)
    (array([30, 10]), array([30]))
    """
    total = int(sizes.sum())
    if total <= cap:
        return sizes
    return np.maximum(1, (sizes * (cap / total)).astype(np.int64))


def scale_of(cap: int, members: int) -> int:
    """Smallest scale such that all weights of `weights_of` are at most 2^scale."""
    return (2 * members * max(cap, MOST_NODES) - 1).bit_length()


def coordinate_range(w: Float32) -> float:
    """Largest coordinate that fits into a sum of vectors near w.

    >>> coordinate_range(np.array([0.5, -3.0], np.float32))
    262144.0
    """
    most = float(np.abs(w).max(initial=1.0))
    return 2.0 ** (math.ceil(math.log2(most)) + _HEADROOM)


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
    return float(plausible.max()) if len(plausible) else None


def _encode_beta(beta: float | None) -> UInt64:
    levels = np.zeros(_LEVELS, np.uint64)
    if beta is not None:
        level = math.ceil(_LEVELS_EACH * math.log2(max(beta, _LEAST_BETA) / _LEAST_BETA))
        reached = min(level + 1, _LEVELS)
        levels[:reached] = np.frombuffer(os.urandom(8 * reached), np.uint64)
    return levels


def _decode_beta(levels: UInt64) -> float | None:
    """Upper end of the highest level that is not 0; None if all are."""
    reached = np.flatnonzero(levels)
    if not len(reached):
        return None
    return float(_LEAST_BETA * 2.0 ** (int(reached[-1]) / _LEVELS_EACH))


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
    """Encode test results; all 0 without any, or if a metric is not finite."""
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
    if not all(abs(figure) <= _LARGEST_SUM for figure in figures):
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
