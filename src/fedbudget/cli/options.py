"""The options that commands share and that are not settings, each declared once; and how options become settings.

Declared options as Typer's parameters: names, kinds, help with the default, and what a shell completes.

Commands from declarations: a function becomes a command that has the options which its arguments declare.

    @command
    def sweep(*, settings: Settings, jobs: int | None = option(None, ...), output: OutputOptions) -> None: ...

An argument is an option itself, or a dataclass of options, of which a command has those fields that say so; what is not
given is left to the default. `Settings` come with what they can be taken from, `--config`, `--task` and `--case`; a
function that has to know what was given and what was not takes `Given` in their place.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import click
import typer
import typer.core

from fedbudget import tasks
from fedbudget.errors import UserError, flag
from fedbudget.settings.option import (
    REQUIRED,
    Declaration,
    Group,
    declarations,
    declared,
    option,
)
from fedbudget.settings.settings import Settings, defaults_of
from fedbudget.settings.types import EngineName

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
        None,
        "A TOML file with settings; options given here come first.",
        "most used",
        Settings.COMMANDS,
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
    dashboard: bool = option(
        False, "Show the run in a web page while it is made.", "output", _ONE_RUN
    )
    json: bool = option(False, "Print one JSON object and nothing else.", "output")


@dataclass(frozen=True)
class EngineOptions:
    """What makes a run."""

    engine: EngineName = option(
        "in-process", "What makes the run: in-process, or ray, on a cluster.", "engine"
    )
    ray_address: str | None = option(
        None,
        "Of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto.",
        "engine",
        shown="this machine",
    )
    actors: int | None = option(
        None,
        "How many of Ray's processes share the nodes.",
        "engine",
        ("run",),
        shown="one per core",
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
        {
            name: known[name].converted(value, text=True)
            for name, value in was_given(given, known)
        },
        **dict(was_given(given, declarations(SourceOptions))),
        defaults=defaults_of(command),
    )


def was_given(given: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What was given, of these names."""
    return ((name, given[name]) for name in names if given.get(name) not in (None, [], ()))


def parameter(declared: Declaration, command: str) -> inspect.Parameter:
    """The parameter of a command's function; None, or False for a flag, is what it is where it is not given."""
    kind: Any = declared.kinds[0] if declared.kinds and not declared.words else str
    if declared.listed:  # texts may hold commas, so these are given one at a time
        kind = {tuple[str, ...]: list[str], tuple[Path, ...]: list[Path]}.get(kind, str)
    default: Any = False if declared.default is False else None
    if not declared.required and default is None:
        kind = kind | None
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if declared.required else default,
        annotation=Annotated[kind, _about(declared, command)],
    )


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help has options in groups, those that most people need first; few options need no groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if all(
            getattr(each, "rich_help_panel", None) != "most used" for each in self.params
        ):
            super().format_options(ctx, formatter)
            return
        groups: dict[str, list[tuple[str, str]]] = {
            group: [] for group in ("arguments", *get_args(Group), "options")
        }
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                groups[
                    getattr(each, "rich_help_panel", None) or f"{each.param_type_name}s"
                ].append(record)
        for group, records in groups.items():
            if records:
                with formatter.section(group.capitalize()):
                    formatter.write_dl(records)


def completion(
    values: Sequence[str] | Callable[[str], Sequence[str]],
) -> Callable[[str], list[str]]:
    """What completes one of these values, or of those found from how they begin."""

    def complete(incomplete: str) -> list[str]:
        return [
            each
            for each in (values(incomplete) if callable(values) else values)
            if each.startswith(incomplete)
        ]

    return complete


def _about(declared: Declaration, command: str) -> Any:
    option = declared.option
    names = flag(declared.name)
    about: dict[str, Any] = {"help": _help(declared, command), "show_default": False}
    if option.values or declared.words:
        about["autocompletion"] = completion(option.values or declared.words)
    if option.argument:
        return typer.Argument(**about)
    if declared.kinds == (bool,) and declared.default is not False:
        names += f"/--no-{names.removeprefix('--')}"
    return typer.Option(names, rich_help_panel=option.group, **about)


def _help(declared: Declaration, command: str) -> str:
    option = declared.option
    default = option.defaults.get(command, declared.default)
    if command in option.helps:
        return option.helps[command]
    if option.shown is None and (
        declared.required or default is None or default is False or default == ()
    ):
        return option.help
    return f"{option.help}  [default: {option.shown or _text(default)}]"


def _text(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as Typer wants it, with an argument for each option."""
    name = function.__name__
    hints = get_type_hints(function, include_extras=True)
    own: dict[str, Declaration] = {}  # options that are arguments of the function
    parts: dict[str, Any] = {}
    options: list[Declaration] = []
    for each in inspect.signature(function).parameters.values():
        if isinstance(each.default, Field):
            own[each.name] = declared(each.name, hints[each.name], each.default)
            options.append(own[each.name])
        else:
            parts[each.name] = hints[each.name]
            options += _options(hints[each.name])

    def called(**given: Any) -> None:
        made = {part: _made(cls, name, given) for part, cls in parts.items()}
        function(
            **made,
            **{option: each.default for option, each in own.items()}
            | _converted(own, given),
        )

    parameters = [parameter(each, name) for each in options if each.within(name)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__name__ = name
    called.__doc__ = function.__doc__
    return called


def _options(cls: Any) -> list[Declaration]:
    classes: tuple[Any, ...] = (
        (Settings, SourceOptions) if cls in (Settings, Given) else (cls,)
    )
    return [option for each in classes for option in declarations(each).values()]


def _made(cls: Any, command: str, given: Mapping[str, Any]) -> Any:
    if cls is Given:
        return Given(given)
    return (
        settings_from(given, command)
        if cls is Settings
        else cls(**_converted(declarations(cls), given))
    )


def _converted(
    options: Mapping[str, Declaration], given: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        name: options[name].converted(value, text=True)
        for name, value in was_given(given, options)
    }
