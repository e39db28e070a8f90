"""A run whose nodes are simulated in this process; of the baselines too."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from fedbudget import python_file
from fedbudget.arrays import Float32
from fedbudget.data.shards import Shards, Table
from fedbudget.engines import asynchronous, centralized, in_process
from fedbudget.engines.asynchronous import AsynchronousEngine, AsynchronousState
from fedbudget.engines.attack import Attack, with_flipped_labels
from fedbudget.engines.centralized import CentralizedEngine, CentralizedState
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import InProcessEngine, SimulationEngine, SimulationState
from fedbudget.errors import UserError, explained
from fedbudget.launch.inputs import TrainingInputs, batch_of, distribute, with_batch_size
from fedbudget.launch.meters import build_meters, drawn_speeds
from fedbudget.launch.method import build_aggregator, build_method, trial_broadcast
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun, attendance
from fedbudget.launch.privacy import node_noise, require_own_samples, with_privacy
from fedbudget.launch.resume import recalling, require_engine, require_same_data
from fedbudget.meters.meters import Meters
from fedbudget.models.base import Model, require_fit
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.method import Method
from fedbudget.resources import round_usage
from fedbudget.resources.usage import RoundUsage
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings import Settings

MOST_MEMORY = 100e6
"""Bytes that nodes remember, above which checkpoints do not hold them: then nodes begin anew when a run goes on, as if
they had joined just then. They know w and w^f, and learn the rest in a round."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun(PreparedRun):
    """A run of which everything is in this process."""

    train: Table
    shards: Shards


def simulate(settings: Settings, overrides: Overrides = NOTHING, *, resumed: Checkpoint | None = None) -> SimulatedRun:
    """Loads the data, gives it to nodes, and finds out what a round costs; refuses what cannot work.

    Args:
      resumed: where to go on from.
    """
    inputs = TrainingInputs.of(settings, overrides)
    settings, rows = distribute(inputs.settings, inputs.dataset)
    shards, attack = Shards.of(inputs.train, rows), attack_of(settings, len(rows))
    if attack is not None and attack.name == "label-flip":
        shards = with_flipped_labels(shards, attack.first)
    require_own_samples(settings, inputs.model, rows)
    settings = with_privacy(with_batch_size(settings, shards.size.tolist()), samples=int(shards.size.sum()))
    require_fit(inputs.model, inputs.dataset.name, inputs.train, batch_of(settings), inputs.test)
    meters = build_meters(settings)
    if resumed is not None:
        require_engine(resumed, "in-process")
        require_same_data(inputs, resumed)
    began = time.perf_counter()
    failed = f"{inputs.model.name} cannot train on {inputs.dataset.name}"
    with explained(failed) if python_file.is_reference(str(settings.model)) else nullcontext():
        aggregator, engine = _engine(settings, overrides, inputs, shards, meters, resumed, attack)
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
    model, method = inputs.model, build_method(settings, overrides, shards.size.tolist())
    w = model.initial(settings.seed)
    if settings.method in ("centralized", "asynchronous"):
        eta, batch = method.step_size.first().eta, batch_of(settings)
        common: dict[str, Any] = {"w": w, "eta": eta, "batch": batch, "seed": settings.seed, "meters": meters}
        return None, _baseline(settings, inputs, shards, common, resumed)
    fleet: Any = {"batch": batch_of(settings), "seed": settings.seed, "noise": node_noise(settings)}
    twin = Fleet(model, shards, **fleet)
    compressor = compressor_of(settings)
    first = replace(trial_broadcast(method, w), compress=None if compressor.kind == "none" else compressor.kind)
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
    fleets, remembers = build_fleets(settings, model, shards), remember_nodes(settings, model)
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


def _rehearse(settings: Settings, method: Method, start: tuple[Float32, RoundUsage], fleet: Fleet) -> None:
    """A short run from end to end, thrown away, so that nothing is compiled or loaded on a short budget's time."""
    budget = settings.limits()
    limits = {name: limit if name == budget.by_noise else 1e18 for name, limit in budget.limits.items()}
    plenty = replace(settings, budget=tuple(f"{name}={limit!r}" for name, limit in limits.items()))
    meters = build_meters(plenty)
    aggregator = build_aggregator(method, meters, start, rounds=3, statistics=fleet.model.statistics)
    InProcessEngine(aggregator, [fleet], meters).run(observe=lambda *_: None)


def _baseline(
    settings: Settings, inputs: TrainingInputs, shards: Shards, common: dict[str, Any], resumed: Checkpoint | None
) -> Engine:
    meters: Meters = common["meters"]
    if settings.method == "centralized":
        options = {name: common[name] for name in ("batch", "seed")}
        trial = centralized.trial(inputs.model, inputs.train, common["w"], counters=meters.counters(), **options)
        common["ledger"] = centralized.open_ledger(meters, trial)
        descent = CentralizedEngine(inputs.model, inputs.train, rounds=settings.rounds, **common)
        if resumed is not None:
            with recalling("where it was"):
                descent.recall(resumed.state, resumed.engine_state(CentralizedState))
        return descent
    if inputs.model.statistics:
        raise UserError(
            f"asynchronous descent sends gradients alone, and {inputs.model.name} has running statistics: "
            'use group normalization, or TorchModel(..., statistics="local")'
        )
    speeds: Sequence[float] = asynchronous.default_speeds(len(shards))
    if settings.speeds is not None:
        speeds = drawn_speeds(settings, len(shards)).values.tolist()
    common["ledger"] = asynchronous.open_ledger(meters, shards, speeds)
    engine = AsynchronousEngine(inputs.model, shards, speeds=speeds, rounds=settings.rounds, **common)
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


def build_fleets(settings: Settings, model: Model, shards: Shards, first: int = 0) -> list[Fleet]:
    """Nodes as one fleet or, where they may be absent, each as its own; their numbers in the run begin with `first`."""
    nodes = range(len(shards))
    parts = [(shards, nodes)] if settings.participation == 1 else [(shards.only([n]), range(n, n + 1)) for n in nodes]
    common: Any = {"batch": batch_of(settings), "seed": settings.seed, "noise": node_noise(settings)}
    return [Fleet(model, part, **common, numbers=[first + n for n in own]) for part, own in parts]


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
        raise UserError(f"`attackers` is {attackers} of {nodes} nodes: none would be honest")
    return Attack(settings.attack, nodes - attackers, settings.seed)
