"""Where the noise of nodes comes from that protect single samples (protocol/sample_updates.py).

It is a node's own: nobody else can make it, and it is kept nowhere (`SecretNodeNoise`). Only where nodes are simulated,
and a run is to be repeated, it follows from the seed (`SeededNodeNoise`); launch/noise.py says what that is worth.
"""

import hashlib
import os
from dataclasses import dataclass, field

from fedbudget.arrays import Float64
from fedbudget.randomness import Stream, gaussian, generator, random_bytes


@dataclass(frozen=True)
class SeededNodeNoise:
    """The same for the same seed, round, node and update."""

    seed: int

    def draw(self, round_: int, node: int, update: int, inputs: bytes, size: int) -> Float64:
        return generator(self.seed, Stream.SAMPLE_PRIVACY, round_, node, update).standard_normal(size)


@dataclass(frozen=True)
class SecretNodeNoise:
    """From a secret of the operating system's that never leaves the process, drawn out by SHAKE-256.

    So an update that is made again has the same noise, and tells nothing new.
    """

    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    def draw(self, round_: int, node: int, update: int, inputs: bytes, size: int) -> Float64:
        asked = f"{round_} {node} {update} ".encode()
        return gaussian(hashlib.shake_256(self.secret + asked + inputs).digest(random_bytes(size)), size)
