"""A run that is ready to start, and objects that replace parts of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedbudget.arrays import Float32, Int32
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import Controller
from fedbudget.budget.step_size import StepSize
from fedbudget.data.dataset import Dataset
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import Attendance
from fedbudget.evaluation.points import EvaluationPoints
from fedbudget.models.base import Model, loss_over
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.features.feature import Feature
from fedbudget.protocol.update import UpdateRule
from fedbudget.randomness import Stream, generator
from fedbudget.resources.meters import Meters
from fedbudget.runs.checkpoint import Checkpoint, Conditions
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.text import run_title
from fedbudget.settings.settings import Settings

Callback = Callable[[RoundRecord], bool | None]
"""Called with the record of every round; the run stops when it returns True."""


@dataclass(frozen=True)
class Overrides:
    """Objects that replace the parts that settings name."""

    dataset: Dataset | None = None
    model: Model | None = None
    controller: Controller | None = None
    step_size: StepSize | None = None
    update: UpdateRule | None = None
    combine: CombineRule | None = None
    features: tuple[Feature, ...] = ()

    def __bool__(self) -> bool:
        return any(value is not None and value != () for value in vars(self).values())


NOTHING = Overrides()

_DENSE = 4
"""Factor on the number of evaluations of a run that stops or selects by them."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start.

    Args:
      settings: completed with the values that were decided.
      train, test: all samples in the form of the model; None if they are on other machines.
      aggregator: None for the baselines.
      repeatable: whether the settings alone repeat the run.
      train_rows: rows of `train` that nodes train on; None for all.
      shards: data of the nodes, if they are simulated in this process.
      resumed: checkpoint to resume from.
      callbacks: called with the record of every round.
      trial_seconds: duration of trial rounds and warm-up, before the clock of the budget
        starts.
      nodes_test: whether nodes hold the test samples and evaluate w on them.
      folder_made: called with the folder of the run, if any, before the first round.
    """

    settings: Settings
    dataset: Dataset
    model: Model
    test: Table | None
    meters: Meters
    engine: Engine
    repeatable: bool
    aggregator: Aggregator | None = None
    train: Table | None = None
    train_rows: Int32 | None = None
    shards: Shards | None = None
    resumed: Checkpoint | None = None
    callbacks: tuple[Callback, ...] = ()
    trial_seconds: float = 0.0
    nodes_test: bool = False
    folder_made: Callable[[Path], None] = lambda folder: None

    @cached_property
    def conditions(self) -> Conditions:
        """Limits and data of the run, saved with checkpoints."""
        data = "" if self.train is None else fingerprint(self.train, self.test)
        return Conditions(dict(self.budget.limits), self.settings.rounds, data)

    def training_loss(self, w: Float32) -> float | None:
        """Return F(w) over all rows that nodes train on; None if they are elsewhere."""
        if self.train is None:
            return None
        return loss_over(self.model, w, self.train, self.train_rows)

    @property
    def validates(self) -> bool:
        """Whether nodes hold out rows to choose the model."""
        return self.aggregator is not None and self.aggregator.method.validates

    @property
    def budget(self) -> Budget:
        return self.meters.budget

    @property
    def title(self) -> str:
        return run_title(self.settings, self.dataset.name, self.dataset.note)


def evaluation_points(settings: Settings) -> EvaluationPoints:
    """Return when a run is evaluated on test samples."""
    often = settings.keep == "best-on-test" or bool(settings.until)
    return EvaluationPoints(settings.evaluations * (_DENSE if often else 1), often)


def attendance(settings: Settings) -> Attendance | None:
    """Return which nodes take part in which round; None if all always do."""
    if settings.participation == 1:
        return None
    assert settings.nodes is not None
    rng = generator(settings.seed, Stream.ABSENCE)
    return Attendance(settings.nodes, settings.participation, rng)


def fingerprint(train: Table, test: Table | None) -> str:
    """Return a short text that changes when any sample changes."""
    return " ".join(table.fingerprint() for table in (train, test) if table is not None)
