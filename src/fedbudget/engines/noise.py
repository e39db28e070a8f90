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

**Secure aggregation of simulated nodes** (`SimulatedSums`) has the integers, the noise and
the payments of masked sums. Masks cancel, so they are left out.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from fedbudget import durable_files
from fedbudget.arrays import Float64, Int64
from fedbudget.budget.budget import Costs
from fedbudget.engines.engine import Pay, no_payment
from fedbudget.errors import UserError, WorkError
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import Broadcast, Private, Report
from fedbudget.protocol.sums import NoisySums, Sums
from fedbudget.randomness import Stream, gaussian, generator, random_bytes
from fedbudget.secure.contents import PrivateContents
from fedbudget.secure.discrete_gaussian import discrete_gaussian

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
        return self._stream(round_, node, update).standard_normal(size)

    def draw_integers(
        self, round_: int, node: int, update: int, inputs: bytes, size: int, bits: int
    ) -> Int64:
        return discrete_gaussian(size, bits, self._stream(round_, node, update).bytes)

    def _stream(self, round_: int, node: int, update: int) -> np.random.Generator:
        return generator(self.seed, Stream.SAMPLE_PRIVACY, round_, node, update)


@dataclass(frozen=True)
class SecretNodeNoise:
    """Noise of nodes, derived by SHAKE-256 from a secret that never leaves the process.

    A repeated update has the same noise, and reveals nothing new.
    """

    secret: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        key = self._key(round_, node, update, inputs)
        return gaussian(hashlib.shake_256(key).digest(random_bytes(size)), size)

    def draw_integers(
        self, round_: int, node: int, update: int, inputs: bytes, size: int, bits: int
    ) -> Int64:
        key = self._key(round_, node, update, inputs)
        blocks = count()

        def random(length: int) -> bytes:
            block = key + next(blocks).to_bytes(8, "big")
            return hashlib.shake_256(block).digest(length)

        return discrete_gaussian(size, bits, random)

    def _key(self, round_: int, node: int, update: int, inputs: bytes) -> bytes:
        return self.secret + f"{round_} {node} {update} ".encode() + inputs


@dataclass
class SimulatedSums:
    """Opens the sum of the reports of simulated nodes, with a share of the noise of each.

    Args:
      sharers: m, the number of shares that have the noise paid for.
      seed: seed of the noise; None for secret noise.

    Attributes:
      pay: writes the payment of a round before its sum is opened.
    """

    sharers: int
    seed: int | None = None
    pay: Pay = no_payment

    def opened(self, report: Report, broadcast: Broadcast) -> Sums | NoisySums:
        """Return the sum over all nodes of a report.

        Raises:
          WorkError: the nodes are too few for the noise.
        """
        assert isinstance(broadcast, Private)
        nodes = len(report.nodes)
        if nodes <= self.sharers:
            raise WorkError(
                f"{nodes} nodes are left, {self.sharers + 1} are needed to open a sum"
            )
        contents = PrivateContents.of(broadcast, self.sharers)
        random = os.urandom
        if self.seed is not None:
            random = generator(self.seed, Stream.NOISE_SHARES, broadcast.round).bytes
        total = contents.values(report) + contents.noise(nodes, random)
        self.pay(broadcast.round, broadcast.rho)
        known = contents.open(
            broadcast, total.view(np.uint64), report.nodes, report.sizes, 0
        )
        return known.sums


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
        line = json.dumps({"round": round_, "rho": rho})
        try:
            durable_files.append_line(path, line.encode())
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
    """Return the ρ of all payments of a run.

    A last line without an end was not a payment: its round was never sent. Any other damage
    is refused.
    """
    path = folder / PAID
    if not path.is_file():
        return 0.0
    *lines, _ = path.read_bytes().split(b"\n")
    try:
        paid = [float(json.loads(line)["rho"]) for line in lines]
        if not all(0 <= rho < math.inf for rho in paid):
            raise ValueError("a payment is not a positive number")
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return sum(paid)
