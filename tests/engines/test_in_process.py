"""The in-process engine, its groups of nodes, and simulated attackers."""

import pickle
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.arrays import Flags, Float32, Float64
from fedbudget.budget.control import Reason
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Nodes, RoundEngine
from fedbudget.engines.in_process import (
    Attack,
    InProcessNodes,
    NodeGroup,
    with_flipped_labels,
)
from fedbudget.errors import UserError
from fedbudget.launch import simulate as simulate_module
from fedbudget.launch.inputs import distribute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.drift import DriftCatchUp, DriftCorrection, DriftPart
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.feature import Feature, report_layout, trial_rounds
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    CatchUp,
    Report,
    TrainRound,
)
from fedbudget.protocol.state import Outcome, Round
from fedbudget.protocol.sums import Sums
from fedbudget.resources import RESOURCES
from fedbudget.resources.counters import ResourceCounters
from fedbudget.settings.settings import Settings
from support.hand_made import FIRST as FIRST_ROUND
from support.hand_made import train_report
from support.methods import bits, recorded_broadcasts
from support.problems import problem

History = list[tuple[Round, Float32]]

NODES = 5


def pixels(features: int, samples: int) -> Dataset:
    """Random images of four classes."""
    rng = np.random.default_rng(7)
    labels = np.arange(samples) % 4
    x = rng.integers(0, 200, (samples, features)) + 13 * labels[:, None]
    return Dataset(
        "pixels",
        Part(x.astype(np.uint8), labels),
        classes=tuple("0123"),
        scale=1 / 255,
        parity=True,
    )


def plan_of(features: int = 8, samples: int = 60, **settings: Any) -> SimulatedRun:
    asked = {
        "model": "svm",
        "nodes": NODES,
        "partition": "case:2",
        "batch_size": "full",
        **settings,
    }
    return simulate(
        Settings(dataset="pixels", **asked), Overrides(dataset=pixels(features, samples))
    )


def aggregator_of(plan: SimulatedRun) -> Aggregator:
    assert plan.aggregator is not None
    return plan.aggregator


def nodes_of(plan: SimulatedRun) -> Nodes:
    assert isinstance(plan.engine, RoundEngine)
    return plan.engine.nodes


def run_plan(plan: SimulatedRun) -> tuple[Outcome, History]:
    history: History = []
    outcome = plan.engine.run(observe=lambda round_, w: history.append((round_, w)))
    return outcome, history


class TestCharges:
    @pytest.mark.parametrize("tau", ["adaptive", 20])
    def test_measured_costs_exclude_the_observer(self, tau: int | str) -> None:
        # Rounds are large, so reading the clocks is cheap in comparison. One run of five
        # must match: on a busy machine, time passes between two readings.
        for _ in range(5):
            spent, own, observing = self.measured_run(tau)
            assert observing[0] > 0.05 * own[0]
            if spent == pytest.approx(own, rel=0.1, abs=0.05):
                return
        assert spent == pytest.approx(own, rel=0.1, abs=0.05)

    def measured_run(self, tau: int | str) -> tuple[Float64, Float64, Float64]:
        """Time and CPU time: charged, used without the observer, and by the observer."""
        plan = plan_of(64, 5000, costs="measured", budget=("time=0.5s", "cpu=1h"), tau=tau)
        now = plan.meters.counters().read
        observing = np.zeros(2)

        def observe(round_: Round, w: Float32) -> None:
            nonlocal observing
            began = now()
            if round_.round <= 20:
                time.sleep(0.01)
            observing += now() - began

        began = now()
        outcome = plan.engine.run(observe=observe)
        return outcome.ledger.spent, now() - began - observing, observing

    @pytest.mark.parametrize(("method", "vectors"), [("paper", 3), ("frugal", 2)])
    def test_every_vector_is_counted_in_bytes(self, method: str, vectors: int) -> None:
        """Eight more parameters add 32 bytes to each vector: w sent and received, and the
        gradient with the paper's method after round 1.
        """
        first, later, final = 32 * 2 * NODES, 32 * vectors * NODES, 32 * NODES
        assert self.more_bytes(method) == [first, later, later, later, final]

    def more_bytes(self, method: str) -> list[float]:
        """The bytes that eight more parameters add to each of four rounds and the final
        one.
        """
        narrow, wide = (
            run_plan(plan_of(features, budget=("bytes=30kB",), method=method, rounds=4))[1]
            for features in (8, 16)
        )
        return [
            many.ledger.costs.aggregation[0] - few.ledger.costs.aggregation[0]
            for (few, _), (many, _) in zip(narrow, wide, strict=True)
        ]

    @pytest.mark.parametrize("tau", ["adaptive", 3])
    @pytest.mark.parametrize("batch", ["full", 4])
    def test_trial_predicts_bytes_per_round(self, tau: int | str, batch: int | str) -> None:
        plan = plan_of(budget=("bytes=40kB",), tau=tau, batch_size=batch, method="frugal")
        expected = aggregator_of(plan).ledger.costs.aggregation[0]
        _, history = run_plan(plan)
        assert {round_.ledger.costs.aggregation[0] for round_, _ in history[1:-1]} == {
            expected
        }

    def test_trial_does_not_change_the_run(self) -> None:
        """Mini-batches are drawn from the seed, so a fleet that ran a trial would report
        other losses.
        """
        plan = plan_of(batch_size=4, tau=2, budget=("time=3s",))
        features = aggregator_of(plan).method.features
        fresh = Fleet(
            plan.model, plan.shards, batch=4, seed=plan.settings.seed, features=features
        )
        sent = recorded_broadcasts(nodes_of(plan))
        _, history = run_plan(plan)
        for (round_, _), broadcast in zip(history, sent, strict=True):
            report = fresh.answer(broadcast)
            loss = np.average(report.numbers["losses"], weights=report.sizes)
            assert loss == pytest.approx(round_.loss, rel=1e-12)

    def test_spent_is_sum_of_round_costs(self) -> None:
        outcome, history = run_plan(plan_of(budget=("time=4s", "energy=1kJ")))
        total = sum(
            round_.ledger.costs.step * max(1, round_.tau) + round_.ledger.costs.aggregation
            for round_, _ in history
        )
        assert outcome.ledger.spent == pytest.approx(total)


def test_fleet_grouping_keeps_bits() -> None:
    def grouped(groups: list[list[int]]) -> tuple[list[int], list[float], bytes]:
        plan = plan_of(batch_size=4, budget=("time=3s",))
        fleets = [
            Fleet(
                plan.model,
                plan.shards.only(nodes),
                batch=4,
                seed=plan.settings.seed,
                features=aggregator_of(plan).method.features,
                numbers=nodes,
            )
            for nodes in groups
        ]
        rounds: list[Round] = []
        nodes = InProcessNodes(fleets, plan.meters.counters())
        outcome = RoundEngine(aggregator_of(plan), nodes, plan.meters).run(
            observe=lambda round_, _: rounds.append(round_)
        )
        return (
            [each.tau for each in rounds],
            [each.loss for each in rounds],
            outcome.w.tobytes(),
        )

    together = grouped([[0, 1, 2, 3, 4]])
    assert grouped([[2, 3, 4], [0, 1]]) == together
    assert grouped([[4], [0, 2], [1, 3]]) == together


class TestParticipation:
    def run(self, **settings: Any) -> tuple[list[Round], Outcome]:
        plan = plan_of(batch_size=4, budget=("time=6s",), **settings)
        rounds: list[Round] = []
        outcome = plan.engine.run(
            observe=lambda round_, _: rounds.append(round_), interrupted=lambda: False
        )
        return rounds, outcome

    @pytest.mark.parametrize("method", ["frugal", "paper"])
    def test_rounds_never_lack_all_nodes(self, method: str) -> None:
        rounds, outcome = self.run(participation=0.4, method=method)
        present = Counter(round_.nodes for round_ in rounds)
        assert set(present) <= set(range(1, NODES + 1))
        assert len(present) > 2
        assert np.isfinite(outcome.w).all()

    def test_absence_follows_the_seed(self) -> None:
        first, again, other = (
            [round_.nodes for round_ in self.run(participation=0.5, seed=seed)[0]]
            for seed in (1, 1, 2)
        )
        assert first == again
        assert first[:20] != other[:20]

    def test_returning_nodes_receive_catch_up(self) -> None:
        plan = plan_of(
            tau=2, rounds=6, budget=("bytes=1MB",), step_size=0.01, method="frugal"
        )
        fleets = [
            Fleet(
                plan.model,
                plan.shards.only([node]),
                batch=None,
                seed=0,
                features=aggregator_of(plan).method.features,
                numbers=[node],
            )
            for node in range(NODES)
        ]
        everyone = np.ones(NODES, dtype=bool)
        but_two = np.arange(NODES) < NODES - 2
        present = iter(
            [everyone, but_two, everyone, everyone, everyone, everyone, everyone]
        )
        charged: list[float] = []
        nodes = InProcessNodes(fleets, plan.meters.counters(), present)
        RoundEngine(aggregator_of(plan), nodes, plan.meters).run(
            observe=lambda round_, _: charged.append(
                float(round_.ledger.costs.aggregation[0])
            )
        )
        per_node = charged[0] / NODES
        assert charged[1] == pytest.approx((NODES - 2) * per_node)
        # w^f and c of eight float32.
        assert charged[2] == pytest.approx(NODES * per_node + 2 * (8 + 2 * 4 * 8))
        assert charged[3] == charged[4] == pytest.approx(NODES * per_node)


class TestEnd:
    def test_outcome_has_smallest_loss(self) -> None:
        # So large that losses oscillate.
        outcome, history = run_plan(plan_of(budget=("time=4s",), step_size=1.5))
        losses = [round_.loss for round_, _ in history]
        assert losses != sorted(losses, reverse=True)
        assert np.array_equal(outcome.w, history[int(np.argmin(losses))][1])

    def test_interrupt_returns_the_best_w(self) -> None:
        plan = plan_of(budget=("time=1h",), tau=2)
        history: History = []
        outcome = plan.engine.run(
            observe=lambda round_, w: history.append((round_, w)),
            interrupted=lambda: len(history) == 3,
        )
        assert outcome.stopped_by == "interrupted"
        assert [round_.round for round_, _ in history] == [1, 2, 3]
        losses = [round_.loss for round_, _ in history]
        assert np.array_equal(outcome.w, history[int(np.argmin(losses))][1])
        assert outcome.ledger.spent == pytest.approx(history[-1][0].ledger.spent)

    def test_stops_after_requested_rounds(self) -> None:
        outcome, history = run_plan(plan_of(budget=("time=1h",), rounds=4))
        assert outcome.stopped_by == "rounds"
        assert [round_.tau > 0 for round_, _ in history] == [True] * 4 + [False]


@pytest.mark.usefixtures("one_numba_thread")
class TestBudgetIsKept:
    """200 runs with random budgets, costs, controllers and data distributions."""

    RUNS = 200

    def random_plan(self, number: int) -> SimulatedRun:
        rng = np.random.default_rng([2024, number])
        metered = [name for name, resource in RESOURCES.items() if not resource.by_noise]
        chosen = rng.permutation(metered)[: rng.integers(1, len(metered) + 1)]
        settings: dict[str, Any] = {
            "nodes": int(rng.integers(2, 7)),
            "partition": f"case:{rng.integers(1, 5)}",
            "tau": "adaptive" if rng.random() < 0.5 else int(rng.integers(1, 40)),
            "batch_size": "full" if rng.random() < 0.5 else 4,
            "seed": int(rng.integers(0, 2**31)),
            "validation": 0.0,
            "watts": float(rng.uniform(0.1, 20)),
            "joules_per_byte": float(10 ** rng.uniform(-8, -3)),
            "price_per_hour": float(rng.uniform(0.01, 2)),
            "price_per_gigabyte": float(10 ** rng.uniform(-2, 3)),
        }
        plenty = plan_of(budget=tuple(f"{name}=1000000000" for name in chosen), **settings)
        aggregator = aggregator_of(plenty)
        least = aggregator.method.spending.reserve(aggregator.ledger, 1)
        limits = least * np.exp(rng.uniform(0.001, np.log(50), len(chosen)))
        budget = tuple(
            f"{name}={limit:.15f}" for name, limit in zip(chosen, limits, strict=True)
        )
        return plan_of(budget=budget, **settings)

    def test_random_runs_respect_budgets(self) -> None:
        """At most 1 % of runs should overshoot. More than 5 of 200 then overshoot with
        probability 1/60.
        """
        over, unused, endings = 0, [], Counter[str]()
        for number in range(self.RUNS):
            plan = self.random_plan(number)
            outcome, history = run_plan(plan)
            over += bool(outcome.ledger.overshoot.any())
            spent = outcome.ledger.spent / plan.budget.array
            assert (
                outcome.stopped_by == list(plan.budget.limits)[int(np.argmax(spent))]
                or spent.max() > 0.5
            ), number
            unused.append(1 - spent.max())
            endings["evaluated" if history[-1][0].tau == 0 else "not evaluated"] += 1
            endings[str(history[-2:][0][0].reason)] += 1
        assert over <= 5
        assert np.median(unused) < 0.2  # most of these budgets cover a few rounds
        # Not in all runs: with a budget for a few rounds, the final evaluation could
        # overshoot.
        assert endings["evaluated"] >= 0.92 * self.RUNS
        for reason in (Reason.BUDGET, Reason.REST, Reason.FIXED):
            assert endings[reason] > 0, f"no run ended with {reason}: {endings}"


GROUP_PROBLEM = problem("svm", 12)
FIRST, END = 3, 10
GROUP_FEATURES: tuple[Feature, ...] = (DriftCorrection(), EstimateSlopes())
COUNTERS = ResourceCounters.of([RESOURCES["time"], RESOURCES["cpu"]])


def group_fleets(*, separate: bool) -> list[Fleet]:
    """Seven nodes, 3 to 9, as one fleet or as seven fleets."""
    parts = np.array_split(np.arange(len(GROUP_PROBLEM.table)), END - FIRST)
    groups = (
        [[node] for node in range(FIRST, END)] if separate else [list(range(FIRST, END))]
    )
    return [
        Fleet(
            GROUP_PROBLEM.model,
            Shards.of(GROUP_PROBLEM.table, [parts[node - FIRST] for node in group]),
            batch=3,
            seed=1,
            features=GROUP_FEATURES,
            numbers=group,
        )
        for group in groups
    ]


def group_broadcast(number: int) -> Broadcast:
    w = GROUP_PROBLEM.start(number)
    missed = CatchUp(w, (DriftCatchUp(w, 0),))
    return TrainRound(
        round=number,
        w=w,
        report=report_layout(GROUP_FEATURES, number == 1),
        tau=2,
        eta=0.05,
        effective=2,
        parts=(DriftPart(correct=True, share=1.0),),
        catch_up=None if number == 1 else missed,
    )


def present_nodes(number: int) -> Flags:
    return np.random.default_rng(number).random(END - FIRST) < 0.4


def without_clocks(answer: tuple[object, object]) -> object:
    sums, costs = answer
    return bits([sums, replace(costs, readings={})])  # type: ignore[type-var]


def test_group_sums_match_reports() -> None:
    group, other = (
        NodeGroup(group_fleets(separate=True), COUNTERS),
        group_fleets(separate=True),
    )
    seen = np.zeros(END - FIRST, dtype=bool)
    for number in range(1, 6):
        present = present_nodes(number)
        sums, usage = group.answer(group_broadcast(number), present)
        reports = [
            fleet.answer(group_broadcast(number))
            for fleet, is_present in zip(other, present, strict=True)
            if is_present
        ]
        seen |= present
        expected = Sums.of(Report.merge(reports), group_broadcast(number).report)
        assert isinstance(sums, Sums)
        assert bits(sums.totals) == bits(expected.totals)
        assert sums.mean("w").tobytes() == expected.mean("w").tobytes()
        assert sums.nodes == usage.nodes == len(reports)
        assert sums.all_data == sum(
            len(fleet.shards.rows_of(0))
            for fleet, is_seen in zip(other, seen, strict=True)
            if is_seen
        )


def test_absent_group_catches_up_later() -> None:
    """A group without present nodes costs nothing. Its nodes receive w^f and c in their
    next round.
    """
    group, none_present = (
        NodeGroup(group_fleets(separate=True), COUNTERS),
        np.zeros(END - FIRST, dtype=bool),
    )
    _, first = group.answer(group_broadcast(1), ~none_present)
    sums, usage = group.answer(group_broadcast(2), none_present)
    assert sums is None
    assert (usage.nodes, usage.wire_bytes) == (0, 0)
    _, after = group.answer(group_broadcast(3), ~none_present)
    _, caught_up = group.answer(group_broadcast(4), ~none_present)
    vectors = 2 * 4 * GROUP_PROBLEM.model.parameters + 8  # w^f and c
    assert after.wire_bytes - caught_up.wire_bytes == (END - FIRST) * vectors
    assert first.nodes == after.nodes == END - FIRST


@pytest.mark.parametrize("separate", [True, False])
def test_restored_group_continues_same_bits(separate: bool) -> None:
    group = NodeGroup(group_fleets(separate=separate), COUNTERS)
    for number in range(1, 8):
        message, present = (
            group_broadcast(number),
            present_nodes(number) if separate else None,
        )
        again = NodeGroup(group_fleets(separate=separate), COUNTERS)
        again.recall(pickle.loads(pickle.dumps(group.memory())))
        answer = without_clocks(group.answer(message, present))
        assert without_clocks(again.answer(message, present)) == answer
        assert bits(again.distance_sums("w", message.w)) == bits(
            group.distance_sums("w", message.w)
        )


def test_group_trial_keeps_state() -> None:
    group, other = (
        NodeGroup(group_fleets(separate=False), COUNTERS),
        NodeGroup(group_fleets(separate=False), COUNTERS),
    )
    costs = group.trial(trial_rounds(GROUP_FEATURES, GROUP_PROBLEM.start(1), 0.05))
    assert costs.nodes == END - FIRST
    assert without_clocks(group.answer(group_broadcast(1))) == without_clocks(
        other.answer(group_broadcast(1))
    )


W = np.array([1.0, 2.0], np.float32)
UPDATES = np.array([[1, 0], [0, 1], [1, 1]], np.float32)


def attacked(name: str, number: int = 1) -> Any:
    """The update that a report contains for the attacker, node 2 of three."""
    report = train_report(W + UPDATES, sizes=np.full(3, 5), round=number)
    broadcast = replace(FIRST_ROUND, round=number, w=W)
    w = Attack(name, 2, seed=1).on(report, broadcast).vectors["w"]
    assert (w[:2] - W).tolist() == UPDATES[:2].tolist()
    return w[2] - W


def test_attacked_updates() -> None:
    assert attacked("sign-flip").tolist() == [-1, -1]
    assert attacked("scale").tolist() == [10, 10]
    assert attacked("label-flip").tolist() == [1, 1]
    assert np.linalg.norm(attacked("noise")) == pytest.approx(10 * 2**0.5, rel=1e-5)
    assert (
        attacked("noise").tolist()
        == attacked("noise").tolist()
        != attacked("noise", 2).tolist()
    )


def test_only_attackers_labels_are_flipped() -> None:
    """Two nodes share their samples, and the second node attacks."""
    table = Table(np.arange(3, dtype=np.float32)[:, None], np.array([0, 1, 2], np.float32))
    shared = np.array([0, 1, 2])
    shards = with_flipped_labels(Shards.of(table, [shared, shared]), 1)
    assert shards.table.y[shards.rows_of(0)].tolist() == [0, 1, 2]
    assert shards.table.y[shards.rows_of(1)].tolist() == [2, 1, 0]
    assert shards.table.x[shards.rows_of(1), 0].tolist() == [0, 1, 2]


ATTACK_SETTINGS: Any = {"model": "softmax", "nodes": 10, "case": 1, "budget": "time=15s"}


@pytest.fixture(scope="module")
def honest() -> float:
    """Accuracy without attackers."""
    accuracy = train(**ATTACK_SETTINGS).accuracy
    assert accuracy is not None
    return accuracy


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("scale", "noise")]


@pytest.mark.parametrize("rule", ["trimmed", "median"])
@pytest.mark.parametrize("attack", ["sign-flip", "label-flip", *SLOW])
def test_robust_rules_survive_two_attackers(attack: Any, rule: str, honest: float) -> None:
    """Samples are spread at random over ten nodes. Accuracy falls by at most 0.03."""
    accuracy = train(**ATTACK_SETTINGS, attack=attack, attackers=2, combine=rule).accuracy
    assert accuracy is not None
    assert accuracy >= honest - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["sign-flip", "scale", "noise"])
def test_attackers_with_unique_digits(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node holds one digit, so the attackers' digits are lost. Accuracy matches a mean
    over the eight honest nodes.
    """
    how = {**ATTACK_SETTINGS, "case": 2}
    accuracy = train(**how, attack=attack, attackers=2, combine="trimmed").accuracy

    def without_attackers(settings: Settings, dataset: Dataset) -> Any:
        settings, rows = distribute(settings, dataset)
        return settings, rows[:-2]

    monkeypatch.setattr(simulate_module, "distribute", without_attackers)
    eight = train(**how).accuracy
    assert accuracy is not None
    assert eight is not None
    assert accuracy >= eight - 0.03


def test_impossible_attacks_are_refused() -> None:
    with pytest.raises(UserError, match="no honest node is left"):
        train(budget="time=1s", nodes=3, attack="noise", attackers=3)
    with pytest.raises(UserError, match="two or more targets"):
        train(model="kmeans", dataset="digits", budget="time=1s", attack="label-flip")
    with pytest.raises(UserError, match="attack needs engine in-process"):
        train(budget="time=1s", attack="noise", engine="network")
