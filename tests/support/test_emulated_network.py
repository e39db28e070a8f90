"""The emulated network, tested by real processes that use TCP and UDP."""

import hashlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.emulated_network import Counters, Network, emulated_network

ECHO = """
import socket
with socket.create_server(("", 5000)) as listener:
    print("ready", flush=True)
    connection, _ = listener.accept()
    with connection:
        while received := connection.recv(1 << 16):
            connection.sendall(received)
"""
"""Echoes one connection."""

ROUND_TRIPS = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    for _ in range(5):
        start = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        print(time.monotonic() - start)
"""

DIGEST = """
import hashlib, socket
with socket.create_server(("", 5000)) as listener:
    print("ready", flush=True)
    connection, _ = listener.accept()
    digest = hashlib.sha256()
    with connection:
        while received := connection.recv(1 << 16):
            digest.update(received)
    print(digest.hexdigest(), flush=True)
"""

SEND_INPUT = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    while received := sys.stdin.buffer.read1(1 << 16):
        connection.sendall(received)
"""

PRINT = """
import socket, sys
with socket.create_server(("", 5000)) as listener:
    print("ready", flush=True)
    connection, _ = listener.accept()
    with connection:
        while received := connection.recv(1 << 16):
            sys.stdout.buffer.write(received)
            sys.stdout.buffer.flush()
"""

DATAGRAMS = """
import socket, sys
address, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for _ in range(count):
        sender.sendto(bytes(size), (address, 6000))
"""

LISTEN = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
    receiver.bind(("", 6000))
    print("ready", flush=True)
    while True:
        receiver.recv(1 << 16)
"""
"""Receives datagrams, so that the kernel does not answer with an ICMP error."""

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
time.sleep(3600)
"""

HANG = """
import time
from support.emulated_network import emulated_network
with emulated_network(hosts=2) as network:
    print(*network.names, flush=True)
    time.sleep(3600)
"""

WITHOUT_ROOT = """
import os, pytest
from support.emulated_network import emulated_network
os.seteuid(65534)
try:
    with emulated_network(hosts=2):
        print("made")
except pytest.skip.Exception as skipped:
    print(skipped)
"""

HEADERS = 20 + 8
"""Bytes of the IP and UDP headers of a datagram."""


@pytest.fixture
def network() -> Iterator[Network]:
    with emulated_network(hosts=3) as network:
        yield network


def test_round_trip_takes_twice_the_delay(network: Network) -> None:
    start(network, 1, ECHO)
    network.set(delay=0.04)
    times = output(network, 0, ROUND_TRIPS, network.address(1)).split()
    assert len(times) == 5
    assert min(map(float, times)) >= 0.08


def test_tcp_data_survives_packet_loss(network: Network) -> None:
    data = random.Random(0).randbytes(1 << 20)
    receiver = start(network, 1, DIGEST)
    network.set(loss=0.05)
    sender = python(network, 0, SEND_INPUT, network.address(1), stdin=subprocess.PIPE)
    sender.communicate(data)
    assert receiver.stdout.readline().decode().strip() == hashlib.sha256(data).hexdigest()
    assert network.dropped > 0
    assert network.bytes > len(data)


def test_loss_is_share_of_dropped_packets(network: Network) -> None:
    start(network, 1, LISTEN)
    network.set(loss=0.05)
    output(network, 0, DATAGRAMS, network.address(1), "2000", "10")
    wait_for(lambda: network.counters.packets + network.counters.dropped >= 2000)
    assert network.packets + network.dropped == 2000
    # The standard deviation is sqrt(2000 * 0.05 * 0.95) = 9.75.
    assert 100 - 6 * 9.75 < network.dropped < 100 + 6 * 9.75


def test_counters_include_headers(network: Network) -> None:
    start(network, 1, LISTEN)
    output(network, 0, DATAGRAMS, network.address(1), "7", "100")
    wait_for(lambda: network.packets >= 7)
    assert network.counters == Counters(
        packets=7, bytes=7 * (100 + HEADERS), dropped=0, held=0
    )


def test_cut_stops_traffic_until_mended(network: Network) -> None:
    receiver = start(network, 1, PRINT)
    sender = python(network, 0, SEND_INPUT, network.address(1), stdin=subprocess.PIPE)
    send(sender, "before")
    assert receiver.stdout.readline() == b"before\n"

    network.cut(1)
    passed = network.packets
    send(sender, "during")
    wait_for(lambda: network.dropped >= 2)  # the packet and its retransmission
    assert network.packets == passed
    network.mend(1)
    assert receiver.stdout.readline() == b"during\n"
    send(sender, "after")
    assert receiver.stdout.readline() == b"after\n"


def test_cut_affects_only_one_host(network: Network) -> None:
    network.cut(1)
    start(network, 2, ECHO)
    assert len(output(network, 0, ROUND_TRIPS, network.address(2)).split()) == 5
    assert network.dropped == 0


def test_cut_drops_packets_in_flight(network: Network) -> None:
    start(network, 1, LISTEN)
    network.set(delay=3600)
    output(network, 0, DATAGRAMS, network.address(1), "3", "10")
    wait_for(lambda: network.counters.held == 3)
    network.cut(1)
    assert network.counters == Counters(packets=0, bytes=0, dropped=3, held=0)


def test_full_router_drops_packets() -> None:
    with emulated_network(hosts=2, max_held=1000) as network:
        network.set(delay=3600)
        output(network, 0, DATAGRAMS, network.address(1), "3", "500")
        wait_for(lambda: network.dropped == 2)  # only one packet of 528 bytes fits
        assert network.counters.held == 1


def test_hosts_reach_only_each_other(network: Network) -> None:
    devices = "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"
    assert output(network, 0, devices) == "lo tun0"
    routes = subprocess.run(
        ["ip", "-netns", network.names[0], "route"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert len(routes) == 1
    assert routes[0].startswith("10.77.0.0/24 dev tun0 ")

    outside = "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], 80)))"
    assert int(output(network, 0, outside, "192.0.2.1")) == 101  # ENETUNREACH
    output(network, 0, DATAGRAMS, "10.77.0.200", "2", "10")  # there is no such host
    wait_for(lambda: network.dropped == 2)
    assert network.packets == 0


def test_pid_is_that_of_the_command(network: Network) -> None:
    process = python(
        network,
        0,
        "import os; print(os.getpid(), flush=True); input()",
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid


def test_exception_leaves_nothing_behind() -> None:
    """Neither namespaces nor processes remain, not even stopped ones or children."""
    with pytest.raises(ZeroDivisionError), emulated_network(hosts=2) as network:  # noqa: PT012
        assert set(network.names) <= namespaces()
        stopped = start(network, 1, ECHO)
        stopped.send_signal(signal.SIGSTOP)
        parent = python(network, 0, PARENT)
        child = int(parent.stdout.readline())
        assert 1 / 0
    assert not set(network.names) & namespaces()
    assert stopped.returncode == parent.returncode == -signal.SIGKILL
    wait_for(lambda: ended(child))


def test_killed_test_leaves_nothing_behind(network: Network) -> None:
    """The fixture skips the test without namespaces, and is a second network at once."""
    with subprocess.Popen(
        [sys.executable, "-c", HANG], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE
    ) as test:
        assert test.stdout is not None
        names = set(test.stdout.readline().decode().split())
        assert len(names) == 2
        assert names <= namespaces()
        test.kill()
    wait_for(lambda: not names & namespaces())
    assert set(network.names) <= namespaces()


def test_without_root_the_test_is_skipped(network: Network) -> None:
    command = [sys.executable, "-c", WITHOUT_ROOT]
    reason = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert reason.stdout.strip() == "network namespaces need root"


def test_invalid_conditions_and_hosts_are_rejected(network: Network) -> None:
    with pytest.raises(ValueError, match="loss is a probability"):
        network.set(loss=5)
    with pytest.raises(ValueError, match="delay is in seconds"):
        network.set(delay=-1)
    with pytest.raises(ValueError, match="hosts are 0 to 2, not 3"):
        network.cut(3)


def python(
    network: Network, host: int, script: str, *arguments: str, **options: Any
) -> Any:
    """Start a script on a host. The type is Any, since its pipes are never None."""
    return network.popen(
        host,
        [sys.executable, "-I", "-c", script, *arguments],
        stdout=subprocess.PIPE,
        **options,
    )


def start(network: Network, host: int, script: str) -> Any:
    """Start a script and wait until it prints "ready"."""
    process = python(network, host, script)
    assert process.stdout.readline() == b"ready\n"
    return process


def output(network: Network, host: int, script: str, *arguments: str) -> str:
    """Run a script and return its output."""
    process = python(network, host, script, *arguments)
    printed: str = process.communicate()[0].decode().strip()
    assert process.returncode == 0
    return printed


def send(process: Any, line: str) -> None:
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()


def wait_for(fact: Callable[[], bool]) -> None:
    """Wait until a fact holds, for at most a minute."""
    end = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.01)


def namespaces() -> set[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[0] for line in listed.splitlines()}


def ended(pid: int) -> bool:
    """Whether a process has ended, or is a zombie that its new parent has not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
