"""Declared options as Typer's parameters: names, kinds, help with the default, and what a shell completes."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import click
import typer
import typer.core

from fedbudget.errors import flag
from fedbudget.option import Declaration, Group


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
        if all(getattr(each, "rich_help_panel", None) != "most used" for each in self.params):
            super().format_options(ctx, formatter)
            return
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in ("arguments", *get_args(Group), "options")}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                groups[getattr(each, "rich_help_panel", None) or f"{each.param_type_name}s"].append(record)
        for group, records in groups.items():
            if records:
                with formatter.section(group.capitalize()):
                    formatter.write_dl(records)


def completion(values: Sequence[str] | Callable[[str], Sequence[str]]) -> Callable[[str], list[str]]:
    """What completes one of these values, or of those found from how they begin."""

    def complete(incomplete: str) -> list[str]:
        return [each for each in (values(incomplete) if callable(values) else values) if each.startswith(incomplete)]

    return complete


def _about(declared: Declaration, command: str) -> Any:
    option, names = declared.option, flag(declared.name)
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
    if option.shown is None and (declared.required or default is None or default is False or default == ()):
        return option.help
    return f"{option.help}  [default: {option.shown or _text(default)}]"


def _text(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
