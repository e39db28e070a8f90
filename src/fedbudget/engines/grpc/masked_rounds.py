"""Rounds whose reports nobody can read but in their sum, at the aggregator (secure/masked_sum.py has what is behind).

A round is made in attempts. In each, whoever is idle is told its group with the broadcast, and sends shares at once,
before it trains. When all have, or are not waited for any more, the shares are passed on; nodes that have trained then
send their masked vectors, and those whose vectors are in the sum are asked for what opens it. Who leaves, or is silent
for too long, is left out of what follows. An attempt that has lost too many comes to nothing, and another one follows
with those that there are; with fewer than three, or than a round needs, they are waited for until the round's end.
"""

import asyncio
import concurrent.futures
import hashlib
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from fedbudget.arrays import Int64, UInt64
from fedbudget.engines.grpc.event_loop import LoopThread
from fedbudget.engines.grpc.messages import pack_masking_request
from fedbudget.engines.grpc.peers import LOG, Peer, Peers
from fedbudget.engines.grpc.rounds import Rounds
from fedbudget.engines.remote.messages import Answer, MaskedReport
from fedbudget.engines.remote.round import CollectedRound, PendingRound
from fedbudget.errors import WorkError
from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.protocol.messages import Broadcast, PeerError, Report
from fedbudget.resources import most_within
from fedbudget.secure.contents import Contents, OpenedReports, PrivateContents
from fedbudget.secure.graph import FEWEST, needed, sharers
from fedbudget.secure.identity import Trust, UntrustedKey
from fedbudget.secure.masked_sum import MaskedSum, SumPhase, TooFewLeft
from fedbudget.secure.messages import FromNode, Group, Introduction, Opened, Shares, Terms

_OPENING = 10.0  # seconds that a sum is waited for to be opened, at most
# seconds between attempts at one round, the more the longer
_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_MOST_ATTEMPTS = 20
_FEWEST_PLACES = 32  # for the largest β̂, and so many for each member
_PLACES_EACH = 2
# how often a number of w may double in a round, and where it did oftener
_ROOM = 8
_MORE_ROOM = 8
_MOST_ROOM = 32


@dataclass(frozen=True)
class MaskingTerms:
    """How sums are masked.

    Args:
      threshold: the share of each group that must stay.
      trust: whose keys are believed.
    """

    threshold: float = 2 / 3
    trust: Trust = field(default_factory=Trust)


@dataclass
class _Attempt:
    """At a round.

    Args:
      scale: as of a `Group`.
      due: when the phase is over, by the event loop's clock.
      here: names of those that take part and have not left.
      opening: whether all that is needed has come.
      result: the sum, once it is open.
    """

    sum: MaskedSum
    contents: Contents | PrivateContents
    scale: int
    due: float
    here: set[str]
    opening: bool = False
    result: UInt64 | None = None

    @property
    def awaited(self) -> set[str]:
        """Who has something to send in this phase, and may yet."""
        phase = self.sum.phase
        if phase is SumPhase.SHARES:
            return self.here - self.sum.sent.keys()
        if phase is SumPhase.VECTORS:
            return self.here & self.sum.sent.keys() - self.sum.summed
        return self.here & self.sum.summed - self.sum.opened.keys()


class MaskedRounds(Rounds):
    """One round after the other.

    Args:
      run: the run's name.
    """

    masked = True

    def __init__(
        self,
        thread: LoopThread,
        peers: Peers,
        compressor: BroadcastCompressor,
        run: str,
        terms: MaskingTerms,
    ) -> None:
        super().__init__(thread, peers, compressor)
        self._run = run
        self._terms = terms
        self._circle = secrets.token_bytes(16)  # by which all stand in a circle
        self._introduced: dict[str, Introduction] = {}  # of those that are connected
        self._told: dict[
            str, dict[str, bytes]
        ] = {}  # whose keys each was told on its connection
        self._attempt: _Attempt | None = None
        self._owing: dict[
            str, int
        ] = {}  # the attempt in which one was silent that is still connected
        self._last_attempt = 0
        self._room = _ROOM
        self._timeout = 0.0
        self._failed = 0  # attempts at this round
        self._declined: set[frozenset[str]] = (
            set()
        )  # those that have opened this round with others before
        self._not_before = 0.0  # the next one
        self._fewest = (
            0  # whose sum is opened of a private round, once an attempt was asked to be
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
        self._attempt = None
        self._timeout = timeout
        self._failed = 0
        self._not_before = 0.0
        self._declined = set()
        self._fewest = 0
        super().begin(
            broadcast,
            least=least,
            timeout=timeout,
            left=left,
            needs_reports=True,
            resting=resting,
        )

    def welcome(self) -> list[bytes]:
        return pack_masking_request(Terms(self._terms.threshold))

    def require_ready(self, peer: Peer) -> None:
        if peer.name not in self._introduced:
            raise PeerError("it is ready without having shown its key")

    def receive_masking(self, peer: Peer, message: FromNode | MaskedReport) -> None:
        if isinstance(message, Introduction):
            self._introduce(peer, message)
            return
        attempt = self._attempt
        name = peer.name
        phase = None if attempt is None else attempt.sum.phase
        if (
            attempt is None
            or message.attempt != attempt.sum.attempt
            or name not in attempt.awaited
        ):
            self._receive_late(peer, message)
        elif isinstance(message, Shares) and phase is SumPhase.SHARES:
            attempt.sum.receive_shares(name, message)
        elif isinstance(message, Opened) and phase is SumPhase.OPENED:
            attempt.sum.receive_opened(name, message)
            if not message.own:
                LOG.warning(
                    "%s has opened this round with others before, and does not again", name
                )
        elif isinstance(message, MaskedReport) and phase is SumPhase.VECTORS:
            self._receive_vector(peer, attempt, message)
        else:
            raise PeerError("a message of masked sums that was not asked for")
        self.check()

    def _receive_late(self, peer: Peer, message: Shares | Opened | MaskedReport) -> None:
        """Of one that was not waited for any more, and is idle now; or what was not needed to open a sum."""
        if self._owing.get(peer.name) == message.attempt:
            del self._owing[peer.name]
            peer.asked = 0
            self.counters.late += 1
            LOG.info("what %s sends for a sum came too late, and is discarded", peer.name)

    def withdraw(self, peer: Peer) -> None:
        self._owing.pop(peer.name, None)
        self._introduced.pop(peer.name, None)
        self._told.pop(peer.name, None)
        if self._attempt is not None:
            self._attempt.here.discard(peer.name)
        super().withdraw(peer)

    def check(self, when: float = 0.0) -> None:
        pending = self.pending
        attempt = self._attempt
        if pending is None:
            return
        now = max(when, self._thread.loop.time())
        if pending.stopped or (attempt is not None and attempt.result is not None):
            self._finish(pending)
        elif attempt is None:
            if now >= pending.end:
                self._finish(pending)
            elif now >= self._not_before:
                self._ask_idle(pending)
        elif not attempt.opening:
            self._go_on(pending, attempt, now)

    def fewest(self, pending: PendingRound[str]) -> int:
        return max(super().fewest(pending), FEWEST, self._fewest)

    def _go_on(self, pending: PendingRound[str], attempt: _Attempt, now: float) -> None:
        """To the next phase, where this one is over."""
        found = attempt.sum
        over = not attempt.awaited or now >= attempt.due
        try:
            if found.phase is SumPhase.OPENED:
                if found.can_open():
                    self._open(attempt)
                elif over:
                    raise TooFewLeft("too few have sent what opens the sum")
            elif over or now >= pending.end:
                before_shares = found.phase is SumPhase.SHARES
                if before_shares:
                    messages = {
                        name: pack_masking_request(relay)
                        for name, relay in found.relay().items()
                    }
                else:
                    messages = {
                        name: pack_masking_request(survivors)
                        for name, survivors in found.survivors().items()
                    }
                    self._pay(pending.broadcast, attempt)
                self._set_due(
                    attempt,
                    self._timeout if before_shares else min(self._timeout, _OPENING),
                )
                for name, message in messages.items():
                    if name in attempt.here and (peer := self.peers.get(name)) is not None:
                        self.peers.send(peer, message)
        except TooFewLeft as error:
            self._give_up_attempt(pending, attempt, str(error))
        except WorkError as error:  # nothing was opened
            self._fail(error)
            self._finish(pending)

    def _pay(self, broadcast: Broadcast, attempt: _Attempt) -> None:
        """Before anybody is asked to open a private round; once, for whatever is opened of it is the same."""
        if broadcast.private is not None and not self._fewest:
            self.pay(broadcast.round, broadcast.private.rho)
            self._fewest = attempt.sum.fewest

    def _set_due(self, attempt: _Attempt, seconds: float) -> None:
        attempt.due = self._thread.loop.time() + seconds
        if seconds < 1e6:
            self._timers.append(
                self._thread.loop.call_at(attempt.due, self.check, attempt.due)
            )

    def _introduce(self, peer: Peer, introduction: Introduction) -> None:
        if introduction.key.name != peer.name:
            raise PeerError(f"it has shown the key of {introduction.key.name}")
        try:
            self._terms.trust.admit(self._run, introduction.key)
        except UntrustedKey as error:
            raise PeerError(str(error)) from None
        self._introduced[peer.name] = introduction

    def _ask_idle(self, pending: PendingRound[str]) -> None:
        """Begins an attempt with all that are idle, if they are enough."""
        idle = [peer for peer in self.peers if peer.idle and pending.can_ask(peer.name)]
        names = [peer.name for peer in idle]
        few = (
            len(idle) < max(FEWEST, self._fewest)
            or self.members.nodes(names) < pending.least
        )
        if self._attempt is not None or few or frozenset(names) in self._declined:
            return
        circle = tuple(
            sorted(
                names,
                key=lambda name: hashlib.sha256(self._circle + name.encode()).digest(),
            )
        )
        self._last_attempt = max(self._last_attempt + 1, int(1000 * time.time()))
        fewest = (
            1
            if pending.broadcast.private is None
            else self._fewest or needed(len(names), self._terms.threshold)
        )
        contents = self._contents(pending.broadcast, names, fewest)
        keys = {name: self._introduced[name].key.public for name in names}
        summed = MaskedSum(
            self._last_attempt, circle, self._terms.threshold, contents.length, keys, fewest
        )
        weight = sum(int(self.members[name].counted.sum()) for name in names)
        attempt = _Attempt(
            summed, contents, max(0, weight - 1).bit_length(), 0.0, set(names)
        )
        self._attempt = attempt
        self._set_due(attempt, self._timeout)
        packed: dict[tuple[int, ...], list[bytes]] = {}
        for peer in idle:
            self.peers.send(
                peer,
                pack_masking_request(self._group(attempt, peer.name, pending.broadcast)),
            )
            self._ask(pending, peer, packed)

    def _contents(
        self, broadcast: Broadcast, names: Collection[str], fewest: int
    ) -> Contents | PrivateContents:
        """What these are asked for."""
        if broadcast.private is not None:
            return PrivateContents.of(broadcast, sharers(fewest))
        shapes = {self._introduced[name].tally for name in names} - {None}
        shape = shapes.pop() if len(shapes) == 1 else None
        if shapes:
            LOG.warning(
                "nodes' test samples say different things, which cannot be added up, and are not asked for"
            )
        return Contents.of(
            broadcast, max(_FEWEST_PLACES, _PLACES_EACH * len(names)), shape, self._room
        )

    def _group(self, attempt: _Attempt, name: str, broadcast: Broadcast) -> Group:
        names = attempt.sum.group(name)
        told = self._told.setdefault(name, {})
        keys = [self._introduced[other].key for other in names if other != name]
        new = tuple(key for key in keys if told.get(key.name) != key.public)
        told.update({key.name: key.public for key in new})
        contents = attempt.contents
        return Group(
            broadcast.round,
            attempt.sum.attempt,
            names,
            attempt.sum.threshold(name),
            tuple(self.members[name].counted.tolist()),
            attempt.scale,
            contents.places,
            self._room,
            contents.tally if contents.tallies else None,
            new,
            contents.sharers if isinstance(contents, PrivateContents) else 0,
        )

    def _expect(self, peer: Peer, broadcast: Broadcast) -> None:
        assert self._attempt is not None
        found = self._attempt.sum
        peer.reader.expect_masked(broadcast.round, found.attempt, found.length)

    def _receive_vector(self, peer: Peer, attempt: _Attempt, report: MaskedReport) -> None:
        assert self.pending is not None
        broadcast = self.pending.broadcast
        member = self.members[peer.name]
        waited = self._thread.loop.time() - peer.asked_at
        costs = report.costs.within(most_within(waited), max(1, broadcast.tau))
        attempt.sum.receive_vector(peer.name, report.vector)
        unknown = np.zeros(len(member))  # of each node nothing is known
        known = Report(broadcast.round, member.numbers, member.counted, unknown, unknown)
        self.pending.receive(peer.name, Answer(known, costs, waited=waited))

    def _open(self, attempt: _Attempt) -> None:
        """In another thread: of large models it takes a while."""
        attempt.opening = True
        opening = self._thread.loop.run_in_executor(None, attempt.sum.open)
        opening.add_done_callback(lambda opened: self._opened(attempt, opened))

    def _opened(self, attempt: _Attempt, opened: "asyncio.Future[UInt64]") -> None:
        if self._attempt is not attempt or self.pending is None or opened.cancelled():
            return
        error = opened.exception()
        if isinstance(error, TooFewLeft):
            attempt.opening = False
            self._give_up_attempt(self.pending, attempt, str(error))
            return
        if isinstance(error, Exception):
            self._fail(error)
        else:
            attempt.result = opened.result()
        self.check()

    def _give_up_attempt(
        self, pending: PendingRound[str], attempt: _Attempt, reason: str
    ) -> None:
        """It comes to nothing; another may follow."""
        LOG.info("round %d is begun again: %s", pending.broadcast.round, reason)
        self._release(attempt)
        self._attempt = None
        self._failed += 1
        if any(not opened.own for opened in attempt.sum.opened.values()):
            self._declined.add(frozenset(attempt.sum.circle))
        pending.owing.clear()
        pending.answers.clear()
        if self._failed >= _MOST_ATTEMPTS:
            self._fail(
                WorkError(f"round {pending.broadcast.round} cannot be summed: {reason}")
            )
            self.check()
            return
        loop = self._thread.loop
        self._not_before = loop.time() + min(_LONGEST_PAUSE, _PAUSE * 2**self._failed)
        self._timers.append(loop.call_at(self._not_before, self.check, self._not_before))

    def _release(self, attempt: _Attempt) -> None:
        """All are idle, but for those that are silent; of a sum that is open nobody owes anything."""
        silent = set() if attempt.result is not None else attempt.awaited
        for name in attempt.here:
            if name in silent:
                self._owing[name] = attempt.sum.attempt
            elif (peer := self.peers.get(name)) is not None:
                peer.asked = 0

    def _finish(self, pending: PendingRound[str]) -> None:
        finished = self._finished
        if finished is None:
            return
        self._finished = None
        self._set(finished, pending)

    def _set(
        self,
        finished: "concurrent.futures.Future[CollectedRound]",
        pending: PendingRound[str],
    ) -> None:
        try:
            finished.set_result(self._close(pending))
        except Exception as error:
            finished.set_exception(error)

    def _close(self, pending: PendingRound[str]) -> CollectedRound:
        attempt, self._attempt = self._attempt, None
        result = None if attempt is None else attempt.result
        if attempt is not None:
            self._release(attempt)
        if result is None or attempt is None:
            pending.answers.clear()  # none of them can be read
            return replace(super()._close(pending), enough=False)
        collected = super()._close(pending)
        nodes, sizes = self._nodes(pending.answers)
        reports, tallies = attempt.contents.open(
            pending.broadcast, result, nodes, sizes, attempt.scale
        )
        if isinstance(reports, OpenedReports) and reports.left_out:
            LOG.warning(
                "reports with numbers that are not finite, or too large to be added up, are left out"
            )
            self._room = min(_MOST_ROOM, self._room + _MORE_ROOM)
        return replace(collected, summed=reports, tallies=tallies)

    def _nodes(self, names: Collection[str]) -> tuple[Int64, Int64]:
        """The numbers of all nodes of these members, rising, and how many samples of each count."""
        nodes = np.concatenate([self.members[name].numbers for name in names])
        sizes = np.concatenate([self.members[name].counted for name in names])
        order = np.argsort(nodes)
        return nodes[order], sizes[order]
