"""FedProx, compared with its publication."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.control import FixedTau
from fedbudget.data.shards import Shards
from fedbudget.models import TorchModel
from fedbudget.protocol.features.feature import Feature, report_layout
from fedbudget.protocol.features.proximal import Proximal
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Report, TrainRound
from support.fleets import one_fleet, single_node_fleets
from support.methods import bits
from support.problems import MODELS, LocalGradient, problem, run_rounds


def round_of(w: Float32, eta: float) -> TrainRound:
    """A round of four updates."""
    return TrainRound(
        round=1, w=w, report=report_layout((), True), tau=4, eta=eta, effective=4
    )


def fedprox(
    nodes: Sequence[LocalGradient], w: Float64, *, steps: int, eta: float, mu: float
) -> Float64:
    """Li et al., Algorithm 2, with gradient descent on F_k(w) + μ/2 ‖w - w_t‖²."""
    ends = []
    for gradient in nodes:
        own = w.copy()
        for _ in range(steps):
            own = own - eta * (gradient(own) + mu * (own - w))
        ends.append(own)
    return np.asarray(np.mean(ends, axis=0))


@pytest.mark.parametrize("name", MODELS)
def test_rounds_follow_published_algorithm(name: str) -> None:
    case = problem(name, 3)
    parts, w = np.split(np.argsort(case.x[:, 0]), 4), case.start(3)
    rounds = run_rounds(
        single_node_fleets(case, parts),
        FixedTau(5),
        eta=0.05,
        rounds=9,
        w=w,
        proximal=0.7,
    )
    expected = [w.astype(np.float64)]
    for _ in range(9):
        expected.append(fedprox(case.local(parts), expected[-1], steps=5, eta=0.05, mu=0.7))
    np.testing.assert_allclose(
        [broadcast.w for broadcast, _, _ in rounds], expected, atol=2e-5
    )


def test_many_updates_reach_proximal_point() -> None:
    """For a quadratic loss, F_i + μ/2 ‖w - w(t₀)‖² has its minimum at (A + μI)⁻¹ (b + μ
    w(t₀)).
    """
    case, mu = problem("linear", 4), 0.3
    w, everything = case.start(4), np.arange(len(case.x))
    rounds = run_rounds(
        single_node_fleets(case, [everything]),
        FixedTau(3000),
        eta=0.1,
        rounds=1,
        w=w,
        proximal=mu,
    )
    _, report, _ = next(iter(rounds))
    a = case.x.T @ case.x / len(case.x) + 0.1 * np.eye(len(w))
    b = case.x.T @ case.y / len(case.x)
    expected = np.linalg.solve(a + mu * np.eye(len(w)), b + mu * w)
    np.testing.assert_allclose(report.vectors["w"][0], expected, atol=1e-5)


@pytest.mark.parametrize("batch", [None, 3])
def test_fleet_matches_single_nodes(batch: int | None) -> None:
    case = problem("softmax", 5)
    parts, w = np.split(np.argsort(case.x[:, 0]), 4), case.start(5)
    features = [Proximal(0.7)]
    together = one_fleet(case, parts, batch, features)
    one_by_one = single_node_fleets(case, parts, batch, features)
    broadcast = round_of(w, eta=0.05)
    merged = Report.merge([fleet.answer(broadcast) for fleet in one_by_one])
    assert bits(together.answer(broadcast)) == bits(merged)


def test_running_statistics_are_not_pulled() -> None:
    """Running statistics follow the samples; a pull would make them lag."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    case = problem("softmax", 6)
    shards = Shards.of(case.table, [np.arange(len(case.x))])
    model = TorchModel(module, target="classes")
    assert model.statistics > 0
    found = []
    features: list[list[Feature]] = [[], [Proximal(1e3)]]
    for each in features:
        fleet = Fleet(model, shards, batch=20, seed=9, features=each)
        report = fleet.answer(round_of(model.initial(0), eta=1e-6))
        found.append(report.vectors["w"][0, -model.statistics :])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
