"""Nodes that answer together: with sums, with some of them absent, and after all but a copy
of their memory is lost.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from fedbudget.arrays import Flags
from fedbudget.data.shards import Shards
from fedbudget.engines.in_process import NodeGroup
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, CatchUp, Drift, Report, Request
from fedbudget.protocol.sums import ReportsHere, Sums
from fedbudget.resources import RESOURCES
from fedbudget.resources.counters import ResourceCounters
from support.methods import bits
from support.problems import problem

CASE = problem("svm", 12)
FIRST, END = 3, 10
COUNTERS = ResourceCounters.of([RESOURCES["time"], RESOURCES["cpu"]])


def fleets(*, alone: bool) -> list[Fleet]:
    """Seven nodes, 3 to 9, as one fleet or each alone."""
    parts = np.array_split(np.arange(len(CASE.table)), END - FIRST)
    groups = [[node] for node in range(FIRST, END)] if alone else [list(range(FIRST, END))]
    return [
        Fleet(
            CASE.model,
            Shards.of(CASE.table, [parts[node - FIRST] for node in group]),
            batch=3,
            seed=1,
            numbers=group,
        )
        for group in groups
    ]


def broadcast(number: int) -> Broadcast:
    w = CASE.start(number)
    catch_up = None if number == 1 else CatchUp(w, w)
    return Broadcast(
        number,
        w,
        2,
        0.05,
        Request(estimate=True, drift=True),
        best=False,
        stop=False,
        drift=Drift(True, 1.0),
        catch_up=catch_up,
    )


def here(number: int) -> Flags:
    return np.random.default_rng(number).random(END - FIRST) < 0.4


def without_clocks(answer: tuple[object, object]) -> object:
    sums, costs = answer
    return bits([sums, replace(costs, readings={})])  # type: ignore[type-var]


def test_sums_are_those_of_the_reports() -> None:
    party, other = NodeGroup(fleets(alone=True), COUNTERS), fleets(alone=True)
    met = np.zeros(END - FIRST, dtype=bool)
    for number in range(1, 6):
        present = here(number)
        sums, effort = party.answer(broadcast(number), present)
        reports = [
            fleet.answer(broadcast(number))
            for fleet, is_here in zip(other, present, strict=True)
            if is_here
        ]
        met |= present
        expected = ReportsHere(Report.merge(reports)).sums
        assert isinstance(sums, Sums)
        assert bits(sums.totals) == bits(expected.totals)
        assert sums.w is not None
        assert expected.w is not None
        assert sums.mean(sums.w).tobytes() == expected.mean(expected.w).tobytes()
        assert sums.nodes == effort.nodes == len(reports)
        assert sums.all_data == sum(
            len(fleet.shards.rows_of(0))
            for fleet, was in zip(other, met, strict=True)
            if was
        )


def test_nobody_here_is_no_sums_and_no_effort_and_they_are_told_the_news_later() -> None:
    party, nobody = (
        NodeGroup(fleets(alone=True), COUNTERS),
        np.zeros(END - FIRST, dtype=bool),
    )
    _, first = party.answer(broadcast(1), ~nobody)
    sums, effort = party.answer(broadcast(2), nobody)
    assert sums is None
    assert (effort.nodes, effort.wire_bytes) == (0, 0)
    _, after = party.answer(broadcast(3), ~nobody)
    _, informed = party.answer(broadcast(4), ~nobody)
    vectors = 2 * 4 * CASE.model.parameters + 8  # w^f and c
    assert after.wire_bytes - informed.wire_bytes == (END - FIRST) * vectors
    assert first.nodes == after.nodes == END - FIRST


@pytest.mark.parametrize("alone", [True, False])
def test_a_party_made_again_goes_on_from_a_copy_of_its_memory(alone: bool) -> None:
    party = NodeGroup(fleets(alone=alone), COUNTERS)
    for number in range(1, 8):
        message, present = broadcast(number), here(number) if alone else None
        again = NodeGroup(fleets(alone=alone), COUNTERS)
        again.recall(pickle.loads(pickle.dumps(party.memory())))
        answer = without_clocks(party.answer(message, present))
        assert without_clocks(again.answer(message, present)) == answer
        assert bits(again.distance_sums("w", message.w)) == bits(
            party.distance_sums("w", message.w)
        )


def test_a_trial_leaves_no_trace() -> None:
    party, other = (
        NodeGroup(fleets(alone=False), COUNTERS),
        NodeGroup(fleets(alone=False), COUNTERS),
    )
    costs = party.trial(broadcast(1))
    assert costs.nodes == END - FIRST
    assert without_clocks(party.answer(broadcast(1))) == without_clocks(
        other.answer(broadcast(1))
    )
