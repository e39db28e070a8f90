"""Personal models: what a node chooses, and what its figures are."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedbudget.arrays import Float32, Float64
from fedbudget.data.shards import Shards, Table
from fedbudget.models.builtin import LinearRegression, Softmax
from fedbudget.models.minimise import minimise
from fedbudget.protocol.messages import VOTES, PersonalRound, Report, VoteReport, VoteRound
from fedbudget.protocol.personal import (
    FEWEST_ROWS,
    Personal,
    Sites,
    alone,
    default_prior,
    personalise,
    prior_of,
    prior_of_report,
    vote_report_of,
)
from fedbudget.protocol.site_figures import figures_of, report_of
from fedbudget.protocol.site_frames import frame_of

FEATURES = 4


def classes(rows: int, seed: int, weights: Sequence[float]) -> Table:
    """Two classes that a linear score separates, with noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    y = (x @ np.array(weights) + 0.5 * rng.standard_normal(rows) > 0).astype(np.float32)
    return Table(x, y)


def softmax_w(weights: Sequence[float]) -> Float32:
    """Parameters of softmax regression whose second class has this score."""
    w = np.zeros((2, FEATURES + 1), np.float32)
    w[1, :-1] = weights
    return w.ravel()


def personal(
    table: Table, w: Float32, model: Softmax | LinearRegression | None = None
) -> Personal:
    """Return the personal model of one node that held out every fourth row."""
    rows = np.arange(len(table))
    trained = Shards.of(table, [rows[rows % 4 > 0]])
    (found,) = personalise(
        model or Softmax(FEATURES, 2), Shards.whole(table), trained, w, seed=1
    )
    return found


def test_right_model_stays_global() -> None:
    """A global model that fits the node is hardly corrected."""
    figures = personal(classes(200, 1, (4, 0, 0, 0)), softmax_w((8, 0, 0, 0))).figures
    assert figures.weights[2] < 0.001
    assert figures.correction is not None
    assert abs(figures.correction.value) <= 0.02
    assert sum(figures.weights) == pytest.approx(1)


def test_wrong_model_is_replaced() -> None:
    """A node whose labels are the other way round does not use the global model."""
    figures = personal(classes(200, 1, (-4, 0, 0, 0)), softmax_w((8, 0, 0, 0))).figures
    assert figures.weights[0] < 0.01
    assert figures.shared is not None
    assert figures.personal is not None
    assert figures.shared.value < 0.2
    assert figures.personal.value > 0.8
    assert figures.correction is not None
    assert figures.correction.value > 5 * figures.correction.error
    assert not figures.served


def test_figures_are_of_held_out_rows() -> None:
    figures = personal(classes(200, 2, (4, 0, 0, 0)), softmax_w((8, 0, 0, 0))).figures
    assert (figures.rows, figures.measured, figures.held_out) == (200, 50, True)


@pytest.mark.parametrize(
    ("table", "kept"),
    [
        (classes(FEWEST_ROWS - 1, 1, (4, 0, 0, 0)), "few rows"),
        (Table(classes(60, 1, (4, 0, 0, 0)).x, np.ones(60, np.float32)), "one class"),
        (classes(1, 1, (4, 0, 0, 0)), "few rows"),
    ],
    ids=["few rows", "one class", "one row"],
)
def test_node_keeps_the_global_model(table: Table, kept: str) -> None:
    w = softmax_w((-8, 0, 0, 0))
    shards = Shards.whole(table)
    (found,) = personalise(Softmax(FEATURES, 2), shards, shards, w, seed=1)
    assert found.figures.kept == kept
    assert found.w.tobytes() == w.tobytes()
    assert found.figures.alone is None


def test_constant_feature_is_not_corrected() -> None:
    """The shift of the output absorbs the difference, not the coefficient."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((300, FEATURES)).astype(np.float32)
    x[:, 0] = 0.25
    y = (x[:, 1] + 3 + 0.1 * rng.standard_normal(300)).astype(np.float32)
    table = Table(x, y, labels=False)
    w = np.array([0.5, 1, 0, 0], np.float32)
    found = personal(table, w, LinearRegression(FEATURES))
    assert 0 <= found.w[0] <= w[0]  # `alone` has 0, corrections have that of w
    np.testing.assert_allclose(x @ found.w + found.shift, x[:, 1] + 3, atol=0.05)


class TestPrior:
    """The prior of the candidates, from the votes of all nodes."""

    def test_clear_votes_are_counted(self) -> None:
        """Nodes that exclude all but one candidate count like rows of a table."""
        votes = np.full((3, len(VOTES)), -1e9)
        votes[0, 0] = votes[1, 2] = votes[2, 2] = 0
        prior = prior_of(votes)
        start = default_prior(len(VOTES))
        assert prior[0] == pytest.approx((start[0] + 1) / 4)
        assert prior[2] == pytest.approx((start[2] + 2) / 4)
        assert prior[5] == pytest.approx(start[5] / 4)

    def test_equal_votes_leave_the_default(self) -> None:
        np.testing.assert_allclose(
            prior_of(np.zeros((4, len(VOTES)))), default_prior(len(VOTES))
        )

    def test_one_node_has_one_vote(self) -> None:
        """However large its votes are, a node moves the prior by at most 1/(nodes + 1)."""
        votes = np.random.default_rng(1).normal(-5, 3, (9, len(VOTES)))
        votes[:, 7] = -1e9
        votes[8, 7] = 1e300
        assert prior_of(votes)[7] == pytest.approx((default_prior(len(VOTES))[7] + 1) / 10)

    def test_nodes_without_votes_do_not_count(self) -> None:
        votes = np.array([[0, -1.0, 2], [np.nan] * 3, [0, 1, -4]])
        assert prior_of(votes) == prior_of(votes[[0, 2]])
        assert prior_of(votes[1:2]) == ()

    def test_is_the_likeliest(self) -> None:
        """No other shares give the votes, with the default as one more, more likelihood."""
        rng = np.random.default_rng(3)
        votes = rng.normal(0, 2, (12, 4))
        start = default_prior(4)

        def log_likelihood(prior: Float64) -> float:
            return float(np.log(np.exp(votes) @ prior).sum() + start @ np.log(prior))

        best = np.array(prior_of(votes))
        assert best.sum() == pytest.approx(1)
        for other in rng.dirichlet(np.ones(4), 300):
            assert log_likelihood(best) >= log_likelihood(0.9 * best + 0.1 * other)


def test_similar_nodes_help_a_small_one() -> None:
    """A node with 12 rows trusts its own rows more if other nodes gain from theirs."""
    parts = [classes(200, seed, (-4, 0, 0, 0)) for seed in range(6)]
    small = classes(12, 9, (-4, 0, 0, 0))
    table = Table(
        np.concatenate([small.x, *(each.x for each in parts)]),
        np.concatenate([small.y, *(each.y for each in parts)]),
    )
    rows = np.split(np.arange(len(table)), [12 + 200 * node for node in range(6)])
    model = Softmax(FEATURES, 2)
    w = softmax_w((0.5, 0, 0, 0))
    shards = Shards.of(table, rows)
    together = personalise(model, shards, shards, w, seed=1)[0]
    single = Sites(model, Shards.of(table, rows[:1]), shards, w, 1).personal()[0]
    assert together.figures.weights[0] < single.figures.weights[0]


@pytest.mark.parametrize("rows", [8, 40])
def test_frame_has_the_same_optimum(rows: int) -> None:
    """With few rows, the frame has fewer parameters and the optimum of all of them."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 20)).astype(np.float32)
    x[:, 3] = 2.0
    y = rng.integers(0, 3, rows).astype(np.float32)
    table = Table(x, y)
    model = Softmax(20, 3)
    w = rng.standard_normal(model.parameters).astype(np.float32)
    frame = frame_of(model, table, w)
    assert frame.model.parameters == 3 * (min(rows, 19) + 1)
    strengths = np.array([2.0 / rows])
    shards = Shards.whole(frame.table)
    fitted = minimise(frame.model, shards, frame.into(w)[None], strengths, 300)
    own, shift = frame.out_of(fitted[0], w, 1.0)
    assert shift == 0
    _, gradient = model.sums(own, x, y)
    missing = (gradient / rows + strengths[0] * (own - w)).reshape(3, -1)
    missing[:, 3] = 0  # a constant feature has no correction
    np.testing.assert_allclose(missing, 0, atol=2e-3)


class TestAlone:
    def test_noise_free_line(self) -> None:
        """With many rows the penalty is negligible: least squares with an intercept."""
        rng = np.random.default_rng(5)
        x = rng.standard_normal((400, FEATURES)).astype(np.float32)
        y = (x @ np.array([1, -2, 0, 0.5]) + 3).astype(np.float32)
        table = Table(x, y, labels=False)
        ((w, shift),) = alone(LinearRegression(FEATURES), Shards.whole(table), seed=1)
        np.testing.assert_allclose(w, [1, -2, 0, 0.5], atol=0.02)
        assert shift == pytest.approx(3, abs=0.02)

    def test_nodes_do_not_influence_each_other(self) -> None:
        table = classes(300, 6, (4, 0, 0, 0))
        rows = np.arange(300)
        model = Softmax(FEATURES, 2)
        both = alone(model, Shards.of(table, [rows[:100], rows[100:]]), seed=1)
        (single,) = alone(model, Shards.of(table, [rows[:100]]), seed=1)
        assert both[0][0].tobytes() == single[0].tobytes()
        assert both[1][0].tobytes() != single[0].tobytes()

    def test_few_rows_of_one_class(self) -> None:
        """A node with three rows of one class predicts this class."""
        table = Table(classes(3, 1, (4, 0, 0, 0)).x, np.ones(3, np.float32))
        ((w, _),) = alone(Softmax(FEATURES, 2), Shards.whole(table), seed=1)
        weights = w.reshape(2, -1)
        scores = table.x @ weights[:, :-1].T + weights[:, -1]
        assert (scores[:, 1] > scores[:, 0]).all()


def test_identical_shards_share_a_model() -> None:
    table = classes(80, 1, (4, 0, 0, 0))
    rows = np.arange(80)
    shards = Shards.of(table, [rows, rows, rows[:40]])
    first, second, third = personalise(
        Softmax(FEATURES, 2), shards, shards, softmax_w((1, 0, 0, 0)), seed=1
    )
    assert first is second
    assert third.figures.rows == 40


class TestReport:
    def test_figures_survive(self) -> None:
        w = softmax_w((1, 0, 0, 0))
        found = personal(classes(100, 1, (4, 0, 0, 0)), w)
        request = PersonalRound(round=3, w=w)
        report = report_of(request, np.array([7]), np.array([100]), [found.figures])
        report.require_answers(request)
        assert figures_of(report) == {7: found.figures}

    def test_kept_votes_do_not_count(self) -> None:
        """The prior depends on the nodes that vote, and not on the order of reports."""
        request = VoteRound(round=3, w=softmax_w((1, 0, 0, 0)))
        votes = np.random.default_rng(2).normal(0, 2, (3, len(VOTES)))
        sizes = np.array([10])
        parts: list[Report] = [
            vote_report_of(request, np.array([node]), sizes, votes[node : node + 1])
            for node in range(3)
        ]
        kept = vote_report_of(request, np.array([7]), sizes, None)
        kept.require_answers(request)
        merged = Report.merge([parts[2], kept, parts[0], parts[1]])
        assert isinstance(merged, VoteReport)
        assert prior_of_report(merged) == prior_of(votes)

    def test_kept_figures_are_missing(self) -> None:
        request = PersonalRound(round=3, w=softmax_w((1, 0, 0, 0)))
        report = report_of(request, np.array([7]), np.array([100]), ())
        report.require_answers(request)
        assert figures_of(report) == {}

    @pytest.mark.parametrize(
        ("name", "value"),
        [("metric", 17), ("metric", -1), ("rows", math.inf), ("shared", math.nan)],
    )
    def test_impossible_figures_are_ignored(self, name: str, value: float) -> None:
        w = softmax_w((1, 0, 0, 0))
        found = personal(classes(100, 1, (4, 0, 0, 0)), w)
        request = PersonalRound(round=3, w=w)
        report = report_of(request, np.array([7]), np.array([100]), [found.figures])
        report.numbers[name][0] = value
        assert figures_of(report) == {}
