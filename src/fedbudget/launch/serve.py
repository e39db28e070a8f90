"""A run with nodes on other machines, over gRPC: nodes have to come first; when enough have, all agree on a task.

What a person sees of an aggregator until there are enough nodes.
"""

import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.data.columns import category_name
from fedbudget.data.dataset import Dataset
from fedbudget.durable_files import keep_descriptors
from fedbudget.engines.grpc.credentials import aggregator_credentials, require_privacy
from fedbudget.engines.grpc.peers import LOG
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.service import PeerLimits
from fedbudget.engines.grpc.tokens import TokenFile, check_name
from fedbudget.engines.noise import PaidNoise
from fedbudget.engines.remote import encodings
from fedbudget.engines.remote.engine import LARGE
from fedbudget.engines.remote.members import Member
from fedbudget.engines.remote.messages import Farewell
from fedbudget.engines.remote.node_data import NodeData, table_to_test_on
from fedbudget.engines.remote.task import SamplesDescription, Task
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError, explained, flag
from fedbudget.launch.inputs import own_model, with_resolved_model
from fedbudget.launch.method import build_meters, build_method, require_known_workload
from fedbudget.launch.monitoring import Metrics, log_handler
from fedbudget.launch.monitoring import serving as serving_metrics
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun
from fedbudget.launch.privacy import is_private, masking_terms, with_privacy, with_sums_only
from fedbudget.launch.resume import recalling, require_engine, require_same_model
from fedbudget.launch.task import (
    NODES,
    agree_on_task,
    compression_of,
    misfits,
    model_for,
    prepare_remote,
    remarks_on,
    warm_up,
)
from fedbudget.models.base import Model
from fedbudget.models.compiling import COMPILING, on_compiling
from fedbudget.models.description import describe
from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.resources.energy import energy_reader
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.record import RoundRecord
from fedbudget.secure.graph import FEWEST
from fedbudget.settings.network import ListenOptions, LogOptions, SecurityOptions
from fedbudget.settings.option import in_words
from fedbudget.settings.settings import FEDERATED, Settings

NO_SECURITY = SecurityOptions()

_TRUSTING = (
    "the model has %s parameters, and the nodes' updates are averaged as they are; the rule `clipped` would bound what "
    "one of them can do, and hold all reports of a round in memory"
)


class Interrupted(Exception):
    """While nodes were still being waited for."""


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
    """Listens, waits for nodes, and gives a run with them.

    Args:
      settings: `nodes` is how many to wait for.
      interrupted: whether to stop waiting.
      own: samples that the aggregator holds itself.
      energy_meter: of this machine, where it holds some; see `resources.energy`.
      test: samples to test on.
      resumed: where to go on from.
      opened: called when nodes can connect.
      changed: called with how many nodes there are, and how many of them are ready, when that changes.
    """
    if resumed is not None:
        require_engine(resumed, "network")
    if settings.method not in FEDERATED:
        raise UserError(
            f"{settings.method} descent is not made over a network; use --method {in_words(FEDERATED)}"
        )
    if energy_meter is not None and own is None:
        raise UserError(
            "energy-meter is of a machine that holds data; give it to fedbudget join, or here with --data"
        )
    masking = masking_terms(settings, security.client_ca, own_data=own is not None)
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
            run=secrets.token_hex(8) if resumed is None else str(resumed.engine["run"]),
            tokens=tokens,
            allowed=None if not listen.allow else frozenset(map(check_name, listen.allow)),
            limits=PeerLimits(listen.max_nodes_each, listen.max_classes),
            credentials=credentials,
            compressor=compressor,
            most=listen.max_nodes,
            model=settings.model if model is None else describe(model),
            classes=None
            if settings.classes is None
            else tuple(map(category_name, settings.classes)),
            max_share=settings.max_share,
            masking=masking,
            changed=count,
        )
        if own is not None:
            readers = {"energy": energy_reader(energy_meter)}
            server.add_own_node(
                Worker(own, device=settings.device, model=model, readers=readers)
            )
        keep_descriptors()
        server.open()
        farewell = Farewell("the aggregator has stopped, and may go on later", again=True)
        try:
            opened(server)
            prepared = _gather(
                settings, overrides, model, server, compressor, interrupted, test, resumed
            )
            yield replace(prepared, callbacks=callbacks, folder_made=server.open_audit)
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
) -> PreparedRun:
    """Waits for nodes, and gives the run."""
    require_known_workload(settings)
    nodes = max(settings.min_nodes or 1, settings.nodes or 1)
    settings = (
        with_privacy(replace(settings, nodes=nodes), simulated=False)
        if is_private(settings)
        else settings
    )
    method = build_method(settings, overrides)
    if settings.secure_aggregation:
        nodes = max(nodes, FEWEST)
        method = with_sums_only(method, settings.secure_threshold)
        if method.private is not None and isinstance(method.private.noise, PaidNoise):
            server.pay_before_opening(method.private.noise.pay)
    remarks: tuple[str, ...] = ()
    if resumed is None:
        described = _wait_for_nodes(server, nodes, interrupted)
        settings, task, model = agree_on_task(
            settings, method, list(described.values()), own, names=list(described)
        )
        remarks = remarks_on(described)
        server.start(task)
    else:
        with recalling("what is trained"):
            task = encodings.read(
                Task, encodings.from_bytes(bytes.fromhex(resumed.engine["task"]))
            )
        with recalling("who takes part"):
            members = {
                str(name): _member(member)
                for name, member in resumed.engine["members"].items()
            }
        model = model_for(settings, task.samples, own)
        require_same_model(task, own)
        server.start(task, members)
    table = None if test is None else table_to_test_on(test, task.samples, model)
    failed = f"{model.name} cannot be tested" + ("" if test is None else f" on {test.name}")
    with nullcontext() if own is None else explained(failed):
        warm_up(model, table)  # while nodes make their trial rounds
    meters = build_meters(replace(settings, nodes=nodes), network=True)
    if resumed is not None:
        with recalling("what the meters were at"):
            meters.restore(resumed.engine["meters"])
            for name, value in resumed.engine["counters"].items():
                setattr(server.counters, name, int(value))
    trusted = (
        settings.combine is not None
        or overrides.combine is not None
        or settings.secure_aggregation
    )
    if method.private is None and not trusted:
        # Where reports are all at hand anyway, none may take w further than others do: nodes elsewhere are not trusted.
        if task.parameters < LARGE:
            settings = replace(settings, combine="clipped")
            method = replace(method, combine=build_method(settings).combine)
        else:
            LOG.warning(_TRUSTING, f"{task.parameters:,}")
    settings = with_resolved_model(replace(settings, nodes=nodes, dataset=NODES))
    over = (
        resumed is not None and resumed.state.phase == "done"
    )  # only its summary is missing: nodes have gone home
    if resumed is not None and resumed.conditions.extended_by(
        meters.budget.limits, settings.rounds
    ):
        over = False
    if not server.wait_for(0 if over else nodes, interrupted, ready=True):
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
    """What the samples of so many nodes are like, which go together; whose do not are refused by name.

    Where as many are on either side, nobody knows who is right: who comes next decides.
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
                "%s; waiting for another node, to see with whom most agree",
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


class Waiting:
    """Tells how many nodes there are, until there are enough: until it is `over`."""

    def __init__(self, nodes: int, *, quiet: bool, any_port: bool) -> None:
        self.over = False
        self._nodes = nodes
        self._quiet = quiet
        self._any_port = any_port
        self._last = (0, 0)  # how many were connected, and ready
        self._server: AggregatorServer | None = None
        self._lock = threading.Lock()

    def opened(self, server: AggregatorServer) -> None:
        self._server = server
        if not self._quiet or self._any_port:
            print(
                f"listening on port {server.port}; waiting for {self._nodes} nodes",
                file=sys.stderr,
                flush=True,
            )

    def changed(self, connected: int, ready: int) -> None:
        with self._lock:
            (before, were_ready), self._last = self._last, (connected, ready)
            if self.over or self._quiet or self._server is None:
                return
        if connected not in (0, before):
            preparing = (
                "; each prepares itself by a trial round"
                if before < self._nodes <= connected
                else ""
            )
            print(
                f"{connected} of {self._nodes} nodes are here{preparing}",
                file=sys.stderr,
                flush=True,
            )
        if ready not in (0, were_ready):
            print(f"{ready} of {self._nodes} nodes are ready", file=sys.stderr, flush=True)

    def wake(self) -> None:
        if self._server is not None:
            self._server.wake()


@contextmanager
def waiting(
    nodes: int, *, quiet: bool, any_port: bool, logs: LogOptions | None = None
) -> Iterator[Waiting]:
    """Shows what happens until there are enough nodes; after that only what is out of the ordinary is logged.

    Args:
      quiet: nothing is shown, but a port that nobody could know otherwise.
      logs: how the network's log is written.
    """
    handler = log_handler(logs or LogOptions())
    log = logging.getLogger("fedbudget.api")
    log.addHandler(handler)
    log.setLevel(min(logging.INFO, handler.level))
    compiling = (
        nullcontext()
        if quiet
        else on_compiling(lambda: print(COMPILING, file=sys.stderr, flush=True))
    )
    try:
        with compiling:
            yield Waiting(nodes, quiet=quiet, any_port=any_port)
    finally:
        log.removeHandler(handler)
