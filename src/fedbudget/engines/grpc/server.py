"""The aggregator's end of all connections.

A thread with an event loop of its own serves the nodes; the aggregator's thread asks it to begin a round and to finish
one. Nothing polls: a broadcast leaves as soon as a round begins, and a round is finished by the last report to arrive.
What passes with one peer is in service.py, what makes a round in rounds.py.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from fedbudget.engines.grpc.admission import AdmissionControl
from fedbudget.engines.grpc.event_loop import LoopThread
from fedbudget.engines.grpc.messages import pack_farewell
from fedbudget.engines.grpc.peers import LOG, REVOKED, Peer, Peers
from fedbudget.engines.grpc.rounds import OwnNode, Rounds
from fedbudget.engines.grpc.service import PeerLimits, Service
from fedbudget.engines.grpc.stream import CHANNEL_OPTIONS, METHOD
from fedbudget.engines.grpc.tokens import TokenFile, Tokens
from fedbudget.engines.remote import encodings
from fedbudget.engines.remote.members import OWN, Member, Members, name_order
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.engines.remote.task import SamplesDescription, Task
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.models.description import ModelDescription
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.protocol.messages import Broadcast, PeerError
from fedbudget.resources.resource import NodeCosts

if TYPE_CHECKING:
    from fedbudget.engines.grpc.masked_rounds import MaskingTerms


_FAREWELL_PATIENCE = 5.0  # seconds for nodes to hear that it is over

_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_metadata_size", 8192),
    # A connection on which nobody has asked for anything is closed: it takes a descriptor, and no credentials.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_concurrent_streams", 4),  # of a connection: a node needs one
    (
        "grpc.http2.bdp_probe",
        0,
    ),  # or a stream that is not read would be sent on into a buffer, as large as the line
]


_TOKENS_EVERY = 1.0  # seconds until a token that was revoked is known to be
_OWN_DESCRIPTORS = 64  # that connections leave for files and threads


def _most_connections(nodes: int) -> int:
    """How many there may be: for all nodes, as far as this process may have descriptors."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except ImportError:  # as on Windows
        return nodes + 100
    return max(16, min(nodes + 100, limit - _OWN_DESCRIPTORS)) if limit > 0 else nodes + 100


class AggregatorServer:
    """Serves nodes in a thread of its own; its methods are for the aggregator's thread.

    Args:
      address: HOST:PORT to listen on; port 0 for any.
      run: the run's name.
      tokens: who may come in; of a file, as long as its line is there.
      allowed: names of nodes that may; None for all.
      limits: of what one peer may bring.
      credentials: for TLS; None for plain text.
      compressor: how vectors are sent.
      most: the most nodes to let in.
      model: what will be trained, as of a task; nodes that have another are refused from the first.
      classes: all that there may be; nodes that have others are refused from the first.
      max_share: the largest share of the average that one node may have, where they are three or more; see `Members`.
      masking: how sums are masked, so that no report can be read by itself; None where they are not.
      changed: called when nodes come, are ready, or go, with how many are connected and how many of these are ready;
        in the server's thread.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str,
        tokens: Tokens | TokenFile,
        allowed: Collection[str] | None = None,
        limits: PeerLimits | None = None,
        credentials: Any = None,
        compressor: BroadcastCompressor | None = None,
        most: int = 1000,
        model: str | ModelDescription | None = None,
        classes: Sequence[str] | None = None,
        max_share: float | None = None,
        masking: "MaskingTerms | None" = None,
        changed: Callable[[int, int], None] = lambda connected, ready: None,
    ) -> None:
        self.run = run
        self.port = 0
        self.error = ""
        self._encoded_task = ""
        self._address = address
        self._credentials = credentials
        self._most = most
        self._max_share = max_share
        self._on_change = changed
        self._server: Any = None
        self._began = threading.Event()  # the broadcast is on its way
        self._thread = LoopThread("fedbudget-server")
        self._peers = Peers(self._thread, self._left)
        self.counters = self._peers.counters
        self._rounds = self._make_rounds(compressor or BroadcastCompressor("none"), masking)
        self._admission = AdmissionControl(tokens, allowed)
        self._service = Service(
            run,
            self._admission,
            self._rounds,
            most,
            self._changed,
            model,
            classes=classes,
            limits=limits or PeerLimits(),
        )

    def _make_rounds(
        self, compressor: BroadcastCompressor, masking: "MaskingTerms | None"
    ) -> Rounds:
        if masking is None:
            return Rounds(self._thread, self._peers, compressor)
        from fedbudget.engines.grpc.masked_rounds import (
            MaskedRounds,  # which needs a library that others do not
        )

        return MaskedRounds(self._thread, self._peers, compressor, self.run, masking)

    @property
    def members(self) -> Members[str]:
        return self._rounds.members

    def open(self) -> int:
        """Begins to listen; gives the port."""
        self._thread.start()
        try:
            self.port = self._thread.run(self._listen())
        except BaseException:
            self._thread.stop()
            raise
        return self.port

    def descriptions(self) -> dict[str, SamplesDescription]:
        """What the samples of all that are connected are like, by name in the order of numbers to come."""
        peers = self._thread.read(
            lambda: {peer.name: peer.hello.samples for peer in self._peers}
        )
        own = (
            {}
            if self._rounds.own is None
            else {OWN: self._rounds.own.worker.node_data.samples()}
        )
        return own | dict(sorted(peers.items(), key=lambda item: name_order(item[0])))

    def refuse(self, name: str, reason: str) -> None:
        """Lets one go whose data do not fit."""

        def refuse() -> None:
            peer = self._peers.get(name)
            if peer is not None:
                self._peers.drop(peer, reason)

        self._thread.read(refuse)

    def refuse_all(self, reason: str) -> None:
        """Lets all go, because there will be no run with them: for nodes it has failed too."""

        def refuse() -> None:
            for peer in self._peers:
                self._peers.drop(peer, reason)

        self._thread.read(refuse)

    def open_audit(self, folder: Path) -> None:
        """Who comes and goes is written to a file there, from now on and what was so far."""
        self._thread.post(self._peers.audit.open, folder)

    def add_own_node(self, worker: Worker) -> None:
        """Makes the aggregator a node too."""
        self._rounds.own = OwnNode(worker)

    def pay_before_opening(self, pay: Callable[[int, float], None]) -> None:
        """Where sums are masked, calls this with a private round's number and ρ before nodes are asked to open it."""
        self._rounds.pay = pay

    def wait_for(
        self,
        nodes: int,
        interrupted: Callable[[], bool],
        *,
        ready: bool = False,
        other_than: Collection[str] = (),
    ) -> bool:
        """Waits until so many nodes are connected, or ready; False when it was interrupted.

        Args:
          other_than: names, where it is waited until not just these are connected.
        """

        def enough() -> bool:
            others = not other_than or set(other_than) != {
                peer.name for peer in self._peers
            }
            return others and self._rounds.count(ready=ready) >= nodes

        self._thread.run(self._thread.until(lambda: interrupted() or enough()))
        return not interrupted()

    def start(self, task: Task, members: Mapping[str, Member] | None = None) -> None:
        """Welcomes all that are connected to a task; those that come later are welcomed when they come.

        Args:
          members: of a run that goes on.
        """
        self._encoded_task = encodings.describe(task).SerializeToString().hex()
        self._thread.run(self._start(task, Members(members, share=self._max_share)))

    def trials(self) -> list[NodeCosts]:
        """What a trial round has cost at each that is ready."""
        trials = self._thread.read(lambda: [peer.trial for peer in self._peers])
        own = None if self._rounds.own is None else self._rounds.own.trial
        return [trial for trial in (own, *trials) if trial is not None]

    def lost(self, coming: int) -> list[int]:
        """Numbers of nodes whose knowledge of drift is lost, as of the round to come; each is given once."""
        # Looked at from here first: every round asks, few have any, and waiting for the server's thread takes time.
        if not self.members.any_lost(coming, self._peers):
            return []
        return self._thread.read(lambda: self.members.take_lost(coming, self._peers))

    def node_statuses(self) -> list[NodeStatus]:
        """How all members are doing, in the order of their numbers; from any thread, also after the end."""
        now = time.time()
        return [
            member.status(name, self._state(name), now)
            for name, member in self.members.snapshot().items()
        ]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, for a server that goes on."""
        members = {name: member.saved() for name, member in self.members.snapshot().items()}
        return {"run": self.run, "task": self._encoded_task, "members": members}

    def begin(
        self,
        broadcast: Broadcast,
        *,
        least: int,
        timeout: float,
        left: float,
        needs_reports: bool = True,
        resting: Collection[int] = (),
    ) -> None:
        """Sends a broadcast to all that are idle, as `RemoteNodes` says."""
        options: Any = {
            "timeout": timeout,
            "left": left,
            "needs_reports": needs_reports,
            "resting": resting,
        }

        def begin() -> None:
            self._peers.audit.under_way = True
            self._rounds.begin(broadcast, least=least, **options)
            self._thread.loop.call_soon(
                self._began.set
            )  # after the first part of what is asked was written

        self._began.clear()
        self._thread.post(begin)
        self._began.wait()  # so that what this thread does next does not keep the server's from sending

    def finish(self) -> CollectedRound:
        """Waits until the round is over."""
        finished: concurrent.futures.Future[CollectedRound] = concurrent.futures.Future()
        self._rounds.finish(finished)
        return finished.result()

    def wake(self) -> None:
        """Ends what is being waited for; from any thread, or a signal's handler."""

        def stop() -> None:
            self._rounds.stop()
            self._changed()

        self._thread.post(stop)

    def check_waiting(self) -> None:
        """Looks again whether what is waited for has come; from any thread."""
        self._thread.post(self._changed)

    def close(self, farewell: Farewell) -> None:
        """Says farewell to all nodes, and stops."""
        if not self._thread.running:
            return
        try:
            self._thread.run(self._close(farewell))
        finally:
            self._thread.stop()
            if self._rounds.own is not None:
                self._rounds.own.close()

    # In the server's thread.

    async def _listen(self) -> int:
        options = [
            *_OPTIONS,
            ("grpc.max_allowed_incoming_connections", _most_connections(self._most)),
        ]
        self._server = grpc.aio.server(
            options=options, maximum_concurrent_rpcs=self._most + 100
        )
        service, name = METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._service.converse)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self._address)
            else:
                port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError:
            raise UserError(
                f"{self._address} cannot be listened on: is something else there?"
            ) from None
        await self._server.start()
        self._watching = self._thread.loop.create_task(self._watch_tokens())
        return int(port)

    async def _watch_tokens(self) -> None:
        """Drops nodes whose tokens are not right any more."""
        while True:
            await asyncio.sleep(_TOKENS_EVERY)
            try:
                changed = self._admission.reload()
            except UserError as error:
                LOG.warning("%s; those that were right stay so", error)
                continue
            for peer in self._peers if changed else ():
                if not self._admission.tokens.allows(peer.name, peer.token):
                    self._peers.drop(peer, REVOKED)

    async def _start(self, task: Task, members: Members[str]) -> None:
        own = self._rounds.own
        self._rounds.members = members
        self._service.task = task
        if own is not None:
            member = members.join(OWN, own.worker.node_data.samples().sizes)
            await own.start(Welcome(self.run, task, tuple(member.numbers.tolist())))
            member.forget()
        for peer in sorted(self._peers, key=lambda peer: name_order(peer.name)):
            if peer.welcomed:  # as one is that came while our own node made its trial
                continue
            try:
                task.admit(peer.hello.samples)
            except PeerError as error:  # it came after the others had agreed
                self._peers.drop(peer, f"{peer.name}'s data do not fit: {error}")
            else:
                self._service.welcome(peer)

    async def _close(self, farewell: Farewell) -> None:
        self._peers.audit.under_way = False
        for peer in self._peers:
            self._peers.send(peer, pack_farewell(farewell))
        # Nodes close the stream on a farewell, in the middle of a round too. To one that does not we close it in order,
        # so that the farewell is the last that it hears, whenever it listens again.
        await self._thread.until(lambda: not len(self._peers), _FAREWELL_PATIENCE)
        for peer in self._peers:
            self._peers.release(peer)
        self._watching.cancel()
        await self._thread.finish_tasks(0.2)
        await self._server.stop(0.2)
        await self._thread.cancel_tasks()

    def _left(self, peer: Peer) -> None:
        self._rounds.withdraw(peer)
        if self._peers.audit.under_way:
            self._rounds.tell_too_few()
        self._changed()

    def _changed(self) -> None:
        """Nodes have come or gone, or are ready."""
        self._on_change(self._rounds.count(), self._rounds.count(ready=True))
        self._rounds.check()
        self._thread.notify()

    def _state(self, name: str) -> str:
        if name == OWN:
            return (
                "at work"
                if self._rounds.own is not None and self._rounds.own.busy
                else "idle"
            )
        peer = self._peers.get(name)
        return "away" if peer is None else peer.state
