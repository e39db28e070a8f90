"""The results of a sweep as one tidy table, and in a Parquet file.

A row is a run or a round. First come the settings that vary, then the figures, then what went wrong, if anything. What
columns there are, and of what type, follows from the settings alone, never from how the runs went; rows are in the
order of the grid. So the same sweep is always the same file.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from fedbudget import atomic_file
from fedbudget.data.partition import Partition
from fedbudget.errors import UserError
from fedbudget.experiments.cells import COLUMNS, Columns, Failure, RowKind
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings import Settings

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    raise UserError("sweep and reproduce need pyarrow; install it with: pip install 'fedbudget[sweep]'") from None

_TYPES: Mapping[Any, "pyarrow.DataType"] = {
    bool: pyarrow.bool_(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    float | None: pyarrow.float64(),
    str: pyarrow.string(),
    str | None: pyarrow.string(),
    tuple[str, ...]: pyarrow.list_(pyarrow.string()),
    tuple[int, ...]: pyarrow.list_(pyarrow.int64()),
}
_BY_RESOURCE = (Mapping[str, float], dict[str, float])


def gather(
    cells: Sequence[Settings], outcomes: Iterable[Columns | Failure], *, varied: Sequence[str], each: RowKind
) -> "pyarrow.Table":
    """The table of all cells.

    Args:
      outcomes: one for each cell, in the same order; each is let go once it is in the table.
      varied: the names of the settings that vary.
    """
    figures = _figures(cells, each)
    settings = _settings(cells, varied, figures)
    schema = pyarrow.schema({name: column.type for name, column in settings.items()} | figures)
    schema = schema.append(pyarrow.field("error", pyarrow.string()))
    batches = []
    for index, outcome in enumerate(outcomes):
        values = {} if isinstance(outcome, Failure) else outcome
        rows = len(next(iter(values.values()))) if values else 1
        columns: dict[str, Any] = {name: pyarrow.repeat(column[index], rows) for name, column in settings.items()}
        columns |= {name: values.get(name, [None] * rows) for name in figures}
        columns["error"] = [outcome.error if isinstance(outcome, Failure) else None] * rows
        batches.append(pyarrow.RecordBatch.from_pydict(columns, schema))
    return pyarrow.Table.from_batches(batches, schema).combine_chunks()


def write(table: "pyarrow.Table", path: Path) -> None:
    """Writes a Parquet file in one step."""
    with atomic_file.replacing(path) as file:
        parquet.write_table(table, file)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def means(table: "pyarrow.Table") -> list[dict[str, Any]]:
    """Of a table of runs: the mean loss and accuracy over seeds, for each combination of the other settings.

    `runs` says over how many; those that failed, or whose loss is not finite, are not among them.
    """
    varied = table.column_names[: table.column_names.index(COLUMNS["run"][0])]
    unneeded = {"seed"}
    if "case" in varied and table["case"].null_count == 0:
        unneeded.add("partition")  # says the same
    groups: dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        key = tuple((name, row[name]) for name in varied if name not in unneeded)
        groups.setdefault(key, []).append(row)
    return [
        {
            **dict(key),
            "runs": sum(row["loss"] is not None for row in rows),
            "loss": _mean([row["loss"] for row in rows]),
            "accuracy": _mean([row["accuracy"] for row in rows]),
        }
        for key, rows in groups.items()
    ]


def _figures(cells: Sequence[Settings], each: RowKind) -> dict[str, "pyarrow.DataType"]:
    """The columns of figures, with one for each resource that any cell has in its budget."""
    resources = list(dict.fromkeys(name for settings in cells for name in settings.limits().limits))
    hints = _types(Result if each == "run" else RoundRecord)
    figures: dict[str, pyarrow.DataType] = {}
    for name in COLUMNS[each]:
        if hints[name] in _BY_RESOURCE:
            figures |= {f"{name}_{resource}": pyarrow.float64() for resource in resources}
        else:
            figures[name] = _TYPES[hints[name]]
    return figures


def _types(source: type[Result | RoundRecord]) -> dict[str, Any]:
    """The types of its fields and properties."""
    properties = {name: value.fget for name, value in vars(source).items() if isinstance(value, property)}
    return get_type_hints(source) | {name: get_type_hints(get)["return"] for name, get in properties.items()}


def _settings(cells: Sequence[Settings], varied: Sequence[str], figures: Iterable[str]) -> dict[str, "pyarrow.Array"]:
    """The columns of settings, a value for each cell."""
    columns: dict[str, pyarrow.Array] = {}
    for name in varied:
        # A round has a τ and a number of nodes of its own.
        heading = f"{name}_setting" if name in figures else name
        columns[heading] = _column([getattr(settings, name) for settings in cells])
        if name == "partition":
            cases = [settings.partition and Partition.parse(settings.partition).case for settings in cells]
            if any(cases):
                columns["case"] = pyarrow.array(cases, pyarrow.int64())
    return columns


def _column(values: Sequence[Any]) -> "pyarrow.Array":
    """Values of one kind as they are, of several kinds as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds in ({int}, {float}):
        return pyarrow.array(values, _TYPES[kinds.pop()])
    return pyarrow.array([None if value is None else _text(value) for value in values], pyarrow.string())


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
