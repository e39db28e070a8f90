"""Algorithm 3, local updates of fleets, and forks."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Int64
from fedbudget.budget.control import AdaptiveTau, Estimates, FixedTau, Reason
from fedbudget.data.sampling import Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.models import FunctionModel, LinearRegression
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.feature import Feature, report_layout
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    FinalRound,
    LocalError,
    LossReport,
    PeerError,
    Report,
    TrainReport,
    TrainRound,
)
from support import networked
from support.methods import METHODS, bits, nodes
from support.problems import (
    CHEAP,
    MODELS,
    Problem,
    algorithm_1,
    problem,
    run_rounds,
    svm_gradient,
    svm_loss,
    unequal_parts,
)

ESTIMATES: tuple[Feature, ...] = (EstimateSlopes(gradient=True),)


def make_broadcast(
    w: Float32,
    *,
    round: int = 1,
    tau: int = 2,
    features: Sequence[Feature] = ESTIMATES,
    best: bool = False,
) -> TrainRound:
    return TrainRound(
        round=round,
        w=w,
        report=report_layout(tuple(features), round == 1),
        tau=tau,
        eta=0.1,
        effective=tau,
        best=best,
    )


def fleet(
    case: Problem,
    parts: Sequence[Int64],
    *,
    batch: int | None = None,
    numbers: Sequence[int] | None = None,
    features: Sequence[Feature] = (),
) -> Fleet:
    return Fleet(
        case.model,
        Shards.of(case.table, parts),
        batch=batch,
        seed=9,
        features=features,
        numbers=numbers,
    )


def trained(nodes: Fleet, broadcast: Broadcast) -> TrainReport:
    report = nodes.answer(broadcast)
    assert isinstance(report, TrainReport)
    return report


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**4))
def test_tau_one_is_centralized_descent(name: str, seed: int) -> None:
    """Proposition 3 of the paper."""
    case = problem(name, 3)
    nodes = fleet(case, unequal_parts(len(case.table), 4, seed))
    w = case.start(3).astype(np.float64)
    broadcast = [
        broadcast.w
        for broadcast, _, _ in run_rounds(
            [nodes], FixedTau(1), eta=0.2, rounds=12, w=case.start(3)
        )
    ]
    assert len(broadcast) == 13
    for broadcast_w in broadcast:
        np.testing.assert_allclose(broadcast_w, w, atol=1e-5)
        w = w - 0.2 * case.gradient(w, case.x, case.y)


@pytest.mark.parametrize("name", ["linear", "svm"])
@pytest.mark.parametrize("tau", [2, 5])
def test_rounds_follow_algorithm_1(name: str, tau: int) -> None:
    case = problem(name, 6)
    parts = unequal_parts(len(case.table), 3, 6)
    sizes, start = [len(part) for part in parts], case.start(6)
    path = algorithm_1(
        case.local(parts), sizes, start.astype(np.float64), tau=tau, rounds=6, eta=0.2
    )
    broadcast = [
        broadcast.w
        for broadcast, _, _ in run_rounds(
            [fleet(case, parts)], FixedTau(tau), eta=0.2, rounds=6, w=start
        )
    ]
    np.testing.assert_allclose(np.array(broadcast), path.aggregated, atol=1e-5)
    # Between aggregations, w(x) is the end of one round of x updates.
    for x in range(1, tau + 1):
        *_, last = run_rounds([fleet(case, parts)], FixedTau(x), eta=0.2, rounds=1, w=start)
        np.testing.assert_allclose(last[0].w, path.w[x], atol=1e-5)


@pytest.mark.parametrize("batch", [None, 5])
def test_identical_shards_reach_largest_tau(
    batch: int | None,
) -> None:
    """Estimates of ρ, β and δ are 0, and τ grows to `tau_max`."""
    case = problem("svm", 4)
    everything = np.arange(len(case.table))
    nodes = fleet(case, [everything] * 5, batch=batch)
    records = []
    for _, report, aggregator in run_rounds(
        [nodes], AdaptiveTau(tau_max=60), eta=0.1, rounds=6, w=case.start(4)
    ):
        assert aggregator.last is not None
        records.append(aggregator.last)
        if "rho" in report.numbers:
            assert not report.numbers["rho"].any()
            assert not report.numbers["beta"].any()
    assert [record.tau for record in records] == [1, 1, 10, 60, 60, 60, 0]
    assert all(record.estimates == Estimates(0.0, 0.0, 0.0) for record in records[1:])
    assert all(record.reason is Reason.SEARCH_LIMIT for record in records[2:-1])


@pytest.mark.parametrize("batch", [None, 7])
@pytest.mark.parametrize("name", MODELS)
def test_fleet_matches_single_nodes(name: str, batch: int | None) -> None:
    case = problem(name, 12, samples=900, features=30)
    parts = [
        np.arange(0, 7),
        np.arange(7, 200),
        np.arange(200, 500),
        np.arange(500, 700),
        np.arange(700, 900),
    ]
    together = fleet(case, parts, batch=batch)
    alone = [
        fleet(case, [part], batch=batch, numbers=[number])
        for number, part in enumerate(parts)
    ]
    controller = AdaptiveTau(phi=0.01, tau_max=12)
    compared = 0
    for whole, single in zip(
        run_rounds([together], controller, eta=0.05, rounds=6, w=case.start(1)),
        run_rounds(alone[::-1], controller, eta=0.05, rounds=6, w=case.start(1)),
        strict=True,
    ):
        assert bits(whole[1]) == bits(single[1])
        assert bits(whole[0]) == bits(single[0])
        compared += "gradients" in whole[1].vectors
    assert compared == 5


@pytest.mark.parametrize("batch", [None, 6])
def test_function_model_matches_kernel(batch: int | None) -> None:
    case = problem("svm", 2)

    def in_numpy(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        exact = (w.astype(np.float64), x.astype(np.float64), y.astype(np.float64))
        return svm_loss(*exact, 0.1), svm_gradient(*exact, 0.1).astype(np.float32)

    parts = (
        unequal_parts(60, 3, 1)
        if batch is None
        else [np.arange(0, 10), np.arange(10, 30), np.arange(30, 60)]
    )
    custom = FunctionModel(in_numpy, initial=case.start(2))
    loop = Fleet(custom, Shards.of(case.table, parts), batch=batch, seed=9)
    for (_, mine, _), (_, its, _) in zip(
        run_rounds(
            [fleet(case, parts, batch=batch)],
            FixedTau(3),
            eta=0.2,
            rounds=5,
            w=case.start(2),
        ),
        run_rounds([loop], FixedTau(3), eta=0.2, rounds=5, w=case.start(2)),
        strict=True,
    ):
        losses = its.numbers["losses"]
        np.testing.assert_allclose(mine.numbers["losses"], losses, rtol=1e-5)
        if isinstance(mine, TrainReport) and isinstance(its, TrainReport):
            np.testing.assert_allclose(mine.w, its.w, atol=1e-5)


@pytest.mark.parametrize("batch", [None, 8])
def test_estimates_follow_algorithm_3(batch: int | None) -> None:
    case = problem("linear", 5)
    parts = [np.arange(0, 15), np.arange(15, 60)]
    nodes = fleet(case, parts, batch=batch, features=ESTIMATES)
    first = trained(nodes, make_broadcast(case.start(5), tau=3))
    assert [*first.numbers, *first.vectors] == ["losses", "best_losses", "w"]
    w = case.start(6)
    second = trained(nodes, make_broadcast(w, round=2, tau=4))
    sampler = Sampler(np.array([15, 45]), batch, seed=9)
    indices = [sampler.round(3), sampler.round(4)][1]
    for i, part in enumerate(parts):
        rows = part[indices.of(i, 0, len(part))]
        x, y = case.x[rows], case.y[rows]
        here, there = w.astype(np.float64), first.w[i].astype(np.float64)
        distance = np.linalg.norm(there - here)
        rise = abs(case.loss(there, x, y) - case.loss(here, x, y))
        turn = np.linalg.norm(case.gradient(there, x, y) - case.gradient(here, x, y))
        assert second.losses[i] == pytest.approx(case.loss(here, x, y), rel=1e-5)
        assert second.numbers["rho"][i] == pytest.approx(rise / distance, rel=1e-4)
        assert second.numbers["beta"][i] == pytest.approx(turn / distance, rel=1e-4)
        np.testing.assert_allclose(
            second.vectors["gradients"][i], case.gradient(here, x, y), atol=1e-5
        )


def test_reports_without_features() -> None:
    case = problem("svm", 5)
    nodes = fleet(case, [np.arange(0, 15), np.arange(15, 60)])
    for round in (1, 2):
        report = nodes.answer(make_broadcast(case.start(round), round=round, features=()))
        assert [*report.numbers, *report.vectors] == ["losses", "best_losses", "w"]


def test_unknown_names_are_refused() -> None:
    """The features of a fleet and of the aggregator must agree."""
    case = problem("svm", 5)
    nodes = fleet(case, [np.arange(60)])
    nodes.answer(make_broadcast(case.start(1)))
    with pytest.raises(PeerError, match="this node cannot report rho, beta"):
        nodes.answer(make_broadcast(case.start(2), round=2, features=[EstimateSlopes()]))


def test_best_w_on_current_mini_batch() -> None:
    case = problem("svm", 5)
    nodes = fleet(case, [np.arange(60)], batch=8, features=ESTIMATES)
    sampler = Sampler(np.array([60]), 8, seed=9)
    w = [case.start(seed) for seed in range(4)]
    best = [0, 0, 1, 1]  # in round 3, the w of round 2 is the best w
    for number, tau in enumerate([3, 2, 2, 0]):
        broadcast: Broadcast = FinalRound(round=4, w=w[number])
        if tau:
            newly = number == 2
            broadcast = make_broadcast(w[number], round=number + 1, tau=tau, best=newly)
        report = nodes.answer(broadcast)
        assert isinstance(report, LossReport)
        rows = sampler.round(tau).of(0, 0, 60)
        exact = case.loss(w[best[number]].astype(np.float64), case.x[rows], case.y[rows])
        assert report.best_losses[0] == pytest.approx(exact, rel=1e-5)


def test_final_round_reports_only_losses() -> None:
    case = problem("svm", 5)
    nodes = fleet(case, [np.arange(0, 15), np.arange(15, 60)], features=ESTIMATES)
    nodes.answer(make_broadcast(case.start(1)))
    report = nodes.answer(FinalRound(round=2, w=case.start(2)))
    exact = [
        case.loss(case.start(2).astype(np.float64), case.x[r], case.y[r])
        for r in (slice(0, 15), slice(15, 60))
    ]
    np.testing.assert_allclose(report.numbers["losses"], exact, rtol=1e-5)
    assert [*report.numbers, *report.vectors] == ["losses", "best_losses"]


def test_diverged_w_without_warning() -> None:
    positive = Table(np.full((6, 2), 2.0, np.float32), np.zeros(6, np.float32))
    nodes = Fleet(
        LinearRegression(2),
        Shards.of(positive, [np.arange(3), np.arange(3, 6)]),
        batch=None,
        seed=0,
        features=ESTIMATES,
    )
    first = trained(nodes, make_broadcast(np.full(2, -3e38, np.float32), tau=1))
    assert np.isposinf(first.w).all()
    report = nodes.answer(make_broadcast(np.full(2, 3e38, np.float32), round=2))
    assert not np.isfinite(report.numbers["rho"]).any()
    assert not np.isfinite(report.numbers["beta"]).any()


class TestCallOrder:
    def setup_method(self) -> None:
        self.case = problem("svm", 5)
        self.fleet = fleet(self.case, [np.arange(60)])

    def test_update_needs_a_broadcast(self) -> None:
        with pytest.raises(LocalError, match="come once after each receive"):
            self.fleet.update()

    def test_second_update_is_refused(self) -> None:
        self.fleet.answer(make_broadcast(self.case.start(1)))
        with pytest.raises(LocalError, match="come once after each receive"):
            self.fleet.update()

    def test_report_needs_an_update(self) -> None:
        with pytest.raises(LocalError, match="come once after each receive"):
            self.fleet.report()
        self.fleet.receive(make_broadcast(self.case.start(1)))
        with pytest.raises(PeerError, match="cannot report losses"):
            self.fleet.report()

    def test_wrong_length_is_refused(self) -> None:
        with pytest.raises(PeerError, match=r"w has shape \(4,\); svm has 5 parameters"):
            self.fleet.receive(make_broadcast(np.zeros(4, np.float32)))

    def test_negative_tau_is_refused(self) -> None:
        with pytest.raises(PeerError, match="tau is -1"):
            self.fleet.receive(make_broadcast(self.case.start(1), tau=-1))

    @pytest.mark.parametrize("numbers", [[3], [4, 3], [3, 3]])
    def test_node_numbers_must_increase(self, numbers: list[int]) -> None:
        with pytest.raises(ValueError, match="one number each, in rising order"):
            fleet(self.case, [np.arange(30), np.arange(30, 60)], numbers=numbers)


@pytest.mark.parametrize(
    ("features", "batch", "evaluations"),
    [((), None, 3), (ESTIMATES, None, 4), (ESTIMATES, 2, 5)],
)
def test_evaluations_per_round(
    features: tuple[Feature, ...], batch: int | None, evaluations: int
) -> None:
    """With τ = 3. Algorithm 3 adds one evaluation at w_i; mini-batches add one at w^f."""
    calls = 0

    def mean_of_data(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        nonlocal calls
        calls += 1
        return 0.5 * float(((x - w) ** 2).sum(axis=1).mean()), w - x.mean(axis=0)

    table = Table(np.arange(12, dtype=np.float32).reshape(6, 2), np.zeros(6, np.float32))
    shards = Shards.of(table, [np.arange(3), np.arange(3, 6)])
    nodes = Fleet(
        FunctionModel(mean_of_data, initial=np.zeros(2)),
        shards,
        batch=batch,
        seed=0,
        features=features,
    )
    nodes.answer(make_broadcast(np.zeros(2, np.float32), tau=3, features=features))
    calls = 0
    second = np.ones(2, np.float32)
    nodes.answer(make_broadcast(second, round=2, tau=3, features=features))
    assert calls == 2 * evaluations  # two nodes


all_methods = pytest.mark.parametrize(
    ("name", "method", "batch"),
    [(name, "frugal", batch) for name in MODELS for batch in (None, 5)]
    + [
        ("svm", method, batch)
        for method in ("fixed", "paper", "astray")
        for batch in (None, 5)
    ],
)


def run(
    fleets: list[Fleet], name: str, method: str, present: list[list[int]]
) -> Iterator[tuple[Broadcast, Report, Aggregator]]:
    rules = METHODS[method]
    how = {each.name: getattr(rules, each.name) for each in fields(rules)}
    controller, eta = how.pop("controller"), how.pop("step_size")
    return run_rounds(
        fleets,
        controller,
        eta=eta,
        rounds=9,
        w=problem(name, 12).start(1),
        present=present,
        **how,
    )


def new_nodes(name: str, batch: int | None, method: str) -> list[Fleet]:
    return nodes(name, batch, METHODS[method].features)


@all_methods
@pytest.mark.parametrize("survivor", ["fork", "fleet"])
@pytest.mark.parametrize("late", [[3], [3, 4], [1, 6]])
def test_discarded_reports_equal_absence(
    name: str, method: str, batch: int | None, survivor: str, late: list[int]
) -> None:
    """A node whose late reports are discarded continues as if it had been absent."""
    present = [[0, 1] if number in late else [0, 1, 2] for number in range(1, 10)]
    absent = [
        bits(report)
        for _, report, _ in run(new_nodes(name, batch, method), name, method, present)
    ]
    fleets, found, discarded = new_nodes(name, batch, method), [], 0
    before = fleets[2].fork()
    for broadcast, report, _ in run(fleets, name, method, present):
        found.append(bits(report))
        if broadcast.round in late:  # the node received the round and reported too late
            one, other = (
                (before, fleets[2]) if survivor == "fork" else (fleets[2], fleets[2].fork())
            )
            other.answer(broadcast)
            fleets[2] = one
            discarded += 1
        before = fleets[2].fork()
    assert discarded == len(late)
    assert found == absent


@all_methods
def test_repeated_rounds_give_same_reports(
    name: str, method: str, batch: int | None
) -> None:
    """Forks from up to three rounds ago repeat all later reports."""
    fleets = new_nodes(name, batch, method)
    forks = [[fleet.fork() for fleet in fleets]]
    history: list[tuple[Broadcast, Any]] = []
    present = [[0, 1, 2], [0, 1, 2], [0, 2], [0, 1, 2], [1], [0, 1, 2]]
    for broadcast, report, _ in run(fleets, name, method, present):
        forks.append([fleet.fork() for fleet in fleets])
        history.append((broadcast, bits(report)))
        for back in range(
            1, min(3, broadcast.round) + 1
        ):  # a fork is used several times, so it is forked again
            again = [fleet.fork() for fleet in forks[broadcast.round - back]]
            for earlier, expected_bits in history[-back:]:
                here = (
                    present[earlier.round - 1]
                    if earlier.round <= len(present)
                    else [0, 1, 2]
                )
                repeated = Report.merge([again[node].answer(earlier) for node in here])
                assert bits(repeated) == expected_bits
    assert len(history) == 10


def test_forks_share_model_and_data() -> None:
    fleet = nodes("svm", 5)[0]
    twin = fleet.fork()
    assert twin.model is fleet.model
    assert twin.shards is fleet.shards


@pytest.mark.parametrize("method", ["fixed", "frugal", "accelerated"])
@pytest.mark.parametrize("seed", range(3))
def test_present_nodes_share_their_state(method: str, seed: int) -> None:
    """Nodes that were away, or have restarted, have the same bits as the others in all that
    masked sums compare.
    """
    rng = np.random.default_rng(seed)
    ours = networked.aggregator(method)
    fleets = [
        networked.node_data(node).fleet(networked.task(method), [node]) for node in range(4)
    ]
    last = [0] * 4
    broadcast: Any = ours.start()
    for _ in range(25):
        restarted = int(rng.integers(12))
        if restarted < 4:
            fleets[restarted] = networked.node_data(restarted).fleet(
                networked.task(method), [restarted]
            )
            last[restarted] = 0
            broadcast = ours.forget([restarted])
        present = [node for node in range(4) if rng.random() < 0.7] or [0]
        reports = []
        common = []
        for node in present:
            behind = last[node] != broadcast.round - 1
            sent = broadcast if behind else replace(broadcast, catch_up=None)
            fleets[node].receive(sent)
            common.append([each.tobytes() for each in fleets[node].common])
            fleets[node].update()
            reports.append(fleets[node].report())
            last[node] = broadcast.round
        assert all(each == common[0] for each in common)
        broadcast = ours.receive(Report.merge(reports), CHEAP)
        if not isinstance(broadcast, Broadcast):
            break
