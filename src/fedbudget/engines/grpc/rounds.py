"""The rounds of a run: which nodes are asked, and when a round is over.

engines/remote/round.py keeps the books of a round. This file sends the messages and sets
the timers. A `ReportCollector` decides how reports are requested, received and summed:
`PlainReports` here, or `MaskedSums` in masked_sums.py. `OwnNode` is the node inside the
aggregator's process, for an aggregator with data.

Threads: everything runs in the event loop's thread, with two exceptions. `Rounds.finish` is
called by the aggregator's thread. `OwnNode` trains in a thread of its own, and its results
return to the event loop.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fedbudget.arrays import Float32
from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc.event_loop import LoopThread
from fedbudget.engines.grpc.messages import FromNode, NodeReader
from fedbudget.engines.grpc.peers import LOG, Peer, Peers
from fedbudget.engines.grpc.stream import frames
from fedbudget.engines.remote.members import OWN, Members
from fedbudget.engines.remote.messages import (
    Answer,
    MemberAnswer,
    RoundRequest,
    Welcome,
)
from fedbudget.engines.remote.round import CollectedRound, NextStep, PendingRound
from fedbudget.engines.remote.wire import ExpectedReport, pack_broadcast
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.features import compression
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.protocol.features.workload import Work
from fedbudget.protocol.messages import Broadcast, PeerError, SiteRound
from fedbudget.resources import within
from fedbudget.resources.resource import Usage

_NOT_FINITE = 3  # consecutive invalid reports after which a node is dropped
_NEVER = 1e6  # seconds; no timer is set for a longer wait

Pending = PendingRound[str]


class ReportCollector(Protocol):
    """How the reports of a round are requested, received and summed.

    Attributes:
      same_for_all: whether all nodes receive the same broadcast, also the parts that
        concern other nodes.
      last_attempt: number of the last attempt at a round; 0 if attempts have no numbers.
    """

    same_for_all: bool
    last_attempt: int

    @property
    def fewest(self) -> int:
        """Number of nodes that any round needs."""

    def reader(self) -> NodeReader:
        """Create the reader of a new peer's messages."""

    def before_welcome(self) -> list[bytes]:
        """Messages to a peer that precede its welcome."""

    def require_ready(self, peer: Peer) -> None:
        """Raise `PeerError` if a peer sends `ready` too early."""

    def withdraw(self, peer: Peer) -> None:
        """Forget a peer that has left."""

    def begin(
        self,
        pending: Pending,
        members: Members[str],
        peers: Peers,
        wake_at: Callable[[float], None],
    ) -> None:
        """Begin a round.

        Args:
          wake_at: requests a call of `next_step` at a time, by the event loop's clock.
        """

    def requests(self, idle: Sequence[Peer]) -> Iterable[tuple[Peer, list[bytes]]]:
        """Choose idle peers to ask, each with the messages that precede its broadcast."""

    def accept(self, peer: Peer, message: FromNode) -> MemberAnswer | None:
        """Accept a message; returns the peer's answer if the message has it."""

    def next_step(self, now: float) -> NextStep:
        """Decide what to do next; called after each event of the round."""

    def close(self, instances: Mapping[str, str]) -> CollectedRound:
        """End the round; see `PendingRound.close`."""


class PlainReports:
    """Collects the reports of single members."""

    fewest = 1
    same_for_all = False
    last_attempt = 0

    def reader(self) -> NodeReader:
        return NodeReader()

    def before_welcome(self) -> list[bytes]:
        return []

    def require_ready(self, peer: Peer) -> None:
        """A plain report needs no preparation."""

    def withdraw(self, peer: Peer) -> None:
        """There is no state of peers here."""

    def begin(
        self,
        pending: Pending,
        members: Members[str],
        peers: Peers,
        wake_at: Callable[[float], None],
    ) -> None:
        self._pending = pending
        self._members = members

    def requests(self, idle: Sequence[Peer]) -> Iterable[tuple[Peer, list[bytes]]]:
        expected = ExpectedReport.of(self._pending.broadcast)
        for peer in idle:
            member = self._members[peer.name]
            peer.reader.expect_report(expected, member.numbers, member.counted)
        return [(peer, []) for peer in idle]

    def accept(self, peer: Peer, message: FromNode) -> Answer:
        assert isinstance(message, Answer)
        expected = peer.hello.samples.test_samples
        if any(tally.samples != expected for tally in message.tallies):
            raise PeerError(f"test results that do not cover its {expected} test samples")
        peer.asked = 0
        return message

    def next_step(self, now: float) -> NextStep:
        return self._pending.next_step(now, self._members)

    def close(self, instances: Mapping[str, str]) -> CollectedRound:
        return self._pending.close(self._members, instances)


class Rounds:
    """Makes one round after the other.

    Args:
      compressor: of broadcast vectors.
      reports: how reports are collected.
    """

    def __init__(
        self,
        thread: LoopThread,
        peers: Peers,
        compressor: BroadcastCompressor,
        reports: ReportCollector,
    ) -> None:
        self.peers = peers
        self.reports = reports
        self.counters = peers.counters
        self.members: Members[str] = Members()
        self.own: OwnNode | None = None
        self.pending: Pending | None = None
        self._thread = thread
        self._compressor = compressor
        self._timers: list[asyncio.TimerHandle] = []
        self._error: Exception | None = None  # on the aggregator's side
        self._finished: concurrent.futures.Future[CollectedRound] | None = None
        self._stopped = False  # the run was interrupted

    def count(self, *, ready: bool = False) -> int:
        """Number of connected (or ready) nodes, including the aggregator's own."""
        own = 0 if self.own is None else self.own.nodes
        return own + sum(
            len(peer.hello.samples.sizes)
            for peer in self.peers
            if peer.trial is not None or not ready
        )

    def begin(self, broadcast: Broadcast, terms: RoundTerms) -> None:
        """Begin a round: ask all idle nodes."""
        now = self._thread.loop.time()
        if isinstance(broadcast, SiteRound):
            self._stopped = False  # a target may have stopped the rounds before it
        if self._compressor.kind != "none":
            broadcast = replace(broadcast, compress=self._compressor.kind)
        pending = PendingRound(
            broadcast,
            terms.least,
            now + terms.timeout,
            now + terms.left,
            needs_reports=terms.needs_reports,
            resting=self.members.having(terms.resting),
            pay_again=terms.pay_again,
        )
        pending.stopped = self._stopped  # keeps an interruption between two rounds
        self.pending = pending
        self.reports.begin(pending, self.members, self.peers, self._wake_at)
        try:
            self._ask_idle(pending)
        except Exception as error:
            self._fail(error)
        self._wake_at(pending.deadline)
        self._wake_at(pending.end)

    def finish(self, finished: "concurrent.futures.Future[CollectedRound]") -> None:
        """Set the round's result as soon as it is over; from the aggregator's thread.

        If answers are still due, the last one to arrive completes the round, and the event
        loop is not woken up.
        """
        self._finished = finished
        if self.pending is None or not self.pending.waits(self._thread.loop.time()):
            self._thread.post(self.check)

    def check(self, when: float = 0.0) -> None:
        """Take the round's next step.

        Args:
          when: a lower bound of the current time; see `_wake_at`.
        """
        pending = self.pending
        if pending is None:
            return
        now = max(when, self._thread.loop.time())
        try:
            step = self.reports.next_step(now)
            if step is NextStep.ASK:
                self._ask_idle(pending)
        except Exception as error:
            self._fail(error)
            step = NextStep.CLOSE
        if step in (NextStep.CLOSE, NextStep.GIVE_UP):
            self._finish(pending)

    def receive(self, peer: Peer, message: FromNode) -> None:
        """Accept a peer's message; its costs are capped by the time since it was asked."""
        asked = peer.asked
        answer = self.reports.accept(peer, message)
        if answer is not None:
            waited = self._thread.loop.time() - peer.asked_at
            steps = 1 if self.pending is None else self.pending.broadcast.steps
            costs = within(answer.costs, waited, steps)
            self._receive(peer.name, asked, replace(answer, costs=costs, waited=waited))
        self.check()

    def withdraw(self, peer: Peer) -> None:
        """Stop waiting for a peer that has left."""
        self.reports.withdraw(peer)
        if self.pending is not None and peer.asked == self.pending.broadcast.round:
            self.pending.withdraw(peer.name)
        if self.pending is None or peer.name not in self.pending.asked:
            self._forget_stranger(peer.name)

    def warn_too_few(self) -> None:
        """Log a warning if the round has to wait for more nodes."""
        if self.pending is None:
            return
        least = max(self.pending.least, self.reports.fewest)
        if self.count() < least:
            LOG.warning("a round waits for nodes: %d here, %d needed", self.count(), least)

    def stop(self) -> None:
        """End this round and all later ones with the reports they have."""
        self._stopped = True
        if self.pending is not None:
            self.pending.stopped = True

    def _wake_at(self, when: float) -> None:
        """Set a timer. It passes its due time on, because it may fire slightly early."""
        loop = self._thread.loop
        if when < loop.time() + _NEVER:
            self._timers.append(loop.call_at(when, self.check, when))

    def _ask_idle(self, pending: Pending) -> None:
        """Ask all idle nodes that have not answered in this round."""
        idle = [
            peer
            for peer in self.peers
            if peer.trial is not None
            and not peer.asked
            and pending.can_ask(peer.name, peer.hello.instance)
        ]
        packed: dict[object, tuple[list[bytes], int]] = {}
        for peer, before in self.reports.requests(idle):
            member = self.members[peer.name]
            broadcast = pending.broadcast
            if not self.reports.same_for_all:
                broadcast = broadcast.to(member.numbers)
            key = (member.base_round, broadcast.part(Work))
            if key not in packed:
                packed[key] = self._pack(broadcast, member.base_round)
            messages, saved = packed[key]
            self.counters.saved += saved
            peer.asked = broadcast.round
            peer.asked_at = self._thread.loop.time()
            pending.ask(peer.name, peer.hello.instance)
            self.peers.send(peer, before + messages)
        if self.own is not None and not self.own.busy and pending.can_ask(OWN, OWN):
            pending.ask(OWN, OWN)
            member = self.members[OWN]
            request = RoundRequest(pending.broadcast.to(member.numbers), member.base_round)
            self._thread.spawn(self._ask_own(self.own, request))

    def _pack(self, broadcast: Broadcast, base_round: int) -> tuple[list[bytes], int]:
        """Pack a broadcast for nodes whose memory is of the same round.

        Returns:
          The messages, and the bytes that compression saves.
        """
        behind = base_round != broadcast.round - 1
        differences: Sequence[tuple[Float32, bytes]] = ()
        if base_round and not behind and self._compressor.kind != "none":
            differences = self._compressor.differences(broadcast)
        messages = frames(
            pack_broadcast(broadcast, base_round, catch_up=behind, differences=differences)
        )
        saved = sum(4 * broadcast.w.size - len(each) for _, each in differences)
        return messages, saved

    def _receive(self, name: str, asked: int, answer: MemberAnswer) -> None:
        """Accept an answer, in the round for which it was requested."""
        pending = self.pending
        if pending is None or not pending.expects(name, asked):
            self.counters.late += 1
            LOG.info("%s's report of round %d was too late and is discarded", name, asked)
            return
        pending.receive(name, answer)
        broadcast = pending.broadcast
        if broadcast.compress != "none":
            vectors = len(answer.nodes) * len(broadcast.report.vectors)
            self.counters.saved += compression.saved_bytes(
                broadcast.compress, vectors, broadcast.w.size
            )

    async def _ask_own(self, own: "OwnNode", request: RoundRequest) -> None:
        try:
            answer = await own.answer(request)
        except Exception as error:
            self._fail(error)
        else:
            self._receive(OWN, request.broadcast.round, answer)
        self.check()

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self.pending is not None:
            self.pending.stopped = True

    def _finish(self, pending: Pending) -> None:
        """Hand the round over, if the aggregator's thread is waiting for it."""
        finished = self._finished
        if finished is None:
            return
        self._finished = None
        try:
            finished.set_result(self._close(pending))
        except Exception as error:
            finished.set_exception(error)

    def _close(self, pending: Pending) -> CollectedRound:
        if self._error is not None:
            raise self._error
        for timer in self._timers:
            timer.cancel()
        self._timers = []
        self.pending = None
        instances = {peer.name: peer.hello.instance for peer in self.peers}
        collected = self.reports.close(instances)
        for name, outliers in collected.outliers.items():
            if not self.members[name].outlier_reported:
                LOG.warning(
                    "%s reported %s out of proportion to the other nodes; the median "
                    "counts instead, or the least possible",
                    name,
                    ", ".join(outliers),
                )
                self.members[name].outlier_reported = True
        for name in pending.answers:
            if self.members[name].not_finite:
                self._check_finite(name)
        for name in pending.asked - instances.keys():
            self._forget_stranger(name)
        return collected

    def _check_finite(self, name: str) -> None:
        """Warn about an invalid report, and drop a node after several in a row."""
        member = self.members[name]
        LOG.warning(
            "%s's report has numbers that are not finite or possible; it is left out", name
        )
        peer = self.peers.get(name)
        if member.not_finite >= _NOT_FINITE and peer is not None:
            member.not_finite = 0
            self.peers.drop(
                peer,
                f"{_NOT_FINITE} of its reports in a row were not finite or possible",
            )

    def _forget_stranger(self, name: str) -> None:
        """Remove a node that left and never took part: names can be invented."""
        member = self.members.get(name)
        if (
            member is not None
            and name not in self.peers
            and not member.rounds
            and not member.base_round
        ):
            del self.members[name]


class OwnNode:
    """The worker in the aggregator's process; it trains in a thread of its own."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.trial: Usage | None = None
        self.busy = False
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "fedbudget-own-node")

    @property
    def nodes(self) -> int:
        return len(self.worker.node_data.rows)

    async def start(self, welcome: Welcome) -> None:
        """Accept the task and make a trial round."""
        loop = asyncio.get_running_loop()
        self.trial = await loop.run_in_executor(self._executor, self.worker.start, welcome)

    async def answer(self, request: RoundRequest) -> Answer:
        """Make a round."""
        loop = asyncio.get_running_loop()
        self.busy = True
        try:
            answer = await loop.run_in_executor(self._executor, self.worker.answer, request)
        finally:
            self.busy = False
        return replace(answer, costs=replace(answer.costs, here=True))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
