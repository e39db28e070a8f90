"""Baselines: centralized and asynchronous gradient descent."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbudget.arrays import Float32, Float64
from fedbudget.budget.budget import Budget, Ledger
from fedbudget.budget.control import Reason
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.engines import baselines
from fedbudget.errors import UserError
from fedbudget.models import LinearRegression, SquaredSvm
from fedbudget.models.base import Descent, Model, loss_over
from fedbudget.protocol.state import Outcome, Round
from fedbudget.resources.energy import DeclaredEnergy
from fedbudget.resources.kinds import DGD, SGD, Profile, SimulatedTime, WireBytes
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Cost, Meter, Metering, Source, Usage
from support.problems import MODELS, problem

History = list[tuple[Round, Float32]]

ETA = 0.05
USAGE = Usage({})


def centralized_meters(
    limits: Mapping[str, float], step: float, others: Mapping[str, Meter] | None = None
) -> Meters:
    return Meters(Budget(limits), FixedTime(step, 7.0), others or {})


def run_centralized(
    given: Any,
    meters: Meters,
    *,
    batch: int | None = None,
    rounds: int | None = None,
    interrupted: Callable[[History], bool] = lambda history: False,
) -> tuple[Outcome, History]:
    history: History = []
    outcome = baselines.CentralizedEngine(
        model=given.model,
        table=given.table,
        w=given.start(3),
        eta=ETA,
        batch=batch,
        seed=11,
        meters=meters,
        ledger=baselines.open_centralized_ledger(meters, USAGE),
        rounds=rounds,
    ).run(
        observe=lambda round_, w: history.append((round_, w)),
        interrupted=lambda: interrupted(history),
    )
    return outcome, history


class TestCentralizedDescent:
    STEPS = 12

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("batch", [None, 9])
    def test_steps_match_a_numpy_loop(self, name: str, batch: int | None) -> None:
        given = problem(name, seed=4)
        outcome, history = run_centralized(
            given, centralized_meters({"time": 1.0}, 1 / self.STEPS), batch=batch
        )
        w: Float64 = given.start(3).astype(np.float64)
        for (round_, started), rows in zip(
            history, self.rows(len(given.table), batch), strict=True
        ):
            assert started == pytest.approx(w, rel=1e-4, abs=1e-5)
            assert round_.loss == pytest.approx(
                given.loss(w, given.x[rows], given.y[rows]), rel=1e-4
            )
            w = w - ETA * given.gradient(w, given.x[rows], given.y[rows])
        assert outcome.w == pytest.approx(w, rel=1e-4, abs=1e-5)

    def rows(self, samples: int, batch: int | None) -> list[Any]:
        """The rows of each step, from one uninterrupted stream of the sampler."""
        if batch is None:
            return [np.arange(samples)] * self.STEPS
        return list(
            Sampler(np.array([samples]), batch, seed=11).round(self.STEPS).positions[0]
        )

    def test_step_is_recorded_as_round(self) -> None:
        """Each step is one round with one update at one node."""
        _, history = run_centralized(
            problem("svm", seed=4), centralized_meters({"time": 1.0}, 0.25)
        )
        assert [round_.round for round_, _ in history] == [1, 2, 3, 4]
        assert [round_.t for round_, _ in history] == [1, 2, 3, 4]
        for round_, _ in history:
            assert (round_.tau, round_.reason, round_.nodes, round_.eta) == (
                1,
                Reason.FIXED,
                1,
                ETA,
            )
            assert round_.best_loss == round_.loss


class TestCentralizedEnd:
    def test_result_is_the_last_w(self) -> None:
        """Unlike a federated run, which returns the best w."""
        # η λ = 5: every step overshoots.
        given = problem("linear", seed=4, regularization=100.0)
        outcome, history = run_centralized(given, centralized_meters({"time": 1.0}, 0.25))
        losses = [loss_over(given.model, w, given.table) for _, w in history]
        assert losses == sorted(losses)
        assert loss_over(given.model, outcome.w, given.table) > losses[-1]

    def test_interrupt_stops_after_current_step(self) -> None:
        given, meters = problem("svm", seed=4), centralized_meters({"time": 1.0}, 0.01)
        outcome, history = run_centralized(
            given, meters, interrupted=lambda history: len(history) == 3
        )
        three, _ = run_centralized(given, centralized_meters({"time": 0.03}, 0.01))
        assert (outcome.stopped_by, len(history)) == ("interrupted", 3)
        assert np.array_equal(outcome.w, three.w)
        assert outcome.ledger.spent == pytest.approx([0.03])

    def test_interrupt_after_last_step_is_ignored(self) -> None:
        outcome, history = run_centralized(
            problem("svm", seed=4),
            centralized_meters({"time": 1.0}, 0.25),
            interrupted=lambda history: len(history) == 4,
        )
        assert (outcome.stopped_by, len(history)) == ("time", 4)

    def test_stops_after_requested_steps(self) -> None:
        outcome, history = run_centralized(
            problem("svm", seed=4), centralized_meters({"time": 1.0}, 0.01), rounds=5
        )
        assert (outcome.stopped_by, len(history)) == ("rounds", 5)


class TestCentralizedBudget:
    @pytest.mark.parametrize(
        ("limit", "steps"), [(1.0, 10), (1.05, 10), (0.999, 9), (0.1, 1)]
    )
    def test_last_step_that_fits_is_made(self, limit: float, steps: int) -> None:
        """Ten tenths fit in 1, although their floating-point sum differs from 1."""
        outcome, history = run_centralized(
            problem("svm", seed=4), centralized_meters({"time": limit}, 0.1)
        )
        assert len(history) == steps
        assert outcome.ledger.spent == pytest.approx([0.1 * steps])

    def test_aggregation_and_bytes_cost_nothing(self) -> None:
        outcome, history = run_centralized(
            problem("svm", seed=4),
            centralized_meters(
                {"time": 1.0, "bytes": 1.0}, 0.25, {"bytes": WireBytes("declared")}
            ),
        )
        assert outcome.ledger.spent == pytest.approx([1.0, 0.0])
        assert all(not round_.ledger.costs.aggregation.any() for round_, _ in history)

    def test_first_exhausted_resource_stops_run(self) -> None:
        # 5 W for 0.25 s is 1.25 J, and the budget covers two.
        limits = {"time": 10.0, "energy": 3.0}
        outcome, history = run_centralized(
            problem("svm", seed=4),
            centralized_meters(
                limits, 0.25, {"energy": DeclaredEnergy(watts=5, joules_per_byte=1)}
            ),
        )
        assert (outcome.stopped_by, len(history)) == ("energy", 2)
        assert outcome.ledger.spent == pytest.approx([0.5, 2.5])

    def test_measured_time_excludes_the_observer(self) -> None:
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
        observing = 0.0

        def observe(round_: Round, w: Float32) -> None:
            nonlocal observing
            began = time.perf_counter()
            if round_.round <= 10:
                time.sleep(0.02)
            observing += time.perf_counter() - began

        began = time.perf_counter()
        outcome = baselines.CentralizedEngine(
            model=given.model,
            table=given.table,
            w=given.start(3),
            eta=ETA,
            batch=None,
            seed=0,
            meters=meters,
            ledger=ledger,
        ).run(observe=observe)
        own = time.perf_counter() - began - observing
        assert observing > 0
        assert outcome.ledger.spent[0] == pytest.approx(own, rel=0.1, abs=0.05)
        assert outcome.ledger.spent[1] > 0

    def test_budget_below_one_step_is_refused(self) -> None:
        with pytest.raises(
            UserError,
            match=r"budget time=0\.1s is too small: one step .* costs about 0\.25s",
        ):
            baselines.open_centralized_ledger(
                centralized_meters({"time": 0.1}, 0.25), USAGE
            )

    def test_budget_never_spent_is_refused(self) -> None:
        with pytest.raises(
            UserError, match="costs no bytes, so this budget would never be spent"
        ):
            baselines.open_centralized_ledger(
                centralized_meters({"bytes": 1e6}, 0.25, {"bytes": WireBytes("declared")}),
                USAGE,
            )


class TestCentralizedSimulatedTime:
    def spend(self, batch: int | None) -> Ledger:
        rng = np.random.default_rng(8)
        meters = Meters.of(
            Budget({"time": 30.0}), Metering(SimulatedTime(baselines.profile(batch), rng))
        )
        outcome, history = run_centralized(problem("svm", seed=4), meters, batch=batch)
        self.steps = len(history)
        return outcome.ledger

    def test_mini_batch_step_time(self) -> None:
        """The paper measured μ and σ. The mean of a Gaussian clipped at 0 is μ Φ(μ/σ) + σ
        φ(μ/σ).
        """
        mean, deviation = 0.009974248, 0.011922926
        ratio = mean / deviation
        below = 0.5 * (1 + math.erf(ratio / math.sqrt(2)))
        clipped = mean * below + deviation * math.exp(-(ratio**2) / 2) / math.sqrt(
            2 * math.pi
        )
        assert self.spend(batch=10).spent[0] / self.steps == pytest.approx(
            clipped, rel=0.05
        )

    def test_full_batch_step_time(self) -> None:
        """It equals the time at a node that holds all data (case 4)."""
        assert self.spend(batch=None).spent[0] / self.steps == pytest.approx(
            DGD[3].step.mean, rel=0.05
        )


class FixedTime:
    """Every step and every aggregation takes a fixed time."""

    source: ClassVar[Source] = "simulated"

    def __init__(self, step: float, aggregation: float) -> None:
        self.cost = Cost(step, aggregation)

    def read(self, usage: Usage, time: Cost | None = None) -> Cost:
        return self.cost

    expect = read


def asynchronous_meters(
    seconds: float, step: float = 1.0, aggregation: float = 0.0
) -> Meters:
    return Meters(Budget({"time": seconds}), FixedTime(step, aggregation), {})


def simulated_meters(seconds: float, profile: Profile = SGD) -> Meters:
    return Meters.of(
        Budget({"time": seconds}),
        Metering(SimulatedTime(profile, np.random.default_rng(6))),
    )


def run_asynchronous(
    model: Model,
    shards: Shards,
    meters: Meters,
    speeds: Sequence[float],
    *,
    w: Float32 | None = None,
    eta: float = 0.05,
    batch: int | None = None,
    rounds: int | None = None,
    interrupted: Callable[[History], bool] = lambda history: False,
) -> tuple[Outcome, History]:
    history: History = []
    outcome = baselines.AsynchronousEngine(
        model=model,
        shards=shards,
        w=model.initial(0) if w is None else w,
        eta=eta,
        batch=batch,
        seed=11,
        meters=meters,
        speeds=speeds,
        ledger=baselines.open_asynchronous_ledger(meters, shards, speeds),
        rounds=rounds,
    ).run(
        observe=lambda round_, w: history.append((round_, w)),
        interrupted=lambda: interrupted(history),
    )
    return outcome, history


def quadratic_nodes(*targets: Sequence[float]) -> tuple[LinearRegression, Shards]:
    """Nodes with F_i(w) = mean ½ (w - y)² over their targets y, so ∇F_i(w) = w - mean y."""
    sizes = [len(own) for own in targets]
    y = np.concatenate(targets).astype(np.float32)
    rows = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    return LinearRegression(1), Shards.of(Table(np.ones((len(y), 1), np.float32), y), rows)


class RecordingModel:
    """A model that records the shard and the samples of every gradient."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls: list[tuple[int, list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def descend(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: float | Float32,
        *more: Any,
        **options: Any,
    ) -> Descent:
        self.calls.append(
            (int(shards.start[0]), indices.of(0, 0, int(shards.size[0])).tolist())
        )
        descent: Descent = self._model.descend(w, shards, indices, eta, *more, **options)
        return descent


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [None, 7])
def test_one_node_equals_centralized_descent(name: str, batch: int | None) -> None:
    """Bit for bit."""
    given = problem(name, seed=4)
    outcome, history = run_asynchronous(
        given.model,
        Shards.whole(given.table),
        asynchronous_meters(50.0),
        [1.0],
        w=given.start(3),
        batch=batch,
    )
    meters = centralized_meters({"time": 50.0}, 1.0)
    expected, centralized = run_centralized(given, meters, batch=batch)
    assert len(history) == 50
    assert [w.tobytes() for _, w in history] == [w.tobytes() for _, w in centralized]
    assert [round_.loss for round_, _ in history] == [
        round_.loss for round_, _ in centralized
    ]
    assert outcome.w.tobytes() == expected.w.tobytes()
    assert outcome.ledger.spent == pytest.approx(expected.ledger.spent)


class TestTwoNodesByHand:
    """Node 0 has one sample, 8. Node 1 has three samples with mean -8. η = ½, so the steps
    are 1/8 and 3/8.

    A cycle takes 3 + ¾ at speed 1: ¾ at node 0 with speed 5, and 1¼ at node 1 with speed 3.

        time   node   pulled w     gradient    w after the push
        0.75   0      0           -8           0 + 1              = 1
        1.25   1      0           +8           1 - 3              = -2
        1.50   0      1           -7          -2 + 0.875          = -1.125
        2.25   0     -1.125       -9.125      -1.125 + 1.140625   = 0.015625
        2.50   1     -2           +6           0.015625 - 2.25    = -2.234375
        3.00   0      0.015625    -7.984375   -2.234375 + ...     = -1.236328125
        3.75   0     -1.236...    -9.236...   -1.236... + ...     = -0.081787109375
        3.75   1     -2.234375    +5.765625   -0.081... - ...     = -2.243896484375
    """

    AFTER: ClassVar = [
        (0.75, 1.0),
        (1.25, -2.0),
        (1.5, -1.125),
        (2.25, 0.015625),
        (2.5, -2.234375),
        (3.0, -1.236328125),
        (3.75, -2.243896484375),
    ]

    def run(self, seconds: float) -> tuple[Outcome, History]:
        model, shards = quadratic_nodes([8.0], [-8.0, -8.0, -8.0])
        return run_asynchronous(
            model, shards, asynchronous_meters(seconds, 3.0, 0.75), [5.0, 3.0], eta=0.5
        )

    @pytest.mark.parametrize(("seconds", "w"), AFTER)
    @pytest.mark.parametrize("more", [0.0, 0.1])
    def test_w_after_each_push(self, seconds: float, w: float, more: float) -> None:
        outcome, _ = self.run(seconds + more)
        assert outcome.w.tolist() == [w]
        assert outcome.ledger.spent.tolist() == [seconds]
        assert outcome.stopped_by == "time"

    def test_two_pushes_form_a_round(self) -> None:
        """The observed w is the one before the round's first push."""
        _, history = self.run(3.75)
        assert [w.tolist() for _, w in history] == [
            [0.0],
            [-2.0],
            [0.015625],
            [-1.236328125],
        ]
        assert [round_.ledger.spent.tolist() for round_, _ in history] == [
            [1.25],
            [2.25],
            [3.0],
            [3.75],
        ]
        assert [round_.nodes for round_, _ in history] == [2, 1, 2, 2]
        assert [(round_.round, round_.t, round_.tau) for round_, _ in history] == [
            (1, 1, 1),
            (2, 2, 1),
            (3, 3, 1),
            (4, 4, 1),
        ]
        assert {round_.reason for round_, _ in history} == {Reason.FIXED}

    def test_round_loss_averages_pulled_losses(self) -> None:
        """The losses at the pulled w, weighted by samples."""
        _, history = self.run(2.5)
        third = (6.0**2 / 2 * 3) / 3  # node 1 alone, before the budget ended
        second = ((1 - 8) ** 2 / 2 + (-1.125 - 8) ** 2 / 2) / 2  # node 0 twice
        assert [round_.loss for round_, _ in history] == [32.0, second, third]
        assert all(round_.best_loss == round_.loss for round_, _ in history)


class TestPushes:
    def test_pushes_are_proportional_to_speed(self) -> None:
        recording = RecordingModel(LinearRegression(1))
        _, shards = quadratic_nodes([1.0], [2.0], [3.0])
        run_asynchronous(
            recording, shards, asynchronous_meters(100.0, 0.6, 0.4), [1.0, 4.0, 2.5]
        )
        assert Counter(start for start, _ in recording.calls) == {0: 100, 1: 400, 2: 250}

    def test_simultaneous_pushes_follow_node_numbers(self) -> None:
        recording = RecordingModel(LinearRegression(1))
        _, shards = quadratic_nodes([1.0], [2.0], [3.0])
        run_asynchronous(recording, shards, asynchronous_meters(2.0), [1.0, 2.0, 1.0])
        assert [start for start, _ in recording.calls] == [1, 0, 1, 2, 1, 0, 1, 2]

    def test_equal_nodes_push_every_round(self) -> None:
        """A round takes c + b, as a synchronous round with τ = 1 does."""
        model, shards = quadratic_nodes([1.0], [2.0], [3.0, 4.0])
        _, history = run_asynchronous(
            model, shards, asynchronous_meters(8.0, 0.75, 0.25), [1.0, 1.0, 1.0]
        )
        assert [round_.nodes for round_, _ in history] == [3] * 8
        assert [round_.ledger.spent[0] for round_, _ in history] == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_nodes_read_batch_stream_independently(self) -> None:
        given = problem("svm", seed=4, samples=60)
        recording = RecordingModel(given.model)
        shards = Shards.of(given.table, np.split(np.arange(60), 3))
        run_asynchronous(
            recording, shards, asynchronous_meters(6.0), [1.0, 2.0, 3.0], batch=4
        )
        stream = Sampler(np.array([20]), 4, seed=11).round(18).positions[0].tolist()
        for start, pushes in ((0, 6), (20, 12), (40, 18)):
            assert [
                samples for node, samples in recording.calls if node == start
            ] == stream[:pushes]

    def test_simulated_costs_match_the_profile(self) -> None:
        """Two nodes with speeds 1 and 4 make (1 + 4) / (c + b) pushes a second, and a round
        has two pushes.
        """
        model, shards = quadratic_nodes([1.0], [2.0])
        _, history = run_asynchronous(model, shards, simulated_meters(60.0), [1.0, 4.0])
        pace = 5 / (SGD.step.mean + SGD.aggregation.mean)
        assert len(history) == pytest.approx(60 * pace / 2, rel=0.05)
        times = [round_.ledger.spent[0] for round_, _ in history]
        assert times == sorted(times)
        assert 59 < times[-1] <= 60


class TestFixedPoint:
    """With F_i = ½ (w - y_i)², w settles at the mean target weighted by pushes and samples,
    within the size of one push.
    """

    ETA = 0.01

    def fixed_point(self, speeds: Sequence[float], *targets: Sequence[float]) -> float:
        model, shards = quadratic_nodes(*targets)
        outcome, _ = run_asynchronous(
            model, shards, simulated_meters(200.0), speeds, eta=self.ETA
        )
        return float(outcome.w[0])

    def test_equal_speeds_reach_the_mean(self) -> None:
        assert self.fixed_point([1.0, 1.0], [10.0], [-10.0]) == pytest.approx(0.0, abs=0.3)

    def test_fast_node_weighs_more(self) -> None:
        """Four pushes to one: (4 · 10 - 10) / 5."""
        assert self.fixed_point([4.0, 1.0], [10.0], [-10.0]) == pytest.approx(6.0, abs=0.3)

    def test_larger_shard_weighs_more(self) -> None:
        """(3 · 10 - 1 · 10) / 4."""
        assert self.fixed_point([1.0, 1.0], [10.0] * 3, [-10.0]) == pytest.approx(
            5.0, abs=0.3
        )

    def test_fast_node_biases_the_model(self) -> None:
        """Each node holds one class; the model fits the fast node better and all data
        worse.
        """
        rng = np.random.default_rng(2)
        centre = rng.normal(size=(4, 6))
        label = np.repeat(np.arange(4), 50)
        x = (centre[label] + rng.normal(size=(200, 6))).astype(np.float32)
        table = Table(x, np.where(label % 2 == 0, 1, -1).astype(np.float32))
        model, shards = SquaredSvm(6), Shards.of(table, np.split(np.arange(200), 4))

        def losses(speeds: Sequence[float]) -> tuple[float, float, float]:
            """The loss over all data, over the first node, and at the optimum."""
            outcome, _ = run_asynchronous(
                model, shards, simulated_meters(300.0), speeds, eta=self.ETA
            )
            optimum = centralized_optimum(model, table)
            own = model.losses(outcome.w[None], shards.only([0]), BatchIndices.whole(1))[0]
            return (
                loss_over(model, outcome.w, table),
                float(own),
                loss_over(model, optimum, table),
            )

        together, first, least = losses([1.0] * 4)
        assert together == pytest.approx(least, rel=1e-3)
        biased, favoured, _ = losses([8.0, 1.0, 1.0, 1.0])
        assert favoured < 0.8 * first
        assert biased > 1.05 * least


def centralized_optimum(model: Model, table: Table) -> Float32:
    w, whole = model.initial(0), Shards.whole(table)
    optimum: Float32 = model.descend(w[None], whole, BatchIndices.whole(1, 5000), 0.05).w[0]
    return optimum


class TestAsynchronousEnd:
    def test_same_seed_same_bits(self) -> None:
        given = problem("softmax", seed=4)
        shards = Shards.of(given.table, np.split(np.arange(60), [10, 25, 37]))

        def once() -> tuple[bytes, list[tuple[float, float]]]:
            outcome, history = run_asynchronous(
                given.model,
                shards,
                simulated_meters(5.0),
                baselines.default_speeds(4),
                batch=3,
            )
            return outcome.w.tobytes(), [
                (round_.loss, round_.ledger.spent[0]) for round_, _ in history
            ]

        assert once() == once()

    def test_interrupt_stops_after_current_round(self) -> None:
        model, shards = quadratic_nodes([1.0], [2.0])
        outcome, history = run_asynchronous(
            model,
            shards,
            asynchronous_meters(100.0),
            [1.0, 1.0],
            interrupted=lambda history: len(history) == 3,
        )
        three, _ = run_asynchronous(model, shards, asynchronous_meters(3.0), [1.0, 1.0])
        assert (outcome.stopped_by, len(history)) == ("interrupted", 3)
        assert np.array_equal(outcome.w, three.w)
        assert outcome.ledger.spent.tolist() == [3.0]

    def test_stops_after_requested_rounds(self) -> None:
        model, shards = quadratic_nodes([1.0], [2.0])
        outcome, history = run_asynchronous(
            model, shards, asynchronous_meters(100.0), [1.0, 4.0], rounds=5
        )
        assert (outcome.stopped_by, len(history)) == ("rounds", 5)

    def test_rounding_does_not_exceed_budget(self) -> None:
        model, shards = quadratic_nodes([1.0], [2.0])
        outcome, _ = run_asynchronous(
            model, shards, asynchronous_meters(0.3, 0.1), [1.0, 1.0]
        )
        assert 0.1 + 0.1 + 0.1 > 0.3
        assert outcome.ledger.spent == pytest.approx([0.3])

    def test_first_push_may_overshoot_budget(self) -> None:
        """A cost drawn above the expected one does not cancel the only push."""

        class Slower(FixedTime):
            def read(self, usage: Usage, time: Cost | None = None) -> Cost:
                return Cost(2.0, 0.0)

        model, shards = quadratic_nodes([1.0])
        meters = Meters(Budget({"time": 1.5}), Slower(1.0, 0.0), {})
        outcome, history = run_asynchronous(model, shards, meters, [1.0])
        assert len(history) == 1
        assert outcome.ledger.overshoot.tolist() == [0.5]

    def test_diverged_run_spends_its_budget(self) -> None:
        model, shards = quadratic_nodes([1.0], [2.0])
        outcome, history = run_asynchronous(
            model, shards, asynchronous_meters(300.0), [1.0, 1.0], eta=100.0
        )
        assert not np.isfinite(outcome.w).any()
        assert len(history) == 300


class TestAsynchronousRefusals:
    MODEL, SHARDS = quadratic_nodes([1.0], [2.0])

    def test_only_time_can_be_budgeted(self) -> None:
        meters = Meters(
            Budget({"time": 9.0, "bytes": 1e6}),
            FixedTime(1.0, 0.0),
            {"bytes": WireBytes("declared")},
        )
        with pytest.raises(UserError, match="a budget of time only, not of bytes"):
            baselines.open_asynchronous_ledger(meters, self.SHARDS, [1.0, 1.0])

    def test_measured_time_is_refused(self) -> None:
        meters = Meters.of(Budget({"time": 9.0}), Metering())
        with pytest.raises(UserError, match="use simulated costs"):
            baselines.open_asynchronous_ledger(meters, self.SHARDS, [1.0, 1.0])

    def test_speeds_must_match_nodes(self) -> None:
        with pytest.raises(UserError, match="one number for each of the 2 nodes, not 1"):
            baselines.open_asynchronous_ledger(asynchronous_meters(9.0), self.SHARDS, [1.0])

    @pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
    def test_speed_must_be_positive(self, speed: float) -> None:
        with pytest.raises(
            UserError, match="the speed of node 1 must be a positive number"
        ):
            baselines.open_asynchronous_ledger(
                asynchronous_meters(9.0), self.SHARDS, [1.0, speed]
            )

    def test_budget_below_one_push_is_refused(self) -> None:
        with pytest.raises(
            UserError,
            match=r"budget time=0\.2s is too small: .* arrives after about 0\.25s",
        ):
            baselines.open_asynchronous_ledger(
                asynchronous_meters(0.2), self.SHARDS, [4.0, 1.0]
            )


def test_default_speeds_make_40_percent_fast() -> None:
    assert baselines.default_speeds(5) == (4.0, 4.0, 1.0, 1.0, 1.0)
    assert sum(speed > 1 for speed in baselines.default_speeds(500)) == 200
