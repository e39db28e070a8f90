"""The interface of features.

A feature extends the rounds of a run: drift correction, momentum at nodes, a penalty. It is
a frozen dataclass of the settings that all sides share, and has both sides in one file:

    broadcast   what it adds to a message (`message`, `catch_up`: subclasses of `RoundPart`)
    nodes       what they do and report (`begin` ... `report`), and what they remember
    aggregator  what it computes from the reports (`after`), and its state

The aggregator and the fleet call the methods below and know no feature by name. A method
that a feature does not define costs nothing. States are frozen dataclasses: subclasses of
`FeatureState` at the aggregator, of `NodeMemory` at nodes. Both are saved in checkpoints.
Features run in the order of `Method.features`, and a feature may read the states of those
before it.

A feature that nodes in other processes use must be known there: see `register_feature`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.budget import Ledger
from fedbudget.budget.control import ControlInputs, Decision
from fedbudget.data.sampling import BatchIndices, Sampler, SamplerState
from fedbudget.data.shards import Shards
from fedbudget.errors import printable
from fedbudget.models.base import Descent, Model
from fedbudget.protocol.messages import (
    LOSSES,
    ROUNDS,
    Broadcast,
    FinalRound,
    LossRound,
    PeerError,
    ReportLayout,
    RoundPart,
    SiteRound,
    TrainRound,
    default_layout,
)
from fedbudget.protocol.sums import Sums

Quantize = Callable[[Float32, Float32], Float32]
"""Return a vector as nodes receive it, from the vector and a reference that they hold: the
w of the previous broadcast for a new w, and w for the combined w_i."""

_NO_BATCHES = BatchIndices.whole(0)

MOST_BEYOND = 1e3  # largest plausible ratio of a node's number to the median over peers


class FeatureState:
    """State of a feature at the aggregator; a subclass is a frozen dataclass."""

    @property
    def sent_vectors(self) -> tuple[Float32, ...]:
        """Vectors that follow from w; a run restarts if one is not finite."""
        return ()

    def require_possible(self, w: Float32) -> None:
        """Raise ValueError for values that no run produces; a file may be damaged."""


class NodeMemory:
    """State of a feature at the nodes of a fleet; a subclass is a frozen dataclass."""

    def require_shapes(self, nodes: int, parameters: int, held_out: Any) -> None:
        """Raise ValueError for arrays of wrong shapes; a file may be damaged."""


class NodeTimes(NamedTuple):
    """Time of a local update at each node in one round.

    Args:
      nodes: numbers of the nodes, ascending, [n].
      times: in any unit that is the same for all nodes and rounds, [n].
    """

    nodes: Int64
    times: Float64


class Noise(Protocol):
    """Source of noise at the aggregator."""

    def draw(self, round_: int, size: int) -> Float64:
        """Return standard Gaussian numbers for the result of a round, [size]."""


class NodeNoise(Protocol):
    """Source of noise at nodes."""

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        """Return standard Gaussian numbers, [size].

        Args:
          round_: number of the round.
          node: number of the node.
          update: index of the update in the round.
          inputs: digest of everything except samples that determines the update. Equal
            inputs receive equal noise, so that a repeated answer reveals nothing new;
            others do not, because differences would reveal samples.
          size: how many numbers.
        """

    def draw_integers(
        self, round_: int, node: int, update: int, inputs: bytes, size: int, bits: int
    ) -> Int64:
        """Return exact discrete Gaussian integers of standard deviation 2^bits, [size].

        Other arguments as for `draw`.
        """


@dataclass(frozen=True)
class FleetState:
    """A fleet of n nodes between two rounds.

    Args:
      broadcast: the last broadcast, without its `catch_up`.
      start: starting point of the gradients of the last round, [parameters].
      w: w_i(t), [n, parameters]; None before the first local update.
      best: w^f.
      losses: F_i at the last broadcast's w, [n]; None if they were not evaluated.
      best_known: F_i(w^f) on whole shards, [n]; None with mini-batches.
      memories: of features, by name.
      position: position of the mini-batch sampler, in a state to resume from.
      lost: compression error of w_i(t), [n, parameters], in a state to resume from.
    """

    broadcast: Broadcast
    start: Float32 | None
    w: Float32 | None
    best: Float32
    losses: Float64 | None
    best_known: Float64 | None
    memories: Mapping[str, NodeMemory]
    position: SamplerState | None = None
    lost: Float32 | None = None


@dataclass
class LocalRound:
    """A round at n nodes, while it is made.

    Args:
      broadcast: the broadcast, as sent to these nodes.
      model, shards: the model, and the nodes' data.
      numbers: numbers of the nodes, [n].
      sampler: draws mini-batches.
      last: the nodes after the previous round; None before the first.
      missed: whether the nodes missed the previous round.
      start: starting point of the gradients, [parameters]; w(t₀) unless a feature moves it.
      best: w^f.
      best_known: F_i(w^f) if it is known before the round, [n].
      noise: noise of the nodes, for per-sample privacy.
      memories: of features by name, to be replaced.
      held_out: rows that features held out of the shards, by name.
      statistics: number of running statistics at the end of w.
      draws: mini-batches to draw.
      counts: local updates of each node, [n]; None if all make τ.
      fresh: whether the first mini-batch is a new one.
      epoch: whether the mini-batches start a new epoch.
      indices: the mini-batches; set after `begin`.
      eta: step size, or one for each node, [n].
      scale: factor of each node's step, [n]; None for 1.
      losses, best_losses: F_i(w(t₀)) and F_i(w^f), [n].
      gradients: ∇F_i(w(t₀)), [n, parameters].
      w: w_i(t) as the aggregator receives them, [n, parameters].
      scratch: values of features within the round, by name.
    """

    broadcast: Broadcast
    model: Model
    shards: Shards
    numbers: Int64
    sampler: Sampler
    last: FleetState | None
    missed: bool
    start: Float32
    best: Float32
    best_known: Float64 | None
    noise: NodeNoise | None
    memories: dict[str, Any]
    statistics: int
    draws: int
    counts: Int64 | None = None
    fresh: bool = True
    epoch: bool = False
    indices: BatchIndices = _NO_BATCHES
    eta: float | Float32 = 0.0
    scale: Float32 | None = None
    losses: Float64 | None = None
    best_losses: Float64 | None = None
    gradients: Float32 | None = None
    w: Float32 | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    held_out: Mapping[str, Any] = field(default_factory=dict)

    def scale_by(self, scale: Float32) -> None:
        """Multiply each node's step by a factor, [n]."""
        self.scale = scale if self.scale is None else self.scale * scale


@dataclass
class RoundResult:
    """A training round at the aggregator, while it is evaluated.

    Args:
      broadcast: the broadcast of the round.
      sums: sums of the reports.
      start: starting point of the nodes' gradients, [parameters].
      combined: the combined w_i(t), [parameters]; None if the run recovers.
      mean: the vector to compare the w_i(t) with, [parameters]. It is w(t) as nodes receive
        it, unless the update rule moved w away from the mean.
      w: w(t) as nodes receive it, [parameters].
      slowdown: step size of the coming round over that of this one; at most 1.
      recover: whether the run returns to w^f.
      capped: whether outliers were capped.
      times: time of a local update at each node, if measured.
      quantize: returns vectors as nodes receive them; None without compression.
      statistics: number of running statistics at the end of w.
      last: whether the round was to use up the budget.
      ledger: the ledger after the round.
      states: states of features by name; those before a feature are up to date.
    """

    broadcast: TrainRound
    sums: Sums
    start: Float32
    combined: Float32 | None
    mean: Float32
    w: Float32
    slowdown: float
    recover: bool
    capped: bool
    times: NodeTimes | None
    quantize: Quantize | None
    statistics: int
    last: bool
    ledger: Ledger
    states: dict[str, FeatureState]

    @property
    def spent(self) -> float:
        """Spent share of the budget."""
        return self.ledger.share

    @property
    def cost(self) -> float:
        """Cost of the round in local updates; infinite if those cost nothing."""
        return self.ledger.cost_in_updates(self.broadcast.steps)


@dataclass(frozen=True)
class Choice:
    """What is known when τ of the coming round is chosen.

    Args:
      inputs: inputs of the controller.
      resources: names of the budget's resources, in the order of the inputs.
      round: number of the coming round.
      states: states of features by name.
    """

    inputs: ControlInputs
    resources: Sequence[str]
    round: int
    states: Mapping[str, FeatureState]

    def scarcest(self, tau: int) -> str:
        """Return the resource of whose limit a round takes the largest fraction."""
        inputs = self.inputs
        fractions = (tau * inputs.c + inputs.b) / inputs.budget
        return self.resources[int(fractions.argmax())]


@dataclass(frozen=True)
class Chosen:
    """The w that validation chose.

    Args:
      w: [parameters].
      round: the round that validated it.
      mean: whether it is the mean of w up to that round, not the w that the round started
        with.
      loss: its validation loss.
      first_loss: validation loss of w(0).
      improved: the round that started with the last significantly better w.
      sites, first_sites: validation losses of w and of w(0) by node number, if known.
    """

    w: Float32
    round: int
    mean: bool
    loss: float
    first_loss: float
    improved: int
    sites: Mapping[str, float] = field(default_factory=dict)
    first_sites: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reported:
    """What nodes report for a feature in a training round.

    Args:
      numbers: numbers of each node, with the largest plausible ratio to the median over
        peers (combine.py).
      optional: whether a node may lack the numbers; it reports NaN. A number beyond its
        limit then counts as unknown. Otherwise all numbers of the node count as medians.
      vectors: vectors of each node.
      floors: for a number whose median may be near 0, the name of another number of the
        group. Its limit refers to the larger of the two medians.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    optional: bool = False
    vectors: tuple[str, ...] = ()
    floors: Mapping[str, str] = field(default_factory=dict)


NOTHING = Reported()


class Feature:
    """Base class of features. Every method has a default that changes nothing."""

    name: ClassVar[str]
    """Name among the features of a run; also the key of its states."""
    types: ClassVar[tuple[type, ...]] = ()
    """Dataclasses of its messages, states and memories, for the codec."""
    kinds: ClassVar[tuple[type[Broadcast], ...]] = ()
    """Kinds of the run's rounds, if they are not training and final rounds."""

    # What nodes report.

    def reported(self, first: bool) -> Reported:
        """Return what nodes report in the first training round, or in later ones."""
        return NOTHING

    def reported_finally(self, kind: type[Broadcast] = FinalRound) -> Reported:
        """Return what nodes report in rounds of a kind without updates."""
        return NOTHING

    # Nodes, in the order of calls.

    def hold_out(self, shards: Shards, seed: int) -> tuple[Shards, Any]:
        """Hold rows out of the training, once before the first round.

        Args:
          shards: rows of the nodes.
          seed: seed of the run.

        Returns:
          the rows to train on, and what rounds find in `LocalRound.held_out`.
        """
        return shards, None

    def trial(self, number: int, w: Float32, eta: float) -> Broadcast | None:
        """Return a round of the run's kind with τ=1, to measure it; None if it trains."""
        return None

    def begin(self, local: LocalRound) -> None:
        """Prepare a round, before its mini-batches are drawn."""

    def common(self, local: LocalRound) -> Sequence[Float32]:
        """Return vectors of earlier rounds that all nodes of this round share.

        Nodes of a masked sum compare them. They must contain everything that this feature
        took from the aggregator before this broadcast, or in its `catch_up`, and that
        changes the report.
        """
        return ()

    def measure(self, local: LocalRound) -> None:
        """Evaluate what precedes the local updates, with the mini-batches of the round."""

    def shift(self, local: LocalRound) -> Float32 | None:
        """Return a constant addition to gradients, [n, parameters] or [1, parameters]."""
        return None

    def pull(self, local: LocalRound, w: Float32) -> Float32 | None:
        """Return an addition to the gradients at w.

        A feature with this method makes local updates slower: they are made one by one.

        Args:
          local: the round.
          w: w_i after some local updates, [n, parameters].

        Returns:
          the addition, [n, parameters].
        """
        return None

    def descend(self, local: LocalRound) -> Descent | None:
        """Make the local updates in place of the fleet; None to leave them to it."""
        return None

    def end(self, local: LocalRound) -> None:
        """Follow the local updates: `local.w` is set."""

    def report(self, local: LocalRound) -> Mapping[str, Float64 | Float32]:
        """Return the reported numbers and vectors, by name.

        In a round without updates it is called if the feature defines `reported_finally`.
        """
        return {}

    def compact(self, state: FleetState) -> FleetState:
        """Drop vectors from a fleet's state that `expand` can recompute."""
        return state

    def expand(self, state: FleetState, model: Model) -> FleetState:
        """Undo `compact`, to the bit."""
        return state

    # Aggregator.

    def first(self, w: Float32) -> FeatureState | None:
        """Return the state before the first round; None for a feature without state."""
        return None

    def message(self, state: Any) -> RoundPart | None:
        """Return what the coming broadcast says."""
        return None

    def catch_up(self, state: Any) -> RoundPart | None:
        """Return what nodes need that missed the previous round."""
        return None

    def start(self, state: Any, w: Float32, statistics: int) -> Float32 | None:
        """Return the starting point of gradients if it is not w(t₀), [parameters]."""
        return None

    def unbias(self, state: Any, broadcast: TrainRound, mean: Float32) -> Float32:
        """Correct the combined w_i(t), [parameters]."""
        return mean

    def after(self, state: Any, result: RoundResult) -> FeatureState | None:
        """Return the state after a training round."""
        return state  # type: ignore[no-any-return]

    def after_final(self, state: Any, sums: Sums, w: Float32) -> FeatureState | None:
        """Return the state after a final round.

        Args:
          state: state of the feature.
          sums: sums of the reports.
          w: the w that was evaluated, [parameters].
        """
        return state  # type: ignore[no-any-return]

    def chosen(self, state: Any) -> "Chosen | None":
        """Return the result of the run if it is not w^f."""
        return None

    def restart(self, state: Any) -> Float32 | None:
        """Return the w from which the run continues if it is not w(t), [parameters]."""
        return None

    def ends(self, state: Any) -> float:
        """Return the share of the budget after which the run ends; 1 for all of it."""
        return 1.0

    def recorded(self, state: Any, result: RoundResult | None) -> Mapping[str, Any]:
        """Return fields of the round's record (aggregator.py).

        Args:
          state: state after the round.
          result: the round; None if it was final.
        """
        return {}

    def counted(self, state: Any, decision: Decision) -> Decision:
        """Return the last decision with the τ that the controller must count with."""
        return decision

    def choose(
        self, state: Any, decision: Decision, choice: "Choice"
    ) -> tuple[FeatureState | None, Decision]:
        """Change the controller's decision.

        Args:
          state: state of the feature.
          decision: the controller's decision.
          choice: what is known about the coming round.
        """
        return state, decision

    def announce(self, state: Any, tau: int) -> tuple[Any, float]:
        """Fix the coming round.

        Args:
          state: state of the feature.
          tau: its τ, which fits the budget.

        Returns:
          the state, and τ_eff.
        """
        return state, tau

    def finish(self, state: Any) -> FeatureState | None:
        """Return the state for a final round, which makes no updates."""
        return state  # type: ignore[no-any-return]

    def forget(
        self,
        state: Any,
        nodes: Collection[int],
        states: Mapping[str, FeatureState],
        broadcast: Broadcast,
    ) -> FeatureState | None:
        """Remove nodes that left for good or returned without their memory.

        Args:
          state: state of the feature.
          nodes: numbers of the nodes.
          states: states of all features; those before this one are up to date.
          broadcast: the broadcast that would have been sent next.

        Returns:
          the state; the same object if nothing changed.
        """
        return state  # type: ignore[no-any-return]

    def extended(self, state: Any) -> FeatureState | None:
        """Return the state after the budget of an ended run has grown."""
        return state  # type: ignore[no-any-return]

    def recovered(self, state: Any) -> FeatureState | None:
        """Return the state after w was replaced: by w^f, or by a `restart`."""
        return state  # type: ignore[no-any-return]


F = TypeVar("F", bound=Feature)

Option = bool | int | float | str | tuple[int, ...] | None
"""Type of a setting of a feature."""

_REGISTERED: dict[str, type[Feature]] = {}


@dataclass(frozen=True)
class FeatureSettings:
    """A feature as sent to nodes and stored in checkpoints.

    Args:
      kind: name of its class.
      options: its settings by name.
    """

    kind: str
    options: Mapping[str, Option]

    @classmethod
    def of(cls, feature: Feature) -> "FeatureSettings":
        options = {each.name: getattr(feature, each.name) for each in fields(feature)}  # type: ignore[arg-type]
        return cls(type(feature).__name__, options)

    def build(self) -> Feature:
        """Return the feature.

        Raises:
          PeerError: this process does not know the feature, or not with these settings.
        """
        kind = _REGISTERED.get(self.kind)
        name = printable(self.kind, 100)
        if kind is None:
            raise PeerError(
                f"the run uses the feature {name}, which is not known here: import "
                "the file that defines it before you join"
            )
        known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted(self.options.keys() - known):
            option = printable(unknown[0], 100)
            raise PeerError(f"the feature {name} has no option {option}")
        try:
            return msgspec.convert(dict(self.options), kind)
        except (TypeError, ValueError) as error:
            reason = printable(str(error), 300)
            raise PeerError(f"the feature {name} cannot be used: {reason}") from None


def register_feature(kind: type[F]) -> type[F]:
    """Make a feature known in this process. Use it as a decorator of the class.

    The aggregator's process and every node's process must have the class, because only its
    name and settings are sent.
    """
    declared: Any = vars(kind).get("__dataclass_params__")
    if declared is None or not declared.frozen:
        raise ValueError(f"the feature {kind.__name__} must be a frozen dataclass")
    known = _REGISTERED.get(kind.__name__, kind)
    if known.__module__ != kind.__module__:
        raise ValueError(f"a feature named {kind.__name__} exists already")
    _REGISTERED[kind.__name__] = kind
    return kind


registered_features = _REGISTERED.__len__
"""Returns how many features this process knows."""


def wire_types() -> dict[type, tuple[type, ...]]:
    """Return the classes of messages and states that this process knows, by base class."""
    return _wire_types(len(_REGISTERED))


@lru_cache(4)
def _wire_types(features: int) -> dict[type, tuple[type, ...]]:
    types = [each for kind in _REGISTERED.values() for each in kind.types]
    members: dict[type, tuple[type, ...]] = {
        base: tuple(dict.fromkeys(each for each in types if issubclass(each, base)))
        for base in (RoundPart, FeatureState, NodeMemory)
    }
    return {Broadcast: ROUNDS, **members}


def defining(features: Sequence[Feature], method: str) -> list[Feature]:
    """Return the features that define a method of the interface."""
    default = getattr(Feature, method)
    return [each for each in features if getattr(type(each), method) is not default]


def expected_layout(features: tuple[Feature, ...], broadcast: Broadcast) -> ReportLayout:
    """Return what the report of a broadcast has.

    Raises:
      PeerError: a run with these features has no such round.
    """
    kinds = [kind for feature in features for kind in feature.kinds]
    if isinstance(broadcast, SiteRound):
        return broadcast.expected
    if not isinstance(broadcast, tuple(kinds) or (TrainRound, FinalRound)):
        raise PeerError(f"{type(broadcast).__name__} is no round of this run")
    if isinstance(broadcast, TrainRound):
        return report_layout(features, broadcast.round == 1)
    if isinstance(broadcast, LossRound):
        return final_layout(features, type(broadcast))
    return default_layout(type(broadcast))


def trial_rounds(features: Sequence[Feature], w: Float32, eta: float) -> list[Broadcast]:
    """Return rounds like those of a run, to measure their cost.

    Args:
      features: features of the run.
      w: w(0), [parameters].
      eta: step size.

    Returns:
      three rounds with τ=1, and a final round if the run has one.
    """
    rounds: list[Broadcast] = []
    messages = [feature.message(feature.first(w)) for feature in features]
    parts = tuple([part for part in messages if part is not None])
    for number in (1, 2, 3):
        own = [feature.trial(number, w, eta) for feature in features]
        kinds = [each for each in own if each is not None]
        layout = report_layout(tuple(features), number == 1)
        usual = TrainRound(
            round=number, w=w, tau=1, eta=eta, effective=1, report=layout, parts=parts
        )
        rounds.append(kinds[0] if kinds else usual)
    if isinstance(rounds[0], TrainRound):
        layout = final_layout(tuple(features))
        rounds.append(FinalRound(round=4, w=w, parts=rounds[0].parts, report=layout))
    return rounds


@lru_cache(64)
def report_layout(features: tuple[Feature, ...], first: bool) -> ReportLayout:
    """Return what the report of the first training round has, or of a later one."""
    numbers = ["losses", "best_losses"]
    vectors = ["w"]
    optional: list[str] = []
    for feature in features:
        reported = feature.reported(first)
        numbers += reported.numbers
        vectors += reported.vectors
        if reported.optional:
            optional += reported.numbers
    return ReportLayout(tuple(numbers), tuple(vectors), tuple(optional))


def final_layout(
    features: tuple[Feature, ...], kind: type[Broadcast] = FinalRound
) -> ReportLayout:
    """Return what the report of the final round has, or of another without updates."""
    numbers = [each for own in features for each in own.reported_finally(kind).numbers]
    return ReportLayout((*LOSSES.numbers, *numbers))
