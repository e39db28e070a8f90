"""The aggregator's end of all connections.

service.py has the conversation with one peer, rounds.py the rounds.

Threads: a thread with its own event loop (the server's thread) serves the nodes. The
aggregator's thread asks it to begin a round and to finish one. Public methods are for the
aggregator's thread unless they are documented for any thread; methods under "In the
server's thread" run only there. Nothing polls: a broadcast leaves as soon as a round
begins, and the last report to arrive completes the round.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import grpc

from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc.admission import AdmissionControl
from fedbudget.engines.grpc.event_loop import LoopThread
from fedbudget.engines.grpc.peers import LOG, REVOKED, Peer, Peers
from fedbudget.engines.grpc.rounds import OwnNode, PlainReports, ReportCollector, Rounds
from fedbudget.engines.grpc.service import PeerLimits, Service
from fedbudget.engines.grpc.stream import CHANNEL_OPTIONS, METHOD, pack
from fedbudget.engines.grpc.tokens import TokenFile, Tokens
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.members import OWN, Member, Members, name_order
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.engines.remote.round import CollectedRound, RemoteNodes
from fedbudget.engines.remote.task import DataTerms, SamplesDescription, Task
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.models.description import ModelDescription
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.protocol.messages import Broadcast, PeerError
from fedbudget.resources.resource import Usage

_FAREWELL_PATIENCE = 5.0  # seconds for nodes to close their streams after a farewell
_TOKEN_INTERVAL = 1.0  # seconds between two checks for revoked tokens
_OWN_DESCRIPTORS = 64  # reserved for files and threads

_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_metadata_size", 8192),
    # An idle connection is closed: it takes a descriptor and needs no credentials.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_concurrent_streams", 4),  # of a connection; a node needs one
    # With probing, an unread stream would fill a buffer as large as the line's capacity.
    ("grpc.http2.bdp_probe", 0),
]


class AggregatorServer(RemoteNodes):
    """Serves nodes in its own thread.

    Args:
      address: HOST:PORT to listen on; port 0 for any.
      run: name of the run.
      tokens: valid tokens; those of a file only while their lines exist.
      allowed: names of nodes that may join; None for all.
      limits: for each peer.
      credentials: for TLS; None for plain text.
      compressor: of broadcast vectors.
      most: largest number of nodes.
      model: the task's model; nodes with another one are refused from the start.
      terms: nodes whose data do not fulfil them are refused from the start.
      max_share: largest share of one node in the average, with three or more nodes; see
        `Members`.
      reports: how reports are collected; one by one if None.
      changed: called in the server's thread when nodes join, are ready or leave, with the
        numbers of connected and of ready nodes.
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
        terms: DataTerms | None = None,
        max_share: float | None = None,
        reports: ReportCollector | None = None,
        changed: Callable[[int, int], None] = lambda connected, ready: None,
    ) -> None:
        self.run = run
        self.port = 0
        self._encoded_task = ""
        self._address = address
        self._credentials = credentials
        self._most = most
        self._max_share = max_share
        self._on_change = changed
        self._server: Any = None
        self._began = threading.Event()  # the broadcast is being sent
        self._thread = LoopThread("fedbudget-server")
        self._peers = Peers(self._thread, self._left)
        self.counters = self._peers.counters
        self._rounds = Rounds(
            self._thread,
            self._peers,
            compressor or BroadcastCompressor("none"),
            reports or PlainReports(),
        )
        self._admission = AdmissionControl(tokens, allowed)
        self._service = Service(
            run,
            self._admission,
            self._rounds,
            most,
            self._changed,
            model,
            terms=terms or DataTerms(),
            limits=limits or PeerLimits(),
        )

    @property
    def members(self) -> Members[str]:
        return self._rounds.members

    def open(self) -> int:
        """Start to listen; returns the port."""
        self._thread.start()
        try:
            self.port = self._thread.run(self._listen())
        except BaseException:
            self._thread.stop()
            raise
        return self.port

    def descriptions(self) -> dict[str, SamplesDescription]:
        """Descriptions of connected nodes' samples by name, in order of node numbers."""
        peers = self._thread.read(
            lambda: {peer.name: peer.hello.samples for peer in self._peers}
        )
        descriptions = {}
        if self._rounds.own is not None:
            descriptions[OWN] = self._rounds.own.worker.node_data.samples()
        for name in sorted(peers, key=name_order):
            descriptions[name] = peers[name]
        return descriptions

    def refuse(self, name: str, reason: str) -> None:
        """Drop a node whose data do not fit."""

        def refuse() -> None:
            peer = self._peers.get(name)
            if peer is not None:
                self._peers.drop(peer, reason)

        self._thread.read(refuse)

    def refuse_all(self, reason: str) -> None:
        """Drop all nodes, because the run cannot begin: it fails for the nodes too."""

        def refuse() -> None:
            for peer in self._peers:
                self._peers.drop(peer, reason)

        self._thread.read(refuse)

    def open_audit(self, folder: Path) -> None:
        """Write the audit log to this folder, including earlier events."""
        self._thread.post(self._peers.audit.open, folder)

    def add_own_node(self, worker: Worker) -> None:
        """Make the aggregator a node too."""
        self._rounds.own = OwnNode(worker)

    def wait_for(
        self,
        nodes: int,
        interrupted: Callable[[], bool],
        *,
        ready: bool = False,
        other_than: Collection[str] = (),
    ) -> bool:
        """Wait for a number of nodes.

        Args:
          nodes: that are connected, or ready.
          interrupted: whether to stop waiting.
          ready: count only nodes that are ready.
          other_than: if given, the set of connected names must differ from it.

        Returns:
          False if it was interrupted.
        """

        def enough() -> bool:
            if other_than and set(other_than) == {peer.name for peer in self._peers}:
                return False
            return self._rounds.count(ready=ready) >= nodes

        self._thread.run(self._thread.until(lambda: interrupted() or enough()))
        return not interrupted()

    def start(self, task: Task, members: Mapping[str, Member] | None = None) -> None:
        """Send the task to all connected nodes, and later to each node that joins.

        Args:
          members: of a resumed run.
        """
        self._encoded_task = wire.task_to_text(task)
        joined = Members(members, share=self._max_share, cap=task.most_counted)
        self._thread.run(self._start(task, joined))

    def trials(self) -> list[Usage]:
        """Costs of the trial round of each ready node."""
        trials = self._thread.read(lambda: [peer.trial for peer in self._peers])
        own = None if self._rounds.own is None else self._rounds.own.trial
        return [trial for trial in (own, *trials) if trial is not None]

    def lost(self, coming: int) -> list[int]:
        # Checked in this thread first: most rounds have none, and a call to the server's
        # thread takes time.
        if not self.members.any_lost(coming, self._peers):
            return []
        return self._thread.read(lambda: self.members.take_lost(coming, self._peers))

    def node_statuses(self) -> list[NodeStatus]:
        now = time.time()
        return [
            member.status(name, self._state(name), now)
            for name, member in self.members.snapshot().items()
        ]

    def state(self, meters: dict[str, Any]) -> dict[str, Any]:
        members = {name: member.saved() for name, member in self.members.snapshot().items()}
        return {
            "engine": "network",
            "meters": meters,
            "counters": self.traffic(),
            "run": self.run,
            "task": self._encoded_task,
            "members": members,
            "attempt": self._rounds.reports.last_attempt,
        }

    def begin(self, broadcast: Broadcast, terms: RoundTerms) -> None:

        def begin() -> None:
            self._peers.audit.under_way = True
            self._rounds.begin(broadcast, terms)
            # Runs after the first part of each broadcast was written.
            self._thread.loop.call_soon(self._began.set)

        self._began.clear()
        self._thread.post(begin)
        # This thread's next work must not keep the server's thread from sending.
        self._began.wait()

    def finish(self) -> CollectedRound:
        finished: concurrent.futures.Future[CollectedRound] = concurrent.futures.Future()
        self._rounds.finish(finished)
        return finished.result()

    def wake(self) -> None:
        """Stop waiting; from any thread or signal handler."""

        def stop() -> None:
            self._rounds.stop()
            self._changed()

        self._thread.post(stop)

    def check_waiting(self) -> None:
        """Check the conditions of waiting threads again; from any thread."""
        self._thread.post(self._changed)

    def dismiss(self, reason: str) -> None:
        self.close(Farewell(reason))

    def close(self, farewell: Farewell) -> None:
        """Send a farewell to all nodes, and stop."""
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
                f"cannot listen on {self._address}: another program may be using it"
            ) from None
        await self._server.start()
        self._watching = self._thread.loop.create_task(self._watch_tokens())
        return int(port)

    async def _watch_tokens(self) -> None:
        """Drop nodes whose tokens were revoked."""
        while True:
            await asyncio.sleep(_TOKEN_INTERVAL)
            try:
                changed = self._admission.reload()
            except UserError as error:
                LOG.warning("%s; the previous tokens stay valid", error)
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
            if peer.welcomed:  # it joined during our own node's trial round
                continue
            try:
                task.admit(peer.hello.samples)
            except PeerError as error:  # it joined after the others had agreed
                self._peers.drop(peer, f"{peer.name}'s data do not fit: {error}")
            else:
                self._service.welcome(peer)

    async def _close(self, farewell: Farewell) -> None:
        self._peers.audit.under_way = False
        for peer in self._peers:
            self._peers.send(peer, pack(farewell))
        # Nodes close their streams on a farewell, even during a round. The other streams
        # are closed in order, so that the farewell is the last message their nodes read.
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
            self._rounds.warn_too_few()
        self._changed()

    def _changed(self) -> None:
        """Handle that nodes have joined or left, or are ready."""
        self._on_change(self._rounds.count(), self._rounds.count(ready=True))
        self._rounds.check()
        self._thread.notify()

    def _state(self, name: str) -> str:
        if name == OWN:
            own = self._rounds.own
            return "at work" if own is not None and own.busy else "idle"
        peer = self._peers.get(name)
        return "away" if peer is None else peer.state


def _most_connections(nodes: int) -> int:
    """Limit of connections: some more than nodes, as far as file descriptors allow."""
    most = nodes + 100
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except ImportError:  # on Windows
        return most
    return max(16, min(most, limit - _OWN_DESCRIPTORS)) if limit > 0 else most
