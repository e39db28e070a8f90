"""The aggregator's side of one attempt at a masked sum: who takes part, what came, and what opens it.

There is no clock and no message here: whoever carries messages calls `relay` when no more shares are waited for, and
`survivors` when no more vectors are. Phases follow each other; what comes too late, or was not asked for, is refused.
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
from fedbudget.secure.member import SEED, add_mask, sign_of
from fedbudget.secure.messages import Opened, Relay, Shares, Survivors


class SumPhase(IntEnum):
    """What is waited for."""

    SHARES = 0
    VECTORS = 1
    OPENED = 2


class TooFewLeft(Exception):
    """An attempt cannot be brought to its end."""


@dataclass
class MaskedSum:
    """One attempt at a round.

    Args:
      attempt: its number.
      circle: the names of all that take part, in the order in which they stand (graph.py).
      share: of each group, that must stay.
      length: of vectors.
      keys: the public key of each.
      fewest: that a sum is opened of, in all groups together.
    """

    attempt: int
    circle: tuple[str, ...]
    share: float
    length: int
    keys: Mapping[str, bytes]
    fewest: int = 1
    phase: SumPhase = SumPhase.SHARES
    sent: dict[str, Shares] = field(default_factory=dict)  # who has sent shares
    summed: set[str] = field(default_factory=set)  # whose vectors are in the sum
    opened: dict[str, Opened] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.neighbours = neighbours(self.circle)
        self._groups = {
            name: tuple(sorted((name, *others))) for name, others in self.neighbours.items()
        }
        self._lacking: dict[
            str, int
        ] = {}  # of secrets that are needed, by whose, how many shares
        self.total: UInt64 = np.zeros(self.length, np.uint64)

    def group(self, name: str) -> tuple[str, ...]:
        """A node and its neighbours, in the order in which its shares are numbered."""
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
            raise PeerError("shares that were not asked for")
        if shares.shares.keys() != set(expected):
            raise PeerError("shares that are not for all neighbours")
        if len(shares.seeds) != SEED * len(expected) + 16:
            raise PeerError("seeds that are not those with all neighbours")
        self.sent[name] = shares

    def relay(self) -> dict[str, Relay]:
        """What each that has sent shares is told: those of its neighbours. Raises `TooFewLeft`."""
        self._require(self.sent)
        self.phase = SumPhase.VECTORS
        found = {}
        for name in self.sent:
            present = [other for other in self.neighbours[name] if other in self.sent]
            found[name] = Relay(
                self.attempt, {other: self.sent[other].shares[name] for other in present}
            )
        return found

    def receive_vector(self, name: str, vector: UInt64) -> None:
        if (
            self.phase is not SumPhase.VECTORS
            or name not in self.sent
            or name in self.summed
        ):
            raise PeerError("a masked vector that was not asked for")
        if len(vector) != self.length:
            raise PeerError(f"a masked vector of {len(vector)} numbers, not {self.length}")
        self.summed.add(name)
        np.add(self.total, vector, out=self.total)

    def survivors(self) -> dict[str, Survivors]:
        """What each whose vector came is told. Raises `TooFewLeft`."""
        self._require(self.summed)
        self.phase = SumPhase.OPENED
        self._lacking = {name: self.threshold(name) for name in self._needed()}
        everyone = digest({name: self.keys[name] for name in self.summed})
        return {
            name: Survivors(
                self.attempt,
                tuple(n for n in self.group(name) if n in self.summed),
                everyone,
            )
            for name in self.summed
        }

    def receive_opened(self, name: str, opened: Opened) -> None:
        if self.phase is not SumPhase.OPENED or opened.attempt != self.attempt:
            raise PeerError("shares that were not asked for")
        if name not in self.summed or name in self.opened:
            raise PeerError("shares of one that has none to give")
        group = {other for other in self.group(name) if other in self.sent}
        declined = not opened.own and not opened.pairs
        if not declined and (
            opened.own.keys() != group & self.summed
            or opened.pairs.keys() != group - self.summed
        ):
            raise PeerError("shares other than those that were asked for")
        self.opened[name] = opened
        for owner in (*opened.own, *opened.pairs):
            if owner in self._lacking:
                self._lacking[owner] -= 1
                if not self._lacking[owner]:
                    del self._lacking[owner]

    def can_open(self) -> bool:
        """Whether there are shares enough of all secrets that are needed."""
        return self.phase is SumPhase.OPENED and not self._lacking

    def open(self) -> UInt64:
        """The sum of all vectors that came. Raises `TooFewLeft`."""
        if self.phase is not SumPhase.OPENED:
            raise LocalError("a sum is opened after its survivors are told")
        found = self._shares()
        if not self.can_open():
            raise TooFewLeft("too few of a group have stayed to open the sum")
        try:
            for name, shares in found.items():
                secret = shamir.combine(
                    dict(sorted(shares.items())[: self.threshold(name)])
                )
                if name in self.summed:
                    add_mask(self.total, secret, -1)
                else:
                    self._remove_pairs(name, secret)
        except (ValueError, InvalidTag):
            raise TooFewLeft(
                "shares that do not fit together: a node has sent wrong ones"
            ) from None
        return self.total

    def _remove_pairs(self, gone: str, key: bytes) -> None:
        """The masks that survivors have with one whose vector never came."""
        seeds = AESGCM(key).decrypt(bytes(12), self.sent[gone].seeds, None)
        for at, other in enumerate(self.neighbours[gone]):
            if other in self.summed:
                add_mask(
                    self.total, seeds[SEED * at : SEED * (at + 1)], -sign_of(other, gone)
                )

    def _needed(self) -> list[str]:
        """Whose secrets are: own seeds of those that are in the sum, and keys to seeds of those that are not and share
        a mask with one that is.
        """
        gone = [name for name in self.sent if name not in self.summed]
        return [
            *self.summed,
            *(name for name in gone if not self.summed.isdisjoint(self.neighbours[name])),
        ]

    def _shares(self) -> dict[str, dict[int, bytes]]:
        """Of each secret that is needed, by the number of the share."""
        found: dict[str, dict[int, bytes]] = {name: {} for name in self._needed()}
        for name, shares in found.items():
            for number, holder in enumerate(self.group(name), start=1):
                if (opened := self.opened.get(holder)) is not None:
                    share = (opened.own if name in self.summed else opened.pairs).get(name)
                    if share is not None:
                        shares[number] = share
        return found

    def _require(self, present: Collection[str]) -> None:
        """Raises `TooFewLeft` where a group has lost too many, of those whose secrets will be needed."""
        if len(present) < self.fewest:
            raise TooFewLeft(f"{len(present)} are left, and {self.fewest} are needed")
        here = set(present)
        for name in self.sent:
            group = self.group(name)
            if name in here or not here.isdisjoint(group):
                left = len(here.intersection(group))
                if left < self.threshold(name):
                    raise TooFewLeft(
                        f"{left} of {name}'s group are left, and {self.threshold(name)} are needed"
                    )


def digest(keys: Mapping[str, bytes]) -> bytes:
    """Of a set of nodes, by their names and keys: one that came anew is another."""
    return hashlib.sha256(
        b"".join(name.encode() + b"\n" + key for name, key in sorted(keys.items()))
    ).digest()
