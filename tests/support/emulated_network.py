"""Emulated hosts on this machine, with delay, loss and cuts between them.

    with emulated_network(hosts=2) as network:
        network.popen(0, ["fedbudget", "serve", ...])
        network.popen(1, ["fedbudget", "join", network.address(0) + ":7700", ...])
        network.set(delay=0.080, loss=0.05)
        network.cut(1)

A host is a network namespace with a TUN device. A router reads the packets of all hosts,
drops some of them, delays the others and delivers them. It runs in user space, because not
every kernel has the netem queue.

- The router is a separate process (this file, run as a script), so tests neither slow nor
  stop packets.
- The router creates the hosts and removes them when its control socket closes. A killed
  test leaves nothing behind.
- A change applies to every packet that the router reads after the call returns. Packets in
  flight keep their delay; a cut drops them.
- Hosts can reach only each other: there is no other device and no other route.
"""

import ctypes
import fcntl
import gc
import heapq
import itertools
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

MTU = 1500
"""The MTU of most networks; a megabyte is about 700 packets."""

MAX_HELD = 64 << 20
"""Maximum number of bytes held by the router; further packets are dropped."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of the network; every change sends all of them to the router."""

    delay: float = 0.0
    loss: float = 0.0
    cut: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.delay >= 0:
            raise ValueError(f"delay is in seconds, 0 or more, not {self.delay}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is a probability, 0 to 1, not {self.loss}")


@dataclass(frozen=True)
class Counters:
    """A consistent snapshot of the router's counters."""

    packets: int
    """Delivered packets."""
    bytes: int
    """Bytes of these packets, including the IP header."""
    dropped: int
    """Packets dropped at random, by a cut, by a full router, or without a target host."""
    held: int
    """Packets in flight."""


class Network:
    """Hosts 0, 1, ... that run processes, and the network conditions between them."""

    def __init__(self, names: Sequence[str], control: socket.socket) -> None:
        self.names = tuple(names)
        self.processes: list[subprocess.Popen[Any]] = []
        self._control = control
        self._conditions = Conditions()

    def address(self, host: int) -> str:
        return _address(self._checked(host))

    def popen(
        self, host: int, command: Sequence[str | os.PathLike[str]], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a host.

        Its pid is that of the command, so signals reach the command. The process, its
        children and its pipes are closed with the network at the latest.

        Args:
          options: options of `subprocess.Popen`.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[self._checked(host)], *command], **options
        )
        self.processes.append(process)
        return process

    def set(self, *, delay: float | None = None, loss: float | None = None) -> None:
        """Set the one-way delay in seconds, the loss probability, or both."""
        now = self._conditions
        delay = now.delay if delay is None else delay
        loss = now.loss if loss is None else loss
        self._change(replace(now, delay=delay, loss=loss))

    def cut(self, host: int) -> None:
        """Drop all packets from and to a host, including those in flight, until `mend`."""
        cut = {*self._conditions.cut, self._checked(host)}
        self._change(replace(self._conditions, cut=tuple(sorted(cut))))

    def mend(self, host: int) -> None:
        cut = {*self._conditions.cut} - {self._checked(host)}
        self._change(replace(self._conditions, cut=tuple(sorted(cut))))

    @property
    def counters(self) -> Counters:
        return self._change(self._conditions)

    @property
    def packets(self) -> int:
        return self.counters.packets

    @property
    def bytes(self) -> int:
        return self.counters.bytes

    @property
    def dropped(self) -> int:
        return self.counters.dropped

    def _change(self, conditions: Conditions) -> Counters:
        self._control.send(json.dumps(asdict(conditions)).encode())
        answer = _received(self._control)
        self._conditions = conditions
        return Counters(**answer)

    def _checked(self, host: int) -> int:
        if not 0 <= host < len(self.names):
            raise ValueError(f"hosts are 0 to {len(self.names) - 1}, not {host}")
        return host


@contextmanager
def emulated_network(
    hosts: int, *, mtu: int = MTU, max_held: int = MAX_HELD
) -> Iterator[Network]:
    """Create hosts for a test; skip the test with a reason if that is impossible."""
    if not 1 <= hosts <= 254:
        raise ValueError(f"the hosts share a /24 network: 1 to 254 of them, not {hosts}")
    if reason := _why_not():
        pytest.skip(reason)
    number = next(_numbers)
    names = [f"emulated-{os.getpid()}-{number}-{host}" for host in range(hosts)]
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control:
        with theirs:
            command = [sys.executable, "-I", __file__, str(mtu), str(max_held), *names]
            # A new session: Ctrl-C is for the tests, which end the router themselves.
            router = subprocess.Popen(
                command, stdin=theirs.fileno(), start_new_session=True
            )
        network = Network(names, control)
        try:
            refused = _received(control).get("refused")
            if refused:
                pytest.skip(f"hosts cannot be created: {refused}")
            yield network
        finally:
            # A forked process may hold a copy of the socket, so closing is not enough.
            control.shutdown(socket.SHUT_RDWR)
            router.wait()
            _remove(names)  # for a router that was killed
            for process in network.processes:
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    with suppress(OSError):  # unread output
                        if pipe:
                            pipe.close()


_numbers = itertools.count()

_DEVICE = "tun0"


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _why_not() -> str | None:
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the ip command (iproute2) is missing"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing"
    return None


def _received(control: socket.socket) -> dict[str, Any]:
    answer = control.recv(1 << 16)
    if not answer:
        raise RuntimeError(
            "the router of the emulated network has ended; see its standard error"
        )
    message: dict[str, Any] = json.loads(answer)
    return message


def _remove(names: Sequence[str]) -> None:
    """Kill all processes on the hosts and remove the hosts that still exist."""
    existing = {line.split()[0] for line in _ip("netns", "list").splitlines()}
    for name in names:
        if name not in existing:
            continue
        # Repeated, because a process may have started another one.
        while pids := _ip("netns", "pids", name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)


def _ip(*arguments: str, lines: Sequence[str] = ()) -> str:
    done = subprocess.run(
        ["ip", *arguments], input="\n".join(lines), capture_output=True, text=True
    )
    if done.returncode:
        kind = (
            PermissionError
            if "not permitted" in done.stderr or "denied" in done.stderr
            else RuntimeError
        )
        raise kind(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


# The router process.


def _main(mtu: int, max_held: int, names: Sequence[str]) -> None:
    control = socket.socket(fileno=0)
    try:
        try:
            tuns = _make_hosts(names, mtu)
        except PermissionError as error:
            control.send(json.dumps({"refused": str(error)}).encode())
            return
        control.send(b"{}")
        # Keeps packets on time while hosts compute; there are no cycles to collect.
        with suppress(PermissionError):
            os.nice(-10)
        gc.disable()
        _route(control, tuns, mtu, max_held)
    finally:
        _remove(names)


def _make_hosts(names: Sequence[str], mtu: int) -> list[int]:
    """Create a namespace and a device for each name; return the router's file handles."""
    tuns = []
    for host, name in enumerate(names):
        _ip("netns", "add", name)
        tuns.append(_open_tun(name))
        # A long queue, because the kernel drops packets if the queue is full, and only the
        # router should drop packets. No IPv6 address: its announcements would be packets
        # that no test sent.
        device = f"dev {_DEVICE}"
        lines = [
            "link set dev lo up",
            f"link set {device} mtu {mtu} txqueuelen 20000 addrgenmode none",
            f"address add {_address(host)}/24 {device}",
            f"link set {device} up",
        ]
        _ip("-netns", name, "-batch", "-", lines=lines)
    return tuns


def _open_tun(name: str) -> int:
    """Create a device in a namespace; the device belongs to the opener's namespace."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _enter(there)
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            set_device = 0x400454CA  # TUNSETIFF
            flags = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
            fcntl.ioctl(tun, set_device, struct.pack("16sH22x", _DEVICE.encode(), flags))
        finally:
            _enter(home)
    finally:
        os.close(home)
        os.close(there)
    return tun


def _enter(namespace: int) -> None:
    network = 0x40000000  # CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
    if libc.setns(namespace, network):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _route(control: socket.socket, tuns: Sequence[int], mtu: int, max_held: int) -> None:
    """Route packets until the control socket closes."""
    host_at = {tun: host for host, tun in enumerate(tuns)}
    host_of = {socket.inet_aton(_address(host)): host for host in range(len(tuns))}
    chance = random.Random(0).random
    number = itertools.count()  # keeps the order of packets that are due at the same time
    held: list[tuple[float, int, int, int, bytes]] = []  # due, number, from, to, packet
    held_bytes = packets = passed_bytes = dropped = 0
    delay, loss, cut = 0.0, 0.0, frozenset[int]()
    listened = [control.fileno(), *tuns]

    while True:
        # select has a timeout in microseconds; poll and epoll have milliseconds.
        wait = max(held[0][0] - monotonic(), 0.0) if held else None
        for ready in select.select(listened, (), (), wait)[0]:
            if ready not in host_at:
                request = control.recv(1 << 16)
                if not request:
                    return
                conditions = json.loads(request)
                delay, loss, cut = (
                    conditions["delay"],
                    conditions["loss"],
                    frozenset(conditions["cut"]),
                )
                kept = [each for each in held if each[2] not in cut and each[3] not in cut]
                dropped += len(held) - len(kept)
                held = kept
                heapq.heapify(held)
                held_bytes = sum(len(each[4]) for each in held)
                control.send(
                    json.dumps(
                        asdict(Counters(packets, passed_bytes, dropped, len(held)))
                    ).encode()
                )
                continue
            source = host_at[ready]
            for _ in range(16):  # limited, so that other hosts and due packets are served
                try:
                    packet = os.read(ready, mtu)
                except BlockingIOError:
                    break
                if packet[0] >> 4 != 4:
                    continue  # IPv6 packets of the kernel; hosts have no IPv6 address
                target = host_of.get(packet[16:20])
                if (
                    target is None
                    or source in cut
                    or target in cut
                    or (loss and chance() < loss)
                    or held_bytes + len(packet) > max_held
                ):
                    dropped += 1
                    continue
                heapq.heappush(
                    held, (monotonic() + delay, next(number), source, target, packet)
                )
                held_bytes += len(packet)

        now = monotonic()
        while held and held[0][0] <= now:
            _, _, _, target, packet = heapq.heappop(held)
            os.write(tuns[target], packet)
            held_bytes -= len(packet)
            packets += 1
            passed_bytes += len(packet)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
