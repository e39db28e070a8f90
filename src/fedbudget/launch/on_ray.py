"""A run whose simulated nodes are on a Ray cluster; all the rest is here."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from fedbudget import __version__
from fedbudget.arrays import Samples
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Shards
from fedbudget.engines.in_process import SimulationEngine, SimulationState
from fedbudget.engines.node_group import NodeGroup
from fedbudget.errors import UserError
from fedbudget.launch.inputs import TrainingInputs, batch_of, distribute, with_batch_size, with_nodes
from fedbudget.launch.meters import build_meters
from fedbudget.launch.method import build_aggregator, build_method, trial_broadcast
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun, attendance
from fedbudget.launch.privacy import require_own_samples, with_privacy
from fedbudget.launch.resume import require_engine, require_same_data
from fedbudget.launch.simulate import build_fleets, compressor_of, recall, remember_nodes
from fedbudget.models.base import Model, require_fit
from fedbudget.option import in_words
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.resource import Resource
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings import FEDERATED, Settings


@contextmanager
def on_ray(
    settings: Settings,
    overrides: Overrides = NOTHING,
    *,
    address: str | None = None,
    actors: int | None = None,
    resumed: Checkpoint | None = None,
) -> Iterator[PreparedRun]:
    """Places the nodes on a Ray cluster, and gives a run with them.

    Args:
      address: of the cluster; on this machine when not given.
      actors: how many processes share the nodes; one per core when not given, or as many as a run that goes on has had.
      resumed: where to go on from.
    """
    if settings.method not in FEDERATED:
        raise UserError(f"{settings.method} descent is not made on Ray; use `method` {in_words(FEDERATED)}")
    if actors is not None and actors < 1:
        raise UserError(f"actors must be at least 1, not {actors}")
    try:
        from fedbudget.engines.ray import RayNodes, cluster
    except ImportError:
        raise UserError("Ray is not installed; install it with: pip install 'fedbudget[ray]'") from None
    inputs = TrainingInputs.of(settings, overrides)
    settings = with_nodes(inputs.settings, inputs.dataset)
    sizes = _sizes(settings, inputs.dataset)
    if settings.privacy_unit == "sample":
        require_own_samples(settings, inputs.model, distribute(settings, inputs.dataset)[1])
    settings = with_privacy(with_batch_size(settings, sizes), samples=sum(sizes))
    require_fit(inputs.model, inputs.dataset.name, inputs.train, batch_of(settings), inputs.test)
    assert settings.nodes is not None
    sizes = sizes if len(sizes) == settings.nodes else sizes * settings.nodes
    if resumed is not None:
        require_engine(resumed, "ray")
        require_same_data(inputs, resumed)
        actors = _actors(resumed, actors)
    method, meters, present = build_method(settings, overrides, sizes), build_meters(settings), attendance(settings)
    summed = method.private is None and not method.combine.needs_reports
    definition = GroupDefinition(settings, inputs.dataset, inputs.model, meters.resources, summed)
    with cluster(address) as cpus, ExitStack() as stack:
        actors = min(settings.nodes, actors or max(1, int(cpus)))
        nodes = RayNodes(definition, nodes=settings.nodes, actors=actors, cpus=cpus, present=present)
        stack.enter_context(closing(nodes))
        w = inputs.model.initial(settings.seed)
        began = time.perf_counter()
        trial = nodes.trial(trial_broadcast(method, w))
        trial_seconds = time.perf_counter() - began
        compressor = compressor_of(settings)
        aggregator = build_aggregator(
            method,
            meters,
            resumed or (w, trial),
            rounds=settings.rounds,
            quantize=compressor.quantize,
            statistics=inputs.model.statistics,
        )
        remembers = remember_nodes(settings, inputs.model)
        engine = SimulationEngine(aggregator, nodes, meters, present, remembers, compressor.kind)
        if resumed is not None:
            recall(engine, resumed)
        inputs = replace(inputs, settings=settings)
        yield PreparedRun(
            **vars(inputs),
            meters=meters,
            aggregator=aggregator,
            engine=engine,
            repeatable=not overrides,
            resumed=resumed,
            trial_seconds=trial_seconds,
        )


def _actors(resumed: Checkpoint, wanted: int | None) -> int | None:
    """As many as before: each of them has a part of what nodes remember."""
    groups = resumed.engine_state(SimulationState).groups
    if groups is None or wanted in (None, len(groups)):
        return wanted if groups is None else len(groups)
    raise UserError(f"the run that is to go on has {len(groups)} actors, and cannot have {wanted} now")


def _sizes(settings: Settings, dataset: Dataset) -> list[int]:
    """How many samples nodes have; one number where all have as many."""
    drawn = Partition.parse(str(settings.partition)).draws
    return [drawn] if drawn else [len(rows) for rows in distribute(settings, dataset)[1]]


@dataclass(frozen=True)
class GroupDefinition:
    """All that groups of nodes are made from; the samples are in memory that the processes of a machine share."""

    settings: Settings
    dataset: Dataset
    model: Model
    resources: tuple[Resource, ...]
    summed: bool = True
    version: str = __version__

    def group(self, first: int, end: int) -> NodeGroup:
        if self.version != __version__:
            raise UserError(f"fedbudget {__version__} is on a machine of the cluster, and {self.version} here")
        settings, rows = distribute(self.settings, self.dataset)
        train = self.dataset.table(self.dataset.train, self.model.target)
        shards = Shards.of(replace(train, x=_as_writable(train.x)), rows[first:end])
        fleets = build_fleets(settings, self.model, shards, first)
        return NodeGroup(fleets, ResourceCounters.of(self.resources), summed=self.summed)


def _as_writable(array: Samples) -> Samples:
    """The same memory as an array that says it can be written to; nobody does.

    Memory that is shared is marked as only to be read, and for such arrays all kernels would be compiled anew.
    """
    return array if array.flags.writeable else np.asarray(_Writable(array))


class _Writable:
    def __init__(self, array: Samples) -> None:
        self._array = array  # whose memory it is
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
