"""Readers of the messages on a stream, which check every message and its order.

From the aggregator: a welcome, broadcasts, a farewell. From a node: a hello, `ready`, and a
report for every broadcast. Under secure aggregation (secure/messages.py) reports are
masked, and other messages precede and follow them.

Threads: no shared state; each reader belongs to one stream and is used by one thread at a
time.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedbudget.arrays import Int64
from fedbudget.engines.grpc.stream import MORE, VectorBytes
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import (
    Answer,
    Farewell,
    Hello,
    MaskedReport,
    Ready,
    Welcome,
)
from fedbudget.engines.remote.task import Task
from fedbudget.engines.remote.wire import (
    EncodedBroadcast,
    ExpectedReport,
    Frame,
    SentReport,
    SentRequest,
)
from fedbudget.errors import printable
from fedbudget.protocol.messages import PeerError
from fedbudget.secure import messages as masking
from fedbudget.secure.graph import MOST_NODES

FromAggregator = Welcome | EncodedBroadcast | Farewell | masking.FromAggregator
"""Whole messages of the aggregator."""

FromNode = Hello | Ready | Answer | MaskedReport | masking.FromNode
"""Whole messages of a node."""

_LONG_REASON = 1000
_MASKING_FROM_AGGREGATOR = {"terms", "group", "relay", "survivors", "confirmations"}
_MASKING_FROM_NODE = {"introduction", "shares", "abstention", "confirmed", "opened"}


class AggregatorReader:
    """Reads a welcome, then broadcasts, and a farewell at any time.

    Args:
      task: if the welcome was read before.
    """

    def __init__(self, task: Task | None = None) -> None:
        self._task = task
        self._nodes = 0
        self._is_masked = False
        self._sent: SentRequest | None = None
        self._vectors: VectorBytes | None = None

    def feed(self, data: bytes) -> FromAggregator | None:
        """Add bytes; returns a message when it is complete."""
        if data.startswith(MORE):
            if self._vectors is None:
                raise PeerError("unexpected message: 'more'")
            self._vectors.add(memoryview(data)[1:])
            return self._finish()
        frame = wire.unpack(data)
        name = frame.name
        task = self._task
        if name == "farewell":
            farewell: Farewell = wire.read(frame)
            return farewell
        if name == "welcome" and task is None:
            welcome: Welcome = wire.read(frame)
            self._task = welcome.task
            self._nodes = len(welcome.numbers)
            return welcome
        if name in _MASKING_FROM_AGGREGATOR and self._vectors is None:
            message: masking.FromAggregator = wire.read(frame)
            self._is_masked |= isinstance(message, masking.Terms)
            return message
        if name != "broadcast" or task is None or self._vectors is not None:
            raise PeerError(f"unexpected message: '{name}'")
        # A masked broadcast is the same for all nodes, with the work of each.
        nodes = MOST_NODES if self._is_masked else self._nodes
        self._sent, sizes = wire.read_request(frame, nodes, task)
        self._vectors = VectorBytes(sizes, sum(sizes), [bytearray() for _ in sizes])
        self._vectors.add(frame.rest)
        return self._finish()

    def _finish(self) -> EncodedBroadcast | None:
        assert self._vectors is not None
        assert self._sent is not None
        assert self._task is not None
        if self._vectors.missing:
            return None
        vectors = self._vectors.vectors
        self._vectors = None
        return EncodedBroadcast(self._sent, vectors, self._task)


@dataclass(frozen=True)
class _Asked:
    """A requested report, and the numbers and sizes of its nodes."""

    report: ExpectedReport
    numbers: Int64
    sizes: Int64


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
        self._asked: _Asked | None = None
        self._begun: SentReport | MaskedReport | None = None  # without its vectors
        self._vectors: VectorBytes | None = None
        self.receiving = 0  # bytes of an unfinished report's vectors; 0 without one

    def expect_ready(self) -> None:
        self._expects = "ready"

    def expect_report(self, report: ExpectedReport, numbers: Int64, sizes: Int64) -> None:
        """Expect a report from nodes of these numbers and sizes."""
        self._expects = "report"
        self._asked = _Asked(report, numbers, sizes)

    def expect_masked(self, number: int, attempt: int, length: int) -> None:
        """Expect a masked report; that of the previous attempt may still arrive."""
        self._expects = "masked report"
        self._lengths = dict(list(self._lengths.items())[-1:])
        self._lengths[number, attempt] = length

    def feed(self, data: bytes) -> FromNode | None:
        """Add bytes; returns a message when it is complete."""
        vectors = self._vectors
        if data.startswith(MORE) and vectors is not None:
            vectors.add(memoryview(data)[1:])
            return None if vectors.missing else self._finish(vectors)
        if data.startswith(MORE):
            raise PeerError(f"'more' instead of '{self._expects}'")
        frame = wire.unpack(data)
        name = frame.name
        if name == "refusal" and self._expects not in ("hello", "nothing"):
            reason = printable(wire.read(frame).reason, _LONG_REASON)
            raise PeerError(f"it will not take part: {reason}")
        allowed = self._is_masked and vectors is None and self._expects != "hello"
        if name in _MASKING_FROM_NODE and allowed:
            if name == "abstention":
                return wire.read_abstention(frame)
            message: masking.FromNode = wire.read(frame)
            return message
        if vectors is not None or name != self._expects:
            expected = self._expects if vectors is None else "more of a report"
            raise PeerError(f"'{name}' instead of '{expected}'")
        if name == "hello":
            self._expects = "nothing"
            hello: Hello = wire.read(frame)
            return hello
        if name == "ready":
            self._expects = "nothing"
            return wire.read_ready(frame)
        return self._begin(frame)

    def _begin(self, frame: Frame) -> Answer | MaskedReport | None:
        asked = self._asked
        if asked is None:
            report = wire.read_masked(frame)
            length = self._lengths.get((report.round, report.attempt))
            if length is None:
                raise PeerError(
                    f"a masked report of round {report.round} without a request"
                )
            self._begun = report
            sizes = [8 * length]
        else:
            self._begun, sizes = asked.report.read(frame, len(asked.numbers))
        vectors = VectorBytes(sizes, sum(sizes), [bytearray() for _ in sizes])
        vectors.add(frame.rest)
        if not vectors.missing:
            return self._finish(vectors)
        self._vectors = vectors
        self.receiving = sum(sizes)
        return None

    def _finish(self, received: VectorBytes) -> Answer | MaskedReport:
        begun = self._begun
        asked = self._asked
        self._vectors = self._begun = self._asked = None
        self.receiving = 0
        if isinstance(begun, MaskedReport):
            del self._lengths[begun.round, begun.attempt]
            vector = np.frombuffer(received.vectors[0], "<u8")
            return replace(begun, vector=vector.astype(np.uint64, copy=False))
        assert begun is not None
        assert asked is not None
        self._expects = "nothing"
        return asked.report.answer(begun, received.vectors, asked.numbers, asked.sizes)
