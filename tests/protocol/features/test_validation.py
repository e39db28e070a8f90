"""Validation: held-out rows, the choice of the model, the end of a run, and its cost."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedbudget
from fedbudget.arrays import Float32, Int64
from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models.builtin import LinearRegression
from fedbudget.protocol.features.feature import RoundResult, report_layout
from fedbudget.protocol.features.held_out import BLOCKS, HeldOut, held_out_rows, split
from fedbudget.protocol.features.validation import (
    OVERFITTED,
    Candidate,
    MeanOfW,
    Validation,
    ValidationCatchUp,
    ValidationPart,
    ValidationState,
)
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import CatchUp, TrainRound
from fedbudget.protocol.sums import Sums

FEATURE = Validation(share=0.2)


def table(rows: int = 300) -> Table:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + 0.3 * rng.normal(size=rows)).astype(np.float32)
    return Table(x, y)


def shards(*sizes: int) -> Shards:
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return Shards.of(table(sum(sizes)), rows)


class TestHeldOutRows:
    def test_few_rows_are_not_split(self) -> None:
        assert held_out_rows(60, 0.15) == 0
        assert held_out_rows(67, 0.15) == 10
        assert held_out_rows(1_000_000, 0.15) == 1000

    def test_parts_are_disjoint_and_complete(self) -> None:
        whole = shards(100, 20, 180)
        train, held_out = split(whole, 0.2, seed=3)
        assert held_out.rows.tolist() == [20, 0, 36]
        for node in range(3):
            own = held_out.blocks.rows[
                np.concatenate(
                    [
                        np.arange(start, start + size)
                        for start, size, owner in zip(
                            held_out.blocks.start,
                            held_out.blocks.size,
                            held_out.owner,
                            strict=True,
                        )
                        if owner == node
                    ]
                    or [np.arange(0)]
                )
            ]
            together = np.concatenate([own, train.rows_of(node)])
            assert sorted(together) == sorted(whole.rows_of(node))

    def test_identical_shards_hold_out_same_rows(self) -> None:
        same = np.arange(100)
        both = Shards.of(table(100), [same, same])
        train, _ = split(both, 0.2, seed=1)
        assert train.rows_of(0).tolist() == train.rows_of(1).tolist()
        assert len(train.rows) == 80  # stored once

    def test_seeds_hold_out_different_rows(self) -> None:
        one, _ = split(shards(100), 0.2, seed=1)
        other, _ = split(shards(100), 0.2, seed=2)
        assert one.rows.tolist() != other.rows.tolist()

    def test_nothing_held_out_of_small_nodes(self) -> None:
        whole = shards(20, 30)
        train, held_out = split(whole, 0.2, seed=0)
        assert train is whole
        assert held_out.rows.tolist() == [0, 0]


class TestBlocks:
    def test_mean_is_that_of_rows(self) -> None:
        model = LinearRegression(3)
        w = np.array([0.5, -1.0, 0.0, 0.1][: model.parameters], np.float32)
        whole = shards(100, 180)
        _, held_out = split(whole, 0.2, seed=0)
        losses = held_out.losses(model, w)
        means = held_out.compare(losses, np.zeros_like(losses))["loss"]
        rows = [held_out.blocks.rows[:20], held_out.blocks.rows[20:]]
        expected = model.losses(
            w[None], Shards.of(whole.table, rows), BatchIndices.whole(2)
        )
        assert means == pytest.approx(expected, rel=1e-6)

    def test_diverged_w_has_finite_loss(self) -> None:
        model = LinearRegression(3)
        _, held_out = split(shards(100), 0.2, seed=0)
        for value in (np.nan, np.inf, 3e38):
            w = np.full(model.parameters, value, np.float32)
            assert np.isfinite(held_out.losses(model, w)).all()

    def test_variance_of_equal_blocks(self) -> None:
        """With blocks of one size it is the sample variance divided by their number."""
        held_out = HeldOut.of(shards(80), [np.arange(80)])
        values = np.random.default_rng(1).normal(size=BLOCKS)
        expected = values.var(ddof=1) / BLOCKS
        figures = held_out.compare(values + 1, np.ones(BLOCKS))
        assert figures["variance"][0] == pytest.approx(expected)


def round_of(
    w: list[float],
    number: int,
    best: int,
    *,
    reference: int | None = None,
    catch_up: object = None,
) -> TrainRound:
    compared = Candidate(best if reference is None else reference)
    vector = np.array(w, np.float32)
    return TrainRound(
        round=number,
        w=vector,
        tau=1,
        eta=0.01,
        effective=1,
        report=report_layout((FEATURE,), number == 1),
        parts=(ValidationPart(True, Candidate(best), compared, number),),
        catch_up=catch_up,  # type: ignore[arg-type]
    )


def fleet() -> Fleet:
    model = LinearRegression(3)
    return Fleet(model, shards(100, 20, 180), batch=10, seed=0, features=(FEATURE,))


class TestNodes:
    def test_reports_gap_to_best(self) -> None:
        size = fleet().model.parameters
        first = [0.0] * size
        second = [0.5] * size
        nodes = fleet()
        one = nodes.answer(round_of(first, 1, 0))
        two = nodes.answer(round_of(second, 2, 1))
        assert one.numbers["validation"].tolist() == one.numbers["validation_best"].tolist()
        assert two.numbers["validation_best"].tolist() == one.numbers["validation"].tolist()
        assert two.numbers["validated"].tolist() == [1, 0, 1]
        assert two.numbers["validation"][1] == 0

    def test_reports_loss_of_reference(self) -> None:
        """w^r is an earlier w^v, with the loss that it had then."""
        size = fleet().model.parameters
        nodes = fleet()
        one = nodes.answer(round_of([0.0] * size, 1, 0))
        nodes.answer(round_of([0.5] * size, 2, 1))
        nodes.answer(round_of([0.7] * size, 3, 2, reference=1))
        last = nodes.answer(round_of([0.9] * size, 4, 2, reference=1))
        expected = one.numbers["validation"].tolist()
        assert last.numbers["validation_reference"].tolist() == expected

    def test_missed_round_is_recomputed(self) -> None:
        """A node that only learns w^v and w^r from a catch-up reports the same numbers."""
        size = fleet().model.parameters
        first = [0.0] * size
        second = [0.5] * size
        third = [0.75] * size
        present = fleet()
        present.answer(round_of(first, 1, 0))
        present.answer(round_of(second, 2, 1))
        expected = present.answer(round_of(third, 3, 2, reference=1))
        w = np.array(second, np.float32)
        reference_w = np.array(first, np.float32)
        mean = MeanOfW.following(MeanOfW(reference_w, 1), w)
        caught_up = ValidationCatchUp(Candidate(2), w, Candidate(1), reference_w, mean)
        missed = CatchUp(w, (caught_up,))
        late = fleet().answer(round_of(third, 3, 2, reference=1, catch_up=missed))
        for name in FEATURE.reported(first=False).numbers:
            assert late.numbers[name].tolist() == expected.numbers[name].tolist()

    def test_false_reference_changes_digests(self) -> None:
        """Nodes of a masked sum would notice a w^r that only one of them received."""
        size = fleet().model.parameters
        w = np.full(size, 0.5, np.float32)
        third = [0.75] * size
        shared = []
        for value in (0.0, 1e30):
            own = np.full(size, value, np.float32)
            part = ValidationCatchUp(Candidate(2), w, Candidate(1), own, MeanOfW(w, 2))
            missed = CatchUp(w, (part,))
            late = fleet()
            late.receive(round_of(third, 3, 2, reference=1, catch_up=missed))
            shared.append([each.tobytes() for each in late.common])
        assert len(shared[0]) == len(shared[1])
        assert shared[0][:-1] == shared[1][:-1]
        assert shared[0][-1] != shared[1][-1]

    def test_mean_of_w_is_a_candidate(self) -> None:
        """It has the loss of the mean of both w, as a node reports it for such a w."""
        size = fleet().model.parameters
        nodes = fleet()
        nodes.answer(round_of([0.0] * size, 1, 0))
        both = nodes.answer(round_of([0.5] * size, 2, 1))
        halfway = fleet().answer(round_of([0.25] * size, 1, 0))
        expected = halfway.numbers["validation"].tolist()
        assert both.numbers["validation_mean"].tolist() == expected

    def test_mean_is_followed_when_not_due(self) -> None:
        size = fleet().model.parameters
        every = fleet()
        seldom = fleet()
        for number, value in enumerate((0.0, 0.9, 0.3), start=1):
            message = round_of([value] * size, number, 1)
            last = every.answer(message)
            part = ValidationPart(number != 2, Candidate(1), Candidate(1), number)
            late = seldom.answer(replace(message, parts=(part,)))
        for name in ("validation_mean", "validation_best"):
            assert late.numbers[name].tolist() == last.numbers[name].tolist()

    def test_mean_starts_again(self) -> None:
        size = fleet().model.parameters
        nodes = fleet()
        nodes.answer(round_of([0.0] * size, 1, 0))
        message = round_of([0.5] * size, 2, 1)
        part = ValidationPart(True, Candidate(1), Candidate(1), 1)
        report = nodes.answer(replace(message, parts=(part,)))
        mean = report.numbers["validation_mean"].tolist()
        assert mean == report.numbers["validation"].tolist()

    def test_weights_count_all_rows(self) -> None:
        report = fleet().answer(round_of([0.0] * fleet().model.parameters, 1, 0))
        assert report.sizes.tolist() == [100, 20, 180]


LEDGER = Ledger.open(Budget({"time": 10.0}), Costs(np.ones(1), np.zeros(1)))


def result_of(
    number: int, training: float | None, validation: float, **others: float
) -> RoundResult:
    """A round of one node whose w^v has a validation loss of 1, with an error of 0.01.

    Args:
      number: of the round.
      training, validation: losses of w(t₀).
      others: further numbers to report.
    """
    numbers = {
        "data": 1.0,
        "validated": 1.0,
        "validation": validation,
        "validation_mean": validation,
        "validation_best": 1.0,
        "validation_reference": 1.0,
        "validation_variance": 0.0001,
        "validation_mean_variance": 0.0001,
        "validation_reference_variance": 0.0001,
        "validation_cost": 0.0,
        **others,
    }
    if training is not None:
        numbers["losses"] = training
    names = tuple(numbers)
    row = np.array([list(numbers.values())])
    sums = Sums(number, 1, (), np.zeros(1, np.int64), names, row, {})
    w = np.zeros(1, np.float32)
    return RoundResult(
        round_of([0.0], number, 1),
        sums,
        start=w,
        combined=w,
        mean=w,
        w=w,
        slowdown=1.0,
        recover=False,
        capped=False,
        times=None,
        quantize=None,
        statistics=0,
        last=False,
        ledger=LEDGER,
        states={},
    )


class TestSecondStage:
    """The first round has training and validation losses of 1."""

    @staticmethod
    def after(training: float | None, validation: float, rounds: int) -> ValidationState:
        feature = Validation(second_stage=True)
        state = feature.first(np.zeros(1, np.float32))
        first = None if training is None else 1.0
        state = feature.after(state, result_of(1, first, 1.0))
        for number in range(2, rounds + 2):
            state = feature.after(state, result_of(number, training, validation))
        return state

    def test_overfitting_begins_it(self) -> None:
        assert not self.after(0.9, 1.1, OVERFITTED - 1).returns
        assert self.after(0.9, 1.1, OVERFITTED).returns

    def test_oscillation_does_not(self) -> None:
        """Training and validation losses rise together."""
        assert not self.after(1.1, 1.1, OVERFITTED + 3).returns

    def test_noise_does_not(self) -> None:
        """The validation loss rises by less than two standard errors."""
        assert not self.after(0.9, 1.015, OVERFITTED + 3).returns

    def test_unknown_training_loss_counts(self) -> None:
        assert self.after(None, 1.1, OVERFITTED).returns


class TestSignificantImprovement:
    """w^v falls from a loss of 2 in steps of 0.1, each with an error of 0.2."""

    @staticmethod
    def reference(error: float, rounds: int = 5) -> ValidationState:
        """Return the state after rounds.

        Args:
          error: standard error of the comparison of w^v with w^r.
          rounds: their number.
        """
        state = Validation().first(np.zeros(1, np.float32))
        for number in range(1, rounds + 1):
            others = {
                "validation_best": 2.0 - 0.1 * max(0, number - 2),
                "validation_variance": 0.04,
                "validation_mean_variance": 0.04,
                "validation_reference": 2.0,
                "validation_reference_variance": error**2,
            }
            result = result_of(number, 1.0, 2.0 - 0.1 * (number - 1), **others)
            state = Validation().after(state, result)
        return state

    def test_small_steps_add_up(self) -> None:
        """In round 5, w^v of round 4 is better than w^r by 0.3, more than two errors."""
        state = self.reference(error=0.11)
        assert state.reference.round == 4
        assert state.improved == 4

    def test_error_of_sum_counts(self) -> None:
        state = self.reference(error=0.2)
        assert state.best.round == 5
        assert state.reference.round == 1
        assert state.improved == 0


def noisy_shards(nodes: int = 4, rows: int = 120) -> list[tuple[Float32, Int64]]:
    """Few rows with many features: a model that fits them all does not generalise."""
    rng = np.random.default_rng(5)
    weights = 3.0 * (np.arange(40) < 3)
    made = []
    for _ in range(nodes):
        x = rng.normal(size=(rows, 40)).astype(np.float32)
        chance = 1 / (1 + np.exp(-x @ weights))
        made.append((x, (rng.random(rows) < chance).astype(np.int64)))
    return made


class TestRuns:
    def test_best_validated_w_is_returned(self) -> None:
        """The returned w has the lowest validation loss, computed here by hand."""
        shards_of_nodes = noisy_shards()
        result = fedbudget.train(
            shards=shards_of_nodes, model="softmax", budget="time=10s", costs="simulated"
        )
        known = [each.validation for each in result.rounds if each.validation is not None]
        assert result.validation_loss == pytest.approx(min(known), rel=1e-6)
        assert min(known) < known[-1]

        x = np.concatenate([each[0] for each in shards_of_nodes])
        y = np.concatenate([each[1] for each in shards_of_nodes])
        rows = np.split(np.arange(480), 4)
        share = 0.3  # 480 rows
        _, held_out = split(Shards.of(Table(x, y.astype(np.float32)), rows), share, seed=0)
        chosen = held_out.blocks.rows
        scores = result.model.predict_proba(x[chosen])
        by_hand = -np.log(scores[np.arange(len(chosen)), y[chosen]]).mean()
        assert result.validation_loss == pytest.approx(by_hand, rel=1e-4)

    def test_run_ends_when_validation_stalls(self) -> None:
        options = {
            "shards": noisy_shards(),
            "model": "softmax",
            "budget": "time=100s",
            "costs": "simulated",
        }
        early = fedbudget.train(**options)  # type: ignore[arg-type]
        assert early.stopped_by == "validation"
        assert early.spent["time"] < 50
        whole = fedbudget.train(**options, spend_all=True)  # type: ignore[arg-type]
        assert whole.stopped_by == "time"
        assert whole.spent["time"] > 98

    def test_more_budget_is_not_worse(self) -> None:
        losses = [
            fedbudget.train(
                shards=noisy_shards(),
                model="softmax",
                budget=f"time={seconds}s",
                costs="simulated",
            ).validation_loss
            for seconds in (5, 20, 80)
        ]
        known = [loss for loss in losses if loss is not None]
        assert len(known) == 3
        assert known == sorted(known, reverse=True)

    def test_extended_run_goes_on(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        data = tmp_path / "data"
        data.mkdir()
        for number, (x, y) in enumerate(noisy_shards()):
            np.savez(data / f"{number}.npz", x=x, y=y)
        first = fedbudget.train(
            dataset=str(data),
            test_share=0.0,
            budget="time=100s",
            costs="simulated",
            out=out,
        )
        assert first.stopped_by == "validation"
        more = fedbudget.train(resume=out, budget="time=+20s")
        assert len(more.rounds) > len(first.rounds) + 5
        assert more.validation_loss is not None
        assert first.validation_loss is not None
        assert more.validation_loss <= first.validation_loss

    def test_validation_costs_budget(self) -> None:
        """A round with validation costs 2m / (3 · mini-batch) updates more."""
        options = {
            "shards": noisy_shards(),
            "model": "softmax",
            "budget": "time=10s",
            "costs": "simulated",
            "tau": 5,
            "batch_size": 20,
        }
        plain = fedbudget.train(**options, validation=0)  # type: ignore[arg-type]
        checked = fedbudget.train(**options)  # type: ignore[arg-type]
        common = min(len(plain.rounds), len(checked.rounds)) - 2
        extra = [
            after.b["time"] - before.b["time"]
            for before, after in zip(
                plain.rounds[1:common], checked.rounds[1:common], strict=True
            )
        ]
        first = next(number for number, cost in enumerate(extra) if cost)
        update = checked.rounds[1 + first].c["time"]
        assert extra[first] == pytest.approx(2 * 36 / (3 * 20) * update)

    def test_until_loss_uses_validation(self) -> None:
        result = fedbudget.train(
            shards=noisy_shards(),
            model="softmax",
            budget="time=20s",
            costs="simulated",
            until="loss=0.6",
        )
        assert result.stopped_by == "target"
        assert result.rounds[-1].validation is not None
        assert result.rounds[-1].validation <= 0.6

    def test_half_of_nodes_absent(self) -> None:
        result = fedbudget.train(
            shards=noisy_shards(8),
            model="softmax",
            budget="time=10s",
            costs="simulated",
            participation=0.5,
        )
        assert result.validation_loss is not None
        assert result.validation_start is not None
        assert result.validation_loss < result.validation_start


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "paper", "validation": 0.2}, "trains on all samples"),
        ({"budget": "privacy=4", "validation": 0.2}, "does not work with budget privacy"),
    ],
)
def test_validation_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fedbudget.train(shards=noisy_shards(), **options)  # type: ignore[arg-type]


def test_share_is_between_bounds() -> None:
    state = FEATURE.first(np.zeros(3, np.float32))
    assert math.isnan(state.loss)
    with pytest.raises(ValueError, match="ends after"):
        replace(state, ends=0.0).require_possible(np.zeros(3, np.float32))
