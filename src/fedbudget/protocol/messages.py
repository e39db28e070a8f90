"""Messages between the aggregator and fleets, and their sizes on the wire.

Messages are frozen. There is one class for each kind of round and one for each kind of
report:

    TrainRound        local updates                             TrainReport
    FinalRound        the loss of the last w                    LossReport
    CurvatureRound    the loss of w and its derivatives         LossReport
    CandidateRound    the loss of a w of earlier derivatives    LossReport
    PrivateRound      updates with bounded norms                UpdateReport
    NormRound         only the norms of updates                 NormReport
    SampleRound       updates from noisy gradients              SampleReport
    SampleNormRound   only the norms of gradients, noisy        SampleNormReport
    SampleSumRound    sums of clipped gradients, masked         SampleSumReport
    SampleSumNormRound  only the norms of gradients, masked     SampleNormReport
    VoteRound         candidates for personal models             VoteReport
    PersonalRound     a personal model of each node             PersonalReport

A broadcast names the numbers and vectors that its report must have (`ReportLayout`). What
features add to a broadcast are its `parts` (features/feature.py). A report is a structure
of arrays over the nodes of one fleet. `Report.merge` joins the reports of several fleets in
node order, in whatever order they arrived.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.errors import FedbudgetError
from fedbudget.frozen import updated

Kind = Literal["none", "16-bit", "8-bit"]
"""Compression of vectors."""

_SCALAR = 8  # bytes of a number
_HEADER = 32  # bytes of the round, the kind, τ, η, flags and names


class LocalError(FedbudgetError, RuntimeError):
    """This side called the protocol in a wrong order: a bug in the engine."""


class PeerError(FedbudgetError, ValueError):
    """The other side sent something that the protocol does not allow."""


class RoundPart:
    """What a feature adds to a broadcast; a subclass is a frozen dataclass.

    `in_header` parts are so small that the header has space for them.
    """

    in_header: ClassVar[bool] = False
    once: ClassVar[bool] = False
    """Whether the class defines `remembered`."""
    addressed: ClassVar[bool] = False
    """Whether the class defines `to`."""
    bounded: ClassVar[bool] = False
    """Whether the class defines `require_possible`."""
    works: ClassVar[bool] = False
    """Whether the class defines `extra_steps`."""

    def __init_subclass__(cls) -> None:
        cls.once = cls.remembered is not RoundPart.remembered
        cls.addressed = cls.to is not RoundPart.to
        cls.bounded = cls.require_possible is not RoundPart.require_possible
        cls.works = cls.extra_steps is not RoundPart.extra_steps

    def to(self, nodes: Int64) -> Self:
        """Return the part as sent to the nodes with these numbers."""
        return self

    @property
    def remembered(self) -> Self:
        """The part without vectors that are used only once."""
        return self

    @property
    def result(self) -> "Float32 | None":
        """The w that may be the result of the run, to evaluate on test samples."""
        return None

    @property
    def extra_steps(self) -> float:
        """Work that the part causes at a node, in local updates."""
        return 0.0

    def require_possible(self) -> None:
        """Raise ValueError for values that no aggregator sends."""


P = TypeVar("P", bound=RoundPart)


@dataclass(frozen=True)
class ReportLayout:
    """Names of the arrays that a report must have; it has no others.

    Args:
      numbers: numbers of each node, [n].
      vectors: vectors of each node, [n, parameters].
      optional: those among the numbers that are NaN for a node that cannot measure them.
    """

    numbers: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


LOSSES = ReportLayout(("losses", "best_losses"))


@dataclass(frozen=True)
class CatchUp:
    """State for a node that missed the previous round.

    Args:
      best: w^f, [parameters].
      parts: what features add.
    """

    best: Float32
    parts: tuple[RoundPart, ...] = ()

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a class, if there is one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Message from a fleet of n nodes to the aggregator.

    Args:
      round: number of the broadcast's round.
      nodes: numbers of the nodes, rising, [n].
      sizes: D_i, [n]; the aggregator knows them since a node joined.
      numbers: numbers of each node by name, [n] each.
      vectors: vectors of each node by name, [n, parameters] each.
    """

    round: int
    nodes: Int64
    sizes: Int64
    numbers: Mapping[str, Float64] = field(default_factory=dict)
    vectors: Mapping[str, Float32] = field(default_factory=dict)

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire if each of the n nodes sends its own report."""
        numbers = sum([array.nbytes for array in self.numbers.values()])
        vectors = sum([array.nbytes for array in self.vectors.values()])
        return _HEADER * len(self.nodes) + numbers + vectors

    @property
    def without_vectors(self) -> Self:
        return replace(self, vectors={})

    def require_answers(self, broadcast: "Broadcast") -> None:
        """Raise PeerError for a report that does not answer the broadcast."""
        nodes = self.nodes
        if nodes.ndim != 1 or not len(nodes) or (self.sizes < 1).any():
            raise PeerError("a report needs nodes with samples")
        if (nodes[1:] <= nodes[:-1]).any():
            raise PeerError("a node reported twice, or reports are not in node order")
        layout = broadcast.report
        named = (tuple(self.numbers), tuple(self.vectors))
        if named != (layout.numbers, layout.vectors):
            self._require_names(layout)
        shape = nodes.shape
        wide = (*shape, broadcast.w.size)
        arrays: list[tuple[str, NDArray[Any], tuple[int, ...]]] = [
            ("sizes", self.sizes, shape)
        ]
        arrays += [(name, each, shape) for name, each in self.numbers.items()]
        arrays += [(name, each, wide) for name, each in self.vectors.items()]
        for name, values, wanted in arrays:
            if values.shape != wanted:
                raise PeerError(f"{name} has shape {values.shape}, not {wanted}")

    def _require_names(self, layout: ReportLayout) -> None:
        """Raise PeerError for missing or further arrays; their order does not matter."""
        expected = {*layout.numbers, *layout.vectors}
        if missing := sorted(expected - {*self.numbers, *self.vectors}):
            raise PeerError(f"a report without {', '.join(missing)}")
        more = {*self.numbers} - {*layout.numbers} | {*self.vectors} - {*layout.vectors}
        if more:
            raise PeerError(f"a report with {', '.join(sorted(more))}")

    @classmethod
    def merge(cls, reports: "Sequence[Report]") -> "Report":
        """Join reports into one, in node order; refuse a node that is in two of them."""
        first = reports[0]
        if len(reports) == 1:
            return first
        rounds = sorted({report.round for report in reports})
        if len(rounds) != 1:
            raise PeerError(f"reports of different rounds: {rounds}")
        nodes = np.concatenate([report.nodes for report in reports])
        order: Int64 | None = None  # reports that arrive in order are not copied again
        if not (nodes[1:] > nodes[:-1]).all():
            order = np.argsort(nodes, kind="stable")
            if len(np.unique(nodes)) != len(nodes):
                raise PeerError(f"a node reported twice in round {first.round}")
        numbers = _joined([report.numbers for report in reports], order)
        vectors = _joined([report.vectors for report in reports], order)
        sizes = np.concatenate([report.sizes for report in reports])
        return type(first)(
            round=first.round,
            nodes=nodes if order is None else nodes[order],
            sizes=sizes if order is None else sizes[order],
            numbers=numbers,
            vectors=vectors,
        )


class LossReport(Report):
    """Losses of w(t₀) and of w^f."""

    @property
    def losses(self) -> Float64:
        """F_i(w(t₀)), [n]."""
        return self.numbers["losses"]

    @property
    def best_losses(self) -> Float64:
        """F_i(w^f) on the same samples, [n]."""
        return self.numbers["best_losses"]


class TrainReport(LossReport):
    """Losses, w_i(t), and what features measure."""

    @property
    def w(self) -> Float32:
        """w_i(t), [n, parameters]."""
        return self.vectors["w"]


class NormReport(Report):
    """Norms of updates, encoded as in features/node_privacy.py."""

    @property
    def lengths(self) -> Float64:
        """Norms of the updates before clipping, [n]."""
        return self.numbers["lengths"]


class UpdateReport(NormReport):
    """Clipped updates, and their norms before clipping."""

    @property
    def updates(self) -> Float32:
        """Clipped updates, [n, parameters]."""
        return self.vectors["updates"]


class SampleReport(Report):
    """w_i after updates that protect single samples."""

    @property
    def w(self) -> Float32:
        """w_i(t), [n, parameters]."""
        return self.vectors["w"]


class SampleNormReport(Report):
    """Norms of gradients, encoded as in features/sample_privacy.py."""

    @property
    def octaves(self) -> Float64:
        """Sum over the node's samples, [n]; it contains noise unless it will be masked."""
        return self.numbers["octaves"]


class SampleSumReport(Report):
    """Sums of clipped gradients, without noise: only their masked form leaves a node."""

    @property
    def sums(self) -> Float64:
        """Sum over the node's samples, [n, parameters]."""
        return np.asarray(self.vectors["sums"], np.float64)

    @property
    def decay(self) -> Float64:
        """Factor of w in the gradient of the regularization of all these samples, [n]."""
        return self.numbers["decay"]


class SiteReport(Report):
    """What a node knows of itself; NaN if it keeps that to itself."""


class VoteReport(SiteReport):
    """Losses of the candidates for personal models (personal.py), as differences to w."""


class PersonalReport(SiteReport):
    """Figures of personal models (site_figures.py)."""


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """Message from the aggregator to every node: the base class of all rounds.

    Args:
      round: number of the round, from 1.
      w: w(t₀), [parameters].
      report: what to report.
      best: whether the w of the previous broadcast is the new w^f.
      parts: what features add.
      catch_up: state for nodes that missed the previous round; others do not need it.
      evaluate: whether nodes evaluate w on their test samples, and in the final round w^f.
      compress: compression of vectors in both directions.
    """

    answer: ClassVar[type[Report]]
    tallies_each: ClassVar[int] = 1

    round: int
    w: Float32
    report: ReportLayout
    best: bool = False
    parts: tuple[RoundPart, ...] = ()
    catch_up: CatchUp | None = None
    evaluate: bool = False
    compress: Kind = "none"

    @cached_property
    def by_kind(self) -> dict[type, Any]:
        """The parts by class."""
        return {type(part): part for part in self.parts}

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a class, if there is one."""
        return self.by_kind.get(kind)

    def to(self, nodes: Int64) -> Self:
        """Return the broadcast as sent to the nodes with these numbers."""
        if not any(part.addressed for part in self.parts):
            return self
        parts = [part.to(nodes) if part.addressed else part for part in self.parts]
        return replace(self, parts=tuple(parts))

    @property
    def remembered(self) -> Self:
        """The broadcast without the vectors that are used only once."""
        if self.catch_up is None and not any(part.once for part in self.parts):
            return self
        parts = tuple([part.remembered if part.once else part for part in self.parts])
        if all(kept is part for kept, part in zip(parts, self.parts, strict=True)):
            return updated(self, catch_up=None)  # keeps cached values, which fit
        return replace(self, parts=parts, catch_up=None)

    @cached_property
    def steps(self) -> int:
        """Local updates that the round costs a node; a loss costs as much as one."""
        return 1

    @property
    def result(self) -> Float32 | None:
        """The w that may be the result of the run, if it is not w^f."""
        found = [part.result for part in self.parts]
        return next((each for each in found if each is not None), None)

    @property
    def extra_steps(self) -> float:
        """Work at a node besides its local updates, in local updates."""
        return sum([part.extra_steps for part in self.parts if part.works])

    @property
    def tallies(self) -> int:
        """Number of test results that a node reports: w, and in the final round w^f."""
        return self.tallies_each if self.evaluate else 0

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire to a node that was in the previous round."""
        values = [
            value
            for part in self.parts
            if not part.in_header
            for value in vars(part).values()
        ]
        arrays = sum([each.nbytes for each in values if isinstance(each, np.ndarray)])
        numbers = sum([type(each) in (int, float) for each in values])
        return _HEADER + self.w.nbytes + arrays + _SCALAR * numbers

    @property
    def wire_bytes_with_catch_up(self) -> int:
        """Bytes on the wire to a node that missed the previous round."""
        missed = 0 if self.catch_up is None else _size(self.catch_up)
        return self.wire_bytes + missed


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Broadcast):
    """A round with local updates.

    Args:
      tau: local updates to make; by the slowest node, if others make more.
      eta: step size.
    """

    tau: int
    eta: float

    @cached_property
    def steps(self) -> int:
        return self.tau


@dataclass(frozen=True, kw_only=True)
class TrainRound(LocalUpdates):
    """A round of Algorithm 3.

    Args:
      effective: τ_eff, the number of updates that the move of w represents; τ if all nodes
        make τ updates (features/workload.py).
      stop: whether these are the last local updates.
    """

    answer = TrainReport
    effective: float
    stop: bool = False

    @cached_property
    def span(self) -> float:
        """ητ_eff, the factor between a mean gradient and the move of w."""
        return self.eta * self.effective


@dataclass(frozen=True, kw_only=True)
class LossRound(Broadcast):
    """A round without updates, which evaluates the loss of w: the base class of these."""

    answer = LossReport
    report: ReportLayout = LOSSES


@dataclass(frozen=True, kw_only=True)
class FinalRound(LossRound):
    """A round that evaluates the last w."""

    tallies_each = 2


@dataclass(frozen=True, kw_only=True)
class CurvatureRound(LossRound):
    """A round that also asks for the derivatives of the loss (features/newton.py)."""


@dataclass(frozen=True, kw_only=True)
class CandidateRound(LossRound):
    """A round that evaluates a w whose derivatives follow from earlier rounds."""


@dataclass(frozen=True, kw_only=True)
class Private(Broadcast):
    """A round that spends a privacy budget.

    Args:
      rho: privacy cost ρ of the round for each node, or for each sample.
    """

    per_sample: ClassVar[bool] = False
    """Whether the round protects single samples, not nodes."""
    only_masked: ClassVar[bool] = False
    """Whether reports may leave a node only masked, with its share of the noise."""
    rho: float


@dataclass(frozen=True, kw_only=True)
class PrivateRound(Private, LocalUpdates):
    """A round that protects nodes (features/node_privacy.py).

    Args:
      clip: C, the largest norm of an update.
    """

    answer = UpdateReport
    report: ReportLayout = ReportLayout(("lengths",), ("updates",))
    clip: float


@dataclass(frozen=True, kw_only=True)
class NormRound(Private, LocalUpdates):
    """A round that only measures how long updates are."""

    answer = NormReport
    report: ReportLayout = ReportLayout(("lengths",))


@dataclass(frozen=True, kw_only=True)
class SampleRound(Private, LocalUpdates):
    """A round that protects single samples (features/sample_privacy.py).

    Args:
      clip: C, the largest norm of a sample's gradient.
    """

    answer = SampleReport
    per_sample = True
    report: ReportLayout = ReportLayout((), ("w",))
    clip: float


@dataclass(frozen=True, kw_only=True)
class SampleNormRound(Private):
    """A round that only measures how long the gradients of samples are."""

    answer = SampleNormReport
    per_sample = True
    report: ReportLayout = ReportLayout(("octaves",))


@dataclass(frozen=True, kw_only=True)
class SampleSumRound(Private):
    """A round that publishes the sum of all clipped gradients at w, with noise.

    Args:
      clip: C, the largest norm of a sample's gradient.
    """

    answer = SampleSumReport
    per_sample = True
    only_masked = True
    report: ReportLayout = ReportLayout(("decay",), ("sums",))
    clip: float


@dataclass(frozen=True, kw_only=True)
class SampleSumNormRound(Private):
    """A round that publishes the sum of the norms of gradients, with noise."""

    answer = SampleNormReport
    per_sample = True
    only_masked = True
    report: ReportLayout = ReportLayout(("octaves",))


FIGURES = ("trivial", "alone", "shared", "personal", "gain", "correction")
_SITE_NUMBERS = (
    *("metric", "rows", "measured", "held_out", "kept"),
    *("weight_shared", "weight_corrected", "weight_alone"),
    *FIGURES,
    *(f"{name}_error" for name in FIGURES),
)


VOTES = tuple(f"vote_{number}" for number in range(10))
"""The largest number of candidates is that of linear models."""


@dataclass(frozen=True, kw_only=True)
class SiteRound(Broadcast):
    """A round after the last: w is the result of the run, which nodes correct."""

    @property
    def expected(self) -> ReportLayout:
        """What its report has."""
        return default_layout(type(self))


@dataclass(frozen=True, kw_only=True)
class VoteRound(SiteRound):
    """Nodes fit candidates for personal models, and report their losses."""

    answer = VoteReport
    report: ReportLayout = ReportLayout(VOTES, optional=VOTES)


@dataclass(frozen=True, kw_only=True)
class PersonalRound(SiteRound):
    """Nodes choose their personal models.

    Args:
      figures: whether nodes report figures of their models.
      prior: of the candidates, from all votes; empty for the default.
    """

    answer = PersonalReport
    report: ReportLayout = ReportLayout(_SITE_NUMBERS, optional=_SITE_NUMBERS)
    figures: bool = True
    prior: tuple[float, ...] = ()

    @property
    def expected(self) -> ReportLayout:
        return super().expected if self.figures else ReportLayout()


ROUNDS: tuple[type[Broadcast], ...] = (
    TrainRound,
    FinalRound,
    CurvatureRound,
    CandidateRound,
    PrivateRound,
    NormRound,
    SampleRound,
    SampleNormRound,
    SampleSumRound,
    SampleSumNormRound,
    VoteRound,
    PersonalRound,
)
"""All kinds of rounds."""


def default_layout(kind: type[Broadcast]) -> ReportLayout:
    """Return what a report has in rounds of a kind that fixes it."""
    layout = kind.__dataclass_fields__["report"].default
    assert isinstance(layout, ReportLayout)
    return layout


def _joined(
    parts: Sequence[Mapping[str, NDArray[Any]]], order: Int64 | None
) -> dict[str, NDArray[Any]]:
    """Concatenate arrays by name; all parts must have the same names."""
    joined = {}
    for name in parts[0]:
        try:
            values = np.concatenate([part[name] for part in parts])
            joined[name] = values if order is None else values[order]
        except KeyError:
            raise PeerError(f"only some reports have {name}") from None
        except (ValueError, IndexError):
            raise PeerError(f"reports have {name} of different shapes") from None
    if any(part.keys() != joined.keys() for part in parts):
        raise PeerError("reports of one round have different fields")
    return joined


def _size(value: object) -> int:
    """Bytes of a value on the wire; flags and None are in the header."""
    if value is None or isinstance(value, bool | str):
        return 0
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, int | float):
        return _SCALAR
    if isinstance(value, tuple):
        return sum([_size(each) for each in value])
    if is_dataclass(value):
        return sum([_size(getattr(value, each.name)) for each in fields(value)])
    raise LocalError(f"{type(value).__name__} has no size on the wire")
