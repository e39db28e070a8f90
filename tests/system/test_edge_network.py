"""Real processes on emulated hosts with delay, packet loss and disconnected hosts."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedbudget.runs.record import RoundRecord
from support.emulated_network import Network, emulated_network
from support.processes import FEDBUDGET, Command, Commands, commands, records, summary

PORT = 7700
SHORT, LONG = 0.002, 0.080
"""One-way delay in seconds: within a building; across a continent or a mobile network."""


class Site:
    """An aggregator on host 0 of an emulated network, and a node on every other host."""

    def __init__(self, network: Network, start: Commands) -> None:
        self.network = network
        self._start = start

    def run(self, name: str, *options: str) -> "Training":
        """Start a run in folder `name` with adaptive τ and measured costs."""
        nodes, out = len(self.network.names) - 1, self._start.folder / name
        aggregator = self._on(
            0,
            "serve",
            self._address,
            "--nodes",
            str(nodes),
            "--json",
            "--out",
            name,
            *options,
        )
        shards = [(host, f"{host}/{nodes}") for host in range(1, nodes + 1)]
        data = "--dataset", "digits", "--case", "2", "--seeded-batches"
        joined = [
            self._on(host, "join", self._address, *data, "--shard", shard)
            for host, shard in shards
        ]
        return Training(aggregator, joined, out)

    @property
    def _address(self) -> str:
        return f"{self.network.address(0)}:{PORT}"

    def _on(self, host: int, *arguments: str) -> Command:
        program = "ip", "netns", "exec", self.network.names[host], FEDBUDGET
        return self._start.run(*arguments, "--insecure", program=program)


class Training:
    """A run with its processes."""

    def __init__(self, aggregator: Command, nodes: Sequence[Command], folder: Path) -> None:
        self.aggregator = aggregator
        self.nodes = nodes
        self._folder = folder

    @property
    def rounds(self) -> list[RoundRecord]:
        return records(self._folder)

    def wait_until(self, made: int, *, nodes: int | None = None) -> int:
        """Wait for `made` rounds and a last round with `nodes` nodes; return the number of
        rounds.
        """

        def number() -> int:
            rounds = self.rounds
            return (
                len(rounds)
                if len(rounds) >= made and nodes in (None, rounds[-1].nodes)
                else 0
            )

        return self.aggregator.wait_until(number)

    def end(self, over: float = 0.05) -> float:
        """Wait for the end of all processes, check the budget, and return the average τ.

        Args:
          over: share of the budget that may be overspent.
        """
        assert [process.end() for process in (self.aggregator, *self.nodes)] == [0] * (
            1 + len(self.nodes)
        )
        assert all("the run is over" in node.errors for node in self.nodes)
        found, rounds = summary(self._folder), self.rounds
        assert (found["status"], found["stopped_by"]) == ("finished", "time")
        limit = found["budget"]["time"]
        assert found["spent"]["time"] <= (1 + over) * limit
        assert rounds[-1].wall <= 1.05 * limit  # by an independent clock
        assert [record.round for record in rounds] == list(range(1, len(rounds) + 1))
        return float(found["average_tau"])


@contextmanager
def site(folder: Path, *, nodes: int, delay: float) -> Iterator[Site]:
    with emulated_network(hosts=nodes + 1) as network, commands(folder) as start:
        network.set(delay=delay)
        yield Site(network, start)


def present(rounds: Sequence[RoundRecord]) -> set[int]:
    """All numbers of nodes that occur in the rounds."""
    return {record.nodes for record in rounds}


@pytest.mark.slow
def test_slow_network_keeps_time_budget(tmp_path: Path) -> None:
    with site(tmp_path, nodes=3, delay=LONG) as edge:
        for seconds in (5, 8):
            training = edge.run(f"run-{seconds}", "--budget", f"time={seconds}s")
            training.end(over=0)
            assert training.rounds[-1].tau == 0  # the last w was evaluated


@pytest.mark.slow
def test_tau_grows_after_delay_increase(tmp_path: Path) -> None:
    with site(tmp_path, nodes=3, delay=SHORT) as edge:
        training = edge.run("run", "--method", "paper", "--budget", "time=8s")
        training.aggregator.wait_until(
            lambda: any(record.spent["time"] > 3 for record in training.rounds)
        )
        edge.network.set(delay=LONG)
        changed = len(training.rounds)
        training.end()
    rounds = training.rounds
    assert present(rounds) == {3}
    # The costs follow a lasting change after three rounds. The last record is the final
    # loss.
    near, far = rounds[10:changed], rounds[changed + 5 : -1]
    assert statistics.median(record.tau for record in far) > 2 * statistics.median(
        record.tau for record in near
    )


@pytest.mark.slow
def test_tau_grows_with_network_delay(tmp_path: Path) -> None:
    taus = []
    with site(tmp_path, nodes=5, delay=SHORT) as edge:
        for delay in (SHORT, LONG):
            edge.network.set(delay=delay)
            training = edge.run(
                f"delay-{delay}", "--method", "paper", "--budget", "time=10s"
            )
            taus.append(training.end())
            assert present(training.rounds) == {5}
    assert taus[1] > 2 * taus[0]


@pytest.mark.slow
def test_run_survives_five_percent_packet_loss(tmp_path: Path) -> None:
    with site(tmp_path, nodes=5, delay=0.01) as edge:
        edge.network.set(loss=0.05)
        training = edge.run("run", "--budget", "time=15s")
        training.end()
        lost, passed = edge.network.dropped, edge.network.packets
    assert 0.02 < lost / passed < 0.10
    rounds = training.rounds
    assert len(rounds) > 20
    # A lost packet is sent again well before the deadline of a round.
    assert statistics.mean(record.nodes == 5 for record in rounds) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("cut", [[3], [2, 3, 4, 5]], ids=["one node", "all nodes but one"])
def test_disconnected_nodes_return(tmp_path: Path, cut: list[int]) -> None:
    """The run continues without nodes that are cut off, and with them after the cut."""
    with site(tmp_path, nodes=5, delay=SHORT) as edge:
        training = edge.run("run", "--budget", "time=40s")
        training.wait_until(made=20, nodes=5)
        before, meanwhile = _cut_for(10, edge, training, cut)
        back = training.wait_until(meanwhile + 1, nodes=5)
        training.end()
    rounds = training.rounds
    without = rounds[before:meanwhile]
    # Each missing node is asked only once, so later rounds do not wait for it.
    assert sorted(number for record in without for number in record.missed) == [
        host - 1 for host in cut
    ]
    last = max(index for index, record in enumerate(without) if record.missed)
    assert len(without[last + 1 :]) > 20
    assert present(without[last + 1 :]) == {5 - len(cut)}
    assert statistics.mean(record.nodes == 5 for record in rounds[back:]) > 0.95
    # TCP retransmits lost packets; a short cut ends no connection.
    assert all(
        "not connected" not in once_connected(node.errors) for node in training.nodes
    )


def once_connected(errors: str) -> str:
    """The log of a node from its first connection on; earlier attempts may have failed."""
    return errors.partition("waiting for a task")[2]


@pytest.mark.slow
def test_disconnected_aggregator_waits(tmp_path: Path) -> None:
    with site(tmp_path, nodes=5, delay=SHORT) as edge:
        training = edge.run("run", "--budget", "time=40s")
        training.wait_until(made=20, nodes=5)
        before, meanwhile = _cut_for(10, edge, training, [0])
        back = training.wait_until(meanwhile + 1, nodes=5)
        training.end()
    assert meanwhile - before <= 2  # reports that were already in flight
    assert statistics.mean(record.nodes == 5 for record in training.rounds[back:]) > 0.95


@pytest.mark.slow
def test_node_reconnects_after_long_cut(tmp_path: Path) -> None:
    with site(tmp_path, nodes=2, delay=SHORT) as edge:
        training = edge.run("run", "--budget", "time=75s")
        training.wait_until(made=20, nodes=2)
        _, meanwhile = _cut_for(50, edge, training, [1])
        back = training.wait_until(meanwhile + 1, nodes=2)
        training.end()
    cut_off, other = training.nodes
    assert "not connected" in once_connected(cut_off.errors)
    assert cut_off.errors.count("joined") == 2
    assert "not connected" not in once_connected(other.errors)
    assert statistics.mean(record.nodes == 2 for record in training.rounds[back:]) > 0.95


def _cut_for(
    seconds: float, edge: Site, training: Training, hosts: Sequence[int]
) -> tuple[int, int]:
    """Cut off hosts for some seconds; return the number of rounds before and after it."""
    for host in hosts:
        edge.network.cut(host)
    before = len(training.rounds)
    time.sleep(seconds)
    meanwhile = len(training.rounds)
    for host in hosts:
        edge.network.mend(host)
    return before, meanwhile
