"""Collects the reports of a round as a masked sum (secure/masked_sum.py).

A round takes one or more attempts:

1. Every idle node receives the ring of all nodes and the broadcast, and sends shares before
   it trains.
2. When all shares have arrived, or the wait is over, the aggregator relays them.
3. Nodes that have trained send their masked vectors.
4. Nodes whose vectors are in the sum receive the list of these nodes, and confirm it.
5. They receive the confirmations of others, and send the shares that open the sum.

A node that leaves, or stays silent for too long, is left out of the following steps. An
attempt that lost too many nodes is abandoned, and another one begins with the nodes that
are present. With fewer than three nodes, or fewer than the round or a node needs, the
aggregator waits until the round's end.

A node whose report is not finite abstains, and is not asked again in this round. If so many
abstain that no sum is possible, the round counts as one without a finite report.

Threads: everything runs in the event loop's thread. Only `MaskedSum.open` runs in an
executor, because it takes a while for large models.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedbudget.arrays import UInt64
from fedbudget.engines.grpc.messages import FromNode, NodeReader
from fedbudget.engines.grpc.peers import LOG, Peer, Peers
from fedbudget.engines.grpc.rounds import Pending
from fedbudget.engines.grpc.stream import pack
from fedbudget.engines.remote.members import Members
from fedbudget.engines.remote.messages import MaskedAnswer, MaskedReport
from fedbudget.engines.remote.round import CollectedRound, NextStep
from fedbudget.errors import WorkError
from fedbudget.protocol.messages import Broadcast, PeerError, Private
from fedbudget.resources.resource import Usage
from fedbudget.secure.contents import Contents, PrivateContents, nothing_finite, scale_of
from fedbudget.secure.graph import FEWEST, needed, sharers
from fedbudget.secure.identity import Trust, UntrustedKey
from fedbudget.secure.masked_sum import MaskedSum, MasksRemain, SumPhase, TooFewLeft
from fedbudget.secure.messages import (
    Abstention,
    Confirmed,
    FromAggregator,
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
_MARGIN = 10**10  # attempts after the last checkpoint of an earlier process; 116 days
_MOST_WRONG = 3  # attempts at one round in which masks do not cancel


@dataclass
class _Participant:
    """A connected peer.

    Args:
      known: public keys that it has received, by name.
      silent: the attempt in which it was silent; 0 for none.
    """

    introduction: Introduction
    known: dict[str, bytes] = field(default_factory=dict)
    silent: int = 0


@dataclass
class _Attempt:
    """One attempt at a round.

    Args:
      scale: see `scale_of`; 0 in private rounds, in which all nodes weigh the same.
      here: names of participants that have not left.
      due: end of the phase, by the event loop's clock.
      opening: the sum, once it is being opened.
      result: the sum, once it is open.
    """

    sum: MaskedSum
    contents: Contents | PrivateContents
    scale: int
    here: set[str]
    due: float = 0.0
    opening: "asyncio.Future[UInt64] | None" = None
    result: UInt64 | None = None

    @property
    def awaited(self) -> set[str]:
        """Participants whose message is due in this phase."""
        phase = self.sum.phase
        if phase is SumPhase.SHARES:
            return self.here - self.sum.sent.keys()
        if phase is SumPhase.VECTORS:
            return self.here & self.sum.sent.keys() - self.sum.summed
        if phase is SumPhase.CONFIRMED:
            return self.here & self.sum.summed - self.sum.confirmed.keys()
        confirmed = self.sum.confirmed.keys() - self.sum.declined
        return self.here & confirmed - self.sum.opened.keys()


class MaskedSums:
    """A `ReportCollector` that opens only the sum of a round's reports.

    Args:
      run: name of the run.
      threshold: share of each group that must stay.
      trust: decides which keys are accepted.

    Attributes:
      last_attempt: number of the last attempt.
      pay: writes the payment of a private round, by its number and ρ; called before nodes
        are asked to open the round.
    """

    same_for_all = True

    def __init__(self, run: str, threshold: float, trust: Trust) -> None:
        self.pay: Callable[[int, float], None] = lambda round_, rho: None
        self._run = run
        self._threshold = threshold
        self._trust = trust
        # The same nodes have the same neighbours after a crash of the aggregator.
        self._ring_salt = run.encode()
        self._participants: dict[str, _Participant] = {}
        self.last_attempt = 0
        self._attempt: _Attempt | None = None
        self._few: set[str] = set()  # nodes that require more nodes than there are
        # members in the smallest sum, once an attempt at a private round was to be opened
        self._fewest = 0

    def begin(
        self,
        pending: Pending,
        members: Members[str],
        peers: Peers,
        wake_at: Callable[[float], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending = pending
        self._members = members
        self._peers = peers
        self._wake_at = wake_at
        self._timeout = pending.deadline - self._loop.time()
        self._attempt = None
        self._fewest = 0
        self._failed = 0  # attempts at this round
        self._wrong = 0  # of these, with masks that did not cancel
        self._abstained: dict[str, Usage] = {}  # costs by name
        self._not_before = 0.0  # earliest time of the next attempt
        # sets of nodes of which one has opened this round with another set
        self._declined: set[frozenset[str]] = set()

    def resume(self, last_attempt: int) -> None:
        """Continue after the attempts of an earlier process, whatever the clock shows.

        Nodes refuse numbers that they have seen. Some may follow those of the checkpoint.
        """
        self.last_attempt = last_attempt + _MARGIN

    @property
    def fewest(self) -> int:
        required = [each.introduction.least for each in self._participants.values()]
        return max(FEWEST, self._fewest, min(required, default=0))

    def reader(self) -> NodeReader:
        return NodeReader(masked=True)

    def before_welcome(self) -> list[bytes]:
        return pack(Terms(self._threshold))

    def require_ready(self, peer: Peer) -> None:
        if peer.name not in self._participants:
            raise PeerError("'ready' before it has sent its key")

    def withdraw(self, peer: Peer) -> None:
        self._participants.pop(peer.name, None)
        if self._attempt is not None:
            self._attempt.here.discard(peer.name)

    def requests(self, idle: Sequence[Peer]) -> Iterator[tuple[Peer, list[bytes]]]:
        """Begin an attempt with all idle peers, if there are enough of them."""
        names = sorted(self._suitable([peer.name for peer in idle]))
        pending = self._pending
        too_few = len(names) < self.fewest or self._members.nodes(names) < pending.least
        if self._attempt is not None or too_few or frozenset(names) in self._declined:
            return
        idle = [peer for peer in idle if peer.name in names]
        broadcast = pending.broadcast
        self.last_attempt = max(self.last_attempt + 1, int(1000 * time.time()))
        attempt = self._create_attempt(broadcast, names)
        self._attempt = attempt
        self._set_due(attempt, self._timeout)
        for peer in idle:
            peer.reader.expect_masked(
                broadcast.round, attempt.sum.attempt, len(attempt.sum.total)
            )
            group = self._group(attempt, peer.name, broadcast)
            yield peer, pack(group)

    def accept(self, peer: Peer, message: FromNode) -> MaskedAnswer | None:
        name = peer.name
        attempt = self._attempt
        if isinstance(message, Introduction):
            self._introduce(name, message)
            return None
        assert isinstance(message, Shares | Abstention | Confirmed | Opened | MaskedReport)
        if (
            attempt is None
            or message.attempt != attempt.sum.attempt
            or name not in attempt.awaited
        ):
            self._receive_late(peer, message.attempt)
        elif isinstance(message, Shares):
            attempt.sum.receive_shares(name, message)
        elif isinstance(message, Abstention):
            self._abstain(attempt, peer, message)
        elif isinstance(message, Confirmed):
            attempt.sum.receive_confirmed(name, message)
            if not message.proofs:
                LOG.warning("%s has opened this round with other nodes and declines", name)
        elif isinstance(message, Opened):
            attempt.sum.receive_opened(name, message)
            for holder, owner in attempt.sum.wrong:
                if holder == name:
                    LOG.warning("%s or %s has sent a wrong share", holder, owner)
        else:
            attempt.sum.receive_vector(name, message.vector)
            return MaskedAnswer(self._members[name].numbers, message.costs)
        return None

    def next_step(self, now: float) -> NextStep:
        pending = self._pending
        attempt = self._attempt
        if pending.stopped or (attempt is None and now >= pending.end):
            return NextStep.CLOSE
        if attempt is None and self._all_abstain():
            return NextStep.CLOSE
        if attempt is None:
            return NextStep.ASK if now >= self._not_before else NextStep.WAIT
        try:
            self._advance(attempt, now)
        except TooFewLeft as error:
            self._wrong += isinstance(error, MasksRemain)
            self._abandon(attempt, str(error))
        return NextStep.WAIT if attempt.result is None else NextStep.CLOSE

    def close(self, instances: Mapping[str, str]) -> CollectedRound:
        pending = self._pending
        members = self._members
        attempt = self._attempt
        self._attempt = None
        if attempt is not None:
            self._release(attempt)
        if attempt is None or attempt.result is None:
            pending.answers.clear()  # none of them can be read
            if self._all_abstain():
                return self._without_finite(instances)
            return pending.close(members, instances)
        collected = pending.close(members, instances)
        summed = [members[name] for name in pending.answers]
        summed.sort(key=lambda member: int(member.numbers[0]))
        private = isinstance(pending.broadcast, Private)  # weights are not limited
        sizes = [member.sizes if private else member.counted for member in summed]
        opened = attempt.contents.open(
            pending.broadcast,
            attempt.result,
            np.concatenate([member.numbers for member in summed]),
            np.concatenate(sizes),
            attempt.scale,
        )
        if opened.left_out:
            LOG.warning(
                "reports that are not finite or too large to be summed are left out"
            )
        return replace(collected, summed=opened.sums, tallies=opened.tallies)

    def _suitable(self, names: Sequence[str]) -> set[str]:
        """Return the idle nodes that can take part in this round.

        Nodes that require more nodes than there are, or have abstained, are left out.
        """
        least = {
            name: self._participants[name].introduction.least
            for name in names
            if name not in self._abstained
        }
        chosen = set(least)
        while few := {name for name in chosen if least[name] > len(chosen)}:
            largest = max(least[name] for name in few)
            chosen -= {name for name in few if least[name] == largest}
        few = least.keys() - chosen
        for name in sorted(few - self._few):
            LOG.warning(
                "%s requires sums over %d nodes; %d are here", name, least[name], len(least)
            )
        self._few = few
        return chosen

    def _abstain(self, attempt: _Attempt, peer: Peer, message: Abstention) -> None:
        """Record that a node's report is not finite."""
        LOG.warning("%s's report is not finite or too large to be summed", peer.name)
        attempt.here.discard(peer.name)
        self._abstained[peer.name] = message.costs
        self._pending.withdraw(peer.name)
        peer.asked = 0

    def _all_abstain(self) -> bool:
        """Whether too few nodes for a sum are left, only because others abstain."""
        here = {name for name in self._participants if self._peers.get(name) is not None}
        abstained = here & self._abstained.keys()
        left = len(here) - len(abstained)
        return bool(abstained) and left < self.fewest <= len(here)

    def _without_finite(self, instances: Mapping[str, str]) -> CollectedRound:
        """End a round in which too few reports are finite."""
        pending = self._pending
        members = self._members
        for name, costs in self._abstained.items():
            if name in members:
                pending.receive(name, MaskedAnswer(members[name].numbers, costs))
        there = sorted(pending.answers, key=lambda name: int(members[name].numbers[0]))
        nodes = np.concatenate([members[name].numbers for name in there])
        sizes = np.concatenate([members[name].counted for name in there])
        collected = pending.close(members, instances)
        return replace(collected, summed=nothing_finite(pending.broadcast, nodes, sizes))

    def _introduce(self, name: str, introduction: Introduction) -> None:
        if introduction.key.name != name:
            raise PeerError(f"it has sent the key of {introduction.key.name}")
        try:
            self._trust.admit(self._run, introduction.key)
        except UntrustedKey as error:
            raise PeerError(str(error)) from None
        participant = self._participants.setdefault(name, _Participant(introduction))
        participant.introduction = introduction

    def _create_attempt(self, broadcast: Broadcast, names: Sequence[str]) -> _Attempt:
        fewest = 1
        if isinstance(broadcast, Private):
            fewest = self._fewest or needed(len(names), self._threshold)
        contents = self._contents(broadcast, names, fewest)
        circle = sorted(
            names, key=lambda name: hashlib.sha256(self._ring_salt + name.encode()).digest()
        )
        masked_sum = MaskedSum(
            self.last_attempt, tuple(circle), self._threshold, contents.length, fewest
        )
        scale = 0
        if not isinstance(broadcast, Private):
            assert self._members.cap is not None
            scale = scale_of(self._members.cap, len(names))
        return _Attempt(masked_sum, contents, scale, set(names))

    def _contents(
        self, broadcast: Broadcast, names: Sequence[str], fewest: int
    ) -> Contents | PrivateContents:
        if isinstance(broadcast, Private):
            return PrivateContents.of(broadcast, sharers(fewest))
        shapes = {self._participants[name].introduction.tally for name in names} - {None}
        shape = shapes.pop() if len(shapes) == 1 else None
        if shapes:
            LOG.warning(
                "nodes' test results differ in shape, cannot be summed and are left out"
            )
        return Contents.of(broadcast, shape)

    def _group(self, attempt: _Attempt, name: str, broadcast: Broadcast) -> Group:
        participants = self._participants
        known = participants[name].known
        others = attempt.sum.neighbours[name]
        keys = [participants[other].introduction.key for other in others]
        new = [key for key in keys if known.get(key.name) != key.public]
        known.update({key.name: key.public for key in new})
        contents = attempt.contents
        return Group(
            round=broadcast.round,
            attempt=attempt.sum.attempt,
            ring=attempt.sum.circle,
            tally=contents.tally if contents.tallies else None,
            keys=tuple(new),
            sharers=contents.sharers,
        )

    def _receive_late(self, peer: Peer, attempt: int) -> None:
        """Discard a message of an abandoned attempt, or a share that was not necessary.

        A peer that was silent in that attempt is idle again.
        """
        participant = self._participants.get(peer.name)
        if participant is not None and participant.silent == attempt:
            participant.silent = 0
            peer.asked = 0
            self._peers.counters.late += 1
            LOG.info("%s's message for a sum was too late and is discarded", peer.name)

    def _advance(self, attempt: _Attempt, now: float) -> None:
        """Move to the next phase if this one is over."""
        masked_sum = attempt.sum
        if attempt.opening is not None:
            if attempt.opening.done():
                attempt.result = attempt.opening.result()
            return
        over = not attempt.awaited or now >= attempt.due
        if masked_sum.phase is SumPhase.CONFIRMED:
            if over:
                opening = min(self._timeout, _OPENING)
                self._request(attempt, masked_sum.confirmations(), opening)
        elif masked_sum.phase is SumPhase.OPENED:
            if masked_sum.can_open():
                attempt.opening = self._loop.run_in_executor(None, masked_sum.open)
                attempt.opening.add_done_callback(lambda _: self._wake_at(0.0))
            elif over:
                raise TooFewLeft("too few nodes have sent the shares that open the sum")
        elif over or now >= self._pending.end:
            if masked_sum.phase is SumPhase.SHARES:
                self._request(attempt, masked_sum.relay(), self._timeout)
            else:
                survivors = masked_sum.survivors()
                broadcast = self._pending.broadcast
                # A private round is paid before any node is asked to open it, and once:
                # nodes send the same noisy vectors in every attempt.
                if isinstance(broadcast, Private) and not self._fewest:
                    self.pay(broadcast.round, broadcast.rho)
                    self._fewest = masked_sum.fewest
                messages = dict.fromkeys(masked_sum.summed, survivors)
                self._request(attempt, messages, min(self._timeout, _OPENING))

    def _request(
        self, attempt: _Attempt, messages: Mapping[str, FromAggregator], seconds: float
    ) -> None:
        """Send a phase's messages to all participants that have not left."""
        self._set_due(attempt, seconds)
        packed: dict[int, list[bytes]] = {}
        for name, message in messages.items():
            if name in attempt.here and (peer := self._peers.get(name)) is not None:
                if id(message) not in packed:
                    packed[id(message)] = pack(message)
                self._peers.send(peer, packed[id(message)])

    def _set_due(self, attempt: _Attempt, seconds: float) -> None:
        attempt.due = self._loop.time() + seconds
        self._wake_at(attempt.due)

    def _abandon(self, attempt: _Attempt, reason: str) -> None:
        """Give an attempt up; another one may follow after a pause."""
        number = self._pending.broadcast.round
        LOG.info("round %d begins again: %s", number, reason)
        self._release(attempt)
        self._attempt = None
        self._failed += 1
        if attempt.sum.declined:
            self._declined.add(frozenset(attempt.sum.circle))
        self._pending.begin_again()
        if self._failed >= _MOST_ATTEMPTS or self._wrong >= _MOST_WRONG:
            raise WorkError(f"round {number} cannot be summed: {reason}")
        pause = min(_LONGEST_PAUSE, _PAUSE * 2**self._failed)
        self._not_before = self._loop.time() + pause
        self._wake_at(self._not_before)

    def _release(self, attempt: _Attempt) -> None:
        """Mark participants as idle, except silent ones if the sum was not opened."""
        silent = set() if attempt.result is not None else attempt.awaited
        for name in attempt.here:
            if name in silent:
                self._participants[name].silent = attempt.sum.attempt
            elif (peer := self._peers.get(name)) is not None:
                peer.asked = 0
