"""A node's worker: memory of earlier rounds, costs of a round, and memory use."""

import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.budget.budget import Budget
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.remote import worker as worker_module
from fedbudget.engines.remote.messages import RoundRequest, Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.task import Task, agree, rounds_ahead
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.compression import decode
from fedbudget.protocol.features.drift import DriftPart
from fedbudget.protocol.messages import (
    Broadcast,
    Kind,
    LocalError,
    PeerError,
    Report,
    RoundPart,
    TrainRound,
)
from fedbudget.protocol.state import Outcome
from fedbudget.resources.rapl import Rapl
from fedbudget.resources.resource import Reading
from support.messages import settings_of
from support.methods import bits
from support.networked import (
    METHODS,
    RUN,
    PausableWorker,
    aggregator,
    network,
    node_data,
    task,
    without_network,
)
from support.problems import CHEAP


def started_worker(
    method: str = "frugal",
    compress: Kind = "none",
    readings: tuple[str, ...] = (),
    **how: Any,
) -> Worker:
    work = Worker(node_data(0), **how)
    work.start(
        Welcome(RUN, replace(task(method, compress, batch=5), readings=readings), (0,))
    )
    return work


def broadcasts(method: str = "frugal", rounds: int = 6) -> list[TrainRound]:
    """The broadcasts of a run with this node alone."""
    ours, fleet = aggregator(method), node_data(0).fleet(task(method, batch=5), [0])
    broadcast: Broadcast | Outcome = ours.start()
    result = []
    for _ in range(rounds):
        assert isinstance(broadcast, TrainRound)
        result.append(broadcast)
        broadcast = ours.receive(fleet.answer(broadcast), CHEAP)
    return result


def answers(work: Worker, broadcast: list[TrainRound]) -> list[Report]:
    return [work.answer(RoundRequest(each, each.round - 1)).report for each in broadcast]


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
def test_repeated_round_has_same_bits(method: str) -> None:
    broadcast = broadcasts(method)
    work = started_worker(method)
    first = answers(work, broadcast)
    fleet = node_data(0).fleet(task(method, batch=5), [0])
    assert bits(first) == bits([fleet.answer(each) for each in broadcast])
    assert work.rounds == (1, 2, 3, 4, 5, 6)
    for back in (6, 5, 6, 2, 4, 1):
        again = [
            work.answer(RoundRequest(each, each.round - 1)).report
            for each in broadcast[back - 1 :]
        ]
        assert bits(again) == bits(first[back - 1 :])


def test_uncounted_round_leaves_no_trace() -> None:
    broadcast = broadcasts()
    work, other = started_worker(), started_worker()
    answers(work, broadcast[:3])
    answers(other, broadcast[:3])
    elsewhere = replace(broadcast[3], w=broadcast[3].w + np.float32(1), tau=2, effective=2)
    work.answer(RoundRequest(elsewhere, 3))
    assert work.rounds == (1, 2, 3, 4)
    assert bits(answers(work, broadcast[3:])) == bits(answers(other, broadcast[3:]))


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_memory_covers_uncheckpointed_rounds(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "rounds_ahead", lambda parameters: ahead)
    broadcast, work = broadcasts(rounds=9), started_worker()
    answers(work, broadcast[:8])
    # Rounds that are not on disk, the one before, and the last one.
    first = 8 - ahead - 2
    assert list(work.rounds) == list(range(first, 9))
    work.answer(RoundRequest(broadcast[first], first))
    assert list(work.rounds) == [first, first + 1]
    for number in (first - 1, first + 2, 9):
        with pytest.raises(PeerError, match=f"no memory of round {number}, only of"):
            work.answer(RoundRequest(replace(broadcast[8], round=10), number))
    work.answer(RoundRequest(broadcast[5], 0))  # as for a new node
    assert list(work.rounds) == [6]


def test_large_models_keep_fewer_rounds() -> None:
    assert rounds_ahead(784) > rounds_ahead(1_000_000) >= 0


def test_other_run_clears_memory() -> None:
    broadcast, work = broadcasts(), started_worker()
    answers(work, broadcast[:2])
    work.start(Welcome(RUN, task("frugal", batch=5), (0,)))
    assert (work.rounds, work.run) == ((1, 2), RUN)
    work.start(Welcome("another", task("frugal", batch=5), (0,)))
    assert (work.rounds, work.run) == ((), "another")


def test_trial_leaves_no_trace() -> None:
    broadcast, work = broadcasts(), started_worker()
    work.start(Welcome(RUN, task("frugal", batch=5), (0,)))
    assert bits(answers(work, broadcast)) == bits(answers(started_worker(), broadcast))


def test_work_requires_a_welcome() -> None:
    with pytest.raises(LocalError):
        Worker(node_data(0)).answer(RoundRequest(broadcasts()[0], 0))
    with pytest.raises(PeerError, match="numbers for 2 nodes instead of 1"):
        Worker(node_data(0)).start(Welcome(RUN, task(), (0, 1)))


# Compression.


@pytest.mark.parametrize("kind", ["16-bit", "8-bit"])
def test_compression_error_is_fed_back(kind: Kind) -> None:
    """The next report contains it, also if the round is repeated."""
    work, exact = started_worker("fixed", kind), started_worker("fixed")
    lost = np.zeros((1, 6), np.float32)
    for each in broadcasts("fixed"):
        request = RoundRequest(replace(each, compress=kind), each.round - 1)
        report = work.answer(request).report
        sent = work.encode(report)
        assert work.encode(work.answer(request).report) == sent
        plain = exact.answer(RoundRequest(each, each.round - 1)).report
        intended = plain.vectors["w"] - each.w + lost
        decoded = decode(kind, sent, 6).reshape(1, 6)
        lost = intended - decoded
        assert 0 < np.abs(lost).max() <= np.abs(intended).max() / 200
        # The node continues with the decoded vector.
        assert np.array_equal(report.vectors["w"], each.w + decoded)


# Costs.


def test_pace_lengthens_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = time.sleep

    def recording(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", recording)
    work = started_worker(pace=4.0)
    for broadcast in broadcasts(rounds=3):
        costs = work.answer(RoundRequest(broadcast, broadcast.round - 1)).costs
        # It sleeps three times as long as it computes, so a step takes four times as long.
        assert costs.step_seconds * broadcast.tau >= slept[-1] * 4 / 3
        assert costs.seconds >= costs.step_seconds * broadcast.tau
    assert len(slept) == 3


def powercap(folder: Path) -> Path:
    zone = folder / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("1000000000\n")
    (zone / "energy_uj").write_text("5000000\n")
    return zone / "energy_uj"


def test_energy_includes_waiting(tmp_path: Path) -> None:
    """Energy is read from one report to the next."""
    counter = powercap(tmp_path)
    reader = Rapl.find(tmp_path)
    assert reader is not None
    work, broadcast = (
        started_worker(readings=("energy",), readers={"energy": reader}),
        broadcasts(),
    )
    costs = work.answer(RoundRequest(broadcast[0], 0)).costs
    assert costs.readings["energy"] == Reading(0.0, 0.0, reader.host)
    counter.write_text("7500000\n")  # while the node waits
    costs = work.answer(RoundRequest(broadcast[1], 1)).costs
    assert costs.readings["energy"] == Reading(0.0, 2.5, reader.host)


def test_failing_counter_is_not_reported(tmp_path: Path) -> None:
    counter = powercap(tmp_path)
    work, broadcast = (
        started_worker(readings=("energy",), readers={"energy": Rapl.find(tmp_path)}),
        broadcasts(),
    )
    counter.unlink()
    costs = work.answer(RoundRequest(broadcast[0], 0)).costs
    assert list(costs.readings) == ["time"]
    assert costs.seconds > 0
    counter.write_text("6000000\n")  # the counter works again
    work.answer(RoundRequest(broadcast[1], 1))
    counter.write_text("8000000\n")
    assert work.answer(RoundRequest(broadcast[2], 2)).costs.readings["energy"].whole == 2.0


@pytest.mark.parametrize(
    ("requested", "read"),
    [
        ((), ["time"]),
        (("cpu", "time"), ["time", "cpu"]),
        (("bytes", "money", "cpu", "unknown"), ["time", "cpu"]),
    ],
)
def test_only_requested_counters_are_read(
    requested: tuple[str, ...], read: list[str]
) -> None:
    """Resources without a counter are skipped."""
    costs = (
        started_worker(readings=requested).answer(RoundRequest(broadcasts()[0], 0)).costs
    )
    assert list(costs.readings) == read


# With a server.


class RecordingWork(PausableWorker):
    def __init__(self, node: int) -> None:
        super().__init__(node_data(node))
        self.request: list[Any] = []

    def answer(self, request: Any) -> Any:
        self.request.append(request.broadcast.w)
        return super().answer(request)


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
@pytest.mark.parametrize(
    ("kind", "saved"), [("none", 0), ("16-bit", 24 - (12 + 4)), ("8-bit", 24 - (6 + 4))]
)
def test_compressed_w_is_identical_everywhere(method: str, kind: Kind, saved: int) -> None:
    """The server counts the saved bytes."""
    works = [RecordingWork(node) for node in range(3)]
    with network(method, kind, batch=5) as net:
        for node, work in enumerate(works):
            net.join(node, worker=work)
        net.start(3)
        for _ in range(5):
            net.round()
        for work in works:
            assert bits(work.request) == bits(net.sent)
        # Vectors of six numbers: w in five reports and in four broadcasts. The paper's
        # method adds gradients in four reports, and acceleration adds the mean in four
        # broadcasts.
        vectors = 5 + (4 if method in ("paper", "accelerated") else 0) + 4
        assert net.server.counters.saved == 3 * vectors * saved
        last = net.sent[-1].astype(np.float64)
    exact = without_network([[0, 1, 2]] * 5, method, batch=5)[-2]
    if method == "fixed":
        assert (
            np.abs(last - exact).max()
            < {"none": 1e-30, "16-bit": 1e-3, "8-bit": 2e-2}[kind] * np.abs(exact).max()
        )


def test_restored_worker_has_same_bits() -> None:
    broadcast = broadcasts()
    first, alone = started_worker(), answers(started_worker(), broadcast)
    answers(first, broadcast[:4])
    second = Worker(node_data(0))
    second.accept(Welcome(RUN, task("frugal", "none", batch=5), (0,)))
    second.recall(first.memories(2))
    assert second.rounds == (3, 4)
    # From the older memory.
    assert bits(answers(second, broadcast[3:])) == bits(alone[3:])
    with pytest.raises(PeerError, match="no memory of round 2, only of"):
        second.answer(RoundRequest(broadcast[2], 2))


def test_warm_up_leaves_no_trace() -> None:
    broadcast = broadcasts()
    work, alone = started_worker(), answers(started_worker(), broadcast)
    for each, expected in zip(broadcast, alone, strict=True):
        work.warm_up(RoundRequest(each, each.round - 1))
        assert bits(work.answer(RoundRequest(each, each.round - 1)).report) == bits(
            expected
        )


LARGE, ROUNDS = 300_000, 8


def wide_shards(parameters: int) -> list[NodeData]:
    """The data of two nodes with two samples each."""
    x = np.random.default_rng(0).integers(0, 255, (4, parameters)).astype(np.uint8)
    dataset = Dataset("wide", Part(x, np.array([0, 1, 1, 0])), classes=("no", "yes"))
    return [NodeData(dataset, [np.arange(2)]), NodeData(dataset, [np.arange(2, 4)])]


def wide_task(method: str, data: list[NodeData], parameters: int) -> Task:
    return Task(
        "svm",
        parameters,
        None,
        7,
        {},
        "none",
        8,
        agree([each.samples() for each in data]),
        settings_of(METHODS[method].features),
    )


def wide_broadcasts(method: str, parameters: int) -> tuple[list[TrainRound], list[Report]]:
    """The broadcasts of a run with two nodes, and the first node's reports."""
    data = wide_shards(parameters)
    fleets = [
        each.fleet(wide_task(method, data, parameters), [node])
        for node, each in enumerate(data)
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
    """The broadcast with copied vectors and without the catch-up."""

    def copied(part: RoundPart) -> RoundPart:
        if isinstance(part, DriftPart) and part.mean is not None:
            return replace(part, mean=part.mean.copy())
        return part

    parts = tuple(map(copied, broadcast.parts))
    return replace(broadcast, w=broadcast.w.copy(), parts=parts, catch_up=None)


def wide_worker(method: str, parameters: int) -> Worker:
    data = wide_shards(parameters)
    work = Worker(data[0])
    work.start(Welcome(RUN, wide_task(method, data, parameters), (0,)))
    return work


@pytest.mark.parametrize("method", ["fixed", "frugal", "accelerated"])
@pytest.mark.parametrize("ahead", [0, 4])
def test_released_vectors_are_recomputed(
    method: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit."""
    monkeypatch.setattr(worker_module, "rounds_ahead", lambda parameters: ahead)
    sent, reports = wide_broadcasts(method, 50)
    work = wide_worker(method, 50)
    for broadcast, report in zip(sent, reports, strict=True):
        for _ in range(2):  # as after an uncounted report
            answer = work.answer(RoundRequest(as_sent(broadcast), broadcast.round - 1))
            assert bits(answer.report) == bits(report)


def test_memory_after_absence_and_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the node learned belongs to an older round then, and is kept."""
    sent, _ = wide_broadcasts("accelerated", 50)
    missing = [
        replace(sent[0]),
        sent[1],
        replace(sent[4], eta=1e38),
        replace(sent[5], catch_up=None),
        sent[7],
    ]

    def reports() -> list[Report]:
        work = wide_worker("accelerated", 50)
        rounds = [0, *(each.round for each in missing)]
        return [
            work.answer(RoundRequest(each, before)).report
            for before, each in zip(rounds, missing, strict=False)
        ]

    expected = reports()
    assert not np.isfinite(expected[2].vectors["w"]).all()
    monkeypatch.setattr(worker_module, "rounds_ahead", lambda parameters: 0)
    assert bits(reports()) == bits(expected)


def test_number_of_vectors_held() -> None:
    sent, _ = wide_broadcasts("accelerated", LARGE)
    work = wide_worker("accelerated", LARGE)
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
    # For each of three rounds at most w, w_i, c, c - c_i and w^f, and the w before them.
    assert max(held) < 16.5
    # The model also converts both samples to floating point.
    assert max(most) < 30
