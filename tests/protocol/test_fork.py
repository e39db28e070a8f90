"""Fleets that go back: from a round that came to nothing, and to rounds that are made
again.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Report
from support.methods import METHODS, bits, nodes
from support.problems import MODELS, converse, problem

every_way = pytest.mark.parametrize(
    ("name", "method", "batch"),
    [(name, "frugal", batch) for name in MODELS for batch in (None, 5)]
    + [
        ("svm", method, batch)
        for method in ("fixed", "paper", "astray")
        for batch in (None, 5)
    ],
)


def run(
    fleets: list[Fleet], name: str, method: str, present: list[list[int]]
) -> Iterator[tuple[Broadcast, Report, Aggregator]]:
    how = vars(METHODS[method]).copy()
    controller, eta = how.pop("controller"), how.pop("step_size")
    return converse(
        fleets,
        controller,
        eta=eta,
        rounds=9,
        w=problem(name, 12).start(1),
        present=present,
        **how,
    )


@every_way
@pytest.mark.parametrize("goes_on", ["the fork", "the fleet"])
@pytest.mark.parametrize("late", [[3], [3, 4], [1, 6]])
def test_a_node_whose_reports_are_discarded_is_as_one_that_was_absent(
    name: str, method: str, batch: int | None, goes_on: str, late: list[int]
) -> None:
    present = [[0, 1] if number in late else [0, 1, 2] for number in range(1, 10)]
    absent = [
        bits(report) for _, report, _ in run(nodes(name, batch), name, method, present)
    ]
    fleets, found, discarded = nodes(name, batch), [], 0
    before = fleets[2].fork()
    for broadcast, report, _ in run(fleets, name, method, present):
        found.append(bits(report))
        if broadcast.round in late:  # it heard of the round, and reported too late
            one, other = (
                (before, fleets[2])
                if goes_on == "the fork"
                else (fleets[2], fleets[2].fork())
            )
            other.answer(broadcast)
            fleets[2] = one
            discarded += 1
        before = fleets[2].fork()
    assert discarded == len(late)
    assert found == absent


@every_way
def test_a_round_that_is_made_again_gives_the_same_reports(
    name: str, method: str, batch: int | None
) -> None:
    fleets = nodes(name, batch)
    forks = [[fleet.fork() for fleet in fleets]]
    request: list[tuple[Broadcast, Any]] = []
    present = [[0, 1, 2], [0, 1, 2], [0, 2], [0, 1, 2], [1], [0, 1, 2]]
    for broadcast, report, _ in run(fleets, name, method, present):
        forks.append([fleet.fork() for fleet in fleets])
        request.append((broadcast, bits(report)))
        for back in range(
            1, min(3, broadcast.round) + 1
        ):  # each fork is used several times, so is forked once more
            again = [fleet.fork() for fleet in forks[broadcast.round - back]]
            for earlier, as_it_was in request[-back:]:
                here = (
                    present[earlier.round - 1]
                    if earlier.round <= len(present)
                    else [0, 1, 2]
                )
                repeated = Report.merge([again[node].answer(earlier) for node in here])
                assert bits(repeated) == as_it_was
    assert len(request) == 10


def test_model_and_data_are_shared() -> None:
    fleet = nodes("svm", 5)[0]
    twin = fleet.fork()
    assert twin.model is fleet.model
    assert twin.shards is fleet.shards
