"""The rounds of a run: which nodes are asked, and when a round is over.

engines/remote/round.py keeps the books of a round. This file sends the messages and sets
the timers. `OwnNode` is the node inside the aggregator's process, for an aggregator with
data.

Threads: everything runs in the event loop's thread, with two exceptions. `Rounds.finish` is
called by the aggregator's thread. `OwnNode` trains in a thread of its own, and its results
return to the event loop.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc.event_loop import LoopThread
from fedbudget.engines.grpc.messages import pack_broadcast
from fedbudget.engines.grpc.peers import LOG, Peer, Peers
from fedbudget.engines.remote.members import OWN, Members
from fedbudget.engines.remote.messages import Answer, MaskedReport, RoundRequest, Welcome
from fedbudget.engines.remote.round import CollectedRound, NextStep, PendingRound
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol import compression
from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.protocol.messages import VECTORS, Broadcast, LocalError, PeerError
from fedbudget.resources import within
from fedbudget.resources.resource import Usage
from fedbudget.secure import messages as masking

_NOT_FINITE = 3  # consecutive invalid reports after which a node is dropped
_NEVER = 1e6  # seconds; no timer is set for a longer wait

_Packed = dict[tuple[int, ...], list[bytes]]
"""Packed broadcasts for nodes of the previous round, by the number of updates they make."""


class Rounds:
    """Makes one round after the other.

    Args:
      compressor: of broadcast vectors.
    """

    masked: ClassVar[bool] = False
    """Whether reports are masked; see masked_rounds.py."""

    def __init__(
        self, thread: LoopThread, peers: Peers, compressor: BroadcastCompressor
    ) -> None:
        self.peers = peers
        self.counters = peers.counters
        self.members: Members[str] = Members()
        self.own: OwnNode | None = None
        self.pending: PendingRound[str] | None = None
        self._thread = thread
        self._compressor = compressor
        self._timers: list[asyncio.TimerHandle] = []
        self._error: Exception | None = None  # on the aggregator's side
        self._finished: concurrent.futures.Future[CollectedRound] | None = None
        self._stopped = False  # the run was interrupted
        # writes the payment of a private round; see masked_rounds.py
        self.pay: Callable[[int, float], None] = lambda round_, rho: None

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
        if self._compressor.kind != "none":
            broadcast = replace(broadcast, compress=self._compressor.kind)
        pending = PendingRound(
            broadcast,
            terms.least,
            now + terms.timeout,
            now + terms.left,
            needs_reports=terms.needs_reports or self.masked,
            resting=self.members.having(terms.resting),
        )
        pending.stopped = self._stopped  # keeps an interruption between two rounds
        self.pending = pending
        self._prepare(terms.timeout)
        try:
            self._ask_idle(pending)
        except Exception as error:
            self._fail(error)
        for when in (pending.deadline, pending.end):
            if when < now + _NEVER:
                self._check_at(max(now, when), when)

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
          when: a lower bound of the current time; see `_check_at`.
        """
        pending = self.pending
        if pending is None:
            return
        step = pending.next_step(max(when, self._thread.loop.time()), self.members)
        if step is NextStep.ASK:
            self._ask_idle(pending)
        elif step is not NextStep.WAIT:
            self._finish(pending)

    def receive_from(self, peer: Peer, answer: Answer) -> None:
        """Accept a peer's report.

        Its costs are capped by the time since it was asked. It must cover the number of
        test samples announced in its hello.
        """
        expected = peer.hello.samples.test_samples
        if any(tally.samples != expected for tally in answer.tallies):
            raise PeerError(f"test results that do not cover its {expected} test samples")
        asked = peer.asked
        peer.asked = 0
        tau = 1 if self.pending is None else max(1, self.pending.broadcast.tau)
        waited = self._thread.loop.time() - peer.asked_at
        costs = within(answer.costs, waited, tau)
        self._receive(peer.name, asked, replace(answer, costs=costs, waited=waited))

    def before_welcome(self) -> list[bytes]:
        """Messages to a peer that precede its welcome."""
        return []

    def receive_masking(self, peer: Peer, message: masking.FromNode | MaskedReport) -> None:
        """Accept a message of secure aggregation."""
        raise LocalError("reports are not masked here")

    def require_ready(self, peer: Peer) -> None:
        """Raise `PeerError` if a peer sends `ready` too early."""

    def withdraw(self, peer: Peer) -> None:
        """Stop waiting for a peer that has left."""
        if self.pending is not None and peer.asked == self.pending.broadcast.round:
            self.pending.withdraw(peer.name)
        if self.pending is None or peer.name not in self.pending.asked:
            self._forget_stranger(peer.name)

    def warn_too_few(self) -> None:
        """Log a warning if the round has to wait for more nodes."""
        if self.pending is not None and self.count() < (least := self.fewest(self.pending)):
            LOG.warning("a round waits for nodes: %d here, %d needed", self.count(), least)

    def fewest(self, pending: PendingRound[str]) -> int:
        """Number of nodes that the round needs."""
        return pending.least

    def stop(self) -> None:
        """End this round and all later ones with the reports they have."""
        self._stopped = True
        if self.pending is not None:
            self.pending.stopped = True

    def _prepare(self, timeout: float) -> None:
        """Reset the state of the previous round."""

    def _check_at(self, at: float, when: float) -> None:
        """Set a timer. It passes its due time on, because it may fire slightly early."""
        self._timers.append(self._thread.loop.call_at(at, self.check, when))

    def _ask_idle(self, pending: PendingRound[str]) -> None:
        """Ask all idle nodes that have not answered in this round."""
        packed: _Packed = {}
        for peer in self.peers:
            if peer.idle and pending.can_ask(peer.name):
                self._ask(pending, peer, packed)
        if self.own is not None and not self.own.busy and pending.can_ask(OWN):
            pending.ask(OWN, OWN)
            member = self.members[OWN]
            request = RoundRequest(pending.broadcast.to(member.numbers), member.base_round)
            self.own.ask(request, partial(self._receive_own, pending.broadcast.round))

    def _ask(self, pending: PendingRound[str], peer: Peer, packed: _Packed) -> None:
        member = self.members[peer.name]
        peer.asked = pending.broadcast.round
        peer.asked_at = self._thread.loop.time()
        pending.ask(peer.name, peer.hello.instance)
        self._expect(peer, pending.broadcast)
        base_round = member.base_round
        broadcast = pending.broadcast.to(member.numbers)
        if base_round != broadcast.round - 1:
            catch_up = broadcast.catch_up is not None
            self.peers.send(peer, pack_broadcast(broadcast, base_round, catch_up=catch_up))
            return
        differences = self._compressor.differences(broadcast) if base_round else {}
        updates = () if broadcast.work is None else broadcast.work.updates
        if updates not in packed:
            packed[updates] = pack_broadcast(
                broadcast, base_round, catch_up=False, differences=differences
            )
        self.counters.saved += sum(
            4 * broadcast.w.size - len(difference) for difference in differences.values()
        )
        self.peers.send(peer, packed[updates])

    def _expect(self, peer: Peer, broadcast: Broadcast) -> None:
        """Set the report that the peer's reader accepts next."""
        member = self.members[peer.name]
        peer.reader.expect_report(broadcast, member.numbers, member.counted)

    def _receive(self, name: str, asked: int, answer: Answer) -> None:
        """Accept a report, in the round for which it was requested."""
        if self.pending is None or not self.pending.expects(name, asked):
            self.counters.late += 1
            LOG.info(
                "%s's report of round %d was too late and is discarded",
                name,
                answer.report.round,
            )
        else:
            self.pending.receive(name, answer)
            self.counters.saved += self._saved(self.pending.broadcast, answer)
        self.check()

    def _receive_own(self, asked: int, answer: "asyncio.Future[Answer]") -> None:
        error = answer.exception()
        if isinstance(error, Exception):
            self._fail(error)
            self.check()
        else:
            self._receive(OWN, asked, answer.result())

    def _saved(self, broadcast: Broadcast, answer: Answer) -> int:
        """Bytes of a report that compression saved."""
        kind = broadcast.compress or "none"
        vectors = [getattr(answer.report, name) for name in VECTORS]
        return sum(
            compression.saved_bytes(kind, *vector.shape)
            for vector in vectors
            if vector is not None
        )

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self.pending is not None:
            self.pending.stopped = True

    def _finish(self, pending: PendingRound[str]) -> None:
        """Hand the round over, if the aggregator's thread is waiting for it."""
        finished = self._finished
        if finished is None:
            return
        self._finished = None
        try:
            finished.set_result(self._close(pending))
        except Exception as error:
            finished.set_exception(error)

    def _close(self, pending: PendingRound[str]) -> CollectedRound:
        if self._error is not None:
            raise self._error
        for timer in self._timers:
            timer.cancel()
        self._timers = []
        self.pending = None
        collected = pending.close(
            self.members, {peer.name: peer.hello.instance for peer in self.peers}
        )
        for name, outliers in collected.outliers.items():
            if not self.members[name].outlier_reported:
                LOG.warning(
                    "%s reported outliers in %s; they are capped or left out",
                    name,
                    ", ".join(outliers),
                )
                self.members[name].outlier_reported = True
        for name in pending.answers:
            self._check_finite(name)
        for name in pending.asked:
            self._forget_stranger(name)
        return collected

    def _check_finite(self, name: str) -> None:
        """Warn about an invalid report, and drop a node after several in a row."""
        member = self.members[name]
        peer = self.peers.get(name)
        if member.not_finite:
            LOG.warning(
                "%s's report has numbers that are not finite or possible; it is left out",
                name,
            )
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

    def ask(
        self, request: RoundRequest, done: "Callable[[asyncio.Future[Answer]], None]"
    ) -> None:
        """Make a round; called in the event loop's thread.

        Args:
          done: called in the same thread with the answer or the error.
        """

        def finish(future: "asyncio.Future[Answer]") -> None:
            self.busy = False
            if not future.cancelled():
                done(future)

        self.busy = True
        asyncio.get_running_loop().run_in_executor(
            self._executor, self._answer, request
        ).add_done_callback(finish)

    def _answer(self, request: RoundRequest) -> Answer:
        answer = self.worker.answer(request)
        return replace(answer, costs=replace(answer.costs, here=True))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
