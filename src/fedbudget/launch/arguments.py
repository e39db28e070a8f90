"""What a program asks for from Python: arguments become settings, objects that take the place of what settings name,
and where to go on from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbudget.control import Controller
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError
from fedbudget.launch.inputs import own_name
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.resume import CHANGEABLE, load_resumed
from fedbudget.models.own import as_model
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.update import UpdateRule
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.setting_types import SettingsOptions
from fedbudget.settings import Settings
from fedbudget.step_size import StepSize

if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel


@dataclass(frozen=True)
class RunArguments:
    """A run that is asked for.

    Args:
      out: its folder, if it is to have one.
      resumed: where it goes on from, if it does.
    """

    settings: Settings
    overrides: Overrides
    out: Path | None
    resumed: Checkpoint | None


def read_arguments(
    *,
    command: str,
    task: str | None,
    model: "str | OwnModel | None",
    budget: str | Sequence[str] | None,
    until: str | Sequence[str] | None,
    controller: Controller | None,
    step_size: float | str | StepSize | None,
    update: str | UpdateRule | None,
    combine: str | CombineRule | None,
    out: str | Path | None,
    resume: str | Path | None,
    options: SettingsOptions,
    case: int | None = None,
    dataset: str | Dataset | None = None,
    changeable: frozenset[str] = CHANGEABLE,
) -> RunArguments:
    """What a call of `fedbudget.train` or `fedbudget.serve` asks for.

    Args:
      command: the command that does the same, whose defaults are taken.
      changeable: settings that may be others when a run goes on.
    """
    own = None if isinstance(model, str | None) else as_model(model, device=options.get("device", "auto"))
    eta, own_step_size = (step_size, None) if isinstance(step_size, int | float | str | None) else (None, step_size)
    overrides = Overrides(
        dataset=dataset if isinstance(dataset, Dataset) else None,
        model=own,
        controller=controller,
        step_size=own_step_size,
        update=None if isinstance(update, str) else update,
        combine=None if isinstance(combine, str) else combine,
    )

    named: Any = {**options, "combine": combine} if isinstance(combine, str) else options

    def settings_with(**more: Any) -> Settings:
        return Settings.from_python(
            command=command,
            task=task,
            case=case,
            model=own_name(own) if own is not None else model if isinstance(model, str) else None,
            dataset=dataset.name if isinstance(dataset, Dataset) else dataset,
            until=until,
            step_size=eta,
            update=update if isinstance(update, str) else None,
            **more,
            **named,
        )

    if resume is None:
        return RunArguments(settings_with(budget=budget), overrides, None if out is None else Path(out), None)
    if out is not None or task is not None:
        raise UserError("`resume` goes on in the run's folder, with its settings; give neither `out` nor `task`")
    folder, limits = Path(resume), (budget,) if isinstance(budget, str) else budget or ()
    settings, resumed = load_resumed(
        folder, lambda config: settings_with(config=config), limits, overrides, changeable=changeable
    )
    return RunArguments(settings, overrides, folder, resumed)
