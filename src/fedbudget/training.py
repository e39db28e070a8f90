"""The main path: a plan is carried out, and gives a result and, where wanted, a run on disk.

The command line and the Python API both come through here.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedbudget import __version__
from fedbudget.arrays import Float32
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import Shard, from_arrays
from fedbudget.engines.interrupt import interruptible
from fedbudget.errors import UserError
from fedbudget.models.base import Model, loss_over
from fedbudget.plan import Plan, PlanHere, prepare
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast
from fedbudget.runs import nodes
from fedbudget.runs.folder import PLOT, Run, RunWriter, SavedModel
from fedbudget.runs.record import RoundRecord, average_tau
from fedbudget.settings import EngineName, Settings, SettingsOptions
from fedbudget.trackers import chosen
from fedbudget.trackers.following import following
from fedbudget.trackers.tracker import About, Tracker

RUNS = Path("runs")
Watch = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Args:
      loss: F(w^f) on all training samples; where these are on other machines, as nodes last told it.
      accuracy: on the test samples; None where it has no meaning.
      average_tau: Σ τ² / Σ τ over rounds.
      aggregations, local_updates: K and T; in one place nothing is aggregated.
      spent, budget, overshoot: per resource.
      sources: how each of these is known: measured, estimated, declared or simulated.
      stopped_by: a resource, `rounds` or `interrupted`.
      metrics: further figures on the test samples, where the model has some.
      note: in which way the data were less than the whole dataset, if they were.
      run: the folder, where there is one.
      w: w^f, [parameters].
      rounds: a record of each.
    """

    loss: float
    accuracy: float | None
    average_tau: float
    aggregations: int
    local_updates: int
    spent: Mapping[str, float]
    budget: Mapping[str, float]
    overshoot: Mapping[str, float]
    sources: Mapping[str, str]
    stopped_by: str
    metrics: Mapping[str, float]
    note: str
    run: Path | None
    w: Float32
    rounds: Sequence[RoundRecord]

    def to_json(self) -> dict[str, Any]:
        """The figures, without the model and the rounds."""
        return {
            "loss": self.loss if np.isfinite(self.loss) else None,
            "accuracy": self.accuracy,
            **({"metrics": dict(self.metrics)} if self.metrics else {}),
            "average_tau": self.average_tau,
            "aggregations": self.aggregations,
            "local_updates": self.local_updates,
            "spent": dict(self.spent),
            "budget": dict(self.budget),
            "overshoot": dict(self.overshoot),
            "sources": dict(self.sources),
            "stopped_by": self.stopped_by,
            **({"note": self.note} if self.note else {}),
            "run": None if self.run is None else str(self.run),
        }


def train(
    *,
    task: str | None = None,
    model: str | Model | None = None,
    dataset: str | Dataset | None = None,
    shards: Sequence[Shard] | None = None,
    test: Shard | None = None,
    budget: str | Sequence[str] | None = None,
    case: int | None = None,
    out: str | Path | None = None,
    watch: Watch | None = None,
    track: str | Sequence[str] = (),
    engine: EngineName = "in-process",
    ray_address: str | None = None,
    actors: int | None = None,
    **options: Unpack[SettingsOptions],
) -> Result:
    """Trains a model under a budget; does what `fedbudget run` does.

    Args:
      task: settings by a name, such as `svm-sgd-mnist`, which the other arguments come before.
      model: a name, or any `Model`, such as a `TorchModel` or a `FunctionModel` of your own.
      dataset: a name, a path, or a `Dataset`; not used when shards are given.
      shards: the nodes' data, (x, y) each, y None where there is nothing to predict.
      test: (x, y) to test on, with shards.
      budget: one limit or several, such as `["time=15s", "bytes=20MB"]`.
      case: 1 to 4, short for `partition="case:N"`.
      out: a folder for the run; nothing is written without it.
      watch: called with the record of every round.
      track: where the run is followed besides its folder: `mlflow`, `tensorboard` or both.
      engine: `in-process`, or `ray` for a cluster.
      ray_address: of the Ray cluster; this machine when not given.
      actors: how many of Ray's processes share the nodes; one per core when not given.
      options: the other fields of `fedbudget.Settings`.

    >>> result = train(model="svm", dataset="digits", case=2, budget="time=2s")
    >>> result.stopped_by, sorted(result.spent)
    ('time', ['time'])
    """
    trackers = chosen((track,) if isinstance(track, str) else track)
    found = dataset if isinstance(dataset, Dataset) else None
    name = dataset if isinstance(dataset, str) else None
    if shards is not None:
        found = from_arrays(shards, test)
    settings = Settings.from_python(
        task=task,
        case=case,
        model=model if isinstance(model, str | None) else model.name,
        dataset=name if found is None else found.name,
        budget=budget,
        **options,
    )
    own = None if isinstance(model, str | None) else model
    with planned(settings, engine=engine, ray_address=ray_address, actors=actors, dataset=found, model=own) as plan:
        return execute(plan, out=None if out is None else Path(out), watch=watch, trackers=trackers)


@contextmanager
def planned(
    settings: Settings,
    *,
    engine: EngineName = "in-process",
    ray_address: str | None = None,
    actors: int | None = None,
    dataset: Dataset | None = None,
    model: Model | None = None,
) -> Iterator[Plan]:
    """The plan of a run, as long as what makes it is there; see `train` for what is given."""
    if engine == "ray":
        from fedbudget.cluster import on_ray  # Ray is an extra

        with on_ray(settings, address=ray_address, actors=actors, dataset=dataset, model=model) as plan:
            yield plan
    elif engine != "in-process":
        raise UserError(f"unknown engine {engine!r}; use in-process or ray")
    elif ray_address is not None or actors is not None:
        raise UserError("a Ray address, or a number of actors, goes with engine ray")
    else:
        yield prepare(settings, dataset=dataset, model=model)


def execute(
    plan: Plan,
    *,
    out: Path | None = None,
    watch: Watch | None = None,
    plot: bool = True,
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Makes the run; with `out` it is also written to disk, round by round, and with `plot` drawn at its end.

    Trackers follow a run that is written to disk, and show what is there.
    """
    if trackers and out is None:
        raise UserError("a run that is tracked needs a folder; say which with out")
    with interruptible(plan.wake) as interrupted, ExitStack() as stack:
        writer = None if out is None else _writer(plan, out)
        if writer is not None and plan.checkpointer is None:  # a keeper adds records at its own pace
            stack.callback(writer.close)
        if writer is not None and trackers:
            earlier = [] if plan.resumed is None else Run.open(writer.path).rounds
            began = time.time() - (earlier[-1].wall if earlier else 0.0)
            about = About(writer.path, plan.title, plan.settings, began)
            followed = stack.enter_context(following(trackers, about, earlier))
            watch = _each_of(followed.observe, watch)
        diary = _Diary(plan, writer, watch)
        outcome = plan.engine(observe=diary.observe, interrupted=interrupted)
        if plan.checkpointer is not None:
            plan.checkpointer.close()
        result = _result(plan, outcome, diary.records, out)
        if writer is not None:
            summary = _save(plan, writer, result)
        if writer is not None and plot:
            from fedbudget.runs.plot import plot_run  # matplotlib is slow to import, and not needed until here

            writer.replace(PLOT, plot_run(result.rounds, result.budget, title=plan.title))
        if trackers:
            followed.finish(summary)
    return result


def _each_of(first: Watch, second: Watch | None) -> Watch:
    def watch(record: RoundRecord) -> None:
        first(record)
        if second is not None:
            second(record)

    return watch


def default_folder(settings: Settings) -> Path:
    """A new folder's name under runs/, that tells when and what."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{settings.model}-{Path(settings.dataset).stem}"
    path, number = RUNS / stem, 2
    while path.exists():
        path, number = RUNS / f"{stem}-{number}", number + 1
    return path


def _writer(plan: Plan, out: Path) -> RunWriter:
    if plan.resumed is not None:
        return RunWriter.resume(out, plan.resumed.records)
    writer = RunWriter(out, _config(plan))
    if isinstance(plan, PlanHere):
        nodes.write_simulated(out, plan.fleet.shards.size)
    return writer


class _Diary:
    """Turns rounds into records, for the disk and for whoever watches."""

    def __init__(self, plan: Plan, writer: RunWriter | None, watch: Watch | None) -> None:
        self.records = [] if plan.resumed is None or writer is None else Run.open(writer.path).rounds
        self._plan = plan
        self._writer = writer
        self._watch = watch
        self._began = time.perf_counter() - (self.records[-1].wall if self.records else 0.0)
        self._next_evaluation = 0.0
        if plan.checkpointer is not None and writer is not None:
            plan.checkpointer.open(writer.path, writer.append)

    def observe(self, round_: Round, broadcast: Broadcast) -> None:
        accuracy, share = None, round_.ledger.share
        if self._plan.test is not None and (share >= self._next_evaluation or broadcast.tau == 0):
            accuracy = self._plan.model.accuracy(broadcast.w, self._plan.test)
            points = self._plan.settings.evaluations
            self._next_evaluation = (int(share * points) + 1) / points
        record = RoundRecord.of(round_, accuracy=accuracy, wall=time.perf_counter() - self._began)
        self.records.append(record)
        if self._writer is not None:
            (self._writer.append if self._plan.checkpointer is None else self._plan.checkpointer.keep)(record)
        if self._watch is not None:
            self._watch(record)


def _result(plan: Plan, outcome: Outcome, records: Sequence[RoundRecord], out: Path | None) -> Result:
    taus = [record.tau for record in records if record.tau > 0]
    budget, ledger = plan.budget, outcome.ledger
    return Result(
        loss=_loss(plan, outcome, records),
        accuracy=None if plan.test is None else plan.model.accuracy(outcome.w, plan.test),
        average_tau=average_tau(taus),
        aggregations=0 if plan.settings.method == "centralized" else len(taus),
        local_updates=sum(taus),
        spent=budget.label(ledger.spent),
        budget=dict(budget.limits),
        overshoot=budget.label(ledger.overshoot),
        sources=plan.meters.sources,
        stopped_by=outcome.stopped_by,
        metrics={} if plan.test is None else plan.model.metrics(outcome.w, plan.test),
        note=plan.dataset.note,
        run=out,
        w=outcome.w,
        rounds=records,
    )


def _loss(plan: Plan, outcome: Outcome, records: Sequence[RoundRecord]) -> float:
    if plan.train is not None:
        return loss_over(plan.model, outcome.w, plan.train)
    return records[-1].best_loss if records else math.nan


def _config(plan: Plan) -> str:
    config = plan.settings.to_toml()
    if not plan.repeatable:
        where = "data were with the nodes" if plan.train is None else "model or the data was given in Python"
        config = f"# The {where}: this file alone does not repeat the run.\n{config}"
    return f"# fedbudget {__version__}\n{config}"


def _save(plan: Plan, writer: RunWriter, result: Result) -> dict[str, Any]:
    """Writes how the run ended, and what was trained; gives the summary."""
    summary = {
        **result.to_json(),
        "status": "interrupted" if result.stopped_by == "interrupted" else "finished",
        **({} if plan.traffic is None else {"network": dict(plan.traffic())}),
        "parameters": plan.model.parameters,
        "version": __version__,
    }
    saved = SavedModel(result.w, plan.settings.model, plan.dataset.classes, plan.dataset.standardization)
    writer.finish(summary, saved.to_bytes())
    return summary
