"""What a node sends: a hello, that it is ready, and a report for every broadcast.

A report's fields are sent in the order of the dataclass: the numbers of each node as 64 bits each, then the vectors.
How many there are of both follows from the broadcast that it answers.
"""

from collections.abc import Sequence

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.engines.grpc.stream import VectorBytes, decode_vector, first_part, more_parts, parse, quoted
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.costs import pack_costs, unpack_costs
from fedbudget.engines.remote.descriptions import describe, read
from fedbudget.engines.remote.messages import Answer, Hello, Ready, report_numbers, report_vectors
from fedbudget.engines.remote.tallies import pack_tallies, unpack_tallies
from fedbudget.errors import printable
from fedbudget.models.tally import Tally
from fedbudget.protocol import compression
from fedbudget.protocol.messages import NUMBERS, Broadcast, PeerError, Report
from fedbudget.resources.usage import NodeCosts

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


class NodeReader:
    """Reads what a node sends: a hello, that it is ready, and a report for every broadcast, in this order."""

    def __init__(self) -> None:
        self._expects = "hello"
        self._asked: tuple[Broadcast, Int64, Int64] | None = None
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

    def feed(self, data: bytes) -> Hello | Ready | Answer | None:
        """Gives a whole message when there is one."""
        if self._vectors is not None and self._vectors.add_message(data):
            return self._finish()
        message = pb.FromNode()
        kind = parse(message, data)
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind == "refusal" and self._expects in ("ready", "report"):
            raise PeerError(f"it will not take part: {printable(message.refusal, _LONG_REASON)}")
        elif kind != self._expects:
            raise PeerError(f"{quoted(kind)} where {quoted(self._expects)} was expected")
        elif kind == "hello":
            self._expects = "nothing"
            return read(Hello, message.hello)
        elif kind == "ready":
            self._expects = "nothing"
            return Ready(unpack_costs(message.ready.costs))
        else:
            self._begin(message.report)
        return self._finish()

    def _begin(self, report: pb.Report) -> None:
        assert self._asked is not None
        broadcast, nodes, _ = self._asked
        kind = broadcast.compress or "none"
        if report.round != broadcast.round:
            raise PeerError(f"a report of round {report.round} when asked for round {broadcast.round}")
        due = 8 * len(nodes) * len(report_numbers(broadcast))
        if len(report.numbers) != due:
            raise PeerError(f"{len(report.numbers)} bytes of numbers where there should be {due}")
        sizes = [len(nodes) * compression.encoded_size(kind, broadcast.w.size) for _ in report_vectors(broadcast)]
        self._vectors = VectorBytes(sizes, report.size, report.vectors, _MORE)
        report.ClearField("vectors")  # they were copied
        self._report = report
        self._expects = "more of a report"

    def _finish(self) -> Answer | None:
        if self._report is None or self._vectors is None or not self._vectors.complete or self._asked is None:
            return None
        answer = _read_report(self._report, self._vectors.vectors, *self._asked)
        self._report = self._vectors = self._asked = None
        self._expects = "nothing"
        return answer


def _read_report(
    report: pb.Report, encoded: Sequence[bytearray], broadcast: Broadcast, nodes: Int64, sizes: Int64
) -> Answer:
    """A report, with all that was asked for and nothing else."""
    n, d, kind = len(nodes), broadcast.w.size, broadcast.compress or "none"
    numbers = np.frombuffer(report.numbers, "<f8").astype(np.float64).reshape(-1, n)
    vectors = {
        name: decode_vector(kind, data, d, n).reshape(n, d)
        for name, data in zip(report_vectors(broadcast), encoded, strict=True)
    }
    if "w" in vectors and kind != "none":
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found in the result
            vectors["w"] += broadcast.w  # differences are what is compressed
    fields = {**dict(zip(report_numbers(broadcast), numbers, strict=True)), **vectors}
    read = Report(broadcast.round, nodes, sizes, **fields)  # type: ignore[arg-type]
    tallies = unpack_tallies(report.tallies, broadcast.tallies)
    return Answer(read, unpack_costs(report.costs), tallies, len(report.tallies))
