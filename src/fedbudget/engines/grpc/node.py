"""A node's end of its connection: it joins, trains, and reconnects after a lost connection.

A node keeps its memory while it is away. It retries with a growing, randomised delay, so
that a fleet that lost its aggregator does not return all at once. It ends on a farewell,
which it notices during training too; when the aggregator refuses it; or when the aggregator
was unreachable for too long.

Threads: everything runs in the caller's event loop. Training and masking run in a worker
thread that the loop awaits, one at a time. Rounds that take less than 5 ms run in the event
loop itself, because handing them to a thread would take longer.
"""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import grpc

from fedbudget.engines.grpc.masking_node import MaskingOptions, NodeMasking
from fedbudget.engines.grpc.messages import AggregatorReader, FromAggregator
from fedbudget.engines.grpc.stream import (
    ADMITTED,
    CHANNEL_OPTIONS,
    METHOD,
    NAME,
    PRIVATE,
    TOKEN,
    frames,
    pack,
)
from fedbudget.engines.remote.messages import (
    HIDDEN_REASON,
    LONG_REASON,
    Farewell,
    NodeRefusal,
    Ready,
    RoundRequest,
    Welcome,
)
from fedbudget.engines.remote.node_limits import BeyondLimits
from fedbudget.engines.remote.task import Task
from fedbudget.engines.remote.wire import EncodedBroadcast, pack_report
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError, flag, printable
from fedbudget.protocol.features.workload import most_updates
from fedbudget.protocol.messages import PeerError
from fedbudget.secure import messages as masking_messages

# seconds between attempts to connect
_FIRST_WAIT = 0.2
_LONGEST_WAIT = 30.0
_GROWTH = 1.7

_QUICK = 5e-3  # seconds; shorter rounds are made in the event loop
_TICK = 1.0  # seconds
_LISTEN = 0.5  # seconds that a resumed process listens before it sends

_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Codes after which another attempt is useless."""

_ENDED = (asyncio.InvalidStateError, grpc.aio.AioRpcError)
"""Raised by writes on a call that has ended."""

_LOST = "the connection was lost"
_HUNG_UP = {
    "plain text": "it closed the connection without a reason; "
    "if it listens with TLS, set ca to the certificate of its CA",
    "TLS": "it closed the connection without a reason; "
    "if it requires certificates of nodes, set cert and key",
}
"""Reasons for a connection that was closed before admission, by how the node connected."""

_MEANINGS = {
    "Connection refused": "nothing listens there",
    "Connection reset": _LOST,
    "Socket closed": _LOST,
    "DNS resolution failed": "its host name cannot be resolved",
    "SSL_ERROR": "it does not use TLS, or its certificate is not trusted here",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted here",
    "Network is unreachable": "its network is unreachable",
    "No route to host": "its network is unreachable",
    "keepalive": "it has stopped answering",
    "Timeout": "it does not answer",
}
"""Texts in gRPC's errors, and what they mean."""

_Result = TypeVar("_Result")


class RefusedByAggregator(RuntimeError):
    """The aggregator does not accept this node."""


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
    notify: Callable[[str], None] = lambda text: None,
    on_report: Callable[[int, int], None] = lambda number, size: None,
) -> Farewell:
    """Take part until the aggregator's farewell.

    Args:
      address: of the aggregator.
      worker: trains the node's model.
      name: of the node.
      token: with which it is admitted.
      credentials: for TLS; None for plain text.
      patience: seconds after which an unreachable aggregator is given up; None for never.
      delay: seconds by which each message is delayed, to emulate a slower network.
      masking: the terms of secure aggregation that this node requires.
      notify: called with a line of text for the user at each event.
      on_report: called with the round's number and the size in bytes of each report.

    Returns:
      The aggregator's farewell.

    Raises:
      RefusedByAggregator: the aggregator refuses this node, or was unreachable for too
      long.
    """
    instance = secrets.token_hex(16)
    attempt = 0
    reported = ""
    loop = asyncio.get_running_loop()
    alone_since = loop.time()
    metadata = [(NAME, name)] + ([] if token is None else [(TOKEN, token)])
    connected = asyncio.Event()
    node_masking = NodeMasking(name, masking or MaskingOptions(), notify)

    def joined(task: Task | None) -> None:
        connected.set()
        if task is None:
            notify(f"connected to {address}; waiting for a task")
            return
        notify(f"joined {address} as {name}, to train {task.title}")
        if unseen := worker.node_data.unseen(task.samples):
            notify(
                f"categories that are new since the run began, treated as missing: {unseen}"
            )

    while True:
        connected.clear()
        try:
            async with _channel(address, credentials) as channel:
                call = channel.stream_stream(METHOD)(metadata=metadata)
                with closing(
                    _Connection(call, worker, node_masking, joined, delay, on_report)
                ) as connection:
                    farewell = await connection.converse(instance)
            reason = printable(farewell.reason)
            if not farewell.again:
                return replace(farewell, reason=reason)
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL:
                raise RefusedByAggregator(
                    f"{address} refused {name}: {printable(error.details() or '')}"
                ) from None
            reason = _meaning(error)
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                connected.clear()  # it did not take this node: the waits still grow
            if reason == _LOST and not connected.is_set():
                reason = _HUNG_UP["TLS" if credentials is not None else "plain text"]
        except PeerError as error:
            reason = f"it broke the protocol: {error}"
        if connected.is_set():
            attempt = 0
            alone_since = loop.time()
            reported = ""
        if patience is not None and loop.time() - alone_since > patience:
            raise RefusedByAggregator(
                f"{address} could not be reached for {patience:g} seconds: {reason}"
            )
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * _GROWTH**attempt) * random.uniform(0.5, 1.0)
        attempt += 1
        if reason != reported:  # once, however many attempts follow
            notify(f"not connected to {address} ({reason}); trying again until it is there")
            reported = reason
        await asyncio.sleep(wait)


@dataclass(eq=False)
class _Connection:
    """One connection, from hello to farewell.

    Args:
      joined: called with None after admission, and with the task when the node is ready.
      on_report: called with a round's number and its report's bytes after sending.
    """

    call: Any
    worker: Worker
    masking: NodeMasking
    joined: Callable[[Task | None], None]
    delay: float
    on_report: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self._inbox = _Inbox(self.call)
        self._watch = SuspensionWatch()
        self._step_seconds = math.inf  # of a local update
        self._sent_at = -math.inf  # of the last report

    def close(self) -> None:
        self._inbox.close()
        self._watch.close()

    async def converse(self, instance: str) -> Farewell:
        """Answer messages until the farewell.

        Args:
          instance: random identifier of this process.
        """
        self.masking.connect()
        keys = {key for key, _ in await self.call.initial_metadata()}
        if ADMITTED in keys:
            self.joined(None)
        hello = self.worker.hello(instance, private=PRIVATE in keys)
        await _send(self.call, pack(hello))
        while True:
            message = await self._inbox.next()
            if isinstance(message, Farewell):
                with suppress(*_ENDED):
                    await self.call.done_writing()
                return message
            if self.delay:
                await asyncio.sleep(self.delay)
            if isinstance(message, Welcome):
                await self._start(message)
            elif isinstance(message, EncodedBroadcast):
                await self._round(message)
            else:
                await self._mask(message)
            del message  # large ones are not kept while the next is awaited

    async def _start(self, welcome: Welcome) -> None:
        """Prepare the task, and report that the node is ready."""
        try:
            costs = await self._inbox.listen_during(
                asyncio.to_thread(self.worker.start, welcome)
            )
            introduction = self.masking.introduce(welcome.run, self.worker)
        except UserError as error:
            await self._refuse(error, hidden=self.worker.must_hide(welcome.task, error))
        if costs is not None:
            await self._reply([*introduction, *pack(Ready(costs))])
            self.joined(welcome.task)

    async def _mask(self, message: masking_messages.FromAggregator) -> None:
        """Answer a message of secure aggregation."""
        try:
            answers = await self._inbox.listen_during(
                asyncio.to_thread(self.masking.answer, message)
            )
        except UserError as error:
            await self._refuse(error, hidden=self.worker.must_hide(self.worker.task, error))
        if answers:
            is_report = isinstance(message, masking_messages.Relay)
            await self._reply(answers, self.masking.round if is_report else 0)

    async def _round(self, encoded: EncodedBroadcast) -> None:
        """Make a round and send its report, unless a farewell arrives first."""
        worker = self.worker
        sent = encoded.sent
        before = worker.w_after(sent.base_round) if sent.differences else None
        request = encoded.request(before)
        broadcast = request.broadcast
        updates = most_updates(broadcast)
        wait = self._sent_at + worker.limits.min_interval - time.monotonic()
        if wait > 0:  # `sleep(0)` would still let other tasks run first
            await asyncio.sleep(wait)
        quick = self._step_seconds * updates < _QUICK and not self._watch.just_resumed()
        masked = self.masking.agreed
        if masked:
            begun = await self._begin_masked(request, quick)
            if begun is None:
                return
            request = begun
        try:
            messages = await self._perform(quick, self._train, request, updates, masked)
        except BeyondLimits as error:
            await self._refuse(error)
        # While this machine was suspended, the aggregator may have sent a farewell and
        # ended. Writing first would break the connection and lose the unread farewell.
        if self._watch.just_resumed():
            listened = await self._inbox.listen_during(asyncio.sleep(_LISTEN, True))
            if listened is None:
                return
        if messages:  # otherwise it is sent once it can be masked, or never
            await self._reply(messages, broadcast.round)

    async def _begin_masked(
        self, request: RoundRequest, quick: bool
    ) -> RoundRequest | None:
        """Begin a masked round, and send shares of its secrets before it is trained."""
        try:
            begun = await self._perform(quick, self.masking.begin, request, self.worker)
        except UserError as error:
            await self._refuse(error, hidden=self.worker.must_hide(self.worker.task, error))
        if begun is None:
            return None
        own, shares = begun
        await self._reply(shares)
        return own

    async def _perform(
        self, quick: bool, work: Callable[..., _Result], *arguments: Any
    ) -> _Result | None:
        """Do quick work at once, and other work in a thread, unless a farewell arrives."""
        if quick:
            return work(*arguments)
        return await self._inbox.listen_during(asyncio.to_thread(work, *arguments))

    def _train(self, request: RoundRequest, updates: int, masked: bool) -> list[bytes]:
        """Return the packed report; no messages if it is masked later."""
        began = time.perf_counter()
        worker = self.worker
        answer = worker.answer(request)
        messages: list[bytes] = []
        if masked:
            self.masking.hold(request.broadcast, answer)
        else:
            encoded = worker.encode(answer.report)
            messages = frames(
                pack_report(answer.report, answer.costs, encoded, answer.tallies)
            )
        self._step_seconds = (time.perf_counter() - began) / updates
        return messages

    async def _reply(self, messages: list[bytes], number: int = 0) -> None:
        """Send a reply, or the report of round `number`."""
        if self.delay:
            await asyncio.sleep(self.delay)
        await _send(self.call, messages)
        if number:
            self._sent_at = time.monotonic()
            self.on_report(number, sum(map(len, messages)))

    async def _refuse(self, error: UserError, *, hidden: bool = False) -> NoReturn:
        """Send the reason, and leave.

        Args:
          hidden: whether the reason stays here, because it may follow from samples.
        """
        reason = error.spelled(flag)
        sent = HIDDEN_REASON if hidden else reason[:LONG_REASON]
        await _send(self.call, pack(NodeRefusal(sent)))
        with suppress(*_ENDED):
            await self.call.done_writing()
            await self.call.code()  # waits until the aggregator has read it
        local = error.local if isinstance(error, BeyondLimits) else ""
        raise RefusedByAggregator(reason + local) from None


class _Inbox:
    """Reads the aggregator's messages; notices a farewell during other work.

    Args:
      call: one connection.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._reader = AggregatorReader()
        self._coming: asyncio.Task[FromAggregator] | None = None

    async def next(self) -> FromAggregator:
        """Return the next whole message."""
        coming = self._coming
        self._coming = None
        return await (self._read() if coming is None else coming)

    async def listen_during(self, work: Coroutine[Any, Any, _Result]) -> _Result | None:
        """Await `work` while reading; None if a final farewell arrives first.

        Any other message waits for `next`.
        """
        working = asyncio.ensure_future(work)
        self._coming = self._coming or asyncio.ensure_future(self._read())
        await asyncio.wait([working, self._coming], return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and self._coming.exception() is None:
            message = self._coming.result()
            if isinstance(message, Farewell) and not message.again:
                return None  # the result is not needed any more
        return await working

    def close(self) -> None:
        """Stop reading."""
        coming = self._coming
        if coming is not None and not coming.cancel() and not coming.cancelled():
            coming.exception()  # or asyncio would log that it was never retrieved

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


class SuspensionWatch:
    """Detects that this process was suspended, until it is closed.

    A closed lid, a frozen gateway or a SIGSTOP suspends a process. Clocks do not show it:
    all of them continue. So a timer fires once a second, and a delay of another second
    means that nothing ran here. A resumed process may have unread messages, and should read
    before it writes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_at = float("-inf")
        self._due = self._loop.time()
        self._timer = self._loop.call_soon(self._tick)

    def just_resumed(self) -> bool:
        """Whether this process was suspended until less than a second ago."""
        now = self._loop.time()
        if now - self._due > _TICK:
            self._due = now
            self._late_at = now
        return now - self._late_at < _TICK

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self.just_resumed()
        self._due = self._loop.time() + _TICK
        self._timer = self._loop.call_at(self._due, self._tick)


async def _send(call: Any, messages: list[bytes]) -> None:
    for message in messages:
        try:
            await call.write(message)
        except _ENDED:
            return  # the call has ended meanwhile; the next read raises the reason


def _channel(address: str, credentials: Any) -> Any:
    options = [
        *CHANNEL_OPTIONS,
        # Each node of one process has its own connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _meaning(error: Any) -> str:
    """Describe gRPC's error of a lost connection in plain words."""
    code = error.code()
    details = (error.details() or "").splitlines()
    if code is grpc.StatusCode.UNAVAILABLE:
        for sign, meaning in _MEANINGS.items():
            if sign in " ".join(details):
                return meaning
        return "it cannot be reached"
    return printable(details[0], 200) if details else code.name.lower().replace("_", " ")
