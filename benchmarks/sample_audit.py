"""White-box audit of sums over samples: `python -m benchmarks.sample_audit PAIRS`.

Pairs of runs differ in one sample, the canary. Its gradient is always longer than C in one
run, and counts as nothing in the other. The observer has all other samples, w of each round
and the opened sums. It computes the likelihood ratio of both cases. If μ of the run is the
claimed one, the ratio is Gaussian with means ±μ²/2 and the deviation μ, at most. The
measured μ is the distance of the means over the deviation, with

    standard error = √(2/pairs + μ²/4 pairs).

Two observers are measured: one that sees the sums, and one with the shares of as many
nodes as may collude.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import FixedTau
from fedbudget.budget.spending import PrivateSpending
from fedbudget.budget.step_size import AutoStep
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.noise import SeededNoise
from fedbudget.models import LinearRegression
from fedbudget.protocol.features.sample_privacy import SampleSumAggregator, SampleSums
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.protocol.update import ServerMomentum
from fedbudget.secure.contents import SHARE_BITS, PrivateContents
from fedbudget.secure.graph import needed, sharers

NODES = 8
SHARERS = sharers(needed(NODES, 2 / 3))
SAMPLES = 12  # of each node
FEATURES = 6
ROUNDS = 8
EPSILON = 4.0
_CANARY = 300.0  # its gradient has the largest norm that is reported


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Args:
      claimed: μ that the ledger claims.
      sums: μ measured by the observer of the sums.
      colluding: μ measured by the observer with other nodes' shares.
      pairs: number of pairs of runs.
    """

    claimed: float
    sums: float
    colluding: float
    pairs: int

    def error(self, measured: float) -> float:
        """Standard error of a measured μ."""
        return math.sqrt((2 + measured**2 / 4) / self.pairs)


def audit(pairs: int) -> Audit:
    """Run pairs of runs with secret noise, and measure what the observers can tell."""
    ratios = np.array([[_ratios(present) for present in (0, 1)] for _ in range(pairs)])
    sums, colluding = (_measured(ratios[:, :, observer]) for observer in (0, 1))
    run = _aggregator()
    total = run.ledger.budget.privacy_part(run.ledger.budget.array)
    return Audit(math.sqrt(2 * total), sums, colluding, pairs)


def _measured(ratios: Float64) -> float:
    """Return μ from log-likelihood ratios without and with the canary, [pairs, 2]."""
    without, present = ratios.T
    deviation = math.sqrt((without.var(ddof=1) + present.var(ddof=1)) / 2)
    return float(present.mean() - without.mean()) / deviation


def _ratios(present: int) -> tuple[float, float]:
    """Make one run; return the log-likelihood ratios of both observers.

    Args:
      present: 1 if the canary is in the data, else 0.
    """
    run = _aggregator()
    fleets = _fleet(np.nan), _fleet(_CANARY)
    message: Any = run.start()
    sums = colluding = 0.0
    while isinstance(message, Broadcast):
        contents = PrivateContents.of(message, SHARERS)
        reports = [fleet.answer(message) for fleet in fleets]
        without, whole = (contents.values(report) for report in reports)
        honest = contents.noise(SHARERS)
        others = contents.noise(NODES - SHARERS)
        change = (whole - without).astype(np.float64)
        moved = (honest + present * (whole - without)).astype(np.float64)
        sums += _ratio(moved + others, change, NODES)
        colluding += _ratio(moved, change, SHARERS)

        total = (whole if present else without) + honest + others
        report: Report = reports[0]
        opened = contents.open(
            message, total.view(np.uint64), report.nodes, report.sizes, 0
        )
        message = run.receive(opened.sums, run.ledger.costs)
    return sums, colluding


def _ratio(seen: Float64, change: Float64, shares: int) -> float:
    """Log-likelihood ratio of a Gaussian vector with the mean `change`, and with mean 0."""
    variance = shares * 4.0**SHARE_BITS
    return float(change @ (seen - change / 2)) / variance


def _fleet(canary: float) -> Fleet:
    """All nodes; the first sample is the canary. NaN makes its gradient count as 0."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NODES * SAMPLES, FEATURES)).astype(np.float32)
    x[0] = 0
    x[0, -1] = canary
    table = Table(x, np.ones(len(x), np.float32))
    rows = np.split(np.arange(len(x)), NODES)
    model = LinearRegression(FEATURES)
    return Fleet(model, Shards.of(table, rows), batch=None, seed=0, features=[SampleSums()])


def _aggregator() -> SampleSumAggregator:
    excess = NODES / SHARERS
    rule = PrivateRule(NODES, SeededNoise(0), SampleSums(), 1, excess)
    method = Method(
        FixedTau(1),
        AutoStep(),
        ServerMomentum(),
        spending=PrivateSpending(1),
        private=rule,
        sums_only=True,
    )
    return SampleSumAggregator(
        LinearRegression(FEATURES).initial(0),
        method=method,
        budget=Budget({"time": 1e6, "privacy": EPSILON}, 1e-5),
        expected=Costs(np.array([0.01, 0.0]), np.array([0.01, 0.0])),
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    found = audit(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    print(f"claimed μ {found.claimed:.3f} at ε = {EPSILON:g}, {found.pairs} pairs of runs")
    for name, measured in (("sums", found.sums), ("colluding", found.colluding)):
        print(f"{name}: measured μ {measured:.3f} ± {found.error(measured):.3f}")
