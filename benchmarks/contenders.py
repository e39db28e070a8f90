"""Three implementations of the same rounds: fedbudget, a numpy loop, and the bare
kernel.

Each is prepared once and returns a function that makes some rounds. Only that function
is timed.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.workload import BATCH, ETA, REGULARIZATION, TAU, dataset, settings
from fedbudget.arrays import Int64
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.prepared import Overrides, PreparedRun
from fedbudget.launch.simulate import simulate
from fedbudget.settings.types import MethodName, Tau

Worker = Callable[[], object]


def ours(
    nodes: int,
    rounds: int,
    *,
    full: bool = False,
    tau: Tau = TAU,
    method: MethodName = "paper",
) -> Callable[[], Worker]:
    """Prepare a run through the public API, with records on disk but without a plot."""

    def ready() -> Worker:
        return written(
            simulate(
                settings(nodes, rounds, full=full, tau=tau, method=method),
                Overrides(dataset=dataset()),
            )
        )

    return ready


def written(plan: PreparedRun) -> Worker:
    """Prepare a planned run with records on disk."""

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            execute(plan, out=Path(folder) / "run", plot=False)

    return work


def numpy_loop(nodes: int, rounds: int, *, full: bool = False) -> Callable[[], Worker]:
    """Prepare the straightforward loop in numpy.

    For every node and step: gather a mini-batch, compute the gradient, step. Then
    average.
    """
    found = dataset()
    x = found.train.x.astype(np.float32) / 255
    labels = found.train.labels
    assert labels is not None
    y = np.where(labels == 1, 1, -1).astype(np.float32)

    def ready() -> Worker:
        rng = np.random.default_rng(0)
        shards = np.array_split(rng.permutation(len(x)), nodes)
        weights = np.array([len(shard) for shard in shards]) / len(x)
        batches = [_batches(shard, len(shard) if full else BATCH, rng) for shard in shards]

        def work() -> None:
            w = np.zeros(x.shape[1], np.float32)
            for _ in range(rounds):
                ends = []
                for mini_batches in batches:
                    own = w.copy()
                    for _ in range(TAU):
                        rows = next(mini_batches)
                        batch, target = x[rows], y[rows]
                        slack = np.maximum(0, 1 - target * (batch @ own))
                        own -= ETA * (
                            REGULARIZATION * own - batch.T @ (target * slack) / len(rows)
                        )
                    ends.append(own)
                w = np.average(ends, axis=0, weights=weights).astype(np.float32)

        return work

    return ready


def _batches(shard: Int64, size: int, rng: np.random.Generator) -> Iterator[Int64]:
    """Yield mini-batches without replacement, epoch after epoch."""
    while True:
        order = rng.permutation(shard)
        for first in range(0, len(order) - size + 1, size):
            yield order[first : first + size]


def bare_kernel(nodes: int, rounds: int, *, full: bool = False) -> Callable[[], Worker]:
    """Prepare the bare kernel with predrawn mini-batches: the upper limit of speed."""

    def ready() -> Worker:
        prepared = simulate(
            settings(nodes, rounds, full=full), Overrides(dataset=dataset())
        )
        model, shards = prepared.model, prepared.shards
        sampler = Sampler(shards.size, batch_of(prepared.settings), prepared.settings.seed)
        drawn: list[BatchIndices] = [sampler.round(TAU) for _ in range(rounds)]
        w = model.initial(0)[None]

        def work() -> None:
            for indices in drawn:
                model.descend(w, shards, indices, ETA)

        return work

    return ready
