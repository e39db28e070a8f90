"""An attack: was this sample there? Nobody who sees all that a node sends can tell better
than is promised.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.noise import SecretNodeNoise
from fedbudget.models.builtin import LinearRegression
from fedbudget.protocol.aggregator import Outcome
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources.privacy import rho_of
from support.private import DELTA, sample_aggregator

EPSILON, RUNS = 2.0, 1000
TARGET = np.array([3.0, -40.0, 200.0], np.float32)  # a sample far from all others


def table(*, there: bool) -> Table:
    """Of the sample and of others, which the attacker knows: here, that they say nothing."""
    x = np.full((6, 3), np.nan, np.float32)
    if there:
        x[2] = TARGET
    return Table(x, np.full(6, 50.0, np.float32))


def evidence(*, there: bool) -> float:
    """What speaks for the sample, by the best test there is: along its own gradient, each
    release by its noise.
    """
    run = sample_aggregator({"time": 2.0, "privacy": EPSILON}, nodes=1, parameters=3, tau=1)
    fleet = Fleet(
        LinearRegression(3),
        Shards.whole(table(there=there)),
        batch=None,
        seed=0,
        noise=SecretNodeNoise(),
    )
    message: Broadcast | Outcome = run.start()
    found = 0.0
    while isinstance(message, Broadcast):
        report, private = fleet.answer(message), message.private
        assert private is not None
        sigma = math.sqrt(1 / (2 * private.rho))
        if report.length is not None:
            found += report.length[0] / 8 / sigma**2  # its length is beyond eight octaves
        else:
            assert report.w is not None
            noisy = (message.w - report.w[0]).astype(np.float64) / message.eta * 6
            found += float(noisy @ direction(message.w)) / private.clip / sigma**2
        message = run.receive(report, run.ledger.costs)
    return found


def direction(w: Float32) -> np.ndarray:
    """Of the sample's gradient at w."""
    gradient = (TARGET.astype(np.float64) @ w - 50.0) * TARGET.astype(np.float64)
    return np.asarray(gradient / np.linalg.norm(gradient))


@pytest.mark.slow
def test_a_sample_is_found_as_often_as_is_promised_and_no_more() -> None:
    with_it, without = (
        np.array([evidence(there=there) for _ in range(RUNS)]) for there in (True, False)
    )
    promised = math.sqrt(2 * rho_of(EPSILON, DELTA))
    spread = math.sqrt((with_it.var() + without.var()) / 2)
    assert (with_it.mean() - without.mean()) / spread == pytest.approx(
        promised, abs=4 * math.sqrt(2 / RUNS)
    )
    for threshold in np.quantile(without, [0.5, 0.8, 0.9, 0.95, 0.98]):
        false, right = (
            float((without > threshold).mean()),
            float((with_it > threshold).mean()),
        )
        chance = 3 * math.sqrt(0.25 / RUNS)
        exact = NormalDist().cdf(NormalDist().inv_cdf(false) + promised)
        assert right <= exact + chance
        assert right <= math.exp(EPSILON) * false + DELTA + chance
