"""Generates the command line reference, as Markdown, from the commands themselves.

    python docs/command_line.py        # prints the page

This file names no command or option: the page contains the texts of `--help`.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args

import typer

from fedbudget.cli.main import app
from fedbudget.settings.option import Group

_GROUPS = [*get_args(Group), "options"]
_DEFAULT = re.compile(r"\s*\\?\[default: (?P<value>.*)\]\s*$", re.DOTALL)


def markdown() -> str:
    """Return the whole page."""
    root = typer.main.get_command(app)
    lines = ["# Command line", "", *_paragraphs(root.help), ""]
    lines += ["| command | |", "|---|---|"]
    commands = list(_commands(root, "fedbudget"))
    for name, command in commands:
        lines.append(f"| [`{name}`](#{_anchor(name)}) | {_cell(_first(command.help))} |")
    codes = "Exit codes: 0 success, 1 failure, 2 invalid command, 130 interrupted."
    lines += ["", codes, ""]
    for name, command in commands:
        lines += _section(name, command)
    return "\n".join(lines)


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, including nested groups."""
    for part, command in group.commands.items():
        full = f"{name} {part}"
        if hasattr(command, "commands"):
            yield from _commands(command, full)
        else:
            yield full, command


def _section(name: str, command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [
        each
        for each in command.params
        if each.param_type_name == "option" and not each.hidden
    ]
    usage = " ".join(
        [
            name,
            *(["[OPTIONS]"] if options else []),
            *(_place(each) for each in arguments),
        ]
    )
    lines = [f"## {name} {{ #{_anchor(name)} }}", "", "```text", usage, "```", ""]
    lines += [*_paragraphs(command.help), ""]
    if arguments:
        lines += ["| argument | | default |", "|---|---|---|"]
        lines += [_row(f"`{each.name.upper()}`", each) for each in arguments]
        lines.append("")
    for group in dict.fromkeys(sorted(map(_group, options), key=_GROUPS.index)):
        lines += [f"| {group.capitalize()} | | default |", "|---|---|---|"]
        lines += [_row(_names(each), each) for each in options if _group(each) == group]
        lines.append("")
    return lines


def _group(option: Any) -> str:
    """Return the heading under which `--help` lists the option."""
    return getattr(option, "rich_help_panel", None) or "options"


def _place(argument: Any) -> str:
    text = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return text if argument.required else f"[{text}]"


def _names(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    kind = "" if option.is_flag else f" {option.type.name.upper()}"
    return " ".join(f"`{name}{kind}`" for name in names)


def _row(names: str, parameter: Any) -> str:
    """Return a table row: names, meaning and default."""
    text = parameter.help or ""
    found = _DEFAULT.search(text)
    default = found["value"] if found else ""
    if found:
        text = text[: found.start()]
    elif parameter.required:
        default = "required"
    elif (
        not parameter.is_eager
        and isinstance(parameter.default, str | int | float)
        and parameter.default is not False
    ):
        default = str(parameter.default)
    return f"| {names} | {_cell(text)} | {_cell(default)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _first(text: str | None) -> str:
    return inspect.cleandoc(text or "").split("\n\n")[0]


def _paragraphs(text: str | None) -> list[str]:
    """Convert a docstring to Markdown; indented parts become code blocks."""
    lines: list[str] = []
    for block in inspect.cleandoc(text or "").replace("\b\n", "").split("\n\n"):
        if not block.startswith("  "):
            lines += [block, ""]
        elif lines and lines[-1] == "```":
            lines[-1:] = [inspect.cleandoc(block), "```"]
        else:
            lines += ["```text", inspect.cleandoc(block), "```"]
    return lines


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


if __name__ == "__main__":
    print(markdown())
