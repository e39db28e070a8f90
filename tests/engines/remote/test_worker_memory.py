"""What a node of a large model holds: counted in vectors of as many numbers as the model
has parameters.
"""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.remote import worker as worker_module
from fedbudget.engines.remote.messages import RoundRequest, Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.task import Task, agree
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import Broadcast, Report
from support.methods import bits
from support.networked import METHODS, RUN
from support.problems import CHEAP

LARGE, ROUNDS = 300_000, 8


def shards(parameters: int) -> list[NodeData]:
    """Of two nodes, each with two samples."""
    x = np.random.default_rng(0).integers(0, 255, (4, parameters)).astype(np.uint8)
    dataset = Dataset("wide", Part(x, np.array([0, 1, 1, 0])), classes=("no", "yes"))
    return [NodeData(dataset, [np.arange(2)]), NodeData(dataset, [np.arange(2, 4)])]


def task(method: str, data: list[NodeData], parameters: int) -> Task:
    return Task(
        "svm",
        parameters,
        None,
        7,
        {},
        "none",
        8,
        agree([each.samples() for each in data]),
        METHODS[method].request,
    )


def broadcasts(method: str, parameters: int) -> tuple[list[Broadcast], list[Report]]:
    """Of a run with two nodes, and the first node's reports."""
    data = shards(parameters)
    fleets = [
        each.fleet(task(method, data, parameters), [node]) for node, each in enumerate(data)
    ]
    ours = Aggregator(
        np.zeros(parameters, np.float32),
        method=METHODS[method],
        budget=Budget({"time": 1e6}),
        expected=CHEAP,
    )
    sent, reports = [], []
    message: Any = ours.start()
    for _ in range(ROUNDS):
        both = [fleet.answer(message) for fleet in fleets]
        sent.append(message)
        reports.append(both[0])
        message = ours.receive(Report.merge(both), CHEAP)
    return sent, reports


def as_sent(broadcast: Broadcast) -> Broadcast:
    """With vectors of its own, and without what is for others."""

    def copy(vector: Float32 | None) -> Float32 | None:
        return None if vector is None else vector.copy()

    return replace(
        broadcast, w=broadcast.w.copy(), mean=copy(broadcast.mean), catch_up=None
    )


def worker(method: str, parameters: int) -> Worker:
    data = shards(parameters)
    work = Worker(data[0])
    work.start(Welcome(RUN, task(method, data, parameters), (0,)))
    return work


@pytest.mark.parametrize("method", ["fixed", "frugal", "accelerated"])
@pytest.mark.parametrize("ahead", [0, 4])
def test_what_is_let_go_is_made_again_to_the_bit(
    method: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "rounds_ahead", lambda parameters: ahead)
    sent, reports = broadcasts(method, 50)
    work = worker(method, 50)
    for broadcast, report in zip(sent, reports, strict=True):
        for _ in range(2):  # as after a report that was not counted
            answer = work.answer(RoundRequest(as_sent(broadcast), broadcast.round - 1))
            assert bits(answer.report) == bits(report)


def test_one_that_missed_rounds_or_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it learned is not of its last round then, and is kept."""
    sent, _ = broadcasts("accelerated", 50)
    missing = [
        replace(sent[0]),
        sent[1],
        replace(sent[4], eta=1e38),
        replace(sent[5], catch_up=None),
        sent[7],
    ]

    def reports() -> list[Report]:
        work = worker("accelerated", 50)
        rounds = [0, *(each.round for each in missing)]
        return [
            work.answer(RoundRequest(each, before)).report
            for before, each in zip(rounds, missing, strict=False)
        ]

    expected = reports()
    assert not np.isfinite(expected[2].w).all()  # type: ignore[arg-type]
    monkeypatch.setattr(worker_module, "rounds_ahead", lambda parameters: 0)
    assert bits(reports()) == bits(expected)


def test_how_many_vectors_a_node_holds() -> None:
    sent, _ = broadcasts("accelerated", LARGE)
    work = worker("accelerated", LARGE)
    tracemalloc.start()
    try:
        held, most = [], []
        for each in sent:
            broadcast = as_sent(each)
            tracemalloc.reset_peak()
            report = work.answer(RoundRequest(broadcast, broadcast.round - 1)).report
            del broadcast, report
            now, peak = tracemalloc.get_traced_memory()
            held.append(now / (4 * LARGE))
            most.append(peak / (4 * LARGE))
    finally:
        tracemalloc.stop()
    # Four of each of three rounds: w, w_i, c and c - c_i; and the w before the first, and
    # of each a w^f, at most.
    assert max(held) < 16.5
    assert (
        max(most) < 30
    )  # with what the model itself needs, which computes with both samples as floating-point numbers
