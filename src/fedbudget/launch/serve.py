"""Aggregator over gRPC: wait for nodes on other machines, agree on a task, and run it.

`serve_run` is the whole path, for the command line and the Python API. `serving` prepares
the run without printing. Nodes whose data do not match those of the majority are refused by
name.
"""

import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbudget.data.dataset import Dataset
from fedbudget.durable_files import reserve_descriptors
from fedbudget.engines.engine import interruptible, no_payment
from fedbudget.engines.grpc.credentials import aggregator_credentials, require_privacy
from fedbudget.engines.grpc.peers import LOG
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.service import PeerLimits
from fedbudget.engines.grpc.tokens import TokenFile, check_name
from fedbudget.engines.noise import PaymentLog
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.members import Member
from fedbudget.engines.remote.messages import Farewell
from fedbudget.engines.remote.node_data import NodeData, evaluation_table
from fedbudget.engines.remote.policy import LARGE
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError, as_user_error, flag
from fedbudget.launch.inputs import own_model, with_resolved_files
from fedbudget.launch.logs import log_handler
from fedbudget.launch.method import build_meters, build_method
from fedbudget.launch.monitoring import Metrics
from fedbudget.launch.monitoring import serving as serving_metrics
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun
from fedbudget.launch.privacy import (
    is_private,
    ledger_name,
    masked_sums,
    open_ledger,
    with_ledger,
    with_privacy,
    with_sums_only,
)
from fedbudget.launch.resume import recalling, require_engine, require_same_model
from fedbudget.launch.task import (
    NODES,
    agree_on_task,
    compression_of,
    data_terms,
    misfits,
    model_for,
    prepare_remote,
    remarks_on,
    warm_up,
    with_newton_of,
)
from fedbudget.models.base import Model
from fedbudget.models.compiling import COMPILING, on_compiling
from fedbudget.models.description import describe
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.resources.energy import energy_reader
from fedbudget.result import Result
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.record import RoundRecord
from fedbudget.secure.graph import FEWEST
from fedbudget.settings.network import ListenOptions, LogOptions, SecurityOptions
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.grpc.masked_sums import MaskedSums

NO_SECURITY = SecurityOptions()

_HINT_AFTER = 20.0  # seconds without all nodes until the reasons are printed
_LAST_CALL = 10.0  # seconds for nodes to learn that a resumed run is already done
_UNCLIPPED = (
    "the model has %s parameters, and the updates of nodes are averaged without clipping; "
    "the rule `clipped` would limit the influence of one node, and hold all reports of a "
    "round in memory"
)


class Interrupted(Exception):
    """The user stopped the aggregator while it was waiting for nodes."""


def serve_run(
    settings: Settings,
    listen: ListenOptions,
    security: SecurityOptions,
    run: Callable[[PreparedRun], Result],
    *,
    quiet: bool,
    logs: LogOptions | None = None,
    **more: Any,
) -> Result:
    """Wait for nodes, show who has joined, and run with them.

    Args:
      run: executes the prepared run.
      quiet: print only a port that `listen` does not fix.
      logs: format and level of the network log.
      more: arguments of `serving`.
    """
    nodes = settings.nodes or settings.min_nodes or 1
    waiting = _Waiting(
        nodes,
        quiet=quiet,
        any_port=listen.address.endswith(":0"),
        tls=security.cert is not None,
    )
    with (
        _network_log(logs or LogOptions(), quiet=quiet),
        interruptible(waiting.wake) as interrupted,
    ):
        try:
            with serving(
                settings,
                listen,
                security,
                interrupted=interrupted,
                opened=waiting.opened,
                changed=waiting.changed,
                **more,
            ) as prepared:
                waiting.over = True
                return run(prepared)
        except Interrupted:
            raise KeyboardInterrupt from None


@contextmanager
def serving(
    settings: Settings,
    listen: ListenOptions,
    security: SecurityOptions = NO_SECURITY,
    *,
    interrupted: Callable[[], bool],
    overrides: Overrides = NOTHING,
    own: NodeData | None = None,
    energy_meter: str | None = None,
    test: Dataset | None = None,
    resumed: Checkpoint | None = None,
    opened: Callable[[AggregatorServer], None] = lambda server: None,
    changed: Callable[[int, int], None] = lambda connected, ready: None,
) -> Iterator[PreparedRun]:
    """Listen, wait for nodes, and yield a run with them.

    Args:
      settings: `nodes` is the number of nodes to wait for.
      interrupted: returns whether to stop waiting.
      own: samples of the aggregator itself.
      energy_meter: energy meter of this machine, if it holds samples; see
        `resources.energy`.
      test: samples to test on.
      resumed: checkpoint to resume from.
      opened: called when nodes can connect.
      changed: called with the numbers of connected and of ready nodes when one changes.
    """
    if resumed is not None:
        require_engine(resumed, "network")
    run = secrets.token_hex(8) if resumed is None else str(resumed.engine["run"])
    sums = masked_sums(settings, run, security.client_ca)
    credentials = aggregator_credentials(security.cert, security.key, security.client_ca)
    require_privacy(
        listen.address, encrypted=credentials is not None, insecure=security.insecure
    )
    tokens = TokenFile(security.token_file)
    with ExitStack() as stack:
        metrics = Metrics(settings.limits().limits)
        if listen.metrics_port is not None:
            stack.enter_context(serving_metrics(metrics, listen.metrics_port))

        def count(connected: int, ready: int) -> None:
            metrics.connected.set(connected)
            changed(connected, ready)

        def observe(record: RoundRecord) -> None:
            metrics.observe(record)
            metrics.count(**vars(server.counters))

        callbacks = () if listen.metrics_port is None else (observe,)
        model = own_model(settings, overrides)
        compress = compression_of(settings)
        compressor = BroadcastCompressor("none" if compress == "auto" else compress)
        server = AggregatorServer(
            listen.address,
            run=run,
            tokens=tokens,
            allowed=frozenset(map(check_name, listen.allow)) or None,
            limits=PeerLimits(listen.max_nodes_each, listen.max_classes),
            credentials=credentials,
            compressor=compressor,
            most=listen.max_nodes,
            model=settings.model if model is None else describe(model),
            terms=data_terms(settings),
            max_share=settings.max_share,
            reports=sums,
            changed=count,
        )
        if own is not None:
            if is_private(settings):
                own.require_public()
            readers = {"energy": energy_reader(energy_meter)}
            server.add_own_node(
                Worker(own, device=settings.device, model=model, readers=readers)
            )
        reserve_descriptors()
        server.open()
        farewell = Farewell("the aggregator has stopped, and may resume later", again=True)
        try:
            opened(server)
            prepared = _gather(
                settings,
                overrides,
                model,
                server,
                compressor,
                interrupted,
                test,
                resumed,
                sums,
            )

            ledger = open_ledger(prepared.settings, prepared.dataset)
            if sums is not None:
                sums.pay = with_ledger(ledger, no_payment, ledger_name(None))

            def folder_made(folder: Path) -> None:
                server.open_audit(folder)
                if sums is not None:
                    pay = PaymentLog(folder).record
                    sums.pay = with_ledger(ledger, pay, ledger_name(folder))

            yield replace(prepared, callbacks=callbacks, folder_made=folder_made)
        except UserError as error:
            server.refuse_all(str(error))
            raise
        except Interrupted:
            farewell = Farewell("the aggregator was interrupted")
            raise
        finally:
            server.close(farewell)


def _gather(
    settings: Settings,
    overrides: Overrides,
    own: Model | None,
    server: AggregatorServer,
    compressor: BroadcastCompressor,
    interrupted: Callable[[], bool],
    test: Dataset | None,
    resumed: Checkpoint | None,
    sums: "MaskedSums | None",
) -> PreparedRun:
    """Wait for nodes, agree on a task or restore it, and return the run."""
    nodes = max(settings.min_nodes or 1, settings.nodes or 1)
    if is_private(settings):
        settings = with_privacy(replace(settings, nodes=nodes))
    method = build_method(settings, overrides)
    if settings.secure_aggregation:
        nodes = max(nodes, FEWEST)
        method = with_sums_only(method, settings.secure_threshold)
    remarks: tuple[str, ...] = ()
    if resumed is None:
        described = _wait_for_nodes(server, nodes, interrupted)
        settings, method, task, model = agree_on_task(
            settings, method, list(described.values()), own, names=list(described)
        )
        remarks = remarks_on(described)
        server.start(task)
    else:
        with recalling("the task"):
            task = wire.task_from_text(resumed.engine["task"])
        with recalling("the nodes"):
            members = {
                str(name): _member(member)
                for name, member in resumed.engine["members"].items()
            }
        model = model_for(settings, task.samples, own)
        require_same_model(task, own)
        method = with_newton_of(method, task)
        attempt = resumed.engine.get("attempt", 0)
        if sums is not None and isinstance(attempt, int) and 0 <= attempt < 2**62:
            sums.resume(attempt)
        server.start(task, members)
    table = None if test is None else evaluation_table(test, task.samples, model)
    failed = f"{model.name} cannot be tested" + ("" if test is None else f" on {test.name}")
    with nullcontext() if own is None else as_user_error(failed):
        warm_up(model, table)  # during the trial rounds of the nodes
    meters = build_meters(replace(settings, nodes=nodes), network=True)
    if resumed is not None:
        with recalling("the meters"):
            meters.restore(resumed.engine["meters"])
            for each in fields(server.counters):
                value = int(resumed.engine["counters"][each.name])
                setattr(server.counters, each.name, value)
    trusted = (
        settings.combine is not None
        or overrides.combine is not None
        or settings.secure_aggregation
    )
    if method.private is None and not trusted:
        # Nodes on other machines are not trusted. Clipping needs all reports in memory,
        # which is only acceptable for small models.
        if task.parameters < LARGE:
            settings = replace(settings, combine="clipped")
            method = replace(method, combine=build_method(settings).combine)
        else:
            LOG.warning(_UNCLIPPED, f"{task.parameters:,}")
    settings = with_resolved_files(replace(settings, nodes=nodes, dataset=NODES))
    # A run that is done lacks only its summary, for which no node is needed.
    over = (
        resumed is not None
        and resumed.state.phase == "done"
        and not resumed.conditions.extended_by(meters.budget.limits, settings.rounds)
    )
    if over:
        # Nodes that did not receive the end are still trying to connect.
        patience = time.monotonic() + _LAST_CALL
        server.wait_for(nodes, lambda: interrupted() or time.monotonic() > patience)
    if interrupted() or not server.wait_for(0 if over else nodes, interrupted, ready=True):
        raise Interrupted
    return prepare_remote(
        settings,
        method,
        meters,
        server,
        task=task,
        model=model,
        trials=server.trials(),
        test=table,
        resumed=resumed,
        compressor=compressor,
        remarks=remarks,
    )


def _wait_for_nodes(
    server: AggregatorServer, nodes: int, interrupted: Callable[[], bool]
) -> dict[str, SamplesDescription]:
    """Wait for nodes whose data match, and return their descriptions; refuse the others.

    Without a majority, the next node decides which data are right.
    """
    undecided: set[str] = set()
    while True:
        if not server.wait_for(nodes, interrupted, other_than=undecided):
            raise Interrupted
        described = server.descriptions()
        try:
            odd = misfits(described)
        except UserError as error:
            LOG.warning(
                "%s; waiting for another node, to find the majority",
                error.spelled(flag),
            )
            undecided = set(described)
            continue
        if not odd:
            return described
        for name, reason in odd.items():
            server.refuse(name, f"{name}'s data do not fit: {reason}")


def _member(saved: Mapping[str, Any]) -> Member:
    numbers = np.array(saved["numbers"], np.int64)
    sizes = np.array(saved["sizes"], np.int64)
    return Member(numbers, sizes, int(saved["base_round"]), bool(saved["lost"]))


class _Waiting:
    """Prints the number of nodes until the run starts (`over`).

    After `_HINT_AFTER` seconds it prints why nodes may be missing: gRPC does not report a
    TLS handshake that failed, such as that of a node with another CA.
    """

    def __init__(self, nodes: int, *, quiet: bool, any_port: bool, tls: bool) -> None:
        self.over = False
        self._nodes = nodes
        self._quiet = quiet
        self._any_port = any_port
        self._tls = tls
        self._connected = 0
        self._ready = 0
        self._server: AggregatorServer | None = None
        self._lock = threading.Lock()

    def opened(self, server: AggregatorServer) -> None:
        self._server = server
        if not self._quiet or self._any_port:
            nodes = "1 node" if self._nodes == 1 else f"{self._nodes} nodes"
            _print(f"listening on port {server.port}; waiting for {nodes}")
        if not self._quiet:
            hint = threading.Timer(_HINT_AFTER, self._explain)
            hint.daemon = True
            hint.start()

    def _explain(self) -> None:
        with self._lock:
            if self.over or self._connected >= self._nodes:
                return
            reason = "logs of the others show why they cannot connect"
            if self._tls:
                reason += (
                    "; a node with another CA or without a certificate is not seen here"
                )
            _print(f"{self._connected} of {self._nodes} nodes have joined; {reason}")

    def changed(self, connected: int, ready: int) -> None:
        with self._lock:
            before = self._connected
            ready_before = self._ready
            self._connected = connected
            self._ready = ready
            if self.over or self._quiet or self._server is None:
                return
        if connected not in (0, before):
            trial = "; each runs a trial round" if before < self._nodes <= connected else ""
            _print(f"{connected} of {self._nodes} nodes have joined{trial}")
        if ready not in (0, ready_before):
            _print(f"{ready} of {self._nodes} nodes are ready")

    def wake(self) -> None:
        if self._server is not None:
            self._server.wake()


@contextmanager
def _network_log(options: LogOptions, *, quiet: bool) -> Iterator[None]:
    """Write the network log to standard error, and report compilation unless quiet."""
    handler = log_handler(options)
    LOG.addHandler(handler)
    LOG.setLevel(min(logging.INFO, handler.level))
    try:
        with nullcontext() if quiet else on_compiling(lambda: _print(COMPILING)):
            yield
    finally:
        LOG.removeHandler(handler)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
