"""The reference of the command line, as Markdown, from the commands themselves.

    python docs/command_line.py        # prints it

Nothing here knows a command or an option by its name: what `--help` says is what the page says.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args

import typer

from fedbudget.cli.main import app
from fedbudget.option import Group

_GROUPS = [*get_args(Group), "options"]
_DEFAULT = re.compile(r"\s*\\?\[default: (?P<value>.*)\]\s*$", re.DOTALL)


def markdown() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    lines = ["# Command line", "", *_paragraphs(root.help), ""]
    lines += ["| command | |", "|---|---|"]
    commands = list(_commands(root, "fedbudget"))
    for name, command in commands:
        lines.append(f"| [`{name}`](#{_anchor(name)}) | {_cell(_first(command.help))} |")
    lines += ["", "Exit codes: 0 done, 1 the work failed, 2 the command was wrong.", ""]
    for name, command in commands:
        lines += _section(name, command)
    return "\n".join(lines)


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands that do something, those of groups within groups included."""
    for part, command in group.commands.items():
        full = f"{name} {part}"
        if hasattr(command, "commands"):
            yield from _commands(command, full)
        else:
            yield full, command


def _section(name: str, command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *(_place(each) for each in arguments)])
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
    """What the option belongs to, in help and here."""
    return getattr(option, "rich_help_panel", None) or "options"


def _place(argument: Any) -> str:
    text = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return text if argument.required else f"[{text}]"


def _names(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    kind = "" if option.is_flag else f" {option.type.name.upper()}"
    return " ".join(f"`{name}{kind}`" for name in names)


def _row(names: str, parameter: Any) -> str:
    """What it means and, in a column of its own, what holds where it is not given."""
    said = parameter.help or ""
    found = _DEFAULT.search(said)
    default = found["value"] if found else ""
    if found:
        said = said[: found.start()]
    elif parameter.required:
        default = "required"
    elif not parameter.is_eager and isinstance(parameter.default, str | int | float) and parameter.default is not False:
        default = str(parameter.default)
    return f"| {names} | {_cell(said)} | {_cell(default)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _first(text: str | None) -> str:
    return inspect.cleandoc(text or "").split("\n\n")[0]


def _paragraphs(text: str | None) -> list[str]:
    """A docstring; what is indented in it are commands and files, and stays as it is."""
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
