"""Overfitting is said of losses that turn, and not of noise."""

from collections.abc import Callable

import numpy as np
import pytest

from fedbudget.evaluation.targets import overfitting
from fedbudget.runs.record import RoundRecord
from support.made_runs import record


def run(
    test: Callable[[float], float], train: Callable[[float], float], noise: float, seed: int
) -> list[RoundRecord]:
    """200 rounds, of which every fourth is tested; losses are functions of the share that
    is over.
    """
    rng = np.random.default_rng(seed)

    def noisy(value: float) -> float:
        return value * (1 + noise * rng.normal())

    return [
        record(
            at,
            loss=noisy(train(at / 200)),
            test_loss=noisy(test(at / 200)) if at % 4 == 1 else None,
        )
        for at in range(1, 201)
    ]


def falling(share: float) -> float:
    return 0.1 + 0.9 * float(np.exp(-5 * share))


def turning(share: float) -> float:
    """The least is in the middle."""
    return 0.5 + (share - 0.5) ** 2


def flat(share: float) -> float:
    return 0.5


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_a_turn_is_found(noise: float) -> None:
    for seed in range(10):
        found = overfitting(run(turning, falling, noise, seed))
        assert found is not None
        assert 60 <= found.round <= 140
        assert found.test_loss < 0.53 < 0.6 < found.final_test_loss


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
def test_no_turn_is_found_in_noise(
    test: Callable[[float], float], train: Callable[[float], float], noise: float
) -> None:
    assert [overfitting(run(test, train, noise, seed)) for seed in range(30)] == [None] * 30


def test_few_looks_say_nothing() -> None:
    records = run(turning, falling, 0.0, 0)
    assert overfitting(records[:120]) is None  # some looks after the least, but not enough
    assert overfitting(records[:5]) is None
    assert overfitting([]) is None
