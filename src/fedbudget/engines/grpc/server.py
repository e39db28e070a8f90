"""The aggregator's end of all connections.

A thread with an event loop of its own serves the nodes; the aggregator's thread asks it to begin a round and to finish
one. Nothing polls: a broadcast leaves as soon as a round begins, and a round is finished by the last report to arrive.

A node is connected (it said hello), then welcome (it knows the task), then ready, and from then on idle or asked. One
that is asked owes a report, and is not asked again before it has come: a report that comes after its round is discarded
and counted, and the node is idle again. So no more than one message waits for any node, and none can send what it was
not asked for. Who breaks the rules is dropped, with a reason; the others go on.
"""

import asyncio
import concurrent.futures
import copy
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import numpy as np

from fedbudget.engines.grpc.admission import AdmissionControl, Refusal
from fedbudget.engines.grpc.codec import LONGEST, METHOD, NodeReader, pack_broadcast, pack_farewell, pack_welcome
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote import compression
from fedbudget.engines.remote.compression import BroadcastCompressor
from fedbudget.engines.remote.members import GONE_FOR_GOOD, OWN, Attendance, Counters, Member, name_order
from fedbudget.engines.remote.messages import Answer, Farewell, Hello, Ready, RoundRequest, Welcome
from fedbudget.engines.remote.round import CollectedRound, PendingRound
from fedbudget.engines.remote.task import Samples, Task
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast, PeerError
from fedbudget.resources.usage import NodeCosts

FRAME = 5
"""Bytes that gRPC puts before a message."""

_HELLO_PATIENCE = 20.0  # seconds until a peer that has connected must have said hello
_READY_PATIENCE = 600.0  # to compile and try, on a small device
_PART_PATIENCE = 30.0  # between two parts of one report
_BROKEN_IN_A_ROW = 3  # reports that are not finite, until their node is dropped
_LOG = logging.getLogger("fedbudget.network")
_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Peer:
    """A node that is connected.

    Args:
      blank: it has no memory of rounds that were counted.
      asked: the broadcast that it owes a report of.
      fault: why it is dropped, once it is.
    """

    name: str
    instance: str
    samples: Samples
    rounds: tuple[int, ...]
    run: str
    context: Any
    handler: "asyncio.Task[Any] | None"
    reader: NodeReader = field(default_factory=NodeReader)
    ready: NodeCosts | None = None
    blank: bool = True
    asked: Broadcast | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    fault: str | None = None


class AggregatorServer:
    """Serves nodes in a thread of its own.

    Args:
      address: HOST:PORT to listen on; port 0 for any.
      run: the run's name.
      credentials: for TLS; None for plain text.
      tokens: who may come in.
      shortener: how vectors are sent.
      most: the most nodes to let in.
      changed: told when nodes come and go, with how many are connected; in the hub's thread.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str,
        tokens: Tokens,
        credentials: Any = None,
        shortener: BroadcastCompressor | None = None,
        most: int = 1000,
        changed: Callable[[int], None] = lambda connected: None,
    ) -> None:
        self.run = run
        self.counters = Counters()
        self.members: dict[str, Member] = {}
        self.port = 0
        self._address = address
        self._credentials = credentials
        self._reception = AdmissionControl(tokens)
        self._shortener = shortener or BroadcastCompressor("none")
        self._most = most
        self._on_change = changed
        self._task: Task | None = None
        self._own: Worker | None = None
        self._own_owes: Broadcast | None = None
        self._own_trial: NodeCosts | None = None
        self._peers: dict[str, _Peer] = {}
        self._gathering: PendingRound | None = None
        self._woken = False  # the run was interrupted
        self._told = threading.Event()  # the broadcast is on its way
        self._awaited: concurrent.futures.Future[CollectedRound] | None = None
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fedbudget-hub", daemon=True)
        self._server: Any = None
        self._computing = concurrent.futures.ThreadPoolExecutor(1, "fedbudget-own-node")
        self._sending: set[asyncio.Task[None]] = set()

    # From the aggregator's thread.

    def open(self) -> int:
        """Begins to listen; gives the port."""
        self._thread.start()
        try:
            self.port = self._call(self._listen())
        except BaseException:
            self._end_thread()
            raise
        return self.port

    def descriptions(self) -> dict[str, Samples]:
        """What the samples of all that are connected are like, by name in the order of numbers to come."""
        found = self._in_loop(lambda: {peer.name: peer.samples for peer in self._peers.values()})
        own = {} if self._own is None else {OWN: self._own.node_data.samples()}
        return own | dict(sorted(found.items(), key=lambda item: name_order(item[0])))

    def hold(self, own: Worker) -> None:
        """Makes the aggregator a node too."""
        self._own = own

    def wait_for(self, nodes: int, interrupted: Callable[[], bool], *, ready: bool = False) -> bool:
        """Waits until so many nodes are connected, or ready; False when it was interrupted."""

        def there() -> bool:
            return interrupted() or self._count(ready=ready) >= nodes

        self._call(self._until(there))
        return not interrupted()

    def start(self, task: Task, members: Mapping[str, Member] | None = None) -> None:
        """Welcomes all that are connected to a task; those that come later are welcomed when they come.

        Args:
          members: of a run that goes on.
        """
        self._call(self._start(task, members))

    def trials(self) -> list[NodeCosts]:
        """What a trial round has cost at each that is ready."""
        own = [] if self._own_trial is None else [self._own_trial]
        return own + self._in_loop(lambda: [peer.ready for peer in self._peers.values() if peer.ready is not None])

    def lost(self, coming: int) -> list[int]:
        """Numbers of nodes whose knowledge of drift is lost, as of the round to come; they are told of once."""
        # Looked at from here first: every round asks, few have any, and waiting for the hub's thread takes time.
        members = list(self.members.items())
        if not any(member.lost or self._is_gone(name, member, coming) for name, member in members):
            return []
        return self._in_loop(lambda: self._lost(coming))

    def standing(self) -> dict[str, Member]:
        """All members as they are now."""
        # Not in the hub's thread, which has a broadcast to send when this is asked. A member that changes meanwhile is
        # copied as it was before or after: nothing in `copy` lets another thread in between two of its fields.
        return {name: copy.copy(member) for name, member in list(self.members.items())}

    def attendance(self) -> list[Attendance]:
        """How all members are doing, in the order of their numbers."""
        return self._in_loop(lambda: [self._attendance(name, member) for name, member in self.members.items()])

    def glance(self) -> list[Attendance]:
        """The same from any thread and at any time, also after the end; what changes meanwhile may be half seen."""
        return [self._attendance(name, member) for name, member in list(self.members.items())]

    def begin(self, broadcast: Broadcast, *, least: int, timeout: float, left: float) -> None:
        """Sends a broadcast to all that are idle.

        Args:
          least: how many nodes must report.
          timeout: seconds until those that have not are left out.
          left: seconds until the round ends whatever it has.
        """
        self._told.clear()
        self._loop.call_soon_threadsafe(self._begin, broadcast, least, timeout, left)
        self._told.wait()  # so that what this thread does next does not keep the hub's from sending

    def finish(self) -> CollectedRound:
        """Waits until the round is over."""
        over: concurrent.futures.Future[CollectedRound] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._await, over)
        return over.result()

    def wake(self) -> None:
        """Ends what is being waited for; from any thread, or a signal's handler."""
        with suppress(RuntimeError):  # when the hub is closed, nothing is
            self._loop.call_soon_threadsafe(self._wake)

    def look(self) -> None:
        """Looks again whether what is waited for has come; from any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed)

    def close(self, farewell: Farewell) -> None:
        """Says farewell to all nodes, and stops."""
        if not self._thread.is_alive():
            return
        try:
            self._call(self._close(farewell))
        finally:
            self._end_thread()
            self._computing.shutdown(wait=False, cancel_futures=True)

    def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _in_loop(self, look: Callable[[], _Result]) -> _Result:
        """What is changed in the hub's thread is looked at there too."""

        async def there() -> _Result:
            return look()

        return self._call(there())

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # In the hub's thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> int:
        options = [
            ("grpc.max_receive_message_length", LONGEST),
            ("grpc.max_send_message_length", LONGEST),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.max_metadata_size", 8192),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self._most + 100)
        service, name = METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._converse)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self._address)
            else:
                port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError:
            raise UserError(f"{self._address} cannot be listened on: is something else there?") from None
        await self._server.start()
        return int(port)

    async def _converse(self, _: Any, context: Any) -> None:
        """One stream, from its first message to its last."""
        peer: _Peer | None = None
        name = "a peer"
        try:
            name = self._reception.admit(context)
            peer = await self._greet(name, context)
            if self._task is not None:
                self._welcome(peer, self._task)
            await self._follow(peer)
        except PeerError as error:
            await self._drop(name, peer, context, str(error))
        except asyncio.CancelledError:
            if peer is None or peer.fault is None:
                raise
            await self._drop(name, peer, context, peer.fault)
        except Refusal as refusal:
            self.counters.refused += 1
            _LOG.warning("%s at %s is refused: %s", name, context.peer(), refusal)
            await context.abort(refusal.code, str(refusal)[:1000])
        finally:
            self._forget_peer(peer)

    async def _drop(self, name: str, peer: _Peer | None, context: Any, fault: str) -> None:
        self.counters.dropped += 1
        _LOG.warning("%s at %s is dropped: %s", name, context.peer(), fault)
        self._forget_peer(peer)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault[:1000])

    async def _greet(self, name: str, context: Any) -> _Peer:
        """The hello, and whether there is a place for who said it."""
        reader = NodeReader()
        data = await self._read(context, _HELLO_PATIENCE)
        if data is None:
            raise PeerError("it left without a word")
        hello = reader.feed(data)
        assert isinstance(hello, Hello)
        before = self._peers.get(name)
        if before is not None and before.instance != hello.instance:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"there is a node with the name {name} already")
        member = self.members.get(name)
        if self._task is not None:
            try:
                self._task.admit(hello.samples)
            except PeerError as error:
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"{name}'s data do not fit: {error}") from None
        if member is not None and len(member) != len(hello.samples.sizes):
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, f"{name} had {len(member)} nodes, not {len(hello.samples.sizes)}"
            )
        if before is None and self._count() + len(hello.samples.sizes) > self._most:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {self._count()} nodes already")
        if before is not None:
            self._dismiss(before, "the node has connected anew")
        peer = _Peer(
            name,
            hello.instance,
            hello.samples,
            hello.rounds,
            hello.run,
            context,
            asyncio.current_task(),
            reader,
        )
        self._peers[name] = peer
        _LOG.info("%s has joined from %s, with %d samples", name, context.peer(), sum(hello.samples.sizes))
        self._changed()
        return peer

    def _welcome(self, peer: _Peer, task: Task) -> None:
        member = self.members.get(peer.name)
        if member is None:
            first = sum(len(each) for each in self.members.values())
            numbers = np.arange(first, first + len(peer.samples.sizes), dtype=np.int64)
            member = self.members[peer.name] = Member(numbers, np.array(peer.samples.sizes, np.int64))
        member.sizes = np.array(peer.samples.sizes, np.int64)
        peer.blank = peer.run != self.run or member.base_round not in peer.rounds
        if peer.blank and member.base_round:
            member.base_round, member.lost = 0, True
        peer.reader.expect_ready()
        self._send(peer, pack_welcome(Welcome(self.run, task, tuple(member.numbers.tolist()))))

    async def _follow(self, peer: _Peer) -> None:
        """Takes what a node says until it goes."""
        while True:
            patience = _READY_PATIENCE if peer.ready is None and self._task is not None else None
            if peer.reader.in_the_middle:
                patience = _PART_PATIENCE
            data = await self._read(peer.context, patience)
            if data is None:
                return
            found = peer.reader.feed(data)
            if isinstance(found, Ready):
                peer.ready = found.costs
                self._changed()
            elif isinstance(found, Answer):
                broadcast, peer.asked = peer.asked, None
                self._take(peer.name, broadcast, found)

    async def _read(self, context: Any, patience: float | None) -> bytes | None:
        """The next message; None when no more come."""
        try:
            data = await (context.read() if patience is None else asyncio.wait_for(context.read(), patience))
        except TimeoutError:
            raise PeerError(f"nothing was heard of it for {patience:g} seconds, in the middle of something") from None
        if data is grpc.aio.EOF:
            return None
        self.counters.received += len(data) + FRAME
        return bytes(data)

    def _take(self, name: str, broadcast: Broadcast | None, answer: Answer) -> None:
        """A report, which counts in the round that it was asked for."""
        gathering = self._gathering
        if gathering is None or broadcast is not gathering.broadcast or name not in gathering.owing:
            self.counters.late += 1
            _LOG.info("%s's report of round %d came too late, and is discarded", name, answer.report.round)
        else:
            gathering.owing.discard(name)
            gathering.answers[name] = answer
            kind, vectors = self._shortener.kind, (answer.report.w, answer.report.gradients)
            if kind != "none":
                sizes = [vector.size for vector in vectors if vector is not None]
                self.counters.saved += sum(4 * size - compression.encoded_size(kind, size) for size in sizes)
        self._look()

    def _forget_peer(self, peer: _Peer | None) -> None:
        """A connection has ended."""
        if peer is None or self._peers.get(peer.name) is not peer:
            return
        del self._peers[peer.name]
        if (
            self._gathering is not None
            and peer.name in self._gathering.owing
            and peer.asked is self._gathering.broadcast
        ):
            self._gathering.owing.discard(peer.name)
        _LOG.info("%s has left", peer.name)
        self._changed()

    def _dismiss(self, peer: _Peer, reason: str) -> None:
        """Ends a connection that has done no wrong."""

        async def end() -> None:
            with suppress(grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError):
                await peer.context.abort(grpc.StatusCode.ABORTED, reason)  # a handler that is cancelled says nothing
            if peer.handler is not None:
                peer.handler.cancel()

        self._forget_peer(peer)
        self._spawn(end())

    def _send(self, peer: _Peer, messages: list[bytes]) -> None:
        """Sends in a task of its own, so that a slow peer holds nobody up."""
        self._spawn(self._write(peer, messages))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _write(self, peer: _Peer, messages: list[bytes]) -> None:
        try:
            async with peer.writing:  # one message after the other: a farewell may come while a broadcast is being sent
                for message in messages:
                    await peer.context.write(message)
                    self.counters.sent += len(message) + FRAME
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError):
            self._forget_peer(peer)

    async def _start(self, task: Task, members: Mapping[str, Member] | None) -> None:
        self._task = task
        self.members = dict(members or {})
        if self._own is not None and OWN not in self.members:
            sizes = np.array(self._own.node_data.samples().sizes, np.int64)
            self.members[OWN] = Member(np.arange(len(sizes), dtype=np.int64), sizes)
        if self._own is not None:
            numbers = tuple(self.members[OWN].numbers.tolist())
            welcome = Welcome(self.run, task, numbers)
            self._own_trial = await self._loop.run_in_executor(self._computing, self._own.start, welcome)
            if self.members[OWN].base_round:
                self.members[OWN].base_round, self.members[OWN].lost = 0, True
        for peer in sorted(self._peers.values(), key=lambda peer: name_order(peer.name)):
            self._welcome(peer, task)

    def _attendance(self, name: str, member: Member) -> Attendance:
        peer = self._peers.get(name)
        if name == OWN:
            state = "idle" if self._own_owes is None else "at work"
        elif peer is None:
            state = "away"
        elif peer.ready is None:
            state = "preparing"
        else:
            state = "idle" if peer.asked is None else "at work"
        samples = int(member.sizes.sum())
        return Attendance(name, samples, state, member.rounds, member.missed, member.step_seconds)

    def _lost(self, coming: int) -> list[int]:
        found: list[int] = []
        for name, member in self.members.items():
            if self._is_gone(name, member, coming):
                member.lost, member.base_round = True, 0
            if member.lost:
                member.lost = False
                found += member.numbers.tolist()
        return found

    def _is_gone(self, name: str, member: Member, coming: int) -> bool:
        away = name not in self._peers and name != OWN
        return bool(member.base_round) and away and coming - member.base_round > GONE_FOR_GOOD

    def _begin(self, broadcast: Broadcast, least: int, timeout: float, left: float) -> None:
        gathering = self._gathering = PendingRound(broadcast, least)
        gathering.expired = self._woken  # an interruption between two rounds is not lost
        try:
            self._ask_all(gathering)
        except Exception as error:
            gathering.trouble, gathering.expired = error, True
        self._loop.call_soon(self._told.set)  # after the first part of what is asked was written

        def overdue() -> None:
            gathering.overdue = True
            self._changed()

        def expired() -> None:
            gathering.expired = True
            self._changed()

        for seconds, then in ((timeout, overdue), (left, expired)):
            if seconds < 1e6:
                gathering.timers.append(self._loop.call_later(max(0.0, seconds), then))

    def _ask_all(self, gathering: PendingRound) -> None:
        """All that are idle, and were not asked in this round."""
        for peer in self._peers.values():
            if peer.ready is not None and peer.asked is None and peer.name not in gathering.answers:
                self._ask(gathering, peer)
        if self._own is not None and self._own_owes is None and OWN not in gathering.answers:
            self._ask_own(gathering, self._own)

    def _ask(self, gathering: PendingRound, peer: _Peer) -> None:
        broadcast, member = gathering.broadcast, self.members[peer.name]
        peer.asked = broadcast
        gathering.ask(peer.name, peer.instance)
        peer.reader.expect_report(broadcast, member.numbers, member.sizes, self._shortener.kind)
        base_round = 0 if peer.blank else member.base_round
        if base_round != broadcast.round - 1:
            self._send(
                peer,
                pack_broadcast(
                    broadcast, base_round=base_round, catch_up=broadcast.catch_up is not None, difference=None
                ),
            )
            return
        difference = self._shortener.difference(broadcast) if base_round else None
        if gathering.lean is None:
            gathering.lean = pack_broadcast(broadcast, base_round=base_round, catch_up=False, difference=difference)
        if difference is not None:
            self.counters.saved += 4 * broadcast.w.size - len(difference)
        self._send(peer, gathering.lean)

    def _ask_own(self, gathering: PendingRound, own: Worker) -> None:
        broadcast, member = gathering.broadcast, self.members[OWN]
        self._own_owes = broadcast
        gathering.ask(OWN, OWN)
        work = self._loop.run_in_executor(self._computing, own.answer, RoundRequest(broadcast, member.base_round))

        def take(done: "asyncio.Future[Any]") -> None:
            self._own_owes = None
            if done.cancelled():
                return
            error = done.exception()
            if isinstance(error, Exception):
                gathering.trouble, gathering.expired = error, True
                self._look()
            else:
                report, costs, _ = done.result()
                self._take(OWN, broadcast, Answer(report, replace(costs, here=True)))

        work.add_done_callback(take)

    def _await(self, over: "concurrent.futures.Future[CollectedRound]") -> None:
        self._awaited = over
        self._look()

    def _close_round(self, gathering: PendingRound) -> CollectedRound:
        """Counts what has come; nobody's standing changes before the aggregator asks for it."""
        if gathering.trouble is not None:
            raise gathering.trouble
        for timer in gathering.timers:
            timer.cancel()
        self._gathering = None
        counted = gathering.counted()
        broken = [name for name in gathering.answers if name not in counted]
        for name, answer in counted.items():
            member, peer = self.members[name], self._peers.get(name)
            member.broken = 0
            member.rounds += 1
            member.step_seconds = answer.costs.step_seconds
            if peer is None or peer.instance == gathering.instances[name]:  # and not another that has come in its place
                member.base_round = gathering.broadcast.round
            if peer is not None and peer.instance == gathering.instances[name]:
                peer.blank = False
        for name in broken:
            self._set_aside(name)
        missed = gathering.asked - set(gathering.answers)
        for name in missed:
            self.members[name].missed += 1
        return CollectedRound(
            sorted(counted.values(), key=lambda answer: int(answer.report.nodes[0])),
            self._numbers(broken),
            self._numbers(missed),
            sum(len(self.members[name]) for name in counted) >= gathering.least,
        )

    def _set_aside(self, name: str) -> None:
        """A report that is not finite, while others are."""
        member, peer = self.members[name], self._peers.get(name)
        member.broken += 1
        _LOG.warning("%s's report is not finite, and is set aside", name)
        if member.broken >= _BROKEN_IN_A_ROW and peer is not None:
            member.broken = 0
            peer.fault = f"{_BROKEN_IN_A_ROW} of its reports in a row were not finite"
            self._forget_peer(peer)
            if peer.handler is not None:
                peer.handler.cancel()

    def _changed(self) -> None:
        """Nodes have come or gone."""
        self._on_change(self._count())
        self._look()

    def _look(self) -> None:
        """Looks whether what is waited for has come."""
        gathering, awaited = self._gathering, self._awaited
        if gathering is not None and (gathering.expired or gathering.overdue or not gathering.owing):
            enough = gathering.nodes(self.members) >= gathering.least
            if not (enough or gathering.expired):
                self._ask_all(gathering)
            elif awaited is not None:
                self._awaited = None
                try:
                    awaited.set_result(self._close_round(gathering))
                except Exception as error:
                    awaited.set_exception(error)
        for condition, future in list(self._waiting):
            if condition() and not future.done():
                future.set_result(None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        waiting = condition, self._loop.create_future()
        self._waiting.append(waiting)
        try:
            await waiting[1]
        finally:
            self._waiting.remove(waiting)

    def _wake(self) -> None:
        self._woken = True
        if self._gathering is not None:
            self._gathering.expired = True
        self._changed()

    async def _close(self, farewell: Farewell) -> None:
        for peer in list(self._peers.values()):
            self._send(peer, pack_farewell(farewell))
        if self._sending:
            await asyncio.wait(self._sending, timeout=2.0)
        gone = self._loop.create_future()
        self._waiting.append((lambda: not self._peers, gone))
        self._changed()
        await asyncio.wait([gone], timeout=2.0)  # nodes close the stream when they have heard the farewell
        await self._server.stop(0.2)
        for task in list(self._sending):
            task.cancel()
        await asyncio.sleep(0)

    def _count(self, *, ready: bool = False) -> int:
        """Nodes that are connected, or ready."""
        own = 0 if self._own is None else len(self._own.node_data.rows)
        peers = [peer for peer in self._peers.values() if peer.ready is not None or not ready]
        return own + sum(len(peer.samples.sizes) for peer in peers)

    def _numbers(self, names: Any) -> tuple[int, ...]:
        return tuple(sorted(number for name in names for number in self.members[name].numbers.tolist()))
