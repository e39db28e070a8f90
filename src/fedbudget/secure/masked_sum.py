"""The aggregator's side of one attempt at a masked sum.

There is no clock and no I/O here. The caller invokes `relay` when it stops waiting for
shares, `survivors` when it stops waiting for vectors, and `confirmations` when it stops
waiting for these. Phases follow each other; a message that is late or was not requested is
refused.

The opened sum is checked. Each vector ends with a 1, so the last number of the sum is the
number of vectors if all masks are gone. Digests show which share or seed is wrong.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedbudget.arrays import UInt64
from fedbudget.protocol.messages import LocalError, PeerError
from fedbudget.secure import shamir
from fedbudget.secure.graph import FEWEST, needed, neighbours
from fedbudget.secure.member import NONCE, SEED, add_mask, sign_of
from fedbudget.secure.messages import (
    Confirmations,
    Confirmed,
    Opened,
    Relay,
    Shares,
    Survivors,
)

_TAG = 16  # bytes that AES-GCM appends


class SumPhase(IntEnum):
    """The messages that are due."""

    SHARES = 0
    VECTORS = 1
    CONFIRMED = 2
    OPENED = 3


class TooFewLeft(Exception):
    """The attempt cannot be completed."""


class MasksRemain(TooFewLeft):
    """The opened sum is noise: masks of some nodes do not cancel."""


@dataclass
class MaskedSum:
    """One attempt at a round.

    Args:
      attempt: its number.
      circle: names of all participants, in ring order (graph.py).
      share: of each group that must stay.
      length: of vectors, without the 1 at their ends.
      fewest: smallest number of vectors whose sum is opened; at least `share` of all.

    Attributes:
      sent: shares by sender.
      summed: nodes whose vectors are in the sum.
      confirmed: proofs by sender.
      opened: revealed shares by sender.
      wrong: pairs of a node that revealed a wrong share and the owner of the secret.
    """

    attempt: int
    circle: tuple[str, ...]
    share: float
    length: int
    fewest: int = 1
    phase: SumPhase = SumPhase.SHARES
    sent: dict[str, Shares] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    confirmed: dict[str, Confirmed] = field(default_factory=dict)
    opened: dict[str, Opened] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fewest = max(self.fewest, needed(len(self.circle), self.share))
        self.neighbours = neighbours(self.circle)
        self._groups = {
            name: tuple(sorted((name, *others))) for name, others in self.neighbours.items()
        }
        # shares still missing, by the owner of the secret
        self._missing: dict[str, int] = {}
        self.total: UInt64 = np.zeros(self.length + 1, np.uint64)

    def group(self, name: str) -> tuple[str, ...]:
        """A node and its neighbours, in the order of share numbers."""
        return self._groups[name]

    def threshold(self, name: str) -> int:
        return needed(len(self.group(name)), self.share)

    def receive_shares(self, name: str, shares: Shares) -> None:
        expected = self.neighbours.get(name)
        if (
            self.phase is not SumPhase.SHARES
            or shares.attempt != self.attempt
            or expected is None
            or name in self.sent
        ):
            raise PeerError("shares that were not requested")
        if shares.shares.keys() != set(expected):
            raise PeerError("shares that are not for all neighbours")
        if len(shares.seeds) != SEED * len(expected) + _TAG:
            raise PeerError("seeds that are not those with all neighbours")
        if len(shares.digests) != shamir.DIGEST * (3 + 2 * len(expected)):
            raise PeerError("digests that are not those of all shares")
        self.sent[name] = shares

    def relay(self) -> dict[str, Relay]:
        """Return the neighbours' shares for each node that sent its own.

        Raises:
          TooFewLeft: a group is below its threshold.
        """
        self._require(self.sent, self.fewest)
        self.phase = SumPhase.VECTORS
        relays = {}
        for name in self.sent:
            shares = {
                other: self.sent[other].shares[name]
                for other in self.neighbours[name]
                if other in self.sent
            }
            relays[name] = Relay(self.attempt, shares)
        return relays

    def receive_vector(self, name: str, vector: UInt64) -> None:
        if (
            self.phase is not SumPhase.VECTORS
            or name not in self.sent
            or name in self.summed
        ):
            raise PeerError("a masked vector that was not requested")
        if len(vector) != len(self.total):
            raise PeerError(
                f"a masked vector of {len(vector)} numbers, not {len(self.total)}"
            )
        self.summed.add(name)
        np.add(self.total, vector, out=self.total)

    def survivors(self) -> Survivors:
        """Return the list of survivors, for all nodes whose vectors arrived.

        Raises:
          TooFewLeft: a group is below its threshold.
        """
        self._require(self.summed, self.fewest)
        self.phase = SumPhase.CONFIRMED
        places = enumerate(self.circle)
        absent = [place for place, name in places if name not in self.summed]
        return Survivors(self.attempt, tuple(absent))

    def receive_confirmed(self, name: str, confirmed: Confirmed) -> None:
        if (
            self.phase is not SumPhase.CONFIRMED
            or confirmed.attempt != self.attempt
            or name not in self.summed
            or name in self.confirmed
        ):
            raise PeerError("a confirmation that was not requested")
        others = self.summed.intersection(self.neighbours[name])
        if confirmed.proofs and confirmed.proofs.keys() != others:
            raise PeerError("a confirmation that is not for all survivors")
        self.confirmed[name] = confirmed

    @property
    def declined(self) -> set[str]:
        """Nodes that refuse to open the round for these survivors."""
        return {name for name, each in self.confirmed.items() if not each.proofs}

    def confirmations(self) -> dict[str, Confirmations]:
        """Return the neighbours' proofs for each node that confirmed the survivors.

        Raises:
          TooFewLeft: a group is below its threshold.
        """
        confirmed = [name for name, each in self.confirmed.items() if each.proofs]
        self._require(confirmed, FEWEST)
        self.phase = SumPhase.OPENED
        self._missing = {name: self.threshold(name) for name in self._secret_owners()}
        messages = {}
        for name in confirmed:
            proofs = {
                other: self.confirmed[other].proofs[name]
                for other in self.neighbours[name]
                if other in confirmed
            }
            messages[name] = Confirmations(self.attempt, proofs)
        return messages

    def receive_opened(self, name: str, opened: Opened) -> None:
        if self.phase is not SumPhase.OPENED or opened.attempt != self.attempt:
            raise PeerError("shares that were not requested")
        if name not in self.confirmed or name in self.opened:
            raise PeerError("shares from a node that has none to send")
        group = {other for other in self.group(name) if other in self.sent}
        if (
            opened.own.keys() != group & self.summed
            or opened.pairs.keys() != group - self.summed
        ):
            raise PeerError("shares other than the requested ones")
        self.opened[name] = opened
        for owner, share in (*opened.own.items(), *opened.pairs.items()):
            if owner not in self._missing:
                continue
            if not self._is_right(name, owner, share):
                self.wrong.append((name, owner))
                continue
            self._missing[owner] -= 1
            if not self._missing[owner]:
                del self._missing[owner]

    def can_open(self) -> bool:
        """Whether enough shares of all required secrets have arrived."""
        return self.phase is SumPhase.OPENED and not self._missing

    def open(self) -> UInt64:
        """Return the sum of all vectors that arrived.

        Raises:
          TooFewLeft: shares are missing, or do not fit together.
        """
        if self.phase is not SumPhase.OPENED:
            raise LocalError("a sum is opened after its survivors were announced")
        if not self.can_open():
            raise TooFewLeft("too few nodes of a group have stayed to open the sum")
        for name in self._secret_owners():
            try:
                secret = shamir.combine(self._shares(name))
                if name not in self.summed:
                    self._remove_pairs(name, secret)
                    continue
            except (ValueError, InvalidTag):
                secret = b""
            if shamir.digest(secret) != self.sent[name].digests[: shamir.DIGEST]:
                raise TooFewLeft(f"{name} has divided another secret than its own")
            add_mask(self.total, secret, -1)
        if self.total[-1] != len(self.summed):
            raise MasksRemain(
                "the masks do not cancel: a node has masked wrongly, or has received "
                "another task, model or group than the others"
            )
        return self.total[:-1]

    def _remove_pairs(self, gone: str, key: bytes) -> None:
        """Subtract the pairwise masks of survivors with a node that left."""
        seeds = AESGCM(key).decrypt(NONCE, self.sent[gone].seeds, None)
        for at, other in enumerate(self.neighbours[gone]):
            if other in self.summed:
                seed = seeds[SEED * at : SEED * (at + 1)]
                add_mask(self.total, seed, -sign_of(other, gone))

    def _secret_owners(self) -> list[str]:
        """Nodes whose secrets are required.

        These are all survivors (own seeds), and nodes that left but share a mask with a
        survivor (keys to pairwise seeds).
        """
        gone = [name for name in self.sent if name not in self.summed]
        masked = [n for n in gone if not self.summed.isdisjoint(self.neighbours[n])]
        return [*self.summed, *masked]

    def _shares(self, owner: str) -> dict[int, bytes]:
        """The first `threshold` shares of one secret, by share number."""
        shares: dict[int, bytes] = {}
        for number, holder in enumerate(self.group(owner), start=1):
            opened = self.opened.get(holder)
            if opened is None or len(shares) == self.threshold(owner):
                continue
            share = (opened.own if owner in self.summed else opened.pairs).get(owner)
            if share is not None and (holder, owner) not in self.wrong:
                shares[number] = share
        return shares

    def _is_right(self, holder: str, owner: str, share: bytes) -> bool:
        """Whether a revealed share is the one that its owner gave to the holder."""
        group = self.group(owner)
        place = 1 + group.index(holder)
        if owner not in self.summed:
            place += len(group)
        digests = self.sent[owner].digests
        known = digests[place * shamir.DIGEST : (place + 1) * shamir.DIGEST]
        return shamir.digest(share) == known

    def _require(self, present: Collection[str], fewest: int) -> None:
        """Raise `TooFewLeft` if a group with required secrets lost too many nodes."""
        if len(present) < fewest:
            raise TooFewLeft(f"{len(present)} nodes are left, {fewest} are needed")
        here = set(present)
        for name in self.sent:
            group = self.group(name)
            left = len(here.intersection(group))
            if left and left < self.threshold(name):
                raise TooFewLeft(
                    f"{left} of {name}'s group are left, {self.threshold(name)} are needed"
                )
