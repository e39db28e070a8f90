"""Generates the reference of options that do not work together, as Markdown.

    python docs/compatibility.py        # prints the page

The page contains the rows of `fedbudget.settings.compatibility.CONFLICTS`.
"""

from itertools import groupby

from fedbudget.errors import UserError, flag
from fedbudget.settings.compatibility import CONFLICTS, Conflict

_INTRODUCTION = """# Options that work together

Each option below conflicts with others. All other combinations of options work together.
`fedbudget` checks the options before it reads data or creates a folder, and reports all
conflicts at once.

Options are spelled as on the command line. The setting `step_size` of Python is
`--step-size` there. `--engine` is `network` with `fedbudget serve` and `fedbudget local`,
`flower` on Flower, and `in-process` with `fedbudget compare` and `fedbudget sweep`.

Some conflicts depend on samples, on the model or on objects that you pass from Python.
They are not listed here.
"""


def markdown() -> str:
    """Return the whole page."""
    lines = [_INTRODUCTION]
    rows = sorted(CONFLICTS, key=lambda row: row.options[0])
    for option, conflicts in groupby(rows, key=lambda row: row.options[0]):
        lines += [f"## {flag(option)}", "", "| value | conflicts with | reason |"]
        lines += ["|---|---|---|", *map(_row, conflicts), ""]
    return "\n".join(lines)


def _row(row: Conflict) -> str:
    first, *others = row.conditions
    conflicts = "; ".join(f"`{each.option}` {each.words}" for each in others)
    values = {each.option: each.words for each in row.conditions}
    reason = row.message(**values, rule=values.get("update"))
    return f"| {_spelled(first.words)} | {_spelled(conflicts)} | {_spelled(reason)} |"


def _spelled(text: str) -> str:
    """Spell options as on the command line, in code font."""
    return UserError(text).spelled(lambda name: f"`{flag(name)}`").replace("|", "\\|")


if __name__ == "__main__":
    print(markdown())
