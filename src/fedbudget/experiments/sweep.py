"""Any grid over settings and seeds: a run for each cell, in parallel processes, gathered in one table.

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

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fedbudget.errors import UserError, key
from fedbudget.experiments.cells import CellStore, RowKind, attempt
from fedbudget.experiments.pool import check_backend, unordered, unordered_on_ray
from fedbudget.experiments.table import gather, write
from fedbudget.experiments.testbed import Testbed
from fedbudget.option import read_toml
from fedbudget.setting_types import EngineName
from fedbudget.settings import Settings, read_settings, require_keys

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
        task, grid, each = found.pop("task", None), found.pop("grid", None), found.pop("each", "run")
        if not isinstance(grid, dict) or not grid:
            raise UserError(f"{path}: a sweep needs a table [grid] with at least one setting that varies")
        given = read_settings(found, str(path), also=("task", "each"))
        if data_dir is not None:
            given["data_dir"] = data_dir
        lists = _lists(f"{path}, [grid]", grid)
        if twice := given.keys() & lists.keys():
            raise UserError(f"{path}: {key(min(twice))} varies in [grid], and must not be given outside of it as well")
        if not isinstance(task, str | None):
            raise UserError(f"{path}: task must be a text, not {task!r}")
        try:
            base = Settings.combined(given, task=task)
        except UserError as error:
            raise UserError(f"{path}: {error.spelled(key)}") from None
        return cls(base, tuple(lists), _product(f"{path}, [grid]", base, lists), _checked_each(str(path), each))

    @classmethod
    def of(cls, base: Settings, grid: Mapping[str, Sequence[Any] | int], each: RowKind = "run") -> "Sweep":
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
        return cls(base, tuple(lists), _product("grid", base, lists), _checked_each("grid", each))


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
    kept, of = CellStore(folder, sweep.each, makes, sweep.testbed), len(sweep.cells)
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
            failures = kept.collect(outcomes, lambda made, failed: progress(before + made, of, failed))
    except KeyboardInterrupt:
        progress(of - len(kept.missing(sweep.cells)), of, 0)  # one more may have been kept than was told of
        raise
    outcomes_in_order = (failures.get(settings) or kept.read(settings) for settings in sweep.cells)
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
            raise UserError(f"{where}: seeds must be a whole number of at least 1, not {values!r}")
        return "seed", range(values)
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UserError(f"{where}: {written} must be a list with at least one value, not {values!r}")
    if written == "case":
        return "partition", [f"case:{value}" for value in values]
    return written.replace("-", "_"), values


def _product(where: str, base: Settings, lists: Mapping[str, list[Any]]) -> tuple[Settings, ...]:
    cells: list[Settings] = []
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        try:
            cells.append(replace(base, **chosen))
        except UserError as error:
            cell = ", ".join(f"{key(name)} = {value!r}" for name, value in chosen.items())
            raise UserError(f"{where}: {cell}: {error.spelled(key)}") from None
    return tuple(cells)
