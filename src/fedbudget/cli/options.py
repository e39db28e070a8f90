"""The options that commands share and that are not settings, each declared once; and how options become settings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any

from fedbudget import tasks
from fedbudget.errors import UserError
from fedbudget.option import REQUIRED, declarations, option
from fedbudget.setting_types import EngineName
from fedbudget.settings import Settings, defaults_of

_ONE_RUN = ("run", "serve", "local")


class Given(dict[str, Any]):
    """What was given on the command line, by name; None where it was not."""


def run_folders(start: str) -> list[str]:
    """Folders of runs whose path begins so."""
    configs = [glob(f"{escape(start)}{more}/config.toml") for more in ("*", "*/*")]  # noqa: PTH207, may be absolute
    return sorted(str(Path(path).parent) for paths in configs for path in paths)


RUN: Path = option(REQUIRED, "The folder of a run.", argument=True, values=run_folders)
OWN_MODEL: str | None = option(
    None,
    "Your own model, where it was given from Python or is elsewhere now: a Python file and a name in it, net.py:Net.",
    shown="as the run has it",
)
RESUME: Path | None = option(
    None,
    "Go on with this run, that was broken off or has finished; --budget time=+10min gives it more to spend.",
    "most used",
    values=run_folders,
)
JOBS: int | None = option(None, "How many runs at a time.", "engine", shown="one per core")


@dataclass(frozen=True)
class SourceOptions:
    """Where settings are taken from, and a short way to write one."""

    task: str | None = option(
        None,
        "Settings by a name, such as svm-sgd-mnist; see fedbudget tasks.",
        "most used",
        Settings.COMMANDS,
        values=lambda _: tasks.names(),
    )
    config: Path | None = option(
        None, "A TOML file with settings; options given here come first.", "most used", Settings.COMMANDS
    )
    case: int | None = option(
        None,
        "How data is spread: the paper's case 1, 2, 3 or 4; short for --partition case:N.",
        "most used",
        (*_ONE_RUN, "join"),
        shown="1",
    )


@dataclass(frozen=True)
class OutputOptions:
    """Where a run is written and shown."""

    out: Path | None = option(
        None,
        "The run's folder.",
        "most used",
        (*_ONE_RUN, "sweep", "compare"),
        shown="a new one in runs/",
        helps={
            "sweep": "The sweep's folder.  [default: sweeps/ and the file's name]",
            "compare": "With --rivals: the folder in which runs that are done are kept.  [default: sweeps/rivals]",
        },
    )
    track: tuple[str, ...] = option(
        (),
        "Where the run is followed too: mlflow or tensorboard; may be repeated.",
        "output",
        _ONE_RUN,
        values=("mlflow", "tensorboard"),
    )
    dashboard: bool = option(False, "Show the run in a web page while it is made.", "output", _ONE_RUN)
    json: bool = option(False, "Print one JSON object and nothing else.", "output")


@dataclass(frozen=True)
class EngineOptions:
    """What makes a run."""

    engine: EngineName = option("in-process", "What makes the run: in-process, or ray, on a cluster.", "engine")
    ray_address: str | None = option(
        None, "Of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto.", "engine", shown="this machine"
    )
    actors: int | None = option(
        None, "How many of Ray's processes share the nodes.", "engine", ("run",), shown="one per core"
    )

    def __post_init__(self) -> None:
        if self.ray_address is not None and self.engine != "ray":
            raise UserError("`ray_address` goes with `engine` ray")


def settings_from(given: Mapping[str, Any], command: str = "run", **more: Any) -> Settings:
    """Settings from a command's options: those of `--config` or `--task`, if any, and before them those given.

    Args:
      more: takes the place of what was given.
    """
    given, known = {**given, **more}, declarations(Settings)
    return Settings.combined(
        {name: known[name].converted(value, text=True) for name, value in was_given(given, known)},
        **dict(was_given(given, declarations(SourceOptions))),
        defaults=defaults_of(command),
    )


def was_given(given: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What was given, of these names."""
    return ((name, given[name]) for name in names if given.get(name) not in (None, [], ()))
