"""The cells of a sweep: one run each, kept on disk once done.

    cells/KEY.json      the figures of one run, a list per column

KEY is a hash of everything that the figures depend on: the complete settings, the columns
and the version of fedbudget. So an existing file is valid, whichever sweep wrote it. It
does not contain the time or place of the run. A run that failed or was interrupted is not
kept and is made again.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from fedbudget import __version__, durable_files
from fedbudget.data.partition import Partition
from fedbudget.errors import UserError, key
from fedbudget.experiments.pool import unordered, unordered_on_ray
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import load_dataset
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.models.compiling import numba_if_installed
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import EngineName

RowKind = Literal["run", "round"]
"""The content of a row of results."""

Columns = dict[str, list[Any]]
"""Values by column: one for the run, or one for each of its rounds."""

Measure = Callable[[Settings], Columns]
"""Makes a run and returns its figures."""

Progress = Callable[[int, int, int], None]
"""Receives the number of finished runs, of all runs, and of failed runs."""

_OMITTED = (  # the wall clock differs each time; only some rounds have the others
    "wall",
    "expected_c",
    "expected_b",
    "metrics",
    "spread",
    "work",
    "excluded",
    "private",
    "extra",
)
COLUMNS: Mapping[RowKind, tuple[str, ...]] = {
    "run": (
        "loss",
        "accuracy",
        "average_tau",
        "update_weighted_tau",
        "aggregations",
        "local_updates",
        "stopped_by",
        "spent",
        "overshoot",
    ),
    "round": tuple(
        field.name for field in fields(RoundRecord) if field.name not in _OMITTED
    ),
}
"""The fields of a `Result` or of its `RoundRecord`s that are kept."""


_DATA_SETTINGS = (
    "dataset",
    "data_dir",
    "target",
    "drop",
    "categorical",
    "impute",
    "missing",
    "classes",
    "standardise",
    "schema",
    "test_share",
)
"""The settings that determine the samples of a dataset, besides a column of sites."""

_dataset = lru_cache(maxsize=2)(load_dataset)  # neighbouring cells mostly use the same data


@dataclass(frozen=True)
class Testbed:
    """Slowed-down node processes that imitate a fleet of other machines.

    Args:
      paces: factor by which each node's local updates are slowed down.
      delay: seconds added to every message between node and aggregator, in each direction.
    """

    paces: tuple[float, ...]
    delay: float


PROTOTYPE = Testbed(paces=(125.0, 125.0, 500.0, 500.0, 500.0), delay=0.065)
"""Two laptops and three Raspberry Pis at a quarter of their speed, with aggregations of
about 130 ms over Wi-Fi. A step of the SVM takes 0.02 to 0.04 ms on a current processor, and
13 to 22 ms on the paper's prototype."""


@dataclass(frozen=True)
class Failure:
    """The error of a run that failed."""

    error: str


def attempt(
    settings: Settings,
    *,
    each: RowKind,
    engine: EngineName = "in-process",
    testbed: Testbed | None = None,
    measure: Measure | None = None,
) -> Columns | Failure:
    """Make a run. An error must not stop the other runs, so it is returned.

    `measure` replaces the run and its columns. A testbed is for measured costs. With a
    testbed, runs with simulated costs are made in process.
    """
    make = run_in_process
    if engine == "network" and (testbed is None or settings.costs == "measured"):
        make = partial(_run_over_network, testbed=testbed)
    try:
        return columns(make(settings), each) if measure is None else measure(settings)
    except UserError as error:
        return Failure(error.spelled(key))
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}")


def columns(result: Result, each: RowKind) -> Columns:
    """Return the kept figures of a result."""
    sources: Sequence[Result | RoundRecord] = [result] if each == "run" else result.rounds
    rows = [
        _flat({name: getattr(source, name) for name in COLUMNS[each]}) for source in sources
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


class CellStore:
    """The finished runs in a folder.

    Args:
      folder: of the sweep.
      each: the content of a row.
      engine: the engine of the runs. Ray only distributes runs that are made in process.
      testbed: of the node processes, with engine network.
      measure: a function of a module that replaces the run and its columns.
    """

    def __init__(
        self,
        folder: Path,
        each: RowKind,
        engine: EngineName = "in-process",
        testbed: Testbed | None = None,
        measure: Measure | None = None,
    ) -> None:
        self._folder = folder / "cells"
        self._on_ray = engine == "ray"
        if self._on_ray:
            engine = "in-process"
        self._how: Any = {"each": each, "engine": engine, "testbed": testbed}
        self._how["measure"] = measure
        self._key = f"fedbudget {__version__}\neach {each}: {COLUMNS[each]}\n"
        if engine != "in-process":
            self._key += f"engine {engine} {testbed}\n"
        if measure is not None:
            self._key += f"measure {measure.__module__}.{measure.__qualname__}\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written to: {error.strerror}") from None

    def __contains__(self, settings: Settings) -> bool:
        return self._path(settings).exists()

    def missing(self, cells: Sequence[Settings]) -> list[Settings]:
        """Return the cells that are not kept yet."""
        return [settings for settings in cells if settings not in self]

    def make(
        self,
        cells: Sequence[Settings],
        progress: Progress,
        *,
        jobs: int | None,
        ray_address: str | None = None,
    ) -> dict[Settings, Failure]:
        """Make the missing runs, keep each as soon as it is done, and return the failures.

        Args:
          jobs: runs in parallel; one per core by default.
          ray_address: of the cluster, with engine ray; this machine by default.
        """
        missing = self.missing(cells)
        done = len(cells) - len(missing)
        progress(done, len(cells), 0)
        work = partial(attempt, **self._how)
        if self._on_ray:
            pool = unordered_on_ray(work, missing, jobs=jobs, address=ray_address)
        else:
            pool = unordered(work, missing, jobs=jobs)
        failures: dict[Settings, Failure] = {}
        try:
            with closing(pool) as outcomes:
                for number, (settings, outcome) in enumerate(outcomes, start=done + 1):
                    if isinstance(outcome, Failure):
                        failures[settings] = outcome
                    else:
                        self.write(settings, outcome)
                    progress(number, len(cells), len(failures))
        except KeyboardInterrupt:
            # The last run may have been kept before its progress was reported.
            progress(len(cells) - len(self.missing(cells)), len(cells), 0)
            raise
        return failures

    def read(self, settings: Settings) -> Columns:
        path = self._path(settings)
        try:
            columns: Columns = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read: {error}; delete it to make the run again"
            ) from None
        return columns

    def write(self, settings: Settings, columns: Columns) -> None:
        text = json.dumps(columns, allow_nan=False)
        durable_files.replace(self._path(settings), text.encode())

    def _path(self, settings: Settings) -> Path:
        key = f"{self._key}{settings.to_toml()}"
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


@contextmanager
def made_ready(settings: Settings) -> Iterator[SimulatedRun]:
    """Prepare a run in one thread: parallel kernels would slow down parallel runs."""
    with _one_thread(numba_if_installed()):
        prepared = simulate(settings, Overrides(dataset=_dataset(_of_data(settings))))
        # A model that needs torch has imported it by now.
        with _one_thread(sys.modules.get("torch")):
            yield prepared


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit the kernels, and torch if it is imported, to one thread."""
    with _one_thread(numba_if_installed()), _one_thread(sys.modules.get("torch")):
        yield


def _of_data(settings: Settings) -> Settings:
    """Return the settings of the dataset alone: runs with the same data share it."""
    names = [*_DATA_SETTINGS]
    if Partition.parse(settings.partition or "files").by is not None:
        names.append("partition")
    return Settings(**{name: getattr(settings, name) for name in names})


def run_in_process(settings: Settings) -> Result:
    """Make a run in one thread."""
    with made_ready(settings) as prepared:
        return execute(prepared).uninterrupted()


def _run_over_network(settings: Settings, testbed: Testbed | None) -> Result:
    """Make a run with one process per node."""
    from fedbudget.launch.local import on_this_machine

    slowed = {} if testbed is None else asdict(testbed)
    with on_this_machine(settings, **slowed) as prepared:
        return execute(prepared).uninterrupted()


@contextmanager
def _one_thread(library: Any) -> Iterator[None]:
    """Limit a library to one thread, if it is installed."""
    if library is None:
        yield
        return
    threads = library.get_num_threads()
    library.set_num_threads(1)
    try:
        yield
    finally:
        library.set_num_threads(threads)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with a column for each resource, and None for non-finite numbers."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat({f"{name}_{resource}": each for resource, each in value.items()})
        elif isinstance(value, float) and not math.isfinite(value):
            flat[name] = None
        else:
            flat[name] = value
    return flat
