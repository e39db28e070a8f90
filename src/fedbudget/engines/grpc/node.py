"""Whether this process was suspended of late: a lid that was closed, a gateway that was frozen, a SIGSTOP.

No clock tells: all of them go on meanwhile. So a timer goes off once a second, and one that is late by as much again
means that nothing ran here. Who was suspended may have a lot to hear, and should hear it before it says anything.

A node's end of its connection: it joins, works, and comes back when the connection was lost.

A node keeps its memory while it is away, and retries with a back-off that grows and has jitter in it, so that a fleet
that lost its aggregator does not come back all at once. It ends when the aggregator says farewell, which it hears in
the middle of its work too; when it is told that it does not belong; or when there was no aggregator for too long.
"""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc

from fedbudget.engines.grpc.masking_node import MaskingOptions, NodeMasking
from fedbudget.engines.grpc.messages import (
    AggregatorReader,
    EncodedBroadcast,
    FromAggregator,
    pack_hello,
    pack_ready,
    pack_refusal,
    pack_report,
)
from fedbudget.engines.grpc.stream import CHANNEL_OPTIONS, LET_IN, METHOD, NAME, TOKEN
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.engines.remote.node_limits import BeyondLimits
from fedbudget.engines.remote.task import Task
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError, flag, printable
from fedbudget.protocol.messages import PeerError
from fedbudget.secure.messages import Relay

_TICK = 1.0  # seconds


class SuspensionWatch:
    """Watches the running event loop, until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_at = float("-inf")
        self._due = self._loop.time()
        self._timer = self._loop.call_soon(self._tick)

    @property
    def just_resumed(self) -> bool:
        """Whether this process has been suspended, and is at work again for less than a second."""
        self._look()
        return self._loop.time() - self._late_at < _TICK

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._look()
        self._due = self._loop.time() + _TICK
        self._timer = self._loop.call_at(self._due, self._tick)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._due > _TICK:
            self._due = self._late_at = now


# seconds between attempts
_FIRST_WAIT = 0.2
_LONGEST_WAIT = 30.0
_GROWTH = 1.7

_QUICK = 5e-3  # seconds: rounds that took less are made where messages are read

_LISTEN = 0.5  # seconds that a node listens before it answers, when it was suspended

_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Answers that will not change by asking again."""

_ENDED = (asyncio.InvalidStateError, grpc.aio.AioRpcError)
"""Raised by what is written on a call that has ended."""

_Result = TypeVar("_Result")


class RefusedByAggregator(RuntimeError):
    """The aggregator does not want this node."""


async def run_node(
    address: str,
    worker: Worker,
    *,
    name: str,
    token: str | None = None,
    credentials: Any = None,
    patience: float | None = None,
    delay: float = 0.0,
    masking: MaskingOptions | None = None,
    heard: Callable[[str], None] = lambda text: None,
    sent: Callable[[int, int], None] = lambda number, size: None,
) -> Farewell:
    """Takes part until the aggregator says farewell.

    Args:
      credentials: for TLS; None for plain text.
      patience: seconds after which an aggregator that cannot be reached is given up; None for never.
      delay: seconds that a welcome, a broadcast and the answer to it are held each, to stand for a slower network.
      masking: what it insists on where sums are masked, or on that they are.
      heard: told in words what happens.
      sent: told of every report, by the round's number and its size in bytes.
    """
    instance = secrets.token_hex(16)
    attempt = 0
    told = ""
    loop = asyncio.get_running_loop()
    alone_since = loop.time()
    metadata = [(NAME, name)] + ([] if token is None else [(TOKEN, token)])
    connected = asyncio.Event()
    masked = NodeMasking(name, masking or MaskingOptions(), heard)

    def tell(task: Task | None) -> None:
        connected.set()
        if task is None:
            heard(f"connected to {address}; waiting for a task")
        else:
            heard(f"joined {address} as {name}, to train {task.title}")
            if unseen := worker.node_data.unseen(task.samples):
                heard(
                    f"categories that nobody had when the run began, taken for none: {unseen}"
                )

    while True:
        connected.clear()
        try:
            async with _channel(address, credentials) as channel:
                call = channel.stream_stream(METHOD)(metadata=metadata)
                with closing(_Inbox(call)) as inbox, closing(SuspensionWatch()) as watch:
                    farewell = await _converse(
                        call, inbox, watch, worker, instance, masked, tell, delay, sent
                    )
            if not farewell.again:
                return replace(farewell, reason=printable(farewell.reason))
            why = printable(farewell.reason)
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL:
                raise RefusedByAggregator(
                    f"{address} refused {name}: {printable(error.details() or '')}"
                ) from None
            why = _in_words(error)
            if why == _LOST and not connected.is_set():
                why = _HUNG_UP["TLS" if credentials is not None else "plain text"]
        except PeerError as error:
            why = f"it said what it should not: {error}"
        if connected.is_set():
            attempt = 0
            alone_since = loop.time()
            told = ""
        if patience is not None and loop.time() - alone_since > patience:
            raise RefusedByAggregator(
                f"{address} could not be reached for {patience:g} seconds: {why}"
            )
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * _GROWTH**attempt) * random.uniform(0.5, 1.0)
        attempt += 1
        if why != told:  # once, however often it is tried
            heard(f"not connected to {address} ({why}); trying again until it is there")
            told = why
        await asyncio.sleep(wait)


async def _converse(
    call: Any,
    inbox: "_Inbox",
    watch: SuspensionWatch,
    worker: Worker,
    instance: str,
    masked: NodeMasking,
    tell: Callable[[Task | None], None],
    delay: float,
    sent: Callable[[int, int], None],
) -> Farewell:
    """One connection, from hello to farewell.

    Args:
      tell: called when the aggregator has let us in, and with the task when we are ready for it.
      sent: called with a round's number, and the bytes of the report, when it was sent.
    """
    # of a local update; when the last report was sent
    seconds = math.inf
    sent_at = -math.inf
    masked.connect()
    await _send(call, pack_hello(worker.hello(instance)))
    if LET_IN in {key for key, _ in await call.initial_metadata()}:
        tell(None)
    while True:
        message = await inbox.next()
        if isinstance(message, Farewell):
            with suppress(*_ENDED):
                await call.done_writing()
            return message
        await _hold(delay)
        if isinstance(message, Welcome):
            try:
                costs = await inbox.beside(asyncio.to_thread(worker.start, message))
                introduction = masked.introduce(message.run, worker)
            except UserError as error:
                await _refuse(call, error)
            await _hold(delay)
            if costs is not None:
                await _send(call, [*introduction, *pack_ready(costs)])
                tell(message.task)
        elif not isinstance(message, EncodedBroadcast):
            try:
                answers = await inbox.beside(asyncio.to_thread(masked.answer, message))
            except UserError as error:
                await _refuse(call, error)
            if answers:
                await _hold(delay)
                await _send(call, answers)
            if answers and isinstance(message, Relay):
                sent_at = time.monotonic()
                sent(masked.round, sum(map(len, answers)))
        else:
            # A thread is for work that would keep the connection waiting; to hand it less takes longer than that.
            quick = seconds * max(1, message.updates) < _QUICK
            await _hold(sent_at + worker.limits.min_interval - time.monotonic())
            try:
                if quick and not watch.just_resumed:
                    answer: tuple[list[bytes], float] | None = _answer(
                        worker, masked, message
                    )
                else:
                    answer = await inbox.beside(
                        asyncio.to_thread(_answer, worker, masked, message)
                    )
            except BeyondLimits as error:
                await _refuse(call, error)
            # While this machine was suspended the aggregator may have said farewell and gone. Then the first word to it
            # breaks the connection, and what was not heard by then is lost.
            if (
                watch.just_resumed
                and await inbox.beside(asyncio.sleep(_LISTEN, True)) is None
            ):
                answer = None
            if answer is not None:
                messages, took = answer
                seconds = took / max(1, message.updates)
                if not messages:  # it is sent when it can be masked
                    continue
                await _hold(delay)
                await _send(call, messages)
                sent_at = time.monotonic()
                sent(message.number, sum(map(len, messages)))
                del messages
            del answer
        del message  # large ones are not held while the next is awaited


class _Inbox:
    """What the aggregator says, of which a farewell is heard at once.

    Args:
      call: one connection.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._reader = AggregatorReader()
        self._coming: asyncio.Task[FromAggregator] | None = None

    async def next(self) -> FromAggregator:
        """The next whole message."""
        coming, self._coming = self._coming, None
        return await (self._read() if coming is None else coming)

    async def beside(self, work: Coroutine[Any, Any, _Result]) -> _Result | None:
        """Works, and listens meanwhile; None where a farewell came first. What else there is to hear waits for us."""
        working = asyncio.ensure_future(work)
        self._coming = self._coming or asyncio.ensure_future(self._read())
        await asyncio.wait([working, self._coming], return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and self._coming.exception() is None:
            farewell = self._coming.result()
            if (
                isinstance(farewell, Farewell) and not farewell.again
            ):  # nobody will ask for the result
                return None
        return await working

    def close(self) -> None:
        """Nobody listens any more."""
        if (
            self._coming is not None
            and not self._coming.cancel()
            and not self._coming.cancelled()
        ):
            self._coming.exception()  # which nobody will ask for

    async def _read(self) -> FromAggregator:
        while True:
            data = await self._call.read()
            if data is grpc.aio.EOF:
                raise grpc.aio.AioRpcError(
                    await self._call.code(),
                    await self._call.initial_metadata(),
                    await self._call.trailing_metadata(),
                    "it has ended",
                )
            message = self._reader.feed(data)
            if message is not None:
                return message


def _answer(
    worker: Worker, masked: NodeMasking, encoded: EncodedBroadcast
) -> tuple[list[bytes], float]:
    """The report, and how long it took to make; none to send now where it is to be masked."""
    began = time.perf_counter()
    request = encoded.request(worker.w_after(encoded.base_round))
    answer = worker.answer(request)
    if masked.on:
        masked.hold(request.broadcast, answer)
        return [], time.perf_counter() - began
    messages = pack_report(
        answer.report, answer.costs, worker.encode(answer.report), answer.tallies
    )
    return messages, time.perf_counter() - began


async def _send(call: Any, messages: list[bytes]) -> None:
    for message in messages:
        try:
            await call.write(message)
        except _ENDED:
            return  # the call has ended while we were at work; reading on tells why


async def _refuse(call: Any, error: UserError) -> NoReturn:
    """Says why, and takes part no more."""
    await _send(call, pack_refusal(error.spelled(flag)))
    with suppress(*_ENDED):
        await call.done_writing()
        await call.code()  # when it was heard
    raise RefusedByAggregator(error.spelled(flag)) from None


async def _hold(seconds: float) -> None:
    if seconds > 0:  # a sleep of none would still let others go first
        await asyncio.sleep(seconds)


def _channel(address: str, credentials: Any) -> Any:
    options = [
        *CHANNEL_OPTIONS,
        (
            "grpc.use_local_subchannel_pool",
            1,
        ),  # nodes of one process have a connection each
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _in_words(error: Any) -> str:
    """What gRPC says of a connection that was lost, as a person would."""
    code = error.code()
    details = (error.details() or "").splitlines()
    if code is grpc.StatusCode.UNAVAILABLE:
        for sign, words in _WORDS.items():
            if sign in " ".join(details):
                return words
        return "it cannot be reached"
    return printable(details[0], 200) if details else code.name.lower().replace("_", " ")


_LOST = "the connection was lost"
_HUNG_UP = {
    "plain text": "it hung up without a word; if it listens with TLS, the certificate of its CA is needed, --ca",
    "TLS": "it hung up without a word; if it asks for certificates of nodes, one is needed, --cert and --key",
}
"""Before we were let in, by how we speak."""

_WORDS = {
    "Connection refused": "nobody listens there",
    "Connection reset": _LOST,
    "Socket closed": _LOST,
    "DNS resolution failed": "its name is not known",
    "SSL_ERROR": "it does not speak TLS, or its certificate is not one that is trusted here",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not one that is trusted here",
    "Network is unreachable": "there is no network to it",
    "No route to host": "there is no network to it",
    "keepalive": "nothing was heard of it",
    "Timeout": "it does not answer",
}
"""What gRPC says of a connection, and what that means."""
