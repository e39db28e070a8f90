"""The main path: a run that is ready is carried out, and gives a result and, where wanted, a run on disk.

The command line and the Python API both come through here.
"""

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedbudget import __version__
from fedbudget.control import Controller
from fedbudget.data.dataset import Dataset
from fedbudget.data.given import Shard, from_samples, from_shards
from fedbudget.data.samples import SampleSequence
from fedbudget.engines.interrupt import interruptible
from fedbudget.engines.remote.task import rounds_ahead
from fedbudget.errors import UserError
from fedbudget.forecasts.latest import next_forecast
from fedbudget.judge import Judge
from fedbudget.launch.accounting import accounted_epsilon, noise_multipliers
from fedbudget.launch.arguments import read_arguments
from fedbudget.launch.launch import launch
from fedbudget.launch.noise import keep_account, paid_in
from fedbudget.launch.prepared import Callback, PreparedRun
from fedbudget.models.base import loss_over
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.update import UpdateRule
from fedbudget.result import Result
from fedbudget.runs import nodes
from fedbudget.runs.checkpoint_writer import CheckpointWriter
from fedbudget.runs.folder import PLOT, Run, RunWriter
from fedbudget.runs.kept import KEPT
from fedbudget.runs.nodes import NodeStatusWriter
from fedbudget.runs.overfitting import overfitting
from fedbudget.runs.overview import RUNS
from fedbudget.runs.record import RoundRecord, average_tau
from fedbudget.runs.title import model_title
from fedbudget.setting_types import EngineName, SettingsOptions
from fedbudget.settings import Settings
from fedbudget.step_size import StepSize
from fedbudget.trackers import make_trackers
from fedbudget.trackers.background import tracking
from fedbudget.trackers.tracker import RunInfo, Tracker
from fedbudget.trained.model import TrainedModel

if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel


def train(
    *,
    task: str | None = None,
    model: "str | OwnModel | None" = None,
    dataset: str | Dataset | SampleSequence | None = None,
    shards: Sequence[Shard] | None = None,
    test: Shard | None = None,
    budget: str | Sequence[str] | None = None,
    until: str | Sequence[str] | None = None,
    case: int | None = None,
    controller: Controller | None = None,
    step_size: float | str | StepSize | None = None,
    update: str | UpdateRule | None = None,
    combine: str | CombineRule | None = None,
    callbacks: Sequence[Callback] = (),
    out: str | Path | None = None,
    resume: str | Path | None = None,
    track: str | Sequence[str] = (),
    engine: EngineName = "in-process",
    ray_address: str | None = None,
    actors: int | None = None,
    **options: Unpack[SettingsOptions],
) -> Result:
    """Trains a model under a budget; does what `fedbudget run` does.

    Args:
      task: settings by a name, such as `svm-sgd-mnist`, which the other arguments come before.
      model: a name, a PyTorch module or its class, or any `Model`, such as a `TorchModel` or a `FunctionModel` of your
        own.
      dataset: a name, a path, a `Dataset`, or samples to be given to nodes: a DataFrame with the column `target`, a
        map-style Dataset of PyTorch, or a list; not used when shards are given.
      shards: the nodes' data: (x, y) each, y None where there is nothing to predict, or samples as above.
      test: the same to test on, with shards or samples.
      budget: one limit or several, such as `["time=15s", "bytes=20MB"]`.
      until: one target or several, such as `"accuracy=0.95"`; the run ends when one is reached.
      case: 1 to 4, short for `partition="case:N"`.
      controller: chooses τ in place of the method's own.
      step_size: η, `auto`, or an object that chooses it.
      update: how the mean update moves w: a rule's name, such as `fedadam`, or an object; w becomes the mean when not
        given.
      combine: how nodes' updates become one: `mean`, `clipped`, `trimmed`, `median`, or an object.
      callbacks: each is called with the record of every round; the run ends after one for which it returns True.
      out: a folder for the run; nothing is written without it.
      resume: the folder of a run to go on with, by its own settings; objects that it was given are given again. With
        `budget` it has more to spend: `"time=+5s"` adds to its limit.
      track: where the run is followed besides its folder: `mlflow`, `tensorboard` or both.
      engine: `in-process`, `ray` for a cluster, or `network` for node processes on this machine.
      ray_address: of the Ray cluster; this machine when not given.
      actors: how many of Ray's processes share the nodes; one per core when not given.
      options: the other fields of `fedbudget.Settings`.

    >>> result = train(model="svm", dataset="digits", case=2, budget="time=2s")
    >>> result.stopped_by, sorted(result.spent)
    ('time', ['time'])
    """
    trackers = make_trackers((track,) if isinstance(track, str) else track)
    own_data = _own_data(dataset, shards, test, options)
    asked = read_arguments(
        command="run",
        task=task,
        case=case,
        model=model,
        dataset=dataset if own_data is None and isinstance(dataset, str) else own_data,
        budget=budget,
        until=until,
        controller=controller,
        step_size=step_size,
        update=update,
        combine=combine,
        out=out,
        resume=resume,
        options=options,
    )
    where: dict[str, Any] = {"engine": engine, "ray_address": ray_address, "actors": actors}
    with launch(asked.settings, asked.overrides, **where, resumed=asked.resumed) as prepared:
        for warning in prepared.dataset.warnings:
            warnings.warn(str(UserError(warning)), stacklevel=2)
        return execute(prepared, out=asked.out, callbacks=callbacks, trackers=trackers)


def _own_data(
    dataset: str | Dataset | SampleSequence | None,
    shards: Sequence[Shard] | None,
    test: Shard | None,
    options: SettingsOptions,
) -> Dataset | None:
    """Data that was given from Python, if it was."""
    names = ("target", "drop", "categorical", "impute", "classes", "standardise", "test_share")
    said: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    settings = Settings(**said)
    tables, standardise = settings.table_options(), settings.standardise
    if shards is not None:
        return from_shards(shards, test, tables, standardise=standardise)
    if isinstance(dataset, str | Dataset | None):
        return dataset if isinstance(dataset, Dataset) else None
    return from_samples(dataset, test, tables, test_share=settings.test_share, standardise=standardise)


def execute(
    prepared: PreparedRun,
    *,
    out: Path | None = None,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Makes the run; with `out` it is also written to disk, round by round, and with `plot` drawn at its end
    where matplotlib is installed.

    Trackers follow a run that is written to disk, and show what is there.
    """
    if trackers and out is None:
        raise UserError("a run that is tracked needs a folder; say which with out")
    engine, judge = prepared.engine, Judge(prepared)
    with interruptible(engine.wake) as interrupted, ExitStack() as stack:
        writer = None if out is None else stack.enter_context(closing(_writer(prepared, out)))
        if writer is not None:
            prepared.folder_made(writer.path)
            keep_account(prepared.aggregator, writer.path, resumed=prepared.resumed is not None)
        earlier = [] if prepared.resumed is None or writer is None else Run.open(writer.path).rounds
        if prepared.resumed is not None and writer is not None:
            judge.resume(earlier, writer.path)
        callbacks = [*prepared.callbacks, *callbacks]
        if writer is not None and trackers:
            began = time.time() - (earlier[-1].wall if earlier else 0.0)
            info = RunInfo(writer.path, prepared.title, prepared.settings, began)
            followed = stack.enter_context(tracking(trackers, info, earlier))
            callbacks.insert(0, followed.observe)
        recorder = stack.enter_context(closing(_Recorder(prepared, judge, writer, callbacks, earlier)))
        outcome = engine.run(
            observe=recorder.observe,
            interrupted=lambda: interrupted() or recorder.stopped_by is not None,
            save=recorder.save,
        )
        recorder.finish()
        if recorder.stopped_by is not None and (outcome.stopped_by == "interrupted" or judge.at_target is not None):
            outcome = replace(outcome, stopped_by="interrupted" if interrupted() else recorder.stopped_by)
        result = _result(prepared, outcome, judge, recorder.records, out)
        if writer is not None:
            summary = _save(prepared, writer, result)
            if plot and find_spec("matplotlib") is not None:
                from fedbudget.runs.plot import plot_run  # matplotlib is slow to import, and not needed until here

                writer.replace(PLOT, plot_run(result.rounds, result.budget, title=prepared.title))
            if trackers:
                followed.finish(summary)
    return result


def default_folder(settings: Settings) -> Path:
    """A new folder's name under runs/, that tells when and what."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{model_title(settings)}-{Path(settings.dataset).stem}"
    path, number = RUNS / stem, 2
    while path.exists():
        path, number = RUNS / f"{stem}-{number}", number + 1
    return path


def _writer(prepared: PreparedRun, out: Path) -> RunWriter:
    if prepared.resumed is not None:
        return RunWriter.resume(out, _config(prepared), prepared.resumed.records)
    writer = RunWriter(out, _config(prepared))
    if prepared.shards is not None:
        speeds = prepared.meters.speeds
        nodes.write_simulated(out, prepared.shards.size, None if speeds is None else speeds.values)
    return writer


class _Recorder:
    """Turns rounds into records, for the disk and for whoever is to be called.

    Where rounds cannot be made again, records reach the disk with the checkpoint that holds them.

    Args:
      earlier: records of a run that goes on.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        judge: Judge,
        writer: RunWriter | None,
        callbacks: Sequence[Callback],
        earlier: Sequence[RoundRecord],
    ) -> None:
        self.records = list(earlier)
        self.stopped_by: str | None = None
        self._prepared = prepared
        self._judge = judge
        self._writer = writer
        self._callbacks = callbacks
        self._began = time.perf_counter() - (earlier[-1].wall if earlier else 0.0)
        self._held = prepared.engine.checkpoint_interval == 0
        self._checkpoints: CheckpointWriter | None = None
        self._statuses: NodeStatusWriter | None = None
        if writer is None or prepared.engine.state() is None:
            return
        resumed, ahead = prepared.resumed, rounds_ahead(prepared.model.parameters)
        held = () if resumed is None else resumed.records
        self._checkpoints = CheckpointWriter(
            writer.path,
            writer.append if self._held else lambda record: None,
            ahead=ahead,
            sync=writer.sync,
            spare=self._held,
            records=held,
            interval=prepared.engine.checkpoint_interval,
            conditions=prepared.conditions,
        )
        if resumed is None:
            self.save()
            self._checkpoints.flush()  # there is something to go on from before the first node begins
        if self._held:
            self._statuses = NodeStatusWriter(writer.path, prepared.engine.node_statuses)

    def observe(self, round_: Round, broadcast: Broadcast) -> None:
        figures, wall = self._judge.look(round_, broadcast), time.perf_counter() - self._began
        more: Any = {"metrics": dict(figures.metrics) or None, "spread": dict(figures.spread) or None}
        record = RoundRecord.of(round_, accuracy=figures.accuracy, test_loss=figures.loss, wall=wall, **more)
        self.records.append(record)
        judge, best = self._judge, self._judge.best
        stopped_by = judge.verdict(self.records, figures, round_, broadcast.w)
        if self._writer is not None and judge.best is not None and judge.best is not best:
            self._writer.replace(KEPT, judge.best.to_bytes())
        if self._held and self._checkpoints is not None:
            self.save(record)
        elif self._writer is not None:
            self._writer.append(record)
            if self._checkpoints is not None and self._checkpoints.due():
                self.save()
        for callback in self._callbacks:
            if callback(record):
                stopped_by = stopped_by or "callback"
        if stopped_by is not None and self.stopped_by is None:
            self.stopped_by = stopped_by
            self._prepared.engine.wake()

    def save(self, record: RoundRecord | None = None) -> None:
        """Takes where the run has come to, to be on disk before long."""
        state = None if self._checkpoints is None else self._prepared.engine.state()
        if self._checkpoints is not None and state is not None:
            last = record if self._held or not self.records else self.records[-1]
            self._checkpoints.save(*state, last)

    def finish(self) -> None:
        """Returns when all is on disk."""
        if self._statuses is not None:
            self._statuses.close()
        if self._checkpoints is not None:
            self._checkpoints.flush()

    def close(self) -> None:
        """Ends its threads."""
        if self._statuses is not None:
            self._statuses.close()
        if self._checkpoints is not None:
            self._checkpoints.close()


def _result(
    prepared: PreparedRun, outcome: Outcome, judge: Judge, records: Sequence[RoundRecord], out: Path | None
) -> Result:
    taus = [record.effective_tau for record in records if record.tau > 0]
    budget, ledger, model = prepared.budget, outcome.ledger, prepared.model
    w, loss = outcome.w, records[-1].best_loss if records else math.nan
    if judge.kept is not None:
        w, loss = judge.kept.w, judge.kept.loss
    private = budget.by_noise
    if prepared.train is not None and private is None:
        loss = loss_over(model, w, prepared.train)
    figures = judge.final(w)
    sources, spent = prepared.meters.sources, budget.totals(ledger.spent)
    if private is not None and budget.delta is not None:
        rho = budget.of_noise(ledger.spent)
        if out is not None:
            rho = max(rho, paid_in(out))  # of a last round, which nodes may have opened though it was never closed
        paid = noise_multipliers(records, rho)
        spent[private] = accounted_epsilon(paid, budget.delta)
    return Result(
        loss=loss,
        accuracy=figures.accuracy,
        metrics=figures.metrics,
        average_tau=average_tau(taus),
        aggregations=0 if prepared.settings.method == "centralized" else len(taus),
        local_updates=round(sum(taus)),
        spent=spent,
        budget=dict(budget.limits),
        overshoot={name: max(0.0, spent[name] - limit) for name, limit in budget.limits.items()},
        sources=sources,
        trial_seconds=prepared.trial_seconds if "measured" in sources.values() else 0.0,
        stopped_by=outcome.stopped_by,
        note=prepared.dataset.note,
        run=out,
        w=w,
        model=TrainedModel(str(prepared.settings.model), model, w, prepared.dataset.empty()),
        rounds=records,
        until=judge.reached_by(loss, figures),
        kept_round=None if judge.kept is None else judge.kept.round,
        overfitting=overfitting(records),
        to_beat=figures.to_beat,
        spread=figures.spread,
        privacy_delta=budget.delta,
    )


def _config(prepared: PreparedRun) -> str:
    config = prepared.settings.to_toml()
    if not prepared.repeatable:
        where = "data were with the nodes" if prepared.train is None else "model, data or a rule was given in Python"
        config = f"# The {where}: this file alone does not repeat the run.\n{config}"
    return f"# fedbudget {__version__}\n{config}"


def _save(prepared: PreparedRun, writer: RunWriter, result: Result) -> dict[str, Any]:
    """Writes how the run ended, and what was trained; gives the summary."""
    traffic = prepared.engine.traffic()
    summary = {
        **result.to_json(),
        "status": "interrupted" if result.stopped_by == "interrupted" else "finished",
        **({} if not traffic else {"network": dict(traffic)}),
        "parameters": prepared.model.parameters,
        "forecast": next_forecast(result.rounds, result.budget, vars(result)).to_json(),
        "version": __version__,
    }
    writer.finish(summary, result.model.saved().to_bytes())
    return summary
