"""What runs with nodes on other machines have in common, whatever carries their messages."""

from dataclasses import replace
from typing import Any

from fedbudget.data.shards import Table
from fedbudget.engines.remote.engine import RemoteEngine, RemoteNodes
from fedbudget.engines.remote.task import Task
from fedbudget.launch.method import build_aggregator
from fedbudget.launch.prepared import PreparedRun
from fedbudget.meters.meters import Meters
from fedbudget.models.base import Model
from fedbudget.protocol.method import Method
from fedbudget.protocol.steps import Quantize
from fedbudget.resources.usage import RoundUsage
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings import Settings


def prepare_remote(
    settings: Settings,
    method: Method,
    meters: Meters,
    nodes: RemoteNodes,
    *,
    task: Task,
    model: Model,
    trial: RoundUsage,
    test: Table | None = None,
    resumed: Checkpoint | None = None,
    quantize: Quantize | None = None,
) -> PreparedRun:
    """A run with nodes that know their task, and have said what a trial round takes.

    Args:
      settings: `nodes` is how many there are.
      trial: what nodes have said of it.
      resumed: where to go on from.
      quantize: what nodes will hold of a new w; the w itself when left out.
    """
    assert settings.nodes is not None
    start: Any = None if resumed is None else resumed.state
    if resumed is None:
        vectors = 2 if method.delta == "parameters" else 3
        wire_bytes = vectors * 4 * task.parameters * settings.nodes
        start = model.initial(settings.seed), trial.as_round_of(settings.nodes, wire_bytes)
    aggregator = build_aggregator(method, meters, start, rounds=settings.rounds, quantize=quantize)
    if resumed is None:
        aggregator.start()  # before the first checkpoint, which is of a run that has
    engine = RemoteEngine(
        aggregator, nodes, meters, least=settings.min_nodes or 1, timeout=settings.round_timeout, trial=trial
    )
    return PreparedRun(
        settings=settings,
        dataset=replace(task.samples.empty(), name=settings.dataset),
        model=model,
        test=test,
        meters=meters,
        aggregator=aggregator,
        engine=engine,
        repeatable=False,
        resumed=resumed,
    )
