"""Several mini-batches to judge by: what they say, by a second computation, and when they
are asked for.
"""

from dataclasses import replace

import numpy as np
import pytest

from fedbudget.data.sampling import Sampler
from fedbudget.data.shards import Shards
from fedbudget.protocol.estimates import gather, mini_batches
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Request
from support.problems import MODELS, problem


def test_enough_samples_are_32() -> None:
    assert [mini_batches(batch) for batch in (None, 100, 32, 31, 10, 1)] == [
        1,
        1,
        1,
        2,
        4,
        32,
    ]


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_means_and_the_steepest_mini_batch_counts(name: str) -> None:
    case = problem(name, 5, samples=200)
    parts = [np.arange(0, 80), np.arange(80, 200)]
    shards = Shards.of(case.table, parts)
    indices = Sampler(shards.size, 3, seed=1).round(11)
    w, best, elsewhere = (
        case.start(1),
        case.start(2),
        np.stack([case.start(3), case.start(4)]),
    )
    found = gather(case.model, shards, indices, w, best, elsewhere)
    for node in range(2):
        losses, best_losses, changes, turns = [], [], [], []
        for update in range(11):
            rows = parts[node][indices.of(node, update, len(parts[node]))]
            x, y = case.x[rows], case.y[rows]
            at_w, at_best, there = (
                np.asarray(each, np.float64) for each in (w, best, elsewhere[node])
            )
            losses.append(case.loss(at_w, x, y))
            best_losses.append(case.loss(at_best, x, y))
            changes.append(abs(case.loss(there, x, y) - losses[-1]))
            turns.append(case.gradient(there, x, y) - case.gradient(at_w, x, y))
        assert found.losses[node] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found.best_losses[node] == pytest.approx(np.mean(best_losses), rel=1e-5)
        assert found.loss_change[node] == pytest.approx(np.mean(changes), rel=1e-4)
        np.testing.assert_allclose(
            found.steepest[node], max(turns, key=np.linalg.norm), atol=1e-4
        )


@pytest.mark.parametrize(("batch", "curvature"), [(4, True), (4, False), (40, True)])
def test_a_fleet_reports_them_where_mini_batches_are_small_and_the_step_size_adapts(
    batch: int, curvature: bool
) -> None:
    """With several mini-batches the loss is not that of the first local update."""
    case = problem("svm", 5, samples=200)
    fleet = Fleet(
        case.model,
        Shards.of(case.table, [np.arange(100), np.arange(100, 200)]),
        batch=batch,
        seed=3,
    )
    request = Request(estimate=True, gradient=True, curvature=curvature)
    broadcast = Broadcast(1, case.start(1), 2, 0.1, request, best=False, stop=False)
    fleet.answer(broadcast)
    fleet.receive(replace(broadcast, round=2, w=case.start(2)))
    fleet.update()
    descent, report = fleet._descent, fleet.report()
    assert descent is not None
    several = not np.array_equal(report.losses, descent.losses)
    assert several == (curvature and batch < 32)
    assert report.rho is not None
    assert report.beta is not None
    assert (report.beta > 0).all()
