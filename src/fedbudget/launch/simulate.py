"""A run whose nodes are simulated in this process; of the baselines too.

A run whose simulated nodes are on a Ray cluster; all the rest is here.

A run by any engine that this machine can start by itself.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from fedbudget import __version__, python_file
from fedbudget.arrays import Float32, Samples
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Shards, Table
from fedbudget.engines import baselines, in_process
from fedbudget.engines.baselines import (
    AsynchronousEngine,
    AsynchronousState,
    CentralizedEngine,
    CentralizedState,
)
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import (
    Attack,
    InProcessEngine,
    NodeGroup,
    SimulationEngine,
    SimulationState,
    with_flipped_labels,
)
from fedbudget.errors import UserError, explained
from fedbudget.launch.inputs import (
    TrainingInputs,
    batch_of,
    distribute,
    with_batch_size,
    with_nodes,
)
from fedbudget.launch.method import (
    build_aggregator,
    build_meters,
    build_method,
    drawn_speeds,
    trial_broadcast,
)
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun, attendance
from fedbudget.launch.privacy import node_noise, require_own_samples, with_privacy
from fedbudget.launch.resume import recalling, require_engine, require_same_data
from fedbudget.models.base import Model, require_fit
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.method import Method
from fedbudget.resources import round_usage
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Resource, RoundUsage
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings.option import in_words
from fedbudget.settings.settings import FEDERATED, Settings
from fedbudget.settings.types import EngineName

MOST_MEMORY = 100e6
"""Bytes that nodes remember, above which checkpoints do not hold them: then nodes begin anew when a run goes on, as if
they had joined just then. They know w and w^f, and learn the rest in a round."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun(PreparedRun):
    """A run of which everything is in this process."""

    train: Table
    shards: Shards


def simulate(
    settings: Settings, overrides: Overrides = NOTHING, *, resumed: Checkpoint | None = None
) -> SimulatedRun:
    """Loads the data, gives it to nodes, and finds out what a round costs; refuses what cannot work.

    Args:
      resumed: where to go on from.
    """
    inputs = TrainingInputs.of(settings, overrides)
    settings, rows = distribute(inputs.settings, inputs.dataset)
    shards = Shards.of(inputs.train, rows)
    attack = attack_of(settings, len(rows))
    if attack is not None and attack.name == "label-flip":
        shards = with_flipped_labels(shards, attack.first)
    require_own_samples(settings, inputs.model, rows)
    settings = with_privacy(
        with_batch_size(settings, shards.size.tolist()), samples=int(shards.size.sum())
    )
    require_fit(
        inputs.model, inputs.dataset.name, inputs.train, batch_of(settings), inputs.test
    )
    meters = build_meters(settings)
    if resumed is not None:
        require_engine(resumed, "in-process")
        require_same_data(inputs, resumed)
    began = time.perf_counter()
    failed = f"{inputs.model.name} cannot train on {inputs.dataset.name}"
    with (
        explained(failed)
        if python_file.is_reference(str(settings.model))
        else nullcontext()
    ):
        aggregator, engine = _engine(
            settings, overrides, inputs, shards, meters, resumed, attack
        )
    trial_seconds = time.perf_counter() - began
    inputs = replace(inputs, settings=settings)
    return SimulatedRun(
        **vars(inputs),
        meters=meters,
        aggregator=aggregator,
        engine=engine,
        repeatable=not overrides,
        shards=shards,
        resumed=resumed,
        trial_seconds=trial_seconds,
    )


def _engine(
    settings: Settings,
    overrides: Overrides,
    inputs: TrainingInputs,
    shards: Shards,
    meters: Meters,
    resumed: Checkpoint | None,
    attack: Attack | None,
) -> tuple[Aggregator | None, Engine]:
    model = inputs.model
    method = build_method(settings, overrides, shards.size.tolist())
    w = model.initial(settings.seed)
    if settings.method in ("centralized", "asynchronous"):
        eta = method.step_size.first().eta
        batch = batch_of(settings)
        common: dict[str, Any] = {
            "w": w,
            "eta": eta,
            "batch": batch,
            "seed": settings.seed,
            "meters": meters,
        }
        return None, _baseline(settings, inputs, shards, common, resumed)
    fleet: Any = {
        "batch": batch_of(settings),
        "seed": settings.seed,
        "noise": node_noise(settings),
    }
    twin = Fleet(model, shards, **fleet)
    compressor = compressor_of(settings)
    first = replace(
        trial_broadcast(method, w),
        compress=None if compressor.kind == "none" else compressor.kind,
    )
    trial = round_usage([in_process.trial([twin], first, meters.counters())])
    aggregator = build_aggregator(
        method,
        meters,
        resumed or (w, trial),
        rounds=settings.rounds,
        quantize=compressor.quantize,
        statistics=model.statistics,
    )
    if meters.time.source == "measured":
        _rehearse(settings, method, (w, trial), Fleet(model, shards, **fleet))
    fleets = build_fleets(settings, model, shards)
    remembers = remember_nodes(settings, model)
    engine = InProcessEngine(
        aggregator,
        fleets,
        meters,
        attendance(settings),
        remembers=remembers,
        attack=attack,
        compress=compressor.kind,
    )
    if resumed is not None:
        recall(engine, resumed)
    return aggregator, engine


def _rehearse(
    settings: Settings, method: Method, start: tuple[Float32, RoundUsage], fleet: Fleet
) -> None:
    """A short run from end to end, thrown away, so that nothing is compiled or loaded on a short budget's time."""
    budget = settings.limits()
    limits = {
        name: limit if name == budget.by_noise else 1e18
        for name, limit in budget.limits.items()
    }
    plenty = replace(
        settings, budget=tuple(f"{name}={limit!r}" for name, limit in limits.items())
    )
    meters = build_meters(plenty)
    aggregator = build_aggregator(
        method, meters, start, rounds=3, statistics=fleet.model.statistics
    )
    InProcessEngine(aggregator, [fleet], meters).run(observe=lambda *_: None)


def _baseline(
    settings: Settings,
    inputs: TrainingInputs,
    shards: Shards,
    common: dict[str, Any],
    resumed: Checkpoint | None,
) -> Engine:
    meters: Meters = common["meters"]
    if settings.method == "centralized":
        options = {name: common[name] for name in ("batch", "seed")}
        trial = baselines.trial(
            inputs.model, inputs.train, common["w"], counters=meters.counters(), **options
        )
        common["ledger"] = baselines.open_centralized_ledger(meters, trial)
        descent = CentralizedEngine(
            inputs.model, inputs.train, rounds=settings.rounds, **common
        )
        if resumed is not None:
            with recalling("where it was"):
                descent.recall(resumed.state, resumed.engine_state(CentralizedState))
        return descent
    if inputs.model.statistics:
        raise UserError(
            f"asynchronous descent sends gradients alone, and {inputs.model.name} has running statistics: "
            'use group normalization, or TorchModel(..., statistics="local")'
        )
    speeds: Sequence[float] = baselines.default_speeds(len(shards))
    if settings.speeds is not None:
        speeds = drawn_speeds(settings, len(shards)).values.tolist()
    common["ledger"] = baselines.open_asynchronous_ledger(meters, shards, speeds)
    engine = AsynchronousEngine(
        inputs.model, shards, speeds=speeds, rounds=settings.rounds, **common
    )
    if resumed is not None:
        with recalling("where it was"):
            engine.recall(resumed.state, resumed.engine_state(AsynchronousState))
    return engine


def recall(engine: SimulationEngine, resumed: Checkpoint) -> None:
    """The engine goes on from a checkpoint."""
    with recalling("where its nodes were"):
        engine.recall(resumed.engine_state(SimulationState))


def remember_nodes(settings: Settings, model: Model) -> bool:
    """Whether checkpoints hold what nodes remember: three vectors each, and a generator's state where each is alone."""
    assert settings.nodes is not None
    alone = 0 if settings.participation == 1 else 2000
    return settings.nodes * (3 * 4 * model.parameters + alone) <= MOST_MEMORY


def build_fleets(
    settings: Settings, model: Model, shards: Shards, first: int = 0
) -> list[Fleet]:
    """Nodes as one fleet or, where they may be absent, each as its own; their numbers in the run begin with `first`."""
    nodes = range(len(shards))
    parts = (
        [(shards, nodes)]
        if settings.participation == 1
        else [(shards.only([n]), range(n, n + 1)) for n in nodes]
    )
    common: Any = {
        "batch": batch_of(settings),
        "seed": settings.seed,
        "noise": node_noise(settings),
    }
    return [
        Fleet(model, part, **common, numbers=[first + n for n in own])
        for part, own in parts
    ]


def compressor_of(settings: Settings) -> BroadcastCompressor:
    """How vectors would be sent; auto is 8 bits where bytes are budgeted, because no line is measured."""
    compress = settings.compress or "none"
    if compress == "auto":
        compress = "8-bit" if "bytes" in settings.limits().limits else "none"
    return BroadcastCompressor(compress)


def attack_of(settings: Settings, nodes: int) -> Attack | None:
    """What some of so many nodes do to the run, if anything."""
    if settings.attack is None:
        return None
    attackers = settings.attackers or 1
    if attackers >= nodes:
        raise UserError(
            f"`attackers` is {attackers} of {nodes} nodes: none would be honest"
        )
    return Attack(settings.attack, nodes - attackers, settings.seed)


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
        raise UserError(
            f"{settings.method} descent is not made on Ray; use `method` {in_words(FEDERATED)}"
        )
    if actors is not None and actors < 1:
        raise UserError(f"actors must be at least 1, not {actors}")
    try:
        from fedbudget.engines.ray import RayNodes, cluster
    except ImportError:
        raise UserError(
            "Ray is not installed; install it with: pip install 'fedbudget[ray]'"
        ) from None
    inputs = TrainingInputs.of(settings, overrides)
    settings = with_nodes(inputs.settings, inputs.dataset)
    sizes = _sizes(settings, inputs.dataset)
    if settings.privacy_unit == "sample":
        require_own_samples(settings, inputs.model, distribute(settings, inputs.dataset)[1])
    settings = with_privacy(with_batch_size(settings, sizes), samples=sum(sizes))
    require_fit(
        inputs.model, inputs.dataset.name, inputs.train, batch_of(settings), inputs.test
    )
    assert settings.nodes is not None
    sizes = sizes if len(sizes) == settings.nodes else sizes * settings.nodes
    if resumed is not None:
        require_engine(resumed, "ray")
        require_same_data(inputs, resumed)
        actors = _actors(resumed, actors)
    method = build_method(settings, overrides, sizes)
    meters = build_meters(settings)
    present = attendance(settings)
    summed = method.private is None and not method.combine.needs_reports
    definition = GroupDefinition(
        settings, inputs.dataset, inputs.model, meters.resources, summed
    )
    with cluster(address) as cpus, ExitStack() as stack:
        actors = min(settings.nodes, actors or max(1, int(cpus)))
        nodes = RayNodes(
            definition, nodes=settings.nodes, actors=actors, cpus=cpus, present=present
        )
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
        engine = SimulationEngine(
            aggregator, nodes, meters, present, remembers, compressor.kind
        )
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
    raise UserError(
        f"the run that is to go on has {len(groups)} actors, and cannot have {wanted} now"
    )


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
            raise UserError(
                f"fedbudget {__version__} is on a machine of the cluster, and {self.version} here"
            )
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
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.ctypes.data, False),
        }


@contextmanager
def launch(
    settings: Settings,
    overrides: Overrides = NOTHING,
    *,
    engine: EngineName = "in-process",
    ray_address: str | None = None,
    actors: int | None = None,
    resumed: Checkpoint | None = None,
) -> Iterator[PreparedRun]:
    """A run that is ready to start, as long as what makes it is there.

    Args:
      ray_address: of the Ray cluster; this machine when not given.
      actors: how many of Ray's processes share the nodes; one per core when not given.
      resumed: where to go on from.
    """
    if engine != "ray" and (ray_address is not None or actors is not None):
        raise UserError("a Ray address, or a number of actors, goes with engine ray")
    if engine != "in-process" and settings.attack is not None:
        raise UserError("`attack` is simulated in one process: leave `engine` out")
    if engine == "ray":
        with on_ray(
            settings, overrides, address=ray_address, actors=actors, resumed=resumed
        ) as prepared:
            yield prepared
    elif engine == "network":
        from fedbudget.launch.local import on_this_machine  # gRPC is an extra

        if resumed is not None:
            raise UserError(
                "node processes are gone with their run: go on with fedbudget serve and fedbudget join"
            )
        with on_this_machine(settings, overrides) as prepared:
            yield prepared
    elif engine == "in-process":
        yield simulate(settings, overrides, resumed=resumed)
    else:
        raise UserError(
            f"unknown engine {engine!r}; use one of {', '.join(get_args(EngineName))}"
        )
