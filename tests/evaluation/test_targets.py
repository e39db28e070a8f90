"""Parsing of targets, and the conditions for a reached target and for a plateau."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.errors import UserError
from fedbudget.evaluation.targets import (
    CERTAINTY,
    EVIDENCE,
    NOISE,
    MetricTarget,
    has_stalled,
    well_below,
)

numbers = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    "text", ["", "accuracy", "0.95", "=0.95", "loss=", "loss=low", "loss=nan", "rmse=inf"]
)
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"such as accuracy=0\.95"):
        MetricTarget.parse(text)


@pytest.mark.parametrize(
    "text", ["accuracy=95", "accuracy=0", "accuracy=-1", "auc=1.5", "f1=90"]
)
def test_shares_are_between_0_and_1(text: str) -> None:
    with pytest.raises(UserError, match="must be above 0 and at most 1"):
        MetricTarget.parse(text)


@given(numbers, numbers, numbers)
def test_custom_metric_starts_from_w0(first: float, value: float, later: float) -> None:
    """The side of w(0) has not reached the target; the target value and the other side
    have.
    """
    target = MetricTarget.parse(f"own={value!r}").from_side_of(first)
    assert target.reached_by(first) == (first == value)
    assert target.reached_by(value)
    if first != value:
        assert target.reached_by(later) == (
            np.sign(later - value) != np.sign(first - value)
        )


@pytest.mark.parametrize("text", ["f1=0.9", "balanced-accuracy=0.9", "auc=0.9", "r2=0.9"])
def test_scores_must_rise(text: str) -> None:
    target = MetricTarget.parse(text)
    assert target.metric == text.partition("=")[0].replace("-", "_")
    assert target.reached_by(0.95)
    assert not target.reached_by(0.85)


@pytest.mark.parametrize("name", ["loss", "rmse", "mae"])
def test_errors_must_fall(name: str) -> None:
    target = MetricTarget.parse(f"{name}=3.5")
    assert target.reached_by(3.4)
    assert not target.reached_by(3.6)


def test_r2_is_at_most_one() -> None:
    with pytest.raises(UserError, match="r2 is at most 1"):
        MetricTarget.parse("r2=1.1")


def test_nan_reaches_no_target() -> None:
    assert not any(
        MetricTarget.parse(text).reached_by(math.nan) for text in ("accuracy=0.1", "loss=9")
    )


class TestWellBelow:
    @given(st.lists(st.floats(0, 2), min_size=EVIDENCE, max_size=30), st.floats(0, 2))
    def test_mean_is_below_by_standard_errors(
        self, losses: list[float], target: float
    ) -> None:
        last = np.array(losses[-EVIDENCE:])
        error = np.sqrt(np.square(np.diff(losses[-NOISE:])).mean() / 2 / EVIDENCE)
        below = target - (last.mean() + CERTAINTY * error)
        if abs(below) > 1e-9:
            assert (well_below(target, losses) is not None) == (
                below > 0 and losses[-1] <= target
            )

    def test_needs_five_losses(self) -> None:
        assert well_below(1.0, [0.1] * (EVIDENCE - 1)) is None
        assert well_below(1.0, [0.1] * EVIDENCE) == pytest.approx(0.1)

    def test_noise_rarely_reaches_the_target(self) -> None:
        """The loss stays above the target by half its standard deviation for 200 rounds.
        Fewer than 10 of 100 runs stop; every run has single losses below the target.
        """
        rng = np.random.default_rng(0)
        runs = 0.315 + 0.03 * rng.normal(size=(100, 200))
        stopped = sum(
            any(well_below(0.3, run[: at + 1].tolist()) is not None for at in range(200))
            for run in runs
        )
        single = sum((run < 0.3).any() for run in runs)
        assert single == 100
        assert stopped < 10


class TestHasStalled:
    @given(st.lists(st.floats(0.1, 9), min_size=2, max_size=20), st.integers(1, 10))
    def test_needs_twice_the_patience(self, figures: list[float], patience: int) -> None:
        if len(figures) < 2 * patience:
            assert not has_stalled(figures, patience)

    @pytest.mark.parametrize(("share", "stalled"), [(0.005, True), (0.02, False)])
    def test_one_percent_is_an_improvement(self, share: float, stalled: bool) -> None:
        assert has_stalled([2.0] * 10 + [2.0 * (1 - share)] * 10, 10) == stalled

    def test_rounds_without_a_value_are_skipped(self) -> None:
        assert has_stalled([1.0, None, None, 1.0], 2)
        assert not has_stalled([None, None, None, 1.0], 2)
        assert not has_stalled([1.0, math.nan, math.nan, math.nan], 2)
