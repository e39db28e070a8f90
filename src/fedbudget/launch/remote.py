"""What runs with nodes on other machines have in common, whatever carries their messages."""

from dataclasses import replace
from typing import Any

from fedbudget.data.shards import Table
from fedbudget.engines.remote.costs import NodeCosts
from fedbudget.engines.remote.engine import RemoteEngine, RemoteNodes
from fedbudget.engines.remote.task import Task
from fedbudget.launch.aggregator import build_aggregator
from fedbudget.launch.prepared import PreparedRun
from fedbudget.meters.meter import Meters, RoundTrip
from fedbudget.models.base import Model
from fedbudget.protocol.method import Method
from fedbudget.protocol.steps import Quantize
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
    trial: NodeCosts,
    test: Table | None = None,
    resumed: Checkpoint | None = None,
    quantize: Quantize | None = None,
) -> PreparedRun:
    """A run with nodes that know their task, and have said what a trial round takes.

    Args:
      settings: `nodes` is how many there are.
      trial: of the slowest node.
      resumed: where to go on from.
      quantize: what nodes will hold of a new w; the w itself when left out.
    """
    assert settings.nodes is not None
    start: Any = None if resumed is None else resumed.state
    if resumed is None:
        vectors = 2 if method.delta == "parameters" else 3
        trip = RoundTrip(
            updates=1,
            nodes=settings.nodes,
            wire_bytes=vectors * 4 * task.parameters * settings.nodes,
            step_seconds=trial.step_seconds,
            seconds=trial.seconds,
            step_cpu=trial.step_cpu or 0.0,
            cpu=trial.cpu or 0.0,
        )
        start = model.initial(settings.seed), trip
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
