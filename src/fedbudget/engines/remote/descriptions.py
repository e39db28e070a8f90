"""What describes data and tasks, as bytes and back: the same for every network, and for checkpoints.

Nothing that comes from elsewhere is used before it was checked here: msgspec checks types by the annotations of the
dataclasses, so a new field needs no change here but another VERSION; what numbers may be is checked below. What breaks
the rules raises `PeerError` with a reason, whatever the bytes.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from fedbudget.arrays import Float64
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.costs import MOST_READINGS, check_resource
from fedbudget.engines.remote.messages import Hello, Welcome
from fedbudget.engines.remote.task import Moments, SamplesDescription, Task
from fedbudget.errors import UserError
from fedbudget.protocol.messages import PeerError

VERSION = 2
LONGEST = 2**20 + 2**18
"""Bytes of a description, at most: it goes in one message or not at all."""

_MOST_NODES = 5_000  # of one fleet: their numbers fit in a report's first message, beside a part of its vectors
_MOST_PARAMETERS = 2**34
MOST_UPDATES = 10**9
_MOST_FEATURES = 2**28
_MOST_CLASSES = 100_000
_MOST_OPTIONS = 100  # of a model
_MOST_ROUNDS = 16  # that a node remembers
_LONG_NAME = 200
_Described = TypeVar("_Described", Hello, Welcome, Task)


def describe(value: Hello | Welcome | Task) -> pb.Description:
    """Raises `UserError` where that is too long to tell."""
    description = pb.Description(version=VERSION, value=msgspec.msgpack.encode(value, enc_hook=_array_out))
    if len(description.value) > LONGEST - 100:
        raise UserError(
            f"what the samples are like takes {len(description.value)} bytes to tell, and {LONGEST} is the most: there "
            "are too many classes, or too many columns to standardise (a .npz is used as it is)"
        )
    return description


def from_bytes(data: bytes) -> pb.Description:
    try:
        return pb.Description.FromString(data)
    except DecodeError:
        raise PeerError("bytes that are no description") from None


def read_hello(description: pb.Description) -> Hello:
    return _read(Hello, description, _check_hello)


def read_welcome(description: pb.Description) -> Welcome:
    return _read(Welcome, description, _check_welcome)


def read_task(description: pb.Description) -> Task:
    return _read(Task, description, _check_task)


def require_short(name: str, text: str, longest: int = _LONG_NAME) -> str:
    if len(text) > longest:
        raise PeerError(f"a {name} of {len(text)} characters")
    return text


def _read(kind: type[_Described], description: pb.Description, check: Callable[[_Described], None]) -> _Described:
    if description.version != VERSION:
        raise PeerError(
            f"it speaks version {description.version} of the protocol, and this is version {VERSION}; install the same "
            "fedbudget on both sides"
        )
    try:
        value = msgspec.msgpack.decode(description.value, type=kind, dec_hook=_array_in)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"a {kind.__name__.lower()} that cannot be read: {error}") from None
    check(value)
    return value


def _array_out(array: Any) -> Any:
    return array.item() if isinstance(array, np.generic) else array.astype("<f8").tobytes()


def _array_in(annotation: Any, data: Any) -> Float64:
    if get_origin(annotation) is not np.ndarray or not isinstance(data, bytes):
        raise ValueError("an array is expected")
    return np.frombuffer(data, "<f8").astype(np.float64)


def _check_hello(hello: Hello) -> None:
    require_short("name of an instance", hello.instance)
    require_short("name of a run", hello.run)
    if len(hello.rounds) > _MOST_ROUNDS or not all(0 <= number < 2**32 for number in hello.rounds):
        raise PeerError(f"a memory of {len(hello.rounds)} rounds that cannot be")
    if not hello.samples.sizes:
        raise PeerError("a node without samples")
    _check_samples(hello.samples)


def _check_welcome(welcome: Welcome) -> None:
    require_short("name of a run", welcome.run)
    numbers = welcome.numbers
    if len(numbers) > _MOST_NODES or not all(0 <= number < 2**62 for number in numbers):
        raise PeerError("nodes' numbers that are too large")
    if list(numbers) != sorted(set(numbers)):
        raise PeerError("nodes' numbers that are not in rising order")
    _check_task(welcome.task)


def _check_task(task: Task) -> None:
    require_short("name of a model", task.model)
    if not 1 <= task.parameters <= _MOST_PARAMETERS:
        raise PeerError(f"a model of {task.parameters} parameters")
    if task.batch is not None and not 1 <= task.batch < 2**32:
        raise PeerError(f"mini-batches of {task.batch} samples")
    if task.seed < 0:
        raise PeerError(f"the seed is {task.seed}")
    if not 1 <= task.tau_max <= MOST_UPDATES:
        raise PeerError(f"rounds of up to {task.tau_max} updates")
    if len(task.readings) > MOST_READINGS:
        raise PeerError(f"a task that asks for {len(task.readings)} readings")
    for name in task.readings:
        check_resource(name)
    if len(task.model_options) > _MOST_OPTIONS:
        raise PeerError(f"a model with {len(task.model_options)} options")
    for name, value in task.model_options.items():
        require_short("name of an option", name)
        if isinstance(value, str):
            require_short(f"value of {name}", value)
        elif not math.isfinite(value):
            raise PeerError(f"{name} is {value}")
    _check_samples(task.samples)


def _check_samples(samples: SamplesDescription) -> None:
    features = math.prod(samples.shape[:5])  # not of all: a product of very many numbers takes very long
    if not 1 <= len(samples.shape) <= 4 or min(samples.shape) < 1 or features > _MOST_FEATURES:
        raise PeerError(f"samples of shape {tuple(samples.shape[:8])}")
    if len(samples.sizes) > _MOST_NODES or not all(1 <= size < 2**40 for size in samples.sizes):
        raise PeerError("numbers of samples that cannot be")
    if samples.stored not in ("uint8", "float32", "float64"):
        raise PeerError(f"features stored as {samples.stored[:20]!r}")
    if not 1e-30 <= samples.scale < math.inf:
        raise PeerError(f"the scale of features is {samples.scale}")
    if len(samples.classes) > _MOST_CLASSES:
        raise PeerError(f"{len(samples.classes)} classes")
    for name in samples.classes:
        require_short("name of a class", name)
    _check_moments(samples.features, features)
    _check_moments(samples.target, 1)


def _check_moments(moments: Moments | None, columns: int) -> None:
    if moments is None:
        return
    if len(moments.mean) != columns or len(moments.deviation) != columns:
        raise PeerError(f"means of {len(moments.mean)} columns, not {columns}")
    if not (np.isfinite(moments.mean).all() and np.isfinite(moments.deviation).all() and moments.deviation.min() >= 0):
        raise PeerError("means or deviations that cannot be")
