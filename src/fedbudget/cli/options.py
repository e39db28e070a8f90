"""Options that commands share in addition to settings, and commands from declarations.

A decorated function becomes a command with the options that its arguments declare:

    @command
    def sweep(
        *, settings: Settings, jobs: int | None = option(None, ...), output: OutputOptions
    ) -> None: ...

An argument is an option, or a dataclass of options, of which the command has the fields
that name it. `Settings` also adds `--config`, `--task` and `--case`. A function that must
know which options were given takes `Given` instead.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import click
import typer
import typer.core

from fedbudget import tasks
from fedbudget.errors import flag
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.option import (
    REQUIRED,
    Declaration,
    Group,
    declarations,
    declared,
    option,
)
from fedbudget.settings.settings import Settings, require_chosen_code
from fedbudget.settings.types import EngineName

_ONE_RUN = ("run", "serve", "local")


class Given(dict[str, Any]):
    """Options of a command line by name; None for those that were not given."""


def run_folders(start: str) -> list[str]:
    """Return the folders of runs whose path starts with a text."""
    # The path may be absolute, which pathlib does not glob.
    configs = [glob(f"{escape(start)}{more}/config.toml") for more in ("*", "*/*")]  # noqa: PTH207
    return sorted(str(Path(path).parent) for paths in configs for path in paths)


RUN: Path = option(REQUIRED, "Folder of a run.", argument=True, values=run_folders)
OWN_MODEL: str | None = option(
    None,
    "Your own model as FILE:NAME, such as net.py:Net, if it was given from Python or has "
    "moved.",
    shown="the model of the run",
)
SITE: str | None = option(
    None,
    "Name of a node whose personal model to use, of a run with --personal.",
    shown="the global model",
)
RESUME: Path | None = option(
    None,
    "Folder of a run to resume; --budget time=+10min extends its budget.",
    "most used",
    values=run_folders,
)
JOBS: int | None = option(None, "Number of parallel runs.", "engine", shown="one per core")


@dataclass(frozen=True)
class SourceOptions:
    """Sources of settings, and a short form of one."""

    task: str | None = option(
        None,
        "Name of predefined settings, such as svm-sgd-mnist; see fedbudget tasks.",
        "most used",
        Settings.COMMANDS,
        values=lambda _: tasks.names(),
    )
    config: Path | None = option(
        None,
        "TOML file with settings; options on the command line override it.",
        "most used",
        Settings.COMMANDS,
    )
    case: int | None = option(
        None,
        "Distribution of data: case 1, 2, 3 or 4 of the paper; short for --partition "
        "case:N.",
        "most used",
        (*_ONE_RUN, "join"),
        shown="1",
    )


@dataclass(frozen=True)
class OutputOptions:
    """Output of a run."""

    out: Path | None = option(
        None,
        "Folder of the run.",
        "most used",
        (*_ONE_RUN, "sweep", "compare"),
        shown="a new one in runs/",
        helps={
            "sweep": "Folder of the sweep.  [default: sweeps/ and the name of the file]",
            "compare": "With --rivals, folder of finished runs.  [default: sweeps/rivals]",
        },
    )
    track: tuple[str, ...] = option(
        (),
        "Additional tracker: mlflow, tensorboard or wandb; may be repeated.",
        "output",
        _ONE_RUN,
        values=("mlflow", "tensorboard", "wandb"),
    )
    dashboard: bool = option(
        False, "Show the running run in a web page.", "output", _ONE_RUN
    )
    verbose: bool = option(
        False, "Show all columns of rounds.", "output", (*_ONE_RUN, "show")
    )
    json: bool = option(False, "Print one JSON object and nothing else.", "output")


@dataclass(frozen=True)
class EngineOptions:
    """Engine of a run."""

    engine: EngineName = option(
        "in-process", "Engine of the run: in-process, or ray for a cluster.", "engine"
    )
    ray_address: str | None = option(
        None,
        "Address of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto.",
        "engine",
        shown="this machine",
    )
    actors: int | None = option(
        None,
        "Number of Ray processes that share the nodes.",
        "engine",
        ("run",),
        shown="one per core",
    )

    def __post_init__(self) -> None:
        require_compatible(**vars(self))


def settings_from(given: Mapping[str, Any], command: str = "run", **more: Any) -> Settings:
    """Merge the options of a command with `--config` or `--task`, which they override.

    Args:
      more: values that replace given ones.
    """
    given = {**given, **more}
    sources = dict(_given_values(given, declarations(SourceOptions)))
    values = _converted(declarations(Settings), given)
    settings = Settings.combined(values, **sources, command=command)
    config = sources.get("config")
    if config is not None and (config.parent / "rounds.jsonl").exists():
        require_chosen_code(config.parent, settings, values)  # a run, perhaps of others
    return settings


def _given_values(
    given: Mapping[str, Any], options: Mapping[str, Declaration]
) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command line; a flag that is absent is none of them."""
    for name, own in options.items():
        value = given.get(name)
        absent = value is False and own.default is False
        if value not in (None, [], ()) and not absent:
            yield name, value


def parameter(declared: Declaration, command: str) -> inspect.Parameter:
    """Return the parameter of a command; None, or False for a flag, if it is not given."""
    kind: Any = declared.kinds[0] if declared.kinds and not declared.words else str
    if declared.listed:  # texts may contain commas, so each is a separate option
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
    """Command whose help shows options in groups, the most used first."""

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
    """Return the function that completes a prefix to one of the values."""

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
    shown = None if command in option.defaults else option.shown
    return f"{option.help}  [default: {shown or _text(default)}]"


def _text(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Convert a function to the form of Typer, with one parameter for each option."""
    name = function.__name__
    hints = get_type_hints(function, include_extras=True)
    own: dict[str, Declaration] = {}  # options that are arguments themselves
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
        values = {part: _part(cls, name, given) for part, cls in parts.items()}
        values |= {option: each.default for option, each in own.items()}
        function(**values | _converted(own, given))

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


def _part(cls: Any, command: str, given: Mapping[str, Any]) -> Any:
    if cls is Given:
        return Given(given)
    if cls is Settings:
        return settings_from(given, command)
    return cls(**_converted(declarations(cls), given))


def _converted(
    options: Mapping[str, Declaration], given: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        name: options[name].converted(value, text=True)
        for name, value in _given_values(given, options)
    }
