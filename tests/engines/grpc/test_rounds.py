"""Rounds with nodes that are slow, late, absent, restarted, or report numbers that are not
finite.
"""

import threading
from time import monotonic
from typing import Any

import grpc
import pytest

from fedbudget.engines.engine import RoundTerms, SecondAnswers
from fedbudget.engines.grpc.stream import pack
from fedbudget.engines.remote.members import MAX_ROUNDS_AWAY
from fedbudget.engines.remote.messages import Ready
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.messages import SampleNormRound
from fedbudget.resources.resource import Reading, Usage
from support.methods import bits
from support.networked import (
    COSTS,
    LONG,
    Network,
    PausableWorker,
    network,
    node_data,
    node_numbers,
    wait_until,
    without_network,
)
from support.raw_peers import RawPeer, assert_undisturbed, next_broadcast, report_of


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
@pytest.mark.parametrize("batch", [None, 5])
def test_slow_node_is_skipped_and_returns(method: str, batch: int | None) -> None:
    """Its late report is discarded, and w has the bits of a run in which it was absent."""
    slow = PausableWorker(node_data(2))
    with network(method, batch=batch) as net:
        net.join(0), net.join(1), net.join(2, worker=slow)
        net.start(3)
        net.round(), net.round()
        slow.go.clear()
        # The deadline passes at once, and the round ends with the two required nodes.
        late = net.round(least=2, timeout=0.0)
        assert (node_numbers(late), late.missed) == ([0, 1], (2,))
        again = net.round(least=2)  # it still owes a report and is not asked
        assert (node_numbers(again), again.missed) == ([0, 1], ())
        assert net.server.counters.late == 0
        slow.go.set()
        wait_until(lambda: net.server.counters.late == 1)
        for _ in range(3):
            assert node_numbers(net.round()) == [0, 1, 2]
        here = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
        assert bits(net.all_w) == bits(without_network(here, method, batch))
        assert slow.made == 6  # one of them is discarded


def test_restart_in_private_round_is_paid() -> None:
    """A node that protects its samples restarts after its report was sent for: the round is
    paid for again before its new process is asked, and only then.
    """
    slow = PausableWorker(node_data(1))
    paid: list[float] = []
    with network("samples") as net:
        net.join(0)
        node = net.join(1, worker=slow)
        net.start(2)
        slow.go.clear()
        broadcast = net.aggregator.pending
        assert isinstance(broadcast, SampleNormRound)
        second = SecondAnswers(net.aggregator, broadcast, lambda _, rho: paid.append(rho))
        net.server.begin(broadcast, RoundTerms(2, LONG, LONG, pay_again=second.pay))
        net.leave(node)
        assert paid == []
        slow.go.set()
        net.join(1)
        assert node_numbers(net.finish()) == [0, 1]
    assert paid == [broadcast.rho]


def test_deadline_before_finish() -> None:
    """The aggregator was busy past the deadline, and no further event wakes it."""
    slow = PausableWorker(node_data(1))
    with network() as net:
        net.join(0), net.join(1, worker=slow)
        net.start(2)
        slow.go.clear()
        net.begin(least=1, timeout=0.02)
        pending = net.server._rounds.pending
        assert pending is not None
        wait_until(
            lambda: pending.awaited == {"node-1"} and monotonic() > pending.deadline + 0.05
        )
        assert node_numbers(net.finish()) == [0]
        slow.go.set()


def test_late_report_is_not_counted_later() -> None:
    slow = PausableWorker(node_data(1))
    with network() as net:
        net.join(0), net.join(1, worker=slow)
        net.start(2)
        slow.go.clear()
        assert node_numbers(net.round(least=1, timeout=0.0)) == [0]
        # Both are needed: the late node is asked after its late report.
        net.begin(least=2)
        slow.go.set()
        assert node_numbers(net.finish()) == [0, 1]
        assert net.server.counters.late == 1
        assert bits(net.all_w) == bits(without_network([[0], [0, 1]]))


def test_new_node_completes_waiting_round(net: Network) -> None:
    net.begin(least=3, timeout=0.0)
    joining = threading.Timer(0.05, lambda: net.join(2))
    joining.start()
    collected = net.finish()
    joining.join()
    assert (node_numbers(collected), collected.enough) == ([0, 1, 2], True)


def test_waiting_round_ends_with_budget(net: Network) -> None:
    collected = net.round(least=3, left=0.05)
    assert not collected.enough


def test_interrupt_ends_waiting(net: Network) -> None:
    net.begin(least=3)
    net.server.wake()
    assert not net.finish().enough


def test_node_joining_mid_round_waits() -> None:
    held = PausableWorker(node_data(1))
    with network() as net:
        net.join(0), net.join(1, worker=held)
        net.start(2)
        net.round()
        held.go.clear()
        net.begin()
        net.join(2)
        net.ready(3)
        held.go.set()
        collected = net.finish()
        assert (node_numbers(collected), collected.missed) == ([0, 1], ())
        for _ in range(2):
            assert node_numbers(net.round()) == [0, 1, 2]
        assert bits(net.all_w) == bits(
            without_network([[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]])
        )


def leave(net: Network, joined: Any, nodes: int) -> None:
    joined.cancel()
    wait_until(lambda: len(net.server.descriptions()) == nodes)


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
def test_returning_node_keeps_its_memory(method: str) -> None:
    work = Worker(node_data(2))
    with network(method, batch=5) as net:
        net.join(0), net.join(1)
        joined = net.join(2, worker=work)
        net.start(3)
        net.round(), net.round()
        leave(net, joined, 2)
        net.round(), net.round()
        net.join(2, worker=work)
        net.ready(3)
        net.round(), net.round()
        here = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
        assert bits(net.all_w) == bits(without_network(here, method, batch=5))
        assert net.server.members["node-2"].numbers.tolist() == [2]


def test_returning_node_without_memory() -> None:
    """It keeps its number, but its drift is lost."""
    with network() as net:
        net.join(0), net.join(1)
        joined = net.join(2)
        net.start(3)
        net.round()
        leave(net, joined, 2)
        net.round()
        peer = RawPeer(net, "node-2")
        peer.become_ready()
        net.ready(3)
        assert net.server.lost(3) == [2]
        assert net.server.lost(3) == []  # reported once
        net.begin()
        result = next_broadcast(peer)
        assert result.sent.base_round == 0
        assert result.request(None).broadcast.catch_up is not None


def test_long_absent_nodes_lose_memory() -> None:
    with network() as net:
        net.join(0)
        joined = net.join(1)
        net.start(2)
        net.round()
        leave(net, joined, 1)
        for number in range(2, MAX_ROUNDS_AWAY + 2):
            assert net.server.lost(number) == []
            net.round()
        assert net.server.members["node-1"].base_round == 1
        assert net.server.lost(MAX_ROUNDS_AWAY + 2) == [1]
        assert net.server.lost(MAX_ROUNDS_AWAY + 2) == []
        assert net.server.members["node-1"].base_round == 0


def test_interrupt_between_rounds_is_kept(net: Network) -> None:
    net.server.wake()
    net.server.members.snapshot()  # the server has processed it
    assert not net.round(least=3).enough


def test_own_node_error_is_raised() -> None:
    class Failing(Worker):
        def answer(self, request: Any) -> Any:
            if request.broadcast.round == 2:
                raise ZeroDivisionError("own node")
            return super().answer(request)

    with network() as net:
        net.server.add_own_node(Failing(node_data(0)))
        net.join(1)
        net.start(2)
        net.round(least=2)
        net.begin(least=2)
        with pytest.raises(ZeroDivisionError, match="own node"):
            net.server.finish()


def test_restart_after_report_loses_memory() -> None:
    """The old process has answered and the new one has joined before the round ends."""
    with network() as net:
        held = PausableWorker(node_data(1))
        first, _ = net.join(0), net.join(1, worker=held)
        net.start(2)
        net.round(least=2)
        held.go.clear()
        net.begin(least=2)
        wait_until(
            lambda: (
                net.server.members["node-0"].rounds == 1
                and net.server._rounds.pending is not None
            )
        )
        wait_until(lambda: "node-0" in net.server._rounds.pending.answers)  # type: ignore[union-attr]
        net.leave(first)
        net.join(0)
        net.ready(2)
        held.go.set()
        assert [answer.nodes.tolist() for answer in net.finish().answers] == [
            [0],
            [1],
        ]
        assert net.server.members["node-0"].base_round == 0
        collected = net.round(least=2)  # it takes part as a node without memory
        assert (len(collected.answers), collected.missed) == (2, ())
        assert net.server.counters.dropped == 0


def test_duplicate_report_counts_once(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    held = PausableWorker(node_data(3))  # keeps the round open
    net.join(3, worker=held)
    net.ready(3)
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(4)
    held.go.clear()
    broadcast = net.begin()
    next_broadcast(peer)
    peer.send_if_open(*report_of(broadcast), *report_of(broadcast))
    wait_until(lambda: "is dropped: 'report' instead of 'nothing'" in caplog.text)
    held.go.set()
    assert [int(answer.nodes[0]) for answer in net.finish().answers] == [0, 1, 2, 3]


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_invalid_parameters_drop_node(
    net: Network, caplog: pytest.LogCaptureFixture, what: float
) -> None:
    """Reports that are not finite are excluded, and the third in a row drops the node."""
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    for time in (1, 2, 3):
        broadcast = net.begin()
        assert next_broadcast(peer).sent.base_round == 0  # none of its reports counted
        peer.send(*report_of(broadcast, w=what))
        collected = net.finish()
        assert (collected.not_finite, collected.missed) == ((2,), ())
        assert (
            caplog.text.count(
                "intruder's report has numbers that are not finite or possible"
            )
            == time
        )
    assert peer.ended()[0] != grpc.StatusCode.OK
    wait_until(
        lambda: "is dropped: 3 of its reports in a row were not finite" in caplog.text
    )
    assert net.server.counters.dropped == 1
    assert_undisturbed(net)


def test_losses_not_finite_are_excluded(net: Network) -> None:
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    broadcast = net.begin()
    peer.receive()
    peer.send(*report_of(broadcast, loss=float("nan")))
    assert net.finish().not_finite == (2,)
    peer.leave()
    wait_until(lambda: len(net.server.descriptions()) == 2)
    assert_undisturbed(net)


FOREVER = Usage({"time": Reading(1e9, 1e9)})


def test_claimed_time_is_capped(net: Network) -> None:
    peer = RawPeer(net)
    peer.send(peer.hello())
    peer.receive()
    peer.send(*pack(Ready(FOREVER)))
    net.ready(3)
    assert max(costs.seconds for costs in net.server.trials()) < LONG
    broadcast = net.begin()
    peer.receive()
    peer.send(*report_of(broadcast, costs=FOREVER))
    costs = [answer.costs for answer in net.finish().answers]
    assert max(each.seconds for each in costs) < LONG
    assert max(each.step_seconds for each in costs) < LONG


def test_all_reports_not_finite() -> None:
    """The aggregator receives all of them."""
    with network() as net:
        peers = [RawPeer(net, f"peer-{number}") for number in (0, 1)]
        for peer in peers:
            peer.send(peer.hello())
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        for peer in peers:
            peer.receive()
            peer.send(*pack(Ready(COSTS)))
        net.ready(2)
        net.aggregator.start()
        broadcast = net.begin()
        for peer in peers:
            peer.receive()
            peer.send(*report_of(broadcast, w=float("nan")))
        collected = net.finish()
        assert (len(collected.answers), collected.not_finite) == (2, ())
        assert net.aggregator.last is not None
        assert net.aggregator.last.left_out == (0, 1)
