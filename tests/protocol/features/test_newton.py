"""Newton's method, compared with closed forms and with scikit-learn."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget.arrays import Float64
from fedbudget.budget.control import Reason
from fedbudget.errors import UserError
from fedbudget.forecasts.forecast import next_forecast
from fedbudget.models.curvature import packed
from fedbudget.protocol.features.newton import (
    SOLVED,
    Newton,
    NewtonPart,
    NewtonState,
    solve,
)
from fedbudget.result import Result
from fedbudget.runs.folder import Run

pytestmark = pytest.mark.filterwarnings("ignore:features are on very different scales")

Shard = tuple[Any, Any]


def regression(seed: int, *, nodes: int = 4, scale: float = 1.0) -> list[Shard]:
    """Shards of a linear problem; nodes differ in size and in their features."""
    rng = np.random.default_rng(seed)
    slopes = rng.normal(size=5)
    shards = []
    for node in range(nodes):
        x = rng.normal(0.3 * node, 1.0, size=(20 + 15 * node, 5))
        y = x @ slopes + rng.normal(size=len(x))
        shards.append((scale * x, y))
    return shards


def classes(seed: int, *, nodes: int = 4, number: int = 3) -> list[Shard]:
    """Shards of a noisy classification."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(4, number))
    shards = []
    for _ in range(nodes):
        x = rng.normal(size=(60, 4))
        noise = rng.gumbel(size=(60, number))
        shards.append((x, (x @ weights + noise).argmax(axis=1)))
    return shards


def solved(shards: Sequence[Shard], model: str, **options: Any) -> Result:
    """Run Newton's method, without validation unless it is asked for."""
    given = {"validation": 0.0, "budget": "time=60s", "costs": "simulated", **options}
    return fedbudget.train(model=model, shards=shards, method="newton", **given)


def pooled(shards: Sequence[Shard]) -> tuple[Float64, Any]:
    x = np.concatenate([np.asarray(x, np.float32) for x, _ in shards]).astype(np.float64)
    return x, np.concatenate([y for _, y in shards])


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_linear_regression_takes_one_exchange(scale: float) -> None:
    """The normal equations, also with features of a huge scale."""
    shards = regression(0, scale=scale)
    result = solved(shards, "linear")
    x, y = pooled(shards)
    expected = np.linalg.lstsq(x, y.astype(np.float32), rcond=None)[0]
    np.testing.assert_allclose(result.model.w, expected, rtol=1e-4)
    assert [record.reason for record in result.rounds] == [Reason.NEWTON, Reason.FINAL]
    assert result.stopped_by == SOLVED


def test_columns_of_different_scales() -> None:
    shards = [(x * 10.0 ** np.array([-5, 0, 5, 2, -2]), y) for x, y in regression(1)]
    result = solved(shards, "linear")
    x, y = pooled(shards)
    best = 0.5 * np.square(y - x @ np.linalg.lstsq(x, y, rcond=None)[0]).mean()
    assert result.loss == pytest.approx(best, rel=1e-4)


def test_singular_hessian() -> None:
    """A repeated column and a column of zeros: the shortest solution."""
    shards = [(np.column_stack([x, x[:, 0], 0 * x[:, 0]]), y) for x, y in regression(2)]
    result = solved(shards, "linear")
    x, y = pooled(shards)
    expected = np.linalg.lstsq(x, y, rcond=None)[0]
    assert result.loss == pytest.approx(0.5 * np.square(y - x @ expected).mean(), rel=1e-5)
    assert result.model.w[0] == pytest.approx(result.model.w[5], abs=1e-4)
    assert result.model.w[6] == 0


def test_softmax_equals_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    shards = classes(0)
    result = solved(shards, "softmax")
    x, y = pooled(shards)
    best = linear_model.LogisticRegression(C=1e9, tol=1e-10, max_iter=10_000).fit(x, y)
    shares = best.predict_proba(x)[np.arange(len(y)), y]
    assert result.loss == pytest.approx(-np.log(shares).mean(), rel=1e-5)
    assert len(result.rounds) <= 9


def test_ridges_fall() -> None:
    """Four ridges, from strong to weak: the training loss falls."""
    shards = regression(3, nodes=5)
    result = solved(shards, "linear", validation=0.2)
    records = [each for each in result.rounds if each.reason == Reason.CANDIDATE]
    ridges = [(record.extra or {})["ridge"] for record in records]
    assert len(ridges) == 4
    assert ridges == sorted(ridges, reverse=True)
    assert ridges[-1] == pytest.approx(0.25 * 5 / sum(len(y) for _, y in shards))
    losses = [record.loss for record in result.rounds]
    assert losses == sorted(losses, reverse=True)


def test_svm_reaches_its_optimum() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(5)
    x = rng.normal(size=(300, 6))
    y = np.where(x @ rng.normal(size=6) + rng.normal(size=300) > 0, 1, 0)
    shards = [(x[part], y[part]) for part in np.array_split(np.arange(300), 5)]
    result = solved(shards, "svm")
    labels = np.where(y > 0, 1.0, -1.0)

    def loss(w: Float64) -> float:
        slack = np.maximum(0, 1 - labels * (x @ w))
        return float(0.5 * np.square(slack).mean() + 0.05 * w @ w)

    best = min(loss(w) for w in (optimize.minimize(loss, np.zeros(6)).x,))
    labels = -labels  # whichever class counts as +1
    best = min(best, optimize.minimize(loss, np.zeros(6)).fun)
    assert result.loss == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("number", [2, 4])
def test_class_missing_at_node(number: int) -> None:
    shards = classes(1, number=number)
    x, y = shards[0]
    shards[0] = (x[y > 0], y[y > 0])
    result = solved(shards, "softmax")
    assert result.stopped_by == SOLVED
    losses = [record.loss for record in result.rounds]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(losses))


def test_class_without_samples() -> None:
    """Its bias could fall for ever; the run ends once that gains nothing."""
    result = solved(classes(2), "softmax", classes=("0", "1", "2", "3"))
    assert result.stopped_by == SOLVED
    assert len(result.rounds) < 25
    assert np.isfinite(result.model.w).all()


def test_shards_of_one_row() -> None:
    x, y = pooled(regression(4))
    result = solved([(x[[at]], y[[at]]) for at in range(40)], "linear")
    best = np.linalg.lstsq(x[:40], y[:40], rcond=None)[0]
    np.testing.assert_allclose(result.model.w, best, rtol=1e-4)


def test_separable_data_end() -> None:
    """The optimum is at infinity: the loss is almost 0 when the run ends."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(100, 3))
    y = (x[:, 0] > 0).astype(int)
    result = solved([(x[:50], y[:50]), (x[50:], y[50:])], "softmax")
    assert result.stopped_by == SOLVED
    assert result.loss < 1e-4
    assert np.isfinite(result.model.w).all()


def test_candidates_equal_scikit_learn() -> None:
    """Their training losses are those of ridge regression in units of each column."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    shards = regression(3, nodes=5)
    feature = Newton(1, 5, bias=False, quadratic=True)
    x, y = pooled(shards)
    squares = x.T @ x / len(y)
    state = NewtonState(
        base=np.zeros(5, np.float32),
        gradient=-x.T @ y / len(y),
        hessian=packed(squares),
        first_hessian=packed(squares),
        path=(0.3,),
    )
    units = np.sqrt(np.diag(squares))
    ridge = linear_model.Ridge(alpha=0.3 * len(y), fit_intercept=False).fit(x / units, y)
    step, fall = feature.step(state)
    np.testing.assert_allclose(step, ridge.coef_ / units, rtol=1e-8)
    errors = y - x @ step
    assert fall == pytest.approx(0.5 * (np.square(y) - np.square(errors)).mean())


@pytest.mark.parametrize("seed", range(30))
def test_no_round_starts_far_above_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, 30))
    number = int(rng.integers(2, 5))
    shards = []
    for _ in range(3):
        x = rng.normal(size=(rows, 6)) * 10.0 ** rng.uniform(-3, 3, 6)
        y = np.append(rng.integers(0, number, rows - 1), number - 1)
        shards.append((x, y))
    result = solved(shards, "softmax", validation=None if seed % 2 else 0.0)
    losses = [record.loss for record in result.rounds]
    assert max(losses) <= 10 * losses[0]
    best = [record.best_loss for record in result.rounds]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(best))


def test_budget_of_few_rounds_is_kept() -> None:
    result = solved(classes(3), "softmax", validation=0.2, budget="time=0.9s")
    assert result.spent["time"] <= 0.9
    assert result.loss < result.rounds[0].loss


def test_number_of_rounds_is_kept() -> None:
    result = solved(classes(3), "softmax", rounds=2)
    assert [record.reason for record in result.rounds] == [
        *[Reason.NEWTON] * 2,
        Reason.FINAL,
    ]
    assert result.stopped_by == "rounds"


def test_curvature_pass_is_charged() -> None:
    """In local updates, by the ratio of work: here 30 rows in batches of 10, d = 5."""
    x, y = pooled(regression(7))
    shards = [(x[:30], y[:30]), (x[30:60], y[30:60])]
    result = solved(shards, "linear", batch_size=10)
    plain = fedbudget.train(
        model="linear",
        shards=shards,
        budget="time=60s",
        costs="simulated",
        rounds=2,
        tau=1,
        step_size=0.01,
        batch_size=10,
        validation=0.0,
    )
    work = 3 * (2 + 5 / 2) - 1
    transmission = (0.131604348 / 0.013015156) * 8 * (5 + 15) / 6272
    first, usual = result.rounds[0], plain.rounds[0]
    assert first.c == usual.c
    extra = (first.b["time"] - usual.b["time"]) / first.c["time"]
    assert extra == pytest.approx(work + transmission)


def test_bytes_are_those_of_numbers() -> None:
    """20 numbers of 64 bits and two losses, in each of 4 reports."""
    result = solved(regression(8), "linear", budget=["time=60s", "bytes=1MB"])
    first, final = result.rounds
    assert first.b["bytes"] - final.b["bytes"] == 4 * 8 * 20


def test_explain_compares_solvers(tmp_path: Path) -> None:
    shards = regression(9)
    solved(shards, "linear", out=tmp_path / "solved")
    summary = Run.open(tmp_path / "solved").summary or {}
    assert summary["solver"].startswith("Newton's method: solving costs about as much as")
    fedbudget.train(
        model="linear",
        shards=shards,
        budget="time=60s",
        costs="simulated",
        rounds=3,
        tau=2,
        out=tmp_path / "descended",
    )
    summary = Run.open(tmp_path / "descended").summary or {}
    assert summary["solver"] == "descent: tau is 2"


def test_converged_run_forecasts_no_change() -> None:
    shards = [(x * 10.0 ** np.array([0, -1, -2, -3]), y) for x, y in classes(4)]
    result = solved(shards, "softmax", validation=0.2)
    assert result.stopped_by == SOLVED
    forecast = next_forecast(result.rounds, result.budget, vars(result)).loss
    assert forecast is not None
    assert {forecast.low, forecast.median, forecast.high} == {result.validation_loss}


def test_solution_of_flat_directions() -> None:
    matrix = np.diag([4.0, 0.0, 1e-8])
    np.testing.assert_allclose(
        solve(matrix, np.array([8.0, 0.0, 1e-8])), [2, 0, 1], rtol=1e-12
    )
    assert np.isnan(solve(np.full((2, 2), np.inf), np.ones(2))).all()


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="extra cost"):
        NewtonPart(math.nan).require_possible()
    with pytest.raises(ValueError, match="Newton step"):
        NewtonState(share=2.0).require_possible(np.zeros(3, np.float32))
    wrong = NewtonState(gradient=np.zeros(2), hessian=np.zeros(2))
    with pytest.raises(ValueError, match="different lengths"):
        wrong.require_possible(np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 3}, "method newton has no tau"),
        ({"update": "fedavgm"}, "method newton has no update"),
        ({"participation": 0.5}, "participation must be 1"),
        ({"compress": "8-bit"}, "compress must be none"),
        ({"combine": "median"}, "combine must be mean"),
        ({"budget": ("time=9s", "privacy=4")}, "method must be accelerated"),
        ({"engine": "network"}, "if you trust all nodes"),
        ({"engine": "network", "secure_aggregation": True}, "does not work with secure"),
    ],
)
def test_refuses_what_it_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        solved(regression(0), "linear", **options)


def test_other_models_are_refused() -> None:
    with pytest.raises(UserError, match="not kmeans"):
        solved([(x, None) for x, _ in regression(0)], "kmeans")
