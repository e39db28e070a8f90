"""A run that is ready to start, and what may be given for it from Python."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedbudget.budget.budget import Budget
from fedbudget.budget.control import Controller
from fedbudget.budget.step_size import StepSize
from fedbudget.data.dataset import Dataset
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import Attendance
from fedbudget.evaluation.points import EvaluationPoints
from fedbudget.models.base import Model
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.update import UpdateRule
from fedbudget.randomness import Stream, generator
from fedbudget.resources.meters import Meters
from fedbudget.runs.checkpoint import Checkpoint, Conditions
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.text import run_title
from fedbudget.settings.settings import Settings

Callback = Callable[[RoundRecord], bool | None]
"""Called with the record of every round; the run ends after the round for which it returns True."""


@dataclass(frozen=True)
class Overrides:
    """Objects that take the place of what settings name."""

    dataset: Dataset | None = None
    model: Model | None = None
    controller: Controller | None = None
    step_size: StepSize | None = None
    update: UpdateRule | None = None
    combine: CombineRule | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())


NOTHING = Overrides()

_MORE_OFTEN = 4


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start.

    Args:
      settings: as asked for, completed with what was decided.
      train, test: all samples, as the model wants them; those to train on may be on other machines.
      aggregator: of a federated run; the baselines have none.
      repeatable: whether the settings alone say what was trained on what, and how.
      shards: the nodes' data, where nodes are simulated in this process.
      resumed: where the run goes on from, if it does.
      callbacks: called with every round's record.
      trial_seconds: what trial rounds and warming up took, before the clock of the budget starts.
      nodes_test: whether test samples are with nodes, who are asked for what they say of w.
      folder_made: called with the run's folder, where it has one, before the first round.
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
    shards: Shards | None = None
    resumed: Checkpoint | None = None
    callbacks: tuple[Callback, ...] = ()
    trial_seconds: float = 0.0
    nodes_test: bool = False
    folder_made: Callable[[Path], None] = lambda folder: None

    @cached_property
    def conditions(self) -> Conditions:
        """What a checkpoint says that the run is made under."""
        data = "" if self.train is None else fingerprint(self.train, self.test)
        return Conditions(dict(self.budget.limits), self.settings.rounds, data)

    @property
    def budget(self) -> Budget:
        return self.meters.budget

    @property
    def title(self) -> str:
        return run_title(self.settings, self.dataset.name, self.dataset.note)


def evaluation_points(settings: Settings) -> EvaluationPoints:
    """When test samples are looked at in a run."""
    often = settings.keep == "best-on-test" or bool(settings.until)
    return EvaluationPoints(settings.evaluations * (_MORE_OFTEN if often else 1), often)


def attendance(settings: Settings) -> Attendance | None:
    """Says who takes part in which round, where not all do."""
    assert settings.nodes is not None
    rng = generator(settings.seed, Stream.ABSENCE)
    return (
        None
        if settings.participation == 1
        else Attendance(settings.nodes, settings.participation, rng)
    )


def fingerprint(train: Table, test: Table | None) -> str:
    """A short text that is another when any sample is."""
    return " ".join(table.fingerprint() for table in (train, test) if table is not None)
