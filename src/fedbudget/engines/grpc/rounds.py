"""The node that the aggregator is itself, where it holds data: the same work as any other's, in a thread of its own.

The rounds of a run: who is asked, and when a round is over. All in the event loop's thread.

The bookkeeping of a round is in engines/remote/round.py; here messages are sent, and timers set.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import ClassVar

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
from fedbudget.resources import most_within
from fedbudget.resources.resource import NodeCosts
from fedbudget.secure import messages as masking


class OwnNode:
    """A worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.trial: NodeCosts | None = None
        self.busy = False
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "fedbudget-own-node")

    @property
    def nodes(self) -> int:
        return len(self.worker.node_data.rows)

    async def start(self, welcome: Welcome) -> None:
        """Takes the task, and makes a trial round."""
        loop = asyncio.get_running_loop()
        self.trial = await loop.run_in_executor(self._executor, self.worker.start, welcome)

    def ask(
        self, request: RoundRequest, done: "Callable[[asyncio.Future[Answer]], None]"
    ) -> None:
        """Makes a round; in the event loop's thread.

        Args:
          done: called there with the answer, or with what went wrong.
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


_NOT_FINITE = 3  # reports in a row that are not finite, until their node is dropped
_NEVER = 1e6  # seconds that no timer waits for

_Packed = dict[tuple[int, ...], list[bytes]]
"""The broadcast to those that were in the round before, by how many updates they make."""


class Rounds:
    """One round after the other.

    Args:
      compressor: how vectors are sent.
    """

    masked: ClassVar[bool] = False
    """Whether reports are; see masked_rounds.py."""

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
        self._error: Exception | None = None  # what went wrong on our side
        self._finished: concurrent.futures.Future[CollectedRound] | None = None
        self._stopped = False  # the run was interrupted
        self.pay: Callable[[int, float], None] = lambda round_, rho: (
            None
        )  # see masked_rounds.py

    def count(self, *, ready: bool = False) -> int:
        """Nodes that are connected, or ready, the aggregator's own among them."""
        own = 0 if self.own is None else self.own.nodes
        return own + sum(
            len(peer.hello.samples.sizes)
            for peer in self.peers
            if peer.trial is not None or not ready
        )

    def begin(
        self,
        broadcast: Broadcast,
        *,
        least: int,
        timeout: float,
        left: float,
        needs_reports: bool,
        resting: Collection[int],
    ) -> None:
        """Asks all that are idle."""
        now = self._thread.loop.time()
        if self._compressor.kind != "none":
            broadcast = replace(broadcast, compress=self._compressor.kind)
        self.pending = PendingRound(
            broadcast,
            least,
            now + timeout,
            now + left,
            needs_reports=needs_reports,
            resting=self.members.with_any(resting),
        )
        self.pending.stopped = (
            self._stopped
        )  # an interruption between two rounds is not lost
        try:
            self._ask_idle(self.pending)
        except Exception as error:
            self._fail(error)
        for when in (self.pending.deadline, self.pending.end):
            if when < now + _NEVER:
                # The time that it was set for is passed on: a timer may be called a little before it.
                self._timers.append(
                    self._thread.loop.call_at(max(now, when), self.check, when)
                )

    def finish(self, finished: "concurrent.futures.Future[CollectedRound]") -> None:
        """Gives what came of the round as soon as it is over; from the aggregator's thread.

        Where answers are still to come, whoever brings the last looks for it, and the event loop is not woken up.
        """
        self._finished = finished
        if self.pending is None or not self.pending.waits(self._thread.loop.time()):
            self._thread.post(self.check)

    def receive_from(self, peer: Peer, answer: Answer) -> None:
        """What a peer was asked for; it has taken no longer than since then, whatever it says, and has as many test
        samples as it said at first.
        """
        if any(
            tally.samples != peer.hello.samples.test_samples for tally in answer.tallies
        ):
            raise PeerError(
                f"a tally of other than its {peer.hello.samples.test_samples} test samples"
            )
        asked, peer.asked = peer.asked, 0
        tau = 1 if self.pending is None else max(1, self.pending.broadcast.tau)
        waited = self._thread.loop.time() - peer.asked_at
        costs = answer.costs.within(most_within(waited), tau)
        self.receive(peer.name, asked, replace(answer, costs=costs, waited=waited))

    def welcome(self) -> list[bytes]:
        """What is said to a peer before it is welcomed."""
        return []

    def receive_masking(self, peer: Peer, message: masking.FromNode | MaskedReport) -> None:
        """What is said for masked sums."""
        raise LocalError("reports are not masked here")

    def require_ready(self, peer: Peer) -> None:
        """Refuses one that is not ready yet, whatever it says."""

    def receive(self, name: str, asked: int, answer: Answer) -> None:
        """A report, which counts in the round that it was asked for."""
        if self.pending is None or not self.pending.owes(name, asked):
            self.counters.late += 1
            LOG.info(
                "%s's report of round %d came too late, and is discarded",
                name,
                answer.report.round,
            )
        else:
            self.pending.receive(name, answer)
            self.counters.saved += self._saved(answer)
        self.check()

    def withdraw(self, peer: Peer) -> None:
        """A peer has gone, and is not waited for."""
        if self.pending is not None and peer.asked == self.pending.broadcast.round:
            self.pending.withdraw(peer.name)
        if self.pending is None or peer.name not in self.pending.asked:
            self._forget_stranger(peer.name)

    def tell_too_few(self) -> None:
        """Says so where a round has to wait for nodes that are not there."""
        if self.pending is not None and self.count() < (least := self.fewest(self.pending)):
            LOG.warning("a round waits for nodes: %d here, %d needed", self.count(), least)

    def fewest(self, pending: PendingRound[str]) -> int:
        """Nodes without which the round is not made."""
        return pending.least

    def _forget_stranger(self, name: str) -> None:
        """One that has gone and never took part leaves nothing behind: names can be made up without end."""
        member = self.members.get(name)
        if (
            member is not None
            and name not in self.peers
            and not member.rounds
            and not member.base_round
        ):
            del self.members[name]

    def stop(self) -> None:
        """Ends this round, and all that come, with what they have."""
        self._stopped = True
        if self.pending is not None:
            self.pending.stopped = True

    def check(self, when: float = 0.0) -> None:
        """Does what the round needs next.

        Args:
          when: the time that it is, at least.
        """
        pending = self.pending
        finished = self._finished
        if pending is None:
            return
        step = pending.next_step(max(when, self._thread.loop.time()), self.members)
        if step is NextStep.ASK:
            self._ask_idle(pending)
        elif step is not NextStep.WAIT and finished is not None:
            self._finished = None
            try:
                finished.set_result(self._close(pending))
            except Exception as error:
                finished.set_exception(error)

    def _ask_idle(self, pending: PendingRound[str]) -> None:
        """All that are idle, and have not answered in this round."""
        packed: _Packed = {}
        for peer in self.peers:
            if peer.idle and pending.can_ask(peer.name):
                self._ask(pending, peer, packed)
        if self.own is not None and not self.own.busy and pending.can_ask(OWN):
            pending.ask(OWN, OWN)
            member = self.members[OWN]
            request = RoundRequest(pending.broadcast.to(member.numbers), member.base_round)
            self.own.ask(request, partial(self._receive_own, pending.broadcast.round))

    def _ask(self, pending: PendingRound[str], peer: Peer, packed: "_Packed") -> None:
        broadcast = pending.broadcast
        member = self.members[peer.name]
        peer.asked, peer.asked_at = broadcast.round, self._thread.loop.time()
        pending.ask(peer.name, peer.hello.instance)
        self._expect(peer, broadcast)
        base_round, broadcast = member.base_round, broadcast.to(member.numbers)
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
        """What the next report is that a peer sends."""
        member = self.members[peer.name]
        peer.reader.expect_report(broadcast, member.numbers, member.counted)

    def _receive_own(self, asked: int, answer: "asyncio.Future[Answer]") -> None:
        error = answer.exception()
        if isinstance(error, Exception):
            self._fail(error)
            self.check()
        else:
            self.receive(OWN, asked, answer.result())

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self.pending is not None:
            self.pending.stopped = True

    def _saved(self, answer: Answer) -> int:
        """Bytes that compression has saved of a report."""
        assert self.pending is not None
        kind = self.pending.broadcast.compress or "none"
        vectors = [getattr(answer.report, name) for name in VECTORS]
        return sum(
            compression.saved_bytes(kind, *vector.shape)
            for vector in vectors
            if vector is not None
        )

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
        for name, doubts in collected.doubts.items():
            if not self.members[name].doubted:
                said = ", ".join(doubts)
                LOG.warning(
                    "%s says of %s what is out of all proportion, and is not believed in that",
                    name,
                    said,
                )
                self.members[name].doubted = True
        for name in pending.answers:
            member = self.members[name]
            peer = self.peers.get(name)
            if member.not_finite:
                LOG.warning(
                    "%s's report has numbers that are not finite or cannot be, and is set aside",
                    name,
                )
            if member.not_finite >= _NOT_FINITE and peer is not None:
                member.not_finite = 0
                self.peers.drop(
                    peer,
                    f"{_NOT_FINITE} of its reports in a row were not finite, or cannot be",
                )
        for name in pending.asked:
            self._forget_stranger(name)
        return collected
