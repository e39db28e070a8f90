"""From settings to a run that is ready to start: everything checked, nothing written, nothing spent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedbudget import data
from fedbudget.arrays import Float32
from fedbudget.budget import Budget
from fedbudget.data import partition
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Shards, Table
from fedbudget.engines import asynchronous, centralized, in_process
from fedbudget.engines.simulation import Engine
from fedbudget.errors import UserError
from fedbudget.meters.meters import Meters
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, Drift
from fedbudget.resources import RESOURCES, round_usage
from fedbudget.resources.resource import Metering
from fedbudget.resources.time import DGD, SGD, Profile, SimulatedTime
from fedbudget.resources.usage import RoundUsage
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.checkpoint_writer import Append
from fedbudget.runs.record import RoundRecord
from fedbudget.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.remote.members import Attendance

DEFAULT_BATCH = 100
DEFAULT_NODES = 5

_PARTITION, _COSTS, _ABSENCE = 1, 2, 3  # streams of random numbers, apart from each other


class Checkpointer(Protocol):
    """Keeps where a run has come to."""

    def open(self, folder: Path, append: Append) -> None:
        """Before the first round.

        Args:
          append: adds a record to the run's, when it is safe to.
        """

    def keep(self, record: RoundRecord) -> None:
        """After a round."""

    def close(self) -> None:
        """After the last: returns when all is on disk."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is ready to start.

    Args:
      settings: as asked for, completed with what was decided.
      train, test: all samples, as the model wants them; those to train on may be on other machines.
      aggregator: of a federated run; the baselines have none.
      engine: makes the run.
      repeatable: whether the settings alone say what was trained on what.
      checkpointer: keeps where the run has come to, so that it can go on from there after a crash.
      wake: ends what the engine is waiting for, when the run is interrupted.
      resumed: where the run goes on from, if it does.
      attendance: how nodes on other machines are doing.
      traffic: what has passed between them and the aggregator, in bytes and numbers by name.
    """

    settings: Settings
    budget: Budget
    dataset: Dataset
    model: Model
    test: Table | None
    meters: Meters
    aggregator: Aggregator | None
    engine: Engine
    repeatable: bool
    train: Table | None = None
    checkpointer: Checkpointer | None = None
    wake: Callable[[], None] = lambda: None
    resumed: Checkpoint | None = None
    attendance: "Callable[[], Sequence[Attendance]] | None" = None
    traffic: Callable[[], Mapping[str, int]] | None = None

    @property
    def title(self) -> str:
        settings = self.settings
        what = f"{settings.model} on {self.dataset.name}"
        if self.dataset.note:
            what += f" ({self.dataset.note})"
        if settings.method == "centralized":
            return f"{what}, centralized"
        tau = "adaptive τ" if settings.tau == "adaptive" else f"τ = {settings.tau}"
        spread = "" if settings.partition is None else f", {settings.partition}"
        how = {"paper": tau, "frugal": f"{tau}, frugal"}.get(settings.method, settings.method)
        return f"{what}, {settings.nodes} nodes{spread}, {how}"


@dataclass(frozen=True, kw_only=True)
class PlanHere(Plan):
    """The plan of a run whose data are here.

    Args:
      fleet: the nodes with their shards.
    """

    train: Table
    fleet: Fleet


def prepare(settings: Settings, *, dataset: Dataset | None = None, model: Model | None = None) -> PlanHere:
    """Loads the data, gives it to nodes, and finds out what a round costs; refuses what cannot work."""
    subject = TrainingInputs.of(settings, dataset, model)
    settings, rows = distribute(subject.settings, subject.dataset)
    shards = Shards.of(subject.train, rows)
    settings = with_batch_size(settings, int(shards.size.min()))
    meters, fleet = meters_of(settings), fleet_of(settings, subject.model, shards)
    aggregator, engine = _engine(settings, fleet, meters, subject.train)
    return PlanHere(
        settings=settings,
        budget=meters.budget,
        dataset=subject.dataset,
        model=subject.model,
        train=subject.train,
        test=subject.test,
        meters=meters,
        aggregator=aggregator,
        engine=engine,
        repeatable=subject.repeatable,
        fleet=fleet,
    )


@dataclass(frozen=True)
class TrainingInputs:
    """What is trained on what.

    Args:
      settings: as asked for, with paths that do not depend on where we are.
      dataset: of its samples, as many as were asked for.
      train, test: the samples as the model wants them.
      repeatable: whether the settings alone say all this.
    """

    settings: Settings
    dataset: Dataset
    model: Model
    train: Table
    test: Table | None
    repeatable: bool

    @classmethod
    def of(cls, settings: Settings, dataset: Dataset | None, model: Model | None) -> "TrainingInputs":
        """From what was given, or as the settings say."""
        repeatable = dataset is None and model is None
        if dataset is None:
            dataset = load_dataset(settings)
            settings = _from_any_folder(settings)
        dataset = dataset.sample(settings.train_samples, settings.test_samples, settings.seed)
        if model is None:
            model = catalogue.build(settings.model, dataset, clusters=settings.clusters, device=settings.device)
        train = dataset.table(dataset.train, model.target)
        test = None if dataset.test is None else dataset.table(dataset.test, model.target)
        return cls(settings, dataset, model, train, test, repeatable)


def _engine(settings: Settings, fleet: Fleet, meters: Meters, train: Table) -> tuple[Aggregator | None, Engine]:
    """What makes the run, with a ledger opened, so that a budget which cannot work is refused before it starts."""
    model, w = fleet.model, fleet.model.initial(settings.seed)
    common: dict[str, Any] = {
        "w": w,
        "eta": settings.pacing().first().eta,
        "batch": fleet.sampler.batch,
        "seed": settings.seed,
        "meters": meters,
        "rounds": settings.rounds,
    }
    if settings.method == "centralized":
        tried = centralized.trial(
            model, train, w, batch=fleet.sampler.batch, seed=settings.seed, counters=meters.counters()
        )
        ledger = centralized.open_ledger(meters, tried)
        return None, partial(centralized.run, model, train, ledger=ledger, **common)
    if settings.method == "asynchronous":
        speeds = settings.speeds or asynchronous.default_speeds(len(fleet.shards))
        ledger = asynchronous.open_ledger(meters, fleet.shards, speeds)
        return None, partial(asynchronous.run, model, fleet.shards, speeds=speeds, ledger=ledger, **common)
    return _federated(settings, fleet, meters, w)


def _federated(settings: Settings, fleet: Fleet, meters: Meters, w: Float32) -> tuple[Aggregator, Engine]:
    twin = fleet_of(settings, fleet.model, fleet.shards)

    def trial(first: Broadcast) -> RoundUsage:
        return round_usage([in_process.trial([twin], first, meters.counters())])

    aggregator = aggregator_of(settings, meters, w, trial)
    if settings.participation == 1:
        return aggregator, partial(in_process.run, aggregator, [fleet], meters)
    alone = [fleet_of(settings, fleet.model, fleet.shards.only([node]), [node]) for node in range(len(fleet.shards))]
    present = in_process.some_absent(alone, settings.participation, absence(settings))
    return aggregator, partial(in_process.run, aggregator, alone, meters, present=present)


def aggregator_of(
    settings: Settings, meters: Meters, w: Float32, trial: Callable[[Broadcast], RoundUsage]
) -> Aggregator:
    """The aggregator of a simulated fleet, with a ledger opened.

    Args:
      trial: makes a round that does not count, from what the first broadcast says.
    """
    controller, step_size = settings.controller(), settings.pacing()
    first = Broadcast(
        round=1,
        w=w,
        tau=1,
        eta=step_size.first().eta,
        estimate=controller.estimates or step_size.adapts,
        best=False,
        stop=False,
        gradient=settings.delta_from == "gradient",
        curvature=step_size.adapts,
        drift=Drift(correct=True, share=1.0) if settings.corrects_drift else None,
    )
    return Aggregator(
        w,
        budget=meters.budget,
        controller=controller,
        step_size=step_size,
        expected=meters.expect(trial(first)),
        rounds=settings.rounds,
        correct_drift=settings.corrects_drift,
        delta=settings.delta_from,
    )


def absence(settings: Settings) -> np.random.Generator:
    """Says who is absent in which round."""
    return np.random.default_rng([settings.seed, _ABSENCE])


def load_dataset(settings: Settings) -> Dataset:
    """All samples of the settings' dataset."""
    return data.load(
        settings.dataset, target=settings.target, test_share=settings.test_share, data_dir=settings.data_dir
    )


def _from_any_folder(settings: Settings) -> Settings:
    """The same with paths that do not depend on where we are, so that the run can be repeated from anywhere."""
    if settings.dataset not in data.DATASETS:
        settings = replace(settings, dataset=str(Path(settings.dataset).resolve()))
    if settings.data_dir is not None:
        settings = replace(settings, data_dir=str(Path(settings.data_dir).expanduser().resolve()))
    return settings


def distribute(settings: Settings, dataset: Dataset) -> tuple[Settings, partition.Rows]:
    """The rows of each node, and the settings with what was decided."""
    settings = with_nodes(settings, dataset)
    assert settings.nodes is not None
    chosen = Partition.parse(str(settings.partition))
    if settings.partition == "files":
        return settings, partition.by_file(dataset.files)
    rng = np.random.default_rng([settings.seed, _PARTITION])
    labels = dataset.partition_labels(settings.seed)
    return settings, partition.split(chosen, labels, settings.nodes, rng)


def with_nodes(settings: Settings, dataset: Dataset) -> Settings:
    """The settings with how many nodes there are, and how data is given to them."""
    files = len(dataset.files)
    chosen = Partition.parse(settings.partition or ("files" if files else "case:1"))
    nodes = settings.nodes or files or DEFAULT_NODES
    if str(chosen) == "files" and nodes != files:
        raise UserError(f"partition files gives each node a file, but {settings.dataset} has {files} for {nodes} nodes")
    return replace(settings, nodes=nodes, partition=str(chosen))


def with_batch_size(settings: Settings, smallest: int) -> Settings:
    """The settings with the size of mini-batches, from that of the smallest shard."""
    if settings.batch_size is not None:
        return settings
    return replace(settings, batch_size=min(DEFAULT_BATCH, smallest))


def fleet_of(settings: Settings, model: Model, shards: Shards, numbers: Sequence[int] | None = None) -> Fleet:
    """Nodes as one fleet, with their numbers among all nodes of the run."""
    batch = settings.batch_size if isinstance(settings.batch_size, int) else None
    return Fleet(model, shards, batch=batch, seed=settings.seed, numbers=numbers)


def meters_of(settings: Settings, *, network: bool = False) -> Meters:
    """The meters of a run.

    Args:
      network: whether nodes are on other machines.
    """
    declared = {name: getattr(settings, name) for resource in RESOURCES.values() for name in resource.settings}
    simulated = None
    if settings.costs != "measured":
        simulated = SimulatedTime(_profile(settings), np.random.default_rng([settings.seed, _COSTS]))
    return Meters.of(settings.limits(), Metering(simulated, network, declared))


def _profile(settings: Settings) -> Profile:
    """The simulated time of a local update and of an aggregation."""
    batch = settings.batch_size if isinstance(settings.batch_size, int) else None
    if settings.method == "centralized":
        return centralized.profile(batch)
    case = Partition.parse(settings.partition or "case:1").case
    return (SGD if batch else DGD[case or 1]).times(settings.aggregation_factor)
