"""Noise of private runs, and the durable record of what they paid for it.

**Noise.** Noise that an observer can reproduce hides nothing. If nodes are other machines,
the aggregator therefore draws it from the operating system (`SecretNoise`) and stores it
nowhere. Nodes that protect single samples draw their own (`SecretNodeNoise`). A simulation
must be repeatable, so its noise follows from the seed (`SeededNoise`, `SeededNodeNoise`).
It shows the cost of privacy, and its model is private only towards observers who do not
know the seed.

**Payments.** A run with secret noise appends the ρ of a round to `privacy.jsonl` before
its result leaves the process (`PaymentLog`). If the aggregator is killed and repeats a
round, it has published two results and paid for both. The protocol does no I/O: an
aggregator exposes its `payment`, and the engine records it (`engine.settle`). With secure
aggregation nodes add the noise, and a round is paid for before they open its sum.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Costs
from fedbudget.engines.engine import Pay, no_payment
from fedbudget.errors import UserError, WorkError
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.randomness import Stream, gaussian, generator, random_bytes

PAID = "privacy.jsonl"


@dataclass(frozen=True)
class SeededNoise:
    """Noise of the aggregator that follows from a seed and the round."""

    seed: int

    def draw(self, round_: int, size: int) -> Float64:
        return generator(self.seed, Stream.PRIVACY, round_).standard_normal(size)


@dataclass(frozen=True)
class SecretNoise:
    """Noise of the aggregator from the operating system, by the Box-Muller method."""

    def draw(self, round_: int, size: int) -> Float64:
        return gaussian(os.urandom(random_bytes(size)), size)


@dataclass(frozen=True)
class SeededNodeNoise:
    """Noise of nodes that follows from a seed, the round, the node and the update."""

    seed: int

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        stream = generator(self.seed, Stream.SAMPLE_PRIVACY, round_, node, update)
        return stream.standard_normal(size)


@dataclass(frozen=True)
class SecretNodeNoise:
    """Noise of nodes, derived by SHAKE-256 from a secret that never leaves the process.

    A repeated update has the same noise, and reveals nothing new.
    """

    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        key = self.secret + f"{round_} {node} {update} ".encode() + inputs
        return gaussian(hashlib.shake_256(key).digest(random_bytes(size)), size)


@dataclass(frozen=True)
class PaymentLog:
    """Privacy payments of a run, one line of `privacy.jsonl` each.

    Args:
      folder: folder of the run.
    """

    folder: Path

    def record(self, round_: int, rho: float) -> None:
        """Append a payment, and return only once it is on disk.

        Raises:
          WorkError: the file cannot be written; the result of the round must not be sent.
        """
        path = self.folder / PAID
        line = json.dumps({"round": round_, "rho": rho}) + "\n"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WorkError(f"{path} cannot be written: {error.strerror}") from None


def open_payments(aggregator: Aggregator | None, folder: Path, *, resumed: bool) -> Pay:
    """Open the payment log of a run.

    A resumed run is first charged with all payments after its checkpoint.

    Args:
      aggregator: aggregator of the run, if it has one.
      folder: folder of the run.
      resumed: whether the run is resumed from a checkpoint in that folder.

    Returns:
      The function that records a payment. It records nothing if the run is not private, or
      if its noise follows from a seed.
    """
    rule = None if aggregator is None else aggregator.method.private
    if aggregator is None or rule is None or not isinstance(rule.noise, SecretNoise):
        return no_payment
    ledger = aggregator.ledger
    more = paid_in(folder) - ledger.budget.privacy_part(ledger.spent)
    if resumed and more > 0:
        amount = ledger.budget.privacy_amount(more)
        aggregator.charge(Costs(np.zeros_like(amount), amount))
    return PaymentLog(folder).record


def paid_in(folder: Path) -> float:
    """Return the ρ of all payments of a run; an unfinished line was not a payment."""
    path = folder / PAID
    if not path.is_file():
        return 0.0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return sum(float(json.loads(line)["rho"]) for line in lines if line.endswith("\n"))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
