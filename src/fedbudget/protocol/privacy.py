"""Differential privacy of nodes: what a node sends is bounded, and what is made known of all together has noise.

What is protected is a node, with all its samples: whoever sees all that a run makes known, every w of it, can hardly
tell whether a node's updates were in the sums or 0 in their place. How many nodes there are is known to all.

A round makes known, of n nodes:

    Σ clip(Δ_i) + σ C z        Δ_i = w_i(t) - w(t₀), cut to the length C; z standard Gaussian. Sensitivity C, ρ = 1/2σ²
    Σ (b_i - ½) + ½ σ_b z      b_i = 1 where Δ_i is no longer than C. Sensitivity ½, ρ = 1/2σ_b²

All nodes count alike. w goes by the first over n. By the second C follows the length that a quarter of updates stay
below, as Andrew et al. (2021) have it: C ← C exp(-½ (share of b_i - ¼)). It gets a fiftieth of a round's ρ. Nothing is
known of C before the first round, so that this one makes known nothing but how many updates are no longer than each of
2^-8, 2^-7 ... 2^8, with noise and for a twentieth of all ρ: it begins with the quarter of that. w stays as it is.

Nothing else leaves a node: no loss, no ρ̂_i or β̂_i, no test result. So no w is judged, and the last is the result.

Noise is added by the aggregator (`noisy`), who is trusted to. Where sums are all that the aggregator gets to see, each
node adds a share of it instead, in whole numbers (secure/private_contents.py), and sums come with noise (`NoisySums`).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.protocol.messages import Broadcast, LocalError, Private, Report
from fedbudget.protocol.sums import Numbers, Sums, Vectors, add_up

MEASURED = 0.05
"""The share of all ρ that finding the first C takes."""
COUNTED = 0.02
"""The share of a round's ρ that following the lengths takes."""
QUANTILE = 0.25
"""The share of updates that C is to be no shorter than."""
PACE = 0.5
"""How fast C follows: updates become shorter quickly in the first rounds."""

_OCTAVES = np.arange(-8.0, 9.0)
ALL_OCTAVES = math.sqrt(len(_OCTAVES)) / 2
"""What one node can change in the counts of all of them."""
_STEPS = 8  # an octave, that a length is told in
_SHRINK = 1 - 1e-6
"""A clipped update is by so much shorter than C, or rounding to 32 bits could make it longer."""


class Noise(Protocol):
    """Where noise comes from."""

    def draw(self, round_: int, rho: float, size: int) -> Float64:
        """Standard Gaussian numbers, [size], for what a round makes known, and pays ρ for."""


class Multipliers(NamedTuple):
    """Noise, in multiples of the sensitivity, of what a round makes known."""

    updates: float
    counts: float

    @property
    def rho(self) -> float:
        return sum(1 / (2 * sigma**2) for sigma in self if sigma < math.inf)


def multipliers(private: Private) -> Multipliers:
    """Of a round that costs so much."""
    if private.measures:
        return Multipliers(math.inf, math.sqrt(1 / (2 * private.rho)))
    if private.per_sample:  # what nodes have added, to all updates of a round together
        return Multipliers(math.sqrt(1 / (2 * private.rho)), math.inf)
    return Multipliers(
        math.sqrt(1 / (2 * (1 - COUNTED) * private.rho)),
        math.sqrt(1 / (2 * COUNTED * private.rho)),
    )


def clipped(updates: Float32, clip: float) -> Float32:
    """Updates [n, parameters], none of them longer than C; one that is not finite is 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = lengths_of(updates)
        scale = np.minimum(1.0, _SHRINK * clip / np.where(lengths > 0, lengths, 1.0))
        cut = np.asarray(updates * scale[:, None], np.float32)
    known = np.isfinite(lengths)
    return (
        cut
        if known.all()
        else np.where(known[:, None], np.where(known[:, None], cut, 0), np.float32(0))
    )


def lengths_of(updates: Float32) -> Float64:
    """[n]; infinite or NaN where an update is not finite."""
    return np.asarray(np.sqrt(np.square(updates, dtype=np.float64).sum(axis=1)))


def told_lengths(updates: Float32) -> Float64:
    """Lengths as nodes tell them: eighths of octaves, rounded up, [n]; of one that is not finite, the longest."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        steps = np.ceil(_STEPS * np.log2(lengths_of(updates)))
    longest = _STEPS * (_OCTAVES[-1] + 1)
    shortest = _STEPS * (_OCTAVES[0] - 1)
    return np.asarray(np.clip(np.where(np.isnan(steps), longest, steps), shortest, longest))


def private_report(
    broadcast: Broadcast, private: Private, nodes: Int64, w: Float32 | None
) -> Report:
    """All that leaves nodes who have come to these w_i, [n, parameters]; nothing does where they made no updates."""
    ones = np.ones(len(nodes), np.int64)
    nothing = np.zeros(len(nodes))
    report = Report(broadcast.round, nodes, ones, nothing, nothing)
    if w is None:
        return report
    updates = w - broadcast.w
    sent = None if private.measures else clipped(updates, private.clip)
    return replace(report, w=sent, length=told_lengths(updates))


def noisy(sums: Float64, sensitivity: float, sigma: float, noise: Float64) -> Float64:
    """Sums with noise, as the aggregator adds it."""
    return sums + sigma * sensitivity * noise


@dataclass(frozen=True)
class NoisySums:
    """The reports of a round of which only sums are known, with noise in them already.

    Args:
      sums: Σ clip(Δ_i) is their w, where it was asked for.
      counts: Σ (b_i - ½), of C or of each octave.
    """

    sums: Sums
    counts: Float64

    @classmethod
    def of(
        cls, round_: int, nodes: Int64, counts: Float64, updates: Float64 | None
    ) -> "NoisySums":
        nothing = np.zeros((1, len(Numbers._fields)))
        w = None if updates is None else updates[None]
        return cls(
            Sums(
                round_,
                len(nodes),
                (),
                nodes[:1],
                nothing,
                w,
                None,
                slopes=False,
                largest_beta=None,
            ),
            counts,
        )

    def distance_sums(self, vectors: Vectors, mean: object) -> Float64:
        raise LocalError(
            "distances from the mean need every report, and only sums with noise are known"
        )


@dataclass(frozen=True)
class Release:
    """What a round made known.

    Args:
      update: by how much w moves, [parameters]; None where only lengths were looked at.
      clip: the next C.
    """

    update: Float64 | None
    clip: float


def release(report: Report, private: Private, noise: Float64) -> Release:
    """What a round of these reports makes known; updates are clipped again, for a node may not have done it.

    Args:
      noise: [parameters + 1], or one for each octave where only lengths are looked at.
    """
    sigma = multipliers(private)
    total = None
    counts = _total(report, counted(report, private))
    if private.measures:
        counts = noisy(counts, ALL_OCTAVES, sigma.counts, noise)
    else:
        assert report.w is not None
        total = noisy(
            _total(report, clipped(report.w, private.clip)),
            private.clip,
            sigma.updates,
            noise[:-1],
        )
        counts = noisy(counts, 0.5, sigma.counts, noise[-1:])
    return release_sums(NoisySums.of(report.round, report.nodes, counts, total), private)


def release_sums(known: NoisySums, private: Private) -> Release:
    """What a round makes known, from sums that have noise."""
    shares = known.counts / known.sums.nodes + 0.5
    if private.measures:
        return Release(None, first_clip(shares))
    assert known.sums.w is not None
    return Release(
        known.sums.w[0] / known.sums.nodes, next_clip(private.clip, float(shares[0]))
    )


def counted(report: Report, private: Private) -> Float64:
    """b_i - ½ of each node, [n, 1], or of each octave where only lengths are looked at, [n, octaves]."""
    assert report.length is not None
    octaves = _OCTAVES if private.measures else np.array([math.log2(private.clip)])
    return no_longer(report.length, octaves)


def no_longer(lengths: Float64, octaves: Float64) -> Float64:
    """½ where a node's length is no more than each of 2^octave, and -½ where it is, [n, octaves].

    So it is for whatever a node says, and its place in a sum has the length ½, or √17/2 of all octaves.
    """
    return np.where(lengths[:, None] <= _STEPS * octaves, 0.5, -0.5)


def noise_size(private: Private, parameters: int) -> int:
    """How many numbers a round needs."""
    return len(_OCTAVES) if private.measures else parameters + 1


def first_clip(shares: Float64) -> float:
    """The length that a quarter stay below, from how many are no longer than each octave, with noise.

    What has noise may fall where it should rise: the best that rises is found by averaging (isotonic regression).
    """
    rising: list[tuple[float, int]] = []
    for share in shares.tolist():
        rising.append((share, 1))
        while len(rising) > 1 and rising[-2][0] >= rising[-1][0]:
            (one, ones), (two, twos) = rising[-2:]
            rising[-2:] = [((one * ones + two * twos) / (ones + twos), ones + twos)]
    smooth = np.clip(
        np.repeat([share for share, _ in rising], [count for _, count in rising]), 0.0, 1.0
    )
    return math.exp2(np.interp(QUANTILE, smooth, _OCTAVES))


def next_clip(clip: float, share: float) -> float:
    """C, when this share of updates was no longer, with noise; within what it may be at all."""
    coming = clip * math.exp(-PACE * (min(1.0, max(0.0, share)) - QUANTILE))
    shortest, longest = (
        2.0**octave for octave in (_OCTAVES[0].item(), _OCTAVES[-1].item())
    )
    return float(min(longest, max(shortest, coming)))


def _total(report: Report, values: Float32 | Float64) -> Float64:
    """Over nodes, along their tree, each counting once."""
    return np.asarray(add_up(report.nodes, np.ones(len(report.nodes)), values))
