"""A sweep: one run for each cell of a grid over settings and seeds, and a table of results.

A sweep is a TOML file: settings as in the configuration of a run, and a table of those that
vary.

    task = "svm-sgd-mnist"       # a named task to start from; optional
    budget = ["time=5s"]
    each = "run"                 # one row of results per run, or per "round"

    [grid]                       # all combinations, the first key slowest, seeds last
    case = [1, 2]                # short for partition = ["case:1", "case:2"]
    tau = ["adaptive", 1, 10]
    seeds = 15                   # short for seed = [0, 1, ..., 14]

Every cell is checked before the first run. Each run is kept as soon as it is done (see
cells.py), so an interrupted sweep can be continued.

The results are one Parquet file. A row is a run or a round: first the settings that vary,
then the figures, then the error, if any. Columns and their types follow from the settings
alone, never from the outcome of runs. Rows have the order of the grid. So the same sweep
writes the same bytes, in whatever order the runs were made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fedbudget import durable_files
from fedbudget.data.partition import Partition
from fedbudget.errors import UserError, key, requires_package
from fedbudget.experiments.cells import (
    COLUMNS,
    CellStore,
    Columns,
    Failure,
    Progress,
    RowKind,
    Testbed,
)
from fedbudget.experiments.pool import check_jobs
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.option import read_toml
from fedbudget.settings.settings import Settings, read_settings, require_keys
from fedbudget.settings.types import EngineName

with requires_package("a sweep", "sweep"):
    import pyarrow
    from pyarrow import parquet

RESULTS = "results.parquet"

_SHORT = {"partition": "case", "seed": "seeds"}
"""Settings with a short form in a grid."""

_TYPES: Mapping[Any, pyarrow.DataType] = {
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


@dataclass(frozen=True)
class Sweep:
    """A grid of runs.

    Args:
      base: the common settings of all cells.
      varied: the settings that vary, the slowest first.
      cells: the settings of every run, in the order of the grid.
      each: the content of a row of results, `run` or `round`.
      testbed: of the node processes, with engine network and measured costs.
    """

    base: Settings
    varied: tuple[str, ...]
    cells: tuple[Settings, ...]
    each: RowKind = "run"
    testbed: Testbed | None = None

    @classmethod
    def read(cls, path: Path, *, data_dir: str | None = None) -> "Sweep":
        """Read a sweep from a file.

        Args:
          path: the TOML file.
          data_dir: replaces that of the file.
        """
        values = read_toml(path)
        task = values.pop("task", None)
        grid = values.pop("grid", None)
        each = values.pop("each", "run")
        if not isinstance(grid, dict) or not grid:
            raise UserError(
                f"{path}: a sweep needs a table [grid] with at least one setting that "
                "varies"
            )
        given = read_settings(values, str(path), also=("task", "each"))
        if data_dir is not None:
            given["data_dir"] = data_dir
        where = f"{path}, [grid]"
        lists = _lists(where, grid)
        if twice := given.keys() & lists.keys():
            raise UserError(
                f"{path}: {key(min(twice))} varies in [grid], and must not be given "
                "outside of it as well"
            )
        if not isinstance(task, str | None):
            raise UserError(f"{path}: task must be a text, not {task!r}")
        if each not in get_args(RowKind):
            raise UserError(f"{path}: each must be run or round, not {each!r}")

        # The settings outside of the grid may be compatible only with those in it.
        def cell(**chosen: Any) -> Settings:
            return Settings.combined({**given, **chosen}, task=task, command="sweep")

        cells = _product(where, lists, cell)
        return cls(cells[0], tuple(lists), cells, each)

    @classmethod
    def of(
        cls, base: Settings, grid: Mapping[str, Sequence[Any] | int], each: RowKind = "run"
    ) -> "Sweep":
        """Return the sweep of a grid, with the keys of a file's grid.

        >>> grid = {"case": [1, 2], "tau": ["adaptive", 10], "seeds": 3}
        >>> sweep = Sweep.of(Settings(nodes=4), grid)
        >>> sweep.varied, len(sweep.cells)
        (('partition', 'tau', 'seed'), 12)
        >>> [(cell.partition, cell.tau, cell.seed) for cell in sweep.cells[2:4]]
        [('case:1', 'adaptive', 2), ('case:1', 10, 0)]
        """
        lists = _lists("grid", {key(name): values for name, values in grid.items()})
        if not lists:
            raise UserError("grid: a sweep needs at least one setting that varies")
        cells = _product("grid", lists, partial(replace, base))
        return cls(base, tuple(lists), cells, each)


def run(
    sweep: Sweep,
    folder: Path,
    *,
    jobs: int | None = None,
    progress: Progress = lambda done, of, failed: None,
    engine: EngineName = "in-process",
    ray_address: str | None = None,
) -> pyarrow.Table:
    """Make the runs that are missing in the folder, and write the table of all runs there.

    A failed run has its error in the table, and is tried again the next time. Runs that
    were finished before Ctrl-C (a KeyboardInterrupt) are kept.

    Args:
      jobs: runs in parallel; one per core by default. With 1, this process makes them.
      progress: receives the number of finished, all and failed runs.
      engine: of each run; with `ray`, runs are made in process on the machines of a
        cluster.
      ray_address: of that cluster; this machine by default.
    """
    check_jobs(jobs)
    store = CellStore(folder, sweep.each, engine, sweep.testbed)
    failures = store.make(sweep.cells, progress, jobs=jobs, ray_address=ray_address)
    outcomes = (failures.get(cell) or store.read(cell) for cell in sweep.cells)
    table = gather(sweep.cells, outcomes, varied=sweep.varied, each=sweep.each)
    write(table, folder / RESULTS)
    return table


def gather(
    cells: Sequence[Settings],
    outcomes: Iterable[Columns | Failure],
    *,
    varied: Sequence[str],
    each: RowKind,
) -> pyarrow.Table:
    """Return the table of all cells.

    Args:
      outcomes: one per cell, in the same order. Only one at a time is in memory.
      varied: the names of the settings that vary.
    """
    figures = _figures(cells, each)
    settings = _settings(cells, varied, figures)
    types = {name: column.type for name, column in settings.items()}
    schema = pyarrow.schema({**types, **figures, "error": pyarrow.string()})
    batches = []
    for index, outcome in enumerate(outcomes):
        values = {"error": [outcome.error]} if isinstance(outcome, Failure) else outcome
        rows = len(next(iter(values.values())))
        columns = {name: values.get(name, [None] * rows) for name in schema.names}
        columns |= {
            name: pyarrow.repeat(column[index], rows) for name, column in settings.items()
        }
        batches.append(pyarrow.RecordBatch.from_pydict(columns, schema))
    return pyarrow.Table.from_batches(batches, schema).combine_chunks()


def write(table: pyarrow.Table, path: Path) -> None:
    """Write a Parquet file in one step."""
    with durable_files.replacing(path) as file:
        parquet.write_table(table, file)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a Parquet file."""
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def means(table: pyarrow.Table) -> list[dict[str, Any]]:
    """Return the mean loss and accuracy over seeds of a table of runs.

    There is one row for each combination of the other settings. `runs` counts the runs with
    a finite loss.
    """
    names = table.column_names
    varied = [name for name in names[: names.index("loss")] if name != "seed"]
    if "case" in varied and table["case"].null_count == 0:
        varied.remove("partition")  # redundant
    aggregates = [("loss", "count"), ("loss", "mean"), ("accuracy", "mean")]
    # Groups have no order of their own: sort them by their first row.
    numbered = table.append_column("row", pyarrow.array(range(table.num_rows)))
    groups = numbered.group_by(varied).aggregate([*aggregates, ("row", "min")])
    groups = groups.sort_by("row_min")
    columns = [groups[name] for name in varied]
    columns += [groups["_".join(each)] for each in aggregates]
    headings = [*varied, "runs", "loss", "accuracy"]
    rows: list[dict[str, Any]] = pyarrow.table(columns, headings).to_pylist()
    return rows


def _figures(cells: Sequence[Settings], each: RowKind) -> dict[str, pyarrow.DataType]:
    """Return the columns of figures, with one for each resource in any budget."""
    resources = dict.fromkeys(name for cell in cells for name in cell.limits().limits)
    hints = get_type_hints(Result if each == "run" else RoundRecord)
    hints["update_weighted_tau"] = float  # a property of Result
    figures: dict[str, pyarrow.DataType] = {}
    for name in COLUMNS[each]:
        if hints[name] in _BY_RESOURCE:
            figures |= {f"{name}_{resource}": pyarrow.float64() for resource in resources}
        else:
            figures[name] = _TYPES[hints[name]]
    return figures


def _settings(
    cells: Sequence[Settings], varied: Sequence[str], figures: Iterable[str]
) -> dict[str, pyarrow.Array]:
    """Return the columns of settings, with a value per cell."""
    columns: dict[str, pyarrow.Array] = {}
    for name in varied:
        # A round has its own τ and number of nodes.
        heading = f"{name}_setting" if name in figures else name
        values = [getattr(cell, name) for cell in cells]
        columns[heading] = _column(values)
        if name == "partition":
            cases = [value and Partition.parse(value).case for value in values]
            if any(cases):
                columns["case"] = pyarrow.array(cases, pyarrow.int64())
    return columns


def _column(values: Sequence[Any]) -> pyarrow.Array:
    """Return numbers of one type as they are, and other values as text."""
    types = {type(value) for value in values if value is not None}
    if types in ({int}, {float}):
        return pyarrow.array(values, _TYPES[types.pop()])
    texts = [", ".join(value) if isinstance(value, tuple) else value for value in values]
    return pyarrow.array(
        [None if text is None else str(text) for text in texts], pyarrow.string()
    )


def _lists(where: str, grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of every setting that varies, by its full name, seeds last."""
    require_keys(grid, where, also=_SHORT.values())
    lists: dict[str, list[Any]] = {}
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
    """Return a setting and its values, with `case` and `seeds` in their long form."""
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
    where: str, lists: Mapping[str, list[Any]], make: Callable[..., Settings]
) -> tuple[Settings, ...]:
    """Return the settings of all combinations."""
    cells: list[Settings] = []
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        try:
            cell = make(**chosen)
            require_compatible(cell, engine="in-process")
            cells.append(cell)
        except UserError as error:
            given = ", ".join(f"{key(name)} = {value!r}" for name, value in chosen.items())
            raise UserError(f"{where}: {given}: {error.spelled(key)}") from None
    return tuple(cells)
