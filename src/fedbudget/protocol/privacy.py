"""Differential privacy of nodes: bounded updates, and noise in the published sums.

A node is protected with all its samples. Even an observer of all published values, i.e. of
every w of a run, can hardly infer whether a node's updates were part of the sums or 0
instead. The number of nodes is public.

A round publishes, for n nodes:

    Σ clip(Δ_i) + σ C z      Δ_i = w_i(t) - w(t₀), clipped to the norm C; z standard
    Gaussian.
                             Sensitivity C, ρ = 1/2σ²
    Σ (b_i - ½) + ½ σ_b z    b_i = 1 if the norm of Δ_i is at most C. Sensitivity ½, ρ =
    1/2σ_b²

All nodes count alike. w moves by the first sum over n. With the second, C follows the
first quartile of the norms (Andrew et al., 2021): C ← C exp(-½ (share of b_i - ¼)). It
receives a fiftieth of a round's ρ. Before the first round C is unknown. The first round
therefore publishes only how many updates have norms of at most 2^-8, 2^-7 ... 2^8, with
noise and for a twentieth of all ρ. C starts at the first quartile of that, and w stays as
it is.

Nothing else leaves a node: no loss, no ρ̂_i or β̂_i, no test result. The aggregator
therefore cannot compare two w, and the last w is the result.

The aggregator adds the noise and is trusted to do so. With secure aggregation it sees only
sums; each node then adds a share of the noise in whole numbers (secure/contents.py), and
sums arrive with noise (`NoisySums`).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.protocol.messages import Broadcast, LocalError, Private, Report
from fedbudget.protocol.sums import Numbers, Sums, Vectors, add_up

MEASURED = 0.05
"""Share of all ρ for the first round, which measures norms."""
COUNTED = 0.02
"""Share of a round's ρ for the count with which C follows the norms."""
QUANTILE = 0.25
"""Quantile of the norms that C follows."""
PACE = 0.5
"""Rate with which C follows; fast, because norms fall quickly in the first rounds."""

_OCTAVES = np.arange(-8.0, 9.0)
ALL_OCTAVES = math.sqrt(len(_OCTAVES)) / 2
"""Sensitivity of the counts of all octaves."""
_STEPS = 8  # reported norms per octave
_SHRINK = 1 - 1e-6
"""A clipped update is shorter than C by this factor, because rounding to 32 bits could
lengthen it."""


class Payment(NamedTuple):
    """Privacy cost of a round, to be recorded durably before its result leaves the
    process.

    Args:
      round: number of the round.
      rho: its ρ.
    """

    round: int
    rho: float


class Noise(Protocol):
    """Source of noise at the aggregator."""

    def draw(self, round_: int, size: int) -> Float64:
        """Return standard Gaussian numbers for the result of a round, [size]."""


class Multipliers(NamedTuple):
    """Noise of a round, in multiples of the sensitivity."""

    updates: float
    counts: float

    @property
    def rho(self) -> float:
        return sum(1 / (2 * sigma**2) for sigma in self if sigma < math.inf)


def multipliers(private: Private) -> Multipliers:
    """Return the noise multipliers of a round from its ρ."""
    if private.measures:
        return Multipliers(math.inf, math.sqrt(1 / (2 * private.rho)))
    if private.per_sample:  # noise added by the nodes, for all updates of a round together
        return Multipliers(math.sqrt(1 / (2 * private.rho)), math.inf)
    return Multipliers(
        math.sqrt(1 / (2 * (1 - COUNTED) * private.rho)),
        math.sqrt(1 / (2 * COUNTED * private.rho)),
    )


def private_report(
    broadcast: Broadcast, private: Private, nodes: Int64, w: Float32 | None
) -> Report:
    """Return the report of a private round; empty if the nodes made no updates.

    Args:
      broadcast: the broadcast of the round.
      private: its privacy settings.
      nodes: numbers of the nodes, [n].
      w: their w_i, [n, parameters]; None if they made no updates.
    """
    ones = np.ones(len(nodes), np.int64)
    zeros = np.zeros(len(nodes))
    report = Report(broadcast.round, nodes, ones, zeros, zeros)
    if w is None:
        return report
    updates = w - broadcast.w
    sent = None if private.measures else clipped(updates, private.clip)
    return replace(report, w=sent, length=reported_norms(updates))


def clipped(updates: Float32, clip: float) -> Float32:
    """Clip updates [n, parameters] to the norm C; an update that is not finite becomes
    0."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = update_norms(updates)
        scale = np.minimum(1.0, _SHRINK * clip / np.where(lengths > 0, lengths, 1.0))
        short = np.asarray(updates * scale[:, None], np.float32)
    known = np.isfinite(lengths)
    return short if known.all() else np.where(known[:, None], short, np.float32(0))


def update_norms(updates: Float32) -> Float64:
    """Norms of updates, [n]; infinite or NaN if an update is not finite."""
    return np.asarray(np.sqrt(np.square(updates, dtype=np.float64).sum(axis=1)))


def reported_norms(updates: Float32) -> Float64:
    """Norms as nodes report them, in eighths of octaves, rounded up, [n].

    An update that is not finite has the largest norm.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        steps = np.ceil(_STEPS * np.log2(update_norms(updates)))
    longest = _STEPS * (_OCTAVES[-1] + 1)
    shortest = _STEPS * (_OCTAVES[0] - 1)
    return np.asarray(np.clip(np.where(np.isnan(steps), longest, steps), shortest, longest))


@dataclass(frozen=True)
class NoisySums:
    """Sums of a private round that already contain noise.

    Args:
      sums: their w is Σ clip(Δ_i), if requested.
      counts: Σ (b_i - ½), for C or for each octave.
    """

    sums: Sums
    counts: Float64

    @classmethod
    def of(
        cls, round_: int, nodes: Int64, counts: Float64, updates: Float64 | None
    ) -> "NoisySums":
        sums = Sums(
            round_,
            len(nodes),
            (),
            nodes[:1],
            np.zeros((1, len(Numbers._fields))),
            None if updates is None else updates[None],
            None,
            slopes=False,
            largest_beta=None,
        )
        return cls(sums, counts)

    def distance_sums(self, vectors: Vectors, mean: object) -> Float64:
        raise LocalError("distances from the mean need every report, not noisy sums")


@dataclass(frozen=True)
class Release:
    """Published result of a round.

    Args:
      update: step of w, [parameters]; None if the round only measured norms.
      clip: the next C.
    """

    update: Float64 | None
    clip: float


def release(report: Report, private: Private, noise: Float64) -> Release:
    """Compute the published result of a round from its reports.

    Updates are clipped again, because a node may not have done it.

    Args:
      report: the report of all nodes.
      private: privacy settings of the round.
      noise: standard Gaussian numbers, [`noise_size`].
    """
    sigma = multipliers(private)
    counts = _total(report, counted(report, private))
    total = None
    if private.measures:
        counts = counts + sigma.counts * ALL_OCTAVES * noise
    else:
        assert report.w is not None
        updates = _total(report, clipped(report.w, private.clip))
        total = updates + sigma.updates * private.clip * noise[:-1]
        counts = counts + sigma.counts * 0.5 * noise[-1:]
    return release_sums(NoisySums.of(report.round, report.nodes, counts, total), private)


def release_sums(noisy: NoisySums, private: Private) -> Release:
    """Compute the published result of a round from sums that contain noise."""
    nodes = noisy.sums.nodes
    shares = noisy.counts / nodes + 0.5
    if private.measures:
        return Release(None, first_clip(shares))
    assert noisy.sums.w is not None
    return Release(noisy.sums.w[0] / nodes, next_clip(private.clip, float(shares[0])))


def counted(report: Report, private: Private) -> Float64:
    """b_i - ½ of each node, [n, 1]; for each octave if the round measures norms, [n,
    octaves]."""
    assert report.length is not None
    octaves = _OCTAVES if private.measures else np.array([math.log2(private.clip)])
    return no_longer(report.length, octaves)


def no_longer(lengths: Float64, octaves: Float64) -> Float64:
    """½ if a node's norm is at most 2^octave, else -½, [n, octaves].

    This holds for any reported value, so a node's share in a sum has the norm ½, or √17/2
    for all octaves.
    """
    return np.where(lengths[:, None] <= _STEPS * octaves, 0.5, -0.5)


def noise_size(private: Private, parameters: int) -> int:
    """Return how many noise numbers a round needs."""
    return len(_OCTAVES) if private.measures else parameters + 1


def first_clip(shares: Float64) -> float:
    """Return the first quartile of norms, from the noisy shares of norms within each
    octave.

    Noisy shares may fall although they should rise. Isotonic regression by averaging
    yields the nearest rising sequence.
    """
    rising: list[tuple[float, int]] = []
    for share in shares.tolist():
        rising.append((share, 1))
        while len(rising) > 1 and rising[-2][0] >= rising[-1][0]:
            (one, ones), (two, twos) = rising[-2:]
            rising[-2:] = [((one * ones + two * twos) / (ones + twos), ones + twos)]
    levels = [level for level, _ in rising]
    counts = [count for _, count in rising]
    smooth = np.clip(np.repeat(levels, counts), 0.0, 1.0)
    return math.exp2(np.interp(QUANTILE, smooth, _OCTAVES))


def next_clip(clip: float, share: float) -> float:
    """Return the next C, from the noisy share of updates within C."""
    coming = clip * math.exp(-PACE * (min(1.0, max(0.0, share)) - QUANTILE))
    shortest = 2.0 ** _OCTAVES[0].item()
    longest = 2.0 ** _OCTAVES[-1].item()
    return float(min(longest, max(shortest, coming)))


def _total(report: Report, values: Float32 | Float64) -> Float64:
    """Sum over nodes along their tree; each node counts once."""
    return np.asarray(add_up(report.nodes, np.ones(len(report.nodes)), values))
