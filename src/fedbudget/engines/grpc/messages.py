"""What the aggregator sends: a welcome, broadcasts, and a farewell.

A broadcast's fields are sent in the order of the dataclass (layout.py), and the vectors after them. What is asked for
(`request`) is in the task, and not sent again.

What a node sends: a hello, that it is ready, and a report for every broadcast.

A report's fields are sent in the order of the dataclass: the numbers of each node as 64 bits each, then the vectors.
How many there are of both follows from the broadcast that it answers. Where sums are masked, a report's numbers are the
number of the attempt that it is for, and its vectors one masked vector, of 64 bits a number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Int64, UInt64
from fedbudget.engines.grpc.stream import (
    MessageLayout,
    VectorBytes,
    decode_vector,
    first_part,
    more_parts,
    parse,
    quoted,
)
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.encodings import (
    describe,
    pack_costs,
    pack_tallies,
    read,
    unpack_costs,
    unpack_tallies,
)
from fedbudget.engines.remote.messages import (
    Answer,
    Farewell,
    Hello,
    MaskedReport,
    Ready,
    RoundRequest,
    Welcome,
    report_numbers,
    report_vectors,
)
from fedbudget.engines.remote.task import Task
from fedbudget.errors import printable
from fedbudget.evaluation.metrics import Tally
from fedbudget.protocol import compression
from fedbudget.protocol.compression import Kind
from fedbudget.protocol.messages import NUMBERS, Broadcast, PeerError, Report
from fedbudget.resources.resource import NodeCosts
from fedbudget.secure import messages as masking

_MORE_FROM_AGGREGATOR = pb.FromAggregator.MORE_FIELD_NUMBER
# bytes of all but vectors, and more of each node's number of updates
_MOST_NUMBERS = 1000
_BYTES_OF_UPDATES = 9
_LAYOUT = MessageLayout(Broadcast, without={"request"})
_DIFFERENCES = ("w", "mean")
"""What may be told as differences, to the w before and to w."""


NO_DIFFERENCES: Mapping[str, bytes] = {}


def pack_welcome(welcome: Welcome) -> list[bytes]:
    return [pb.FromAggregator(welcome=describe(welcome)).SerializeToString()]


def pack_broadcast(
    broadcast: Broadcast,
    base_round: int,
    *,
    catch_up: bool,
    differences: Mapping[str, bytes] = NO_DIFFERENCES,
) -> list[bytes]:
    """A broadcast to nodes whose memory stands after the same round.

    Args:
      catch_up: whether they are told what they missed.
      differences: w less the w that they know, and `mean` less w, where there is one, compressed; all vectors are sent
        as they are when not given.
    """
    numbers, arrays = _LAYOUT.encode(
        broadcast if catch_up else replace(broadcast, catch_up=None)
    )
    parts = [
        differences[name] if name in differences else compression.raw(array)
        for name, array in arrays.items()
    ]
    vectors = b"".join(parts) if len(parts) > 1 else parts[0]
    message = pb.Broadcast(
        base_round=base_round,
        numbers=numbers,
        difference=bool(differences),
        **first_part(vectors),
    )
    return [
        pb.FromAggregator(broadcast=message).SerializeToString(),
        *more_parts(_MORE_FROM_AGGREGATOR, vectors),
    ]


def pack_masking_request(message: masking.FromAggregator) -> list[bytes]:
    return [pb.FromAggregator(masking=masking.pack(message)).SerializeToString()]


def pack_farewell(farewell: Farewell) -> list[bytes]:
    message = pb.Farewell(reason=farewell.reason, again=farewell.again)
    return [pb.FromAggregator(farewell=message).SerializeToString()]


@dataclass(frozen=True)
class EncodedBroadcast:
    """A broadcast that may need the w before it to be understood.

    Args:
      values: all but its vectors, as layout.py has them.
      kinds: how its vectors are encoded.
      difference: whether w is told as the difference to the w before.
      vectors: the bytes of each.
    """

    base_round: int
    values: tuple[Any, ...]
    kinds: Mapping[str, Kind]
    difference: bool
    vectors: Sequence[bytearray]
    task: Task

    @property
    def number(self) -> int:
        """The round's."""
        return int(_LAYOUT.value(self.values, "round"))

    @property
    def updates(self) -> int:
        """The most local updates that are asked for."""
        work = _LAYOUT.value(self.values, "work")  # all but its vectors: plain numbers
        return max(
            int(_LAYOUT.value(self.values, "tau")), 0 if work is None else int(work[1])
        )

    def request(self, before: Float32 | None) -> RoundRequest:
        """The whole, given the w of the broadcast after which the node's memory stands."""
        broadcast = _LAYOUT.build(
            self.values, self._arrays(before), request=self.task.request
        )
        self._check(broadcast)
        return RoundRequest(broadcast, self.base_round)

    def _arrays(self, before: Float32 | None) -> dict[str, Float32]:
        arrays: dict[str, Float32] = {}
        for (name, kind), data in zip(self.kinds.items(), self.vectors, strict=True):
            arrays[name] = decode_vector(kind, data, self.task.parameters)
        if self.difference:
            if before is None:
                raise PeerError("a difference to parameters that were never told")
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # what is not finite is found below
                arrays["w"] = before + arrays["w"]
                if "mean" in arrays:
                    arrays["mean"] = arrays["w"] + arrays["mean"]
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise PeerError("parameters that are not finite")
        return arrays

    def _check(self, broadcast: Broadcast) -> None:
        """What numbers may be; their types are those of the fields already."""
        task = self.task
        catch_up = broadcast.catch_up
        if not 1 <= broadcast.round < 2**31 or not self.base_round < broadcast.round:
            raise PeerError(f"round {broadcast.round} after round {self.base_round}")
        if not 0 <= broadcast.tau <= task.tau_max:
            raise PeerError(
                f"tau is {broadcast.tau}, and no more than {task.tau_max} was agreed on"
            )
        if not 0 < broadcast.eta < math.inf:
            raise PeerError(f"eta is {broadcast.eta}")
        if (work := broadcast.work) is not None and not (
            0 < work.effective <= work.most <= task.tau_max
        ):
            raise PeerError(
                f"{work.most} updates, in effect {work.effective}, and {task.tau_max} were agreed on"
            )
        if (private := broadcast.private) is not None and not (
            0 <= private.clip < math.inf and 0 < private.rho < math.inf
        ):
            raise PeerError(f"a private round is {private}")
        if broadcast.drift is not None and not 0 <= broadcast.drift.share <= 1:
            raise PeerError(f"the share of a round is {broadcast.drift.share}")
        if catch_up is not None and (
            catch_up.since < 0 or (catch_up.mean is not None) != task.request.drift
        ):
            raise PeerError("what was missed is not what a node has to know")


FromAggregator = Welcome | EncodedBroadcast | Farewell | masking.FromAggregator
"""Whole messages."""


class AggregatorReader:
    """Reads what the aggregator sends: a welcome, then broadcasts, and a farewell at any time."""

    def __init__(self, task: Task | None = None) -> None:
        self._task = task
        self._nodes = 0
        self._broadcast: EncodedBroadcast | None = None
        self._vectors: VectorBytes | None = None

    def feed(self, data: bytes) -> "FromAggregator | None":
        """Gives a whole message when there is one."""
        if self._vectors is not None and self._vectors.add_message(data):
            return self._finish()
        message = pb.FromAggregator()
        kind = parse(message, data)
        if kind == "farewell":
            if len(message.farewell.reason) > 2000:
                raise PeerError(f"a reason of {len(message.farewell.reason)} characters")
            return Farewell(message.farewell.reason, message.farewell.again)
        if kind == "welcome" and self._task is None:
            welcome = read(Welcome, message.welcome)
            self._task, self._nodes = welcome.task, len(welcome.numbers)
            return welcome
        if kind == "masking" and self._vectors is None:
            return masking.from_aggregator(message.masking)
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind == "broadcast" and self._task is not None and self._vectors is None:
            self._begin(message.broadcast, self._task)
        else:
            raise PeerError(f"{quoted(kind)} where it was not expected")
        return self._finish()

    def _begin(self, message: pb.Broadcast, task: Task) -> None:
        if len(message.numbers) > _MOST_NUMBERS + _BYTES_OF_UPDATES * self._nodes:
            raise PeerError(f"a broadcast with {len(message.numbers)} bytes of numbers")
        values, names = _LAYOUT.decode(message.numbers)
        difference = message.difference
        kinds: dict[str, Kind] = dict.fromkeys(names, "none")
        if difference:
            kinds |= dict.fromkeys(
                set(_DIFFERENCES) & kinds.keys(),
                _LAYOUT.value(values, "compress") or "none",
            )
        sizes = [compression.encoded_size(kind, task.parameters) for kind in kinds.values()]
        self._vectors = VectorBytes(
            sizes, message.size, message.vectors, _MORE_FROM_AGGREGATOR
        )
        self._broadcast = EncodedBroadcast(
            message.base_round, values, kinds, difference, self._vectors.vectors, task
        )

    def _finish(self) -> EncodedBroadcast | None:
        if self._vectors is None or not self._vectors.complete:
            return None
        broadcast = self._broadcast
        self._broadcast = self._vectors = None
        return broadcast


_MORE_FROM_NODE = pb.FromNode.MORE_FIELD_NUMBER
_LONG_REASON = 1000


def pack_hello(hello: Hello) -> list[bytes]:
    return [pb.FromNode(hello=describe(hello)).SerializeToString()]


def pack_ready(costs: NodeCosts) -> list[bytes]:
    return [pb.FromNode(ready=pb.Ready(costs=pack_costs(costs))).SerializeToString()]


def pack_refusal(reason: str) -> list[bytes]:
    return [pb.FromNode(refusal=reason[:_LONG_REASON]).SerializeToString()]


def pack_report(
    report: Report,
    costs: NodeCosts,
    vectors: bytes | memoryview,
    tallies: Sequence[Tally] = (),
) -> list[bytes]:
    """A report whose vectors are encoded already."""
    numbers = [getattr(report, name) for name in NUMBERS]
    message = pb.Report(
        round=report.round,
        numbers=b"".join(
            values.astype("<f8", copy=False).tobytes()
            for values in numbers
            if values is not None
        ),
        costs=pack_costs(costs),
        tallies=pack_tallies(tallies),
        **first_part(vectors),
    )
    return [
        pb.FromNode(report=message).SerializeToString(),
        *more_parts(_MORE_FROM_NODE, vectors),
    ]


def pack_masking_reply(message: masking.FromNode) -> list[bytes]:
    return [pb.FromNode(masking=masking.pack(message)).SerializeToString()]


def pack_masked(number: int, attempt: int, vector: UInt64, costs: NodeCosts) -> list[bytes]:
    """A report of a round that is masked."""
    data = vector.astype("<u8", copy=False).tobytes()
    numbers = attempt.to_bytes(8, "little")
    message = pb.Report(
        round=number, numbers=numbers, costs=pack_costs(costs), **first_part(data)
    )
    return [
        pb.FromNode(report=message).SerializeToString(),
        *more_parts(_MORE_FROM_NODE, data),
    ]


class NodeReader:
    """Reads what a node sends: a hello, that it is ready, and a report for every broadcast, in this order.

    Args:
      masked: whether reports are masked, and messages for that come between them.
    """

    def __init__(self, masked: bool = False) -> None:
        self._expects = "hello"
        self._is_masked = masked
        self._lengths: dict[
            tuple[int, int], int
        ] = {}  # of masked vectors, by round and attempt
        self._asked: tuple[Broadcast, Int64, Int64] | None = None
        self._names: tuple[Sequence[str], Sequence[str]] = (), ()  # of the report's fields
        self._report: pb.Report | None = None
        self._vectors: VectorBytes | None = None

    @property
    def receiving(self) -> int:
        """Bytes of the vectors of a report that has begun and not ended; 0 where there is none."""
        return 0 if self._vectors is None else self._vectors.expected

    def expect_ready(self) -> None:
        self._expects = "ready"

    def expect_report(self, broadcast: Broadcast, numbers: Int64, sizes: Int64) -> None:
        """The next report answers this, by nodes of these numbers and sizes."""
        self._expects = "report"
        self._asked = broadcast, numbers, sizes

    def expect_masked(self, number: int, attempt: int, length: int) -> None:
        """A masked report of so many numbers; one of the attempt before may still be on its way."""
        self._expects = "report"
        self._lengths = {
            **dict(list(self._lengths.items())[-1:]),
            (number, attempt): length,
        }

    def feed(
        self, data: bytes
    ) -> Hello | Ready | Answer | MaskedReport | masking.FromNode | None:
        """Gives a whole message when there is one."""
        if self._vectors is not None and self._vectors.add_message(data):
            return self._finish()
        message = pb.FromNode()
        kind = parse(message, data)
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind == "refusal" and self._expects in ("ready", "report"):
            raise PeerError(
                f"it will not take part: {printable(message.refusal, _LONG_REASON)}"
            )
        elif (
            kind == "masking"
            and self._is_masked
            and self._vectors is None
            and self._expects != "hello"
        ):
            return masking.from_node(message.masking)
        elif kind != self._expects:
            raise PeerError(f"{quoted(kind)} where {quoted(self._expects)} was expected")
        elif kind == "hello":
            self._expects = "nothing"
            return read(Hello, message.hello)
        elif kind == "ready":
            self._expects = "nothing"
            return Ready(unpack_costs(message.ready.costs))
        elif self._is_masked:
            self._begin_masked(message.report)
        else:
            self._begin(message.report)
        return self._finish()

    def _begin_masked(self, report: pb.Report) -> None:
        attempt = (
            int.from_bytes(report.numbers, "little") if len(report.numbers) == 8 else -1
        )
        length = self._lengths.get((report.round, attempt))
        if length is None:
            raise PeerError(
                f"a masked report of round {report.round} that was not asked for"
            )
        self._vectors = VectorBytes(
            [8 * length], report.size, report.vectors, _MORE_FROM_NODE
        )
        report.ClearField("vectors")
        self._report = report

    def _begin(self, report: pb.Report) -> None:
        assert self._asked is not None
        broadcast, nodes, _ = self._asked
        kind = broadcast.compress or "none"
        if report.round != broadcast.round:
            raise PeerError(
                f"a report of round {report.round} when asked for round {broadcast.round}"
            )
        self._names = report_numbers(broadcast), report_vectors(broadcast)
        due = 8 * len(nodes) * len(self._names[0])
        if len(report.numbers) != due:
            raise PeerError(
                f"{len(report.numbers)} bytes of numbers where there should be {due}"
            )
        sizes = [
            len(nodes) * compression.encoded_size(kind, broadcast.w.size)
            for _ in self._names[1]
        ]
        self._vectors = VectorBytes(sizes, report.size, report.vectors, _MORE_FROM_NODE)
        report.ClearField("vectors")  # they were copied
        self._report = report
        self._expects = "more of a report"

    def _finish(self) -> Answer | MaskedReport | None:
        if self._report is None or self._vectors is None or not self._vectors.complete:
            return None
        if self._is_masked:
            report = self._report
            data = self._vectors.vectors[0]
            self._report = self._vectors = None
            vector = np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
            attempt = int.from_bytes(report.numbers, "little")
            del self._lengths[report.round, attempt]
            return MaskedReport(report.round, attempt, vector, unpack_costs(report.costs))
        assert self._asked is not None
        answer = _read_report(
            self._report, self._vectors.vectors, self._names, *self._asked
        )
        self._report = self._vectors = self._asked = None
        self._expects = "nothing"
        return answer


def _read_report(
    report: pb.Report,
    encoded: Sequence[bytearray],
    names: tuple[Sequence[str], Sequence[str]],
    broadcast: Broadcast,
    nodes: Int64,
    sizes: Int64,
) -> Answer:
    """A report, with all that was asked for and nothing else.

    Args:
      names: of its fields with numbers, and with vectors.
    """
    n = len(nodes)
    d = broadcast.w.size
    kind = broadcast.compress or "none"
    numbers = np.frombuffer(report.numbers, "<f8").astype(np.float64).reshape(-1, n)
    vectors = {
        name: decode_vector(kind, data, d, n).reshape(n, d)
        for name, data in zip(names[1], encoded, strict=True)
    }
    if "w" in vectors and kind != "none":
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # what is not finite is found in the result
            vectors["w"] += broadcast.w  # differences are what is compressed
    fields = {**dict(zip(names[0], numbers, strict=True)), **vectors}
    read = Report(broadcast.round, nodes, sizes, **fields)  # type: ignore[arg-type]
    tallies = unpack_tallies(report.tallies, broadcast.tallies)
    return Answer(read, unpack_costs(report.costs), tallies, len(report.tallies))
