"""The Ray engine: simulated nodes in groups on a cluster, each group in its own actor.

    ray.put(broadcast) --once per machine--> actors --sums--> aggregator in this process

Broadcasts pass through the object store, which keeps one copy per machine. Actors return
sums over their nodes (protocol/sums.py), so the aggregator's work and memory do not grow
with the number of nodes.

An actor can be lost at any time, with its process or its machine. Then a new actor starts
from the same factory and replays the broadcasts. Every `COPY_INTERVAL` rounds, a copy of
the group's memory goes into the object store of its machine. It shortens the replay unless
the machine is lost too. Then the round is requested again. The result is the same bit for
bit.

A cluster of this machine listens on loopback only, and accepts only processes that have its
token: anyone who can connect to a Ray cluster can run code as its user. Ray reads the token
when it is imported, so a program that has imported Ray earlier must set its own.
"""

import contextlib
import os
import secrets
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
    os.environ["RAY_AUTH_MODE"] = "token"
    own = Path("~/.ray/auth_token").expanduser()
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & {*os.environ} and not own.exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import ray
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayError, RayTaskError

from fedbudget import python_file
from fedbudget.arrays import Flags, Float32, Float64
from fedbudget.engines.in_process import (
    NodeGroup,
    NodeGroupState,
    SimulatedNodes,
    SimulatedRound,
)
from fedbudget.errors import UserError, WorkError
from fedbudget.models.compiling import numba_if_installed
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.personal import Personal
from fedbudget.protocol.sums import Sums
from fedbudget.resources.resource import Usage

# Send no usage reports to Ray's makers, unless the user enables them.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

COPY_INTERVAL = 20
"""Rounds between two copies of a group's memory."""

_CONNECT_SECONDS = 10.0
_STARTS = 3  # attempts to start a local cluster
_TOO_LATE = "timed out during startup"  # Ray's message after half a minute
_ATTEMPTS = 4  # actors that a group may lose in a row
_UNITS = 8  # minimum number of units per group, so that a group has few tree branches


class GroupFactory(Protocol):
    """Builds groups of nodes, in any process."""

    def group(self, first: int, end: int) -> NodeGroup:
        """Build the group of nodes first..end-1."""


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[float]:
    """Connect to a Ray cluster, or start one on this machine; yield its number of cores.

    An existing connection is used and left open.

    Args:
      address: HOST:PORT, ray://HOST:PORT or auto; None for a cluster on this machine.
    """
    ours = not ray.is_initialized()
    if ours:
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address is None:
            options |= {"include_dashboard": False, "num_cpus": os.cpu_count()}
        try:
            if address is not None and ":" in address:
                # Fail fast: Ray would try for minutes.
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            # Ray warns about a future change for GPUs.
            with (
                warnings.catch_warnings(action="ignore", category=FutureWarning),
                _on_loopback() if address is None else contextlib.nullcontext(),
            ):
                _connect(address or "local", options)
        except (RayError, OSError, ValueError, RuntimeError) as error:
            place = "on this machine" if address is None else f"at {address}"
            raise WorkError(
                f"Ray cannot be reached {place}: {str(error).splitlines()[0]}"
            ) from None
    try:
        yield float(ray.cluster_resources().get("CPU", 1.0))
    finally:
        if ours:
            ray.shutdown()


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a new cluster listen on loopback, as Ray does on macOS and Windows."""
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = ray_constants.ENABLE_RAY_CLUSTER
    given = os.environ.get(name)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[name] = "0"  # for Ray's processes
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given


def _connect(address: str, options: dict[str, Any]) -> None:
    """Connect; retry if a local cluster did not start in time, as on a busy machine."""
    for _ in range(_STARTS):
        try:
            ray.init(address=address, **options)
            return
        except Exception as error:  # Ray raises no narrower class here
            if _TOO_LATE not in str(error):
                raise
            ray.shutdown()
    raise RuntimeError(f"a cluster did not start in time, {_STARTS} times")


def group_bounds(nodes: int, actors: int) -> list[int]:
    """First node of each actor, then `nodes`: shares as even as few branches allow.

    >>> group_bounds(100_000, 2), group_bounds(5, 4)
    ([0, 49152, 100000], [0, 1, 2, 4, 5])
    """
    unit = 1 << max(0, (nodes // (_UNITS * actors)).bit_length() - 1)
    firsts = [round(nodes * actor / actors / unit) * unit for actor in range(actors)]
    return [*firsts, nodes]


class RayNodes(SimulatedNodes):
    """The nodes of a run, as groups on a cluster.

    Args:
      factory: builds the groups.
      nodes: number of nodes.
      actors: number of groups, each with at least one node.
      cpus: cores of the cluster, shared by the actors.
      present: which nodes take part in each round; None for all.
      rest: see `SimulatedNodes`.
    """

    engine: ClassVar[str] = "ray"

    def __init__(
        self,
        factory: GroupFactory,
        *,
        nodes: int,
        actors: int,
        cpus: float,
        present: Iterator[Flags] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(present, **rest)
        for module in python_file.modules():  # other processes may not have these
            ray.cloudpickle.register_pickle_by_value(module)
        stored = ray.put(factory)
        self._groups = [
            _RemoteGroup(stored, first, end, cpus / actors)
            for first, end in pairwise(group_bounds(nodes, actors))
        ]
        self._in_round: Sequence[_RemoteGroup] = ()  # groups with nodes in the last round
        try:
            for group in self._groups:  # start all before waiting for any
                group.start()
            self._each(self._groups, lambda group: group.actor.build.remote())
        except BaseException:
            self.close()
            raise

    def trials(self, rounds: Sequence[Broadcast]) -> Sequence[Usage]:
        message = ray.put(rounds)
        return self._each(self._groups, lambda group: group.call("trial", message))

    def answer(self, broadcast: Broadcast, present: Flags | None) -> SimulatedRound:
        message = ray.put(broadcast)
        answers: list[tuple[Sums | Report | None, Usage]] = self._each(
            self._groups, lambda group: group.call("answer", message, group.own(present))
        )
        self._in_round = []
        for group, (part, _) in zip(self._groups, answers, strict=True):
            group.record(message, group.own(present), part)
            if part is not None:
                self._in_round.append(group)

        numbers = np.arange(self._groups[-1].end)
        if present is not None:
            numbers = np.flatnonzero(present)
        usages = [usage for _, usage in answers]
        if reports := [part for part, _ in answers if isinstance(part, Report)]:
            return SimulatedRound(Report.merge(reports), numbers, usages)
        merged = Sums.merge([part for part, _ in answers if isinstance(part, Sums)])
        all_data = sum(group.all_data for group in self._groups)
        sums = replace(merged, all_data=all_data, distances=self.distance_sums)
        return SimulatedRound(sums, numbers, usages)

    def personal_models(self) -> dict[int, Personal]:
        parts = self._each(self._groups, lambda group: group.call("personal_models"))
        return {number: model for part in parts for number, model in part.items()}

    def memory(self) -> tuple[NodeGroupState, ...]:
        return tuple(self._each(self._groups, lambda group: group.call("memory")))

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        for group, memory in zip(self._groups, groups, strict=True):
            group.base = ray.put(memory)
        sizes = self._each(self._groups, lambda group: group.call("recall", group.base))
        for group, all_data in zip(self._groups, sizes, strict=True):
            group.all_data = all_data

    def distance_sums(self, name: str, mean: Float32) -> Float64:
        """Distance sums of the last round's vectors; see `Sums`."""
        message = ray.put(mean)
        return np.concatenate(
            self._each(
                self._in_round, lambda group: group.call("distance_sums", name, message)
            )
        )

    def close(self) -> None:
        """Stop the actors and free their cores and memory."""
        for group in self._groups:
            group.stop()

    def _each(
        self, groups: Sequence["_RemoteGroup"], call: Callable[["_RemoteGroup"], Any]
    ) -> list[Any]:
        """Call every group; return the answers in node order. Replaces lost actors."""
        pending = [(group, call(group)) for group in groups]
        return [self._wait(group, answer, call) for group, answer in pending]

    def _wait(
        self, group: "_RemoteGroup", answer: Any, call: Callable[["_RemoteGroup"], Any]
    ) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return ray.get(answer)
            except RayTaskError as error:
                if isinstance(error.cause, UserError | WorkError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                if attempt == _ATTEMPTS:
                    raise WorkError(
                        f"the process of nodes {group.first} to {group.end - 1} was lost "
                        f"{_ATTEMPTS} times in a row: {str(error).splitlines()[0]}"
                    ) from None
                group.replace_actor()
                answer = call(group)
        raise AssertionError


@dataclass
class _RemoteGroup:
    """A group of nodes in an actor.

    Args:
      factory: in the object store.
      first, end: its nodes are first..end-1.
      share: number of cores that it may use, possibly below 1.
      history: all broadcasts so far, with the fleets present. They are in the object
        store, which spills to disk.
      copies: of its memory, each with its number of rounds. The last two are kept, because
        the actor may be lost before it finishes the last.
      all_data: number of samples of its nodes that ever took part.
      base: its memory before `history`, in a resumed run.
    """

    factory: Any
    first: int
    end: int
    share: float
    actor: Any = None
    history: list[tuple[Any, Flags | None]] = field(default_factory=list)
    copies: list[tuple[Any, int]] = field(default_factory=list)
    all_data: float = 0.0
    base: Any = None

    def start(self) -> None:
        self.stop()  # frees the cores for the new actor
        threads = max(1, int(self.share))
        cores = threads if self.share >= 1 else self.share
        actor = _RemoteActor.options(num_cpus=cores, max_restarts=0)
        self.actor = actor.remote(self.factory, self.first, self.end, threads)

    def stop(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the group; return a reference to wait for."""
        return self.actor.call.remote(method, *arguments)

    def replace_actor(self) -> None:
        """Start the group in a new process, and replay its history."""
        restored = 0
        while self.copies and not restored:
            self.start()
            memory, rounds = self.copies[-1]
            try:
                ray.get(self.call("recall", memory))
                restored = rounds
            except RayError:  # lost with its machine, or never finished
                self.copies.pop()
        if not restored:
            self.start()
            if self.base is not None:
                self.call("recall", self.base)
        for message, present in self.history[restored:]:
            self.call("answer", message, present)

    def own(self, present: Flags | None) -> Flags | None:
        return None if present is None else present[self.first : self.end]

    def record(
        self, message: Any, present: Flags | None, part: Sums | Report | None
    ) -> None:
        """Add an answered round to the history."""
        self.history.append((message, present))
        if isinstance(part, Sums) and part.all_data is not None:
            self.all_data = part.all_data
        if len(self.history) % COPY_INTERVAL == 0:
            copy = (self.call("memory"), len(self.history))
            self.copies = [*self.copies[-1:], copy]


class _Actor:
    """A group in its own process; calls run in the order of their arrival."""

    def __init__(self, factory: GroupFactory, first: int, end: int, threads: int) -> None:
        self._factory = partial(factory.group, first, end)
        self._group: NodeGroup | None = None
        self._threads = threads

    def build(self) -> None:
        """Build the group; not in __init__, because Ray would hide an error there."""
        self._built()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._built(), method)(*arguments)

    def _built(self) -> NodeGroup:
        if self._group is None:
            numba = numba_if_installed()
            if numba is not None:
                numba.set_num_threads(min(self._threads, numba.config.NUMBA_NUM_THREADS))
            self._group = self._factory()
            torch: Any = sys.modules.get("torch")  # loaded by now if the model needs it
            if torch is not None:
                torch.set_num_threads(self._threads)
        return self._group


_RemoteActor: Any = ray.remote(_Actor)
