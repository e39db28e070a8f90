"""Shamir's secret sharing: a secret becomes shares, of which so many give it back, and fewer tell nothing at all.

A secret is the value at 0 of a random polynomial of degree `threshold - 1` over the integers modulo 2^130 - 5, a prime;
share x is its value at x = 1, 2 and so on. Written here because it is twenty lines, which no library has that is needed
anyway.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**130 - 5
SECRET = 16
"""Bytes of a secret."""
SHARE = 17
"""Bytes of a share."""


def split(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """Shares 1 to `count` of a secret, any `threshold` of which give it back.

    >>> shares = split(b"sixteen letters.", 5, 3)
    >>> combine({5: shares[4], 1: shares[0], 3: shares[2]})
    b'sixteen letters.'
    """
    if len(secret) != SECRET or not 1 <= threshold <= count:
        raise ValueError(
            f"{len(secret)} bytes cannot be split into {count} shares of which {threshold} are enough"
        )
    coefficients = [
        int.from_bytes(secret, "big"),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    return [_value(coefficients, x).to_bytes(SHARE, "big") for x in range(1, count + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret of shares, by their number; they must be as many as the threshold. Raises ValueError where they are
    not shares of one secret.
    """
    numbers = tuple(sorted(shares))
    values = [int.from_bytes(shares[number], "big") for number in numbers]
    found = (
        sum(value * weight for value, weight in zip(values, _weights(numbers), strict=True))
        % PRIME
    )
    if found >> (8 * SECRET):
        raise ValueError("these are not shares of one secret")
    return found.to_bytes(SECRET, "big")


def _value(coefficients: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % PRIME
    return total


@lru_cache(maxsize=1000)
def _weights(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Of each share in the value at 0 (Lagrange)."""
    found = []
    for own in numbers:
        above = below = 1
        for other in numbers:
            if other != own:
                above, below = above * other % PRIME, below * (other - own) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
