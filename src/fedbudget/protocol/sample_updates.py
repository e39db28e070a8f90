"""Differential privacy of single samples: what nodes do, so that nothing that leaves them tells of one.

What is protected is one sample of one node: whoever sees all that nodes send, and knows all other samples, can hardly
tell whether it was there or nothing in its place. How many samples a node has is known to all.

A local update is, of a mini-batch or of all samples of a node,

    w ← w - η ((Σ_j clip(g_j) + σ C z) / m + λw)

g_j is the gradient of sample j, cut to the length C, z standard Gaussian, and m the number of samples in it. The sum
has the sensitivity C, so that the update costs the samples in it ρ = 1/2σ², and others nothing.

A round says what it costs, ρ. Within an epoch no sample comes twice, and epochs begin anew with every round: so in τ
updates a sample is used as often as there are epochs in them, k_i, or in all τ where these take whole shards. A node
has σ_i = √(k_i/2ρ), and whichever its size, no sample pays more than ρ. Nodes have different samples: what is the most
for a sample of each is the most for all together.

That is all; nothing is gained here by sampling at random (amplification), because everyone knows the seed of it.

In the first round w stays, and a node tells how long gradients are, as a sum with noise:

    Σ_j max(-8, min(8, log₂ ‖g_j‖)) + 8 σ z        Sensitivity 8, ρ = 1/2σ².
"""

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards
from fedbudget.models import per_sample
from fedbudget.models.base import Descent, Model
from fedbudget.protocol.messages import Broadcast, LocalError, Private, Report
from fedbudget.protocol.privacy import private_report

OCTAVES = 8.0
"""A gradient counts as no longer than 2^8, and no shorter than 2^-8, where lengths are told."""


class NodeNoise(Protocol):
    """Where the noise of nodes comes from."""

    def draw(self, round_: int, node: int, update: int, inputs: bytes, size: int) -> Float64:
        """Standard Gaussian numbers, [size].

        Args:
          inputs: a digest of all that an update follows from besides samples. The same gets the same noise, so that an
            answer which is made again tells nothing new; whatever differs gets other noise, or differences would tell.
        """


@dataclass(frozen=True)
class SampleUpdates:
    """Nodes whose samples are protected.

    Args:
      numbers: of the nodes, [nodes].
      noise: their own; without it they make no update.
    """

    model: Model
    shards: Shards
    numbers: Int64
    noise: NodeNoise | None

    def descend(self, broadcast: Broadcast, indices: BatchIndices) -> Descent:
        """The updates of a round; none where only lengths are asked for. No loss is ever looked at."""
        assert broadcast.private is not None
        nodes = len(self.shards)
        w = np.repeat(broadcast.w[None], nodes, axis=0)
        if not broadcast.private.measures:
            for node in range(nodes):
                w[node] = self._descend_one(broadcast, broadcast.private, indices, node)
        return Descent(w, np.zeros(nodes), np.zeros((nodes, 0), np.float32), np.zeros(nodes))

    def report(self, broadcast: Broadcast, private: Private, w: Float32 | None) -> Report:
        """All that leaves nodes who have come to these w_i, [nodes, parameters]: of any private round."""
        if not private.per_sample:
            return private_report(broadcast, private, self.numbers, w)
        nothing = np.zeros(len(self.shards))
        report = Report(broadcast.round, self.numbers, self.shards.size, nothing, nothing)
        if w is None:
            return report
        if not private.measures:
            return replace(report, w=w)
        sums = [self._sum_of_octaves(broadcast, private, node) for node in range(len(self.shards))]
        return replace(report, length=np.array(sums))

    def _descend_one(self, broadcast: Broadcast, private: Private, indices: BatchIndices, node: int) -> Float32:
        model, rows = self.model, self.shards.rows_of(node)
        size = len(rows)
        sigma = noise_multiplier(private, most_uses(indices, node, size))
        regularization = getattr(model, "regularization", 0.0) if hasattr(model, "sample_gradients") else 0.0
        w: Float32 = broadcast.w
        for update in range(indices.updates):
            positions = positions_of(indices, node, update, size)
            total = per_sample.clipped_sum(model, w, self.shards.table, rows[positions], private.clip)
            total += sigma * private.clip * self._draw(broadcast, private, node, update, (w, positions), w.size)
            step = broadcast.eta * (total / len(positions) + regularization * w.astype(np.float64))
            w = np.asarray(w - step, np.float32)
        return w

    def _sum_of_octaves(self, broadcast: Broadcast, private: Private, node: int) -> float:
        rows = self.shards.rows_of(node)
        lengths = per_sample.lengths(self.model, broadcast.w, self.shards.table, rows)
        noise = self._draw(broadcast, private, node, 0, (broadcast.w,), 1)[0]
        return float(clamped_octaves(lengths).sum() + noise_multiplier(private, 1) * OCTAVES * noise)

    def _draw(
        self,
        broadcast: Broadcast,
        private: Private,
        node: int,
        update: int,
        inputs: tuple[NDArray[np.float32 | np.int32], ...],
        size: int,
    ) -> Float64:
        if self.noise is None:
            raise LocalError("nodes whose samples are protected need noise")
        said = f"{broadcast.tau} {broadcast.eta!r} {private.clip!r} {private.rho!r}"
        digest = hashlib.sha256(said.encode())
        for each in inputs:
            digest.update(np.ascontiguousarray(each).data)
        return self.noise.draw(broadcast.round, int(self.numbers[node]), update, digest.digest(), size)


def noise_multiplier(private: Private, uses: int) -> float:
    """σ of each update of a round, in which no sample is in more than so many of them."""
    return math.sqrt(uses / (2 * private.rho))


def positions_of(indices: BatchIndices, node: int, update: int, size: int) -> NDArray[np.int32]:
    """The samples of an update, each once: one that is to fill a mini-batch a second time is left out."""
    return np.unique(indices.of(node, update, size))


def most_uses(indices: BatchIndices, node: int, size: int) -> int:
    """In how many updates of a round the sample is that is in most."""
    counts = np.zeros(size, np.int64)
    for update in range(indices.updates):
        counts[positions_of(indices, node, update, size)] += 1
    return int(counts.max())


def clamped_octaves(lengths: Float64) -> Float64:
    """Of lengths, as they are told; 0 of a gradient that is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.clip(np.log2(lengths), -OCTAVES, OCTAVES)
    return np.where(np.isfinite(lengths), octaves, 0.0)
