"""Resume a run in its folder, from its last checkpoint, with its own settings.

Only limits may change: those of the budget (for the same resources), the number of rounds
and the targets, and the number of evaluations. Model and data must be the same.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedbudget import python_file
from fedbudget.budget.budget import Budget
from fedbudget.engines.remote.task import Task
from fedbudget.errors import UserError
from fedbudget.launch.inputs import TrainingInputs, require_known_model, with_resolved_files
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import NOTHING, Overrides, fingerprint
from fedbudget.models.base import Model
from fedbudget.models.description import describe
from fedbudget.protocol.messages import LocalError
from fedbudget.runs import folder
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import CONFIG, Run
from fedbudget.settings.compatibility import BASELINES
from fedbudget.settings.settings import Settings, require_chosen_code
from fedbudget.settings.types import EngineName

CHANGEABLE: frozenset[str] = frozenset(
    {"budget", "rounds", "until", "patience", "evaluations"}
)
"""Settings that a resumed run may change."""


def load_resumed(
    path: Path,
    settings_from: Callable[[Path], Settings],
    more: Sequence[str] = (),
    overrides: Overrides = NOTHING,
    *,
    given: Container[str] = (),
    changeable: frozenset[str] = CHANGEABLE,
) -> tuple[Settings, Checkpoint]:
    """Return the settings and the checkpoint of a run to resume.

    Args:
      settings_from: returns the requested settings, from the file of the run and the values
        given now, without the budget.
      more: limits in the form of `Budget.extended`.
      given: names of the settings that the caller passed now. Code of a custom model or
        dataset runs only if its file is among them.
      changeable: settings that may change.
    """
    run = Run.open(path)
    folder.require_free(path)  # checked again when the run is written
    budget = run.settings.limits().extended(more)
    settings = with_resolved_files(settings_from(path / CONFIG))
    if more:
        settings = replace(settings, budget=budget.texts)
    if "dataset" in given:
        settings = replace(settings, dataset=python_file.resolved(settings.dataset))
    require_same_settings(path, run.settings, settings, changeable)
    require_chosen_code(path, run.settings, given)
    if overrides.model is None and settings.model is not None:
        require_known_model(path, settings.model)
    method = None
    if settings.method not in BASELINES:
        method = build_method(settings, overrides)
    checkpoint = Checkpoint.load(path, method)
    _require_not_spent(replace(budget, delta=settings.privacy_delta), checkpoint)
    finished = run.summary is not None and run.summary.get("status") == "finished"
    unchanged = settings == replace(run.settings, evaluations=settings.evaluations)
    extended = checkpoint.conditions.extended_by(budget.limits, settings.rounds)
    if finished and not extended and (unchanged or checkpoint.state.phase == "done"):
        raise UserError(
            f"{path}: the run has finished; to resume it, extend `budget`, such as "
            "time=+10min"
        )
    return settings, checkpoint


def require_same_settings(
    path: Path, saved: Settings, wanted: Settings, changeable: frozenset[str] = CHANGEABLE
) -> None:
    """Refuse settings that differ from those of the run."""
    for name, before in vars(saved).items():
        now = getattr(wanted, name)
        if now != before and name not in changeable:
            option = name.replace("_", "-")
            raise UserError(
                f"{path} resumes with its own settings: {option} is {before} there, and "
                f"cannot become {now}"
            )


def require_engine(checkpoint: Checkpoint, engine: EngineName) -> None:
    """Refuse an engine other than that of the run."""
    made_by = checkpoint.engine.get("engine")
    if made_by == engine:
        return
    commands = {
        "network": "fedbudget serve",
        "ray": "fedbudget run with `engine` ray",
        "in-process": "fedbudget run without `engine`",
    }
    raise UserError(
        f"the run used engine {made_by}; to resume it, use "
        f"{commands.get(made_by, 'that engine')}"
    )


def require_same_data(inputs: TrainingInputs, checkpoint: Checkpoint) -> None:
    """Refuse a model or samples that have changed since the run started."""
    if fingerprint(inputs.train, inputs.test) != checkpoint.conditions.data:
        raise UserError(
            f"{inputs.dataset.name} has changed since the run started: it cannot resume "
            "with other samples"
        )
    size = checkpoint.state.w.size
    if inputs.model.parameters != size:
        raise UserError(
            f"the run to resume trains {size} parameters, but {inputs.model.name} has "
            f"{inputs.model.parameters}"
        )


def require_same_model(task: Task, own: Model | None) -> None:
    """Refuse a custom model that differs from the one that nodes received."""
    if own is None or isinstance(task.model, str):
        return
    if difference := describe(own).difference(task.model, "now", "in the run to resume"):
        raise UserError(f"{own.name} has changed since the run started: {difference}")


@contextmanager
def recalling(what: str) -> Iterator[None]:
    """Raise UserError that names the part of a checkpoint that cannot be used."""
    try:
        yield
    except (LocalError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint does not contain {what}: {error}") from None


def _require_not_spent(budget: Budget, checkpoint: Checkpoint) -> None:
    if len(budget.resources) != len(checkpoint.state.ledger.spent):
        return  # the aggregator refuses other resources
    for resource, spent in zip(
        budget.resources, budget.totals(checkpoint.state.ledger.spent).values(), strict=True
    ):
        before = checkpoint.conditions.limits.get(resource.name)
        if (limit := budget.limits[resource.name]) < spent and limit != before:
            raise UserError(
                f"budget {resource.name}={resource.format(limit)} is below the "
                f"{resource.format(spent)} already spent"
            )
