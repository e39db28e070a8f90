"""What is in a masked vector: all of a report that the aggregator needs, as sums over nodes.

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
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Flags, Float64, Int64, UInt64
from fedbudget.models.tally import BINS, ClassCounts, ErrorSums, Tally
from fedbudget.protocol.messages import Broadcast, LocalError, Report
from fedbudget.protocol.sums import ABSURD, Numbers, Sums, Vectors
from fedbudget.protocol.tree import add_up_in_numpy
from fedbudget.secure.fixed_point import (
    LARGEST_FIGURE,
    PARTS,
    decode,
    decode_figures,
    encode,
    encode_figures,
    largest_beside,
)
from fedbudget.secure.messages import Group, TallyShape

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
    def of(cls, broadcast: Broadcast, places: int, tally: TallyShape | None, room: int = 8) -> "Contents":
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

    def summands(self, report: Report, group: Group, tallies: Sequence[Tally] = ()) -> Summands:
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
            found = summands.tallies if len(summands.tallies) == self.tallies else (None,) * self.tallies
            parts += [_encode_tally(self.tally, each) for each in found]
        return np.concatenate(parts)

    def decode(self, total: UInt64) -> Summands:
        """Of all members together; β̂ is the largest."""
        cuts = np.cumsum([PARTS * _FIGURES, _TIMES * _PLACE * self.places, self.parameters])
        figures, places, w, tallies = np.split(total, cuts)
        found = [] if self.tally is None or not self.tallies else np.split(tallies, self.tallies)
        decoded = [None if self.tally is None else _decode_tally(self.tally, each) for each in found]
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

    def __init__(self, broadcast: Broadcast, opened: Summands, nodes: Int64, sizes: Int64, scale: int) -> None:
        numbers = Numbers(*(opened.figures * 2.0**scale).tolist())
        self.left_out = round(numbers.data) < sizes.sum()
        if not round(numbers.data):  # nobody's report was finite
            numbers = numbers._replace(data=float(sizes.sum()), loss=math.inf, best_loss=math.inf)
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
        raise LocalError("distances from the mean need every report, and only their sum was opened")


def _possible(report: Report, numbers: Float64, largest: float) -> Flags:
    """Whether all that a node says is finite, and fits."""
    good = (np.abs(numbers) <= LARGEST_FIGURE / 2).all(axis=1)
    if report.w is not None:
        good &= np.array([bool(each.min() >= -largest and each.max() <= largest) for each in report.w])
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
    sums, squares = decode_figures(np.ascontiguousarray(taken[:, 1:]).reshape(-1)).reshape(-1, 2).T
    count = taken[:, 0].astype(np.float64)
    mean = sums / count
    beyond = np.sqrt(np.maximum(0.0, squares / count - mean * mean) * (count - 1))  # Samuelson's inequality
    return float(np.where(count == 1, sums, mean + beyond).max())


# Tallies.


def shape_of(tally: Tally) -> TallyShape:
    classes, scores = tally.classes, None if tally.classes is None else tally.classes.scores
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
    if not all(abs(each) <= LARGEST_FIGURE / 2**12 for each in figures):  # as many nodes may have as much
        return nothing
    return np.concatenate([np.concatenate(counts).astype(np.uint64), encode_figures(figures)])


def _decode_tally(shape: TallyShape, total: UInt64) -> Tally | None:
    """None where no test sample was counted."""
    counts, figures = np.split(total, [len(total) - PARTS * (1 + 4 * shape.errors + len(shape.own))])
    whole, numbers = counts.astype(np.int64), decode_figures(figures).tolist()
    samples = int(whole[0])
    if samples < 1:
        return None
    classes = errors = None
    if shape.classes:
        actual, predicted, right = whole[1 : 1 + 3 * shape.classes].reshape(3, -1)
        scores = whole[1 + 3 * shape.classes :].reshape(shape.scored, 2, BINS) if shape.scored else None
        classes = ClassCounts(actual, predicted, right, scores)
    own = numbers[1:]
    if shape.errors:
        targets, squares, absolute, squared, *own = own
        errors = ErrorSums(targets, max(0.0, squares - targets**2 / samples), absolute, squared)
    metrics = {name: value / samples for name, value in zip(shape.own, own, strict=True)}
    return Tally(samples, numbers[0] / samples, classes, errors, metrics)
