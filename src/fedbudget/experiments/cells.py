"""Node processes of several speeds on this machine, and a network between them that is slower than its own.

The cells of a sweep: each is one run, that is made anywhere, and kept on disk once it is done.

    cells/KEY.json      the figures of one run, a list for each column

KEY stands for all that the figures depend on: the complete settings, the columns, and the version of fedbudget. So
a file that is there is right, whichever sweep has put it there. Nothing in it tells when or where it was made. A run
that failed or was interrupted is not kept, and is made again.

How long runs will take, before they are made.

Simulated costs tell how many local updates a budget pays for. One of them, timed here, tells how long they take.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbudget import __version__, durable_files
from fedbudget.data.dataset import Dataset
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.errors import UserError, key
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import batch_of, load_dataset
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.models.compiling import numba_if_installed
from fedbudget.resources.kinds import SimulatedTime
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import EngineName


@dataclass(frozen=True)
class Testbed:
    """What stands for a fleet of other machines.

    Args:
      paces: how many times as long as it could a local update takes, at each node.
      delay: seconds that every message between a node and the aggregator takes longer, each way.
    """

    paces: tuple[float, ...]
    delay: float


PROTOTYPE = Testbed(paces=(125.0, 125.0, 500.0, 500.0, 500.0), delay=0.065)
"""Two laptops and three Raspberry Pis at a quarter of their speed, with an aggregation of about 130 ms over Wi-Fi. A
step of the SVM takes some 0.02 to 0.04 ms on a processor of today, and 13 to 22 ms on the paper's prototype."""


RowKind = Literal["run", "round"]
"""What has a row of its own in the results."""

Columns = dict[str, list[Any]]
"""All of one length, by name: a value for the run, or for each of its rounds."""

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
        field.name
        for field in fields(RoundRecord)
        if field.name
        not in ("wall", "expected_c", "expected_b", "metrics", "spread", "work", "private")
    ),
}
"""What is kept of a `Result` or of its `RoundRecord`s; not the wall clock, which is never the same twice, and not what
was expected, was evaluated besides accuracy, was shared by speed, or paid for by privacy, which not every round has."""


@dataclass(frozen=True)
class Failure:
    """What went wrong in a run that could not be made."""

    error: str


def attempt(
    settings: Settings,
    *,
    each: RowKind,
    engine: EngineName = "in-process",
    testbed: Testbed | None = None,
) -> Columns | Failure:
    """Makes a run; whatever goes wrong in one must not stop the others.

    A testbed is for costs that are measured. Where they are simulated, a run is made in process, beside it.
    """
    try:
        over_network = engine == "network" and (
            testbed is None or settings.costs == "measured"
        )
        result = _run_over_network(settings, testbed) if over_network else _run(settings)
        return columns(uninterrupted(result), each)
    except UserError as error:
        return Failure(error.spelled(key))
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}")


def columns(result: Result, each: RowKind) -> Columns:
    """What is kept of a result."""
    sources: Sequence[Result | RoundRecord] = [result] if each == "run" else result.rounds
    rows = [
        _flat({name: getattr(source, name) for name in COLUMNS[each]}) for source in sources
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


class CellStore:
    """The cells that are kept in a sweep's folder."""

    def __init__(
        self,
        folder: Path,
        each: RowKind,
        engine: EngineName = "in-process",
        testbed: Testbed | None = None,
    ) -> None:
        self._folder = folder / "cells"
        self._each = each
        self._engine = "" if engine == "in-process" else f"engine {engine} {testbed}\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written to: {error.strerror}") from None

    def __contains__(self, settings: Settings) -> bool:
        return self._path(settings).exists()

    def missing(self, cells: Sequence[Settings]) -> list[Settings]:
        """Those that are not kept yet."""
        return [settings for settings in cells if settings not in self]

    def read(self, settings: Settings) -> Columns:
        path = self._path(settings)
        try:
            columns: Columns = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read: {error}; without it, the run is made again"
            ) from None
        return columns

    def write(self, settings: Settings, columns: Columns) -> None:
        durable_files.replace(
            self._path(settings), json.dumps(columns, allow_nan=False).encode()
        )

    def collect(
        self,
        outcomes: Iterable[tuple[Settings, Columns | Failure]],
        progress: Callable[[int, int], None],
    ) -> dict[Settings, Failure]:
        """Writes what runs gave, each at once; gives those that failed.

        Args:
          progress: told how many have come, and how many of them have failed.
        """
        failures: dict[Settings, Failure] = {}
        for number, (settings, outcome) in enumerate(outcomes, start=1):
            if isinstance(outcome, Failure):
                failures[settings] = outcome
            else:
                self.write(settings, outcome)
            progress(number, len(failures))
        return failures

    def _path(self, settings: Settings) -> Path:
        key = f"fedbudget {__version__}\neach {self._each}: {COLUMNS[self._each]}\n{self._engine}{settings.to_toml()}"
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


@contextmanager
def made_ready(settings: Settings) -> Iterator[SimulatedRun]:
    """A run for one thread: parallel kernels in parallel runs would only be in each other's way."""
    with _one_thread(numba_if_installed()):
        dataset = _dataset(
            settings.dataset, settings.data_dir, settings.target, settings.test_share
        )
        prepared = simulate(settings, Overrides(dataset=dataset))
        with _one_thread(
            sys.modules.get("torch")
        ):  # which is there by now if the model needs it
            yield prepared


def _run(settings: Settings) -> Result:
    with made_ready(settings) as prepared:
        return execute(prepared)


def _run_over_network(settings: Settings, testbed: Testbed | None) -> Result:
    """Makes a run with a process for each node."""
    from fedbudget.launch.local import on_this_machine

    known = {} if testbed is None else asdict(testbed)
    with on_this_machine(settings, **known) as prepared:
        return execute(prepared)


def uninterrupted(result: Result) -> Result:
    """The result of a run that was not ended by Ctrl-C, which is for whoever asked for many runs."""
    if result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return result


@lru_cache(maxsize=2)
def _dataset(
    dataset: str, data_dir: str | None, target: str | None, test_share: float
) -> Dataset:
    """Neighbours in a grid mostly have the same data, which a process then loads once."""
    return load_dataset(
        Settings(dataset=dataset, data_dir=data_dir, target=target, test_share=test_share)
    )


@contextmanager
def _one_thread(library: Any) -> Iterator[None]:
    """One thread for a library that computes, if it is there."""
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
    """A row with a column for each resource, and without what JSON does not have."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(
                {f"{name}_{resource}": amount for resource, amount in value.items()}
            )
        elif isinstance(value, float) and not math.isfinite(value):
            flat[name] = None
        else:
            flat[name] = value
    return flat


_KINDS = (
    "method",
    "partition",
    "model",
    "dataset",
    "nodes",
    "batch_size",
    "budget",
    "aggregation_factor",
)
"""The settings that make runs of different lengths, besides τ."""

_ADAPTIVE = 10  # what adaptive τ is taken for
_EVALUATION = 1 / 3  # of a local update: that of w^f, once a round
_SAMPLES = 200  # that an evaluation is timed with


def expected_seconds(cells: Sequence[Settings]) -> float:
    """The seconds of all runs, one after the other; of those with measured costs, their budgets."""
    known: dict[tuple[object, ...], tuple[SimulatedTime, float, float, float]] = {}
    total = 0.0
    for cell in cells:
        kind = tuple(getattr(cell, name) for name in _KINDS)
        if kind not in known:
            with made_ready(cell) as run:
                if not isinstance(run.meters.time, SimulatedTime):
                    return len(cells) * run.budget.limits["time"]
                known[kind] = (
                    run.meters.time,
                    run.budget.limits["time"],
                    _update_seconds(run),
                    _evaluation_seconds(run),
                )
        clock, budget, update, evaluation = known[kind]
        tau, more = (cell.tau, 0) if isinstance(cell.tau, int) else (_ADAPTIVE, 1)
        rounds = budget / (tau * clock.profile.step.mean + clock.profile.aggregation.mean)
        total += rounds * (tau + more + _EVALUATION) * update + evaluation
    return total


def _update_seconds(run: SimulatedRun) -> float:
    """Of one local update at all nodes, which take turns; or of all samples in one place."""
    shards = run.shards if run.aggregator is not None else Shards.whole(run.train)
    w = run.model.initial(0)[None]
    indices = Sampler(shards.size, batch_of(run.settings), 0).round(1)
    return _quickest(lambda: run.model.descend(w, shards, indices, 0.0))


def _evaluation_seconds(run: SimulatedRun) -> float:
    """Of the loss over all samples, which a run ends with."""
    some = Shards.of(run.train, [np.arange(min(_SAMPLES, len(run.train)))])
    w = run.model.initial(0)[None]
    indices = BatchIndices.whole(1)
    return (
        _quickest(lambda: run.model.losses(w, some, indices))
        * len(run.train)
        / int(some.size[0])
    )


def _quickest(work: Callable[[], object]) -> float:
    """The seconds of the quickest of three; the first compiles, and others may be at work."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
