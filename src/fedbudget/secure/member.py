"""Masks: random numbers of 64 bits from a seed, added to a vector or taken away from it, modulo 2^64.

A seed is the key of AES-128 in counter mode, which processors have instructions for. It is used for one mask and never
again, so that the counter may begin with 0.

A node's side of a masked sum (Bonawitz et al., 2017, with neighbours as in SecAgg+, Bell et al., 2020).

A node has one X25519 key for a run, and with each neighbour a secret that no one else can know. From that come, for one
attempt at a round and never again, a seed of the mask that one of the two adds and the other takes away, and the keys
that shares are encrypted with. Its vector is sent as

    y_i = x_i + own mask + Σ_{j > i} mask_ij - Σ_{j < i} mask_ij      (mod 2^64)

so that in a sum all masks with others cancel, but for own ones, and those with nodes whose vectors never came. Of both
there are shares at its neighbours: of the seed of its own mask, and of a key to its seeds with others. Neighbours open
the first where y_i is in the sum, and the second where it is not; never both, which would open x_i. More than half of
a group are needed for either, so that nobody can get both by telling neighbours different things.

What is opened is of one attempt: seeds are derived one way from the secret, which itself is never shared.

Rules here, whatever an aggregator asks for:
- An attempt is larger than all before it, or it is refused: no seed is used twice.
- A group has three members or more, a threshold of more than half of it, and is this node's with keys that it trusts.
- A round is opened for one set of survivors. Another set of the same round would open the difference.
"""

import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedbudget.arrays import UInt64
from fedbudget.protocol.messages import PeerError
from fedbudget.secure import shamir
from fedbudget.secure.graph import FEWEST, needed
from fedbudget.secure.identity import Identity, Trust, UntrustedKey, signed_key
from fedbudget.secure.messages import Group, Opened, Relay, Shares, SignedKey, Survivors

SEED = 16
"""Bytes."""
_AT_ONCE = 2**15  # numbers, so that what is added stays in the processor's cache
_ZEROS = bytes(8 * _AT_ONCE)


def add_mask(vector: UInt64, seed: bytes, sign: int = 1) -> None:
    """Adds the mask of a seed in place, or takes it away.

    >>> vector = np.arange(3, dtype=np.uint64)
    >>> add_mask(vector, bytes(16)), add_mask(vector, bytes(16), -1), vector
    (None, None, array([0, 1, 2], dtype=uint64))
    """
    if len(seed) != SEED or sign not in (1, -1):
        raise ValueError(f"a mask is added or taken away by a seed of {SEED} bytes")
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    room = bytearray(len(_ZEROS) + 15)
    for first in range(0, len(vector), _AT_ONCE):
        part = vector[first : first + _AT_ONCE]
        stream.update_into(memoryview(_ZEROS)[: part.nbytes], room)
        mask = np.frombuffer(room, np.uint64, len(part))
        if sys.byteorder == "big":
            mask = mask.byteswap()
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


_NONCE = bytes(12)  # of keys that encrypt one message each


class MaskingMember:
    """A node, for a whole run.

    Args:
      run: its name, for which keys are signed.
      name: of this node.
      trust: whose keys it believes.
      threshold: the least share of a group that it agrees to.
    """

    def __init__(
        self, run: str, name: str, identity: Identity, trust: Trust, threshold: float = 0.5
    ) -> None:
        self.name = name
        self._run = run
        self._trust = trust
        self._threshold = threshold
        self._key = X25519PrivateKey.generate()
        public = self._key.public_key().public_bytes_raw()
        self.signed_key = signed_key(identity, run, name, public, time.time_ns())
        self._keys: dict[str, SignedKey] = {}
        self._secrets: dict[bytes, bytes] = {}  # by the other's public key
        self._last = -1  # attempt
        self._attempt: _Attempt | None = None
        self._opened: dict[
            int, tuple[bytes, frozenset[str]]
        ] = {}  # the survivors of each round that was opened

    def join(self, group: Group) -> Shares:
        """Begins an attempt: shares of its secrets, for the neighbours."""
        self._check(group)
        for key in group.keys:
            self._trust.admit(self._run, key)
            self._keys[key.name] = key
        others = [name for name in group.names if name != self.name]
        if unknown := [name for name in others if name not in self._keys]:
            raise PeerError(f"a group with {unknown[0]}, whose key was never shown")
        self._last = group.attempt
        self._attempt = attempt = _Attempt(group, self._derive_all("mask", others, group))
        own_seed = secrets.token_bytes(SEED)
        pairs_key = secrets.token_bytes(shamir.SECRET)
        attempt.own_seed = own_seed
        count = len(group.names)
        threshold = group.threshold
        shares = zip(
            group.names,
            shamir.split(own_seed, count, threshold),
            shamir.split(pairs_key, count, threshold),
            strict=True,
        )
        sealed = {}
        for name, of_own, of_pairs in shares:
            if name == self.name:
                attempt.held[name] = of_own, of_pairs
            else:
                box = AESGCM(self._derive("shares", name, group, self.name))
                sealed[name] = box.encrypt(_NONCE, of_own + of_pairs, None)
        seeds = b"".join(attempt.seeds[name] for name in others)
        return Shares(group.attempt, AESGCM(pairs_key).encrypt(_NONCE, seeds, None), sealed)

    def mask(self, relay: Relay, vector: UInt64) -> None:
        """Masks a vector in place, once the neighbours' shares are here."""
        attempt = self._current(relay.attempt)
        group = attempt.group
        if attempt.masked:
            raise PeerError("a vector is masked once in an attempt")
        if not relay.shares.keys() <= attempt.seeds.keys():
            raise PeerError("shares of nodes that are not in the group")
        if 1 + len(relay.shares) < group.threshold:
            raise PeerError(
                f"{len(relay.shares)} neighbours take part, and {group.threshold - 1} are needed"
            )
        for name, sealed in relay.shares.items():
            try:
                box = AESGCM(self._derive("shares", name, group, name))
                opened = box.decrypt(_NONCE, sealed, None)
            except InvalidTag:
                raise UntrustedKey(
                    f"{name}'s shares were not sent by {name}, or not in this attempt"
                ) from None
            attempt.held[name] = opened[: shamir.SHARE], opened[shamir.SHARE :]
        attempt.masked = True
        add_mask(vector, attempt.own_seed)
        for name in relay.shares:
            add_mask(vector, attempt.seeds[name], sign_of(self.name, name))

    def open(self, survivors: Survivors) -> Opened:
        """Shares that open the sum of these; none where it was opened with others before."""
        attempt = self._current(survivors.attempt)
        names = set(survivors.names)
        group = attempt.group
        if not attempt.masked or self.name not in names or not names <= attempt.held.keys():
            raise PeerError("survivors that did not take part, or without this node")
        if len(names) < group.threshold:
            raise PeerError(
                f"{len(names)} of a group are in the sum, and {group.threshold} are needed"
            )
        if attempt.opened:
            raise PeerError("a sum is opened once")
        attempt.opened = True
        everyone = survivors.everyone, frozenset(names)
        if self._opened.setdefault(group.round, everyone) != everyone:
            return Opened(group.attempt, {}, {})
        own = {name: shares[0] for name, shares in attempt.held.items() if name in names}
        pairs = {
            name: shares[1] for name, shares in attempt.held.items() if name not in names
        }
        return Opened(group.attempt, own, pairs)

    def _check(self, group: Group) -> None:
        count = len(group.names)
        if group.attempt <= self._last:
            raise PeerError("an attempt at a round that was made before: it is replayed")
        if self.name not in group.names or len(set(group.names)) != count:
            raise PeerError("a group that this node is not in, or another twice")
        if count < FEWEST:
            raise PeerError(
                f"a group of {count}: with fewer than {FEWEST} a sum tells too much of each"
            )
        if not needed(count, self._threshold) <= group.threshold <= count:
            raise PeerError(
                f"{group.threshold} of a group of {count} could open it, and {needed(count, self._threshold)} is the "
                "least that this node agrees to"
            )

    def _current(self, number: int) -> "_Attempt":
        if self._attempt is None or self._attempt.group.attempt != number:
            raise PeerError("an attempt at a round that this node is not in")
        return self._attempt

    def _derive_all(
        self, purpose: str, others: list[str], group: Group
    ) -> dict[str, bytes]:
        return {name: self._derive(purpose, name, group) for name in others}

    def _derive(self, purpose: str, other: str, group: Group, sender: str = "") -> bytes:
        """A key or a seed of one attempt that this node and another know."""
        public = self._keys[other].public
        if public not in self._secrets:
            try:
                self._secrets[public] = self._key.exchange(
                    X25519PublicKey.from_public_bytes(public)
                )
            except ValueError:  # of a point that gives everyone the same
                raise UntrustedKey(
                    f"{other}'s key is not one to agree on secrets with"
                ) from None
        pair = sorted([(self.name, self.signed_key.public), (other, public)])
        about = msgspec.msgpack.encode(
            (purpose, self._run, group.round, group.attempt, pair, sender)
        )
        return HKDF(SHA256(), SEED, None, about).derive(self._secrets[public])


@dataclass
class _Attempt:
    """At a round.

    Args:
      seeds: with each neighbour.
      own_seed: of the node's own mask.
      held: shares of own seeds, and of keys to seeds with others, by whose they are.
    """

    group: Group
    seeds: Mapping[str, bytes]
    own_seed: bytes = b""
    held: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    masked: bool = False
    opened: bool = False


def sign_of(name: str, other: str) -> int:
    """Whether the first of two adds their mask or takes it away."""
    return 1 if name < other else -1
