"""Rounds with nodes that are slow, late, away, back, or not finite."""

import threading
from time import monotonic
from typing import Any

import grpc
import pytest

from fedbudget.engines.grpc.messages import pack_ready
from fedbudget.engines.remote.members import MAX_ROUNDS_AWAY
from fedbudget.engines.remote.worker import Worker
from fedbudget.resources.resource import NodeCosts, Reading
from support.methods import bits
from support.networked import (
    COSTS,
    LONG,
    HeldWorker,
    Network,
    network,
    node_data,
    numbers,
    until,
    without_network,
)
from support.raw_peers import (
    RawPeer,
    assert_undisturbed,
    heard,
    report_of,
)


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
@pytest.mark.parametrize("batch", [None, 5])
def test_a_slow_node_is_left_out_and_comes_back_as_if_it_had_never_heard_of_the_round(
    method: str, batch: int | None
) -> None:
    slow = HeldWorker(node_data(2))
    with network(method, batch=batch) as net:
        net.join(0), net.join(1), net.join(2, worker=slow)
        net.start(3)
        net.round(), net.round()
        slow.go.clear()
        # The deadline is over at once, and then the round ends with the two that it needs.
        late = net.round(least=2, timeout=0.0)
        assert (numbers(late), late.missed) == ([0, 1], (2,))
        again = net.round(least=2)  # it owes its report still, and is not asked
        assert (numbers(again), again.missed) == ([0, 1], ())
        assert net.server.counters.late == 0
        slow.go.set()
        until(lambda: net.server.counters.late == 1)
        for _ in range(3):
            assert numbers(net.round()) == [0, 1, 2]
        here = [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
        assert bits(net.all_w) == bits(without_network(here, method, batch))
        assert slow.made == 6  # one of them for nothing


def test_a_deadline_that_passes_before_the_round_is_waited_for() -> None:
    """As where the aggregator had much else to do meanwhile: nothing wakes it up any more."""
    slow = HeldWorker(node_data(1))
    with network() as net:
        net.join(0), net.join(1, worker=slow)
        net.start(2)
        slow.go.clear()
        net.begin(least=1, timeout=0.02)
        pending = net.server._rounds.pending
        assert pending is not None
        until(
            lambda: pending.awaited == {"node-1"} and monotonic() > pending.deadline + 0.05
        )
        assert numbers(net.finish()) == [0]
        slow.go.set()


def test_a_late_report_is_not_taken_for_one_of_the_next_round() -> None:
    slow = HeldWorker(node_data(1))
    with network() as net:
        net.join(0), net.join(1, worker=slow)
        net.start(2)
        slow.go.clear()
        assert numbers(net.round(least=1, timeout=0.0)) == [0]
        net.begin(
            least=2
        )  # both are needed: the late one is asked as soon as it has said what is too late
        slow.go.set()
        assert numbers(net.finish()) == [0, 1]
        assert net.server.counters.late == 1
        assert bits(net.all_w) == bits(without_network([[0], [0, 1]]))


def test_fewer_nodes_than_needed_are_waited_for_and_one_that_comes_is_asked_at_once(
    net: Network,
) -> None:
    net.begin(least=3, timeout=0.0)
    joining = threading.Timer(0.05, lambda: net.join(2))
    joining.start()
    collected = net.finish()
    joining.join()
    assert (numbers(collected), collected.enough) == ([0, 1, 2], True)


def test_a_round_with_too_few_ends_when_the_time_is_gone(net: Network) -> None:
    collected = net.round(least=3, left=0.05)
    assert not collected.enough


def test_an_interruption_ends_the_waiting(net: Network) -> None:
    net.begin(least=3)
    net.server.wake()
    assert not net.finish().enough


def test_a_node_that_joins_in_the_middle_of_a_round_takes_part_from_the_next() -> None:
    held = HeldWorker(node_data(1))
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
        assert (numbers(collected), collected.missed) == ([0, 1], ())
        for _ in range(2):
            assert numbers(net.round()) == [0, 1, 2]
        assert bits(net.all_w) == bits(
            without_network([[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]])
        )


def leave(net: Network, joined: Any, nodes: int) -> None:
    joined.cancel()
    until(lambda: len(net.server.descriptions()) == nodes)


@pytest.mark.parametrize("method", ["fixed", "paper", "frugal", "accelerated"])
def test_a_node_that_comes_back_with_its_memory_goes_on_where_it_was(method: str) -> None:
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


def test_a_node_that_comes_back_without_its_memory_keeps_its_number_and_is_lost_to_drift() -> (
    None
):
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
        assert net.server.lost(3) == []  # told of once
        net.begin()
        found = heard(peer)
        assert (found.base_round, "catch_up.best" in found.kinds) == (0, True)


def test_nodes_that_are_gone_for_long_are_forgotten() -> None:
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


def test_an_interruption_between_two_rounds_is_not_lost(net: Network) -> None:
    net.server.wake()
    net.server.members.snapshot()  # the server has heard of it
    assert not net.round(least=3).enough


def test_what_goes_wrong_in_the_aggregators_own_work_is_heard() -> None:
    class Failing(Worker):
        def answer(self, request: Any) -> Any:
            if request.broadcast.round == 2:
                raise ZeroDivisionError("of our own")
            return super().answer(request)

    with network() as net:
        net.server.add_own_node(Failing(node_data(0)))
        net.join(1)
        net.start(2)
        net.round(least=2)
        net.begin(least=2)
        with pytest.raises(ZeroDivisionError, match="of our own"):
            net.server.finish()


def test_a_node_that_restarts_after_its_report_is_not_thought_to_remember_it() -> None:
    """Its old process has answered, its new one has joined, and the round is not over yet."""
    with network() as net:
        held = HeldWorker(node_data(1))
        first, _ = net.join(0), net.join(1, worker=held)
        net.start(2)
        net.round(least=2)
        held.go.clear()
        net.begin(least=2)
        until(
            lambda: (
                net.server.members["node-0"].rounds == 1
                and net.server._rounds.pending is not None
            )
        )
        until(lambda: "node-0" in net.server._rounds.pending.answers)  # type: ignore[union-attr]
        net.leave(first)
        net.join(0)
        net.ready(2)
        held.go.set()
        assert [answer.report.nodes.tolist() for answer in net.finish().answers] == [
            [0],
            [1],
        ]
        assert net.server.members["node-0"].base_round == 0
        collected = net.round(least=2)  # as one without a memory, and in order
        assert (len(collected.answers), collected.missed) == (2, ())
        assert net.server.counters.dropped == 0


def test_a_report_said_twice_counts_once(
    net: Network, caplog: pytest.LogCaptureFixture
) -> None:
    held = HeldWorker(node_data(3))  # keeps the round open
    net.join(3, worker=held)
    net.ready(3)
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(4)
    held.go.clear()
    broadcast = net.begin()
    heard(peer)
    peer.say_what_it_can(*report_of(broadcast), *report_of(broadcast))
    until(lambda: "is dropped: 'report' instead of 'nothing'" in caplog.text)
    held.go.set()
    assert [int(answer.report.nodes[0]) for answer in net.finish().answers] == [0, 1, 2, 3]


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_parameters_that_are_not_finite_are_set_aside_and_their_node_is_dropped_the_third_time(
    net: Network, caplog: pytest.LogCaptureFixture, what: float
) -> None:
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    for time in (1, 2, 3):
        broadcast = net.begin()
        assert heard(peer).base_round == 0  # none of its reports ever counted
        peer.say(*report_of(broadcast, w=what))
        collected = net.finish()
        assert (collected.not_finite, collected.missed) == ((2,), ())
        assert (
            caplog.text.count(
                "intruder's report has numbers that are not finite or possible"
            )
            == time
        )
    assert peer.ended()[0] != grpc.StatusCode.OK
    until(lambda: "is dropped: 3 of its reports in a row were not finite" in caplog.text)
    assert net.server.counters.dropped == 1
    assert_undisturbed(net)


def test_losses_that_are_not_finite_are_set_aside_too(net: Network) -> None:
    peer = RawPeer(net)
    peer.become_ready()
    net.ready(3)
    broadcast = net.begin()
    peer.hear()
    peer.say(*report_of(broadcast, loss=float("nan")))
    assert net.finish().not_finite == (2,)
    peer.leave()
    until(lambda: len(net.server.descriptions()) == 2)
    assert_undisturbed(net)


FOREVER = NodeCosts({"time": Reading(1e9, 1e9)})


def test_a_node_is_charged_no_more_time_than_there_was(net: Network) -> None:
    peer = RawPeer(net)
    peer.say(peer.hello())
    peer.hear()
    peer.say(*pack_ready(FOREVER))
    net.ready(3)
    assert max(costs.seconds for costs in net.server.trials()) < LONG
    broadcast = net.begin()
    peer.hear()
    peer.say(*report_of(broadcast, costs=FOREVER))
    said = [answer.costs for answer in net.finish().answers]
    assert max(costs.seconds for costs in said) < LONG
    assert max(costs.step_seconds for costs in said) < LONG


def test_when_no_report_is_finite_the_aggregator_gets_them_all() -> None:
    with network() as net:
        peers = [RawPeer(net, f"peer-{number}") for number in (0, 1)]
        for peer in peers:
            peer.say(peer.hello())
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        for peer in peers:
            peer.hear()
            peer.say(*pack_ready(COSTS))
        net.ready(2)
        net.aggregator.start()
        broadcast = net.begin()
        for peer in peers:
            peer.hear()
            peer.say(*report_of(broadcast, w=float("nan")))
        collected = net.finish()
        assert (len(collected.answers), collected.not_finite) == (2, ())
        assert net.aggregator.last is not None
        assert net.aggregator.last.left_out == (0, 1)
