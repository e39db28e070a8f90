"""Where the noise of nodes comes from that protect single samples (protocol/sample_updates.py).

It is a node's own: nobody else can make it, and it is kept nowhere (`SecretNodeNoise`). Only where nodes are simulated,
and a run is to be repeated, it follows from the seed (`SeededNodeNoise`); launch/noise.py says what that is worth.

Where the noise of a private run comes from.

Noise that somebody can make again hides nothing. So it comes from the system's own randomness (`SecretNoise`), whenever
nodes are other machines. It is not kept anywhere, and what was drawn is paid for even where nothing comes of it
(`PaidNoise`): an aggregator that was killed, and makes a round again, has made known two. Where nodes add the noise, a
round is paid for before they are asked to open its sum.

Where single samples are protected, noise is the nodes' own (engines/node_noise.py), and only the account
is kept here.

A simulation is to be repeated, and its noise follows from the seed (`SeededNoise`). It shows what privacy costs. Its
model is private only towards people who do not know the seed.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Costs
from fedbudget.errors import UserError, WorkError
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.privacy import Noise
from fedbudget.randomness import Stream, gaussian, generator, random_bytes


@dataclass(frozen=True)
class SeededNodeNoise:
    """The same for the same seed, round, node and update."""

    seed: int

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        return generator(
            self.seed, Stream.SAMPLE_PRIVACY, round_, node, update
        ).standard_normal(size)


@dataclass(frozen=True)
class SecretNodeNoise:
    """From a secret of the operating system's that never leaves the process, drawn out by SHAKE-256.

    So an update that is made again has the same noise, and tells nothing new.
    """

    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        asked = f"{round_} {node} {update} ".encode()
        return gaussian(
            hashlib.shake_256(self.secret + asked + inputs).digest(random_bytes(size)), size
        )


PAID = "privacy.jsonl"


@dataclass(frozen=True)
class SeededNoise:
    """The same for the same seed and round."""

    seed: int

    def draw(self, round_: int, rho: float, size: int) -> Float64:
        return generator(self.seed, Stream.PRIVACY, round_).standard_normal(size)


@dataclass(frozen=True)
class SecretNoise:
    """From the operating system, by the method of Box and Muller."""

    def draw(self, round_: int, rho: float, size: int) -> Float64:
        return gaussian(os.urandom(random_bytes(size)), size)


@dataclass
class PaidNoise:
    """Noise that is paid for before it is drawn, in a file of the run's folder, once there is one."""

    source: Noise = field(default_factory=SecretNoise)
    path: Path | None = None

    def keep_in(self, folder: Path) -> None:
        self.path = folder / PAID

    def pay(self, round_: int, rho: float) -> None:
        """For what a round makes known, before it does."""
        if self.path is not None:
            line = json.dumps({"round": round_, "rho": rho}) + "\n"
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise WorkError(
                    f"{self.path} cannot be written to: {error.strerror}"
                ) from None

    def draw(self, round_: int, rho: float, size: int) -> Float64:
        self.pay(round_, rho)
        return self.source.draw(round_, rho, size)


def keep_account(aggregator: Aggregator | None, folder: Path, *, resumed: bool) -> None:
    """From now on noise is paid for in a run's folder. A run that goes on pays first for all that was drawn after its
    checkpoint was made.
    """
    rule = None if aggregator is None else aggregator.method.private
    if aggregator is None or rule is None or not isinstance(rule.noise, PaidNoise):
        return
    rule.noise.keep_in(folder)
    ledger = aggregator.ledger
    more = paid_in(folder) - ledger.budget.of_noise(ledger.spent)
    if resumed and more > 0:
        aggregator.charge(Costs(np.zeros_like(ledger.spent), ledger.budget.noise(more)))
    pending = aggregator.pending
    if rule.per_sample and pending is not None and pending.private is not None:
        rule.noise.draw(
            pending.round, pending.private.rho, 0
        )  # nodes are asked as soon as the run begins, or goes on


def paid_in(folder: Path) -> float:
    """ρ of all that was drawn for a run; a line that was not finished was not drawn for."""
    path = folder / PAID
    if not path.is_file():
        return 0.0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return sum(float(json.loads(line)["rho"]) for line in lines if line.endswith("\n"))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
