"""Rounds over a network: deadlines, costs, compression, and whole runs with the bits of one
process.
"""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.spending import CarefulSpending
from fedbudget.engines.engine import RoundEngine, completed_record, unfinished_costs
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.in_process import InProcessNodes
from fedbudget.engines.remote.messages import Answer
from fedbudget.engines.remote.policy import (
    TRIED,
    CompressionChoice,
    Deadlines,
    Participation,
    RemotePolicy,
)
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.engines.remote.worker import Worker
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import from_dataset
from fedbudget.launch.prepared import attendance
from fedbudget.launch.serve import serving
from fedbudget.launch.simulate import simulate
from fedbudget.models.base import loss_over
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.protocol.messages import FinalRound, TrainRound
from fedbudget.protocol.state import Outcome
from fedbudget.resources.kinds import SGD, SimulatedTime
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Metering, Reading, Usage
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import Compression
from support.hand_made import FIRST, make, report
from support.methods import bits, recorded_broadcasts
from support.networked import LONG, aggregator, network, node_data, task
from support.problems import costs
from support.served import run_over_grpc
from support.usage import node_costs


def measured(**limits: float) -> Meters:
    return Meters.of(Budget(limits), Metering(network=True))


def simulated_costs(seconds: float = 5.0) -> Meters:
    return Meters.of(
        Budget({"time": seconds}),
        Metering(SimulatedTime(SGD, np.random.default_rng(3)), network=True),
    )


def usage(updates: int = 5, step: float = 1.0, seconds: float = 7.0) -> Usage:
    return Usage({"time": Reading(step, seconds, nodes=2)}, 2, updates=updates)


def broadcast(tau: int = 3) -> TrainRound:
    return replace(FIRST, tau=tau, effective=tau)


FINAL = FinalRound(round=2, w=FIRST.w)


# Deadlines.


TRIAL = usage(1, 0.001, 0.01)


def clock_of(meters: Meters, timeout: float | None) -> Deadlines:
    return Deadlines(meters, timeout, TRIAL)


class TestDeadline:
    def test_requested_timeout(self) -> None:
        clock = clock_of(measured(time=100), 1.5)
        clock.add(usage())
        assert clock.timeout(broadcast()) == 1.5

    def test_first_deadline_follows_the_trial(self) -> None:
        """Slow nodes and large models extend the deadline of the first rounds."""
        slow = usage(1, step=20.0, seconds=30.0)
        clock = Deadlines(measured(time=100), None, slow)
        assert clock.timeout(broadcast(tau=3)) == pytest.approx(4 * (30 + 2 * 20), rel=1e-3)
        large = replace(broadcast(), w=np.zeros(10_000_000, np.float32))
        # 2 Mbit/s in both directions.
        assert clock_of(measured(time=100), None).timeout(large) > 4 * 120e6 / 250e3

    def test_first_rounds_have_30_seconds(self) -> None:
        clock = clock_of(measured(time=100), None)
        assert clock.timeout(broadcast()) == 30
        clock.add(usage(updates=2, step=0.1, seconds=0.3))
        assert clock.timeout(broadcast()) == 30

    def test_four_times_the_expected_time(self) -> None:
        clock = clock_of(measured(time=100), None)
        for seconds in (7.0, 8.0, 1000.0):  # an outlier does not matter
            clock.add(usage(updates=5, step=1.0, seconds=seconds))
        assert clock.timeout(broadcast(tau=20)) == 4 * (20 * 1.0 + 3.0)
        # The final loss counts as one update.
        assert clock.timeout(FINAL) == 4 * (1.0 + 3.0)

    def test_at_least_three_seconds(self) -> None:
        clock = clock_of(measured(time=100), None)
        for _ in range(3):
            clock.add(usage(updates=5, step=0.001, seconds=0.01))
        assert clock.timeout(broadcast()) == 3

    def test_slow_node_cannot_extend_deadline(self) -> None:
        """Two of three nodes answer within 0.1 s. The third takes 90 % of every deadline,
        for updates or for messages.
        """
        for share in (0.0, 1.0):
            clock = clock_of(measured(bytes=1e9), None)
            for _ in range(60):
                late = 0.9 * clock.timeout(broadcast(5))
                clock.add(usage(5, share * late / 5, late), [0.1, 0.1, late])
            assert clock.timeout(broadcast(5)) < 10


class TestRemainingTime:
    def test_final_loss_keeps_its_reserve(self) -> None:
        ours = make(20.0, spending=CarefulSpending())
        # Three updates and an aggregation: 4 s.
        ours.receive(report(ours.start(), 1.0, 1.0), costs([1], [1]))
        clock = clock_of(measured(time=20), None)
        reserve = CarefulSpending().final_reserve(ours.ledger)[0]
        assert reserve > 2  # one update, one aggregation, and a margin
        assert clock.left(ours, FINAL, 2.0) == pytest.approx(20 - 4 - 2, abs=0.1)
        assert clock.left(ours, broadcast(), 2.0) == pytest.approx(
            clock.left(ours, FINAL, 2.0) - reserve
        )

    def test_paper_method_has_a_tolerance(self) -> None:
        ours = make(20.0)
        ours.start()
        assert clock_of(measured(time=20), None).left(
            ours, broadcast(), 2.0
        ) == pytest.approx(20.6 - 2, abs=0.1)

    def test_remaining_time_is_not_negative(self) -> None:
        ours = make(10.0)
        ours.start()
        assert clock_of(measured(time=10), None).left(ours, broadcast(), 50.0) == 0

    @pytest.mark.parametrize("meters", [simulated_costs(), measured(bytes=1e6)])
    def test_unlimited_without_a_measured_budget(self, meters: Meters) -> None:
        assert clock_of(meters, None).left(make(10.0), broadcast(), 50.0) == float("inf")


# Costs of a round.


def answer(node: int, step_seconds: float = 0.1) -> Answer:
    """The answer of a peer with two nodes."""
    numbers = np.array([2 * node, 2 * node + 1])
    return Answer(
        replace(report(broadcast(), 0.5), nodes=numbers),
        node_costs(step_seconds, 1.0, cpu=(0.2, 2.0)),
    )


AGGREGATOR_COSTS = {"time": 9.0, "cpu": 0.7}


def test_time_is_maximum_cpu_is_sum() -> None:
    collected = CollectedRound(
        [answer(0), answer(1, step_seconds=0.3)], (), (), enough=True
    )
    result, evaluation = collected.usage(4, AGGREGATOR_COSTS, 123)
    assert evaluation is None
    assert (result.updates, result.nodes, result.wire_bytes) == (4, 4, 123)
    assert result.readings["time"] == Reading(0.3, 9.0, nodes=4)
    assert result.readings["cpu"].whole == pytest.approx(2.0 + 2.0 + 0.7)
    assert result.readings.keys() == {"time", "cpu"}


def test_failed_round_charges_measured_costs() -> None:
    """Time and bytes are charged. Simulated costs are not."""
    result = unfinished_costs(measured(time=100, bytes=1e6), {"time": 2.5}, 300)
    assert (result.step.tolist(), result.aggregation.tolist()) == ([0, 0], [2.5, 300])
    result = unfinished_costs(simulated_costs(), {"time": 2.5}, 300)
    assert (result.step.tolist(), result.aggregation.tolist()) == ([0], [0])


def test_record_names_nodes_left_out() -> None:
    ours = make()
    ours.receive(report(ours.start(), 1.0, 1.0), costs([1], [1]))
    collected = CollectedRound([], (5, 3), missed=(7,), enough=True)
    result = completed_record(ours.last, collected)
    assert (result.left_out, result.missed) == ((3, 5), (7,))


# Whole runs.


def run(
    ours: Aggregator, server: AggregatorServer, meters: Meters, **how: Any
) -> tuple[Outcome, list[Any]]:
    seen: list[Any] = []
    running = {name: how.pop(name) for name in ("interrupted", "save") if name in how}
    policy = RemotePolicy(
        server, meters, deadlines=Deadlines(meters, LONG, TRIAL), **{"least": 2, **how}
    )
    outcome = RoundEngine(ours, server, meters, policy).run(
        observe=lambda *both: seen.append(both), **running
    )
    return outcome, seen


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
def test_network_run_has_same_bits(method: str) -> None:
    expected = Costs(np.array([0.01]), np.array([0.1]))
    how = {"budget": Budget({"time": 2.0}), "expected": expected}
    fleets = [node_data(node).fleet(task(method, batch=5), [node]) for node in (0, 1)]
    here: list[Any] = []
    meters = simulated_costs(2.0)
    nodes = InProcessNodes(fleets, meters.counters())
    sent_here = recorded_broadcasts(nodes)
    one = RoundEngine(aggregator(method, **how), nodes, meters)
    outcome = one.run(observe=lambda *both: here.append(both))
    with network(method, batch=5) as net:
        net.join(0), net.join(1)
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        net.ready(2)
        sent_there = recorded_broadcasts(net.server)
        again, there = run(aggregator(method, **how), net.server, simulated_costs(2.0))
    assert len(here) > 5
    assert bits(there) == bits(here)
    assert bits(sent_there) == bits(sent_here)
    assert bits(again) == bits(outcome)


@pytest.fixture
def two_nodes() -> Any:
    with network() as net:
        net.join(0), net.join(1)
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        net.ready(2)
        yield net


def test_waiting_run_stops_with_its_budget(two_nodes: Any) -> None:
    ours = aggregator(budget=Budget({"time": 0.3}))
    outcome, seen = run(ours, two_nodes.server, measured(time=0.3), least=3)
    assert (outcome.stopped_by, seen) == ("time", [])
    assert 0.1 < outcome.ledger.spent[0] <= 0.3  # waiting is charged, within the budget
    assert outcome.w.tolist() == [0] * 6  # the initial w


def test_interrupted_round_is_saved_and_charged(two_nodes: Any) -> None:
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
    """The loss over all samples after a run with three nodes, and the bytes that
    compression saved.
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


def test_compression_saves_bytes_and_accuracy() -> None:
    """The loss differs by at most 0.1 % with 16 bits and 2 % with 8 bits."""
    exact, nothing = trained("none")
    assert nothing == 0
    # 64 numbers take 256 bytes, 128 with 16 bits, or 64 with 8 bits, plus 4 bytes for
    # the scale of the block. Each of three nodes receives w and the mean in ten rounds,
    # all but the first. It reports w in ten rounds, all but the final one.
    vectors = 3 * (10 + 10 + 10)
    cases: list[tuple[Compression, float, int]] = [
        ("16-bit", 1e-3, 256 - 128 - 4),
        ("8-bit", 2e-2, 256 - 64 - 4),
    ]
    for compress, margin, each in cases:
        loss, saved = trained(compress)
        assert saved == vectors * each
        assert loss == pytest.approx(exact, rel=margin)


def test_byte_budget_selects_8_bits() -> None:
    assert trained("auto", "bytes=1GB") == trained("8-bit", "bytes=1GB")


def chosen_kinds(
    none: float,
    eight: float,
    updates: float = 0.0,
    *,
    parameters: int = 650,
    others: tuple[float, ...] = (0.001,),
    **how: bool,
) -> list[str]:
    """The compression of each round, given the seconds that messages of one node take with
    32 and with 8 bits.
    """
    compressor = BroadcastCompressor("none")
    choice = CompressionChoice.first(
        compressor, parameters, **{"budgeted": False, "measured": True, **how}
    )
    chosen: list[str] = []
    for _ in range(3 * TRIED):
        chosen.append(compressor.kind)
        line = none if compressor.kind == "none" else eight
        lines = dict(enumerate((*others, line)))
        if choice.tries:
            choice.add(lines, line + 0.002, line + 0.002 + updates)
    return chosen


def test_slow_link_keeps_8_bits() -> None:
    assert chosen_kinds(0.060, 0.020) == ["none"] * TRIED + ["8-bit"] * (2 * TRIED)


@pytest.mark.parametrize(
    ("none", "eight", "updates"), [(0.06, 0.06, 0.0), (0.06, 0.025, 0.4)]
)
def test_useless_compression_is_dropped(none: float, eight: float, updates: float) -> None:
    """The link has a high latency but enough bandwidth, or updates take much longer than
    messages.
    """
    assert (
        chosen_kinds(none, eight, updates)
        == ["none"] * TRIED + ["8-bit"] * TRIED + ["none"] * TRIED
    )


@pytest.mark.parametrize(
    ("seconds", "updates", "parameters"),
    [(0.002, 0.0, 650), (0.015, 0.0, 650), (0.2, 0.0, 10**6), (0.06, 1.0, 650)],
)
def test_fast_link_never_tries_compression(
    seconds: float, updates: float, parameters: int
) -> None:
    """So w has the same bits as in one process."""
    assert set(chosen_kinds(seconds, seconds / 3, updates, parameters=parameters)) == {
        "none"
    }


def test_busy_moments_are_ignored() -> None:
    compressor = BroadcastCompressor("none")
    choice = CompressionChoice.first(compressor, 650, budgeted=False, measured=True)
    for busy in range(3 * TRIED):  # another node in each round
        lines = {node: 0.5 if node == busy % 2 else 0.003 for node in range(2)}
        if choice.tries:
            choice.add(lines, 0.5, 0.5)
        assert compressor.kind == "none"


def test_byte_budget_starts_with_8_bits() -> None:
    assert set(chosen_kinds(0.01, 0.02, budgeted=True)) == {"8-bit"}


def test_simulated_time_never_tries_compression() -> None:
    assert set(chosen_kinds(0.06, 0.02, measured=False)) == {"none"}


SAME_BITS_NODES = 4


@pytest.mark.parametrize(
    "how",
    [
        {"compress": "8-bit"},
        {"compress": "16-bit", "method": "paper"},
        {"compress": "8-bit", "method": "frugal", "update": "fedadam"},
        {"compress": "auto", "budget": ("time=1000s", "bytes=10MB"), "tau": 3},
        {"participation": 0.5},
        {"participation": 0.5, "compress": "8-bit"},
    ],
)
def test_grpc_run_matches_one_process(how: dict[str, Any]) -> None:
    """With compression and partial participation too."""
    given: Any = {
        "model": "softmax",
        "partition": "case:2",
        "nodes": SAME_BITS_NODES,
        "rounds": 8,
        "combine": "mean",
    }
    settings = Settings(**{**given, "budget": ("time=1000s",), **how})
    here, there = execute(simulate(settings)), run_over_grpc(settings)
    assert [each.nodes for each in here.rounds] == [each.nodes for each in there.rounds]
    assert [each.loss for each in here.rounds] == [each.loss for each in there.rounds]
    assert here.w.tobytes() == there.w.tobytes()


def test_resumed_run_draws_same_participants() -> None:
    settings = Settings(nodes=20, participation=0.3, seed=4)

    def draw() -> Any:
        return attendance(settings)

    simulated = attendance(settings)
    assert simulated is not None
    drawn = [frozenset(np.flatnonzero(~next(simulated)).tolist()) for _ in range(30)]
    whole = Participation(draw)
    assert [whole.resting(number) for number in range(1, 31)] == drawn
    assert whole.resting(30) == drawn[29]
    assert whole.resting(7) == drawn[6]
    assert Participation(draw).resting(25) == drawn[24]


CHANGE, FOLLOWED, ROUNDS = 8, 5, 20
PACE = 40.0


@pytest.mark.slow  # nodes sleep between updates
def test_slowed_node_receives_less_work() -> None:
    """A node becomes ten times slower in round 8. Within five rounds the others make at
    least four times as many updates.
    """
    workers: list[Any] = []
    updates: list[list[int]] = []

    def observe(record: RoundRecord) -> None:
        updates.append(
            list(record.work["updates"]) if record.work else [record.tau] * record.nodes
        )
        if record.round == CHANGE:
            workers[-1]._pace *= 10

    settings = Settings(
        model="softmax",
        partition="case:2",
        batch_size="full",
        nodes=4,
        rounds=ROUNDS,
        costs="measured",
        budget=("time=1000s",),
        combine="mean",
        compress="none",
    )
    made = run_over_grpc(
        settings, lambda data: Worker(data, pace=PACE), workers, callbacks=[observe]
    )
    assert len(made.rounds) == ROUNDS + 1
    before, after = (
        np.array(updates[3:CHANGE]),
        np.array(updates[CHANGE + FOLLOWED : ROUNDS]),
    )
    assert before[:, -1].mean() > 0.5 * before[:, :-1].mean()
    assert np.median(after[:, :-1].min(axis=1) / after[:, -1]) >= 4
    assert np.median(after[:, -1]) <= 2
