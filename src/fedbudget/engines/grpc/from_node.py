"""What a node sends: a hello, that it is ready, and a report for every broadcast.

A report's fields are sent in the order of the dataclass: the numbers of each node as 64 bits each, then the vectors.
How many there are of both follows from the broadcast that it answers. Where sums are masked, a report's numbers are the
number of the attempt that it is for, and its vectors one masked vector, of 64 bits a number.
"""

from collections.abc import Sequence

import numpy as np

from fedbudget.arrays import Int64, UInt64
from fedbudget.engines.grpc.stream import VectorBytes, decode_vector, first_part, more_parts, parse, quoted
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.costs import pack_costs, unpack_costs
from fedbudget.engines.remote.descriptions import describe, read
from fedbudget.engines.remote.messages import Answer, Hello, MaskedReport, Ready, report_numbers, report_vectors
from fedbudget.engines.remote.tallies import pack_tallies, unpack_tallies
from fedbudget.errors import printable
from fedbudget.models.tally import Tally
from fedbudget.protocol import compression
from fedbudget.protocol.messages import NUMBERS, Broadcast, PeerError, Report
from fedbudget.resources.usage import NodeCosts
from fedbudget.secure import messages as masking

_MORE = pb.FromNode.MORE_FIELD_NUMBER
_LONG_REASON = 1000


def pack_hello(hello: Hello) -> list[bytes]:
    return [pb.FromNode(hello=describe(hello)).SerializeToString()]


def pack_ready(costs: NodeCosts) -> list[bytes]:
    return [pb.FromNode(ready=pb.Ready(costs=pack_costs(costs))).SerializeToString()]


def pack_refusal(reason: str) -> list[bytes]:
    return [pb.FromNode(refusal=reason[:_LONG_REASON]).SerializeToString()]


def pack_report(
    report: Report, costs: NodeCosts, vectors: bytes | memoryview, tallies: Sequence[Tally] = ()
) -> list[bytes]:
    """A report whose vectors are encoded already."""
    numbers = [getattr(report, name) for name in NUMBERS]
    message = pb.Report(
        round=report.round,
        numbers=b"".join(values.astype("<f8", copy=False).tobytes() for values in numbers if values is not None),
        costs=pack_costs(costs),
        tallies=pack_tallies(tallies),
        **first_part(vectors),
    )
    return [pb.FromNode(report=message).SerializeToString(), *more_parts(_MORE, vectors)]


def pack_masking(message: masking.FromNode) -> list[bytes]:
    return [pb.FromNode(masking=masking.pack(message)).SerializeToString()]


def pack_masked(number: int, attempt: int, vector: UInt64, costs: NodeCosts) -> list[bytes]:
    """A report of a round that is masked."""
    data = vector.astype("<u8", copy=False).tobytes()
    numbers = attempt.to_bytes(8, "little")
    message = pb.Report(round=number, numbers=numbers, costs=pack_costs(costs), **first_part(data))
    return [pb.FromNode(report=message).SerializeToString(), *more_parts(_MORE, data)]


class NodeReader:
    """Reads what a node sends: a hello, that it is ready, and a report for every broadcast, in this order.

    Args:
      masked: whether reports are masked, and messages for that come between them.
    """

    def __init__(self, masked: bool = False) -> None:
        self._expects = "hello"
        self._is_masked = masked
        self._lengths: dict[tuple[int, int], int] = {}  # of masked vectors, by round and attempt
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
        self._lengths = {**dict(list(self._lengths.items())[-1:]), (number, attempt): length}

    def feed(self, data: bytes) -> Hello | Ready | Answer | MaskedReport | masking.FromNode | None:
        """Gives a whole message when there is one."""
        if self._vectors is not None and self._vectors.add_message(data):
            return self._finish()
        message = pb.FromNode()
        kind = parse(message, data)
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind == "refusal" and self._expects in ("ready", "report"):
            raise PeerError(f"it will not take part: {printable(message.refusal, _LONG_REASON)}")
        elif kind == "masking" and self._is_masked and self._vectors is None and self._expects != "hello":
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
        attempt = int.from_bytes(report.numbers, "little") if len(report.numbers) == 8 else -1
        length = self._lengths.get((report.round, attempt))
        if length is None:
            raise PeerError(f"a masked report of round {report.round} that was not asked for")
        self._vectors = VectorBytes([8 * length], report.size, report.vectors, _MORE)
        report.ClearField("vectors")
        self._report = report

    def _begin(self, report: pb.Report) -> None:
        assert self._asked is not None
        broadcast, nodes, _ = self._asked
        kind = broadcast.compress or "none"
        if report.round != broadcast.round:
            raise PeerError(f"a report of round {report.round} when asked for round {broadcast.round}")
        self._names = report_numbers(broadcast), report_vectors(broadcast)
        due = 8 * len(nodes) * len(self._names[0])
        if len(report.numbers) != due:
            raise PeerError(f"{len(report.numbers)} bytes of numbers where there should be {due}")
        sizes = [len(nodes) * compression.encoded_size(kind, broadcast.w.size) for _ in self._names[1]]
        self._vectors = VectorBytes(sizes, report.size, report.vectors, _MORE)
        report.ClearField("vectors")  # they were copied
        self._report = report
        self._expects = "more of a report"

    def _finish(self) -> Answer | MaskedReport | None:
        if self._report is None or self._vectors is None or not self._vectors.complete:
            return None
        if self._is_masked:
            report, data = self._report, self._vectors.vectors[0]
            self._report = self._vectors = None
            vector = np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
            attempt = int.from_bytes(report.numbers, "little")
            del self._lengths[report.round, attempt]
            return MaskedReport(report.round, attempt, vector, unpack_costs(report.costs))
        assert self._asked is not None
        answer = _read_report(self._report, self._vectors.vectors, self._names, *self._asked)
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
    n, d, kind = len(nodes), broadcast.w.size, broadcast.compress or "none"
    numbers = np.frombuffer(report.numbers, "<f8").astype(np.float64).reshape(-1, n)
    vectors = {
        name: decode_vector(kind, data, d, n).reshape(n, d) for name, data in zip(names[1], encoded, strict=True)
    }
    if "w" in vectors and kind != "none":
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found in the result
            vectors["w"] += broadcast.w  # differences are what is compressed
    fields = {**dict(zip(names[0], numbers, strict=True)), **vectors}
    read = Report(broadcast.round, nodes, sizes, **fields)  # type: ignore[arg-type]
    tallies = unpack_tallies(report.tallies, broadcast.tallies)
    return Answer(read, unpack_costs(report.costs), tallies, len(report.tallies))
