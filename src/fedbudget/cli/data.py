"""`fedbudget data`: list, fetch and check the published datasets."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from fedbudget.cli.console import print_table
from fedbudget.cli.options import OutputOptions, command
from fedbudget.settings.option import REQUIRED, choices_text, option
from fedbudget.settings.settings import DATASETS, SMALL_DATASETS

app = typer.Typer(help="List, fetch and check the published datasets.")

_EMBEDDED, *_FETCHED = [name for name in DATASETS if name not in SMALL_DATASETS]
_EMBEDDED_DATASET: dict[str, Any] = {
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

    datasets = [_EMBEDDED_DATASET]
    datasets += [_described(name, data_dir, contents=False) for name in PUBLISHED]
    if output.json:
        print(json.dumps({"datasets": datasets}))
        return

    headings = ("name", "title", "samples", "size", "files", "where")
    left = ("name", "title", "files", "where")
    print_table(headings, map(_cells, datasets), left=left, overflow="fold")
    for dataset in datasets:
        missing = _in_state(dataset, _MISSING)
        if dataset["where"] is not None and missing:
            print(f"{dataset['name']} is incomplete: {', '.join(missing)} missing")


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

    described = _described(name, data_dir, contents=True)
    if output.json:
        print(json.dumps(described))
    else:
        _print(described, data_dir)
    raise typer.Exit(0 if described["complete"] else 1)


def _described(name: str, data_dir: Path | None, *, contents: bool) -> dict[str, Any]:
    """Return a dataset and the state of its local files.

    Args:
      contents: whether to check the contents of files.
    """
    from fedbudget.data.published import DatasetMissing, container, dataset_named, find

    dataset = dataset_named(name)
    files = dict.fromkeys((file.name for file in dataset.files), _MISSING)
    where = None
    with suppress(DatasetMissing):
        paths = find(name, data_dir)
        where = str(container(paths))
        for file in dataset.files:
            if file.name in paths:
                correct = not contents or file.matches(paths[file.name])
                files[file.name] = _OK if correct else _WRONG
    return {
        "name": dataset.name,
        "title": dataset.title,
        "samples": dataset.samples,
        "bytes": sum(file.size for file in dataset.files),
        "licence": dataset.licence,
        "where": where,
        "complete": set(files.values()) == {_OK},
        "files": files,
    }


def _in_state(dataset: Mapping[str, Any], state: str) -> list[str]:
    """Return the files in a state."""
    return [name for name, each in dataset["files"].items() if each == state]


def _print(dataset: Mapping[str, Any], data_dir: Path | None) -> None:
    from fedbudget.data.published import DatasetMissing, find

    width = max(map(len, dataset["files"]))
    for file, state in dataset["files"].items():
        print(f"{file.ljust(width)}  {state}")
    try:
        find(dataset["name"], data_dir)
    except DatasetMissing as error:
        print(f"fedbudget: {error}", file=sys.stderr)
    else:
        print(f"{dataset['name']} in {dataset['where']}: {_summary(dataset)}")


def _summary(dataset: Mapping[str, Any]) -> str:
    total = len(dataset["files"])
    if dataset["complete"]:
        return "complete, and all files are correct"
    if wrong := _in_state(dataset, _WRONG):
        return f"{len(wrong)} of {total} files have wrong contents; fetch them again"
    return (
        f"incomplete, {len(_in_state(dataset, _OK))} of {total} files; these are correct "
        f"and can be used; fetch the rest with: fedbudget data get {dataset['name']}"
    )


def _cells(dataset: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of a dataset in the list."""
    size = ""
    if "bytes" in dataset:
        megabytes = dataset["bytes"] / 1e6
        size = f"{megabytes:,.0f} MB" if megabytes >= 1 else f"{megabytes * 1000:,.0f} kB"
    files = f"{len(_in_state(dataset, _OK))} of {len(dataset['files'])}"
    return (
        dataset["name"],
        dataset["title"],
        f"{dataset['samples']:,}",
        size,
        "complete" if dataset["complete"] else files,
        dataset["where"] or "not found",
    )
