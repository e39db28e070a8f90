"""Asynchronous gradient descent: the order of pushes, stale gradients by hand, weights,
bias, and when it ends.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import Reason
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.engines import baselines
from fedbudget.errors import UserError
from fedbudget.models import LinearRegression, SquaredSvm
from fedbudget.models.base import Descent, Model, loss_over
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources.kinds import SGD, Profile, SimulatedTime, WireBytes
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Cost, Metering, RoundUsage, Source
from support.problems import MODELS, problem

History = list[tuple[Round, Broadcast]]


class FixedTime:
    source: ClassVar[Source] = "simulated"

    def __init__(self, step: float, aggregation: float) -> None:
        self.cost = Cost(step, aggregation)

    def read(self, usage: RoundUsage, time: Cost | None = None) -> Cost:
        return self.cost

    expect = read


def fixed_meters(seconds: float, step: float = 1.0, aggregation: float = 0.0) -> Meters:
    return Meters(Budget({"time": seconds}), FixedTime(step, aggregation), {})


def drawn_meters(seconds: float, profile: Profile = SGD) -> Meters:
    return Meters.of(
        Budget({"time": seconds}),
        Metering(SimulatedTime(profile, np.random.default_rng(6))),
    )


def carry_out(
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
        model,
        shards,
        w=model.initial(0) if w is None else w,
        eta=eta,
        batch=batch,
        seed=11,
        meters=meters,
        speeds=speeds,
        ledger=baselines.open_asynchronous_ledger(meters, shards, speeds),
        rounds=rounds,
    ).run(
        observe=lambda round_, broadcast: history.append((round_, broadcast)),
        interrupted=lambda: interrupted(history),
    )
    return outcome, history


def pulled_towards(*targets: Sequence[float]) -> tuple[LinearRegression, Shards]:
    """Nodes with F_i(w) = mean ½ (w - y)² over their targets y, so that ∇F_i(w) = w - their
    mean.
    """
    sizes = [len(own) for own in targets]
    y = np.concatenate(targets).astype(np.float32)
    rows = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    return LinearRegression(1), Shards.of(Table(np.ones((len(y), 1), np.float32), y), rows)


class Watched:
    """A model that notes of every gradient whose shard it is of, and of which samples."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.asked: list[tuple[int, list[int]]] = []

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
        self.asked.append(
            (int(shards.start[0]), indices.of(0, 0, int(shards.size[0])).tolist())
        )
        found: Descent = self._model.descend(w, shards, indices, eta, *more, **options)
        return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [None, 7])
def test_one_node_descends_as_in_one_place_to_the_bit(name: str, batch: int | None) -> None:
    given = problem(name, seed=4)
    w = given.start(3)
    outcome, history = carry_out(
        given.model, Shards.whole(given.table), fixed_meters(50.0), [1.0], w=w, batch=batch
    )
    alone: History = []
    meters = fixed_meters(50.0)
    trial = baselines.trial(
        given.model, given.table, w, batch=batch, seed=11, counters=meters.counters()
    )
    expected = baselines.CentralizedEngine(
        given.model,
        given.table,
        w=w,
        eta=0.05,
        batch=batch,
        seed=11,
        meters=meters,
        ledger=baselines.open_centralized_ledger(meters, trial),
    ).run(observe=lambda round_, broadcast: alone.append((round_, broadcast)))
    assert len(history) == 50
    assert [broadcast.w.tobytes() for _, broadcast in history] == [
        broadcast.w.tobytes() for _, broadcast in alone
    ]
    assert [round_.loss for round_, _ in history] == [round_.loss for round_, _ in alone]
    assert outcome.w.tobytes() == expected.w.tobytes()
    assert outcome.ledger.spent == pytest.approx(expected.ledger.spent)


class TestTwoNodesByHand:
    """Node 0 has one sample, 8, and node 1 three, with mean -8; η = ½, so they step with
    1/8 and 3/8.

    A cycle takes 3 + ¾ at speed 1: ¾ at node 0, which has speed 5, and 1¼ at node 1, which
    has speed 3.

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
        model, shards = pulled_towards([8.0], [-8.0, -8.0, -8.0])
        return carry_out(
            model, shards, fixed_meters(seconds, 3.0, 0.75), [5.0, 3.0], eta=0.5
        )

    @pytest.mark.parametrize(("seconds", "w"), AFTER)
    @pytest.mark.parametrize("more", [0.0, 0.1])
    def test_w_after_each_push(self, seconds: float, w: float, more: float) -> None:
        outcome, _ = self.run(seconds + more)
        assert outcome.w.tolist() == [w]
        assert outcome.ledger.spent.tolist() == [seconds]
        assert outcome.stopped_by == "time"

    def test_two_pushes_are_told_of_as_a_round_that_began_at_the_w_before_them(
        self,
    ) -> None:
        _, history = self.run(3.75)
        assert [broadcast.w.tolist() for _, broadcast in history] == [
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

    def test_the_loss_of_a_round_is_that_of_its_pushes_at_what_they_had_pulled_weighted_by_samples(
        self,
    ) -> None:
        _, history = self.run(2.5)
        third = (6.0**2 / 2 * 3) / 3  # node 1 alone, before the budget ended
        second = ((1 - 8) ** 2 / 2 + (-1.125 - 8) ** 2 / 2) / 2  # node 0 twice
        assert [round_.loss for round_, _ in history] == [32.0, second, third]
        assert all(round_.best_loss == round_.loss for round_, _ in history)


class TestPushes:
    def test_faster_nodes_push_in_proportion_to_their_speed(self) -> None:
        watched = Watched(LinearRegression(1))
        _, shards = pulled_towards([1.0], [2.0], [3.0])
        carry_out(watched, shards, fixed_meters(100.0, 0.6, 0.4), [1.0, 4.0, 2.5])
        assert Counter(start for start, _ in watched.asked) == {0: 100, 1: 400, 2: 250}

    def test_of_pushes_that_arrive_together_the_lower_node_comes_first(self) -> None:
        watched = Watched(LinearRegression(1))
        _, shards = pulled_towards([1.0], [2.0], [3.0])
        carry_out(watched, shards, fixed_meters(2.0), [1.0, 2.0, 1.0])
        assert [start for start, _ in watched.asked] == [1, 0, 1, 2, 1, 0, 1, 2]

    def test_equal_nodes_all_push_in_every_round(self) -> None:
        """And a round takes what a synchronous one with τ=1 takes, c + b."""
        model, shards = pulled_towards([1.0], [2.0], [3.0, 4.0])
        _, history = carry_out(
            model, shards, fixed_meters(8.0, 0.75, 0.25), [1.0, 1.0, 1.0]
        )
        assert [round_.nodes for round_, _ in history] == [3] * 8
        assert [round_.ledger.spent[0] for round_, _ in history] == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_every_node_has_its_own_place_in_the_same_stream_of_mini_batches(self) -> None:
        given = problem("svm", seed=4, samples=60)
        watched = Watched(given.model)
        shards = Shards.of(given.table, np.split(np.arange(60), 3))
        carry_out(watched, shards, fixed_meters(6.0), [1.0, 2.0, 3.0], batch=4)
        stream = Sampler(np.array([20]), 4, seed=11).round(18).positions[0].tolist()
        for start, pushes in ((0, 6), (20, 12), (40, 18)):
            assert [picked for of, picked in watched.asked if of == start] == stream[
                :pushes
            ]

    def test_drawn_costs_give_the_pace_of_the_profile(self) -> None:
        """Two nodes of speed 1 and 4 take (1 + 4) / (c + b) pushes a second together, and a
        round is two of them.
        """
        model, shards = pulled_towards([1.0], [2.0])
        _, history = carry_out(model, shards, drawn_meters(60.0), [1.0, 4.0])
        pace = 5 / (SGD.step.mean + SGD.aggregation.mean)
        assert len(history) == pytest.approx(60 * pace / 2, rel=0.05)
        times = [round_.ledger.spent[0] for round_, _ in history]
        assert times == sorted(times)
        assert 59 < times[-1] <= 60


class TestWhereItLeads:
    """With F_i = ½ (w - y_i)² descent settles where the pull of all pushes is 0, within
    what one push moves w.
    """

    ETA = 0.01

    def quantize(self, speeds: Sequence[float], *targets: Sequence[float]) -> float:
        model, shards = pulled_towards(*targets)
        outcome, _ = carry_out(model, shards, drawn_meters(200.0), speeds, eta=self.ETA)
        return float(outcome.w[0])

    def test_equal_speeds_to_the_mean_of_the_nodes(self) -> None:
        assert self.quantize([1.0, 1.0], [10.0], [-10.0]) == pytest.approx(0.0, abs=0.3)

    def test_unequal_speeds_to_the_fast_node(self) -> None:
        """Four pushes to one: (4 · 10 - 10) / 5."""
        assert self.quantize([4.0, 1.0], [10.0], [-10.0]) == pytest.approx(6.0, abs=0.3)

    def test_a_node_with_more_samples_weighs_more(self) -> None:
        """(3 · 10 - 1 · 10) / 4."""
        assert self.quantize([1.0, 1.0], [10.0] * 3, [-10.0]) == pytest.approx(5.0, abs=0.3)

    def test_with_a_class_of_its_own_at_each_node_the_fast_nodes_data_are_fitted_better(
        self,
    ) -> None:
        rng = np.random.default_rng(2)
        centre = rng.normal(size=(4, 6))
        label = np.repeat(np.arange(4), 50)
        x = (centre[label] + rng.normal(size=(200, 6))).astype(np.float32)
        table = Table(x, np.where(label % 2 == 0, 1, -1).astype(np.float32))
        model, shards = SquaredSvm(6), Shards.of(table, np.split(np.arange(200), 4))

        def losses(speeds: Sequence[float]) -> tuple[float, float, float]:
            """Of all data, of the first node's, and the least there is."""
            outcome, _ = carry_out(model, shards, drawn_meters(300.0), speeds, eta=self.ETA)
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
    found: Float32 = model.descend(w[None], whole, BatchIndices.whole(1, 5000), 0.05).w[0]
    return found


class TestEnd:
    def test_a_run_repeats_to_the_bit(self) -> None:
        given = problem("softmax", seed=4)
        shards = Shards.of(given.table, np.split(np.arange(60), [10, 25, 37]))

        def once() -> tuple[bytes, list[tuple[float, float]]]:
            outcome, history = carry_out(
                given.model, shards, drawn_meters(5.0), baselines.default_speeds(4), batch=3
            )
            return outcome.w.tobytes(), [
                (round_.loss, round_.ledger.spent[0]) for round_, _ in history
            ]

        assert once() == once()

    def test_an_interrupted_run_ends_after_its_round_with_what_it_has(self) -> None:
        model, shards = pulled_towards([1.0], [2.0])
        outcome, history = carry_out(
            model,
            shards,
            fixed_meters(100.0),
            [1.0, 1.0],
            interrupted=lambda history: len(history) == 3,
        )
        three, _ = carry_out(model, shards, fixed_meters(3.0), [1.0, 1.0])
        assert (outcome.stopped_by, len(history)) == ("interrupted", 3)
        assert np.array_equal(outcome.w, three.w)
        assert outcome.ledger.spent.tolist() == [3.0]

    def test_so_many_rounds_and_no_more(self) -> None:
        model, shards = pulled_towards([1.0], [2.0])
        outcome, history = carry_out(
            model, shards, fixed_meters(100.0), [1.0, 4.0], rounds=5
        )
        assert (outcome.stopped_by, len(history)) == ("rounds", 5)

    def test_sums_of_costs_that_rounding_puts_past_the_budget_still_fit(self) -> None:
        model, shards = pulled_towards([1.0], [2.0])
        outcome, _ = carry_out(model, shards, fixed_meters(0.3, 0.1), [1.0, 1.0])
        assert 0.1 + 0.1 + 0.1 > 0.3
        assert outcome.ledger.spent == pytest.approx([0.3])

    def test_the_first_push_is_made_though_it_was_drawn_to_take_longer_than_the_budget(
        self,
    ) -> None:
        class Slower(FixedTime):
            def read(self, usage: RoundUsage, time: Cost | None = None) -> Cost:
                return Cost(2.0, 0.0)

        model, shards = pulled_towards([1.0])
        meters = Meters(Budget({"time": 1.5}), Slower(1.0, 0.0), {})
        outcome, history = carry_out(model, shards, meters, [1.0])
        assert len(history) == 1
        assert outcome.ledger.overshoot.tolist() == [0.5]

    def test_a_w_that_diverges_ends_with_the_budget(self) -> None:
        model, shards = pulled_towards([1.0], [2.0])
        outcome, history = carry_out(
            model, shards, fixed_meters(300.0), [1.0, 1.0], eta=100.0
        )
        assert not np.isfinite(outcome.w).any()
        assert len(history) == 300


class TestRefusals:
    MODEL, SHARDS = pulled_towards([1.0], [2.0])

    def test_other_resources_than_time(self) -> None:
        meters = Meters(
            Budget({"time": 9.0, "bytes": 1e6}),
            FixedTime(1.0, 0.0),
            {"bytes": WireBytes("declared")},
        )
        with pytest.raises(UserError, match="a budget of time only, not of bytes"):
            baselines.open_asynchronous_ledger(meters, self.SHARDS, [1.0, 1.0])

    def test_measured_time(self) -> None:
        meters = Meters.of(Budget({"time": 9.0}), Metering())
        with pytest.raises(UserError, match="use simulated costs"):
            baselines.open_asynchronous_ledger(meters, self.SHARDS, [1.0, 1.0])

    def test_too_few_speeds(self) -> None:
        with pytest.raises(UserError, match="1 are given for 2 nodes"):
            baselines.open_asynchronous_ledger(fixed_meters(9.0), self.SHARDS, [1.0])

    @pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
    def test_a_speed_that_is_none(self, speed: float) -> None:
        with pytest.raises(
            UserError, match="the speed of node 1 must be a positive number"
        ):
            baselines.open_asynchronous_ledger(fixed_meters(9.0), self.SHARDS, [1.0, speed])

    def test_a_budget_that_is_over_before_the_first_push(self) -> None:
        with pytest.raises(
            UserError,
            match=r"budget time=0\.2s is too small: .* arrives after about 0\.25s",
        ):
            baselines.open_asynchronous_ledger(fixed_meters(0.2), self.SHARDS, [4.0, 1.0])


def test_by_default_two_of_five_nodes_are_fast() -> None:
    assert baselines.default_speeds(5) == (4.0, 4.0, 1.0, 1.0, 1.0)
    assert sum(speed > 1 for speed in baselines.default_speeds(500)) == 200
