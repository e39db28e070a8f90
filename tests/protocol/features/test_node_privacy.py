"""Runs that protect nodes: clipping and noise, the privacy budget, and its payments."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Costs
from fedbudget.engines.noise import SeededNoise
from fedbudget.errors import UserError
from fedbudget.protocol.features.node_privacy import (
    ALL_OCTAVES,
    NodePrivacy,
    PrivateAggregator,
    Release,
    clipped,
    first_clip,
    multipliers,
    next_clip,
    no_longer,
    noise_size,
    release,
    reported_norms,
    with_noise,
)
from fedbudget.protocol.messages import (
    Broadcast,
    NormRound,
    Private,
    PrivateRound,
    Report,
    UpdateReport,
)
from fedbudget.protocol.state import Phase
from fedbudget.resources.privacy import epsilon_of, rho_of
from support.fleets import one_fleet, sorted_parts
from support.hand_made import with_values
from support.private import DELTA, aggregator, report, run_to_end
from support.problems import problem

ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)
UPDATES = arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 40)), elements=ANY)
CLIPS = st.floats(2.0**-8, 2.0**8)


def private_round(clip: float, rho: float, parameters: int) -> PrivateRound:
    w = np.zeros(parameters, np.float32)
    return PrivateRound(round=1, w=w, tau=1, eta=0.1, clip=clip, rho=rho)


def released(
    updates: Float32, broadcast: Broadcast, noise: Float64, lengths: Float64 | None = None
) -> Release:
    """What is published of updates. A hostile node may send any updates and lengths."""
    n = len(updates)
    report = UpdateReport(
        round=1,
        nodes=np.arange(n),
        sizes=np.ones(n, np.int64),
        numbers={"lengths": reported_norms(updates) if lengths is None else lengths},
        vectors={"updates": updates},
    )
    return release(with_noise(report, broadcast, noise), broadcast)


@settings(deadline=None)
@given(UPDATES, CLIPS)
def test_clipped_updates_are_at_most_c(updates: Float32, clip: float) -> None:
    cut = clipped(updates, clip)
    assert cut.dtype == np.float32
    assert np.isfinite(cut).all()
    assert (np.sqrt(np.square(cut.astype(np.float64)).sum(axis=1)) <= clip).all()


@given(arrays(np.float32, (3, 8), elements=st.floats(-1, 1, width=32)))
def test_short_updates_stay(updates: Float32) -> None:
    assert np.array_equal(clipped(updates, 4.0), updates)


@settings(deadline=None)
@given(UPDATES, CLIPS, st.data())
def test_sensitivity_of_the_sum(updates: Float32, clip: float, data: st.DataObject) -> None:
    """Any values and lengths of one node, compared with zeros in its place; no noise."""
    node = data.draw(st.integers(0, len(updates) - 1))
    lengths = data.draw(
        arrays(
            np.float64,
            len(updates),
            elements=st.floats(allow_nan=True, allow_infinity=True),
        )
    )
    without, nodes = updates.copy(), len(updates)
    without[node] = 0
    broadcast = private_round(clip, 0.1, updates.shape[1])
    nothing = np.zeros(updates.shape[1] + 1)
    one = released(updates, broadcast, nothing, lengths)
    other = released(without, broadcast, nothing, lengths)
    assert one.update is not None
    assert other.update is not None
    assert nodes * np.linalg.norm(one.update - other.update) <= clip * (1 + 1e-12)


@given(arrays(np.float64, 5, elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_sensitivity_of_a_length(lengths: Float64) -> None:
    one, many = (
        no_longer(lengths, np.array([1.5])),
        no_longer(lengths, np.arange(-8.0, 9.0)),
    )
    assert (np.linalg.norm(one, axis=1) == 0.5).all()
    assert (np.linalg.norm(many, axis=1) <= ALL_OCTAVES * (1 + 1e-12)).all()


def test_noise_matches_the_payment() -> None:
    """Σ clip(Δ) has deviation σC, with ρ = 1/2σ² for both parts together."""
    broadcast, nodes = private_round(2.0, 0.05, 50), 10
    sigma = multipliers(broadcast)
    assert sigma.rho == pytest.approx(0.05)
    assert 1 / (2 * sigma.updates**2) + 1 / (2 * sigma.counts**2) == pytest.approx(0.05)
    rng = np.random.default_rng(1)
    still = np.zeros((nodes, 50), np.float32)
    moved = [released(still, broadcast, rng.standard_normal(51)).update for _ in range(400)]
    deviation = np.std(np.array(moved, np.float64)) * nodes
    assert deviation == pytest.approx(sigma.updates * 2.0, rel=0.02)


def test_first_c_is_lower_quartile() -> None:
    rng = np.random.default_rng(3)
    updates = rng.standard_normal((4000, 4)).astype(np.float32)
    updates *= (rng.uniform(1, 16, 4000) / np.linalg.norm(updates, axis=1)).astype(
        np.float32
    )[:, None]
    w = np.zeros(4, np.float32)
    broadcast = NormRound(round=1, w=w, tau=1, eta=0.1, rho=10.0)
    noise = rng.standard_normal(noise_size(broadcast))
    first = released(updates, broadcast, noise)
    assert first.update is None
    assert first.clip == pytest.approx(
        np.quantile(np.linalg.norm(updates, axis=1), 0.25), rel=0.15
    )


def test_first_c_from_noisy_counts() -> None:
    """Noisy counts need not increase."""
    assert 2.0**-8 <= first_clip(np.array([0.9, 0.1] * 8 + [0.2])) <= 2.0**8
    assert first_clip(np.linspace(-3, -1, 17)) == 2.0**8


def test_c_follows_lengths() -> None:
    assert next_clip(1.0, 0.25) == 1.0
    assert next_clip(1.0, 1.0) == pytest.approx(math.exp(-0.375))
    assert next_clip(1.0, 7.0) == next_clip(1.0, 1.0)
    assert next_clip(2.0**8, -1.0) == 2.0**8


@pytest.mark.parametrize("measures", [False, True])
def test_nothing_else_leaves_a_node(measures: bool) -> None:
    """Nodes report clipped updates and rounded lengths, and keep no w_i and no losses."""
    case = problem("svm", 3)
    parts = sorted_parts(case, 3)
    w = case.start(1)
    broadcast: Broadcast = NormRound(round=1, w=w, tau=2, eta=0.1, rho=0.1)
    if not measures:
        broadcast = PrivateRound(round=1, w=w, tau=2, eta=0.1, rho=0.1, clip=0.05)
    fleet = one_fleet(case, parts, features=[NodePrivacy()])
    report = fleet.answer(broadcast)
    assert [*report.numbers] == ["lengths"]
    assert [*report.vectors] == ([] if measures else ["updates"])
    for node, gradient in enumerate(case.local(parts)):
        half = w - 0.1 * gradient(w.astype(np.float64))
        moved = half - 0.1 * gradient(half) - w
        length = float(np.linalg.norm(moved))
        assert length > 0.05
        assert report.numbers["lengths"][node] == math.ceil(8 * math.log2(length))
        if not measures:
            shortened = moved * 0.05 / length
            np.testing.assert_allclose(
                report.vectors["updates"][node], shortened, atol=1e-6
            )
    memory = fleet.memory()
    assert memory.w is memory.losses is memory.best_known is None


def answers(rng: np.random.Generator, nodes: int, parameters: int):  # type: ignore[no-untyped-def]
    """Reports of the nodes that are present; one node sends an overlong update."""

    def answer(broadcast: Broadcast) -> Report:
        here = np.flatnonzero(rng.random(nodes) < 0.7)
        here = here if len(here) else np.array([0])
        updates = rng.standard_normal((len(here), parameters)).astype(
            np.float32
        ) * np.float32(rng.uniform(0.01, 30))
        made = report(broadcast, updates, here.tolist())
        if not isinstance(made, UpdateReport):
            return made
        overlong = made.updates.copy()
        overlong[-1] *= np.float32(1e6)
        return with_values(made, updates=overlong)

    return answer


def rho_paid(broadcast: Broadcast) -> float:
    assert isinstance(broadcast, Private)
    return broadcast.rho


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
    assert payments == [(i, rho_paid(each)) for i, each in enumerate(rounds, 1)]
    released_rho = sum(multipliers(each).rho for each in rounds)
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
    assert isinstance(first, NormRound)
    second = run.receive(zero_updates(first), run.ledger.costs)
    assert isinstance(second, PrivateRound)
    assert np.array_equal(second.w, first.w)


def test_rounds_share_privacy_evenly() -> None:
    run = aggregator({"time": 1e4, "privacy": 4.0}, 50, 5, rounds=11)
    rounds = run_to_end(run, zero_updates)
    shares = [rho_paid(each) for each in rounds[1:]]
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
    added = rho_of(2.0, DELTA) - rho_of(1.0, DELTA) * (1 - 1e-4)
    assert rho_paid(more.pending) <= added


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
            if isinstance(broadcast, PrivateRound):
                moved = nodes * float(after[0] - before[0]) / broadcast.clip
                total += moved / multipliers(broadcast).updates ** 2
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
