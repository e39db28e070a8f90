"""The network engine: how long a round may take, what it costs, and whole runs to the bits
of those in one process.
"""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.spending import CarefulSpending
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.in_process import InProcessEngine
from fedbudget.engines.remote import engine
from fedbudget.engines.remote.engine import RemoteEngine
from fedbudget.engines.remote.messages import Answer
from fedbudget.engines.remote.round import CollectedRound, RoundCosts
from fedbudget.engines.remote.worker import Worker
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import from_dataset
from fedbudget.launch.serve import serving
from fedbudget.launch.simulate import simulate
from fedbudget.models.base import loss_over
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources.counters import Snapshot
from fedbudget.resources.kinds import SGD, SimulatedTime
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import CombinedReading, Metering, RoundUsage
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import Compression
from support.hand_made import make, report
from support.methods import bits
from support.networked import LONG, aggregator, network, node_data, task
from support.problems import costs
from support.usage import node_costs


def measured(**limits: float) -> Meters:
    return Meters.of(Budget(limits), Metering(network=True))


def simulated_costs(seconds: float = 5.0) -> Meters:
    return Meters.of(
        Budget({"time": seconds}),
        Metering(SimulatedTime(SGD, np.random.default_rng(3)), network=True),
    )


def usage(updates: int = 5, step: float = 1.0, seconds: float = 7.0) -> RoundUsage:
    return RoundUsage(updates, 2, 0, {"time": CombinedReading(step, seconds, 2)})


def broadcast(tau: int = 3) -> Broadcast:
    return replace(make().start(), tau=tau)


# How long a round may take.


TRIED = usage(1, 0.001, 0.01)


def clock_of(meters: Meters, timeout: float | None) -> engine._Clock:
    return engine._Clock(meters, timeout, TRIED)


class TestDeadline:
    def test_is_what_was_asked_for(self) -> None:
        clock = clock_of(measured(time=100), 1.5)
        clock.add(usage())
        assert clock.deadline(broadcast()) == 1.5

    def test_is_longer_for_slow_nodes_and_large_models_until_it_is_known_what_rounds_take(
        self,
    ) -> None:
        slow = usage(1, step=20.0, seconds=30.0)
        clock = engine._Clock(measured(time=100), None, slow)
        assert clock.deadline(broadcast(tau=3)) == pytest.approx(
            4 * (30 + 2 * 20), rel=1e-3
        )
        large = replace(broadcast(), w=np.zeros(10_000_000, np.float32))
        assert (
            clock_of(measured(time=100), None).deadline(large) > 4 * 120e6 / 250e3
        )  # at 2 Mbit/s, both ways

    def test_is_generous_until_some_rounds_were_made(self) -> None:
        clock = clock_of(measured(time=100), None)
        assert clock.deadline(broadcast()) == 30
        clock.add(usage(updates=2, step=0.1, seconds=0.3))
        assert clock.deadline(broadcast()) == 30

    def test_is_four_times_what_a_round_should_take(self) -> None:
        clock = clock_of(measured(time=100), None)
        for seconds in (7.0, 8.0, 1000.0):  # one out of the ordinary does not matter
            clock.add(usage(updates=5, step=1.0, seconds=seconds))
        assert clock.deadline(broadcast(tau=20)) == 4 * (20 * 1.0 + 3.0)
        assert clock.deadline(broadcast(tau=0)) == 4 * (
            1.0 + 3.0
        )  # the final loss counts as one update

    def test_is_never_less_than_three_seconds(self) -> None:
        clock = clock_of(measured(time=100), None)
        for _ in range(3):
            clock.add(usage(updates=5, step=0.001, seconds=0.01))
        assert clock.deadline(broadcast()) == 3

    def test_one_that_always_comes_at_the_last_moment_does_not_put_it_off(self) -> None:
        """Two of three answer within 0.1 s; the third takes nine tenths of every deadline,
        in updates or not.
        """
        for share in (0.0, 1.0):
            clock = clock_of(measured(bytes=1e9), None)
            for _ in range(60):
                late = 0.9 * clock.deadline(broadcast(5))
                clock.add(usage(5, share * late / 5, late), [0.1, 0.1, late])
            assert clock.deadline(broadcast(5)) < 10


class TestLeft:
    def test_a_round_leaves_the_final_loss_its_room(self) -> None:
        ours = make(20.0, spending=CarefulSpending())
        ours.receive(
            report(ours.start(), 1.0, 1.0), costs([1], [1])
        )  # three updates and the rest: 4 s
        clock, final = clock_of(measured(time=20), None), replace(broadcast(), tau=0)
        reserve = CarefulSpending().final_reserve(ours.ledger)[0]
        assert reserve > 2  # one update and the rest, and something to be sure
        assert clock.left(ours, final, 2.0) == pytest.approx(20 - 4 - 2, abs=0.1)
        assert clock.left(ours, broadcast(), 2.0) == pytest.approx(
            clock.left(ours, final, 2.0) - reserve
        )

    def test_the_papers_method_may_go_over_a_little(self) -> None:
        ours = make(20.0)
        ours.start()
        assert clock_of(measured(time=20), None).left(
            ours, broadcast(), 2.0
        ) == pytest.approx(20.6 - 2, abs=0.1)

    def test_is_never_negative(self) -> None:
        ours = make(10.0)
        ours.start()
        assert clock_of(measured(time=10), None).left(ours, broadcast(), 50.0) == 0

    @pytest.mark.parametrize("meters", [simulated_costs(), measured(bytes=1e6)])
    def test_is_for_ever_where_time_is_not_measured_or_not_limited(
        self, meters: Meters
    ) -> None:
        assert clock_of(meters, None).left(make(10.0), broadcast(), 50.0) == float("inf")


# What a round costs.


def answer(node: int, step_seconds: float = 0.1) -> Answer:
    """Of two nodes."""
    numbers = np.array([2 * node, 2 * node + 1])
    return Answer(
        replace(report(broadcast(), 0.5), nodes=numbers),
        node_costs(step_seconds, 1.0, cpu=(0.2, 2.0)),
    )


TOOK = Snapshot({"time": 9.0, "cpu": 0.7})


def test_time_is_of_the_slowest_and_cpu_of_all() -> None:
    found = RoundCosts.of([answer(0), answer(1, step_seconds=0.3)], TOOK, 123).usage(4)
    assert (found.updates, found.nodes, found.wire_bytes) == (4, 4, 123)
    assert found.readings["time"] == CombinedReading(0.3, 9.0, nodes=4)
    assert found.readings["cpu"].whole == pytest.approx(2.0 + 2.0 + 0.7)
    assert found.readings.keys() == {"time", "cpu"}


def test_a_round_that_did_not_come_together_costs_time_and_bytes_but_nothing_simulated() -> (
    None
):
    found = engine._unfinished(measured(time=100, bytes=1e6), Snapshot({"time": 2.5}), 300)
    assert (found.step.tolist(), found.aggregation.tolist()) == ([0, 0], [2.5, 300])
    found = engine._unfinished(simulated_costs(), Snapshot({"time": 2.5}), 300)
    assert (found.step.tolist(), found.aggregation.tolist()) == ([0], [0])


def test_the_record_says_who_is_not_in_the_average() -> None:
    ours = make()
    ours.receive(report(ours.start(), 1.0, 1.0), costs([1], [1]))
    found = engine._completed(
        ours, CollectedRound([], (5, 3), missed=(7,), enough=True), broadcast()
    )
    assert (found.left_out, found.missed) == ((3, 5), (7,))


# Whole runs.


def run(
    ours: Aggregator, server: AggregatorServer, meters: Meters, **how: Any
) -> tuple[Outcome, list[Any]]:
    seen: list[Any] = []
    running = {name: how.pop(name) for name in ("interrupted", "save") if name in how}
    remote = RemoteEngine(
        ours, server, meters, **{"least": 2, "timeout": LONG, "trial": TRIED, **how}
    )
    outcome = remote.run(observe=lambda *both: seen.append(both), **running)
    return outcome, seen


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
def test_a_run_over_a_network_comes_to_the_same_bits(method: str) -> None:
    expected = Costs(np.array([0.01]), np.array([0.1]))
    how = {"budget": Budget({"time": 2.0}), "expected": expected}
    fleets = [node_data(node).fleet(task(method, batch=5), [node]) for node in (0, 1)]
    here: list[Any] = []
    one = InProcessEngine(aggregator(method, **how), fleets, simulated_costs(2.0))
    outcome = one.run(observe=lambda *both: here.append(both))
    with network(method, batch=5) as net:
        net.join(0), net.join(1)
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        net.ready(2)
        again, there = run(aggregator(method, **how), net.server, simulated_costs(2.0))
    assert len(here) > 5
    assert bits(there) == bits(here)
    assert bits(again) == bits(outcome)


@pytest.fixture
def two_nodes() -> Any:
    with network() as net:
        net.join(0), net.join(1)
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        net.ready(2)
        yield net


def test_a_run_that_waits_for_nodes_ends_when_its_time_is_gone(two_nodes: Any) -> None:
    ours = aggregator(budget=Budget({"time": 0.3}))
    outcome, seen = run(ours, two_nodes.server, measured(time=0.3), least=3)
    assert (outcome.stopped_by, seen) == ("time", [])
    assert 0.1 < outcome.ledger.spent[0] <= 0.3  # the clock ran on, and not too far
    assert outcome.w.tolist() == [0] * 6  # as it started


def test_an_interruption_in_the_middle_of_a_round_is_saved_and_charged(
    two_nodes: Any,
) -> None:
    over, kept = threading.Event(), []
    ours = aggregator(budget=Budget({"time": 1000.0}))

    def interrupt() -> None:
        over.set()
        two_nodes.server.wake()

    stop = threading.Timer(0.05, interrupt)
    stop.start()
    outcome, _ = run(
        ours,
        two_nodes.server,
        measured(time=1000),
        least=3,
        interrupted=over.is_set,
        save=lambda: kept.append(ours.ledger.spent[0]),
    )
    stop.join()
    assert outcome.stopped_by == "interrupted"
    assert kept == [outcome.ledger.spent[0]]
    assert kept[0] > 0


def trained(compress: Compression, *limits: str) -> tuple[float, int]:
    """The loss over all samples that three nodes with digits come to, and what compression
    saved.
    """
    budget = ("time=1000s", *limits)
    settings = Settings(
        model="svm",
        tau=5,
        rounds=10,
        nodes=3,
        partition="case:2",
        budget=budget,
        compress=compress,
    )
    counters = []
    threads = []

    def opened(server: AggregatorServer) -> None:
        counters.append(server.counters)
        for number in (1, 2, 3):
            work = Worker(from_dataset(settings, f"{number}/3"))
            joining = run_node(f"127.0.0.1:{server.port}", work, name=f"node-{number}")
            threads.append(
                threading.Thread(target=asyncio.run, args=(joining,), daemon=True)
            )
            threads[-1].start()

    with serving(
        settings, ListenOptions("127.0.0.1:0"), interrupted=lambda: False, opened=opened
    ) as plan:
        result = execute(plan)
    for thread in threads:
        thread.join(LONG)
    assert result.aggregations == 10
    here = simulate(settings)
    return loss_over(here.model, result.w, here.train), counters[0].saved


def test_compression_costs_little_loss_and_saves_what_it_should() -> None:
    exact, nothing = trained("none")
    assert nothing == 0
    # 64 numbers take 256 bytes; with 16 bits 128, with 8 bits 64, and 4 for the scale of
    # the one block. Each of three nodes is told w in all rounds but the first, the final
    # one too, and what it would be without motion; and reports w in all but the last.
    vectors = 3 * (10 + 10 + 10)
    cases: list[tuple[Compression, float, int]] = [
        ("16-bit", 1e-3, 256 - 128 - 4),
        ("8-bit", 2e-2, 256 - 64 - 4),
    ]
    for compress, margin, each in cases:
        loss, saved = trained(compress)
        assert saved == vectors * each
        assert loss == pytest.approx(exact, rel=margin)


def test_where_bytes_are_budgeted_auto_is_8_bits() -> None:
    assert trained("auto", "bytes=1GB") == trained("8-bit", "bytes=1GB")
