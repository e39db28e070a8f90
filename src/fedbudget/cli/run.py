"""`fedbudget run`.

What commands that can go on with a run have in common.

`fedbudget tasks`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbudget import tasks as known
from fedbudget.cli.options import (
    RESUME,
    EngineOptions,
    Given,
    OutputOptions,
    command,
    settings_from,
)
from fedbudget.errors import UserError
from fedbudget.settings.option import option
from fedbudget.settings.settings import Settings


@command
def run(
    *,
    given: Given,
    resume: Path | None = RESUME,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Train under a budget, and keep a record of it.

    Where it has come to is saved every second or so: after a crash, or with more budget, --resume goes on from there.

    Examples:

      fedbudget run --case 2 --budget time=15s

      fedbudget run --dataset homes.csv --model linear --budget time=1min --budget bytes=20MB

      fedbudget run --task cnn-mnist --case 4

      fedbudget run --budget time=10min --until accuracy=0.95 --until loss=0.1 --patience 50

      fedbudget run --nodes 100 --budget time=15s --budget privacy=4

      fedbudget run --nodes 5 --privacy-unit sample --budget time=15s --budget privacy=4

      fedbudget run --tau 10 --costs measured --budget time=5s --json

      fedbudget run --engine ray --nodes 100000 --partition draw:30 --rounds 20 --method paper

      fedbudget run --config runs/NAME/config.toml

      fedbudget run --resume runs/NAME --budget time=+10min
    """
    if resume is None:
        settings = settings_from(given)
        checkpoint = None
    else:
        settings, checkpoint = resumed_from(given, "run")

    from fedbudget.cli.view import make_run, preparing, print_result
    from fedbudget.launch.simulate import launch
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    address = engine.ray_address
    actors = engine.actors
    launched = launch(
        settings,
        engine=engine.engine,
        ray_address=address,
        actors=actors,
        resumed=checkpoint,
    )
    ray = (
        {"what": "starting Ray, and giving its processes their nodes"}
        if engine.engine == "ray"
        else {}
    )
    with preparing(launched, **ray) as prepared:
        result = make_run(prepared, output, trackers, folder=resume)
    print_result(result, json=output.json)


if TYPE_CHECKING:
    from fedbudget.runs.checkpoint import Checkpoint


def resumed_from(given: Mapping[str, Any], command: str) -> "tuple[Settings, Checkpoint]":
    """The settings and the checkpoint of the run to go on with; other settings than its own are refused."""
    from fedbudget.launch.resume import CHANGEABLE, load_resumed

    if any(given[name] is not None for name in ("out", "config", "task")):
        raise UserError(
            "`resume` goes on in the run's folder, with its settings: leave out `out`, `config` and `task`"
        )
    elsewhere: dict[str, Any] = {"budget": None}
    changeable = CHANGEABLE
    if (
        command == "serve"
    ):  # the dataset is of its own node; how many nodes to wait for may be another number now
        elsewhere |= {"dataset": None, "partition": None, "case": None}
        changeable |= {"nodes"}
    return load_resumed(
        given["resume"],
        lambda config: settings_from({**given, "config": config, **elsewhere}, command),
        given["budget"] or (),
        changeable=changeable,
    )


@command
def tasks(
    *,
    name: str | None = option(
        None,
        "Print this task's settings as a file.",
        argument=True,
        values=lambda _: known.names(),
    ),
) -> None:
    """List the paper's tasks, or print one as a file to change.

    Examples:

      fedbudget tasks

      fedbudget tasks svm-sgd-mnist > mine.toml && fedbudget run --config mine.toml
    """
    if name is not None:
        print(known.path(name).read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, known.names()))
    for each in known.names():
        print(f"{each.ljust(width)}  {known.title(each)}")
