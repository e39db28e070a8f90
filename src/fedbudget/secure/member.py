"""A node's side of a masked sum (Bonawitz et al., 2017; Bell et al., 2020).

A node has one X25519 key for a run, and a secret in common with each neighbour. The secret
yields, for one attempt at a round only, the pairwise seed of a mask that one of the two
adds and the other subtracts, and the key that encrypts shares. A node sends

    y_i = x_i + own mask + Σ_{j > i} mask_ij - Σ_{j < i} mask_ij      (mod 2^64)

Pairwise masks cancel in the sum. Own masks remain, and so do pairwise masks with nodes
whose vectors never arrived. Neighbours hold Shamir shares of both: of the seed of the own
mask, and of a key to the pairwise seeds. They reveal the first if y_i is in the sum, and
the second if it is not. They never reveal both, which would expose x_i (graph.py).

**Common terms.** The last number of x_i is 1, so the opened sum shows whether all masks
cancelled. Seeds and keys of an attempt are derived from a digest of everything that must be
the same for all nodes (`join`): the task, the broadcast, the state that it builds
on, the ring of members, the threshold, and how noise is divided. Each node computes it from
what it received. With a node that received something else no mask cancels, and the sum
stays closed.

**One list of survivors.** Before a node reveals a share, it receives proofs that at least t
members of its group, with itself, received the same list of survivors. A proof is a keyed
hash under the pairwise secret, which the long-term keys of both nodes authenticate. It
convinces only the node that it is for, as is needed, and takes a hundredth of the time of
a public signature.

Revealed shares concern one attempt: seeds are derived one-way from the common secret, and
that secret is never shared.

A mask is a stream of 64-bit numbers: AES-128 in counter mode, keyed by the seed. A seed
serves one mask only, so the counter can start at 0.

Rules, whatever an aggregator requests:
- An attempt's number exceeds all earlier ones, or it is refused: no seed is used twice.
- A ring has at least as many members as this node requires, and three in any case. Keys of
  all neighbours are trusted, and the threshold is at least that of this node.
- A node confirms one list of survivors in an attempt, with at least t of its group and the
  same fraction of all members.
- A round is opened for one set of survivors, and so are rounds with the same contents and
  other numbers. A second set would reveal the difference.
"""

import hashlib
import hmac
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedbudget.arrays import UInt64
from fedbudget.protocol.messages import PeerError
from fedbudget.secure import shamir
from fedbudget.secure.graph import FEWEST, THRESHOLD, needed, neighbours_at
from fedbudget.secure.identity import Identity, Trust, UntrustedKey, signed_key
from fedbudget.secure.messages import (
    Confirmations,
    Confirmed,
    Group,
    Opened,
    Relay,
    Shares,
    SignedKey,
    Survivors,
)

SEED = 16
"""Bytes of a seed."""
NONCE = bytes(12)
"""Constant, because each key encrypts one message only in each direction."""

_NONCES = {1: NONCE, -1: bytes(11) + b"\1"}  # by `sign_of` the sender
_PROOF = 16
_REMEMBERED = 1000  # rounds whose survivors are remembered
_BATCH = 2**15  # numbers; a mask of this length stays in the processor's cache
_ZEROS = bytes(8 * _BATCH)


class MaskingMember:
    """A node's masking state for a whole run.

    Args:
      run: name of the run; keys are signed for it.
      name: of this node.
      trust: decides which keys are accepted.
      threshold: smallest share of a group that this node accepts as threshold.
      least: smallest number of members in a round.
    """

    def __init__(
        self,
        run: str,
        name: str,
        identity: Identity,
        trust: Trust,
        threshold: float = THRESHOLD,
        least: int = FEWEST,
    ) -> None:
        self.name = name
        self.least = max(least, FEWEST)
        self._run = run
        self._trust = trust
        self._threshold = threshold
        self._key = X25519PrivateKey.generate()
        public = self._key.public_key().public_bytes_raw()
        self.signed_key = signed_key(identity, run, name, public, time.time_ns())
        self._keys: dict[str, SignedKey] = {}
        self._pairs: dict[bytes, _Pair] = {}  # by the other node's public key
        self._last_attempt = -1
        self._attempt: _Attempt | None = None
        # survivors of each opened round, by its number and by its contents
        self._opened: dict[int | bytes, bytes] = {}
        self._oldest = 0  # rounds before this one are forgotten, and stay closed

    def join(self, group: Group, share: float, contents: bytes) -> Shares:
        """Begin an attempt; return shares of this node's secrets for its neighbours.

        Args:
          share: of each group that must stay.
          contents: digest of the task, of the broadcast without the number of its round,
            and of the state that both build on.
        """
        self._check(group, share)
        others = neighbours_at(group.ring, group.ring.index(self.name))
        threshold = needed(len(others) + 1, share)
        for key in group.keys:
            self._trust.admit(self._run, key)
            self._keys[key.name] = key
        if unknown := [name for name in others if name not in self._keys]:
            raise PeerError(f"a group with {unknown[0]}, whose key was never sent")
        self._last_attempt = group.attempt

        common = (share, contents, replace(group, keys=()))
        digest = hashlib.sha256(msgspec.msgpack.encode(common)).digest()
        own_seed = secrets.token_bytes(SEED)
        pairs_key = secrets.token_bytes(shamir.SECRET)
        derived = {name: self._pair(name).derive(digest) for name in others}
        seeds = {name: both[:SEED] for name, both in derived.items()}
        boxes = {name: AESGCM(both[SEED:]) for name, both in derived.items()}
        names = tuple(sorted((self.name, *others)))
        attempt = _Attempt(
            group, share, contents, digest, names, threshold, seeds, boxes, own_seed
        )
        self._attempt = attempt

        of_own = shamir.split(own_seed, len(names), threshold)
        of_pairs = shamir.split(pairs_key, len(names), threshold)
        sealed = {}
        for name, *each in zip(names, of_own, of_pairs, strict=True):
            if name == self.name:
                attempt.held[name] = each[0], each[1]
            else:
                nonce = _NONCES[sign_of(self.name, name)]
                sealed[name] = boxes[name].encrypt(nonce, each[0] + each[1], None)
        sealed_seeds = AESGCM(pairs_key).encrypt(NONCE, b"".join(seeds.values()), None)
        digests = b"".join(map(shamir.digest, (own_seed, *of_own, *of_pairs)))
        return Shares(group.attempt, sealed_seeds, sealed, digests)

    def mask(self, relay: Relay, vector: UInt64) -> UInt64:
        """Return a vector with a 1 at its end, masked; it needs the neighbours' shares."""
        attempt = self._current(relay.attempt)
        if attempt.masked:
            raise PeerError("a second vector to mask in one attempt")
        if not relay.shares.keys() <= attempt.seeds.keys():
            raise PeerError("shares of nodes outside the group")
        if 1 + len(relay.shares) < attempt.threshold:
            raise PeerError(
                f"{1 + len(relay.shares)} of a group take part, {attempt.threshold} needed"
            )
        for name, sealed in relay.shares.items():
            try:
                nonce = _NONCES[sign_of(name, self.name)]
                opened = attempt.boxes[name].decrypt(nonce, sealed, None)
            except InvalidTag:
                raise UntrustedKey(
                    f"{name}'s shares do not fit: {name} did not send them in this "
                    "attempt, or the aggregator sent it another task, model, state or group"
                ) from None
            attempt.held[name] = opened[: shamir.SHARE], opened[shamir.SHARE :]
        attempt.masked = True
        masked = np.append(vector, np.uint64(1))
        add_mask(masked, attempt.own_seed)
        for name in relay.shares:
            add_mask(masked, attempt.seeds[name], sign_of(self.name, name))
        return masked

    def confirm(self, survivors: Survivors) -> Confirmed:
        """Return proofs that this node has received a list of survivors.

        There are none if it has opened the round for other survivors before.
        """
        attempt = self._current(survivors.attempt)
        if attempt.survivors is not None:
            raise PeerError("a second list of survivors in one attempt")
        ring = attempt.group.ring
        if not set(survivors.absent) <= set(range(len(ring))):
            raise PeerError("survivors outside the group")
        gone = {ring[place] for place in survivors.absent}
        present = [name for name in ring if name not in gone]
        names = [name for name in attempt.names if name not in gone]
        if not attempt.masked or self.name in gone or not attempt.held.keys() >= set(names):
            raise PeerError("survivors that did not take part, or without this node")
        if len(names) < attempt.threshold:
            raise PeerError(
                f"{len(names)} of a group are in the sum, {attempt.threshold} needed"
            )
        least = max(needed(len(ring), attempt.share), attempt.group.sharers + 1)
        if len(present) < least:
            raise PeerError(f"{len(present)} members are in the sum, {least} needed")

        keys = [self._keys[name].public for name in names if name != self.name]
        everyone = msgspec.msgpack.encode((sorted(present), keys, self.signed_key.public))
        attempt.everyone = hashlib.sha256(everyone).digest()
        if self._other_set(attempt):
            return Confirmed(survivors.attempt, {})
        attempt.survivors = frozenset(names)
        attempt.list = list_digest(survivors)
        proofs = {
            name: self._pair(name).proof(attempt, self.name)
            for name in names
            if name != self.name
        }
        return Confirmed(survivors.attempt, proofs)

    def open(self, confirmations: Confirmations) -> Opened:
        """Return the shares that open the survivors' sum, if enough members confirm it."""
        attempt = self._current(confirmations.attempt)
        names = attempt.survivors
        if names is None or attempt.opened:
            raise PeerError("a sum is opened once, after its survivors were confirmed")
        proofs = confirmations.proofs
        if not proofs.keys() <= names - {self.name}:
            raise PeerError("confirmations of nodes that are not in the sum")
        for name, proof in proofs.items():
            if not hmac.compare_digest(proof, self._pair(name).proof(attempt, name)):
                raise PeerError(f"{name} has not confirmed these survivors")
        if 1 + len(proofs) < attempt.threshold:
            raise PeerError(
                f"{1 + len(proofs)} of a group confirm the survivors, "
                f"{attempt.threshold} needed"
            )
        attempt.opened = True
        self._remember(attempt)
        own = {}
        pairs = {}
        for name, (of_own, of_pairs) in attempt.held.items():
            if name in names:
                own[name] = of_own
            else:
                pairs[name] = of_pairs
        return Opened(confirmations.attempt, own, pairs)

    def _check(self, group: Group, share: float) -> None:
        count = len(group.ring)
        if group.attempt <= self._last_attempt:
            raise PeerError("a replayed attempt at a round")
        if self.name not in group.ring or len(set(group.ring)) != count:
            raise PeerError("a group without this node, or with a duplicate")
        if count < self.least:
            raise PeerError(f"a group of {count}; this node requires {self.least}")
        if group.sharers >= count:
            raise PeerError(f"noise of {group.sharers} nodes in a group of {count}")
        if share < self._threshold:
            raise PeerError(
                f"a threshold of {share:.3g}; this node requires {self._threshold:.3g}"
            )

    def _current(self, number: int) -> "_Attempt":
        if self._attempt is None or self._attempt.group.attempt != number:
            raise PeerError("an attempt at a round without this node")
        return self._attempt

    def _other_set(self, attempt: "_Attempt") -> bool:
        """Whether the same round was opened for other survivors, or may have been."""
        group = attempt.group
        known = [self._opened.get(key) for key in (group.round, attempt.contents)]
        return group.round < self._oldest or bool(set(known) - {None, attempt.everyone})

    def _remember(self, attempt: "_Attempt") -> None:
        self._opened[attempt.group.round] = attempt.everyone
        self._opened[attempt.contents] = attempt.everyone
        while len(self._opened) > 2 * _REMEMBERED:
            key = next(iter(self._opened))
            del self._opened[key]
            if isinstance(key, int):
                self._oldest = max(self._oldest, key + 1)

    def _pair(self, other: str) -> "_Pair":
        """Keys that only this node and another know."""
        public = self._keys[other].public
        known = self._pairs.get(public)
        if known is None:
            try:
                secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:  # a low-order point: the secret would be the same for all
                raise UntrustedKey(f"{other}'s key is not usable for X25519") from None
            both = sorted([(self.name, self.signed_key.public), (other, public)])
            description = msgspec.msgpack.encode((self._run, both))
            known = self._pairs[public] = _Pair.of(secret, description)
        return known


class _Pair(NamedTuple):
    """Keys of two nodes for a run, by HKDF from their common secret.

    Args:
      key: derives seeds and keys of an attempt.
      proofs: key of proofs.
      description: the run, and names and public keys of both.
    """

    key: bytes
    proofs: bytes
    description: bytes

    @classmethod
    def of(cls, secret: bytes, description: bytes) -> "_Pair":
        key = hmac.digest(bytes(32), secret, "sha256")
        proofs = hmac.digest(key, description + b"survivors\1", "sha256")
        return cls(key, proofs, description)

    def derive(self, digest: bytes) -> bytes:
        """Seed and key of an attempt, from the digest of its common terms."""
        return hmac.digest(self.key, self.description + digest + b"masks\1", "sha256")

    def proof(self, attempt: "_Attempt", sender: str) -> bytes:
        """Proof that the sender has received the survivors of an attempt."""
        text = attempt.digest + attempt.list + sender.encode()
        return hashlib.blake2b(text, digest_size=_PROOF, key=self.proofs).digest()


@dataclass
class _Attempt:
    """One attempt at a round.

    Args:
      share: of each group that must stay.
      contents: see `MaskingMember.join`.
      digest: of everything that is common to its members.
      names: of this node and its neighbours, in the order of share numbers.
      threshold: how many of them must stay.
      seeds: pairwise seeds by neighbour, sorted by name.
      boxes: encrypt and decrypt shares, by neighbour.
      own_seed: of the node's own mask.
      held: shares of own seeds and of keys to pairwise seeds, by their owner.
      survivors: of this group, once this node has confirmed them.
      list: digest of the list of survivors, as confirmed.
      everyone: digest of all survivors; a restarted neighbour has another key.
    """

    group: Group
    share: float
    contents: bytes
    digest: bytes
    names: tuple[str, ...]
    threshold: int
    seeds: Mapping[str, bytes]
    boxes: Mapping[str, AESGCM]
    own_seed: bytes
    held: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    masked: bool = False
    opened: bool = False
    survivors: frozenset[str] | None = None
    list: bytes = b""
    everyone: bytes = b""


def list_digest(survivors: Survivors) -> bytes:
    """Digest of a list of survivors."""
    return shamir.digest(msgspec.msgpack.encode(sorted(survivors.absent)))


def add_mask(vector: UInt64, seed: bytes, sign: int = 1) -> None:
    """Add a seed's mask in place, or subtract it if `sign` is -1.

    >>> vector = np.arange(3, dtype=np.uint64)
    >>> add_mask(vector, bytes(16)), add_mask(vector, bytes(16), -1), vector
    (None, None, array([0, 1, 2], dtype=uint64))
    """
    if len(seed) != SEED or sign not in (1, -1):
        raise ValueError(f"a mask needs a seed of {SEED} bytes and a sign of 1 or -1")
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(8 * min(len(vector), _BATCH) + 15)
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
