"""What is in a masked vector where rounds are private: sums to which every member has added its share of the noise.

    counts    how many updates are no longer than C, or than each octave: h or -h for each node, as whole numbers
    updates   Σ clip(Δ_i), in steps, where w moves

So that noise is never less than what is paid for, each member adds as much as is right if m of them have a part in the
sum, and no sum of m or fewer is ever opened: each knows its own share. A share has s = 2^20 steps as its deviation
(discrete_gaussian.py), m of them have √m s, and what one node can change is made to fit to that: with noise of σ times
the sensitivity this is S = √m s/σ steps, which C stands for, or the counts of one node. Where n > m have a part, there
is n/m times as much noise (its variance).

Rounding is paid for: an update of d numbers is cut to S - √d/2 steps before it is rounded, and so is S at most after
that. h is rounded down. The sum of m shares is no discrete Gaussian itself, but what it costs is more than ρ = S²/2ms²
by less than 10 m d exp(-π² s²) (Kairouz, Liu and Steinke 2021), which is 0 in all digits of any computer.

Real numbers as whole ones of 64 bits that are added modulo 2^64: masks hide these perfectly, and no float.

How far a vector's numbers may go follows from the w that all nodes were sent: to 2^8 times its largest number, or 2^8
where that is below 1, and further where that was too little. Steps are the 2^61st part of that (1e-16), far finer than
those of float32, and there is twice as much room as is used. Single figures, of which there are few and which may be
squares, are in three parts of 40 bits with room for carries: in steps of 2^-60, up to ±2^58.

What is in a masked vector: all of a report that the aggregator needs, as sums over nodes.

A member's nodes are added up by itself, each times p_i = D_i / 2^scale, so that weights of all are at most 1 together:

    figures   the numbers of protocol/sums.py (losses, ρ̂, β̂, drift ...), three whole numbers each
    places    for the largest β̂, see below; where β̂ was asked for
    w         Σ p_i w_i, [parameters]
    tallies   what test samples say, as counts and sums; where that was asked for

A node whose report is not finite, or beyond what fits, has no part in any of these: its weight is 0.

The largest of nodes' β̂_i is no sum. But every member puts its own into one of many places, drawn by chance, with 1 for
how many are there, and its square: then the largest is known, and of no β̂_i whose it is. Where two have met in one
place the larger follows from sum and squares, and of three and more an upper bound. All is done twice, with places
drawn anew, and the smaller of both counts: it is too large only where it is in both.
"""

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64, UInt64
from fedbudget.evaluation.metrics import BINS, ClassCounts, ErrorSums, Tally
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError, Private, Report
from fedbudget.protocol.privacy import NoisySums, counted, multipliers, noise_size
from fedbudget.protocol.sums import ABSURD, Numbers, Sums, Vectors, add_up_in_numpy
from fedbudget.secure.discrete_gaussian import Randomness, discrete_gaussian
from fedbudget.secure.messages import Group, TallyShape

SHARE_BITS = 20
"""Of the steps that a share's deviation has."""
_SHRINK = 1 - 1e-9  # more than floats of 64 bits can be wrong by


@dataclass(frozen=True)
class PrivateContents:
    """How the summands of one private round are laid out.

    Args:
      parameters: 0 where only lengths are asked for.
      sharers: m, whose noise is as much as is paid for.
    """

    private: Private
    parameters: int
    sharers: int
    places: ClassVar[int] = 0
    tally: ClassVar[TallyShape | None] = None
    tallies: ClassVar[int] = 0

    @classmethod
    def of(cls, broadcast: Broadcast, sharers: int) -> "PrivateContents":
        assert broadcast.private is not None
        parameters = broadcast.w.size if "w" in broadcast.report_fields else 0
        return cls(broadcast.private, parameters, sharers)

    def __post_init__(self) -> None:
        if self.height < 1:
            raise PeerError(
                f"a round of ρ = {self.private.rho:g} needs more noise than can be added up"
            )

    @property
    def length(self) -> int:
        """Whole numbers."""
        return self._counts + self.parameters

    @property
    def largest(self) -> float:
        """S, the length of an update in steps that C stands for."""
        return self._deviation / multipliers(self.private).updates

    @property
    def height(self) -> int:
        """h, so that the counts of one node have a length of S at most."""
        return int(
            _SHRINK
            * self._deviation
            / multipliers(self.private).counts
            / math.sqrt(self._counts)
        )

    def encode(self, report: Report, random: Randomness = os.urandom) -> UInt64:
        """What a member's report adds to the sums, with its share of the noise."""
        whole = discrete_gaussian(self.length, SHARE_BITS, random)
        signs = np.rint(2 * counted(report, self.private)).astype(np.int64)
        whole[: self._counts] += self.height * signs.sum(axis=0)
        if self.parameters:
            assert report.w is not None
            for update in report.w:
                whole[self._counts :] += self.rounded(update)
        return whole.view(np.uint64)

    def rounded(self, update: Float32) -> Int64:
        """A clipped update in steps, no longer than S; one that is not finite is 0."""
        room = max(0.0, _SHRINK * self.largest - math.sqrt(len(update)) / 2)
        steps = np.multiply(update, self.largest / self.private.clip, dtype=np.float64)
        length = math.sqrt(float(np.square(steps).sum()))
        if not length < math.inf:
            return np.zeros(len(update), np.int64)
        return np.rint(steps * min(1.0, room / length) if length else steps).astype(
            np.int64
        )

    def open(
        self, broadcast: Broadcast, total: UInt64, nodes: Int64, sizes: Int64, scale: int
    ) -> tuple[NoisySums, tuple[Tally, ...]]:
        """What is known of all members together.

        Args:
          nodes: the numbers of their nodes.
        """
        counts, updates = np.split(total.view(np.int64).astype(np.float64), [self._counts])
        known: Float64 | None = (
            updates * (self.private.clip / self.largest) if self.parameters else None
        )
        return NoisySums.of(broadcast.round, nodes, counts / (2 * self.height), known), ()

    @property
    def _counts(self) -> int:
        return noise_size(self.private, 0)

    @property
    def _deviation(self) -> float:
        """Steps, of m shares together."""
        return math.sqrt(self.sharers) * 2.0**SHARE_BITS


PARTS = 3
"""Whole numbers that a figure takes."""
LARGEST_FIGURE = 2.0**58

_STEPS = 2.0**61  # from 0 to the largest
_PART = 40  # bits
_FIGURE_STEP = 60  # so many binary places
_AT_ONCE = 2**16


def largest_beside(w: Float32, room: int) -> float:
    """Of a number in a sum of vectors that come from this one.

    Args:
      room: how often a number may have doubled.

    >>> largest_beside(np.array([0.5, -3.0], np.float32), 8)
    1024.0
    """
    most = float(np.abs(w).max(initial=1.0))
    return 2.0 ** (math.ceil(math.log2(most)) + room)


def encode(values: Float32 | Float64, largest: float) -> UInt64:
    """A vector, rounded to steps."""
    whole = np.empty(len(values), np.int64)
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        scaled = np.multiply(values[part], _STEPS / largest, dtype=np.float64)
        np.rint(scaled, out=scaled)
        whole[part] = scaled
    return whole.view(np.uint64)


def decode(total: UInt64, largest: float) -> Float64:
    """What was encoded, added up."""
    return np.multiply(total.view(np.int64), largest / _STEPS, dtype=np.float64)


def encode_figures(figures: Sequence[float]) -> UInt64:
    """Each as so many whole numbers as `PARTS`; one that is not finite, or too large, must not come here.

    >>> decode_figures(encode_figures([1.5, -2e-9]) + encode_figures([2.25, 1e-9])).round(9)
    array([ 3.75e+00, -1.00e-09])
    """
    found = np.empty((len(figures), PARTS), np.int64)
    for at, figure in enumerate(figures):
        if not abs(figure) <= LARGEST_FIGURE:
            raise ValueError(f"{figure} cannot be added up")
        mantissa, exponent = math.frexp(figure)
        whole = int(mantissa * 2**53)
        shift = exponent - 53 + _FIGURE_STEP
        whole = whole << shift if shift >= 0 else whole >> -shift
        for part in range(PARTS - 1):
            found[at, part], whole = whole & (2**_PART - 1), whole >> _PART
        found[at, PARTS - 1] = whole
    return found.reshape(-1).view(np.uint64)


def decode_figures(total: UInt64) -> Float64:
    """What was encoded, added up."""
    found = []
    for row in total.view(np.int64).reshape(-1, PARTS).tolist():
        whole = sum(part << (_PART * place) for place, part in enumerate(row))
        found.append(whole / 2**_FIGURE_STEP)
    return np.array(found, np.float64)


MOST_SCORED = 20
"""Classes, above which there are no histograms of scores here, and so no AUC: all bins are sent, also empty ones."""

_FIGURES = len(Numbers._fields)
_MOST_BETA = 2.0**28  # what is beyond counts as this
_PLACE = 1 + 2 * PARTS
_TIMES = 2  # that places are drawn


@dataclass(frozen=True)
class Summands:
    """What one member adds to the sums, before it is masked.

    Args:
      figures: as of `Numbers`, [numbers].
      beta: its largest β̂_i; None where there is none, or nobody asked.
      w: Σ p_i w_i, [parameters]; None in the final round.
      tallies: of test samples, one of each w that was asked for, or none.
    """

    figures: Float64
    beta: float | None
    w: Float64 | None
    tallies: tuple[Tally, ...] = ()


@dataclass(frozen=True)
class Contents:
    """How summands of one round are laid out.

    Args:
      places: for the largest β̂; 0 where it was not asked for.
      parameters: 0 in the final round.
      largest: of a number of w.
      tallies: how many.
    """

    places: int
    parameters: int
    largest: float
    tally: TallyShape | None
    tallies: int

    @classmethod
    def of(
        cls, broadcast: Broadcast, places: int, tally: TallyShape | None, room: int = 8
    ) -> "Contents":
        fields = broadcast.report_fields
        tallies = broadcast.tallies if tally is not None else 0
        parameters = broadcast.w.size if "w" in fields else 0
        largest = largest_beside(broadcast.w, room)
        return cls(places if "beta" in fields else 0, parameters, largest, tally, tallies)

    @property
    def length(self) -> int:
        """Whole numbers."""
        tallies = 0 if self.tally is None else self.tallies * _tally_length(self.tally)
        return PARTS * _FIGURES + _TIMES * _PLACE * self.places + self.parameters + tallies

    def summands(
        self, report: Report, group: Group, tallies: Sequence[Tally] = ()
    ) -> Summands:
        """What a member's report adds to the sums."""
        weights = np.array(group.weights, np.float64) / 2.0**group.scale
        numbers = Numbers.of(report, np.ones(len(report.nodes), bool))
        good = _possible(report, numbers, self.largest)
        nodes, weights = report.nodes[good], weights[good]
        figures = add_up_in_numpy(nodes, weights, numbers[good])
        w = None if report.w is None else add_up_in_numpy(nodes, weights, report.w[good])
        return Summands(figures, _largest_beta(report.beta, good), w, tuple(tallies))

    def encode(self, summands: Summands) -> UInt64:
        parts = [encode_figures(summands.figures.tolist())]
        if self.places:
            parts += [_encode_place(self.places, summands.beta) for _ in range(_TIMES)]
        if self.parameters:
            w = np.zeros(self.parameters) if summands.w is None else summands.w
            parts.append(encode(w, self.largest))
        if self.tally is not None:
            found = (
                summands.tallies
                if len(summands.tallies) == self.tallies
                else (None,) * self.tallies
            )
            parts += [_encode_tally(self.tally, each) for each in found]
        return np.concatenate(parts)

    def decode(self, total: UInt64) -> Summands:
        """Of all members together; β̂ is the largest."""
        cuts = np.cumsum([PARTS * _FIGURES, _TIMES * _PLACE * self.places, self.parameters])
        figures, places, w, tallies = np.split(total, cuts)
        found = (
            []
            if self.tally is None or not self.tallies
            else np.split(tallies, self.tallies)
        )
        decoded = [
            None if self.tally is None else _decode_tally(self.tally, each)
            for each in found
        ]
        return Summands(
            decode_figures(figures),
            _decode_largest(places.reshape(_TIMES, -1, _PLACE)) if self.places else None,
            decode(w, self.largest) if self.parameters else None,
            tuple(each for each in decoded if each is not None),
        )

    def open(
        self, broadcast: Broadcast, total: UInt64, nodes: Int64, sizes: Int64, scale: int
    ) -> "tuple[OpenedReports, tuple[Tally, ...]]":
        """What is known of all members together: their reports' sums, and what test samples say.

        Args:
          nodes, sizes: the numbers of their nodes, rising, and how many samples of each count.
          scale: as of the group.
        """
        opened = self.decode(total)
        return OpenedReports(broadcast, opened, nodes, sizes, scale), opened.tallies


class OpenedReports:
    """The reports of a round of which only sums are known.

    Args:
      opened: of all members.
      nodes, sizes: the numbers of all nodes in it, rising, and how many samples of each count.
      scale: as of the group.

    `left_out` says whether some had no part in it.
    """

    def __init__(
        self, broadcast: Broadcast, opened: Summands, nodes: Int64, sizes: Int64, scale: int
    ) -> None:
        numbers = Numbers(*(opened.figures * 2.0**scale).tolist())
        self.left_out = round(numbers.data) < sizes.sum()
        if not round(numbers.data):  # nobody's report was finite
            numbers = numbers._replace(
                data=float(sizes.sum()), loss=math.inf, best_loss=math.inf
            )
        unknown = np.zeros(len(nodes))
        self.sums = Sums(
            round=broadcast.round,
            nodes=len(nodes),
            left_out=(),
            begins=nodes[:1],
            numbers=np.array([numbers]),
            w=None if opened.w is None else opened.w[None] * 2.0**scale,
            gradients=None,
            slopes="rho" in broadcast.report_fields,
            largest_beta=opened.beta,
            report=Report(broadcast.round, nodes, sizes, unknown, unknown),
        )

    def distance_sums(self, vectors: Vectors, mean: object) -> Float64:
        raise LocalError(
            "distances from the mean need every report, and only their sum was opened"
        )


def _possible(report: Report, numbers: Float64, largest: float) -> Flags:
    """Whether all that a node says is finite, and fits."""
    good = (np.abs(numbers) <= LARGEST_FIGURE / 2).all(axis=1)
    if report.w is not None:
        good &= np.array(
            [bool(each.min() >= -largest and each.max() <= largest) for each in report.w]
        )
    return np.asarray(good, bool)


def _largest_beta(beta: Float64 | None, good: Flags) -> float | None:
    if beta is None:
        return None
    sane = beta[good & (beta > 0) & (beta < ABSURD)]
    return min(_MOST_BETA, float(sane.max())) if len(sane) else None


def _encode_place(places: int, beta: float | None) -> UInt64:
    found = np.zeros((places, _PLACE), np.uint64)
    if beta is not None:
        at = secrets.randbelow(places)
        found[at, 0] = 1
        found[at, 1:] = encode_figures([beta, beta * beta])
    return found.reshape(-1)


def _decode_largest(places: UInt64) -> float | None:
    """From [times, places, numbers of each]."""
    found = [_largest_in(each[each[:, 0] > 0]) for each in places if each[:, 0].any()]
    return min(found, default=None)


def _largest_in(taken: UInt64) -> float:
    sums, squares = (
        decode_figures(np.ascontiguousarray(taken[:, 1:]).reshape(-1)).reshape(-1, 2).T
    )
    count = taken[:, 0].astype(np.float64)
    mean = sums / count
    beyond = np.sqrt(
        np.maximum(0.0, squares / count - mean * mean) * (count - 1)
    )  # Samuelson's inequality
    return float(np.where(count == 1, sums, mean + beyond).max())


# Tallies.


def shape_of(tally: Tally) -> TallyShape:
    classes = tally.classes
    scores = None if tally.classes is None else tally.classes.scores
    scored = 0 if scores is None or len(scores) > MOST_SCORED else len(scores)
    count = 0 if classes is None else len(classes.actual)
    return TallyShape(count, scored, tally.errors is not None, tuple(sorted(tally.own)))


def _tally_length(shape: TallyShape) -> int:
    counts = 1 + 3 * shape.classes + shape.scored * 2 * BINS
    return counts + PARTS * (1 + 4 * shape.errors + len(shape.own))


def _encode_tally(shape: TallyShape, tally: Tally | None) -> UInt64:
    """Nothing but 0 of one that is not of this shape, or is of a w that has diverged."""
    nothing = np.zeros(_tally_length(shape), np.uint64)
    if tally is None or shape_of(tally) != shape:
        return nothing
    counts = [np.array([tally.samples])]
    if tally.classes is not None:
        counts += [tally.classes.actual, tally.classes.predicted, tally.classes.right]
        if shape.scored and tally.classes.scores is not None:
            counts.append(tally.classes.scores.reshape(-1))
    figures = [tally.samples * tally.loss]
    if tally.errors is not None:
        own = tally.errors
        squares = own.spread + own.targets**2 / tally.samples  # Σ y²
        figures += [own.targets, squares, own.absolute, own.squared]
    figures += [tally.samples * tally.own[name] for name in shape.own]
    if not all(
        abs(each) <= LARGEST_FIGURE / 2**12 for each in figures
    ):  # as many nodes may have as much
        return nothing
    return np.concatenate(
        [np.concatenate(counts).astype(np.uint64), encode_figures(figures)]
    )


def _decode_tally(shape: TallyShape, total: UInt64) -> Tally | None:
    """None where no test sample was counted."""
    counts, figures = np.split(
        total, [len(total) - PARTS * (1 + 4 * shape.errors + len(shape.own))]
    )
    whole = counts.astype(np.int64)
    numbers = decode_figures(figures).tolist()
    samples = int(whole[0])
    if samples < 1:
        return None
    classes = errors = None
    if shape.classes:
        actual, predicted, right = whole[1 : 1 + 3 * shape.classes].reshape(3, -1)
        scores = (
            whole[1 + 3 * shape.classes :].reshape(shape.scored, 2, BINS)
            if shape.scored
            else None
        )
        classes = ClassCounts(actual, predicted, right, scores)
    own = numbers[1:]
    if shape.errors:
        targets, squares, absolute, squared, *own = own
        errors = ErrorSums(
            targets, max(0.0, squares - targets**2 / samples), absolute, squared
        )
    metrics = {name: value / samples for name, value in zip(shape.own, own, strict=True)}
    return Tally(samples, numbers[0] / samples, classes, errors, metrics)
