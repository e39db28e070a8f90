"""From settings to a run with nodes on other machines.

The counterpart of plan.py: there the data are here, and a plan is ready at once; here nodes have to come first. When
enough of them have, all agree on what is trained, and the plan is carried out by training.py like any other.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget.agreement import NODES, agreed, kind_of, model_of, table_to_test_on
from fedbudget.data.dataset import Dataset
from fedbudget.engines.grpc.codec import task_in, task_out
from fedbudget.engines.grpc.credentials import aggregator_credentials, require_privacy
from fedbudget.engines.grpc.metrics import Metrics
from fedbudget.engines.grpc.metrics import serving as serving_metrics
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote import engine
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.compression import BroadcastCompressor
from fedbudget.engines.remote.members import Counters, Member
from fedbudget.engines.remote.messages import Farewell
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.task import Task, rounds_ahead
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.meters.meters import Meters
from fedbudget.plan import Plan, meters_of
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.resources import round_usage
from fedbudget.resources.energy import energy_reader
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.checkpoint_writer import Append, CheckpointWriter
from fedbudget.runs.nodes import NodeStatus, NodeStatusWriter
from fedbudget.runs.record import RoundRecord
from fedbudget.settings import FEDERATED, Settings


@dataclass(frozen=True)
class ServerOptions:
    """Where an aggregator is to be found, and by whom.

    Args:
      address: HOST:PORT.
      cert, key: for TLS.
      client_ca: who signs the certificates that nodes must have.
      token_file: with the token of all nodes, or one for each.
      insecure: plain text is meant, also beyond this machine.
      most: the most nodes to let in.
      metrics: HOST:PORT of the metrics' page, if there is one.
    """

    address: str
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    most: int = 1000
    metrics: str | None = None


class Interrupted(Exception):
    """While nodes were still being waited for."""


@contextmanager
def serving(
    settings: Settings,
    listening: ServerOptions,
    *,
    interrupted: Callable[[], bool],
    own: NodeData | None = None,
    energy_meter: str | None = None,
    test: Dataset | None = None,
    resumed: Checkpoint | None = None,
    opened: Callable[[AggregatorServer], None] = lambda server: None,
    changed: Callable[[int], None] = lambda connected: None,
) -> Iterator[Plan]:
    """Listens, waits for nodes, and gives the plan of a run with them.

    Args:
      settings: `nodes` is how many to wait for.
      interrupted: whether to stop waiting.
      own: samples that the aggregator holds itself.
      energy_meter: of this machine, where it holds some; see `resources.energy`.
      test: samples to test on.
      resumed: where to go on from.
      opened: told when nodes can connect.
      changed: told how many nodes there are, when that changes.
    """
    if settings.method not in FEDERATED:
        raise UserError(f"{settings.method} descent is not made over a network; use --method {' or '.join(FEDERATED)}")
    if energy_meter is not None and own is None:
        raise UserError("energy-meter is of a machine that holds data; give it to fedbudget join, or here with --data")
    credentials = aggregator_credentials(listening.cert, listening.key, listening.client_ca)
    require_privacy(listening.address, encrypted=credentials is not None, insecure=listening.insecure)
    tokens = Tokens.load(listening.token_file)
    with ExitStack() as stack:
        metrics = Metrics(settings.limits().limits)
        if listening.metrics is not None:
            stack.enter_context(serving_metrics(metrics, listening.metrics))
        shortener = BroadcastCompressor(kind_of(settings))
        server = AggregatorServer(
            listening.address,
            run=secrets.token_hex(8) if resumed is None else str(resumed.engine["run"]),
            tokens=tokens,
            credentials=credentials,
            shortener=shortener,
            most=listening.most,
            changed=lambda connected: _told(connected, metrics, changed),
        )
        if own is not None:
            server.hold(Worker(own, device=settings.device, readers={"energy": energy_reader(energy_meter)}))
        server.open()
        farewell = Farewell("the aggregator has stopped, and may go on later", again=True)
        try:
            opened(server)
            plan = _gather(settings, server, shortener, interrupted, test, resumed, metrics)
            yield plan
        except UserError as error:
            farewell = Farewell(str(error))
            raise
        except Interrupted:
            farewell = Farewell("the aggregator was interrupted")
            raise
        finally:
            server.close(farewell)


def _told(connected: int, metrics: Metrics, changed: Callable[[int], None]) -> None:
    metrics.connected.set(connected)
    changed(connected)


def _gather(
    settings: Settings,
    server: AggregatorServer,
    shortener: BroadcastCompressor,
    interrupted: Callable[[], bool],
    test: Dataset | None,
    resumed: Checkpoint | None,
    metrics: Metrics,
) -> Plan:
    """Waits for nodes, and makes the plan."""
    least = settings.min_nodes or 1
    nodes = max(least, settings.nodes or 1)
    if resumed is None:
        if not server.wait_for(nodes, interrupted):
            raise Interrupted
        settings, task, model = agreed(settings, list(server.descriptions().values()))
        server.start(task)
    else:
        task = _recalled_task(resumed)
        model = model_of(settings, task.samples)
        server.start(task, _recalled_members(resumed))
    meters = meters_of(settings, network=True)
    over = resumed is not None and resumed.memory.state == "done"  # only its summary is missing: nodes have gone home
    if not server.wait_for(0 if over else nodes, interrupted, ready=True):
        raise Interrupted
    settings = replace(settings, nodes=nodes, dataset=NODES)
    options: dict[str, Any] = {
        "budget": meters.budget,
        "controller": settings.controller(),
        "step_size": settings.pacing(),
        "rounds": settings.rounds,
        "correct_drift": settings.corrects_drift,
        "delta": settings.delta_from,
        "quantize": shortener.quantize,
    }
    trial = round_usage(server.trials())
    if resumed is None:
        vectors = 2 if settings.delta_from == "parameters" else 3
        wire_bytes = vectors * 4 * task.parameters * nodes
        aggregator = Aggregator(
            model.initial(settings.seed), expected=meters.expect(trial.as_round_of(nodes, wire_bytes)), **options
        )
        aggregator.start()  # before the first checkpoint, which is of a run that has
    else:
        _restore(meters, server.counters, resumed)
        aggregator = Aggregator.recall(resumed.memory, **options)
    checkpointer = _Keeper(aggregator, server, meters, task, metrics, resumed)
    run = partial(
        engine.run,
        aggregator,
        server,
        meters,
        least=least,
        timeout=settings.round_timeout,
        trial=trial,
        keep=checkpointer.keep_again,
    )
    described = task.samples.empty()
    return Plan(
        settings=settings,
        budget=meters.budget,
        dataset=replace(described, name=NODES),
        model=model,
        test=None if test is None else table_to_test_on(test, task.samples, model),
        meters=meters,
        aggregator=aggregator,
        engine=run,
        repeatable=False,
        checkpointer=checkpointer,
        wake=server.wake,
        resumed=resumed,
        attendance=server.attendance,
        traffic=lambda: vars(server.counters),
    )


# A run that goes on.


class _Keeper:
    """Saves where a run has come to."""

    def __init__(
        self,
        aggregator: Aggregator,
        server: AggregatorServer,
        meters: Meters,
        task: Task,
        metrics: Metrics,
        resumed: Checkpoint | None,
    ) -> None:
        self._aggregator = aggregator
        self._server_side = server
        self._meters = meters
        self._task = task_out(task).SerializeToString().hex()
        self._parameters = task.parameters
        self._metrics = metrics
        self._resumed = resumed
        self._saver: CheckpointWriter | None = None
        self._roll: NodeStatusWriter | None = None

    def open(self, folder: Path, append: Append) -> None:
        records = () if self._resumed is None else self._resumed.records
        self._saver = CheckpointWriter(folder, append, ahead=rounds_ahead(self._parameters), records=records)
        if self._resumed is None:
            self._save(None)
            self._saver.flush()  # there is something to go on from before the first node begins
        self._roll = NodeStatusWriter(folder, self._call_the_roll)

    def keep(self, record: RoundRecord) -> None:
        self._save(record)
        self._metrics.observe(record)
        self._metrics.count(**vars(self._server_side.counters))

    def keep_again(self) -> None:
        """With what was spent since the last round."""
        self._save(None)

    def close(self) -> None:
        if self._roll is not None:
            self._roll.close()
        if self._saver is not None:
            self._saver.flush()
            self._saver.close()

    def _call_the_roll(self) -> list[NodeStatus]:
        now, members = time.time(), self._server_side.standing()
        return [
            NodeStatus(
                name=node.name,
                numbers=tuple(members[node.name].numbers.tolist()),
                samples=node.samples,
                state=node.state,
                rounds=node.rounds,
                missed=node.missed,
                step_seconds=node.step_seconds,
                last_seen=None if node.state == "away" else now,
            )
            for node in self._server_side.glance()
            if node.name in members
        ]

    def _save(self, record: RoundRecord | None) -> None:
        if self._saver is None:
            return
        members = {
            name: {
                "numbers": member.numbers.tolist(),
                "sizes": member.sizes.tolist(),
                "stands": member.base_round,
                "lost": member.lost,
            }
            for name, member in self._server_side.standing().items()
        }
        known = {
            "run": self._server_side.run,
            "task": self._task,
            "members": members,
            "meters": self._meters.state(),
            "counters": vars(self._server_side.counters).copy(),
        }
        self._saver.save(self._aggregator.memory(), known, record)


def _restore(meters: Meters, counters: Counters, resumed: Checkpoint) -> None:
    try:
        meters.restore(resumed.engine["meters"])
        for name, value in resumed.engine["counters"].items():
            setattr(counters, name, int(value))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint does not say what the meters were at: {error}") from None


def _recalled_task(resumed: Checkpoint) -> Task:
    try:
        return task_in(pb.Task.FromString(bytes.fromhex(resumed.engine["task"])))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint does not say what is trained: {error}") from None


def _recalled_members(resumed: Checkpoint) -> dict[str, Member]:
    try:
        return {str(name): _member(found) for name, found in resumed.engine["members"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint does not say who takes part: {error}") from None


def _member(found: Mapping[str, Any]) -> Member:
    numbers, sizes = np.array(found["numbers"], np.int64), np.array(found["sizes"], np.int64)
    return Member(numbers, sizes, int(found["stands"]), bool(found["lost"]))


def same_settings(path: Path, saved: Settings, asked: Settings) -> None:
    """Refuses to go on with a run by other settings than its own."""
    for name, before in vars(saved).items():
        now = getattr(asked, name)
        if now != before:
            option = name.replace("_", "-")
            raise UserError(f"{path} goes on as it began: {option} is {before} there, and cannot be {now} now")
