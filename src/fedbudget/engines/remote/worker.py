"""A node's work, without the network: rounds, memory and measurements.

A node keeps its fleet's state after each of its last rounds. The aggregator may not have
counted them: a report came too late, or the aggregator crashed and resumes from an earlier
round. Every broadcast names the round to start from. The node returns to its state after
that round and discards later ones, so that a repeated round has the same bits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.data.dataset import Dataset
from fedbudget.data.shards import Table
from fedbudget.engines import in_process
from fedbudget.engines.remote.messages import Answer, Hello, RoundRequest, Welcome
from fedbudget.engines.remote.node_data import NodeData, describe_own
from fedbudget.engines.remote.node_limits import BeyondLimits, NodeLimits, PrivacyAccount
from fedbudget.engines.remote.task import Task, rounds_ahead
from fedbudget.errors import PublicReason, UserError, as_user_error
from fedbudget.evaluation.metrics import Tally
from fedbudget.models.base import Model, require_fit
from fedbudget.protocol.features import newton  # noqa: F401 (makes its feature known)
from fedbudget.protocol.features.feature import FleetState, trial_rounds
from fedbudget.protocol.features.sample_privacy import SamplePrivacy
from fedbudget.protocol.features.workload import Work
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    LocalError,
    LocalUpdates,
    PeerError,
    PersonalRound,
    Report,
    SiteRound,
    VoteRound,
)
from fedbudget.protocol.personal import Personal, vote_report_of
from fedbudget.protocol.site_figures import report_of
from fedbudget.resources import RESOURCES, TIME
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.resource import Reader, Reading, Resource, Usage


@dataclass(frozen=True)
class _SavedRound:
    """A fleet after a round, and the w of that round's broadcast."""

    round: int
    fleet: Fleet
    w: Float32 | None


@dataclass(frozen=True)
class NodeResult:
    """The result of a run at a node.

    Args:
      model: the model.
      name: its name, if it has one.
      samples: description of the node's samples, without the samples.
      w: the global model, [parameters].
      personal: the personal model of each of its nodes.
    """

    model: Model
    name: str | None
    samples: Dataset
    w: Float32
    personal: Sequence[Personal]


@dataclass(frozen=True)
class _Begun:
    """A round before its local updates, and the counters at its beginning."""

    request: RoundRequest
    fleet: Fleet
    counters: Float64


class Worker:
    """The work of a node.

    Args:
      node_data: its samples.
      device: of PyTorch.
      pace: factor on the time of local updates, to simulate a slower machine.
      model: the node's own model, or the only model name it accepts; None for any name.
      readers: counters by resource, instead of the resource's own; None to disable one.
      limits: the node's own limits.
      account: the node's privacy account, if it has a privacy limit.
      keep_figures: whether the figures of personal models stay here.
      batch_secret: hides the positions of mini-batches from the aggregator; None draws them
        from its seed, as in one process.
      on_result: called with the result of the run, if the aggregator sends it.
    """

    def __init__(
        self,
        node_data: NodeData,
        *,
        device: str = "auto",
        pace: float = 1.0,
        model: Model | str | None = None,
        readers: Mapping[str, Reader | None] | None = None,
        limits: NodeLimits | None = None,
        account: PrivacyAccount | None = None,
        keep_figures: bool = False,
        batch_secret: int | None = None,
        on_result: Callable[["NodeResult"], None] = lambda result: None,
    ) -> None:
        self.limits = limits or NodeLimits()
        self.account = account
        self.keep_figures = keep_figures
        self._batch_secret = batch_secret
        self._on_result = on_result
        self.node_data = node_data
        self.run = ""
        self.made = 0  # rounds, whether the aggregator counted them or not
        self.busy = False  # in a round or in a trial
        self.trial_tally: Tally | None = None  # metrics on test samples in the trial
        self._device = device
        self._pace = pace
        self._model = model
        self._readers = readers
        self._resources: tuple[Resource, ...] = (TIME,)
        self._counters = ResourceCounters({})
        self._machine_wide: Flags = np.zeros(0, bool)  # which counters are
        self._last_report: Float64 | None = None  # counters at the last report
        self._task: Task | None = None
        self._ahead = 0  # rounds that are not on the aggregator's disk
        self._initial: Fleet | None = None  # before its first round
        self._test: Table | None = None  # test samples, if any
        self._saved: list[_SavedRound] = []
        self._begun: _Begun | None = None

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds of which the node has its state."""
        return tuple(saved.round for saved in self._saved)

    def hello(self, instance: str, *, private: bool = False) -> Hello:
        """The node's first message.

        With a privacy limit or in a private run, it contains nothing that follows from
        samples, apart from their number and, without a schema, the classes of arrays.

        Args:
          instance: identifier of the process.
          private: whether the aggregator has announced a private run.

        Raises:
          UserError: the limit is reached, or the description would contain statistics.
        """
        self.require_public(private=private)
        samples = self.node_data.samples()
        return Hello(instance, samples, self.run, self.rounds, describe_own(self._model))

    def require_public(self, *, private: bool = False) -> None:
        """Refuse to introduce this node; see `hello`. Nothing is sent before."""
        if self.account is not None:
            self.account.require_left()
        if private or self.account is not None:
            self.node_data.require_public()

    def must_hide(self, task: Task, error: UserError | PeerError) -> bool:
        """Whether the reason why this node refuses a task may follow from its samples.

        It may name a class, for example. In a private run it stays at the node.
        """
        if isinstance(error, PublicReason):
            return False
        try:
            private = any(each.kinds for each in task.built_features)
        except PeerError:
            return False  # the error is about the task alone
        return private or self.account is not None

    def start(self, welcome: Welcome) -> Usage:
        """Accept the task and run a trial, which also compiles kernels.

        The trial consists of a round and, with test samples, an evaluation.
        """
        self.busy = True
        try:
            return self._start(welcome)
        finally:
            self.busy = False

    def _start(self, welcome: Welcome) -> Usage:
        fleet = self.accept(welcome).fork()
        task = welcome.task
        dataset = self.node_data.dataset.name
        w = np.asarray(fleet.model.initial(task.seed))
        rounds = trial_rounds(task.built_features, w, 1e-3)
        counters = ResourceCounters.of(
            each for each in self._resources if not each.machine_wide
        )
        require_fit(fleet.model, dataset, fleet.shards.table, task.batch, self._test)
        named = self._model is None or isinstance(self._model, str)
        failed = f"{fleet.model.name} cannot train on {dataset}"
        with nullcontext() if named else as_user_error(failed):
            costs = in_process.trial([fleet], rounds, counters)
            self._evaluate(fleet.model, [w], counters)  # compiles kernels
            tallies, evaluation = self._evaluate(fleet.model, [w], counters)
        self.trial_tally = tallies[0] if tallies else None

        seconds = costs.readings[TIME.name]
        step = self._pace * seconds.step
        slowed = replace(seconds, step=step, whole=seconds.whole - seconds.step + step)
        readings = {**costs.readings, TIME.name: slowed}
        return replace(costs, readings=readings, evaluation=evaluation)

    def accept(self, welcome: Welcome) -> Fleet:
        """Accept the task; return the fleet before its first round."""
        rows = self.node_data.rows
        if len(welcome.numbers) != len(rows):
            raise PeerError(
                f"numbers for {len(welcome.numbers)} nodes instead of {len(rows)}"
            )
        if welcome.run != self.run or welcome.task != self._task:
            self._accept_new(welcome)
        assert self._initial is not None
        return self._initial

    def _accept_new(self, welcome: Welcome) -> None:
        task = welcome.task
        try:
            task.built_features  # noqa: B018
        except PeerError as error:
            raise UserError(str(error)) from None  # another attempt would not help
        self.limits.require_task(task, min(map(len, self.node_data.rows)))
        if any(each.name == SamplePrivacy.name for each in task.built_features):
            self.node_data.require_public()
        if self.account is not None:
            self.account.require_private(task)
        self._initial = self.node_data.fleet(
            task,
            welcome.numbers,
            device=self._device,
            own_model=self._model,
            batch_secret=self._batch_secret,
        )
        self._test = self.node_data.test_table(task.samples, self._initial.model)
        self._saved = []
        # Read the counters of these resources, if they are known and readable here.
        names = dict.fromkeys((TIME.name, *task.readings))
        self._resources = tuple(RESOURCES[name] for name in names if name in RESOURCES)
        self._counters = ResourceCounters.of(self._resources, self._readers)
        self._machine_wide = np.array(
            [RESOURCES[name].machine_wide for name in self._counters.names]
        )
        self._last_report = None
        self.run = welcome.run
        self._task = task
        self._ahead = rounds_ahead(task.parameters)

    def memories(self, last: int) -> dict[int, FleetState]:
        """State after each of the last rounds, for a later process."""
        return {saved.round: saved.fleet.memory() for saved in self._saved[-last:]}

    def recall(self, memories: Mapping[int, FleetState]) -> None:
        """Restore the memories of an earlier process, for the accepted task."""
        self._saved = []
        for _, memory in sorted(memories.items()):
            fleet = self._after(0).fleet.fork()
            fleet.recall(memory)
            broadcast = memory.broadcast
            self._saved.append(_SavedRound(broadcast.round, fleet, broadcast.w))

    def warm_up(self, request: RoundRequest) -> None:
        """Make one update that does not count, to load and compile everything.

        If every round runs in a new process, this keeps the measured times right.
        """
        fleet = self._after(request.base_round).fleet.fork()
        broadcast = request.broadcast
        if isinstance(broadcast, LocalUpdates):
            others = tuple([each for each in broadcast.parts if not isinstance(each, Work)])
            broadcast = replace(broadcast, tau=1, parts=others)
        fleet.receive(broadcast)
        fleet.update()

    def w_after(self, base_round: int) -> Float32 | None:
        """The w of the broadcast of `base_round`."""
        return self._after(base_round).w

    @property
    def task(self) -> Task:
        """The accepted task."""
        if self._task is None:
            raise LocalError("there is no task before accept() or start()")
        return self._task

    @property
    def numbers(self) -> Int64:
        """Numbers of the nodes, [n]."""
        return self._after(0).fleet.numbers

    def begin(self, request: RoundRequest) -> Fleet:
        """Begin a round up to its local updates, and return the fleet that makes it."""
        if self._task is None:
            raise LocalError("a round requires accept() or start() first")
        broadcast = request.broadcast
        self.limits.require_round(broadcast)
        if self.account is not None:
            self.account.pay(self.run, broadcast)
        ahead = self._ahead
        base = self._after(request.base_round)
        # Keep the rounds that are not on disk, one before them, and this one. No other
        # variable may refer to older rounds, because they hold large vectors.
        self._saved = [saved for saved in self._saved if saved.round <= base.round][
            -(ahead + 2) :
        ]
        fleet = base.fleet.fork()
        began = self._counters.read()
        last = self._last_report
        if last is not None:
            # Machine-wide counters continue while the node waits: they start at the last
            # report.
            began = np.where(self._machine_wide & ~np.isnan(last), last, began)
        fleet.receive(broadcast)
        self._begun = _Begun(request, fleet, began)
        return fleet

    def answer(self, request: RoundRequest) -> Answer:
        """Run a round, or complete the begun one; return the report and its costs."""
        if isinstance(request.broadcast, SiteRound):
            fleet = self._after(request.base_round).fleet
            return self._personalise(fleet, request.broadcast, self.task)
        self.busy = True
        try:
            if self._begun is None or self._begun.request is not request:
                self.begin(request)
            begun = self._begun
            self._begun = None
            assert begun is not None
            report, costs = self._round(begun)
        finally:
            self.busy = False
        fleet = begun.fleet
        broadcast = request.broadcast
        tallies: tuple[Tally, ...] = ()
        if broadcast.evaluate:
            best = broadcast.result
            if best is None:
                best = fleet.memory().best
            points = [broadcast.w, best][: broadcast.tallies]
            tallies, evaluation = self._evaluate(fleet.model, points, self._counters)
            costs = replace(costs, evaluation=evaluation)
            self._last_report = self._counters.read()
        self.made += 1
        if not self._ahead:
            fleet.compact()
        self._saved.append(_SavedRound(broadcast.round, fleet, broadcast.w))
        return Answer(report, costs, tallies)

    def _personalise(self, fleet: Fleet, broadcast: SiteRound, task: Task) -> Answer:
        """Fit candidates or personal models of this node; none of them leaves it."""
        votes = isinstance(broadcast, VoteRound)
        asked = votes or (isinstance(broadcast, PersonalRound) and broadcast.figures)
        if self.account is not None and asked:
            self.account.pay(self.run, broadcast)  # refuses: figures are not private
        private = any(feature.kinds for feature in task.built_features)
        kept = self.keep_figures or self.account is not None or private
        now = self._counters.read
        began = now()
        self.busy = True
        report: Report
        try:
            sites = fleet.sites(broadcast.w)
            if isinstance(broadcast, VoteRound):
                given = None if kept else sites.votes()
                report = vote_report_of(broadcast, fleet.numbers, fleet.sizes, given)
            else:
                assert isinstance(broadcast, PersonalRound)
                models = sites.personal(broadcast.prior)
                shown = [] if kept else [each.figures for each in models]
                report = report_of(broadcast, fleet.numbers, fleet.sizes, shown)
        finally:
            self.busy = False
        whole = now() - began
        costs = Usage(self._counters.readings(whole - whole, whole, 1), len(report.nodes))
        if isinstance(broadcast, PersonalRound):
            name = task.model if isinstance(task.model, str) else None
            samples = self.node_data.aligned(task.samples).empty()
            self._on_result(NodeResult(fleet.model, name, samples, broadcast.w, models))
        return Answer(report, costs)

    def encode(self, report: Report) -> bytes | memoryview:
        """Encode the vectors of the last report for sending."""
        last = self._saved[-1] if self._saved else None
        if last is None or last.round != report.round:
            if not report.vectors:
                return b""
            raise LocalError("only the last report can be encoded")
        state = last.fleet.state
        if state is not None and getattr(state.broadcast, "only_masked", False):
            raise BeyondLimits(
                "the aggregator requests sums over samples without masks; start it with "
                "`secure_aggregation`"
            )
        return last.fleet.sent.encoded(report) if report.vectors else b""

    def _after(self, number: int) -> _SavedRound:
        """The state after a round; 0 for the initial state."""
        if number == 0:
            if self._initial is None:
                raise LocalError("a round requires accept() or start() first")
            return _SavedRound(0, self._initial, None)
        for saved in self._saved:
            if saved.round == number:
                return saved
        raise PeerError(
            f"this node has no memory of round {number}, only of {list(self.rounds)}"
        )

    def _round(self, begun: _Begun) -> tuple[Report, Usage]:
        now = self._counters.read
        fleet = begun.fleet
        updating = now()
        if self._pace > 1:
            self._update_slowly(fleet)
        else:
            fleet.update()
        update_costs = now() - updating
        report = fleet.report()
        self._last_report = now()
        whole = self._last_report - begun.counters
        steps = begun.request.broadcast.steps
        readings = self._counters.readings(update_costs, whole, steps)
        return report, Usage(readings, len(report.nodes))

    def _update_slowly(self, fleet: Fleet) -> None:
        """Sleep in proportion to the thread's own time, not to that of other processes."""
        computing = time.thread_time()
        fleet.update()
        time.sleep((self._pace - 1) * (time.thread_time() - computing))

    def _evaluate(
        self, model: Model, points: Sequence[Float32], counters: ResourceCounters
    ) -> tuple[tuple[Tally, ...], dict[str, Reading]]:
        """Metrics of each w on the test samples, and the costs; empty without samples."""
        if self._test is None or self._task is None:
            return (), {}
        began = counters.read()
        units = self._task.samples.standardization
        tallies: list[Tally] = []
        for index, w in enumerate(points):
            if index and np.array_equal(points[0], w):  # w^f may be w
                tallies.append(tallies[0])
            else:
                tallies.append(Tally.of(model, w, self._test, units))
        used = counters.read() - began
        return tuple(tallies), counters.readings(used - used, used, 1)
