"""Published update rules: worked out by hand, by the formulas as they were published, and
by Flower's own programs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import strategy as flower

import fedbudget
from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.control import FixedTau
from fedbudget.codec import flatten, restore
from fedbudget.data.shards import Shards
from fedbudget.errors import UserError
from fedbudget.launch.simulate import simulate
from fedbudget.models import TorchModel
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report, Request
from fedbudget.protocol.update import (
    UPDATE_RULES,
    Average,
    FedAdam,
    FedYogi,
    ServerMomentum,
    UpdateRule,
)
from fedbudget.protocol.workload import DataWorkload
from fedbudget.settings.settings import Settings
from support.fleets import alone
from support.hand_made import ONE, go_on, make, report
from support.methods import bits
from support.problems import MODELS, LocalGradient, Problem, converse, problem

SEEDS = range(10)
NextV = Callable[[float, float, float], float]


def updates(seed: int) -> Float32:
    """What the mean is off by in each of some rounds, of parameters that move by little and
    by much.
    """
    rng = np.random.default_rng(seed)
    return (rng.normal(0.3, 1.0, (12, 4)) * [0.01, 0.1, 1.0, 10.0]).astype(np.float32)


def follow(rule: UpdateRule, deltas: Float32) -> Float32:
    """Every w, from 0."""
    w: Float32 = np.zeros(deltas.shape[1], np.float32)
    state, visited = rule.first(w), []
    for delta in deltas:
        state, w = rule.next(state, w, w + delta)
        visited.append(w)
    return np.array(visited)


def one_parameter(rule: UpdateRule, *deltas: float) -> list[float]:
    """Every w of a single parameter, from 0."""
    visited: list[float] = follow(rule, np.array(deltas, np.float32)[:, None])[
        :, 0
    ].tolist()
    return visited


class TestByHand:
    """Adaptive rules with s = 1, β₁ = 1/2, β₂ = 3/4 and ε = 1, so that v starts with 1."""

    def test_fedadam(self) -> None:
        # m = 2, v = 0.75 + 0.25 * 16 = 4.75; then m = 1 - 1 = 0, whatever v is.
        step = 2 / (math.sqrt(4.75) + 1)
        assert one_parameter(FedAdam(1.0, 0.5, 0.75, 1.0), 4, -2) == pytest.approx(
            [step, step]
        )

    def test_fedyogi(self) -> None:
        # m = 4, v = 1 + 0.25 * 64 = 17; then m = 2 + 1 = 3, v = 17 - 0.25 * 4 = 16, and so
        # a step of 3/5.
        step = 4 / (math.sqrt(17) + 1)
        assert one_parameter(FedYogi(1.0, 0.5, 0.75, 1.0), 8, 2) == pytest.approx(
            [step, step + 3 / 5]
        )

    def test_fedavgm(self) -> None:
        # v = 0.1 * 2 = 0.2, then 0.5 * 0.2 + 0.1 * 4 = 0.5.
        assert one_parameter(ServerMomentum(0.5, step_size=0.1), 2, 4) == pytest.approx(
            [0.2, 0.7]
        )

    def test_fedavg(self) -> None:
        assert one_parameter(Average(), 2, 4) == [2, 6]


def algorithm_2(
    deltas: Float32, eta: float, beta1: float, beta2: float, tau: float, next_v: NextV
) -> Float64:
    """Of Reddi et al., line by line and number by number, with v₋₁ the least that it may
    be.
    """
    x, m, v = ([value] * deltas.shape[1] for value in (0.0, 0.0, tau**2))
    visited = []
    for row in deltas.tolist():
        for j, delta in enumerate(row):
            m[j] = beta1 * m[j] + (1 - beta1) * delta
            v[j] = next_v(v[j], delta, beta2)
            x[j] = x[j] + eta * m[j] / (math.sqrt(v[j]) + tau)
        visited.append(list(x))
    return np.array(visited)


def adam(v: float, delta: float, beta2: float) -> float:
    return beta2 * v + (1 - beta2) * delta**2


def yogi(v: float, delta: float, beta2: float) -> float:
    return v - (1 - beta2) * delta**2 * ((v > delta**2) - (v < delta**2))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rule", "next_v"), [(FedAdam, adam), (FedYogi, yogi)])
def test_adaptive_rules_are_the_published_algorithm(
    rule: type[FedAdam | FedYogi], next_v: NextV, seed: int
) -> None:
    deltas, rng = updates(seed), np.random.default_rng(seed)
    options = (
        rng.uniform(0.01, 1),
        rng.uniform(0, 0.95),
        rng.uniform(0.5, 0.999),
        10 ** rng.uniform(-3, 0),
    )
    expected = algorithm_2(deltas, *options, next_v)
    np.testing.assert_allclose(
        follow(rule(*options), deltas), expected, rtol=1e-4, atol=1e-5
    )


def hsu(deltas: Float32, momentum: float, step_size: float) -> Float64:
    """v ← βv + Δw, w ← w - ηv, with Δw the pseudo-gradient: minus what the mean is off by."""
    visited, w, v = [], np.zeros(deltas.shape[1]), np.zeros(deltas.shape[1])
    for delta in deltas.astype(np.float64):
        v = momentum * v - delta
        w = w - step_size * v
        visited.append(w)
    return np.array(visited)


@pytest.mark.parametrize("seed", SEEDS)
def test_momentum_is_the_published_rule(seed: int) -> None:
    found = follow(ServerMomentum(0.9, step_size=0.3), updates(seed))
    np.testing.assert_allclose(found, hsu(updates(seed), 0.9, 0.3), rtol=1e-4, atol=1e-4)


class TestAgainstFlower:
    """What Flower's strategies make of the same means."""

    def visited(
        self, strategy: flower.FedAvg, deltas: Float32, monkeypatch: pytest.MonkeyPatch
    ) -> Float32:
        w: Float32 = np.zeros(deltas.shape[1], np.float32)
        found = []
        for number, delta in enumerate(deltas, start=1):
            mean = ArrayRecord({"w": Array(w + delta)})
            monkeypatch.setattr(
                flower.FedAvg,
                "aggregate_train",
                lambda *_, mean=mean: (mean, MetricRecord()),
            )
            if isinstance(strategy, flower.FedAdam):
                # It corrects a bias as Kingma and Ba do, which the published algorithm does
                # not.
                unbiased = math.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
                strategy.eta = 0.3 / unbiased
            if isinstance(strategy, flower.FedAdam | flower.FedYogi):
                strategy.current_arrays = {"w": w}
            elif isinstance(strategy, flower.FedAvgM):
                strategy.current_arrays = ArrayRecord({"w": Array(w)})
            after, _ = strategy.aggregate_train(number, [])
            assert after is not None
            w = after["w"].numpy().astype(np.float32)
            found.append(w)
        return np.array(found)

    @pytest.mark.parametrize(
        ("rule", "theirs"), [(FedAdam, flower.FedAdam), (FedYogi, flower.FedYogi)]
    )
    def test_adaptive_rules(
        self,
        rule: type[FedAdam | FedYogi],
        theirs: type[flower.FedAdam | flower.FedYogi],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        strategy = theirs(eta=0.3, beta_1=0.9, beta_2=0.99, tau=0.01)
        strategy.v_t = {"w": np.full(4, 0.01**2)}  # where Flower begins with 0
        found = follow(rule(step_size=0.3, epsilon=0.01), updates(1))
        np.testing.assert_allclose(
            found, self.visited(strategy, updates(1), monkeypatch), rtol=1e-4, atol=1e-5
        )

    def test_momentum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy = flower.FedAvgM(server_learning_rate=0.3, server_momentum=0.9)
        found = follow(ServerMomentum(0.9, step_size=0.3), updates(1))
        np.testing.assert_allclose(
            found, self.visited(strategy, updates(1), monkeypatch), rtol=1e-4, atol=1e-5
        )


def scaffold(
    nodes: Sequence[LocalGradient], x: Float64, *, steps: int, eta: float, rounds: int
) -> list[Float64]:
    """Karimireddy et al., Algorithm 1 with option II, all clients in every round and a
    global step of 1.
    """
    c, own, visited = np.zeros_like(x), [np.zeros_like(x) for _ in nodes], [x]
    for _ in range(rounds):
        ends, fresh = [], []
        for gradient, c_i in zip(nodes, own, strict=True):
            y = x.copy()
            for _ in range(steps):
                y = y - eta * (gradient(y) - c_i + c)
            ends.append(y)
            fresh.append(c_i - c + (x - y) / (steps * eta))
        c = c + np.mean([new - old for new, old in zip(fresh, own, strict=True)], axis=0)
        x, own = x + np.mean([y - x for y in ends], axis=0), fresh
        visited.append(x)
    return visited


@pytest.mark.parametrize("name", MODELS)
def test_drift_correction_with_fixed_steps_is_scaffold(name: str) -> None:
    case = problem(name, 3)
    parts, start = (
        np.split(np.argsort(case.x[:, 0]), 4),
        case.start(3),
    )  # shares of one size, each of its own kind

    def corrected(said: Report) -> Report:
        """As the published algorithm always is."""
        return (
            said
            if said.plain is None
            else replace(said, plain=np.ones(4), corrected=np.zeros(4))
        )

    rounds = converse(
        alone(case, parts),
        FixedTau(5),
        eta=0.05,
        rounds=9,
        w=start,
        heard=corrected,
        correct_drift=True,
    )
    expected = scaffold(
        case.local(parts), start.astype(np.float64), steps=5, eta=0.05, rounds=9
    )
    np.testing.assert_allclose(
        [broadcast.w for broadcast, _, _ in rounds], expected, atol=2e-5
    )


def fedprox(
    nodes: Sequence[LocalGradient], w: Float64, *, steps: int, eta: float, mu: float
) -> Float64:
    """Li et al., Algorithm 2 with gradient descent as the solver of h_k(w; w_t) = F_k(w) +
    μ/2 ‖w - w_t‖².
    """
    ends = []
    for gradient in nodes:
        own = w.copy()
        for _ in range(steps):
            own = own - eta * (gradient(own) + mu * (own - w))
        ends.append(own)
    return np.asarray(np.mean(ends, axis=0))


class TestFedProx:
    @pytest.mark.parametrize("name", MODELS)
    def test_rounds_are_the_published_algorithm(self, name: str) -> None:
        case = problem(name, 3)
        parts, w = np.split(np.argsort(case.x[:, 0]), 4), case.start(3)
        rounds = converse(
            alone(case, parts), FixedTau(5), eta=0.05, rounds=9, w=w, proximal=0.7
        )
        expected = [w.astype(np.float64)]
        for _ in range(9):
            expected.append(
                fedprox(case.local(parts), expected[-1], steps=5, eta=0.05, mu=0.7)
            )
        np.testing.assert_allclose(
            [broadcast.w for broadcast, _, _ in rounds], expected, atol=2e-5
        )

    def test_many_updates_reach_the_proximal_point(self) -> None:
        """Of a quadratic loss the least of F_i + μ/2 ‖w - w(t₀)‖² is known: (A + μI)⁻¹ (b +
        μ w(t₀)).
        """
        case, mu = problem("linear", 4), 0.3
        w, everything = case.start(4), np.arange(len(case.x))
        rounds = converse(
            alone(case, [everything]), FixedTau(3000), eta=0.1, rounds=1, w=w, proximal=mu
        )
        _, report, _ = next(iter(rounds))
        a = case.x.T @ case.x / len(case.x) + 0.1 * np.eye(len(w))
        b = case.x.T @ case.y / len(case.x)
        expected = np.linalg.solve(a + mu * np.eye(len(w)), b + mu * w)
        assert report.w is not None
        np.testing.assert_allclose(report.w[0], expected, atol=1e-5)

    @pytest.mark.parametrize("batch", [None, 3])
    def test_nodes_in_one_fleet_and_alone(self, batch: int | None) -> None:
        case = problem("softmax", 5)
        parts, w = np.split(np.argsort(case.x[:, 0]), 4), case.start(5)
        together = Fleet(case.model, Shards.of(case.table, parts), batch=batch, seed=9)
        broadcast = Broadcast(1, w, 4, 0.05, Request(proximal=0.7), best=False, stop=False)
        one_by_one = [
            Fleet(
                case.model,
                Shards.of(case.table, [part]),
                batch=batch,
                seed=9,
                numbers=[node],
            )
            for node, part in enumerate(parts)
        ]
        merged = Report.merge([fleet.answer(broadcast) for fleet in one_by_one])
        assert bits(together.answer(broadcast)) == bits(merged)

    def test_running_statistics_are_not_pulled(self) -> None:
        """They follow the samples; a pull would leave them behind."""
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
        case = problem("softmax", 6)
        shards = Shards.of(case.table, [np.arange(len(case.x))])
        found = []
        for proximal in (None, 1e3):
            model = TorchModel(module, target="classes")
            request = Request(proximal=proximal)
            fleet = Fleet(model, shards, batch=20, seed=9)
            report = fleet.answer(
                Broadcast(1, model.initial(0), 4, 1e-6, request, best=False, stop=False)
            )
            assert report.w is not None
            found.append(report.w[0, -model.statistics :])
            assert model.statistics > 0
        np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def fednova(
    nodes: Sequence[LocalGradient],
    sizes: Sequence[int],
    x: Float64,
    *,
    steps: Sequence[int],
    eta: float,
) -> Float64:
    """Wang et al., equations (6) to (8), with a_i all ones: x - τ_eff Σ p_i η d_i, and
    τ_eff = Σ p_i τ_i.
    """
    shares = np.array(sizes) / sum(sizes)
    directions = []
    for gradient, tau in zip(nodes, steps, strict=True):
        own, total = x.copy(), np.zeros_like(x)
        for _ in range(tau):
            slope = gradient(own)
            own, total = own - eta * slope, total + slope
        directions.append(total / tau)
    effective = float(shares @ np.array(steps))
    return np.asarray(x - effective * eta * np.tensordot(shares, directions, axes=1))


class TestFedNova:
    SIZES = (6, 24, 12, 18)
    UPDATES = (2, 8, 4, 6)

    def parts(self, case: Problem) -> list[Int64]:
        return np.split(np.argsort(case.x[:, 0]), np.cumsum(self.SIZES)[:-1])

    @pytest.mark.parametrize("name", MODELS)
    def test_rounds_are_the_published_rule(self, name: str) -> None:
        case = problem(name, 3)
        parts, w = self.parts(case), case.start(3)
        by_data = DataWorkload(self.SIZES)
        rounds = converse(
            alone(case, parts), FixedTau(8), eta=0.05, rounds=7, w=w, by_data=by_data
        )
        expected = [w.astype(np.float64)]
        for _ in range(7):
            expected.append(
                fednova(
                    case.local(parts),
                    self.SIZES,
                    expected[-1],
                    steps=self.UPDATES,
                    eta=0.05,
                )
            )
        np.testing.assert_allclose(
            [broadcast.w for broadcast, _, _ in rounds], expected, atol=2e-5
        )

    def test_with_fedprox_each_node_makes_its_own_number(self) -> None:
        """A node's way is that of as many updates of its own, made longer to τ_eff of them."""
        case = problem("svm", 4)
        parts, w = self.parts(case), case.start(4)
        how: dict[str, Any] = {"by_data": DataWorkload(self.SIZES), "proximal": 0.7}
        fleets = [Fleet(case.model, Shards.of(case.table, parts), batch=None, seed=9)]
        _, report, _ = next(
            iter(converse(fleets, FixedTau(8), eta=0.05, rounds=1, w=w, **how))
        )
        effective = (
            sum(
                size * updates
                for size, updates in zip(self.SIZES, self.UPDATES, strict=True)
            )
            / 60
        )
        assert report.w is not None
        for own, gradient, updates in zip(
            report.w, case.local(parts), self.UPDATES, strict=True
        ):
            end = fedprox([gradient], w.astype(np.float64), steps=updates, eta=0.05, mu=0.7)
            np.testing.assert_allclose(own, w + effective / updates * (end - w), atol=2e-5)

    def test_nodes_with_as_many_samples_each_are_averaged(self) -> None:
        case = problem("softmax", 5)
        parts, w = np.split(np.argsort(case.x[:, 0]), 4), case.start(5)
        common: dict[str, Any] = {"eta": 0.1, "rounds": 5, "w": w}
        by_data = DataWorkload((15,) * 4)
        plain, nova = (
            [
                each.w
                for each, _, _ in converse(
                    alone(case, parts), FixedTau(5), **common, by_data=how
                )
            ]
            for how in (None, by_data)
        )
        np.testing.assert_allclose(plain, nova, atol=1e-6)

    def test_a_run_tells_nodes_by_their_samples(self) -> None:
        common: dict[str, Any] = {
            "partition": "dirichlet:0.3",
            "tau": 20,
            "step_size": 0.1,
            "rounds": 3,
            "model": "svm",
        }
        run = simulate(
            Settings(**common, method="frugal", drift_correction=False, workload="by-data")
        )
        assert run.aggregator is not None
        broadcast = run.aggregator.pending
        assert broadcast is not None
        assert broadcast.work is not None
        sizes = run.shards.size
        assert broadcast.work.updates == tuple(
            max(1, round(20 * size / sizes.max())) for size in sizes.tolist()
        )
        assert broadcast.tau == broadcast.work.most == 20

    def test_real_nodes_are_refused(self) -> None:
        with pytest.raises(
            UserError, match="workload by-data works only with simulated nodes"
        ):
            fedbudget.train(
                dataset="digits",
                model="svm",
                rounds=2,
                workload="by-data",
                tau=3,
                engine="network",
            )


class TestInARun:
    @pytest.mark.parametrize("rule", [FedAdam(0.05), FedYogi(0.05)])
    def test_moves_w_from_round_to_round(self, rule: FedAdam | FedYogi) -> None:
        """By the second computation, from what nodes reported."""
        case = problem("svm", 3)
        parts = np.split(np.argsort(case.x[:, 0]), 4)
        rounds = list(
            converse(
                alone(case, parts),
                FixedTau(3),
                eta=0.1,
                rounds=8,
                w=case.start(1),
                update=rule,
            )
        )
        deltas, visited = [], []
        for (broadcast, answer, _), (after, _, _) in pairwise(rounds):
            assert answer.w is not None
            deltas.append(np.average(answer.w, axis=0, weights=answer.sizes) - broadcast.w)
            visited.append(after.w - rounds[0][0].w)
        next_v = adam if isinstance(rule, FedAdam) else yogi
        expected = algorithm_2(np.array(deltas), 0.05, 0.9, 0.99, 1e-3, next_v)
        np.testing.assert_allclose(visited, expected, rtol=1e-3, atol=1e-4)

    def test_starts_anew_after_going_back(self) -> None:
        aggregator = make(update=FedAdam(epsilon=0.5))
        second = go_on(aggregator.receive(report(aggregator.start(), 2.0, w=1.0), ONE))
        lost = replace(report(second, 1.0, best=2.0), w=np.full((2, 2), np.inf, np.float32))
        go_on(aggregator.receive(lost, ONE))
        state = aggregator.state.update
        assert (state.m.tolist(), state.v.tolist()) == ([0, 0], [0.25, 0.25])

    @pytest.mark.parametrize("name", UPDATE_RULES)
    def test_state_is_saved_and_read(self, name: str) -> None:
        rule, w = UPDATE_RULES[name](), np.ones(3, np.float32)
        state, _ = rule.next(rule.first(w), w, w + np.float32(0.5))
        if state is not None:
            assert bits(restore(type(state), *flatten(state))) == bits(state)

    def test_a_mean_beyond_all_numbers_raises_nothing(self) -> None:
        rule, w = FedAdam(), np.zeros(1, np.float32)
        with np.errstate(all="raise"):
            rule.next(rule.first(w), w, np.array([3e38], np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "step_size must be a positive number, not 0"),
        ({"epsilon": -1.0}, "epsilon must be a positive number, not -1"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1"),
        ({"beta2": 1.5}, r"beta2 must be at least 0 and below 1, not 1\.5"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, float], message: str) -> None:
    for rule in (FedAdam, FedYogi):
        with pytest.raises(UserError, match=message):
            rule(**options)


def test_a_step_of_momentum_must_be_positive() -> None:
    with pytest.raises(UserError, match="step_size must be a positive number, not 0"):
        ServerMomentum(step_size=0.0)
