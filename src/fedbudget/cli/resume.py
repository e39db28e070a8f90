"""What commands that can go on with a run have in common."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbudget.cli.options import settings_from
from fedbudget.errors import UserError
from fedbudget.settings import Settings

if TYPE_CHECKING:
    from fedbudget.runs.checkpoint import Checkpoint


def resumed_from(given: Mapping[str, Any], command: str) -> "tuple[Settings, Checkpoint]":
    """The settings and the checkpoint of the run to go on with; other settings than its own are refused."""
    from fedbudget.launch.resume import CHANGEABLE, load_resumed

    if any(given[name] is not None for name in ("out", "config", "task")):
        raise UserError("`resume` goes on in the run's folder, with its settings: leave out `out`, `config` and `task`")
    elsewhere: dict[str, Any] = {"budget": None}
    changeable = CHANGEABLE
    if command == "serve":  # the dataset is of its own node; how many nodes to wait for may be another number now
        elsewhere |= {"dataset": None, "partition": None, "case": None}
        changeable |= {"nodes"}
    return load_resumed(
        given["resume"],
        lambda config: settings_from({**given, "config": config, **elsewhere}, command),
        given["budget"] or (),
        changeable=changeable,
    )
