"""Messages on the wire: packing, and readers that check every message.

From the aggregator: a welcome, broadcasts, a farewell. A broadcast's fields are sent in the
order of the dataclass (`MessageLayout`), followed by its vectors. `request` is part of the
task and is not sent again.

From a node: a hello, `ready`, and a report for every broadcast. A report's fields are sent
in the order of the dataclass: 64 bits for each number of each node, then the vectors. The
broadcast determines how many there are. Under secure aggregation a report has the number of
the attempt in place of numbers, and one masked vector of 64-bit integers.

Threads: no shared state; each reader belongs to one stream and is used by one thread at a
time.
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
from fedbudget.resources.resource import Usage
from fedbudget.secure import messages as masking

NO_DIFFERENCES: Mapping[str, bytes] = {}

_MORE_FROM_AGGREGATOR = pb.FromAggregator.MORE_FIELD_NUMBER
_MORE_FROM_NODE = pb.FromNode.MORE_FIELD_NUMBER
# most bytes of a broadcast without its vectors, and more for the updates of each node
_MOST_NUMBERS = 1000
_BYTES_OF_UPDATES = 9
_LONG_REASON = 1000
_LAYOUT = MessageLayout(Broadcast, without={"request"})
_DIFFERENCES = {"w", "mean"}
"""Vectors that may be sent as differences, to the previous w and to w."""


# From the aggregator.


def pack_welcome(welcome: Welcome) -> list[bytes]:
    return [pb.FromAggregator(welcome=describe(welcome)).SerializeToString()]


def pack_broadcast(
    broadcast: Broadcast,
    base_round: int,
    *,
    catch_up: bool,
    differences: Mapping[str, bytes] = NO_DIFFERENCES,
) -> list[bytes]:
    """Pack a broadcast for nodes whose memory is of the same round.

    Args:
      base_round: that round.
      catch_up: whether to include what they missed.
      differences: w minus their w, and `mean` minus w, compressed. Vectors without a
        difference are sent unchanged.
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
    """A received broadcast; decoding it may need the previous w.

    Args:
      values: all fields but vectors, from `MessageLayout.decode`.
      kinds: encoding of each vector.
      difference: whether w is sent as the difference to the previous w.
      vectors: bytes of each vector.
    """

    base_round: int
    values: tuple[Any, ...]
    kinds: Mapping[str, Kind]
    difference: bool
    vectors: Sequence[bytearray]
    task: Task

    @property
    def number(self) -> int:
        """Number of the round."""
        return int(_LAYOUT.value(self.values, "round"))

    @property
    def updates(self) -> int:
        """Largest number of requested local updates."""
        tau = int(_LAYOUT.value(self.values, "tau"))
        work = _LAYOUT.value(self.values, "work")  # plain values; the second is `most`
        return tau if work is None else max(tau, int(work[1]))

    def request(self, before: Float32 | None) -> RoundRequest:
        """Decode and check the broadcast.

        Args:
          before: w of the broadcast of `base_round`.
        """
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
                raise PeerError("a difference to parameters that were never sent")
            # An overflow is detected below.
            with np.errstate(over="ignore", invalid="ignore"):
                arrays["w"] = before + arrays["w"]
                if "mean" in arrays:
                    arrays["mean"] = arrays["w"] + arrays["mean"]
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise PeerError("parameters that are not finite")
        return arrays

    def _check(self, broadcast: Broadcast) -> None:
        """Check the ranges of numbers; `MessageLayout` has checked their types."""
        task = self.task
        if not 1 <= broadcast.round < 2**31 or not self.base_round < broadcast.round:
            raise PeerError(f"round {broadcast.round} after round {self.base_round}")
        if not 0 <= broadcast.tau <= task.tau_max:
            raise PeerError(f"tau is {broadcast.tau}; the task allows {task.tau_max}")
        if not 0 < broadcast.eta < math.inf:
            raise PeerError(f"eta is {broadcast.eta}")
        work = broadcast.work
        if work is not None and not 0 < work.effective <= work.most <= task.tau_max:
            raise PeerError(
                f"{work.most} updates, {work.effective} in effect; "
                f"the task allows {task.tau_max}"
            )
        private = broadcast.private
        if private is not None and not (
            0 <= private.clip < math.inf and 0 < private.rho < math.inf
        ):
            raise PeerError(f"a private round is {private}")
        if broadcast.drift is not None and not 0 <= broadcast.drift.share <= 1:
            raise PeerError(f"the share of a round is {broadcast.drift.share}")
        catch_up = broadcast.catch_up
        if catch_up is not None and (
            catch_up.since < 0 or (catch_up.mean is not None) != task.request.drift
        ):
            raise PeerError("`catch_up` does not fit the task")


FromAggregator = Welcome | EncodedBroadcast | Farewell | masking.FromAggregator
"""Whole messages."""


class AggregatorReader:
    """Reads a welcome, then broadcasts, and a farewell at any time.

    Args:
      task: if the welcome was read before.
    """

    def __init__(self, task: Task | None = None) -> None:
        self._task = task
        self._nodes = 0
        self._broadcast: EncodedBroadcast | None = None
        self._vectors: VectorBytes | None = None

    def feed(self, data: bytes) -> "FromAggregator | None":
        """Add bytes; returns a message when it is complete."""
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
            self._task = welcome.task
            self._nodes = len(welcome.numbers)
            return welcome
        if kind == "masking" and self._vectors is None:
            return masking.from_aggregator(message.masking)
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind == "broadcast" and self._task is not None and self._vectors is None:
            self._begin(message.broadcast, self._task)
        else:
            raise PeerError(f"unexpected message: {quoted(kind)}")
        return self._finish()

    def _begin(self, message: pb.Broadcast, task: Task) -> None:
        if len(message.numbers) > _MOST_NUMBERS + _BYTES_OF_UPDATES * self._nodes:
            raise PeerError(f"a broadcast with {len(message.numbers)} bytes of numbers")
        values, names = _LAYOUT.decode(message.numbers)
        difference = message.difference
        kinds: dict[str, Kind] = dict.fromkeys(names, "none")
        if difference:
            compress: Kind = _LAYOUT.value(values, "compress") or "none"
            for name in kinds.keys() & _DIFFERENCES:
                kinds[name] = compress
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


# From a node.


def pack_hello(hello: Hello) -> list[bytes]:
    return [pb.FromNode(hello=describe(hello)).SerializeToString()]


def pack_ready(costs: Usage) -> list[bytes]:
    return [pb.FromNode(ready=pb.Ready(costs=pack_costs(costs))).SerializeToString()]


def pack_refusal(reason: str) -> list[bytes]:
    return [pb.FromNode(refusal=reason[:_LONG_REASON]).SerializeToString()]


def pack_report(
    report: Report,
    costs: Usage,
    vectors: bytes | memoryview,
    tallies: Sequence[Tally] = (),
) -> list[bytes]:
    """Pack a report.

    Args:
      vectors: its vectors, already encoded.
    """
    numbers = [getattr(report, name) for name in NUMBERS]
    packed = [n.astype("<f8", copy=False).tobytes() for n in numbers if n is not None]
    message = pb.Report(
        round=report.round,
        numbers=b"".join(packed),
        costs=pack_costs(costs),
        tallies=pack_tallies(tallies),
        **first_part(vectors),
    )
    return _pack_report(message, vectors)


def pack_masked(number: int, attempt: int, vector: UInt64, costs: Usage) -> list[bytes]:
    """Pack the masked report of a round."""
    data = vector.astype("<u8", copy=False).tobytes()
    numbers = attempt.to_bytes(8, "little")
    message = pb.Report(
        round=number, numbers=numbers, costs=pack_costs(costs), **first_part(data)
    )
    return _pack_report(message, data)


def _pack_report(message: pb.Report, vectors: bytes | memoryview) -> list[bytes]:
    return [
        pb.FromNode(report=message).SerializeToString(),
        *more_parts(_MORE_FROM_NODE, vectors),
    ]


def pack_masking_reply(message: masking.FromNode) -> list[bytes]:
    return [pb.FromNode(masking=masking.pack(message)).SerializeToString()]


FromNode = Hello | Ready | Answer | MaskedReport | masking.FromNode
"""Whole messages."""


class NodeReader:
    """Reads a hello, `ready`, and a report for every broadcast, in this order.

    Args:
      masked: whether reports are masked, and messages of secure aggregation are allowed.
    """

    def __init__(self, masked: bool = False) -> None:
        self._expects = "hello"
        self._is_masked = masked
        # lengths of masked vectors, by round and attempt
        self._lengths: dict[tuple[int, int], int] = {}
        self._asked: tuple[Broadcast, Int64, Int64] | None = None
        self._report: pb.Report | None = None
        self._vectors: VectorBytes | None = None

    @property
    def receiving(self) -> int:
        """Bytes of an unfinished report's vectors; 0 without one."""
        return 0 if self._vectors is None else self._vectors.expected

    def expect_ready(self) -> None:
        self._expects = "ready"

    def expect_report(self, broadcast: Broadcast, numbers: Int64, sizes: Int64) -> None:
        """Expect a report of this broadcast, from nodes of these numbers and sizes."""
        self._expects = "report"
        self._asked = broadcast, numbers, sizes

    def expect_masked(self, number: int, attempt: int, length: int) -> None:
        """Expect a masked report; that of the previous attempt may still arrive."""
        self._expects = "report"
        self._lengths = dict(list(self._lengths.items())[-1:])
        self._lengths[number, attempt] = length

    def feed(self, data: bytes) -> FromNode | None:
        """Add bytes; returns a message when it is complete."""
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
            raise PeerError(f"{quoted(kind)} instead of {quoted(self._expects)}")
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
        attempt = -1
        if len(report.numbers) == 8:
            attempt = int.from_bytes(report.numbers, "little")
        length = self._lengths.get((report.round, attempt))
        if length is None:
            raise PeerError(f"a masked report of round {report.round} without a request")
        self._receive_vectors(report, [8 * length])

    def _begin(self, report: pb.Report) -> None:
        assert self._asked is not None
        broadcast, nodes, _ = self._asked
        if report.round != broadcast.round:
            raise PeerError(
                f"a report of round {report.round} instead of round {broadcast.round}"
            )
        due = 8 * len(nodes) * len(report_numbers(broadcast))
        if len(report.numbers) != due:
            raise PeerError(f"{len(report.numbers)} bytes of numbers instead of {due}")
        size = compression.encoded_size(broadcast.compress or "none", broadcast.w.size)
        sizes = [len(nodes) * size for _ in report_vectors(broadcast)]
        self._receive_vectors(report, sizes)
        self._expects = "more of a report"

    def _receive_vectors(self, report: pb.Report, sizes: Sequence[int]) -> None:
        self._vectors = VectorBytes(sizes, report.size, report.vectors, _MORE_FROM_NODE)
        report.ClearField("vectors")  # they were copied
        self._report = report

    def _finish(self) -> Answer | MaskedReport | None:
        report = self._report
        if report is None or self._vectors is None or not self._vectors.complete:
            return None
        vectors = self._vectors.vectors
        self._report = self._vectors = None
        if self._is_masked:
            vector = np.frombuffer(vectors[0], "<u8").astype(np.uint64, copy=False)
            attempt = int.from_bytes(report.numbers, "little")
            del self._lengths[report.round, attempt]
            return MaskedReport(report.round, attempt, vector, unpack_costs(report.costs))
        assert self._asked is not None
        answer = _read_report(report, vectors, *self._asked)
        self._asked = None
        self._expects = "nothing"
        return answer


def _read_report(
    report: pb.Report,
    encoded: Sequence[bytearray],
    broadcast: Broadcast,
    nodes: Int64,
    sizes: Int64,
) -> Answer:
    """Decode a report with exactly the requested fields."""
    n = len(nodes)
    d = broadcast.w.size
    kind = broadcast.compress or "none"
    rows = np.frombuffer(report.numbers, "<f8").astype(np.float64).reshape(-1, n)
    numbers = dict(zip(report_numbers(broadcast), rows, strict=True))
    vectors = {
        name: decode_vector(kind, data, d, n).reshape(n, d)
        for name, data in zip(report_vectors(broadcast), encoded, strict=True)
    }
    if "w" in vectors and kind != "none":
        # Compressed vectors are differences. An overflow is detected in the result.
        with np.errstate(over="ignore", invalid="ignore"):
            vectors["w"] += broadcast.w
    read = Report(broadcast.round, nodes, sizes, **numbers, **vectors)  # type: ignore[arg-type]
    tallies = unpack_tallies(report.tallies, broadcast.tallies)
    return Answer(read, unpack_costs(report.costs), tallies, len(report.tallies))
