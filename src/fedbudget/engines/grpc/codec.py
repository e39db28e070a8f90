"""Messages as bytes, and back. Nothing that comes off the wire is used before it was checked here.

There is no I/O in it: whoever sends gets a list of byte strings, one for each message of the stream; whoever receives
feeds byte strings to a reader, which gives a whole message when there is one. What breaks the rules raises `PeerError`
with a reason, whatever the bytes. A reader never holds more than the vectors that it expects: their size follows from
what was agreed on, and an announcement of any other is refused before the first byte of them is taken.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from google.protobuf.message import DecodeError

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.engines.remote import compression
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.compression import Kind
from fedbudget.engines.remote.costs import costs_from_proto, costs_to_proto, readings_from_proto
from fedbudget.engines.remote.messages import Answer, Farewell, Hello, Ready, RoundRequest, Welcome
from fedbudget.engines.remote.task import Moments, Request, Samples, Task
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast, CatchUp, Drift, PeerError, Report
from fedbudget.resources.usage import NodeCosts

METHOD = "/fedbudget.Aggregator/Converse"
NAME, TOKEN = "fedbudget-node", "fedbudget-token"
"""Keys of what a node says before the first message."""

VERSION = 2
KINDS: tuple[Kind, ...] = get_args(Kind)
PART = 2**20
"""Bytes of vectors in one message of a stream, at most."""
LONGEST = PART + 2**18
"""Bytes of one message of a stream, at most."""

_MORE_OF_REPORT = pb.FromNode.MORE_FIELD_NUMBER << 3 | 2  # how protobuf announces these fields
_MORE_OF_BROADCAST = pb.FromAggregator.MORE_FIELD_NUMBER << 3 | 2
_MOST_NODES = 5_000  # of one fleet: their numbers fit in a report's first message, beside a part of its vectors
_MOST_PARAMETERS = 2**34
_MOST_UPDATES = 10**9
_LONG_NAME = 200
_MOST_FEATURES = 2**28


# From a node.


def pack_hello(hello: Hello) -> list[bytes]:
    message = pb.Hello(
        version=VERSION,
        instance=hello.instance,
        samples=_samples_out(hello.samples),
        run=hello.run,
        rounds=hello.rounds,
    )
    return [_in_one(pb.FromNode(hello=message).SerializeToString())]


def pack_ready(costs: NodeCosts) -> list[bytes]:
    return [pb.FromNode(ready=pb.Ready(costs=costs_to_proto(costs))).SerializeToString()]


def pack_report(report: Report, costs: NodeCosts, vectors: bytes) -> list[bytes]:
    """A report whose vectors (w, then gradients) are encoded already."""
    message = pb.Report(
        round=report.round,
        losses=report.losses.tolist(),
        best_losses=report.best_losses.tolist(),
        rho=_numbers(report.rho),
        beta=_numbers(report.beta),
        plain=_numbers(report.plain),
        corrected=_numbers(report.corrected),
        costs=costs_to_proto(costs),
        size=len(vectors),
        vectors=vectors[:PART],
    )
    return [pb.FromNode(report=message).SerializeToString(), *_parts(_MORE_OF_REPORT, vectors)]


class NodeReader:
    """Reads what a node sends: a hello, that it is ready, and a report for every broadcast, in this order."""

    def __init__(self) -> None:
        self._expects = "hello"
        self._asked: tuple[Broadcast, Int64, Int64, Kind] | None = None
        self._report: pb.Report | None = None
        self._vectors: _Vectors | None = None

    @property
    def in_the_middle(self) -> bool:
        """Whether a report has begun and not ended."""
        return self._report is not None

    def expect_ready(self) -> None:
        self._expects = "ready"

    def expect_report(self, broadcast: Broadcast, numbers: Int64, sizes: Int64, kind: Kind) -> None:
        """The next report answers this, by nodes of these numbers and sizes, with vectors encoded so."""
        self._expects = "report"
        self._asked = broadcast, numbers, sizes, kind

    def feed(self, data: bytes) -> Hello | Ready | Answer | None:
        if self._vectors is not None and self._vectors.take(_MORE_OF_REPORT, data):
            return self._ended()
        message = pb.FromNode()
        _parse(message, data)
        kind = message.WhichOneof("kind")
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind != self._expects:
            raise PeerError(f"{_a(kind)} where {_a(self._expects)} was expected")
        elif kind == "hello":
            self._expects = "nothing"
            return _hello_in(message.hello)
        elif kind == "ready":
            self._expects = "nothing"
            return Ready(costs_from_proto(message.ready.costs))
        else:
            self._begin(message.report)
        return self._ended()

    def _begin(self, report: pb.Report) -> None:
        assert self._asked is not None
        broadcast, numbers, _, kind = self._asked
        if report.round != broadcast.round:
            raise PeerError(f"a report of round {report.round} when asked for round {broadcast.round}")
        size = _vectors_of(broadcast) * compression.encoded_size(kind, len(numbers) * broadcast.w.size)
        self._vectors = _Vectors(size, report.size, report.vectors)
        self._report = report
        self._expects = "more of a report"

    def _ended(self) -> Answer | None:
        if self._report is None or self._vectors is None or not self._vectors.complete or self._asked is None:
            return None
        broadcast, numbers, sizes, kind = self._asked
        answer = _report_in(self._report, self._vectors.data, broadcast, numbers, sizes, kind)
        self._report = self._vectors = self._asked = None
        self._expects = "nothing"
        return answer


def _vectors_of(broadcast: Broadcast) -> int:
    """How many vectors a node's report of this broadcast has."""
    if broadcast.tau == 0:
        return 0
    return 2 if _estimates(broadcast) and broadcast.gradient else 1


def _estimates(broadcast: Broadcast) -> bool:
    return broadcast.estimate and broadcast.round > 1 and broadcast.tau > 0


def _report_in(
    found: pb.Report, data: bytearray, broadcast: Broadcast, numbers: Int64, sizes: Int64, kind: Kind
) -> Answer:
    """A report, with all that was asked for and nothing else."""
    n, d = len(numbers), broadcast.w.size
    estimates, drift = _estimates(broadcast), broadcast.drift is not None and broadcast.tau > 0

    def numbers_of(name: str, values: Sequence[float], wanted: bool) -> Float64 | None:
        if len(values) != (n if wanted else 0):
            raise PeerError(f"a report with {len(values)} numbers for {name}, not {n if wanted else 0}")
        return np.array(values, np.float64) if wanted else None

    losses, best = numbers_of("losses", found.losses, True), numbers_of("best losses", found.best_losses, True)
    assert losses is not None
    assert best is not None
    one = compression.encoded_size(kind, n * d)
    vectors = [_decoded(kind, data, at, n * d).reshape(n, d) for at in range(0, len(data), one)]
    if vectors and kind != "none":
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found in the result
            vectors[0] += broadcast.w  # differences are what is compressed
    report = Report(
        broadcast.round,
        numbers,
        sizes,
        losses,
        best,
        vectors[0] if vectors else None,
        numbers_of("rho", found.rho, estimates),
        numbers_of("beta", found.beta, estimates),
        vectors[1] if len(vectors) > 1 else None,
        numbers_of("plain divergence", found.plain, drift),
        numbers_of("corrected divergence", found.corrected, drift),
    )
    return Answer(report, costs_from_proto(found.costs))


# From the aggregator.


def pack_welcome(welcome: Welcome) -> list[bytes]:
    message = pb.Welcome(version=VERSION, run=welcome.run, task=task_out(welcome.task), numbers=welcome.numbers)
    return [_in_one(pb.FromAggregator(welcome=message).SerializeToString())]


def pack_broadcast(broadcast: Broadcast, *, base_round: int, catch_up: bool, difference: bytes | None) -> list[bytes]:
    """A broadcast to nodes whose memory stands after the same round.

    Args:
      catch_up: whether they are told what they missed.
      difference: w less the w that they know, compressed; w itself is sent when not given.
    """
    vectors = _raw(broadcast.w) if difference is None else difference
    request = broadcast.catch_up if catch_up else None
    if request is not None:
        vectors += _raw(request.best)
        if request.mean is not None:
            vectors += _raw(request.mean)
    message = pb.Broadcast(
        round=broadcast.round,
        base_round=base_round,
        tau=broadcast.tau,
        eta=broadcast.eta,
        best=broadcast.best,
        stop=broadcast.stop,
        correct=broadcast.drift is not None and broadcast.drift.correct,
        share=1.0 if broadcast.drift is None else broadcast.drift.share,
        catch_up=request is not None,
        since=0 if request is None else request.since,
        difference=difference is not None,
        size=len(vectors),
        vectors=vectors[:PART],
    )
    return [pb.FromAggregator(broadcast=message).SerializeToString(), *_parts(_MORE_OF_BROADCAST, vectors)]


def pack_farewell(farewell: Farewell) -> list[bytes]:
    message = pb.Farewell(reason=farewell.reason, again=farewell.again)
    return [pb.FromAggregator(farewell=message).SerializeToString()]


class AggregatorReader:
    """Reads what the aggregator sends: a welcome, then broadcasts, and a farewell at any time."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._broadcast: pb.Broadcast | None = None
        self._vectors: _Vectors | None = None

    def feed(self, data: bytes) -> "Welcome | EncodedBroadcast | Farewell | None":
        if self._vectors is not None and self._vectors.take(_MORE_OF_BROADCAST, data):
            return self._ended()
        message = pb.FromAggregator()
        _parse(message, data)
        kind = message.WhichOneof("kind")
        if kind == "farewell":
            return Farewell(_text("reason", message.farewell.reason, 2000), message.farewell.again)
        if kind == "welcome" and self._task is None:
            welcome = _welcome_in(message.welcome)
            self._task = welcome.task
            return welcome
        if kind == "more" and self._vectors is not None:
            self._vectors.add(message.more)
        elif kind == "broadcast" and self._task is not None and self._broadcast is None:
            self._begin(message.broadcast, self._task)
        else:
            raise PeerError(f"{_a(kind)} where it was not expected")
        return self._ended()

    def _begin(self, found: pb.Broadcast, task: Task) -> None:
        one = 4 * task.parameters
        size = compression.encoded_size(task.compress, task.parameters) if found.difference else one
        if found.catch_up:
            size += 2 * one if task.asked.drift else one
        self._vectors = _Vectors(size, found.size, found.vectors)
        self._broadcast = found

    def _ended(self) -> "EncodedBroadcast | None":
        if self._broadcast is None or self._vectors is None or not self._vectors.complete or self._task is None:
            return None
        half = EncodedBroadcast(self._broadcast, self._vectors.data, self._task)
        self._broadcast = self._vectors = None
        return half


@dataclass(frozen=True)
class EncodedBroadcast:
    """A broadcast that may need the w before it to be understood."""

    found: pb.Broadcast
    data: bytearray
    task: Task

    @property
    def base_round(self) -> int:
        return self.found.base_round

    def request(self, before: Float32 | None) -> RoundRequest:
        """The whole, given the w of the broadcast after which the node's memory stands."""
        found, task, d = self.found, self.task, self.task.parameters
        if not 1 <= found.round < 2**31 or not found.base_round < found.round:
            raise PeerError(f"round {found.round} after round {found.base_round}")
        if found.tau > task.tau_max:
            raise PeerError(f"tau is {found.tau}, and no more than {task.tau_max} was agreed on")
        if not 0 < found.eta < math.inf:
            raise PeerError(f"eta is {found.eta}")
        if not 0 <= found.share <= 1:
            raise PeerError(f"the share of a round is {found.share}")
        if found.difference:
            size = compression.encoded_size(task.compress, d)
            if before is None:
                raise PeerError("a difference to parameters that were never told")
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
                w = before + _decoded(task.compress, self.data, 0, d)
        else:
            size = 4 * d
            w = _decoded("none", self.data, 0, d)
        rest = [_decoded("none", self.data, at, d) for at in range(size, len(self.data), 4 * d)]
        for vector in (w, *rest):
            if not np.isfinite(vector).all():
                raise PeerError("parameters that are not finite")
        catch_up = None
        if found.catch_up:
            catch_up = CatchUp(rest[0], rest[1] if len(rest) > 1 else None, found.since)
        asked = task.asked
        broadcast = Broadcast(
            found.round,
            w,
            found.tau,
            found.eta,
            estimate=asked.estimate,
            best=found.best,
            stop=found.stop,
            gradient=asked.gradient,
            curvature=asked.curvature,
            drift=Drift(found.correct, found.share) if asked.drift else None,
            catch_up=catch_up,
        )
        return RoundRequest(broadcast, found.base_round)


# Both ways.


class _Vectors:
    """The bytes of vectors, as they come in."""

    def __init__(self, expected: int, announced: int, first: bytes) -> None:
        if announced != expected:
            raise PeerError(f"{announced} bytes of vectors announced where there should be {expected}")
        self._expected = expected
        self.data = bytearray()
        self.add(first)

    def add(self, part: bytes) -> None:
        """The next part, which is as long as it can be: so there are no more messages than needed."""
        due = self._due
        if len(part) != due:
            raise PeerError(f"a part of vectors of {len(part)} bytes where there should be {due}")
        self.data += part

    def take(self, tag: int, data: bytes) -> bool:
        """Takes the next part from a message as `_parts` writes it; False of any other message."""
        head = _head(tag, self._due)
        if len(data) != len(head) + self._due or not data.startswith(head):
            return False
        self.data += memoryview(data)[len(head) :]
        return True

    @property
    def _due(self) -> int:
        return min(PART, self._expected - len(self.data))

    @property
    def complete(self) -> bool:
        return len(self.data) == self._expected


def _in_one(message: bytes) -> bytes:
    """A message that describes samples, which goes in one piece or not at all."""
    if len(message) > LONGEST:
        raise UserError(
            f"what the samples are like takes {len(message)} bytes to tell, and {LONGEST} is the most: there are "
            "too many classes, or too many columns to standardise (a .npz is used as it is)"
        )
    return message


def _parts(tag: int, vectors: bytes) -> Iterator[bytes]:
    """What does not fit in the first message: messages with nothing but a part of it.

    They are written and read by hand, as protobuf would, which copies every part twice.
    """
    view = memoryview(vectors)
    for at in range(PART, len(vectors), PART):
        part = view[at : at + PART]
        yield b"".join((_head(tag, len(part)), part))


def _head(tag: int, length: int) -> bytes:
    """What protobuf puts before so many bytes of a field."""
    head = bytearray([tag])
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head)


def _decoded(kind: Kind, data: bytearray, at: int, count: int) -> Float32:
    """The vector that begins there; a raw one is not copied, because nobody else uses these bytes."""
    if kind == "none":
        return np.frombuffer(data, "<f4", count, at).astype(np.float32, copy=False)
    return compression.decode(kind, memoryview(data)[at : at + compression.encoded_size(kind, count)], count)


def _raw(vector: Float32) -> bytes:
    return compression.encode("none", vector)


def _parse(message: pb.FromNode | pb.FromAggregator, data: bytes) -> None:
    if len(data) > LONGEST:
        raise PeerError(f"a message of {len(data)} bytes")
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise PeerError("bytes that are no message") from None


def _a(kind: str | None) -> str:
    return "an empty message" if kind is None else f"'{kind}'"


def _numbers(values: Float64 | None) -> list[float]:
    return [] if values is None else values.tolist()


def _text(name: str, text: str, longest: int = _LONG_NAME) -> str:
    if len(text) > longest:
        raise PeerError(f"a {name} of {len(text)} characters")
    return text


def _finite(name: str, value: float, *, least: float = -math.inf) -> float:
    if not (math.isfinite(value) and value >= least):
        raise PeerError(f"{name} is {value}")
    return value


def _hello_in(found: pb.Hello) -> Hello:
    if found.version != VERSION:
        raise PeerError(
            f"it speaks version {found.version} of the protocol, and this is version {VERSION}; install the same "
            "fedbudget on both sides"
        )
    if len(found.rounds) > 16:
        raise PeerError(f"a memory of {len(found.rounds)} rounds")
    samples = _samples_in(found.samples)
    if not samples.sizes:
        raise PeerError("a node without samples")
    return Hello(
        _text("name of an instance", found.instance), samples, _text("name of a run", found.run), tuple(found.rounds)
    )


def _welcome_in(found: pb.Welcome) -> Welcome:
    if found.version != VERSION:
        raise PeerError(f"the aggregator speaks version {found.version} of the protocol, and this is {VERSION}")
    numbers = tuple(found.numbers)
    if len(numbers) > _MOST_NODES or any(number >= 2**62 for number in numbers):
        raise PeerError("nodes' numbers that are too large")
    if list(numbers) != sorted(set(numbers)):
        raise PeerError("nodes' numbers that are not in rising order")
    return Welcome(_text("name of a run", found.run), task_in(found.task), numbers)


def task_out(task: Task) -> pb.Task:
    asked = task.asked
    return pb.Task(
        model=task.model,
        parameters=task.parameters,
        batch=task.batch or 0,
        seed=task.seed,
        clusters=task.clusters,
        compress=task.compress,
        tau_max=task.tau_max,
        samples=_samples_out(task.samples),
        asked=pb.Request(
            estimate=asked.estimate,
            gradient=asked.gradient,
            curvature=asked.curvature,
            drift=asked.drift,
            readings=asked.readings,
        ),
    )


def task_in(found: pb.Task) -> Task:
    if not 1 <= found.parameters <= _MOST_PARAMETERS:
        raise PeerError(f"a model of {found.parameters} parameters")
    if found.compress not in KINDS:
        raise PeerError(f"unknown compression {found.compress[:20]!r}")
    if not 1 <= found.tau_max <= _MOST_UPDATES:
        raise PeerError(f"rounds of up to {found.tau_max} updates")
    asked = found.asked
    return Task(
        _text("name of a model", found.model),
        found.parameters,
        found.batch or None,
        found.seed,
        found.clusters,
        next(kind for kind in KINDS if kind == found.compress),
        found.tau_max,
        _samples_in(found.samples),
        Request(asked.estimate, asked.gradient, asked.curvature, asked.drift, readings_from_proto(asked)),
    )


def _samples_out(samples: Samples) -> pb.Samples:
    def moments(found: Moments | None) -> pb.Moments | None:
        return None if found is None else pb.Moments(mean=found.mean.tolist(), deviation=found.deviation.tolist())

    return pb.Samples(
        sizes=samples.sizes,
        shape=samples.shape,
        stored=samples.stored,
        scale=samples.scale,
        classes=samples.classes,
        values=samples.values,
        parity=samples.parity,
        features=moments(samples.features),
        target=moments(samples.target),
    )


def _samples_in(found: pb.Samples) -> Samples:
    features = math.prod(found.shape[:5])  # not of all: a product of very many numbers takes very long
    if not 1 <= len(found.shape) <= 4 or not 1 <= features <= _MOST_FEATURES:
        raise PeerError(f"samples of shape {tuple(found.shape[:8])}")
    if len(found.sizes) > _MOST_NODES or not all(1 <= size < 2**40 for size in found.sizes):
        raise PeerError("numbers of samples that cannot be")
    if found.stored not in ("uint8", "float32", "float64"):
        raise PeerError(f"features stored as {found.stored[:20]!r}")
    if len(found.classes) > 100_000:
        raise PeerError(f"{len(found.classes)} classes")

    def moments(has: bool, given: pb.Moments, columns: int) -> Moments | None:
        if not has:
            return None
        if len(given.mean) != columns or len(given.deviation) != columns:
            raise PeerError(f"means of {len(given.mean)} columns, not {columns}")
        return Moments(_all_finite("means", given.mean), _all_finite("deviations", given.deviation, least=0.0))

    return Samples(
        tuple(found.sizes),
        tuple(found.shape),
        found.stored,
        _finite("the scale of features", found.scale, least=1e-30),
        tuple(_text("name of a class", name) for name in found.classes),
        found.values,
        found.parity,
        moments(found.HasField("features"), found.features, features),
        moments(found.HasField("target"), found.target, 1),
    )


def _all_finite(name: str, values: Iterable[float], *, least: float = -math.inf) -> Float64:
    return np.array([_finite(name, value, least=least) for value in values], np.float64)
