"""`fedbudget describe`, and `fedbudget data` for published datasets and schemas."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from fedbudget.cli.console import print_table
from fedbudget.cli.options import Given, OutputOptions, command, settings_from
from fedbudget.errors import UserError, flag
from fedbudget.settings.option import REQUIRED, choices_text, option, paths_from
from fedbudget.settings.settings import DATASETS, NATURAL_DATASETS, SMALL_DATASETS

app = typer.Typer(help="Published datasets, and schemas of tables.")

_EMBEDDED: dict[str, dict[str, Any]] = {
    name: {
        "name": name,
        "title": title,
        "samples": samples,
        "licence": "CC BY 4.0",
        "where": "embedded",
        "complete": True,
        "files": {},
    }
    for name, title, samples in (
        ("digits", "handwritten digits, 8x8", 1797),
        ("heart-disease", "heart disease at 4 hospitals", 920),
    )
}
_FETCHED = [name for name in DATASETS if name not in (*SMALL_DATASETS, *_EMBEDDED)]
_NAME: str = option(REQUIRED, f"{choices_text(_FETCHED)}.", argument=True, values=_FETCHED)
_TABLES = [name for name in NATURAL_DATASETS if name not in ("shakespeare", "omniglot")]
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

    datasets = list(_EMBEDDED.values())
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

      fedbudget data get beijing-air

      fedbudget data get cifar-10 --data-dir ~/datasets
    """
    if name in _EMBEDDED:
        print(f"{name} is embedded; there is nothing to fetch")
        print(f"licence: {_EMBEDDED[name]['licence']}")
        return

    from fedbudget.cli.fetching import download_progress
    from fedbudget.data import published

    _, folder = published.data_folders(data_dir)[0]
    with download_progress() as progress:
        paths = published.get(name, folder, progress)
    print(f"{name} is in {published.container(paths)}")
    print(f"licence: {published.dataset_named(name).licence}")


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
    if name in _EMBEDDED:
        if output.json:
            print(json.dumps(_EMBEDDED[name]))
        else:
            print(f"{name} is embedded; there is nothing to check")
        return

    described = _described(name, data_dir, contents=True)
    if output.json:
        print(json.dumps(described))
    else:
        _print(described, data_dir)
    raise typer.Exit(0 if described["complete"] else 1)


@app.command()
@command
def schema(
    *,
    table: Path = option(REQUIRED, "A .csv, or a folder of them.", argument=True),
    given: Given,
) -> None:
    """Draft a public schema from a local or public table, for --schema.

    A private run takes ranges, categories and classes from a schema, and none from data.
    The draft contains those of TABLE: review each line before you use it. It is printed.

    Examples:

      fedbudget data schema sample.csv --target outcome --drop id > schema.toml

      fedbudget run --dataset own.csv --schema schema.toml --budget privacy=4
    """
    from fedbudget.data.schema import draft_of

    options = settings_from({**given, "impute": "mean"}).table_options()
    print(draft_of(table, options), end="")


@command
def describe(
    *,
    data: str = option(
        REQUIRED,
        "A .csv, a .parquet or another table, a folder with one of them per site, or a "
        f"natural federation: {choices_text(_TABLES)}.",
        argument=True,
        values=lambda start: [*_TABLES, *paths_from(start, ".csv", ".tsv", ".parquet")],
    ),
    given: Given,
    output: OutputOptions,
) -> None:
    """Describe tables by site, and list what is suspicious.

    For every column and site: rows, missing values, mean, standard deviation and range, or
    the shares of categories and classes. Findings are empty or constant columns, a mean far
    from that of the other sites, as with another unit, categories and classes of one site
    only, and columns that cannot be used as they are. Nothing is trained or sent.

    Examples:

      fedbudget describe heart-disease

      fedbudget describe hospitals --target outcome --drop patient,visit

      fedbudget describe patients.csv --target outcome --partition by:hospital

      fedbudget describe hospitals --json
    """
    from fedbudget.data.describe import summarise

    names = ("target", "drop", "categorical", "missing", "partition", "data_dir")
    settings = settings_from({name: given[name] for name in names})
    options = settings.table_options()
    if settings.partition not in (None, "files") and options.site is None:
        raise UserError("`partition` must be by:COLUMN, the column with the sites")
    described = summarise(data, options, data_dir=settings.data_dir, spell=flag)
    print(json.dumps(described.to_json()) if output.json else described)


@app.command()
@command
def export(
    *,
    name: str = option(
        REQUIRED,
        f"A natural federation of tables: {choices_text(_TABLES)}.",
        argument=True,
        values=_TABLES,
    ),
    folder: Path = option(REQUIRED, "The new folder.", argument=True),
    data_dir: Path | None = _DATA_DIR,
) -> None:
    """Write a natural federation as tables, one .csv per site.

    The tables are those that the owners of the data would have: use them to try out
    fedbudget describe, serve and join.

    Examples:

      fedbudget data export heart-disease hospitals
    """
    from fedbudget.data.natural import write_tables

    for path in write_tables(name, data_dir, folder):
        print(path)


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
