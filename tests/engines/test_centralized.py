"""Gradient descent in one place: every step against numpy, what is charged, and when it
ends.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbudget.arrays import Float64
from fedbudget.budget.budget import Budget, Ledger
from fedbudget.budget.control import Reason
from fedbudget.data.sampling import Sampler
from fedbudget.engines import baselines
from fedbudget.errors import UserError
from fedbudget.models.base import loss_over
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources.energy import DeclaredEnergy
from fedbudget.resources.kinds import DGD, SimulatedTime, WireBytes
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Cost, Meter, Metering, RoundUsage, Source
from support.problems import MODELS, problem

History = list[tuple[Round, Broadcast]]

ETA = 0.05
USAGE = RoundUsage(updates=1, nodes=1, wire_bytes=0, readings={})


class FixedTime:
    """Every step takes as long, and every aggregation, which nobody should be charged for."""

    source: ClassVar[Source] = "simulated"

    def __init__(self, step: float) -> None:
        self.step = step

    def read(self, usage: RoundUsage, time: Cost | None = None) -> Cost:
        return Cost(self.step, 7.0)

    expect = read


def fixed_meters(
    limits: Mapping[str, float], step: float, others: Mapping[str, Meter] | None = None
) -> Meters:
    return Meters(Budget(limits), FixedTime(step), others or {})


def carry_out(
    given: Any,
    meters: Meters,
    *,
    batch: int | None = None,
    rounds: int | None = None,
    interrupted: Callable[[History], bool] = lambda history: False,
) -> tuple[Outcome, History]:
    history: History = []
    outcome = baselines.CentralizedEngine(
        given.model,
        given.table,
        w=given.start(3),
        eta=ETA,
        batch=batch,
        seed=11,
        meters=meters,
        ledger=baselines.open_centralized_ledger(meters, USAGE),
        rounds=rounds,
    ).run(
        observe=lambda round_, broadcast: history.append((round_, broadcast)),
        interrupted=lambda: interrupted(history),
    )
    return outcome, history


class TestDescent:
    STEPS = 12

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("batch", [None, 9])
    def test_every_step_is_that_of_a_plain_loop(self, name: str, batch: int | None) -> None:
        given = problem(name, seed=4)
        outcome, history = carry_out(
            given, fixed_meters({"time": 1.0}, 1 / self.STEPS), batch=batch
        )
        w: Float64 = given.start(3).astype(np.float64)
        for (round_, broadcast), rows in zip(
            history, self.rows(len(given.table), batch), strict=True
        ):
            assert broadcast.w == pytest.approx(w, rel=1e-4, abs=1e-5)
            assert round_.loss == pytest.approx(
                given.loss(w, given.x[rows], given.y[rows]), rel=1e-4
            )
            w = w - ETA * given.gradient(w, given.x[rows], given.y[rows])
        assert outcome.w == pytest.approx(w, rel=1e-4, abs=1e-5)

    def rows(self, samples: int, batch: int | None) -> list[Any]:
        """The rows of each step: the sampler's stream as one uninterrupted round would take
        it.
        """
        if batch is None:
            return [np.arange(samples)] * self.STEPS
        return list(
            Sampler(np.array([samples]), batch, seed=11).round(self.STEPS).positions[0]
        )

    def test_a_step_is_told_of_as_a_round_of_one_update_at_one_node(self) -> None:
        _, history = carry_out(problem("svm", seed=4), fixed_meters({"time": 1.0}, 0.25))
        assert [round_.round for round_, _ in history] == [1, 2, 3, 4]
        assert [round_.t for round_, _ in history] == [1, 2, 3, 4]
        for round_, broadcast in history:
            assert (round_.tau, round_.reason, round_.nodes, round_.eta) == (
                1,
                Reason.FIXED,
                1,
                ETA,
            )
            assert round_.best_loss == round_.loss
            assert (
                broadcast.round,
                broadcast.tau,
                broadcast.request.estimate,
                broadcast.stop,
            ) == (
                round_.round,
                1,
                False,
                False,
            )


class TestEnd:
    def test_the_last_w_is_the_result_though_an_earlier_one_was_better(self) -> None:
        given = problem(
            "linear", seed=4, regularization=100.0
        )  # η λ = 5: each step overshoots further
        outcome, history = carry_out(given, fixed_meters({"time": 1.0}, 0.25))
        losses = [
            loss_over(given.model, broadcast.w, given.table) for _, broadcast in history
        ]
        assert losses == sorted(losses)
        assert loss_over(given.model, outcome.w, given.table) > losses[-1]

    def test_an_interrupted_run_ends_after_its_step_with_what_it_has(self) -> None:
        given, meters = problem("svm", seed=4), fixed_meters({"time": 1.0}, 0.01)
        outcome, history = carry_out(
            given, meters, interrupted=lambda history: len(history) == 3
        )
        three, _ = carry_out(given, fixed_meters({"time": 0.03}, 0.01))
        assert (outcome.stopped_by, len(history)) == ("interrupted", 3)
        assert np.array_equal(outcome.w, three.w)
        assert outcome.ledger.spent == pytest.approx([0.03])

    def test_an_interrupt_after_the_last_step_that_fits_changes_nothing(self) -> None:
        outcome, history = carry_out(
            problem("svm", seed=4),
            fixed_meters({"time": 1.0}, 0.25),
            interrupted=lambda history: len(history) == 4,
        )
        assert (outcome.stopped_by, len(history)) == ("time", 4)

    def test_so_many_steps_and_no_more(self) -> None:
        outcome, history = carry_out(
            problem("svm", seed=4), fixed_meters({"time": 1.0}, 0.01), rounds=5
        )
        assert (outcome.stopped_by, len(history)) == ("rounds", 5)


class TestBudget:
    @pytest.mark.parametrize(
        ("limit", "steps"), [(1.0, 10), (1.05, 10), (0.999, 9), (0.1, 1)]
    )
    def test_it_is_used_to_the_last_step_that_fits(self, limit: float, steps: int) -> None:
        """Ten tenths fit in 1, though they do not add up to it in floating point."""
        outcome, history = carry_out(
            problem("svm", seed=4), fixed_meters({"time": limit}, 0.1)
        )
        assert len(history) == steps
        assert outcome.ledger.spent == pytest.approx([0.1 * steps])

    def test_aggregations_are_not_charged_and_nothing_is_sent(self) -> None:
        outcome, history = carry_out(
            problem("svm", seed=4),
            fixed_meters(
                {"time": 1.0, "bytes": 1.0}, 0.25, {"bytes": WireBytes("declared")}
            ),
        )
        assert outcome.ledger.spent == pytest.approx([1.0, 0.0])
        assert all(not round_.ledger.costs.aggregation.any() for round_, _ in history)

    def test_of_several_resources_the_first_to_be_used_up_ends_the_run(self) -> None:
        limits = {"time": 10.0, "energy": 3.0}  # 5 W for 0.25 s is 1.25 J, which fits twice
        outcome, history = carry_out(
            problem("svm", seed=4),
            fixed_meters(
                limits, 0.25, {"energy": DeclaredEnergy(watts=5, joules_per_byte=1)}
            ),
        )
        assert (outcome.stopped_by, len(history)) == ("energy", 2)
        assert outcome.ledger.spent == pytest.approx([0.5, 2.5])

    def test_measured_steps_add_up_to_the_time_the_run_took_without_its_observer(
        self,
    ) -> None:
        given = problem("svm", seed=4, samples=20_000, features=100)
        meters = Meters.of(Budget({"time": 0.4, "cpu": 3600.0}), Metering())
        ledger = baselines.open_centralized_ledger(
            meters,
            baselines.trial(
                given.model,
                given.table,
                given.start(3),
                batch=None,
                seed=0,
                counters=meters.counters(),
            ),
        )
        watched = 0.0

        def observe(round_: Round, broadcast: Broadcast) -> None:
            nonlocal watched
            began = time.perf_counter()
            if round_.round <= 10:
                time.sleep(0.02)
            watched += time.perf_counter() - began

        began = time.perf_counter()
        outcome = baselines.CentralizedEngine(
            given.model,
            given.table,
            w=given.start(3),
            eta=ETA,
            batch=None,
            seed=0,
            meters=meters,
            ledger=ledger,
        ).run(observe=observe)
        own = time.perf_counter() - began - watched
        assert watched > 0
        assert outcome.ledger.spent[0] == pytest.approx(own, rel=0.1, abs=0.05)
        assert outcome.ledger.spent[1] > 0

    def test_one_that_does_not_cover_a_step_is_refused(self) -> None:
        with pytest.raises(
            UserError,
            match=r"budget time=0\.1s is too small: one step .* costs about 0\.25s",
        ):
            baselines.open_centralized_ledger(fixed_meters({"time": 0.1}, 0.25), USAGE)

    def test_one_that_would_never_be_spent_is_refused(self) -> None:
        with pytest.raises(
            UserError, match="costs no bytes, so this budget would never be spent"
        ):
            baselines.open_centralized_ledger(
                fixed_meters({"bytes": 1e6}, 0.25, {"bytes": WireBytes("declared")}), USAGE
            )


class TestSimulatedTime:
    def spend(self, batch: int | None) -> Ledger:
        rng = np.random.default_rng(8)
        meters = Meters.of(
            Budget({"time": 30.0}), Metering(SimulatedTime(baselines.profile(batch), rng))
        )
        outcome, history = carry_out(problem("svm", seed=4), meters, batch=batch)
        self.steps = len(history)
        return outcome.ledger

    def test_with_mini_batches_a_step_takes_what_the_paper_measured_in_one_place(
        self,
    ) -> None:
        """The mean of a Gaussian that is clipped at 0: μ Φ(μ/σ) + σ φ(μ/σ)."""
        mean, deviation = 0.009974248, 0.011922926
        ratio = mean / deviation
        below = 0.5 * (1 + math.erf(ratio / math.sqrt(2)))
        clipped = mean * below + deviation * math.exp(-(ratio**2) / 2) / math.sqrt(
            2 * math.pi
        )
        assert self.spend(batch=10).spent[0] / self.steps == pytest.approx(
            clipped, rel=0.05
        )

    def test_with_all_samples_it_takes_what_a_node_with_all_of_the_data_takes(self) -> None:
        assert self.spend(batch=None).spent[0] / self.steps == pytest.approx(
            DGD[3].step.mean, rel=0.05
        )
