"""A node's side of a masked sum (Bonawitz et al., 2017; Bell et al., 2020).

A node has one X25519 key for a run, and a secret in common with each neighbour. The secret
yields, for one attempt at a round only, the pairwise seed of a mask that one of the two
adds and the other subtracts, and the keys that encrypt shares. A node sends

    y_i = x_i + own mask + Σ_{j > i} mask_ij - Σ_{j < i} mask_ij      (mod 2^64)

Pairwise masks cancel in the sum. Own masks remain, and so do pairwise masks with nodes
whose vectors never arrived. Neighbours hold Shamir shares of both: of the seed of the own
mask, and of a key to the pairwise seeds. They reveal the first if y_i is in the sum, and
the second if it is not. They never reveal both, which would expose x_i. Either needs more
than half of a group, so an aggregator cannot obtain both by sending neighbours different
lists of survivors.

Revealed shares concern one attempt: seeds are derived one-way from the common secret, and
that secret is never shared.

A mask is a stream of 64-bit numbers: AES-128 in counter mode, keyed by the seed. A seed
serves one mask only, so the counter can start at 0.

Rules, whatever an aggregator requests:
- An attempt's number exceeds all earlier ones, or it is refused: no seed is used twice.
- A group has at least three members and a threshold above half, contains this node, and has
  keys that this node trusts.
- A round is opened for one set of survivors. A second set would reveal the difference.
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
"""Bytes of a seed."""
NONCE = bytes(12)
"""Constant, because each key encrypts one message only."""

_BATCH = 2**15  # numbers; a mask of this length stays in the processor's cache
_ZEROS = bytes(8 * _BATCH)


class MaskingMember:
    """A node's masking state for a whole run.

    Args:
      run: name of the run; keys are signed for it.
      name: of this node.
      trust: decides which keys are accepted.
      threshold: smallest share of a group that this node accepts as threshold.
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
        self._secrets: dict[bytes, bytes] = {}  # by the other node's public key
        self._last_attempt = -1
        self._attempt: _Attempt | None = None
        # survivors of each opened round
        self._opened: dict[int, tuple[bytes, frozenset[str]]] = {}

    def join(self, group: Group) -> Shares:
        """Begin an attempt; return shares of this node's secrets for its neighbours."""
        self._check(group)
        for key in group.keys:
            self._trust.admit(self._run, key)
            self._keys[key.name] = key
        others = [name for name in group.names if name != self.name]
        if unknown := [name for name in others if name not in self._keys]:
            raise PeerError(f"a group with {unknown[0]}, whose key was never sent")
        self._last_attempt = group.attempt

        own_seed = secrets.token_bytes(SEED)
        pairs_key = secrets.token_bytes(shamir.SECRET)
        seeds = {name: self._derive("mask", name, group) for name in others}
        attempt = _Attempt(group, seeds, own_seed)
        self._attempt = attempt

        count = len(group.names)
        shares = zip(
            group.names,
            shamir.split(own_seed, count, group.threshold),
            shamir.split(pairs_key, count, group.threshold),
            strict=True,
        )
        sealed = {}
        for name, of_own, of_pairs in shares:
            if name == self.name:
                attempt.held[name] = of_own, of_pairs
            else:
                box = AESGCM(self._derive("shares", name, group, self.name))
                sealed[name] = box.encrypt(NONCE, of_own + of_pairs, None)
        sealed_seeds = AESGCM(pairs_key).encrypt(NONCE, b"".join(seeds.values()), None)
        return Shares(group.attempt, sealed_seeds, sealed)

    def mask(self, relay: Relay, vector: UInt64) -> None:
        """Mask a vector in place, after the neighbours' shares have arrived."""
        attempt = self._current(relay.attempt)
        group = attempt.group
        if attempt.masked:
            raise PeerError("a second vector to mask in one attempt")
        if not relay.shares.keys() <= attempt.seeds.keys():
            raise PeerError("shares of nodes outside the group")
        if 1 + len(relay.shares) < group.threshold:
            raise PeerError(
                f"{1 + len(relay.shares)} of a group take part, {group.threshold} needed"
            )
        for name, sealed in relay.shares.items():
            try:
                box = AESGCM(self._derive("shares", name, group, name))
                opened = box.decrypt(NONCE, sealed, None)
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
        """Return the shares that open the survivors' sum.

        They are empty if this node has opened the round for other survivors before.
        """
        attempt = self._current(survivors.attempt)
        names = set(survivors.names)
        group = attempt.group
        if not attempt.masked or self.name not in names or not names <= attempt.held.keys():
            raise PeerError("survivors that did not take part, or without this node")
        if len(names) < group.threshold:
            raise PeerError(
                f"{len(names)} of a group are in the sum, {group.threshold} needed"
            )
        if attempt.opened:
            raise PeerError("a sum is opened once")
        attempt.opened = True
        everyone = survivors.everyone, frozenset(names)
        if self._opened.setdefault(group.round, everyone) != everyone:
            return Opened(group.attempt, {}, {})
        own = {}
        pairs = {}
        for name, (of_own, of_pairs) in attempt.held.items():
            if name in names:
                own[name] = of_own
            else:
                pairs[name] = of_pairs
        return Opened(group.attempt, own, pairs)

    def _check(self, group: Group) -> None:
        count = len(group.names)
        if group.attempt <= self._last_attempt:
            raise PeerError("a replayed attempt at a round")
        if self.name not in group.names or len(set(group.names)) != count:
            raise PeerError("a group without this node, or with a duplicate")
        if count < FEWEST:
            raise PeerError(
                f"a group of {count}: a sum of fewer than {FEWEST} reveals too much of each"
            )
        least = needed(count, self._threshold)
        if not least <= group.threshold <= count:
            raise PeerError(
                f"a threshold of {group.threshold} in a group of {count}; "
                f"this node requires at least {least}"
            )

    def _current(self, number: int) -> "_Attempt":
        if self._attempt is None or self._attempt.group.attempt != number:
            raise PeerError("an attempt at a round without this node")
        return self._attempt

    def _derive(self, purpose: str, other: str, group: Group, sender: str = "") -> bytes:
        """Derive a key or seed of one attempt that only this node and another know."""
        public = self._keys[other].public
        if public not in self._secrets:
            try:
                self._secrets[public] = self._key.exchange(
                    X25519PublicKey.from_public_bytes(public)
                )
            except ValueError:  # a low-order point: the secret would be the same for all
                raise UntrustedKey(f"{other}'s key is not usable for X25519") from None
        pair = sorted([(self.name, self.signed_key.public), (other, public)])
        info = msgspec.msgpack.encode(
            (purpose, self._run, group.round, group.attempt, pair, sender)
        )
        return HKDF(SHA256(), SEED, None, info).derive(self._secrets[public])


@dataclass
class _Attempt:
    """One attempt at a round.

    Args:
      seeds: pairwise seeds by neighbour, in the order of `group.names`.
      own_seed: of the node's own mask.
      held: shares of own seeds and of keys to pairwise seeds, by their owner.
    """

    group: Group
    seeds: Mapping[str, bytes]
    own_seed: bytes
    held: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    masked: bool = False
    opened: bool = False


def add_mask(vector: UInt64, seed: bytes, sign: int = 1) -> None:
    """Add a seed's mask in place, or subtract it if `sign` is -1.

    >>> vector = np.arange(3, dtype=np.uint64)
    >>> add_mask(vector, bytes(16)), add_mask(vector, bytes(16), -1), vector
    (None, None, array([0, 1, 2], dtype=uint64))
    """
    if len(seed) != SEED or sign not in (1, -1):
        raise ValueError(f"a mask needs a seed of {SEED} bytes and a sign of 1 or -1")
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(len(_ZEROS) + 15)
    operation = np.add if sign > 0 else np.subtract
    for first in range(0, len(vector), _BATCH):
        part = vector[first : first + _BATCH]
        stream.update_into(memoryview(_ZEROS)[: part.nbytes], buffer)
        mask = np.frombuffer(buffer, np.uint64, len(part))
        if sys.byteorder == "big":
            mask = mask.byteswap()
        operation(part, mask, out=part)


def sign_of(name: str, other: str) -> int:
    """1 if the first of two nodes adds their pairwise mask, -1 if it subtracts it."""
    return 1 if name < other else -1
