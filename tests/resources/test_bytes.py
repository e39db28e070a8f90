"""Bytes: of the aggregation alone; known by counting where they are sent."""

import numpy as np
import pytest

from fedbudget.resources import RESOURCES
from fedbudget.resources.kinds import SGD, SimulatedTime
from fedbudget.resources.resource import Cost, Metering, Source
from support.usage import usage

SIMULATED = SimulatedTime(SGD, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("metering", "source"),
    [
        (Metering(), "declared"),
        (Metering(network=True), "measured"),
        (Metering(SIMULATED), "declared"),
        (Metering(SIMULATED, network=True), "declared"),
    ],
)
def test_bytes_belong_to_the_aggregation_alone(metering: Metering, source: Source) -> None:
    meter = RESOURCES["bytes"].meter(metering)
    assert meter.read(usage(), Cost(0.5, 2.0)) == Cost(0.0, 2_000_000)
    assert meter.source == source
