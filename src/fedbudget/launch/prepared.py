"""A run that is ready to start, and objects that replace parts of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedbudget.arrays import Float32, Int32
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import (
    BalancedTau,
    ControlInputs,
    Controller,
    Decision,
    Reason,
)
from fedbudget.budget.step_size import StepSize
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import Attendance
from fedbudget.engines.noise import SimulatedSums
from fedbudget.evaluation.points import EvaluationPoints
from fedbudget.models.base import Model, loss_over
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.features.feature import Feature
from fedbudget.protocol.update import UpdateRule
from fedbudget.randomness import Stream, generator
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Usage
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

_DOUBLINGS = 7
"""τ at most doubles from round to round, so this many rounds take it from 1 to 100."""

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
      sums: opens the sums of simulated nodes with secure aggregation.
      folder_made: called with the folder of the run, if any, before the first round.
      trial: a trial round on this machine, if nodes are simulated.
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
    sums: SimulatedSums | None = None
    folder_made: Callable[[Path], None] = lambda folder: None
    trial: Usage | None = None

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
    def exact_tests(self) -> int | None:
        """Number of test samples that are not published; None if there are none.

        Their metrics are exact, also in a private run.
        """
        if self.test is None or self.dataset.published:
            return None
        return len(self.test)

    @property
    def validates(self) -> bool:
        """Whether nodes hold out rows to choose the model."""
        return self.aggregator is not None and self.aggregator.method.validates

    @property
    def solver(self) -> str:
        """Why the run solves or descends; empty if nothing was chosen."""
        return "" if self.aggregator is None else self.aggregator.method.solver

    @property
    def expected_rounds(self) -> float | None:
        """Number of rounds that the rest of the budget buys at the expected costs.

        None for the baselines and if only privacy is limited.
        """
        if self.aggregator is None:
            return None
        ledger = self.aggregator.ledger
        costs = ledger.statistics.mean
        each = costs.step * self._updates + costs.aggregation
        left = ledger.budget.array - ledger.spent
        counts = (left / each)[ledger.budget.without_privacy(each) > 0]
        limit = self.settings.rounds
        known = [*counts.tolist(), *([] if limit is None else [float(limit)])]
        return min(known, default=None)

    @property
    def expected_seconds(self) -> float | None:
        """Time that these rounds take on this machine; None if it is unknown."""
        rounds = self.expected_rounds
        if rounds is None or self.trial is None:
            return None
        step = self.trial.step_seconds
        rest = max(0.0, self.trial.seconds - step * self.trial.updates)
        return rounds * (step * self._updates + rest)

    @cached_property
    def _updates(self) -> int:
        """Local updates of most rounds, as far as costs alone decide."""
        assert self.aggregator is not None
        pending = self.aggregator.pending
        tau = max(1, 0 if pending is None else pending.steps)
        controller = self.aggregator.method.controller
        if not isinstance(controller, BalancedTau):
            return tau
        costs = self.aggregator.ledger.statistics.mean
        limits = self.budget.array
        inputs = ControlInputs(None, 0.0, costs.step, costs.aggregation, limits)
        decision = Decision(tau, Reason.START)
        for _ in range(_DOUBLINGS):
            decision = controller.next(decision, inputs)
        return decision.tau

    @property
    def budget(self) -> Budget:
        return self.meters.budget

    @property
    def site_names(self) -> tuple[str, ...]:
        """Name of each node, if the nodes are the sites of the data."""
        partition = self.settings.partition
        natural = partition is not None and Partition.parse(partition).natural
        return self.dataset.sites if natural else ()

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
