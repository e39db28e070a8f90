"""The in-process engine: what it charges, when it ends, and that how nodes are grouped into
fleets does not matter.
"""

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedbudget.arrays import Float64
from fedbudget.budget.control import Reason
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.in_process import InProcessEngine
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.protocol.aggregator import Aggregator, Outcome, Round
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources import RESOURCES
from fedbudget.resources.counters import Snapshot
from fedbudget.settings.settings import Settings

History = list[tuple[Round, Broadcast]]

NODES = 5


def pixels(features: int, samples: int) -> Dataset:
    """Images of four classes, made up."""
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


def carry_out(plan: SimulatedRun) -> tuple[Outcome, History]:
    history: History = []
    outcome = plan.engine.run(
        observe=lambda round_, broadcast: history.append((round_, broadcast)),
    )
    return outcome, history


class TestCharges:
    @pytest.mark.parametrize("tau", ["adaptive", 20])
    def test_measured_rounds_add_up_to_the_time_the_run_took_without_its_observer(
        self, tau: int | str
    ) -> None:
        # Rounds are large, so that what it takes to read the clocks is small beside them;
        # and of several runs one is enough: where a machine has other things to do, time
        # passes between two readings.
        for _ in range(5):
            spent, own, watched = self.measured_run(tau)
            assert watched["time"] > 0.05 * own["time"]
            if spent == pytest.approx([own["time"], own["cpu"]], rel=0.1, abs=0.05):
                return
        assert spent == pytest.approx([own["time"], own["cpu"]], rel=0.1, abs=0.05)

    def measured_run(self, tau: int | str) -> tuple[Float64, Snapshot, Snapshot]:
        """What a run was charged, what it took without its observer, and what that took."""
        plan = plan_of(64, 5000, costs="measured", budget=("time=0.5s", "cpu=1h"), tau=tau)
        now = plan.meters.counters().read
        watched = Snapshot({"time": 0.0, "cpu": 0.0})

        def observe(round_: Round, broadcast: Broadcast) -> None:
            nonlocal watched
            began = now()
            if round_.round <= 20:
                time.sleep(0.01)
            watched += now() - began

        began = now()
        outcome = plan.engine.run(observe=observe)
        return outcome.ledger.spent, now() - began - watched, watched

    def test_bytes_are_every_vector_to_and_from_every_node(self) -> None:
        """Eight more parameters are 32 bytes more in every vector: w out and w back, the
        gradient too if asked for.
        """
        plain = self.more_bytes(method="paper")
        first, estimated, final = 32 * 2 * NODES, 32 * 3 * NODES, 32 * NODES
        assert plain == [first, estimated, estimated, estimated, final]

    def test_frugal_sends_no_gradient(self) -> None:
        each, final = 32 * 2 * NODES, 32 * NODES
        assert self.more_bytes(method="frugal") == [each, each, each, each, final]

    def more_bytes(self, method: str) -> list[float]:
        """What eight more parameters take in each of four rounds and the final one."""
        narrow, wide = (
            carry_out(plan_of(features, budget=("bytes=30kB",), method=method, rounds=4))[1]
            for features in (8, 16)
        )
        return [
            many.ledger.costs.aggregation[0] - few.ledger.costs.aggregation[0]
            for (few, _), (many, _) in zip(narrow, wide, strict=True)
        ]

    @pytest.mark.parametrize("tau", ["adaptive", 3])
    @pytest.mark.parametrize("batch", ["full", 4])
    def test_the_trial_round_foretells_the_bytes_of_a_round(
        self, tau: int | str, batch: int | str
    ) -> None:
        plan = plan_of(budget=("bytes=40kB",), tau=tau, batch_size=batch, method="frugal")
        expected = aggregator_of(plan).ledger.costs.aggregation[0]
        _, history = carry_out(plan)
        assert {round_.ledger.costs.aggregation[0] for round_, _ in history[1:-1]} == {
            expected
        }

    def test_the_trial_round_leaves_the_run_as_it_would_be_without_it(self) -> None:
        """Mini-batches are drawn from the seed, so a fleet that had been used would give
        other losses.
        """
        plan = plan_of(batch_size=4, tau=2, budget=("time=3s",))
        fresh = Fleet(plan.model, plan.shards, batch=4, seed=plan.settings.seed)
        _, history = carry_out(plan)
        for round_, broadcast in history:
            report = fresh.answer(broadcast)
            assert np.average(report.losses, weights=report.sizes) == pytest.approx(
                round_.loss, rel=1e-12
            )

    def test_what_was_spent_is_the_sum_of_what_rounds_cost(self) -> None:
        outcome, history = carry_out(plan_of(budget=("time=4s", "energy=1kJ")))
        total = sum(
            round_.ledger.costs.step * max(1, round_.tau) + round_.ledger.costs.aggregation
            for round_, _ in history
        )
        assert outcome.ledger.spent == pytest.approx(total)


def test_however_nodes_are_grouped_into_fleets_the_bits_are_the_same() -> None:
    def grouped(groups: list[list[int]]) -> tuple[list[int], list[float], bytes]:
        plan = plan_of(batch_size=4, budget=("time=3s",))
        fleets = [
            Fleet(
                plan.model,
                plan.shards.only(nodes),
                batch=4,
                seed=plan.settings.seed,
                numbers=nodes,
            )
            for nodes in groups
        ]
        rounds: list[Round] = []
        outcome = InProcessEngine(aggregator_of(plan), fleets, plan.meters).run(
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


class TestAbsence:
    def run(self, **settings: Any) -> tuple[list[Round], Outcome]:
        plan = plan_of(batch_size=4, budget=("time=6s",), **settings)
        rounds: list[Round] = []
        outcome = plan.engine.run(
            observe=lambda round_, _: rounds.append(round_), interrupted=lambda: False
        )
        return rounds, outcome

    @pytest.mark.parametrize("method", ["frugal", "paper"])
    def test_some_nodes_miss_some_rounds_but_never_all(self, method: str) -> None:
        rounds, outcome = self.run(participation=0.4, method=method)
        present = Counter(round_.nodes for round_ in rounds)
        assert set(present) <= set(range(1, NODES + 1))
        assert len(present) > 2
        assert np.isfinite(outcome.w).all()

    def test_who_misses_which_is_drawn_from_the_seed(self) -> None:
        first, again, other = (
            [round_.nodes for round_ in self.run(participation=0.5, seed=seed)[0]]
            for seed in (1, 1, 2)
        )
        assert first == again
        assert first[:20] != other[:20]

    def test_those_who_return_are_sent_what_they_missed(self) -> None:
        plan = plan_of(
            tau=2, rounds=6, budget=("bytes=1MB",), step_size=0.01, method="frugal"
        )
        fleets = [
            Fleet(plan.model, plan.shards.only([node]), batch=None, seed=0, numbers=[node])
            for node in range(NODES)
        ]
        everyone = np.ones(NODES, dtype=bool)
        but_two = np.arange(NODES) < NODES - 2
        present = iter(
            [everyone, but_two, everyone, everyone, everyone, everyone, everyone]
        )
        charged: list[float] = []
        InProcessEngine(aggregator_of(plan), fleets, plan.meters, present).run(
            observe=lambda round_, _: charged.append(
                float(round_.ledger.costs.aggregation[0])
            )
        )
        per_node = charged[0] / NODES
        assert charged[1] == pytest.approx((NODES - 2) * per_node)
        assert charged[2] == pytest.approx(
            NODES * per_node + 2 * (8 + 2 * 4 * 8)
        )  # w^f and c, of eight float32
        assert charged[3] == charged[4] == pytest.approx(NODES * per_node)


class TestEnd:
    def test_the_outcome_is_the_w_with_the_smallest_loss_that_was_seen(self) -> None:
        outcome, history = carry_out(
            plan_of(budget=("time=4s",), step_size=1.5)
        )  # so large that losses go up and down
        losses = [round_.loss for round_, _ in history]
        assert losses != sorted(losses, reverse=True)
        assert np.array_equal(outcome.w, history[int(np.argmin(losses))][1].w)

    def test_an_interrupted_run_ends_after_its_round_with_the_best_so_far(self) -> None:
        plan = plan_of(budget=("time=1h",), tau=2)
        history: History = []
        outcome = plan.engine.run(
            observe=lambda round_, broadcast: history.append((round_, broadcast)),
            interrupted=lambda: len(history) == 3,
        )
        assert outcome.stopped_by == "interrupted"
        assert [round_.round for round_, _ in history] == [1, 2, 3]
        losses = [round_.loss for round_, _ in history]
        assert np.array_equal(outcome.w, history[int(np.argmin(losses))][1].w)
        assert outcome.ledger.spent == pytest.approx(history[-1][0].ledger.spent)

    def test_so_many_rounds_and_no_more(self) -> None:
        outcome, history = carry_out(plan_of(budget=("time=1h",), rounds=4))
        assert outcome.stopped_by == "rounds"
        assert [round_.tau > 0 for round_, _ in history] == [True] * 4 + [False]


@pytest.mark.usefixtures("one_numba_thread")
class TestBudgetIsKept:
    """Over 200 runs with random budgets, costs, controllers and data distributions."""

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

    def test_hardly_any_run_is_over_and_little_is_left(self) -> None:
        """At most 1 % should be over; of 200 runs, more than 5 are so by chance once in 60."""
        over, unused, endings = 0, [], Counter[str]()
        for number in range(self.RUNS):
            plan = self.random_plan(number)
            outcome, history = carry_out(plan)
            over += bool(outcome.ledger.overshoot.any())
            spent = outcome.ledger.spent / plan.budget.array
            assert (
                outcome.stopped_by == list(plan.budget.limits)[int(np.argmax(spent))]
                or spent.max() > 0.5
            ), number
            unused.append(1 - spent.max())
            endings["judged" if history[-1][1].tau == 0 else "not judged"] += 1
            endings[str(history[-2:][0][0].reason)] += 1
        assert over <= 5
        assert np.median(unused) < 0.2  # most of these budgets are for a few rounds
        assert (
            endings["judged"] >= 0.92 * self.RUNS
        )  # or one of these few rounds would now and then be far over
        for reason in (Reason.BUDGET, Reason.REST, Reason.FIXED):
            assert endings[reason] > 0, f"no run of this kind was made: {reason}, {endings}"
