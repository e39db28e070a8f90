"""What an evaluation took is told apart from what the round took."""

from dataclasses import replace

import pytest

from fedbudget.engines.remote.round import RoundCosts
from fedbudget.resources.counters import Snapshot
from fedbudget.resources.resource import Reading
from support.usage import node_costs

OWN = Snapshot({"time": 9.0, "cpu": 0.7})
NODES = [
    replace(
        node_costs(0.1, 1.0, cpu=(0.2, 2.0)),
        evaluation={"time": Reading(0, 3.0), "cpu": Reading(0, 1.5)},
    ),
    replace(
        node_costs(0.3, 1.0, cpu=(0.2, 2.0)),
        evaluation={"time": Reading(0, 0.5), "cpu": Reading(0, 0.25)},
    ),
    node_costs(0.2, 1.0, cpu=(0.2, 2.0)),
]


def test_time_is_of_the_slowest_and_cpu_of_all() -> None:
    took = RoundCosts(NODES, OWN, 1000, 300)
    usual, evaluation = took.usage(4), took.evaluation_usage()
    assert took.evaluated
    assert (usual.seconds, evaluation.seconds) == (6.0, 3.0)
    assert (usual.wire_bytes, evaluation.wire_bytes) == (700, 300)
    assert usual.readings["cpu"].whole == pytest.approx(0.7 + 3 * 2.0)
    assert evaluation.readings["cpu"].whole == pytest.approx(1.75)
    assert evaluation.step_seconds == 0
    assert (usual.nodes, evaluation.nodes) == (3, 2)


def test_a_node_of_the_aggregators_own_process() -> None:
    """Its processor time is in what the aggregator's process has counted."""
    took = RoundCosts([replace(NODES[1], here=True)], OWN, 100, 10)
    assert took.usage(1).readings["cpu"].whole == pytest.approx(0.7 - 0.25)


def test_without_an_evaluation_nothing_is_taken_off() -> None:
    took = RoundCosts([NODES[2]], OWN, 100)
    assert not took.evaluated
    assert took.usage(1).seconds == 9.0


def test_an_evaluation_took_no_longer_than_the_round() -> None:
    took = RoundCosts([NODES[0]], Snapshot({"time": 2.0, "cpu": 0.1}), 100)
    assert (took.usage(1).seconds, took.evaluation_usage().seconds) == (0.0, 2.0)
