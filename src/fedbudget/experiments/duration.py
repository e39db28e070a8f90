"""How long runs will take, before they are made.

Simulated costs tell how many local updates a budget pays for. One of them, timed here, tells how long they take.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.experiments.cells import made_ready
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.simulate import SimulatedRun
from fedbudget.resources.time import SimulatedTime
from fedbudget.settings import Settings

_KINDS = ("method", "partition", "model", "dataset", "nodes", "batch_size", "budget", "aggregation_factor")
"""The settings that make runs of different lengths, besides τ."""

_ADAPTIVE = 10  # what adaptive τ is taken for
_EVALUATION = 1 / 3  # of a local update: that of w^f, once a round
_SAMPLES = 200  # that an evaluation is timed with


def expected_seconds(cells: Sequence[Settings]) -> float:
    """The seconds of all runs, one after the other; of those with measured costs, their budgets."""
    known: dict[tuple[object, ...], tuple[SimulatedTime, float, float, float]] = {}
    total = 0.0
    for cell in cells:
        kind = tuple(getattr(cell, name) for name in _KINDS)
        if kind not in known:
            with made_ready(cell) as run:
                if not isinstance(run.meters.time, SimulatedTime):
                    return len(cells) * run.budget.limits["time"]
                known[kind] = run.meters.time, run.budget.limits["time"], _update_seconds(run), _evaluation_seconds(run)
        clock, budget, update, evaluation = known[kind]
        tau, more = (cell.tau, 0) if isinstance(cell.tau, int) else (_ADAPTIVE, 1)
        rounds = budget / (tau * clock.profile.step.mean + clock.profile.aggregation.mean)
        total += rounds * (tau + more + _EVALUATION) * update + evaluation
    return total


def _update_seconds(run: SimulatedRun) -> float:
    """Of one local update at all nodes, which take turns; or of all samples in one place."""
    shards = run.shards if run.aggregator is not None else Shards.whole(run.train)
    w, indices = run.model.initial(0)[None], Sampler(shards.size, batch_of(run.settings), 0).round(1)
    return _quickest(lambda: run.model.descend(w, shards, indices, 0.0))


def _evaluation_seconds(run: SimulatedRun) -> float:
    """Of the loss over all samples, which a run ends with."""
    some = Shards.of(run.train, [np.arange(min(_SAMPLES, len(run.train)))])
    w, indices = run.model.initial(0)[None], BatchIndices.whole(1)
    return _quickest(lambda: run.model.losses(w, some, indices)) * len(run.train) / int(some.size[0])


def _quickest(work: Callable[[], object]) -> float:
    """The seconds of the quickest of three; the first compiles, and others may be at work."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
