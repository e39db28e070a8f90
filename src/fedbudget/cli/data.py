"""`fedbudget data`: list, fetch and check the published datasets."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from fedbudget.cli.console import print_table
from fedbudget.cli.options import OutputOptions, command
from fedbudget.settings.option import REQUIRED, choices_text, option
from fedbudget.settings.settings import DATASETS, SMALL_DATASETS

if TYPE_CHECKING:
    from fedbudget.data.published import PublishedDataset

app = typer.Typer(help="List, fetch and check the published datasets.")

_EMBEDDED, *_FETCHED = [name for name in DATASETS if name not in SMALL_DATASETS]
_EMBEDDED_DATASET = {
    "name": _EMBEDDED,
    "title": "handwritten digits, 8x8",
    "samples": 1797,
    "where": "embedded",
    "complete": True,
    "files": {},
}
_NAME: str = option(REQUIRED, f"{choices_text(_FETCHED)}.", argument=True, values=_FETCHED)
_DATA_DIR: Path | None = option(
    None, "The folder of datasets.", shown="FEDBUDGET_DATA, or the cache folder"
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
    """List the published datasets. The contents of files are not checked.

    Examples:

      fedbudget data list

      fedbudget data list --data-dir ~/datasets --json
    """
    from fedbudget.data.published import PUBLISHED

    copies = [_local_copy(name, data_dir, contents=False) for name in PUBLISHED]
    if output.json:
        datasets = [_EMBEDDED_DATASET, *(copy.to_json() for copy in copies)]
        print(json.dumps({"datasets": datasets}))
        return

    headings = ("name", "title", "samples", "size", "files", "where")
    title = str(_EMBEDDED_DATASET["title"])
    samples = f"{_EMBEDDED_DATASET['samples']:,}"
    rows = [
        (_EMBEDDED, title, samples, "", "complete", "embedded"),
        *map(_cells, copies),
    ]
    print_table(headings, rows, left=("name", "title", "files", "where"), overflow="fold")
    for copy in copies:
        missing = copy.files_in_state(_MISSING)
        if copy.where is not None and missing:
            print(f"{copy.dataset.name} is incomplete: {', '.join(missing)} missing")


@app.command()
@command
def get(*, name: str = _NAME, data_dir: Path | None = _DATA_DIR) -> None:
    """Fetch a dataset from its publisher or a mirror.

    The contents of every file are checked. Files that are already there are not fetched
    again, and an interrupted download resumes.

    Examples:

      fedbudget data get mnist

      fedbudget data get cifar-10 --data-dir ~/datasets
    """
    if name == _EMBEDDED:
        print(f"{name} is embedded; there is nothing to fetch")
        return

    from fedbudget.cli.fetching import download_progress
    from fedbudget.data import published

    _, folder = published.data_folders(data_dir)[0]
    with download_progress() as progress:
        paths = published.get(name, folder, progress)
    print(f"{name} is in {published.container(paths)}")


@app.command()
@command
def check(
    *, name: str = _NAME, data_dir: Path | None = _DATA_DIR, output: OutputOptions
) -> None:
    """Check a dataset's files. The exit code is 0 if all are there and correct, else 1.

    Examples:

      fedbudget data check mnist

      fedbudget data check cifar-10 --data-dir ~/datasets --json
    """
    if name == _EMBEDDED:
        if output.json:
            print(json.dumps(_EMBEDDED_DATASET))
        else:
            print(f"{name} is embedded; there is nothing to check")
        return

    copy = _local_copy(name, data_dir, contents=True)
    if output.json:
        print(json.dumps(copy.to_json()))
    else:
        _print(copy)
    raise typer.Exit(0 if copy.complete else 1)


class _LocalCopy(NamedTuple):
    """The local files of a dataset.

    Args:
      dataset: as it was published.
      where: the folder or archive of the files; None without any file.
      files: whether each file is ok, missing, or has wrong contents.
      hint: advice to the user if there is no file.
    """

    dataset: "PublishedDataset"
    where: Path | None
    files: dict[str, str]
    hint: str = ""

    @property
    def complete(self) -> bool:
        return set(self.files.values()) == {_OK}

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.dataset.files)

    def files_in_state(self, state: str) -> list[str]:
        return [name for name, each in self.files.items() if each == state]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.dataset.name,
            "title": self.dataset.title,
            "samples": self.dataset.samples,
            "bytes": self.bytes,
            "licence": self.dataset.licence,
            "where": None if self.where is None else str(self.where),
            "complete": self.complete,
            "files": self.files,
        }


def _local_copy(name: str, data_dir: Path | None, *, contents: bool) -> _LocalCopy:
    from fedbudget.data.published import DatasetMissing, container, dataset_named, find

    dataset = dataset_named(name)
    states = dict.fromkeys((file.name for file in dataset.files), _MISSING)
    try:
        paths = find(name, data_dir)
    except DatasetMissing as error:
        return _LocalCopy(dataset, None, states, str(error))
    for file in dataset.files:
        if file.name in paths:
            correct = not contents or file.matches(paths[file.name])
            states[file.name] = _OK if correct else _WRONG
    return _LocalCopy(dataset, container(paths), states)


def _print(copy: _LocalCopy) -> None:
    width = max(map(len, copy.files))
    for file, state in copy.files.items():
        print(f"{file.ljust(width)}  {state}")
    if copy.where is None:
        print(f"fedbudget: {copy.hint}", file=sys.stderr)
    else:
        print(f"{copy.dataset.name} in {copy.where}: {_summary(copy)}")


def _summary(copy: _LocalCopy) -> str:
    total = len(copy.files)
    if copy.complete:
        return "complete, and all files are correct"
    if wrong := copy.files_in_state(_WRONG):
        return f"{len(wrong)} of {total} files have wrong contents; fetch them again"
    return (
        f"incomplete, {len(copy.files_in_state(_OK))} of {total} files; these are correct "
        f"and can be used; fetch the rest with: fedbudget data get {copy.dataset.name}"
    )


def _cells(copy: _LocalCopy) -> tuple[str, ...]:
    """Return the row of a dataset in the list."""
    files = f"{len(copy.files_in_state(_OK))} of {len(copy.files)}"
    megabytes = copy.bytes / 1e6
    size = f"{megabytes:,.0f} MB" if megabytes >= 1 else f"{megabytes * 1000:,.0f} kB"
    return (
        copy.dataset.name,
        copy.dataset.title,
        f"{copy.dataset.samples:,}",
        size,
        "complete" if copy.complete else files,
        "not found" if copy.where is None else str(copy.where),
    )
