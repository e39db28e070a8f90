"""A run that goes on: what it is taken from, and what must be as it was.

It goes on in its folder, from its last checkpoint, with its own settings. Only limits may be others (the budget's, of
the same resources, the number of rounds, and targets), and how often accuracy is looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedbudget.budget.budget import Budget
from fedbudget.engines.remote.task import Task
from fedbudget.errors import UserError
from fedbudget.launch.inputs import TrainingInputs, require_known_model, with_resolved_model
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import NOTHING, Overrides, fingerprint
from fedbudget.models.base import Model
from fedbudget.models.description import describe
from fedbudget.protocol.messages import LocalError
from fedbudget.runs import folder
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import CONFIG, Run
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import EngineName

CHANGEABLE: frozenset[str] = frozenset(
    {"budget", "rounds", "until", "patience", "evaluations"}
)
"""Settings that may be others when a run goes on."""


def load_resumed(
    path: Path,
    asked: Callable[[Path], Settings],
    more: Sequence[str] = (),
    overrides: Overrides = NOTHING,
    *,
    changeable: frozenset[str] = CHANGEABLE,
) -> tuple[Settings, Checkpoint]:
    """The settings and the checkpoint of the run to go on with.

    Args:
      asked: gives the settings that are asked for, those of a file where nothing else is; without the budget.
      more: limits, as `Budget.extended` reads them.
      changeable: the settings that may be others now.
    """
    run = Run.open(path)
    folder.require_free(path)  # before anyone waits for nodes; who writes looks again
    budget = run.settings.limits().extended(more)
    settings = with_resolved_model(asked(path / CONFIG))
    if more:
        settings = replace(settings, budget=budget.texts)
    require_same_settings(path, run.settings, settings, changeable)
    if overrides.model is None and settings.model is not None:
        require_known_model(path, settings.model)
    checkpoint = Checkpoint.load(path, build_method(settings, overrides))
    _require_not_spent(replace(budget, delta=settings.privacy_delta), checkpoint)
    finished = run.summary is not None and run.summary.get("status") == "finished"
    same = (
        settings == replace(run.settings, evaluations=settings.evaluations)
        or checkpoint.state.phase == "done"
    )
    if (
        finished
        and same
        and not checkpoint.conditions.extended_by(budget.limits, settings.rounds)
    ):
        raise UserError(
            f"{path}: the run has finished; to go on it needs more `budget`, such as time=+10min"
        )
    return settings, checkpoint


def require_same_settings(
    path: Path, saved: Settings, wanted: Settings, changeable: frozenset[str] = CHANGEABLE
) -> None:
    """Refuses to go on with a run by other settings than its own."""
    for name, before in vars(saved).items():
        now = getattr(wanted, name)
        if now != before and name not in changeable:
            option = name.replace("_", "-")
            raise UserError(
                f"{path} goes on as it began: {option} is {before} there, and cannot be {now} now"
            )


def require_engine(checkpoint: Checkpoint, engine: EngineName) -> None:
    """Refuses to go on with a run by another engine than its own."""
    made_by = checkpoint.engine.get("engine")
    if made_by == engine:
        return
    how = {
        "network": "fedbudget serve",
        "ray": "fedbudget run and `engine` ray",
        "in-process": "fedbudget run alone",
    }
    raise UserError(
        f"the run was made by engine {made_by}; to go on with it, use {how.get(made_by, 'that')}"
    )


def require_same_data(inputs: TrainingInputs, checkpoint: Checkpoint) -> None:
    """Refuses to go on with another model than the run's, or with samples that have changed since."""
    if fingerprint(inputs.train, inputs.test) != checkpoint.conditions.data:
        raise UserError(
            f"{inputs.dataset.name} has changed since the run began: it cannot go on with other samples"
        )
    if (own := inputs.model.parameters) != (size := checkpoint.state.w.size):
        raise UserError(
            f"the run that is to go on trains {size} parameters, and {inputs.model.name} has {own}"
        )


def require_same_model(task: Task, own: Model | None) -> None:
    """Refuses to go on with another model of a person's own than the one that nodes were told of."""
    if own is None or isinstance(task.model, str):
        return
    if difference := describe(own).difference(
        task.model, "now", "in the run that is to go on"
    ):
        raise UserError(f"{own.name} is another model than it was: {difference}")


@contextmanager
def recalling(what: str) -> Iterator[None]:
    """Says in words what of a checkpoint cannot be used."""
    try:
        yield
    except (LocalError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint does not say {what}: {error}") from None


def _require_not_spent(budget: Budget, checkpoint: Checkpoint) -> None:
    if len(budget.resources) != len(checkpoint.state.ledger.spent):
        return  # which the aggregator refuses
    for resource, spent in zip(
        budget.resources, budget.totals(checkpoint.state.ledger.spent).values(), strict=True
    ):
        before = checkpoint.conditions.limits.get(resource.name)
        if (limit := budget.limits[resource.name]) < spent and limit != before:
            raise UserError(
                f"budget {resource.name}={resource.format(limit)} is below what was spent, {resource.format(spent)}"
            )
