"""Overfitting is reported for losses that turn, and not for noise."""

from collections.abc import Callable

import numpy as np
import pytest

from fedbudget.evaluation.targets import overfitting
from fedbudget.runs.record import RoundRecord
from support.synthetic_runs import record


def simulated_records(
    test: Callable[[float], float], train: Callable[[float], float], noise: float, seed: int
) -> list[RoundRecord]:
    """Return 200 rounds with a test loss in every fourth.

    The losses are functions of the completed share of the run.
    """
    rng = np.random.default_rng(seed)

    def with_noise(value: float) -> float:
        return value * (1 + noise * rng.normal())

    return [
        record(
            at,
            loss=with_noise(train(at / 200)),
            test_loss=with_noise(test(at / 200)) if at % 4 == 1 else None,
        )
        for at in range(1, 201)
    ]


def falling(share: float) -> float:
    return 0.1 + 0.9 * float(np.exp(-5 * share))


def turning(share: float) -> float:
    """Lowest in the middle."""
    return 0.5 + (share - 0.5) ** 2


def flat(share: float) -> float:
    return 0.5


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_turn_is_detected(noise: float) -> None:
    for seed in range(10):
        report = overfitting(simulated_records(turning, falling, noise, seed))
        assert report is not None
        assert 60 <= report.round <= 140
        assert report.test_loss < 0.53 < 0.6 < report.final_test_loss


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize(
    ("test", "train"),
    [
        (falling, falling),
        (flat, falling),
        (turning, flat),
        (turning, turning),
        (flat, flat),
    ],
)
def test_noise_is_no_turn(
    test: Callable[[float], float], train: Callable[[float], float], noise: float
) -> None:
    assert [
        overfitting(simulated_records(test, train, noise, seed)) for seed in range(30)
    ] == [None] * 30


def test_few_evaluations_give_no_report() -> None:
    records = simulated_records(turning, falling, 0.0, 0)
    assert overfitting(records[:120]) is None  # too few evaluations after the lowest
    assert overfitting(records[:5]) is None
    assert overfitting([]) is None
