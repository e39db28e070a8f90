"""Reports that are summed where the nodes are: an aggregator that sees only sums goes the
same way to the last bit.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.control import AdaptiveTau
from fedbudget.data.shards import Shards
from fedbudget.protocol.aggregator import Outcome
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, PeerError, Report
from fedbudget.protocol.sums import ReportsHere, SummedReports, Sums, Vectors, branches
from support.hand_made import ONE, make
from support.methods import METHODS, bits, new_aggregator, read, simulated_time
from support.problems import problem

NODES = 11


class Parties:
    """The reports of several parties, who tell only sums."""

    def __init__(self, parties: Sequence[ReportsHere]) -> None:
        self._parties = parties
        self.sums = Sums.merge([party.sums for party in parties])

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        return np.concatenate(
            [party.distance_sums(vectors, mean) for party in self._parties]
        )


def fleet(name: str, batch: int | None, first: int, end: int) -> Fleet:
    case = problem(name, 12)
    parts = np.array_split(np.argsort(case.x[:, 0]), NODES)[first:end]
    return Fleet(
        case.model,
        Shards.of(case.table, parts),
        batch=batch,
        seed=9,
        numbers=range(first, end),
    )


def rounds(
    name: str, method: str, batch: int | None, cuts: Sequence[int] | None
) -> list[object]:
    """A run with costs that are simulated; with `cuts`, of parties with the nodes between
    them.
    """
    aggregator, time = new_aggregator(name, method), simulated_time()
    fleets = [fleet(name, batch, first, end) for first, end in pairwise(cuts or (0, NODES))]
    edges = [branches(first, end)[:-1] for first, end in pairwise(cuts or (0, NODES))]
    broadcast: Broadcast | Outcome = aggregator.start()
    found: list[object] = []
    while isinstance(broadcast, Broadcast):
        reports = [own.answer(broadcast) for own in fleets]
        costs = read(time, broadcast)
        if cuts is None:
            broadcast = aggregator.receive(reports[0], costs)
        else:
            parties = [
                ReportsHere(report, begins)
                for report, begins in zip(reports, edges, strict=True)
            ]
            broadcast = aggregator.receive(Parties(parties), costs)
        found.append(bits([aggregator.last, broadcast]))
    return found


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("method", METHODS)
def test_sums_of_any_parties_give_the_same_run_to_the_last_bit(
    method: str, batch: int | None
) -> None:
    whole = rounds("svm", method, batch, None)
    assert len(whole) > 5
    for cuts in ((0, 11), (0, 4, 11), (0, 1, 5, 6, 11)):
        assert rounds("svm", method, batch, cuts) == whole


@pytest.mark.parametrize("cuts", [range(12), (0, 1, 5, 6, 11)])
def test_reports_added_up_in_any_order_give_the_same_run_to_the_last_bit(
    cuts: Sequence[int],
) -> None:
    """Nodes of their own, and fleets of several."""
    whole = rounds("svm", "accelerated", 3, None)
    aggregator, time, random = (
        new_aggregator("svm", "accelerated"),
        simulated_time(),
        np.random.default_rng(1),
    )
    assert not aggregator.method.needs_reports
    fleets = [fleet("svm", 3, first, end) for first, end in pairwise(cuts)]
    broadcast: Broadcast | Outcome = aggregator.start()
    found: list[object] = []
    while isinstance(broadcast, Broadcast):
        summed = SummedReports(broadcast)
        for number in random.permutation(len(fleets)):
            summed.add(fleets[number].answer(broadcast))
        broadcast = aggregator.receive(summed, read(time, broadcast))
        found.append(bits([aggregator.last, broadcast]))
    assert found == whole


def report(broadcast: Broadcast, w: Float32, nodes: Int64) -> Report:
    losses = 1 + nodes / 6
    gradients = None if broadcast.round == 1 else w + 1
    rho = None if broadcast.round == 1 else np.where(nodes % 3 == 0, np.nan, losses)
    return Report(broadcast.round, nodes, nodes + 1, losses, losses, w, rho, rho, gradients)


@pytest.mark.parametrize("broken", [(), (2,), (0, 5, 6), tuple(range(7))])
def test_nodes_that_diverged_are_left_out_of_sums_as_they_are_of_reports(
    broken: tuple[int, ...],
) -> None:
    nodes = np.arange(7)
    w = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    w[list(broken)] = np.nan
    one, other = make(controller=AdaptiveTau()), make(controller=AdaptiveTau())
    for _ in range(2):
        broadcast = one.pending or one.start()
        if other.pending is None:
            other.start()
        answer = one.receive(report(broadcast, w, nodes), ONE)
        parts = [
            ReportsHere(
                report(broadcast, w[first:end], nodes[first:end]), branches(first, end)[:-1]
            )
            for first, end in ((0, 3), (3, 7))
        ]
        assert bits(other.receive(Parties(parts), ONE)) == bits(answer)
        assert bits(other.last) == bits(one.last)
        assert one.last is not None
        assert one.last.left_out == broken


def test_sums_of_another_round_are_refused() -> None:
    aggregator = make()
    broadcast = aggregator.start()
    here = ReportsHere(report(broadcast, np.ones((2, 2), np.float32), np.arange(2)))
    aggregator.receive(here, ONE)
    with pytest.raises(PeerError, match="round 1 in round 2"):
        aggregator.receive(here, ONE)
