"""`python -m benchmarks privacy --audit`: white-box attacks on private runs.

Each attack compares runs in which a target contributes as much as it can with runs in which
it contributes zero. The attacker sees every released value, knows all other data, and uses
the likelihood ratio. For Gaussian noise the strongest attack separates the two by exactly
μ = √(2ρ) standard deviations. An attack that separates them by more refutes the accounting;
one that separates them by much less is weak.

The rounds, the noise, the clipping and the planning are those of a real run: the aggregator
of the protocol with secret noise, real fleets for samples, and real encoded vectors for
secure aggregation. There, colluding nodes know as many shares of the noise as the threshold
tolerates, and only the other shares hide the target.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Lines

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import FixedTau
from fedbudget.budget.spending import PrivateSpending
from fedbudget.budget.step_size import AutoStep, FixedStep
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.noise import SecretNodeNoise, SecretNoise
from fedbudget.models.builtin import LinearRegression
from fedbudget.protocol.features.node_privacy import (
    ALL_OCTAVES,
    NodePrivacy,
    PrivateAggregator,
    clipped,
    counted,
    multipliers,
    noise_size,
    reported_norms,
    with_noise,
)
from fedbudget.protocol.features.sample_privacy import (
    OCTAVES,
    SampleAggregator,
    SamplePrivacy,
)
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    NormReport,
    Private,
    PrivateRound,
    SampleRound,
    UpdateReport,
)
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.protocol.state import Outcome
from fedbudget.protocol.sums import NoisySums
from fedbudget.secure.contents import SHARE_BITS, PrivateContents
from fedbudget.secure.discrete_gaussian import discrete_gaussian
from fedbudget.secure.graph import needed, sharers

DELTA = 1e-5
PAIRS = {"nodes": 800, "nodes, masked": 800, "samples": 300}
_NODES = 10
_PARAMETERS = 4
_THRESHOLD = 2 / 3
_TARGET = np.array([3.0, -40.0, 200.0], np.float32)  # far from all other samples
_SAMPLES = 6


@dataclass(frozen=True)
class Attack:
    """Result of an attack.

    Args:
      measured: μ by which it separates runs with and without the target.
      error: standard error of `measured`.
      claimed: μ of the ledger of the runs.
    """

    measured: float
    error: float
    claimed: float

    @property
    def bounded(self) -> bool:
        """Whether the claim holds within two standard errors."""
        return self.measured <= self.claimed + 2 * self.error


def attack(kind: str, epsilon: float, pairs: int) -> Attack:
    """Attack pairs of runs of a kind of `PAIRS`."""
    one_run: Callable[[float, bool], tuple[float, float]] = {
        "nodes": node_evidence,
        "nodes, masked": masked_evidence,
        "samples": sample_evidence,
    }[kind]
    rows = [[one_run(epsilon, there) for _ in range(pairs)] for there in (True, False)]
    evidence = np.array(rows)[:, :, 0]
    claimed = math.sqrt(2 * np.array(rows)[:, :, 1].max())
    spread = math.sqrt(evidence.var(axis=1, ddof=1).mean())
    measured = float(evidence[0].mean() - evidence[1].mean()) / spread
    error = math.sqrt((2 + measured**2 / 4) / pairs)
    return Attack(measured, error, claimed)


def node_evidence(epsilon: float, there: bool) -> tuple[float, float]:
    """Run with noise of the aggregator; return the log-likelihood ratio and ρ."""
    return _node_run(epsilon, there, _noisy_sums)


def masked_evidence(epsilon: float, there: bool) -> tuple[float, float]:
    """The same with noise of nodes in masked vectors, some of which collude."""
    return _node_run(epsilon, there, _opened_sums)


def _node_run(
    epsilon: float, there: bool, release: Callable[[Broadcast, bool], NoisySums]
) -> tuple[float, float]:
    run = _aggregator(PrivateAggregator, epsilon, NodePrivacy())
    message: Broadcast | Outcome = run.start()
    found = 0.0
    while isinstance(message, Broadcast):
        noisy = release(message, there)
        sigma = multipliers(message)
        # Other nodes send nothing, so the expected sums without the target are 0.
        sensitivity = 0.5 if isinstance(message, PrivateRound) else ALL_OCTAVES
        shift = counted(_report(message), message)[0]
        found += float(noisy.counts @ shift) / (sigma.counts * sensitivity) ** 2
        if isinstance(message, PrivateRound) and noisy.updates is not None:
            found += noisy.updates[0] / message.clip / sigma.updates**2
        message = run.receive(noisy, run.ledger.costs)
    return found, float(run.ledger.spent[1])


def _report(broadcast: Broadcast) -> NormReport:
    """The report of the target: an update that is far too long."""
    updates = np.zeros((1, _PARAMETERS), np.float32)
    updates[0, 0] = 1e6
    common: dict[str, Any] = {
        "round": broadcast.round,
        "nodes": np.arange(1),
        "sizes": np.ones(1, np.int64),
    }
    lengths = {"lengths": reported_norms(updates)}
    if not isinstance(broadcast, PrivateRound):
        return NormReport(**common, numbers=lengths)
    vectors = {"updates": clipped(updates, broadcast.clip)}
    return UpdateReport(**common, numbers=lengths, vectors=vectors)


def _noisy_sums(broadcast: Broadcast, there: bool) -> NoisySums:
    noise = SecretNoise().draw(broadcast.round, noise_size(broadcast))
    report = _report(broadcast)
    noisy = with_noise(report, broadcast, noise)
    counts = noisy.counts
    updates = noisy.updates
    if not there:
        counts = counts - counted(report, broadcast)[0]
        if isinstance(report, UpdateReport) and updates is not None:
            updates = updates - report.updates[0]
    return NoisySums(broadcast.round, _NODES, counts, updates)


def _opened_sums(broadcast: Broadcast, there: bool) -> NoisySums:
    shares = sharers(needed(_NODES, _THRESHOLD))
    contents = PrivateContents.of(broadcast, shares)
    report = _report(broadcast)
    total = contents.encode(report).view(np.int64)
    if not there:
        signs = np.rint(2 * counted(report, broadcast)[0]).astype(np.int64)
        total[: len(signs)] -= contents.height * signs
        if isinstance(report, UpdateReport):
            total[len(signs) :] -= contents.rounded(report.updates[0])
    # Colluding nodes have subtracted their shares, and the values of others are known.
    others = discrete_gaussian(contents.length * (shares - 1), SHARE_BITS)
    total = total + others.reshape(shares - 1, -1).sum(axis=0)
    nodes = np.arange(_NODES)
    sizes = np.ones(_NODES, np.int64)
    opened = contents.open(broadcast, total.view(np.uint64), nodes, sizes, 0)
    assert isinstance(opened.sums, NoisySums)
    return opened.sums


def sample_evidence(epsilon: float, there: bool) -> tuple[float, float]:
    """Run that protects samples; return the log-likelihood ratio and ρ."""
    run = _aggregator(SampleAggregator, epsilon, SamplePrivacy())
    # Gradients of the other samples are not finite, and count as 0.
    x = np.full((_SAMPLES, 3), np.nan, np.float32)
    if there:
        x[2] = _TARGET
    shards = Shards.whole(Table(x, np.full(_SAMPLES, 50.0, np.float32)))
    fleet = Fleet(
        LinearRegression(3),
        shards,
        batch=None,
        seed=0,
        features=[SamplePrivacy()],
        noise=SecretNodeNoise(),
    )
    message: Broadcast | Outcome = run.start()
    found = 0.0
    while isinstance(message, Broadcast):
        assert isinstance(message, Private)
        report = fleet.answer(message)
        variance = 1 / (2 * message.rho)
        if isinstance(message, SampleRound):
            moved = (message.w - report.vectors["w"][0]).astype(np.float64)
            noisy = moved / message.eta * _SAMPLES
            found += float(noisy @ _direction(message.w)) / message.clip / variance
        else:
            found += report.numbers["octaves"][0] / OCTAVES / variance
        message = run.receive(report, run.ledger.costs)
    return found, float(run.ledger.spent[1])


def _direction(w: Float32) -> np.ndarray:
    """Unit vector of the gradient of the target at w."""
    gradient = (_TARGET.astype(np.float64) @ w - 50.0) * _TARGET.astype(np.float64)
    return np.asarray(gradient / np.linalg.norm(gradient))


def _aggregator(
    kind: type[PrivateAggregator], epsilon: float, feature: NodePrivacy | SamplePrivacy
) -> PrivateAggregator:
    per_sample = isinstance(feature, SamplePrivacy)
    nodes = 1 if per_sample else _NODES
    rule = PrivateRule(nodes, SecretNoise(), feature, 1)
    step = AutoStep() if per_sample else FixedStep(0.1)
    return kind(
        np.zeros(3 if per_sample else _PARAMETERS, np.float32),
        method=Method(FixedTau(1), step, spending=PrivateSpending(50), private=rule),
        budget=Budget({"time": 2.0, "privacy": epsilon}, DELTA),
        expected=Costs(np.array([0.01, 0.0]), np.array([0.1, 0.0])),
        rounds=13,
    )


def audit(epsilons: tuple[float, ...], share: float = 1.0) -> bool:
    """Print all attacks; return whether all claims hold.

    Args:
      share: fraction of the pairs of `PAIRS`.
    """
    lines = Lines(title="White-box attacks", title_justify="left", box=None)
    for heading in ("", "ε", "pairs", "measured μ", "± error", "claimed μ", ""):
        lines.add_column(heading, justify="right")
    held = True
    for kind, most in PAIRS.items():
        for epsilon in epsilons:
            pairs = max(2, round(share * most))
            found = attack(kind, epsilon, pairs)
            figures = (found.measured, found.error, found.claimed)
            mark = "" if found.bounded else "!"
            texts = [f"{each:.3f}" for each in figures]
            lines.add_row(kind, f"{epsilon:g}", str(pairs), *texts, mark)
            held = held and found.bounded
    Console(width=100).print(lines)
    return held
