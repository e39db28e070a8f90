"""The server of the aggregator: connected nodes, counted bytes, and the end of a run."""

import threading

import pytest

from fedbudget.engines.grpc.messages import AggregatorReader
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from support.methods import bits
from support.networked import LONG, Network, network, node_data, without_network
from support.raw_peers import RawPeer, samples


def test_interrupt_ends_waiting_for_nodes() -> None:
    with network() as net:
        over = threading.Event()

        def interrupt() -> None:
            over.set()
            net.server.check_waiting()

        waiting = threading.Timer(0.02, interrupt)
        waiting.start()
        assert net.server.wait_for(1, over.is_set) is False
        waiting.join()


def test_aggregator_can_hold_data() -> None:
    with network() as net:
        net.server.add_own_node(Worker(node_data(0)))
        net.join(1), net.join(2)
        net.start(3)
        collected = [net.round() for _ in range(4)]
        assert bits(net.all_w) == bits(without_network([[0, 1, 2]] * 4))
        assert [answer.costs.here for answer in collected[0].answers] == [
            True,
            False,
            False,
        ]
        assert len(net.server.trials()) == 3


def test_node_numbers_follow_names() -> None:
    with network() as net:
        for name in ("node-10", "node-9", "node-2"):
            net.join(0, name=name)
        net.server.wait_for(3, lambda: False)
        assert list(net.server.descriptions()) == ["node-2", "node-9", "node-10"]
        net.start(3)
        result = {
            name: member.numbers.tolist()
            for name, member in net.server.members.snapshot().items()
        }
        assert result == {"node-2": [0], "node-9": [1], "node-10": [2]}


def test_farewell_reaches_all_nodes() -> None:
    with network() as net:
        joined = [net.join(0), net.join(1)]
        net.start(2)
        net.server.close(Farewell("the run is over"))
        assert [each.result(LONG) for each in joined] == [Farewell("the run is over")] * 2


def test_occupied_port_is_reported() -> None:
    with network() as net, pytest.raises(UserError, match="cannot listen on"):
        AggregatorServer(net.address, run="another", tokens=Tokens()).open()


def test_welcome_has_task_and_numbers(net: Network) -> None:
    peer = RawPeer(net)
    peer.send(peer.hello(samples=samples(sizes=(11, 12))))
    result = AggregatorReader().feed(peer.receive())
    assert isinstance(result, Welcome)
    assert (result.run, result.numbers) == ("a-run", (2, 3))
    assert bits(result.task) == bits(net.task)
