"""The results of a sweep as one tidy table, and in a Parquet file.

A row is a run or a round. First come the settings that vary, then the figures, then what went wrong, if anything. What
columns there are, and of what type, follows from the settings alone, never from how the runs went; rows are in the
order of the grid. So the same sweep is always the same file.

Any grid over settings and seeds: a run for each cell, in parallel processes, gathered in one table.

A sweep is a TOML file: settings as in the configuration of a run, and a table of those that vary.

    task = "svm-sgd-mnist"       # a named task to start from; may be left out
    budget = ["time=5s"]
    each = "run"                 # one row of results for each run; "round" gives one for each round of each run

    [grid]                       # all combinations, the first key slowest, seeds last
    case = [1, 2]                # short for partition = ["case:1", "case:2"]
    tau = ["adaptive", 1, 10]
    seeds = 15                   # short for seed = [0, 1, ..., 14]

Every cell is checked before the first one runs. Each run that is done is kept at once (see cells.py), so that a sweep
which was interrupted goes on where it was; the results are put together at the end from what was kept, in the order of
the grid, and are the same bytes however often and in whatever order the runs were made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from fedbudget import durable_files
from fedbudget.data.partition import Partition
from fedbudget.errors import UserError, key
from fedbudget.experiments.cells import (
    COLUMNS,
    CellStore,
    Columns,
    Failure,
    RowKind,
    Testbed,
    attempt,
)
from fedbudget.experiments.pool import check_backend, unordered, unordered_on_ray
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.option import read_toml
from fedbudget.settings.settings import Settings, read_settings, require_keys
from fedbudget.settings.types import EngineName

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    raise UserError(
        "sweep and reproduce need pyarrow; install it with: pip install 'fedbudget[sweep]'"
    ) from None

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
    cells: Sequence[Settings],
    outcomes: Iterable[Columns | Failure],
    *,
    varied: Sequence[str],
    each: RowKind,
) -> "pyarrow.Table":
    """The table of all cells.

    Args:
      outcomes: one for each cell, in the same order; each is let go once it is in the table.
      varied: the names of the settings that vary.
    """
    figures = _figures(cells, each)
    settings = _settings(cells, varied, figures)
    schema = pyarrow.schema(
        {name: column.type for name, column in settings.items()} | figures
    )
    schema = schema.append(pyarrow.field("error", pyarrow.string()))
    batches = []
    for index, outcome in enumerate(outcomes):
        values = {} if isinstance(outcome, Failure) else outcome
        rows = len(next(iter(values.values()))) if values else 1
        columns: dict[str, Any] = {
            name: pyarrow.repeat(column[index], rows) for name, column in settings.items()
        }
        columns |= {name: values.get(name, [None] * rows) for name in figures}
        columns["error"] = [outcome.error if isinstance(outcome, Failure) else None] * rows
        batches.append(pyarrow.RecordBatch.from_pydict(columns, schema))
    return pyarrow.Table.from_batches(batches, schema).combine_chunks()


def write(table: "pyarrow.Table", path: Path) -> None:
    """Writes a Parquet file in one step."""
    with durable_files.replacing(path) as file:
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
    resources = list(
        dict.fromkeys(name for settings in cells for name in settings.limits().limits)
    )
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
    properties = {
        name: value.fget
        for name, value in vars(source).items()
        if isinstance(value, property)
    }
    return get_type_hints(source) | {
        name: get_type_hints(get)["return"] for name, get in properties.items()
    }


def _settings(
    cells: Sequence[Settings], varied: Sequence[str], figures: Iterable[str]
) -> dict[str, "pyarrow.Array"]:
    """The columns of settings, a value for each cell."""
    columns: dict[str, pyarrow.Array] = {}
    for name in varied:
        # A round has a τ and a number of nodes of its own.
        heading = f"{name}_setting" if name in figures else name
        columns[heading] = _column([getattr(settings, name) for settings in cells])
        if name == "partition":
            cases = [
                settings.partition and Partition.parse(settings.partition).case
                for settings in cells
            ]
            if any(cases):
                columns["case"] = pyarrow.array(cases, pyarrow.int64())
    return columns


def _column(values: Sequence[Any]) -> "pyarrow.Array":
    """Values of one kind as they are, of several kinds as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds in ({int}, {float}):
        return pyarrow.array(values, _TYPES[kinds.pop()])
    return pyarrow.array(
        [None if value is None else _text(value) for value in values], pyarrow.string()
    )


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


if TYPE_CHECKING:
    import pyarrow

RESULTS = "results.parquet"

Progress = Callable[[int, int, int], None]
"""Told how many runs are done, of how many, and how many of those done have failed."""

_SHORT = {"partition": "case", "seed": "seeds"}
"""Settings that can be written in a shorter way in a grid."""


@dataclass(frozen=True)
class Sweep:
    """A grid of runs.

    Args:
      base: the settings that all cells share; what varies has there the value that it would have otherwise.
      varied: the names of the settings that vary, the slowest first.
      cells: the settings of every run, in the order of the grid.
      each: what has a row of its own in the results, `run` or `round`.
      testbed: of the node processes, with engine network; runs with simulated costs need none.
    """

    base: Settings
    varied: tuple[str, ...]
    cells: tuple[Settings, ...]
    each: RowKind = "run"
    testbed: Testbed | None = None

    @classmethod
    def read(cls, path: Path, *, data_dir: str | None = None) -> "Sweep":
        """The sweep in a file; `data_dir` takes the place of the file's."""
        found = read_toml(path)
        task = found.pop("task", None)
        grid = found.pop("grid", None)
        each = found.pop("each", "run")
        if not isinstance(grid, dict) or not grid:
            raise UserError(
                f"{path}: a sweep needs a table [grid] with at least one setting that varies"
            )
        given = read_settings(found, str(path), also=("task", "each"))
        if data_dir is not None:
            given["data_dir"] = data_dir
        lists = _lists(f"{path}, [grid]", grid)
        if twice := given.keys() & lists.keys():
            raise UserError(
                f"{path}: {key(min(twice))} varies in [grid], and must not be given outside of it as well"
            )
        if not isinstance(task, str | None):
            raise UserError(f"{path}: task must be a text, not {task!r}")
        try:
            base = Settings.combined(given, task=task)
        except UserError as error:
            raise UserError(f"{path}: {error.spelled(key)}") from None
        return cls(
            base,
            tuple(lists),
            _product(f"{path}, [grid]", base, lists),
            _checked_each(str(path), each),
        )

    @classmethod
    def of(
        cls, base: Settings, grid: Mapping[str, Sequence[Any] | int], each: RowKind = "run"
    ) -> "Sweep":
        """The sweep of a grid over some settings; the grid has the keys of a file's.

        >>> sweep = Sweep.of(Settings(nodes=4), {"case": [1, 2], "tau": ["adaptive", 10], "seeds": 3})
        >>> sweep.varied, len(sweep.cells)
        (('partition', 'tau', 'seed'), 12)
        >>> [(cell.partition, cell.tau, cell.seed) for cell in sweep.cells[2:4]]
        [('case:1', 'adaptive', 2), ('case:1', 10, 0)]
        """
        lists = _lists("grid", {key(name): values for name, values in grid.items()})
        if not lists:
            raise UserError("grid: a sweep needs at least one setting that varies")
        return cls(
            base, tuple(lists), _product("grid", base, lists), _checked_each("grid", each)
        )


def run(
    sweep: Sweep,
    folder: Path,
    *,
    jobs: int | None = None,
    backend: str | None = None,
    progress: Progress = lambda done, of, failed: None,
    engine: EngineName = "in-process",
    ray_address: str | None = None,
) -> "pyarrow.Table":
    """Makes the runs that the folder does not have yet, and gives the table of all, which is also written there.

    A run that fails has its error in the table, and is tried again the next time. Ctrl-C is a KeyboardInterrupt here as
    anywhere; the runs done before it are kept.

    Args:
      jobs: how many runs at a time; as many as there are cores when not given. One is made in this process.
      backend: of joblib, such as `loky` or `dask`; the active one when not given.
      engine: what makes each run; with `ray` they are made in process on the machines of a Ray cluster.
      ray_address: of that cluster; this machine when not given.
    """
    check_backend(jobs, backend)
    if backend is not None and engine == "ray":
        raise UserError("give `backend` or `engine` ray, not both")
    makes: EngineName = "in-process" if engine == "ray" else engine
    kept = CellStore(folder, sweep.each, makes, sweep.testbed)
    of = len(sweep.cells)
    missing = kept.missing(sweep.cells)
    before = of - len(missing)
    progress(before, of, 0)
    work = partial(attempt, each=sweep.each, engine=makes, testbed=sweep.testbed)
    if engine == "ray":
        pool = unordered_on_ray(work, missing, jobs=jobs, address=ray_address)
    else:
        pool = unordered(work, missing, jobs=jobs, backend=backend)
    try:
        with closing(pool) as outcomes:
            failures = kept.collect(
                outcomes, lambda made, failed: progress(before + made, of, failed)
            )
    except KeyboardInterrupt:
        progress(
            of - len(kept.missing(sweep.cells)), of, 0
        )  # one more may have been kept than was told of
        raise
    outcomes_in_order = (
        failures.get(settings) or kept.read(settings) for settings in sweep.cells
    )
    table = gather(sweep.cells, outcomes_in_order, varied=sweep.varied, each=sweep.each)
    write(table, folder / RESULTS)
    return table


def _checked_each(where: str, each: Any) -> Any:
    if each not in get_args(RowKind):
        raise UserError(f"{where}: each must be run or round, not {each!r}")
    return each


def _lists(where: str, grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of every setting that varies, under the setting's own name, seeds last."""
    lists: dict[str, list[Any]] = {}
    require_keys(grid, where, also=_SHORT.values())
    for written, values in grid.items():
        name, chosen = _written_out(where, written, values)
        if name in lists:
            raise UserError(f"{where}: give {_SHORT[name]} or {name}, not both")
        lists[name] = [read_settings({key(name): value}, where)[name] for value in chosen]
        for index, value in enumerate(lists[name]):
            if value in lists[name][:index]:
                raise UserError(f"{where}: {written} has {value!r} more than once")
    if "seed" in lists:
        lists["seed"] = lists.pop("seed")
    return lists


def _written_out(where: str, written: str, values: Any) -> tuple[str, Sequence[Any]]:
    """A setting and its values, with `case` and `seeds` as what they are short for."""
    if written == "seeds":
        if isinstance(values, bool) or not isinstance(values, int) or values < 1:
            raise UserError(
                f"{where}: seeds must be a whole number of at least 1, not {values!r}"
            )
        return "seed", range(values)
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UserError(
            f"{where}: {written} must be a list with at least one value, not {values!r}"
        )
    if written == "case":
        return "partition", [f"case:{value}" for value in values]
    return written.replace("-", "_"), values


def _product(
    where: str, base: Settings, lists: Mapping[str, list[Any]]
) -> tuple[Settings, ...]:
    cells: list[Settings] = []
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        try:
            cells.append(replace(base, **chosen))
        except UserError as error:
            cell = ", ".join(f"{key(name)} = {value!r}" for name, value in chosen.items())
            raise UserError(f"{where}: {cell}: {error.spelled(key)}") from None
    return tuple(cells)
