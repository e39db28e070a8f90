"""Shamir's secret sharing: `threshold` shares restore a secret, fewer reveal nothing.

A secret is the value at 0 of a random polynomial of degree `threshold - 1` over the
integers modulo the prime 2^130 - 5. Share x is the polynomial's value at x = 1, 2, ...

It takes twenty lines here, and no required dependency provides it.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**130 - 5
SECRET = 16
"""Bytes of a secret."""
SHARE = 17
"""Bytes of a share."""
DIGEST = 16
"""Bytes of a digest."""


def split(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """Split a secret into shares 1 to `count`, any `threshold` of which restore it.

    >>> shares = split(b"sixteen letters.", 5, 3)
    >>> combine({5: shares[4], 1: shares[0], 3: shares[2]})
    b'sixteen letters.'
    """
    if len(secret) != SECRET or not 1 <= threshold <= count:
        raise ValueError(
            f"cannot split {len(secret)} bytes into {count} shares, threshold {threshold}"
        )
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return [_value(coefficients, x).to_bytes(SHARE, "big") for x in range(1, count + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Restore a secret.

    Args:
      shares: by share number, exactly `threshold` of them.

    Raises:
      ValueError: they are not shares of one secret.
    """
    numbers = tuple(sorted(shares))
    total = 0
    for number, weight in zip(numbers, _weights(numbers), strict=True):
        total += int.from_bytes(shares[number], "big") * weight
    secret = total % PRIME
    if secret >> (8 * SECRET):
        raise ValueError("these are not shares of one secret")
    return secret.to_bytes(SECRET, "big")


def digest(value: bytes) -> bytes:
    """Digest by which a secret or a share is checked; both are random, and stay hidden."""
    return hashlib.blake2b(value, digest_size=DIGEST).digest()


def _value(coefficients: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = total * x + coefficient  # x is small: one remainder at the end is faster
    return total % PRIME


@lru_cache(maxsize=1000)
def _weights(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Weight of each share in the polynomial's value at 0 (Lagrange interpolation)."""
    weights = []
    for own in numbers:
        above = 1
        below = 1
        for other in numbers:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
