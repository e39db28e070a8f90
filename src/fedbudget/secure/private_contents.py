"""What is in a masked vector where rounds are private: sums to which every member has added its share of the noise.

    counts    how many updates are no longer than C, or than each octave: h or -h for each node, as whole numbers
    updates   Σ clip(Δ_i), in steps, where w moves

So that noise is never less than what is paid for, each member adds as much as is right if m of them have a part in the
sum, and no sum of m or fewer is ever opened: each knows its own share. A share has s = 2^20 steps as its deviation
(discrete_gaussian.py), m of them have √m s, and what one node can change is made to fit to that: with noise of σ times
the sensitivity this is S = √m s/σ steps, which C stands for, or the counts of one node. Where n > m have a part, there
is n/m times as much noise (its variance).

Rounding is paid for: an update of d numbers is cut to S - √d/2 steps before it is rounded, and so is S at most after
that. h is rounded down. The sum of m shares is no discrete Gaussian itself, but what it costs is more than ρ = S²/2ms²
by less than 10 m d exp(-π² s²) (Kairouz, Liu and Steinke 2021), which is 0 in all digits of any computer.
"""

import math
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64, UInt64
from fedbudget.models.tally import Tally
from fedbudget.protocol.messages import Broadcast, PeerError, Private, Report
from fedbudget.protocol.privacy import NoisySums, counted, multipliers, noise_size
from fedbudget.secure.discrete_gaussian import Randomness, discrete_gaussian
from fedbudget.secure.messages import TallyShape

SHARE_BITS = 20
"""Of the steps that a share's deviation has."""
_SHRINK = 1 - 1e-9  # more than floats of 64 bits can be wrong by


@dataclass(frozen=True)
class PrivateContents:
    """How the summands of one private round are laid out.

    Args:
      parameters: 0 where only lengths are asked for.
      sharers: m, whose noise is as much as is paid for.
    """

    private: Private
    parameters: int
    sharers: int
    places: ClassVar[int] = 0
    tally: ClassVar[TallyShape | None] = None
    tallies: ClassVar[int] = 0

    @classmethod
    def of(cls, broadcast: Broadcast, sharers: int) -> "PrivateContents":
        assert broadcast.private is not None
        parameters = broadcast.w.size if "w" in broadcast.report_fields else 0
        return cls(broadcast.private, parameters, sharers)

    def __post_init__(self) -> None:
        if self.height < 1:
            raise PeerError(f"a round of ρ = {self.private.rho:g} needs more noise than can be added up")

    @property
    def length(self) -> int:
        """Whole numbers."""
        return self._counts + self.parameters

    @property
    def largest(self) -> float:
        """S, the length of an update in steps that C stands for."""
        return self._deviation / multipliers(self.private).updates

    @property
    def height(self) -> int:
        """h, so that the counts of one node have a length of S at most."""
        return int(_SHRINK * self._deviation / multipliers(self.private).counts / math.sqrt(self._counts))

    def encode(self, report: Report, random: Randomness = os.urandom) -> UInt64:
        """What a member's report adds to the sums, with its share of the noise."""
        whole = discrete_gaussian(self.length, SHARE_BITS, random)
        signs = np.rint(2 * counted(report, self.private)).astype(np.int64)
        whole[: self._counts] += self.height * signs.sum(axis=0)
        if self.parameters:
            assert report.w is not None
            for update in report.w:
                whole[self._counts :] += self.rounded(update)
        return whole.view(np.uint64)

    def rounded(self, update: Float32) -> Int64:
        """A clipped update in steps, no longer than S; one that is not finite is 0."""
        room = max(0.0, _SHRINK * self.largest - math.sqrt(len(update)) / 2)
        steps = np.multiply(update, self.largest / self.private.clip, dtype=np.float64)
        length = math.sqrt(float(np.square(steps).sum()))
        if not length < math.inf:
            return np.zeros(len(update), np.int64)
        return np.rint(steps * min(1.0, room / length) if length else steps).astype(np.int64)

    def open(
        self, broadcast: Broadcast, total: UInt64, nodes: Int64, sizes: Int64, scale: int
    ) -> tuple[NoisySums, tuple[Tally, ...]]:
        """What is known of all members together.

        Args:
          nodes: the numbers of their nodes.
        """
        counts, updates = np.split(total.view(np.int64).astype(np.float64), [self._counts])
        known: Float64 | None = updates * (self.private.clip / self.largest) if self.parameters else None
        return NoisySums.of(broadcast.round, nodes, counts / (2 * self.height), known), ()

    @property
    def _counts(self) -> int:
        return noise_size(self.private, 0)

    @property
    def _deviation(self) -> float:
        """Steps, of m shares together."""
        return math.sqrt(self.sharers) * 2.0**SHARE_BITS
