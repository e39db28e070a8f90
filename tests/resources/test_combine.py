"""How nodes combine, by hand: the slowest, all added up, every machine once."""

import math

from fedbudget.resources.resource import (
    CombinedReading,
    NodeCosts,
    Reading,
    estimated,
    once_per_host,
    slowest,
    total,
)


def nodes(
    *readings: Reading | None, here: int | None = None, count: int = 2
) -> list[NodeCosts]:
    """Groups of nodes with a reading of "x" each, or none."""
    return [
        NodeCosts(
            {} if reading is None else {"x": reading}, nodes=count, here=number == here
        )
        for number, reading in enumerate(readings)
    ]


PAIR = (Reading(1.0, 8.0), Reading(3.0, 5.0))


def test_slowest_takes_the_largest_of_each() -> None:
    assert slowest("x", nodes(*PAIR), None) == CombinedReading(3.0, 8.0, nodes=4)


def test_slowest_takes_the_whole_from_the_aggregator() -> None:
    """Its clock has the waiting and the messages in it, which no node sees."""
    assert slowest("x", nodes(*PAIR), 9.5) == CombinedReading(3.0, 9.5, nodes=4)


def test_total_adds_the_aggregators_own() -> None:
    assert total("x", nodes(*PAIR), None) == CombinedReading(4.0, 13.0, nodes=4)
    assert total("x", nodes(*PAIR), 2.0) == CombinedReading(4.0, 15.0, nodes=4)


def test_total_counts_the_aggregators_process_once() -> None:
    """A node in that process has its updates counted, and its whole round is in the
    aggregator's reading.
    """
    assert total("x", nodes(*PAIR, here=0), 10.0) == CombinedReading(4.0, 15.0, nodes=4)


def test_a_time_that_is_not_told_leaves_the_slowest_unknown() -> None:
    assert math.isnan(slowest("x", nodes(PAIR[0], None), 1.0).step)


def test_what_one_does_not_tell_is_thought_to_be_as_much_as_others_use() -> None:
    told = total("x", nodes(PAIR[0]), None)
    found = total("x", nodes(PAIR[0], None), None)
    assert told is not None
    assert found is not None
    assert (found.step, found.whole) == (2 * told.step, 2 * told.whole)


def test_read_by_nobody_is_none() -> None:
    for combine in (total, once_per_host):
        assert combine("x", nodes(None, None), None) is None


def test_nobody_took_part() -> None:
    """Then a round has the time that passed, and what the aggregator's process used."""
    assert (
        slowest("x", [], 2.5) == total("x", [], 2.5) == CombinedReading(0.0, 2.5, nodes=0)
    )


def test_nodes_on_one_machine_count_once() -> None:
    readings = (Reading(1.0, 8.0, "a"), Reading(3.0, 5.0, "a"), Reading(0.5, 2.0, "b"))
    assert once_per_host("x", nodes(*readings), 99.0) == CombinedReading(3.5, 10.0, nodes=6)


def test_machines_without_a_counter_are_left_out() -> None:
    readings = (Reading(1.0, 8.0, "a"), None)
    assert once_per_host("x", nodes(*readings), None) == CombinedReading(1.0, 8.0, nodes=2)


def test_estimate_and_counter_of_one_machine_count_once() -> None:
    readings = (Reading(1.0, 10.0, "a"), Reading(3.0, 12.0, estimated("a")))
    assert once_per_host("x", nodes(*readings), None) == CombinedReading(
        3.0, 12.0, nodes=4, estimated=True
    )
