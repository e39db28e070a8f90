"""Targets as they are written, and what figures must be like to have reached one or to have
stalled.
"""

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
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(UserError, match=r"such as accuracy=0\.95"):
        MetricTarget.parse(text)


@pytest.mark.parametrize(
    "text", ["accuracy=95", "accuracy=0", "accuracy=-1", "auc=1.5", "f1=90"]
)
def test_accuracy_and_its_like_are_shares(text: str) -> None:
    with pytest.raises(UserError, match="is a share"):
        MetricTarget.parse(text)


@given(numbers, numbers, numbers)
def test_own_metric_comes_from_the_side_of_w0(
    first: float, value: float, later: float
) -> None:
    """w(0) has not reached it unless it is there, and whatever is beyond it, seen from
    there, has.
    """
    target = MetricTarget.parse(f"own={value!r}").from_side_of(first)
    assert target.reached_by(first) == (first == value)
    assert target.reached_by(value)
    if first != value:
        assert target.reached_by(later) == ((later - value) * (first - value) <= 0)


@pytest.mark.parametrize("text", ["f1=0.9", "balanced-accuracy=0.9", "auc=0.9", "r2=0.9"])
def test_what_is_better_when_there_is_more_of_it_rises(text: str) -> None:
    target = MetricTarget.parse(text)
    assert target.metric == text.partition("=")[0].replace("-", "_")
    assert target.reached_by(0.95)
    assert not target.reached_by(0.85)


@pytest.mark.parametrize("name", ["loss", "rmse", "mae"])
def test_errors_fall(name: str) -> None:
    target = MetricTarget.parse(f"{name}=3.5")
    assert target.reached_by(3.4)
    assert not target.reached_by(3.6)


def test_r2_cannot_be_more_than_one() -> None:
    with pytest.raises(UserError, match="r2 is at most 1"):
        MetricTarget.parse("r2=1.1")


def test_no_number_reaches_nothing() -> None:
    assert not any(
        MetricTarget.parse(text).reached_by(math.nan) for text in ("accuracy=0.1", "loss=9")
    )


class TestWellBelow:
    @given(st.lists(st.floats(0, 2), min_size=EVIDENCE, max_size=30), st.floats(0, 2))
    def test_mean_is_below_by_its_standard_errors(
        self, losses: list[float], target: float
    ) -> None:
        last = np.array(losses[-EVIDENCE:])
        error = np.sqrt(np.square(np.diff(losses[-NOISE:])).mean() / 2 / EVIDENCE)
        below = target - (last.mean() + CERTAINTY * error)
        if abs(below) > 1e-9:
            assert (well_below(target, losses) is not None) == (
                below > 0 and losses[-1] <= target
            )

    def test_needs_some_rounds(self) -> None:
        assert well_below(1.0, [0.1] * (EVIDENCE - 1)) is None
        assert well_below(1.0, [0.1] * EVIDENCE) == pytest.approx(0.1)

    def test_noise_seldom_fakes_it(self) -> None:
        """Of a loss that stays above the target by half of its noise, for 200 rounds: in
        less than one run of ten.
        """
        rng = np.random.default_rng(0)
        runs = 0.315 + 0.03 * rng.normal(size=(100, 200))
        fooled = sum(
            any(well_below(0.3, run[: at + 1].tolist()) is not None for at in range(200))
            for run in runs
        )
        alone = sum((run < 0.3).any() for run in runs)
        assert alone == 100
        assert fooled < 10


class TestStalling:
    @given(st.lists(st.floats(0.1, 9), min_size=2, max_size=20), st.integers(1, 10))
    def test_needs_two_stretches(self, figures: list[float], patience: int) -> None:
        if len(figures) < 2 * patience:
            assert not has_stalled(figures, patience)

    @pytest.mark.parametrize(("share", "stalled"), [(0.005, True), (0.02, False)])
    def test_a_hundredth_is_worth_mentioning(self, share: float, stalled: bool) -> None:
        assert has_stalled([2.0] * 10 + [2.0 * (1 - share)] * 10, 10) == stalled

    def test_rounds_without_a_figure_do_not_count(self) -> None:
        assert has_stalled([1.0, None, None, 1.0], 2)
        assert not has_stalled([None, None, None, 1.0], 2)
        assert not has_stalled([1.0, math.nan, math.nan, math.nan], 2)
