"""The aggregator's rounds under secure aggregation (secure/masked_sum.py has the sums).

A round takes one or more attempts:

1. Every idle node receives its group with the broadcast, and sends shares before it trains.
2. When all shares have arrived, or the wait is over, the aggregator relays them.
3. Nodes that have trained send their masked vectors.
4. Nodes whose vectors are in the sum are asked for the shares that open it.

A node that leaves, or stays silent for too long, is left out of the following steps. An
attempt that lost too many nodes is abandoned, and another one begins with the nodes that
are present. With fewer than three nodes, or fewer than the round needs, the aggregator
waits until the round's end.

Threads: everything runs in the event loop's thread. Only `MaskedSum.open` runs in an
executor, because it takes a while for large models; its result returns to the event loop.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Collection, Mapping
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
from fedbudget.resources import within
from fedbudget.secure.contents import Contents, OpenedReports, PrivateContents
from fedbudget.secure.graph import FEWEST, needed, sharers
from fedbudget.secure.identity import Trust, UntrustedKey
from fedbudget.secure.masked_sum import MaskedSum, SumPhase, TooFewLeft
from fedbudget.secure.messages import (
    FromAggregator,
    FromNode,
    Group,
    Introduction,
    Opened,
    Shares,
    Terms,
)

_OPENING = 10.0  # seconds; longest wait for the shares that open a sum
# seconds between attempts at one round; the pause doubles each time
_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_MOST_ATTEMPTS = 20
# slots for the largest β̂: in all at least, and for each member
_FEWEST_SLOTS = 32
_SLOTS_EACH = 2
# doublings of w's largest coordinate that fit: at first, added after an overflow, at most
_HEADROOM = 8
_MORE_HEADROOM = 8
_MOST_HEADROOM = 32


@dataclass(frozen=True)
class MaskingTerms:
    """The aggregator's terms of secure aggregation.

    Args:
      threshold: share of each group that must stay.
      trust: decides which keys are accepted.
    """

    threshold: float = 2 / 3
    trust: Trust = field(default_factory=Trust)


@dataclass
class _Attempt:
    """One attempt at a round.

    Args:
      scale: see `Group`.
      here: names of participants that have not left.
      due: end of the phase, by the event loop's clock.
      opening: whether the sum is being opened.
      result: the sum, once it is open.
    """

    sum: MaskedSum
    contents: Contents | PrivateContents
    scale: int
    here: set[str]
    due: float = 0.0
    opening: bool = False
    result: UInt64 | None = None

    @property
    def awaited(self) -> set[str]:
        """Participants whose message is due in this phase."""
        phase = self.sum.phase
        if phase is SumPhase.SHARES:
            return self.here - self.sum.sent.keys()
        if phase is SumPhase.VECTORS:
            return self.here & self.sum.sent.keys() - self.sum.summed
        return self.here & self.sum.summed - self.sum.opened.keys()


class MaskedRounds(Rounds):
    """Makes one masked round after the other.

    Args:
      run: name of the run.
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
        self._ring_salt = secrets.token_bytes(16)
        self._introduced: dict[str, Introduction] = {}  # of connected peers
        # public keys that each peer has received on its connection, by name
        self._sent_keys: dict[str, dict[str, bytes]] = {}
        # the attempt in which a peer that is still connected was silent
        self._silent: dict[str, int] = {}
        self._last_attempt = 0
        self._headroom = _HEADROOM
        self._prepare(0.0)

    def _prepare(self, timeout: float) -> None:
        self._attempt: _Attempt | None = None
        self._timeout = timeout
        self._failed = 0  # attempts at this round
        self._not_before = 0.0  # earliest time of the next attempt
        # sets of nodes of which one has opened this round with another set
        self._declined: set[frozenset[str]] = set()
        # nodes in the smallest sum of a private round, once an attempt was to be opened
        self._fewest = 0

    def before_welcome(self) -> list[bytes]:
        return pack_masking_request(Terms(self._terms.threshold))

    def require_ready(self, peer: Peer) -> None:
        if peer.name not in self._introduced:
            raise PeerError("'ready' before it has sent its key")

    def receive_masking(self, peer: Peer, message: FromNode | MaskedReport) -> None:
        if isinstance(message, Introduction):
            self._introduce(peer, message)
            return
        attempt = self._attempt
        name = peer.name
        if (
            attempt is None
            or message.attempt != attempt.sum.attempt
            or name not in attempt.awaited
        ):
            self._receive_late(peer, message.attempt)
        elif isinstance(message, Shares):
            attempt.sum.receive_shares(name, message)
        elif isinstance(message, Opened):
            attempt.sum.receive_opened(name, message)
            if not message.own:
                LOG.warning("%s has opened this round with other nodes and declines", name)
        else:
            self._receive_vector(peer, attempt, message)
        self.check()

    def withdraw(self, peer: Peer) -> None:
        self._silent.pop(peer.name, None)
        self._introduced.pop(peer.name, None)
        self._sent_keys.pop(peer.name, None)
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
            self._advance(pending, attempt, now)

    def fewest(self, pending: PendingRound[str]) -> int:
        return max(super().fewest(pending), FEWEST, self._fewest)

    def _introduce(self, peer: Peer, introduction: Introduction) -> None:
        if introduction.key.name != peer.name:
            raise PeerError(f"it has sent the key of {introduction.key.name}")
        try:
            self._terms.trust.admit(self._run, introduction.key)
        except UntrustedKey as error:
            raise PeerError(str(error)) from None
        self._introduced[peer.name] = introduction

    def _ask_idle(self, pending: PendingRound[str]) -> None:
        """Begin an attempt with all idle nodes, if there are enough of them."""
        idle = [peer for peer in self.peers if peer.idle and pending.can_ask(peer.name)]
        names = [peer.name for peer in idle]
        too_few = (
            len(idle) < max(FEWEST, self._fewest)
            or self.members.nodes(names) < pending.least
        )
        if self._attempt is not None or too_few or frozenset(names) in self._declined:
            return
        self._last_attempt = max(self._last_attempt + 1, int(1000 * time.time()))
        attempt = self._create_attempt(pending.broadcast, names)
        self._attempt = attempt
        self._set_due(attempt, self._timeout)
        packed: dict[tuple[int, ...], list[bytes]] = {}
        for peer in idle:
            group = self._group(attempt, peer.name, pending.broadcast)
            self.peers.send(peer, pack_masking_request(group))
            self._ask(pending, peer, packed)

    def _create_attempt(self, broadcast: Broadcast, names: list[str]) -> _Attempt:
        threshold = self._terms.threshold
        fewest = 1
        if broadcast.private is not None:
            fewest = self._fewest or needed(len(names), threshold)
        contents = self._contents(broadcast, names, fewest)
        circle = sorted(
            names, key=lambda name: hashlib.sha256(self._ring_salt + name.encode()).digest()
        )
        keys = {name: self._introduced[name].key.public for name in names}
        masked_sum = MaskedSum(
            self._last_attempt, tuple(circle), threshold, contents.length, keys, fewest
        )
        weight = sum(int(self.members[name].counted.sum()) for name in names)
        scale = max(0, weight - 1).bit_length()
        return _Attempt(masked_sum, contents, scale, set(names))

    def _contents(
        self, broadcast: Broadcast, names: Collection[str], fewest: int
    ) -> Contents | PrivateContents:
        if broadcast.private is not None:
            return PrivateContents.of(broadcast, sharers(fewest))
        shapes = {self._introduced[name].tally for name in names} - {None}
        shape = shapes.pop() if len(shapes) == 1 else None
        if shapes:
            LOG.warning(
                "nodes' test results differ in shape, cannot be summed and are left out"
            )
        slots = max(_FEWEST_SLOTS, _SLOTS_EACH * len(names))
        return Contents.of(broadcast, slots, shape, self._headroom)

    def _group(self, attempt: _Attempt, name: str, broadcast: Broadcast) -> Group:
        names = attempt.sum.group(name)
        sent = self._sent_keys.setdefault(name, {})
        keys = [self._introduced[other].key for other in names if other != name]
        new = tuple(key for key in keys if sent.get(key.name) != key.public)
        sent.update({key.name: key.public for key in new})
        contents = attempt.contents
        return Group(
            round=broadcast.round,
            attempt=attempt.sum.attempt,
            names=names,
            threshold=attempt.sum.threshold(name),
            weights=tuple(self.members[name].counted.tolist()),
            scale=attempt.scale,
            slots=contents.slots,
            headroom=self._headroom,
            tally=contents.tally if contents.tallies else None,
            keys=new,
            sharers=contents.sharers,
        )

    def _expect(self, peer: Peer, broadcast: Broadcast) -> None:
        assert self._attempt is not None
        masked_sum = self._attempt.sum
        peer.reader.expect_masked(broadcast.round, masked_sum.attempt, masked_sum.length)

    def _receive_vector(self, peer: Peer, attempt: _Attempt, report: MaskedReport) -> None:
        assert self.pending is not None
        broadcast = self.pending.broadcast
        member = self.members[peer.name]
        waited = self._thread.loop.time() - peer.asked_at
        costs = within(report.costs, waited, max(1, broadcast.tau))
        attempt.sum.receive_vector(peer.name, report.vector)
        unknown = np.zeros(len(member))  # losses of single nodes
        known = Report(broadcast.round, member.numbers, member.counted, unknown, unknown)
        self.pending.receive(peer.name, Answer(known, costs, waited=waited))

    def _receive_late(self, peer: Peer, attempt: int) -> None:
        """Discard a message of an abandoned attempt, or a share that was not necessary.

        A peer that was silent in that attempt is idle again.
        """
        if self._silent.get(peer.name) == attempt:
            del self._silent[peer.name]
            peer.asked = 0
            self.counters.late += 1
            LOG.info("%s's message for a sum was too late and is discarded", peer.name)

    def _advance(self, pending: PendingRound[str], attempt: _Attempt, now: float) -> None:
        """Move to the next phase if this one is over."""
        masked_sum = attempt.sum
        over = not attempt.awaited or now >= attempt.due
        try:
            if masked_sum.phase is SumPhase.OPENED:
                if masked_sum.can_open():
                    self._open(attempt)
                elif over:
                    raise TooFewLeft("too few nodes have sent the shares that open the sum")
            elif over or now >= pending.end:
                if masked_sum.phase is SumPhase.SHARES:
                    self._request(attempt, masked_sum.relay(), self._timeout)
                else:
                    survivors = masked_sum.survivors()
                    self._pay(pending.broadcast, attempt)
                    self._request(attempt, survivors, min(self._timeout, _OPENING))
        except TooFewLeft as error:
            self._abandon(pending, attempt, str(error))
        except WorkError as error:  # the payment failed; nothing was opened
            self._fail(error)
            self._finish(pending)

    def _pay(self, broadcast: Broadcast, attempt: _Attempt) -> None:
        """Pay for a private round before any node is asked to open it.

        The round is paid once: nodes send the same noisy vectors in every attempt.
        """
        if broadcast.private is not None and not self._fewest:
            self.pay(broadcast.round, broadcast.private.rho)
            self._fewest = attempt.sum.fewest

    def _request(
        self, attempt: _Attempt, messages: Mapping[str, FromAggregator], seconds: float
    ) -> None:
        """Send a phase's messages to all participants that have not left."""
        self._set_due(attempt, seconds)
        for name, message in messages.items():
            if name in attempt.here and (peer := self.peers.get(name)) is not None:
                self.peers.send(peer, pack_masking_request(message))

    def _set_due(self, attempt: _Attempt, seconds: float) -> None:
        attempt.due = self._thread.loop.time() + seconds
        if seconds < 1e6:
            self._check_at(attempt.due, attempt.due)

    def _open(self, attempt: _Attempt) -> None:
        attempt.opening = True
        opening = self._thread.loop.run_in_executor(None, attempt.sum.open)
        opening.add_done_callback(lambda opened: self._opened(attempt, opened))

    def _opened(self, attempt: _Attempt, opened: "asyncio.Future[UInt64]") -> None:
        if self._attempt is not attempt or self.pending is None or opened.cancelled():
            return
        error = opened.exception()
        if isinstance(error, TooFewLeft):
            self._abandon(self.pending, attempt, str(error))
            return
        if isinstance(error, Exception):
            self._fail(error)
        else:
            attempt.result = opened.result()
        self.check()

    def _abandon(self, pending: PendingRound[str], attempt: _Attempt, reason: str) -> None:
        """Give an attempt up; another one may follow after a pause."""
        LOG.info("round %d begins again: %s", pending.broadcast.round, reason)
        self._release(attempt)
        self._attempt = None
        self._failed += 1
        if any(not opened.own for opened in attempt.sum.opened.values()):
            self._declined.add(frozenset(attempt.sum.circle))
        pending.awaited.clear()
        pending.answers.clear()
        if self._failed >= _MOST_ATTEMPTS:
            self._fail(
                WorkError(f"round {pending.broadcast.round} cannot be summed: {reason}")
            )
            self.check()
            return
        pause = min(_LONGEST_PAUSE, _PAUSE * 2**self._failed)
        self._not_before = self._thread.loop.time() + pause
        self._check_at(self._not_before, self._not_before)

    def _release(self, attempt: _Attempt) -> None:
        """Mark participants as idle, except silent ones if the sum was not opened."""
        silent = set() if attempt.result is not None else attempt.awaited
        for name in attempt.here:
            if name in silent:
                self._silent[name] = attempt.sum.attempt
            elif (peer := self.peers.get(name)) is not None:
                peer.asked = 0

    def _close(self, pending: PendingRound[str]) -> CollectedRound:
        attempt = self._attempt
        self._attempt = None
        if attempt is not None:
            self._release(attempt)
        if attempt is None or attempt.result is None:
            pending.answers.clear()  # none of them can be read
            return replace(super()._close(pending), enough=False)
        collected = super()._close(pending)
        nodes, sizes = self._nodes(pending.answers)
        reports, tallies = attempt.contents.open(
            pending.broadcast, attempt.result, nodes, sizes, attempt.scale
        )
        if isinstance(reports, OpenedReports) and reports.left_out:
            LOG.warning(
                "reports that are not finite or too large to be summed are left out"
            )
            self._headroom = min(_MOST_HEADROOM, self._headroom + _MORE_HEADROOM)
        return replace(collected, summed=reports, tallies=tallies)

    def _nodes(self, names: Collection[str]) -> tuple[Int64, Int64]:
        """Numbers of these members' nodes, ascending, and their sample counts."""
        nodes = np.concatenate([self.members[name].numbers for name in names])
        sizes = np.concatenate([self.members[name].counted for name in names])
        order = np.argsort(nodes)
        return nodes[order], sizes[order]
