"""A node's work: it goes back to where its memory must stand, and says what a round took."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.engines.remote import worker as worker_module
from fedbudget.engines.remote.messages import RoundRequest, Welcome
from fedbudget.engines.remote.task import rounds_ahead
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.aggregator import Outcome
from fedbudget.protocol.compression import Kind, decode
from fedbudget.protocol.messages import Broadcast, LocalError, PeerError, Report
from fedbudget.resources.rapl import Rapl
from fedbudget.resources.resource import Reading
from support.methods import bits
from support.networked import (
    RUN,
    HeldWorker,
    aggregator,
    network,
    node_data,
    task,
    without_network,
)
from support.problems import CHEAP


def started(
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


def broadcasts(method: str = "frugal", rounds: int = 6) -> list[Broadcast]:
    """Of a run with this node alone."""
    ours, fleet = aggregator(method), node_data(0).fleet(task(method, batch=5), [0])
    broadcast: Broadcast | Outcome = ours.start()
    found = []
    for _ in range(rounds):
        assert isinstance(broadcast, Broadcast)
        found.append(broadcast)
        broadcast = ours.receive(fleet.answer(broadcast), CHEAP)
    return found


def answers(work: Worker, broadcast: list[Broadcast]) -> list[Report]:
    return [work.answer(RoundRequest(each, each.round - 1)).report for each in broadcast]


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
def test_a_round_that_is_made_again_is_the_same_to_the_bit(method: str) -> None:
    broadcast = broadcasts(method)
    work = started(method)
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


def test_a_round_that_was_not_counted_leaves_no_trace() -> None:
    broadcast = broadcasts()
    work, other = started(), started()
    answers(work, broadcast[:3])
    answers(other, broadcast[:3])
    elsewhere = replace(broadcast[3], w=broadcast[3].w + np.float32(1), tau=2)
    work.answer(RoundRequest(elsewhere, 3))
    assert work.rounds == (1, 2, 3, 4)
    assert bits(answers(work, broadcast[3:])) == bits(answers(other, broadcast[3:]))


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_memory_goes_back_as_far_as_the_aggregator_may_and_no_further(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "rounds_ahead", lambda parameters: ahead)
    broadcast, work = broadcasts(rounds=9), started()
    answers(work, broadcast[:8])
    first = (
        8 - ahead - 2
    )  # those that are not on disk, the one before, and the one that nodes have just made
    assert list(work.rounds) == list(range(first, 9))
    work.answer(RoundRequest(broadcast[first], first))
    assert list(work.rounds) == [first, first + 1]
    for number in (first - 1, first + 2, 9):
        with pytest.raises(PeerError, match=f"no memory of round {number}, only of"):
            work.answer(RoundRequest(replace(broadcast[8], round=10), number))
    work.answer(RoundRequest(broadcast[5], 0))  # as one that has just joined
    assert list(work.rounds) == [6]


def test_a_large_model_is_remembered_for_fewer_rounds() -> None:
    assert rounds_ahead(784) > rounds_ahead(1_000_000) >= 0


def test_another_run_or_task_begins_anew_and_the_same_does_not() -> None:
    broadcast, work = broadcasts(), started()
    answers(work, broadcast[:2])
    work.start(Welcome(RUN, task("frugal", batch=5), (0,)))
    assert (work.rounds, work.run) == ((1, 2), RUN)
    work.start(Welcome("another", task("frugal", batch=5), (0,)))
    assert (work.rounds, work.run) == ((), "another")


def test_a_trial_leaves_no_trace() -> None:
    broadcast, work = broadcasts(), started()
    work.start(Welcome(RUN, task("frugal", batch=5), (0,)))
    assert bits(answers(work, broadcast)) == bits(answers(started(), broadcast))


def test_work_comes_after_a_welcome() -> None:
    with pytest.raises(LocalError):
        Worker(node_data(0)).answer(RoundRequest(broadcasts()[0], 0))
    with pytest.raises(PeerError, match="numbers for 2 nodes instead of 1"):
        Worker(node_data(0)).start(Welcome(RUN, task(), (0, 1)))


# Compression.


@pytest.mark.parametrize("kind", ["16-bit", "8-bit"])
def test_what_compression_lost_comes_with_the_next_report_also_after_going_back(
    kind: Kind,
) -> None:
    work, exact = started("fixed", kind), started("fixed")
    lost = np.zeros((1, 6), np.float32)
    for each in broadcasts("fixed"):
        asked = RoundRequest(replace(each, compress=kind), each.round - 1)
        report = work.answer(asked).report
        sent = work.encode(report)
        assert work.encode(work.answer(asked).report) == sent
        plain = exact.answer(RoundRequest(each, each.round - 1)).report
        assert report.w is not None
        assert plain.w is not None
        meant = plain.w - each.w + lost
        told = decode(kind, sent, 6).reshape(1, 6)
        lost = meant - told
        assert 0 < np.abs(lost).max() <= np.abs(meant).max() / 200
        assert np.array_equal(
            report.w, each.w + told
        )  # what the node goes on with is what arrives


# What a round took.


def test_a_slower_pace_makes_a_step_that_many_times_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    sleep = time.sleep

    def recording(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", recording)
    work = started(pace=4.0)
    for broadcast in broadcasts(rounds=3):
        costs = work.answer(RoundRequest(broadcast, broadcast.round - 1)).costs
        # What was slept is three times what it took, so that all of it is four times that.
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


def test_energy_is_counted_from_report_to_report(tmp_path: Path) -> None:
    """Waiting for the next broadcast costs energy too."""
    counter = powercap(tmp_path)
    reader = Rapl.find(tmp_path)
    assert reader is not None
    work, broadcast = (
        started(readings=("energy",), readers={"energy": reader}),
        broadcasts(),
    )
    costs = work.answer(RoundRequest(broadcast[0], 0)).costs
    assert costs.readings["energy"] == Reading(0.0, 0.0, reader.host)
    counter.write_text("7500000\n")  # while it waits for the next broadcast
    costs = work.answer(RoundRequest(broadcast[1], 1)).costs
    assert costs.readings["energy"] == Reading(0.0, 2.5, reader.host)


def test_failing_counter_is_not_reported(tmp_path: Path) -> None:
    counter = powercap(tmp_path)
    work, broadcast = (
        started(readings=("energy",), readers={"energy": Rapl.find(tmp_path)}),
        broadcasts(),
    )
    counter.unlink()
    costs = work.answer(RoundRequest(broadcast[0], 0)).costs
    assert list(costs.readings) == ["time"]
    assert costs.seconds > 0
    counter.write_text("6000000\n")  # it counts again, from here on
    work.answer(RoundRequest(broadcast[1], 1))
    counter.write_text("8000000\n")
    assert work.answer(RoundRequest(broadcast[2], 2)).costs.readings["energy"].whole == 2.0


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ((), ["time"]),
        (("cpu", "time"), ["time", "cpu"]),
        (("bytes", "money", "cpu", "unheard"), ["time", "cpu"]),
    ],
)
def test_reads_what_is_asked_for(asked: tuple[str, ...], read: list[str]) -> None:
    """What has no counter, or is not known here, is not read."""
    costs = started(readings=asked).answer(RoundRequest(broadcasts()[0], 0)).costs
    assert list(costs.readings) == read


# With a server.


class RecordingWork(HeldWorker):
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
def test_all_hold_the_same_w_and_what_was_saved_is_counted(
    method: str, kind: Kind, saved: int
) -> None:
    works = [RecordingWork(node) for node in range(3)]
    with network(method, kind, batch=5) as net:
        for node, work in enumerate(works):
            net.join(node, worker=work)
        net.start(3)
        for _ in range(5):
            net.round()
        for work in works:
            assert bits(work.request) == bits(net.sent)
        # Six numbers of each vector: w in all reports, gradients in those of the paper's
        # after the first, and w in all broadcasts after the first, with what it would be
        # without motion where there is some.
        vectors = 5 + (4 if method in ("paper", "accelerated") else 0) + 4
        assert net.server.counters.saved == 3 * vectors * saved
        last = net.sent[-1].astype(np.float64)
    exact = without_network([[0, 1, 2]] * 5, method, batch=5)[-2]
    if method == "fixed":
        assert (
            np.abs(last - exact).max()
            < {"none": 1e-30, "16-bit": 1e-3, "8-bit": 2e-2}[kind] * np.abs(exact).max()
        )


def test_work_that_recalls_the_memories_of_other_work_goes_on_to_the_bit() -> None:
    broadcast = broadcasts()
    first, alone = started(), answers(started(), broadcast)
    answers(first, broadcast[:4])
    second = Worker(node_data(0))
    second.accept(Welcome(RUN, task("frugal", "none", batch=5), (0,)))
    second.recall(first.memories(2))
    assert second.rounds == (3, 4)
    assert bits(answers(second, broadcast[3:])) == bits(
        alone[3:]
    )  # from the older of the two
    with pytest.raises(PeerError, match="no memory of round 2, only of"):
        second.answer(RoundRequest(broadcast[2], 2))


def test_an_update_to_warm_up_leaves_no_trace() -> None:
    broadcast = broadcasts()
    work, alone = started(), answers(started(), broadcast)
    for each, expected in zip(broadcast, alone, strict=True):
        work.warm_up(RoundRequest(each, each.round - 1))
        assert bits(work.answer(RoundRequest(each, each.round - 1)).report) == bits(
            expected
        )
