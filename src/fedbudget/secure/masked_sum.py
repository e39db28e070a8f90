"""The aggregator's side of one attempt at a masked sum.

There is no clock and no I/O here. The caller invokes `relay` when it stops waiting for
shares, and `survivors` when it stops waiting for vectors. Phases follow each other; a
message that is late or was not requested is refused.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedbudget.arrays import UInt64
from fedbudget.protocol.messages import LocalError, PeerError
from fedbudget.secure import shamir
from fedbudget.secure.graph import needed, neighbours
from fedbudget.secure.member import NONCE, SEED, add_mask, sign_of
from fedbudget.secure.messages import Opened, Relay, Shares, Survivors

_TAG = 16  # bytes that AES-GCM appends


class SumPhase(IntEnum):
    """The messages that are due."""

    SHARES = 0
    VECTORS = 1
    OPENED = 2


class TooFewLeft(Exception):
    """The attempt cannot be completed."""


@dataclass
class MaskedSum:
    """One attempt at a round.

    Args:
      attempt: its number.
      circle: names of all participants, in ring order (graph.py).
      share: of each group that must stay.
      length: of vectors.
      keys: public keys by name.
      fewest: smallest number of vectors whose sum is opened.

    Attributes:
      sent: shares by sender.
      summed: nodes whose vectors are in the sum.
      opened: revealed shares by sender.
    """

    attempt: int
    circle: tuple[str, ...]
    share: float
    length: int
    keys: Mapping[str, bytes]
    fewest: int = 1
    phase: SumPhase = SumPhase.SHARES
    sent: dict[str, Shares] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    opened: dict[str, Opened] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.neighbours = neighbours(self.circle)
        self._groups = {
            name: tuple(sorted((name, *others))) for name, others in self.neighbours.items()
        }
        # shares still missing, by the owner of the secret
        self._missing: dict[str, int] = {}
        self.total: UInt64 = np.zeros(self.length, np.uint64)

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
        self.sent[name] = shares

    def relay(self) -> dict[str, Relay]:
        """Return the neighbours' shares for each node that sent its own.

        Raises:
          TooFewLeft: a group is below its threshold.
        """
        self._require(self.sent)
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
        if len(vector) != self.length:
            raise PeerError(f"a masked vector of {len(vector)} numbers, not {self.length}")
        self.summed.add(name)
        np.add(self.total, vector, out=self.total)

    def survivors(self) -> dict[str, Survivors]:
        """Return the survivors' list for each node whose vector arrived.

        Raises:
          TooFewLeft: a group is below its threshold.
        """
        self._require(self.summed)
        self.phase = SumPhase.OPENED
        self._missing = {name: self.threshold(name) for name in self._secret_owners()}
        everyone = _digest({name: self.keys[name] for name in self.summed})
        messages = {}
        for name in self.summed:
            names = tuple(other for other in self.group(name) if other in self.summed)
            messages[name] = Survivors(self.attempt, names, everyone)
        return messages

    def receive_opened(self, name: str, opened: Opened) -> None:
        if self.phase is not SumPhase.OPENED or opened.attempt != self.attempt:
            raise PeerError("shares that were not requested")
        if name not in self.summed or name in self.opened:
            raise PeerError("shares from a node that has none to send")
        group = {other for other in self.group(name) if other in self.sent}
        declined = not opened.own and not opened.pairs
        if not declined and (
            opened.own.keys() != group & self.summed
            or opened.pairs.keys() != group - self.summed
        ):
            raise PeerError("shares other than the requested ones")
        self.opened[name] = opened
        for owner in (*opened.own, *opened.pairs):
            if owner in self._missing:
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
        try:
            for name in self._secret_owners():
                secret = shamir.combine(self._shares(name))
                if name in self.summed:
                    add_mask(self.total, secret, -1)
                else:
                    self._remove_pairs(name, secret)
        except (ValueError, InvalidTag):
            raise TooFewLeft(
                "shares do not fit together: a node has sent wrong ones"
            ) from None
        return self.total

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
            if share is not None:
                shares[number] = share
        return shares

    def _require(self, present: Collection[str]) -> None:
        """Raise `TooFewLeft` if a group with required secrets lost too many nodes."""
        if len(present) < self.fewest:
            raise TooFewLeft(f"{len(present)} nodes are left, {self.fewest} are needed")
        here = set(present)
        for name in self.sent:
            group = self.group(name)
            left = len(here.intersection(group))
            if left and left < self.threshold(name):
                raise TooFewLeft(
                    f"{left} of {name}'s group are left, {self.threshold(name)} are needed"
                )


def _digest(keys: Mapping[str, bytes]) -> bytes:
    """Digest of a set of nodes by names and keys: a restarted node has a new key."""
    return hashlib.sha256(
        b"".join(name.encode() + b"\n" + key for name, key in sorted(keys.items()))
    ).digest()
