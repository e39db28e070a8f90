"""CPU seconds: as counted, and as simulated."""

import numpy as np

from fedbudget.resources import RESOURCES
from fedbudget.resources.kinds import SGD, SimulatedTime
from fedbudget.resources.resource import Cost, Metering
from support.usage import usage

TIME = Cost(0.5, 2.0)


def test_counted_cpu_is_split_like_time() -> None:
    meter = RESOURCES["cpu"].meter(Metering())
    assert (meter.source, meter.read(usage(), TIME)) == ("measured", Cost(0.75, 1.0))


def test_simulated_nodes_are_busy_while_they_update() -> None:
    meter = RESOURCES["cpu"].meter(Metering(SimulatedTime(SGD, np.random.default_rng(0))))
    assert (meter.source, meter.read(usage(), TIME)) == ("simulated", Cost(4 * 0.5, 0.0))
