"""What a round used: what cannot be is refused, and how a trial is made into a round."""

import pytest

from fedbudget.resources import most_within
from fedbudget.resources.resource import CombinedReading, NodeCosts, Reading
from support.usage import usage


@pytest.mark.parametrize("metered", [-1, 5])
def test_no_more_nodes_metered_than_there_are(metered: int) -> None:
    with pytest.raises(ValueError, match="nodes of a round with 4"):
        usage(energy=CombinedReading(1.0, 2.0, nodes=metered))


def test_trial_as_a_round_of_fewer_nodes() -> None:
    found = usage().as_round_of(3, 500)
    assert (found.nodes, found.wire_bytes, found.readings["cpu"].nodes) == (3, 500, 3)
    assert (found.step_seconds, found.seconds) == (0.5, 7.0)


def test_delay_adds_to_the_whole_alone() -> None:
    found = usage().delayed(2.0)
    assert (found.step_seconds, found.seconds) == (0.5, 9.0)
    assert found.readings["cpu"] == usage().readings["cpu"]


def test_no_more_time_than_there_was() -> None:
    """A node that reports 1e9 seconds is charged with the time on the aggregator's clock."""
    costs = NodeCosts({"time": Reading(1e9, 2e9), "cpu": Reading(3.0, 4.0)})
    held = costs.within(most_within(6.0), 3)
    assert (held.step_seconds, held.seconds, held.readings["cpu"]) == (
        2.0,
        6.0,
        Reading(3.0, 4.0),
    )
    assert held.within(most_within(7.0), 3) == held
