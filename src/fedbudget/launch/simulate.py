"""Runs with simulated nodes, in this process or on a Ray cluster, and the baselines.

`launch` starts a run on any engine that this machine can start by itself.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from fedbudget import __version__, python_file
from fedbudget.arrays import Float32, Int32, Samples
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Shards, Table
from fedbudget.engines import baselines
from fedbudget.engines.baselines import (
    AsynchronousEngine,
    BaselineEngine,
    CentralizedEngine,
)
from fedbudget.engines.engine import Engine, RoundEngine
from fedbudget.engines.in_process import (
    Attack,
    InProcessNodes,
    NodeGroup,
    SimulatedNodes,
    SimulationState,
    with_flipped_labels,
)
from fedbudget.engines.noise import SimulatedSums
from fedbudget.errors import UserError, as_user_error
from fedbudget.launch.inputs import (
    TrainingInputs,
    batch_of,
    distribute,
    with_batch_size,
    with_nodes,
    with_validation,
)
from fedbudget.launch.method import (
    build_aggregator,
    build_meters,
    build_method,
    drawn_speeds,
    rounds_to_try,
    validation_of,
)
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun, attendance
from fedbudget.launch.privacy import (
    log_payments,
    node_noise,
    require_own_samples,
    simulated_sums,
    with_privacy,
    with_sums_only,
)
from fedbudget.launch.resume import recalling, require_engine, require_same_data
from fedbudget.models.base import Model, require_fit
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.features.compression import BroadcastCompressor
from fedbudget.protocol.features.feature import Feature
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.method import Method
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Resource, Usage
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings.compatibility import BASELINES, require_compatible
from fedbudget.settings.option import choices_text
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import EngineName

MOST_MEMORY = 100e6
"""Largest state of nodes, in bytes, that checkpoints contain. Above it, the nodes of a
resumed run start like nodes that have just joined: with w and w^f, and without history."""

MOST_PERSONAL = 1000
"""Simulated nodes with personal models, at most."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun(PreparedRun):
    """A run whose data and nodes are in this process."""

    train: Table
    shards: Shards


def simulate(
    settings: Settings, overrides: Overrides = NOTHING, *, resumed: Checkpoint | None = None
) -> SimulatedRun:
    """Load data, distribute it over nodes, and measure the cost of a round.

    Args:
      resumed: checkpoint to resume from.
    """
    require_compatible(settings, engine="in-process")
    inputs = TrainingInputs.of(settings, overrides)
    settings, rows = distribute(inputs.settings, inputs.dataset)
    shards = Shards.of(inputs.train, rows)
    unattacked = shards
    attack = attack_of(settings, len(rows))
    if attack is not None and attack.name == "label-flip":
        shards = with_flipped_labels(shards, attack.first)
    require_own_samples(settings, inputs.model, rows)
    sizes = shards.size.tolist()
    inputs = _completed(inputs, settings, sizes, "in-process", resumed)
    settings = inputs.settings
    model = inputs.model
    meters = build_meters(settings)
    aggregator: Aggregator | None = None
    trial: Usage | None = None
    engine: Engine
    began = time.perf_counter()
    failed = f"{model.name} cannot train on {inputs.dataset.name}"
    custom = python_file.is_reference(str(settings.model))
    with as_user_error(failed) if custom else nullcontext():
        method = build_method(settings, overrides, sizes, model)
        if settings.secure_aggregation:
            method = with_sums_only(method, settings.secure_threshold)
        secure = simulated_sums(settings, method)
        if settings.method in BASELINES:
            eta = method.step_size.first().eta
            engine = _baseline(inputs, shards, eta, meters, resumed)
        else:
            together = _fleet(settings, model, shards, method.features)
            nodes = InProcessNodes(
                build_fleets(settings, model, shards, method.features),
                meters.counters(),
                attendance(settings),
                attack=attack,
                together=together,
                secure=secure,
                **_node_options(settings, model),
            )
            measured = meters.time.source == "measured"
            rehearsal = together if measured else None
            engine, trial = _engine(inputs, method, meters, nodes, resumed, rehearsal)
            aggregator = engine.aggregator
    return SimulatedRun(
        **vars(inputs),
        meters=meters,
        aggregator=aggregator,
        engine=engine,
        repeatable=not overrides,
        train_rows=training_rows(settings, unattacked),
        shards=shards,
        resumed=resumed,
        trial_seconds=time.perf_counter() - began,
        sums=secure,
        folder_made=partial(log_payments, secure),
        trial=trial,
    )


def training_rows(settings: Settings, shards: Shards) -> Int32 | None:
    """Return the rows that nodes train on; None for all."""
    validation = validation_of(settings)
    if validation is None:
        return None
    return np.unique(validation.hold_out(shards, settings.seed)[0].rows)


def _completed(
    inputs: TrainingInputs,
    settings: Settings,
    sizes: Sequence[int],
    engine: EngineName,
    resumed: Checkpoint | None,
) -> TrainingInputs:
    """Return the inputs with all settings decided; refuse what cannot run.

    Args:
      settings: with the number of nodes.
      sizes: number of samples of each node; one number if all are equal.
    """
    assert settings.nodes is not None
    nodes = settings.nodes if len(sizes) == 1 else 1  # of one size
    settings = with_validation(settings, list(sizes) * nodes)
    published = inputs.dataset.published
    settings = with_batch_size(settings, sizes)
    settings = with_privacy(settings, published=published, samples=sum(sizes))
    if settings.personal and nodes * len(sizes) > MOST_PERSONAL:
        raise UserError(
            f"`personal` stores a model for each node, for at most {MOST_PERSONAL} nodes, "
            f"not {nodes * len(sizes)}"
        )
    model = inputs.model
    require_fit(model, inputs.dataset.name, inputs.train, batch_of(settings), inputs.test)
    if resumed is not None:
        require_engine(resumed, engine)
        require_same_data(inputs, resumed)
    return replace(inputs, settings=settings)


def _engine(
    inputs: TrainingInputs,
    method: Method,
    meters: Meters,
    nodes: SimulatedNodes,
    resumed: Checkpoint | None,
    rehearsal: Fleet | None = None,
) -> tuple[RoundEngine, Usage]:
    """Make a trial round, and return the engine and what the round used.

    Args:
      rehearsal: all nodes, to compile what rounds need before the clock starts.
    """
    settings = inputs.settings
    w = inputs.model.initial(settings.seed)
    trial = nodes.trial(rounds_to_try(method, w))
    aggregator = build_aggregator(
        method,
        meters,
        resumed or (w, trial),
        rounds=settings.rounds,
        quantize=compressor_of(settings).quantize,
        statistics=inputs.model.statistics,
    )
    if rehearsal is not None:
        secure = simulated_sums(settings, method)
        _rehearse(meters, method, (w, trial), rehearsal, secure)
    if resumed is not None:
        with recalling("the state of its nodes"):
            state = resumed.engine_state(SimulationState)
            meters.restore(state.meters)
            nodes.restore(state)
    return RoundEngine(aggregator, nodes, meters), trial


def _rehearse(
    meters: Meters,
    method: Method,
    start: tuple[Float32, Usage],
    fleet: Fleet,
    secure: SimulatedSums | None,
) -> None:
    """Run three rounds and discard them, so that the budget excludes compilation."""
    budget = meters.budget
    limits = {
        name: limit if name == budget.by_noise else 1e18
        for name, limit in budget.limits.items()
    }
    meters = replace(meters, budget=replace(budget, limits=limits))
    aggregator = build_aggregator(
        method, meters, start, rounds=3, statistics=fleet.model.statistics
    )
    nodes = InProcessNodes([fleet], meters.counters(), secure=secure)
    RoundEngine(aggregator, nodes, meters).run(observe=lambda *_: None)


def _baseline(
    inputs: TrainingInputs,
    shards: Shards,
    eta: float,
    meters: Meters,
    resumed: Checkpoint | None,
) -> Engine:
    settings = inputs.settings
    model = inputs.model
    common: dict[str, Any] = {
        "model": model,
        "w": model.initial(settings.seed),
        "eta": eta,
        "batch": batch_of(settings),
        "seed": settings.seed,
        "meters": meters,
        "rounds": settings.rounds,
    }
    engine: BaselineEngine
    if settings.method == "centralized":
        trial = baselines.trial(
            model,
            inputs.train,
            common["w"],
            batch=common["batch"],
            seed=settings.seed,
            counters=meters.counters(),
        )
        ledger = baselines.open_centralized_ledger(meters, trial)
        engine = CentralizedEngine(table=inputs.train, ledger=ledger, **common)
    else:
        if model.statistics:
            raise UserError(
                f"asynchronous descent sends only gradients, but {model.name} has running "
                "statistics: use group normalization, or TorchModel(..., "
                'statistics="local")'
            )
        speeds: Sequence[float] = baselines.default_speeds(len(shards))
        if settings.speeds is not None:
            speeds = drawn_speeds(settings, len(shards)).values.tolist()
        ledger = baselines.open_asynchronous_ledger(meters, shards, speeds)
        engine = AsynchronousEngine(shards=shards, speeds=speeds, ledger=ledger, **common)
    if resumed is not None:
        with recalling("its state"):
            engine.recall(resumed.state)
    return engine


def _node_options(settings: Settings, model: Model) -> dict[str, Any]:
    """Options of simulated nodes on any engine."""
    return {
        "remembers": remember_nodes(settings, model),
        "compress": compressor_of(settings).kind,
    }


def remember_nodes(settings: Settings, model: Model) -> bool:
    """Return whether checkpoints contain the state of nodes.

    A node has three vectors and, if nodes can be absent, the state of a generator.
    """
    assert settings.nodes is not None
    generator_bytes = 0 if settings.participation == 1 else 2000
    return settings.nodes * (3 * 4 * model.parameters + generator_bytes) <= MOST_MEMORY


def build_fleets(
    settings: Settings,
    model: Model,
    shards: Shards,
    features: tuple[Feature, ...],
    first: int = 0,
) -> list[Fleet]:
    """Return all nodes as one fleet, or one fleet per node if nodes can be absent.

    Args:
      features: features of the run.
      first: number of the first node in the run.
    """
    nodes = range(first, first + len(shards))
    if settings.participation == 1:
        return [_fleet(settings, model, shards, features, nodes)]
    return [
        _fleet(settings, model, shards.only([index]), features, [number])
        for index, number in enumerate(nodes)
    ]


def _fleet(
    settings: Settings,
    model: Model,
    shards: Shards,
    features: tuple[Feature, ...],
    numbers: Sequence[int] | None = None,
) -> Fleet:
    return Fleet(
        model,
        shards,
        batch=batch_of(settings),
        seed=settings.seed,
        features=features,
        noise=node_noise(settings),
        numbers=numbers,
    )


def compressor_of(settings: Settings) -> BroadcastCompressor:
    """Return the encoder of vectors; auto uses 8 bits if bytes are limited."""
    compress = settings.compress or "none"
    if compress == "auto":
        compress = "8-bit" if "bytes" in settings.limits().limits else "none"
    return BroadcastCompressor(compress)


def attack_of(settings: Settings, nodes: int) -> Attack | None:
    """Return the simulated attack of the settings, if any."""
    if settings.attack is None:
        return None
    attackers = settings.attackers or 1
    if attackers >= nodes:
        raise UserError(
            f"`attackers` is {attackers} of {nodes} nodes: no honest node is left"
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
    """Place nodes on a Ray cluster and yield a run with them.

    Args:
      address: address of the cluster; this machine by default.
      actors: number of processes that share the nodes; by default one per core, or the
        number of a resumed run.
      resumed: checkpoint to resume from.
    """
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
    inputs = _completed(inputs, settings, sizes, "ray", resumed)
    settings = inputs.settings
    if resumed is not None:
        actors = _actors(resumed, actors)
    assert settings.nodes is not None
    sizes = sizes if len(sizes) == settings.nodes else sizes * settings.nodes
    method = build_method(settings, overrides, sizes, inputs.model)
    meters = build_meters(settings)
    summed = method.private is None and not method.combine.needs_reports
    definition = GroupDefinition(
        settings, inputs.dataset, inputs.model, method.features, meters.resources, summed
    )
    with cluster(address) as cpus, ExitStack() as stack:
        nodes = RayNodes(
            definition,
            nodes=settings.nodes,
            actors=min(settings.nodes, actors or max(1, int(cpus))),
            cpus=cpus,
            present=attendance(settings),
            **_node_options(settings, inputs.model),
        )
        stack.enter_context(closing(nodes))
        began = time.perf_counter()
        engine, trial = _engine(inputs, method, meters, nodes, resumed)
        rows = None  # drawn shards overlap: together they train on all rows
        if not Partition.parse(str(settings.partition)).draws:
            shards = Shards.of(inputs.train, distribute(settings, inputs.dataset)[1])
            rows = training_rows(settings, shards)
        yield PreparedRun(
            **vars(inputs),
            train_rows=rows,
            meters=meters,
            aggregator=engine.aggregator,
            engine=engine,
            repeatable=not overrides,
            resumed=resumed,
            trial_seconds=time.perf_counter() - began,
            trial=trial,
        )


def _actors(resumed: Checkpoint, wanted: int | None) -> int | None:
    """Return the number of actors of the resumed run; each has the state of its nodes."""
    groups = resumed.engine_state(SimulationState).groups
    if groups is None:
        return wanted
    if wanted not in (None, len(groups)):
        raise UserError(
            f"the run to resume has {len(groups)} actors, and cannot change to {wanted}"
        )
    return len(groups)


def _sizes(settings: Settings, dataset: Dataset) -> list[int]:
    """Return the shard sizes; one number if all are equal."""
    drawn = Partition.parse(str(settings.partition)).draws
    return [drawn] if drawn else [len(rows) for rows in distribute(settings, dataset)[1]]


@dataclass(frozen=True)
class GroupDefinition:
    """Everything needed to build groups of nodes; samples are in shared memory."""

    settings: Settings
    dataset: Dataset
    model: Model
    features: tuple[Feature, ...]
    resources: tuple[Resource, ...]
    summed: bool = True
    version: str = __version__

    def group(self, first: int, end: int) -> NodeGroup:
        if self.version != __version__:
            raise UserError(
                f"a machine of the cluster has fedbudget {__version__}, this one "
                f"{self.version}"
            )
        settings, rows = distribute(self.settings, self.dataset)
        train = self.dataset.table(self.dataset.train, self.model.target)
        shards = Shards.of(replace(train, x=_as_writable(train.x)), rows[first:end])
        fleets = build_fleets(settings, self.model, shards, self.features, first)
        return NodeGroup(fleets, ResourceCounters.of(self.resources), summed=self.summed)


def _as_writable(array: Samples) -> Samples:
    """Return the same memory as an array marked writable; no code writes to it.

    Shared memory is marked read-only, and kernels would be compiled again for such arrays.
    """
    return array if array.flags.writeable else np.asarray(_Writable(array))


class _Writable:
    def __init__(self, array: Samples) -> None:
        self._array = array  # keeps its memory alive
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
    """Prepare a run and yield it; the engine is closed afterwards.

    Args:
      ray_address: address of the Ray cluster; this machine by default.
      actors: number of Ray processes that share the nodes; one per core by default.
      resumed: checkpoint to resume from.
    """
    require_compatible(
        settings, engine=engine, ray_address=ray_address, actors=actors, resume=resumed
    )
    if engine == "ray":
        with on_ray(
            settings, overrides, address=ray_address, actors=actors, resumed=resumed
        ) as prepared:
            yield prepared
    elif engine == "network":
        from fedbudget.launch.local import on_this_machine  # gRPC is an extra

        with on_this_machine(settings, overrides) as prepared:
            yield prepared
    elif engine == "in-process":
        yield simulate(settings, overrides, resumed=resumed)
    else:
        raise UserError(
            f"unknown engine {engine!r}; use {choices_text(get_args(EngineName))}"
        )
