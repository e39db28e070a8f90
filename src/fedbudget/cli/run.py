"""`fedbudget run` and `fedbudget tasks`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbudget import tasks as predefined
from fedbudget.cli.options import (
    RESUME,
    EngineOptions,
    Given,
    OutputOptions,
    command,
    settings_from,
)
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.option import option
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.runs.checkpoint import Checkpoint

_NODE_DATA = ("dataset", "partition", "case")
"""Options that describe the data of the node inside an aggregator, not the run."""


@command
def run(
    *,
    given: Given,
    resume: Path | None = RESUME,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Train a model under a budget, with simulated nodes.

    The run is written to a folder, with a checkpoint about every second. After a crash, or
    to spend more, continue it with --resume.

    Examples:

      fedbudget run --case 2 --budget time=15s

      fedbudget run --dataset homes.csv --budget time=1min --budget bytes=20MB

      fedbudget run --dataset heart-disease --budget time=5s

      fedbudget run --dataset patients.csv --partition by:hospital --target outcome

      fedbudget run --task cnn-mnist --case 4

      fedbudget run --budget time=10min --until accuracy=0.95 --until loss=0.1 --patience 50

      fedbudget run --dataset heart-disease --budget time=5s --personal

      fedbudget run --nodes 100 --budget time=15s --budget privacy=4

      fedbudget run --nodes 5 --privacy-unit sample --budget time=15s --budget privacy=4

      fedbudget run --tau 10 --costs measured --budget time=5s --json

      fedbudget run --engine ray --nodes 100000 --partition draw:30 --rounds 20

      fedbudget run --config runs/NAME/config.toml

      fedbudget run --resume runs/NAME --budget time=+10min
    """
    settings, checkpoint = run_settings(given, "run")

    from fedbudget.cli.view import finish, make_run, preparing
    from fedbudget.launch.simulate import launch
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    launched = launch(settings, **vars(engine), resumed=checkpoint)
    notice = {"what": "starting Ray and its processes"} if engine.engine == "ray" else {}
    with preparing(launched, **notice) as prepared:
        result = make_run(prepared, output, trackers, folder=resume)
    finish(result, json=output.json)


def run_settings(
    given: Mapping[str, Any], command: str
) -> "tuple[Settings, Checkpoint | None]":
    """Return the settings of a new run, or those of a resumed one and its checkpoint."""
    replaced = dict.fromkeys(_NODE_DATA) if command == "serve" else {}
    if given["resume"] is None:
        return settings_from(given, command, **replaced), None

    from fedbudget.launch.resume import CHANGEABLE, load_resumed

    require_compatible(
        **{name: given[name] for name in ("resume", "out", "config", "task")}
    )
    return load_resumed(
        given["resume"],
        lambda config: settings_from(
            {**given, **replaced, "config": config, "budget": None}, command
        ),
        given["budget"] or (),
        given={name for name, value in given.items() if value is not None},
        changeable=CHANGEABLE | {"nodes"} if command == "serve" else CHANGEABLE,
    )


@command
def tasks(
    *,
    name: str | None = option(
        None,
        "Task whose settings to print as a file.",
        argument=True,
        values=lambda _: predefined.names(),
    ),
) -> None:
    """List the predefined tasks, or print one as a file.

    Examples:

      fedbudget tasks

      fedbudget tasks svm-sgd-mnist > mine.toml && fedbudget run --config mine.toml
    """
    if name is not None:
        print(predefined.path(name).read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, predefined.names()))
    for each in predefined.names():
        print(f"{each.ljust(width)}  {predefined.title(each)}")
