"""The Ray engine: a simulated fleet in groups on the machines of a cluster, each an actor with its nodes' shards.

    ray.put(broadcast) --once per machine--> actors --sums--> the aggregator, here

Broadcasts pass through the object store, which every machine keeps one copy in; sums come back (sums.py), so that what
is done and held here does not grow with the number of nodes.

An actor can be lost at any time, with its process or its whole machine. It is then made again from its definition, and
hears again what it had heard; a copy of its memory, taken now and then into the object store of its machine, saves most
of that unless the machine is gone too. Then the round is asked for again. All this is the same to the bit.
"""

import contextlib
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from fedbudget import python_file
from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.engines.in_process import NodeGroup, NodeGroupState
from fedbudget.errors import UserError, WorkError
from fedbudget.models.compiling import numba_if_installed
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.protocol.sums import Sums, Vectors
from fedbudget.resources import round_usage
from fedbudget.resources.resource import NodeCosts, RoundUsage

os.environ.setdefault(
    "RAY_USAGE_STATS_ENABLED", "0"
)  # no reports to Ray's makers, unless someone wants them


KEPT = 20
"""After so many rounds a copy of an actor's memory is taken."""

_PATIENCE = 10.0  # seconds, for a cluster to be reached
_STARTS = 3  # of a cluster of this machine
_TOO_LATE = "timed out during startup"  # what Ray says then, after half a minute
_ATTEMPTS = 4  # to get one answer out of a group whose actor is lost again and again
_SPARE = 8  # units that a group's nodes are counted in, at least, so that groups are made up of few branches


class GroupFactory(Protocol):
    """What groups of nodes are made from, anywhere."""

    def group(self, first: int, end: int) -> NodeGroup:
        """Of nodes first..end-1."""


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[float]:
    """Connects to a Ray cluster, or starts one on this machine; gives how many cores it has.

    A connection that is there already is used, and left as it is.

    Args:
      address: HOST:PORT, ray://HOST:PORT or auto; on this machine when not given.
    """
    ours = not ray.is_initialized()
    if ours:
        quiet = {"logging_level": "ERROR", "log_to_driver": False}
        local = (
            {"include_dashboard": False, "num_cpus": os.cpu_count()}
            if address is None
            else {}
        )
        try:
            if address is not None and ":" in address:
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection(
                    (host, int(port)), timeout=_PATIENCE
                ).close()  # Ray would try for minutes
            with warnings.catch_warnings(
                action="ignore", category=FutureWarning
            ):  # of what Ray will do with GPUs
                _reach(address or "local", **quiet, **local)
        except (RayError, OSError, ValueError, RuntimeError) as error:
            where = "on this machine" if address is None else f"at {address}"
            raise WorkError(
                f"Ray cannot be reached {where}: {str(error).splitlines()[0]}"
            ) from None
    try:
        yield float(ray.cluster_resources().get("CPU", 1.0))
    finally:
        if ours:
            ray.shutdown()


def _reach(address: str, **options: Any) -> None:
    """Connects, and once more where a cluster of this machine was not there in time, as on a busy one."""
    for attempt in range(_STARTS):
        try:
            ray.init(address=address, **options)
            return
        except Exception as error:  # which Ray raises as such
            if _TOO_LATE not in str(error):
                raise
            ray.shutdown()
            if attempt == _STARTS - 1:
                raise RuntimeError(
                    f"a cluster did not start in time, {_STARTS} times"
                ) from None


def cuts(nodes: int, actors: int) -> list[int]:
    """The first node of each actor, and after the last: even shares, as far as each is made up of few branches.

    >>> cuts(100_000, 2), cuts(5, 4)
    ([0, 49152, 100000], [0, 1, 2, 4, 5])
    """
    unit = 1 << max(0, (nodes // (_SPARE * actors)).bit_length() - 1)
    return [
        *(round(nodes * actor / actors / unit) * unit for actor in range(actors)),
        nodes,
    ]


class RayNodes:
    """The nodes of a run, as groups on a cluster.

    Args:
      definition: of all groups.
      nodes: how many there are.
      actors: how many groups, of at least one node each.
      cpus: cores of the cluster, that actors share.
      present: who takes part, round after round; all nodes when not given.
    """

    engine: ClassVar[str] = "ray"

    def __init__(
        self,
        definition: GroupFactory,
        *,
        nodes: int,
        actors: int,
        cpus: float,
        present: Iterator[Flags] | None = None,
    ) -> None:
        for module in python_file.modules():  # which other processes may not have
            ray.cloudpickle.register_pickle_by_value(module)
        placed = ray.put(definition)
        self._places = [
            _Place(placed, first, end, cpus / actors)
            for first, end in pairwise(cuts(nodes, actors))
        ]
        self._present = present
        self._here: Sequence[_Place] = ()  # those with nodes in the last round
        self.took_part: Int64 = np.empty(0, np.int64)
        try:
            for place in self._places:  # all at once
                place.start()
            self._each(self._places, lambda place: place.actor.hold.remote())
        except BaseException:
            self.close()
            raise

    def trial(self, first: Broadcast) -> RoundUsage:
        """What a round takes, as far as the groups can tell."""
        broadcast = ray.put(first)
        return round_usage(
            self._each(self._places, lambda place: place.call("trial", broadcast))
        )

    def answer(
        self, broadcast: Broadcast
    ) -> tuple["RayNodes | Report", Sequence[NodeCosts]]:
        message = ray.put(broadcast)
        here = None if self._present is None else next(self._present)
        self.took_part = (
            np.arange(self._places[-1].end) if here is None else np.flatnonzero(here)
        )
        answers: list[tuple[Sums | Report | None, NodeCosts]] = self._each(
            self._places, lambda place: place.call("answer", message, place.own(here))
        )
        parts, costs = [part for part, _ in answers], [costs for _, costs in answers]
        for place, part in zip(self._places, parts, strict=True):
            place.remember(message, place.own(here), part)
        self._here = [
            place
            for place, part in zip(self._places, parts, strict=True)
            if part is not None
        ]
        if reports := [part for part in parts if isinstance(part, Report)]:
            return Report.merge(reports), costs
        merged = Sums.merge([part for part in parts if isinstance(part, Sums)])
        self.sums = replace(merged, all_data=sum(place.met for place in self._places))
        return self, costs

    def memory(self) -> tuple[NodeGroupState, ...]:
        return tuple(self._each(self._places, lambda place: place.call("memory")))

    def recall(self, groups: Sequence[NodeGroupState]) -> None:
        """Goes on from there, before the first round; groups are as they were."""
        for place, memory in zip(self._places, groups, strict=True):
            place.base = ray.put(memory)
        known = self._each(self._places, lambda place: place.call("recall", place.base))
        for place, met in zip(self._places, known, strict=True):
            place.met = met

    def distance_sums(self, vectors: Vectors, mean: Float32) -> Float64:
        """Of the round that was answered last; see `Reports`."""
        message = ray.put(mean)
        return np.concatenate(
            self._each(
                self._here, lambda place: place.call("distance_sums", vectors, message)
            )
        )

    def close(self) -> None:
        """Lets the actors go, and with them their cores and memory."""
        for place in self._places:
            place.stop()

    def _each(
        self, places: Sequence["_Place"], ask: Callable[["_Place"], Any]
    ) -> list[Any]:
        """What every group answers, in node order; a group whose actor is lost is made again and asked again."""
        asked = [ask(place) for place in places]
        return [
            self._answer(place, answer, ask)
            for place, answer in zip(places, asked, strict=True)
        ]

    def _answer(self, place: "_Place", answer: Any, ask: Callable[["_Place"], Any]) -> Any:
        for attempt in range(_ATTEMPTS):
            try:
                return ray.get(answer)
            except RayTaskError as error:
                raise (
                    error.cause if isinstance(error.cause, UserError | WorkError) else error
                ) from None
            except RayActorError as error:
                if attempt == _ATTEMPTS - 1:
                    raise WorkError(
                        f"the process of nodes {place.first} to {place.end - 1} was lost {_ATTEMPTS} times in a row: "
                        f"{str(error).splitlines()[0]}"
                    ) from None
                place.start_again()
                answer = ask(place)
        raise AssertionError


@dataclass
class _Place:
    """Where a group is.

    Args:
      definition: in the object store.
      share: of cores, that it may use.
      heard: all broadcasts so far, with who was here; they are in the object store, and so on disk if they are much.
      copies: of its memory, with after how many of these; the last two, because the last may not have been made.
      met: the data of its nodes that ever took part.
      base: its memory of before all that, where the run goes on.
    """

    definition: Any
    first: int
    end: int
    share: float
    actor: Any = None
    heard: list[tuple[Any, Flags | None]] = field(default_factory=list)
    copies: list[tuple[Any, int]] = field(default_factory=list)
    met: float = 0.0
    base: Any = None

    def start(self) -> None:
        self.stop()  # or its cores would not be free for the next one
        threads = max(1, int(self.share))
        cores = threads if self.share >= 1 else self.share
        actor = _Remote.options(num_cpus=cores, max_restarts=0)
        self.actor = actor.remote(self.definition, self.first, self.end, threads)

    def call(self, method: str, *arguments: Any) -> Any:
        """Asks the group for something; gives what to wait for."""
        return self.actor.call.remote(method, *arguments)

    def stop(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)

    def start_again(self) -> None:
        """The same group in another process, that has heard the same."""
        known = 0
        while self.copies and not known:
            self.start()
            memory, rounds = self.copies[-1]
            try:
                ray.get(self.call("recall", memory))
                known = rounds
            except (
                RayError
            ):  # lost with its machine, or never made because the actor was lost first
                self.copies.pop()
        if not known:
            self.start()
            if self.base is not None:
                self.call("recall", self.base)
        for message, here in self.heard[known:]:
            self.call("answer", message, here)

    def own(self, here: Flags | None) -> Flags | None:
        return None if here is None else here[self.first : self.end]

    def remember(
        self, message: Any, here: Flags | None, part: Sums | Report | None
    ) -> None:
        """A round that was answered."""
        self.heard.append((message, here))
        if isinstance(part, Sums) and part.all_data is not None:
            self.met = part.all_data
        if len(self.heard) % KEPT == 0:
            self.copies = [*self.copies[-1:], (self.call("memory"), len(self.heard))]


class _Actor:
    """A group in a process of its own; what it is asked for is done in the order of asking."""

    def __init__(
        self, definition: GroupFactory, first: int, end: int, threads: int
    ) -> None:
        self._make = partial(definition.group, first, end)
        self._made: NodeGroup | None = None
        self._threads = threads

    def hold(self) -> None:
        """Makes the group, if that was not done; not in __init__, where no error would be told."""
        _ = self._group

    @property
    def _group(self) -> NodeGroup:
        if self._made is None:
            numba = numba_if_installed()
            if numba is not None:
                numba.set_num_threads(min(self._threads, numba.config.NUMBA_NUM_THREADS))
            self._made = self._make()
            torch: Any = sys.modules.get(
                "torch"
            )  # which is there by now if the model needs it
            if torch is not None:
                torch.set_num_threads(self._threads)
        return self._made

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._group, method)(*arguments)


_Remote: Any = ray.remote(_Actor)
