"""Runs that protect nodes: the privacy budget is kept, and every release is charged."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.budget.budget import Costs
from fedbudget.engines.noise import SeededNoise
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.features.node_privacy import PrivateAggregator
from fedbudget.protocol.features.node_privacy import multipliers
from fedbudget.protocol.state import Phase
from fedbudget.resources.privacy import epsilon_of, rho_of
from support.private import DELTA, aggregator, report, run_to_end


def answers(rng: np.random.Generator, nodes: int, parameters: int):  # type: ignore[no-untyped-def]
    """Reports of the nodes that are present; one node sends an overlong update."""

    def answer(broadcast: Broadcast) -> Report:
        here = np.flatnonzero(rng.random(nodes) < 0.7)
        here = here if len(here) else np.array([0])
        updates = rng.standard_normal((len(here), parameters)).astype(
            np.float32
        ) * np.float32(rng.uniform(0.01, 30))
        made = report(broadcast, updates, here.tolist())
        if made.w is None:
            return made
        overlong = made.w.copy()
        overlong[-1] *= np.float32(1e6)
        return dataclasses.replace(made, w=overlong)

    return answer


def check_run(seed: int) -> str:
    """Check a run with a random budget; return the resource that stopped it."""
    rng = np.random.default_rng([seed, 99])
    nodes, parameters, epsilon = (
        int(rng.integers(2, 200)),
        int(rng.integers(1, 60)),
        float(rng.uniform(0.2, 12)),
    )
    limits = {"time": float(rng.uniform(1, 20)), "privacy": epsilon}
    if rng.random() < 0.5:
        limits["bytes"] = float(rng.uniform(500, 5000))
    payments: list[tuple[int, float]] = []
    run = aggregator(
        limits,
        nodes,
        parameters,
        SeededNoise(seed),
        rounds=int(rng.integers(1, 40)) if rng.random() < 0.3 else None,
    )
    rounds = run_to_end(
        run,
        answers(rng, nodes, parameters),
        lambda number, rho: payments.append((number, rho)),
    )
    releases = [each.private for each in rounds if each.private is not None]
    assert payments == [(i, each.rho) for i, each in enumerate(releases, 1)]
    released_rho = sum(multipliers(each).rho for each in releases)
    spent = run.ledger.budget.totals(run.ledger.spent)
    assert spent["privacy"] == pytest.approx(epsilon_of(released_rho, DELTA), rel=1e-9)
    assert all(spent[name] <= limit * (1 + 1e-12) for name, limit in limits.items())
    assert np.isfinite(run.state.w).all()
    assert run.outcome is not None
    assert run.outcome.w is run.state.w
    return run.outcome.stopped_by


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_keep_their_budget(seed: int) -> None:
    assert check_run(seed) in ("privacy", "time", "bytes", "rounds")


@pytest.mark.slow
def test_many_random_runs_keep_budget() -> None:
    assert {check_run(seed) for seed in range(1000, 1300)} >= {"privacy", "time"}


def zero_updates(broadcast: Broadcast) -> Report:
    return report(broadcast, np.zeros((50, 5), np.float32))


def test_binding_resource_ends_the_run() -> None:
    plenty = {"time": 1e4, "privacy": 0.5, "bytes": 1e6}
    run = aggregator(plenty, 50, 5, rounds=None)
    run_to_end(run, zero_updates)
    assert run.outcome is not None
    assert run.outcome.stopped_by == "privacy"
    short = aggregator({"time": 0.7, "privacy": 8.0}, 50, 5)
    run_to_end(short, zero_updates)
    assert short.outcome is not None
    assert short.outcome.stopped_by == "time"


def test_first_round_only_measures() -> None:
    run = aggregator({"time": 10.0, "privacy": 4.0}, 50, 5)
    first = run.start()
    assert first.private is not None
    assert first.private.measures
    assert first.report_fields == {"length"}
    second = run.receive(zero_updates(first), run.ledger.costs)
    assert isinstance(second, Broadcast)
    assert np.array_equal(second.w, first.w)
    assert second.report_fields == {"length", "w"}


def test_rounds_share_privacy_evenly() -> None:
    run = aggregator({"time": 1e4, "privacy": 4.0}, 50, 5, rounds=11)
    rounds = run_to_end(run, zero_updates)
    shares = [each.private.rho for each in rounds[1:] if each.private is not None]
    assert len(shares) == 10
    assert shares == pytest.approx([0.95 * rho_of(4.0, DELTA) / 10] * 10, rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 11), st.floats(0.0, 1.5))
def test_extra_payments_are_not_respent(after: int, share: float) -> None:
    """As for a resumed run that had made rounds after its checkpoint."""
    run = aggregator({"time": 1e4, "privacy": 4.0}, 50, 5, rounds=12)
    message = run.start()
    for _ in range(after):
        message = run.receive(zero_updates(message), run.ledger.costs)  # type: ignore[assignment]
    left = float(run.ledger.budget.array[1] - run.ledger.spent[1])
    run.charge(Costs(np.zeros(2), np.array([0.0, min(1.0, share) * left])))
    while run.pending is not None:
        run.receive(zero_updates(run.pending), run.ledger.costs)
    assert run.ledger.spent[1] <= run.ledger.budget.array[1] * (1 + 1e-12)
    assert run.state.phase is Phase.DONE


def test_resumed_run_repeats_its_broadcast() -> None:
    run = aggregator({"time": 10.0, "privacy": 4.0}, 50, 5)
    run.receive(zero_updates(run.start()), run.ledger.costs)
    state, budget = run.state, run.ledger.budget
    again = PrivateAggregator.resume(state, method=run.method, budget=budget)
    assert again.pending == run.pending
    assert np.array_equal(again.ledger.spent, run.ledger.spent)


def test_more_privacy_adds_rounds() -> None:
    run = aggregator({"time": 1e4, "privacy": 1.0}, 50, 5)
    made = len(run_to_end(run, zero_updates))
    budget = run.ledger.budget.extended(["privacy=+1"])
    more = PrivateAggregator.resume(run.state, method=run.method, budget=budget, more=True)
    assert more.pending is not None
    assert more.pending.round == made + 1
    assert more.pending.private is not None
    assert more.pending.private.rho <= rho_of(2.0, DELTA) - rho_of(1.0, DELTA) * (1 - 1e-4)


def test_too_small_budget_is_refused() -> None:
    with pytest.raises(UserError, match="too small"):
        aggregator({"time": 0.05, "privacy": 4.0}, 50, 5).start()


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_membership_attack_is_bounded_by_epsilon(epsilon: float) -> None:
    """The strongest attack: all other nodes are known, and the target sends updates of
    maximal length.

    The attacker uses the likelihood ratio of all releases. Over 1000 runs with the node and
    1000 without, no threshold separates them better than (ε, δ) allows, within the sampling
    error. The best threshold is as good as the paid noise predicts.
    """
    runs, nodes, parameters = 1000, 20, 4

    def evidence(seed: int, there: bool) -> float:
        run = aggregator(
            {"time": 1e4, "privacy": epsilon},
            nodes,
            parameters,
            SeededNoise(seed),
            rounds=13,
        )
        updates = np.zeros((nodes, parameters), np.float32)
        updates[0, 0] = 1e6 if there else 0.0
        rounds = run_to_end(run, lambda broadcast: report(broadcast, updates))
        points = [*(each.w for each in rounds), run.state.w]
        total = 0.0
        for broadcast, before, after in zip(rounds, points, points[1:], strict=False):
            private = broadcast.private
            if private is not None and not private.measures:
                moved = nodes * float(after[0] - before[0]) / private.clip
                total += moved / multipliers(private).updates ** 2
        return total

    here = np.array([evidence(seed, True) for seed in range(runs)])
    away = np.array([evidence(seed + runs, False) for seed in range(runs)])
    closest = 0.0
    for threshold in np.quantile(np.concatenate([here, away]), np.linspace(0.01, 0.99, 99)):
        for found, false in (
            (here > threshold, away > threshold),
            (away <= threshold, here <= threshold),
        ):
            rate, wrong = float(found.mean()), float(false.mean())
            allowed = min(1.0, math.exp(epsilon) * wrong + DELTA)
            error = 4 * math.sqrt(
                (rate * (1 - rate) + math.exp(2 * epsilon) * wrong * (1 - wrong)) / runs
            )
            assert rate <= allowed + error + 4 / runs
            closest = max(closest, rate - wrong)
    best = math.erf(
        math.sqrt(0.95 * 0.98 * rho_of(epsilon, DELTA)) / 2
    )  # 2Φ(μ/2) - 1 for the updates' share of ρ
    assert closest == pytest.approx(best, abs=4 / math.sqrt(2 * runs))
