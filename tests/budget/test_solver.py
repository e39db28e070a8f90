"""The choice between descent and Newton's method."""

import math
from dataclasses import replace

import pytest

from fedbudget.budget.solver import MOST_NUMBERS, LinearProblem, choose, descending
from fedbudget.launch.method import choose_solver
from fedbudget.models import KMeans, LinearRegression, Softmax
from fedbudget.settings.settings import Settings

SMALL = LinearProblem(
    outputs=1, inputs=10, quadratic=True, rows=500, batch=100, validates=False
)


def test_cost_by_hand() -> None:
    """5 passes: 5 (2 + 10/2) updates for derivatives; 65 numbers of 8 bytes."""
    assert SMALL.numbers == 65
    assert SMALL.curvature == 35
    extra = 34 + 10 * 520 / 6272
    assert SMALL.extra(10.0) == pytest.approx(extra)
    assert SMALL.solving(10.0) == pytest.approx((11 + extra) + (11 + 4))
    validated = replace(SMALL, validates=True)
    assert validated.solving(10.0) == pytest.approx((11 + extra) + 5 * (11 + 4))


def test_classes_count_without_last() -> None:
    """Three classes: 2 scores count, with 3 blocks of the Hessian."""
    problem = replace(SMALL, outputs=3, quadratic=False)
    assert problem.numbers == 20 + 20 * 21 // 2
    assert problem.curvature == pytest.approx(5 * (2 + 10 * 2 * 3 / 12))
    assert problem.rounds == (6, 1)


def test_small_problem_is_solved() -> None:
    choice = choose(SMALL)
    assert choice.newton
    assert "descent 1,000 or more" in choice.reason


@pytest.mark.parametrize(
    ("problem", "given", "reason"),
    [
        (replace(SMALL, rows=100_000), {}, "solving costs about as much as"),
        (replace(SMALL, inputs=300), {}, f"at most {MOST_NUMBERS:,} are sent"),
        (SMALL, {"updates": 20.0}, "the budget buys 20"),
        (SMALL, {"rounds": 1}, "it needs 2 rounds"),
        (
            replace(SMALL, inputs=100, quadratic=False, rows=100),
            {"exchange": 1000.0, "counts_bytes": True},
            "would send and receive",
        ),
    ],
)
def test_reasons_for_descent(
    problem: LinearProblem, given: dict[str, float], reason: str
) -> None:
    choice = choose(problem, **given)  # type: ignore[arg-type]
    assert not choice.newton
    assert reason in choice.reason


@pytest.mark.parametrize("rows", [10, 300, 10_000])
@pytest.mark.parametrize("inputs", [2, 30, 150])
@pytest.mark.parametrize("exchange", [0.1, 10.0, 1000.0])
def test_solving_is_cheaper_if_chosen(rows: int, inputs: int, exchange: float) -> None:
    problem = replace(SMALL, rows=rows, inputs=inputs)
    choice = choose(problem, exchange=exchange)
    assert choice.newton == (problem.solving(exchange) <= descending(exchange))
    dearer = replace(problem, rows=2 * rows, inputs=inputs + 1)
    assert dearer.solving(exchange) > problem.solving(exchange)


SETTINGS = Settings(model="linear", batch_size=50, validation=0.0, budget=("time=60s",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tau": 5}, "tau is 5"),
        ({"step_size": 0.1}, "step_size is 0.1"),
        ({"update": "fedadam"}, "update is fedadam"),
        ({"combine": "median"}, "combine is median"),
        ({"participation": 0.5}, "participation is 0.5"),
        ({"compress": "8-bit"}, "compress is 8-bit"),
        ({"budget": ("time=60s", "privacy=4")}, "the run is private"),
    ],
)
def test_options_that_need_descent(change: dict[str, object], reason: str) -> None:
    settings = replace(SETTINGS, **change)  # type: ignore[arg-type]
    choice = choose_solver(settings, LinearRegression(5), [100, 200])
    assert not choice.newton
    assert choice.reason == reason


def test_nodes_on_other_machines_need_mean() -> None:
    model = LinearRegression(5)
    alone = choose_solver(SETTINGS, model, [100, 200], network=True)
    assert (alone.newton, alone.reason) == (False, "combine is not given")
    trusted = replace(SETTINGS, combine="mean")
    assert choose_solver(trusted, model, [100, 200], network=True).newton


def test_choice_follows_model() -> None:
    assert choose_solver(SETTINGS, LinearRegression(5), [100]).newton
    assert choose_solver(SETTINGS, Softmax(5, 2), [100]).newton
    assert not choose_solver(SETTINGS, Softmax(784, 10), [100]).newton
    assert "kmeans" in choose_solver(SETTINGS, KMeans(5), [100]).reason
    assert math.isfinite(descending(0.0))
