"""A run whose nodes are simulated in this process; of the baselines too."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbudget.data.shards import Shards, Table
from fedbudget.engines import asynchronous, centralized, in_process
from fedbudget.engines.asynchronous import AsynchronousEngine
from fedbudget.engines.centralized import CentralizedEngine
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import InProcessEngine
from fedbudget.launch.inputs import TrainingInputs, batch_of, distribute, with_batch_size
from fedbudget.launch.meters import build_meters
from fedbudget.launch.method import build_aggregator, build_method, trial_broadcast
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun
from fedbudget.meters.meters import Meters
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.fleet import Fleet
from fedbudget.randomness import Stream, generator
from fedbudget.resources import round_usage
from fedbudget.settings import Settings


@dataclass(frozen=True, kw_only=True)
class SimulatedRun(PreparedRun):
    """A run of which everything is in this process."""

    train: Table
    shards: Shards


def simulate(settings: Settings, overrides: Overrides = NOTHING) -> SimulatedRun:
    """Loads the data, gives it to nodes, and finds out what a round costs; refuses what cannot work."""
    inputs = TrainingInputs.of(settings, overrides)
    settings, rows = distribute(inputs.settings, inputs.dataset)
    shards = Shards.of(inputs.train, rows)
    settings = with_batch_size(settings, int(shards.size.min()))
    meters = build_meters(settings)
    aggregator, engine = _engine(settings, overrides, inputs, shards, meters)
    inputs = replace(inputs, settings=settings)
    return SimulatedRun(
        **vars(inputs), meters=meters, aggregator=aggregator, engine=engine, repeatable=not overrides, shards=shards
    )


def _engine(
    settings: Settings, overrides: Overrides, inputs: TrainingInputs, shards: Shards, meters: Meters
) -> tuple[Aggregator | None, Engine]:
    model, method = inputs.model, build_method(settings, overrides)
    w = model.initial(settings.seed)
    if settings.method in ("centralized", "asynchronous"):
        eta, batch = method.step_size.first().eta, batch_of(settings)
        Fleet(model, shards, batch=batch, seed=settings.seed)  # refuses mini-batches larger than a shard
        common: dict[str, Any] = {"w": w, "eta": eta, "batch": batch, "seed": settings.seed, "meters": meters}
        if settings.method == "centralized":
            trial = centralized.trial(
                model, inputs.train, w, batch=batch, seed=settings.seed, counters=meters.counters()
            )
            ledger = centralized.open_ledger(meters, trial)
            return None, CentralizedEngine(model, inputs.train, ledger=ledger, rounds=settings.rounds, **common)
        speeds = settings.speeds or asynchronous.default_speeds(len(shards))
        ledger = asynchronous.open_ledger(meters, shards, speeds)
        return None, AsynchronousEngine(model, shards, speeds=speeds, ledger=ledger, rounds=settings.rounds, **common)
    twin = Fleet(model, shards, batch=batch_of(settings), seed=settings.seed)
    trial = round_usage([in_process.trial([twin], trial_broadcast(method, w), meters.counters())])
    aggregator = build_aggregator(method, meters, (w, trial), rounds=settings.rounds)
    fleets, present = build_fleets(settings, model, shards), None
    if settings.participation < 1:
        present = in_process.some_absent(fleets, settings.participation, absence(settings))
    return aggregator, InProcessEngine(aggregator, fleets, meters, present)


def build_fleets(settings: Settings, model: Model, shards: Shards, first: int = 0) -> list[Fleet]:
    """Nodes as one fleet or, where they may be absent, each as its own; their numbers in the run begin with `first`."""
    nodes = range(len(shards))
    parts = [(shards, nodes)] if settings.participation == 1 else [(shards.only([n]), range(n, n + 1)) for n in nodes]
    batch, seed = batch_of(settings), settings.seed
    return [Fleet(model, part, batch=batch, seed=seed, numbers=[first + n for n in own]) for part, own in parts]


def absence(settings: Settings) -> np.random.Generator:
    """Says who is absent in which round."""
    return generator(settings.seed, Stream.ABSENCE)
