"""From settings to a run that is ready to start: everything checked, nothing written, nothing spent."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedbudget import data
from fedbudget.budget import Budget
from fedbudget.data import partition
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Shards, Table
from fedbudget.engines import in_process
from fedbudget.errors import UserError
from fedbudget.meters import measured_meters, simulated, simulated_meters
from fedbudget.meters.declared import Energy, Money
from fedbudget.meters.meter import Meters
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.fleet import Fleet
from fedbudget.runs.settings import Settings

DEFAULT_BATCH = 100
DEFAULT_NODES = 5

_PARTITION, _COSTS = 1, 2  # streams of random numbers, apart from each other


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    Args:
      settings: as asked for, completed with what was decided.
      train, test: all samples, as the model wants them.
      repeatable: whether the settings alone say what was trained on what.
    """

    settings: Settings
    budget: Budget
    dataset: Dataset
    model: Model
    train: Table
    test: Table | None
    fleet: Fleet
    meters: Meters
    aggregator: Aggregator
    repeatable: bool

    @property
    def title(self) -> str:
        settings = self.settings
        tau = "adaptive τ" if settings.tau == "adaptive" else f"τ = {settings.tau}"
        return f"{settings.model} on {self.dataset.name}, {settings.nodes} nodes, {settings.partition}, {tau}"


def prepare(settings: Settings, *, dataset: Dataset | None = None, model: Model | None = None) -> Plan:
    """Loads the data, gives it to nodes, and finds out what a round costs; refuses what cannot work."""
    repeatable = dataset is None and model is None
    if dataset is None:
        dataset = data.load(settings.dataset, target=settings.target, test_share=settings.test_share)
        if settings.dataset not in data.DATASETS:  # the run can then be repeated from any folder
            settings = replace(settings, dataset=str(Path(settings.dataset).resolve()))
    if model is None:
        model = catalogue.build(settings.model, dataset, clusters=settings.clusters)
    train = dataset.table(dataset.train, model.target)
    test = None if dataset.test is None else dataset.table(dataset.test, model.target)
    settings, rows = _distribute(settings, dataset)
    shards = Shards.of(train, rows)
    if settings.batch_size is None:
        settings = replace(settings, batch_size=min(DEFAULT_BATCH, int(shards.size.min())))
    meters = _meters(settings)
    fleet, scratch = (_fleet(settings, model, shards) for _ in range(2))
    controller, w = settings.controller(), model.initial(settings.seed)
    aggregator = Aggregator(
        w,
        budget=meters.budget,
        controller=controller,
        eta=settings.step_size,
        expected=meters.expect(in_process.trial([scratch], w, estimate=controller.estimates)),
        rounds=settings.rounds,
    )
    return Plan(settings, meters.budget, dataset, model, train, test, fleet, meters, aggregator, repeatable)


def _distribute(settings: Settings, dataset: Dataset) -> tuple[Settings, partition.Rows]:
    """The rows of each node, and the settings with what was decided."""
    files = len(dataset.files)
    chosen = Partition.parse(settings.partition or ("files" if files else "case:1"))
    nodes = settings.nodes or files or DEFAULT_NODES
    settings = replace(settings, nodes=nodes, partition=str(chosen))
    if settings.partition == "files":
        if nodes != files:
            raise UserError(
                f"partition files gives each node a file, but {settings.dataset} has {files} for {nodes} nodes"
            )
        return settings, partition.by_file(dataset.files)
    labels = dataset.partition_labels(settings.seed)
    return settings, partition.split(chosen, labels, nodes, np.random.default_rng([settings.seed, _PARTITION]))


def _fleet(settings: Settings, model: Model, shards: Shards) -> Fleet:
    batch = settings.batch_size
    return Fleet(model, shards, batch=batch if isinstance(batch, int) else None, seed=settings.seed)


def _meters(settings: Settings) -> Meters:
    energy = Energy(settings.watts, settings.joules_per_byte)
    money = Money(settings.price_per_hour, settings.price_per_gigabyte)
    if settings.costs == "measured":
        return measured_meters(settings.limits(), energy, money)
    case = Partition.parse(settings.partition or "case:1").case
    profile = simulated.DGD[case or 1] if settings.batch_size == "full" else simulated.SGD
    return simulated_meters(settings.limits(), energy, money, profile, np.random.default_rng([settings.seed, _COSTS]))
