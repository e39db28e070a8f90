"""Execute a prepared run: records, checkpoints, trackers, result."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedbudget import __version__
from fedbudget.engines.engine import interruptible
from fedbudget.engines.noise import keep_account, paid_in
from fedbudget.engines.remote.task import rounds_ahead
from fedbudget.errors import UserError
from fedbudget.evaluation.evaluator import Judge
from fedbudget.evaluation.kept import KEPT
from fedbudget.evaluation.targets import overfitting
from fedbudget.forecasts.forecast import next_forecast
from fedbudget.launch.prepared import Callback, PreparedRun
from fedbudget.launch.privacy import accounted_epsilon, noise_multipliers
from fedbudget.models.base import loss_over
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast
from fedbudget.result import Result
from fedbudget.runs import nodes
from fedbudget.runs.checkpoint import CheckpointWriter
from fedbudget.runs.folder import PLOT, Run, RunWriter
from fedbudget.runs.nodes import NodeStatusWriter
from fedbudget.runs.overview import RUNS
from fedbudget.runs.record import RoundRecord, average_tau
from fedbudget.runs.text import model_title
from fedbudget.settings.settings import Settings
from fedbudget.trackers.tracker import RunInfo, Tracker, tracking
from fedbudget.trained.model import TrainedModel


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
    engine = prepared.engine
    judge = Judge(prepared)
    with interruptible(engine.wake) as interrupted, ExitStack() as stack:
        writer = (
            None if out is None else stack.enter_context(closing(_writer(prepared, out)))
        )
        if writer is not None:
            prepared.folder_made(writer.path)
            keep_account(
                prepared.aggregator, writer.path, resumed=prepared.resumed is not None
            )
        earlier = (
            []
            if prepared.resumed is None or writer is None
            else Run.open(writer.path).rounds
        )
        if prepared.resumed is not None and writer is not None:
            judge.resume(earlier, writer.path)
        callbacks = [*prepared.callbacks, *callbacks]
        if writer is not None and trackers:
            began = time.time() - (earlier[-1].wall if earlier else 0.0)
            info = RunInfo(writer.path, prepared.title, prepared.settings, began)
            followed = stack.enter_context(tracking(trackers, info, earlier))
            callbacks.insert(0, followed.observe)
        recorder = stack.enter_context(
            closing(_Recorder(prepared, judge, writer, callbacks, earlier))
        )
        outcome = engine.run(
            observe=recorder.observe,
            interrupted=lambda: interrupted() or recorder.stopped_by is not None,
            save=recorder.save,
        )
        recorder.finish()
        if recorder.stopped_by is not None and (
            outcome.stopped_by == "interrupted" or judge.at_target is not None
        ):
            outcome = replace(
                outcome, stopped_by="interrupted" if interrupted() else recorder.stopped_by
            )
        result = _result(prepared, outcome, judge, recorder.records, out)
        if writer is not None:
            summary = _save(prepared, writer, result)
            if plot and find_spec("matplotlib") is not None:
                from fedbudget.runs.plot import (
                    plot_run,  # matplotlib is slow to import, and not needed until here
                )

                writer.replace(
                    PLOT, plot_run(result.rounds, result.budget, title=prepared.title)
                )
            if trackers:
                followed.finish(summary)
    return result


def default_folder(settings: Settings) -> Path:
    """A new folder's name under runs/, that tells when and what."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{model_title(settings)}-{Path(settings.dataset).stem}"
    path = RUNS / stem
    number = 2
    while path.exists():
        path, number = RUNS / f"{stem}-{number}", number + 1
    return path


def _writer(prepared: PreparedRun, out: Path) -> RunWriter:
    if prepared.resumed is not None:
        return RunWriter.resume(out, _config(prepared), prepared.resumed.records)
    writer = RunWriter(out, _config(prepared))
    if prepared.shards is not None:
        speeds = prepared.meters.speeds
        nodes.write_simulated(
            out, prepared.shards.size, None if speeds is None else speeds.values
        )
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
        resumed = prepared.resumed
        ahead = rounds_ahead(prepared.model.parameters)
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
        figures = self._judge.look(round_, broadcast)
        wall = time.perf_counter() - self._began
        more: Any = {
            "metrics": dict(figures.metrics) or None,
            "spread": dict(figures.spread) or None,
        }
        record = RoundRecord.of(
            round_, accuracy=figures.accuracy, test_loss=figures.loss, wall=wall, **more
        )
        self.records.append(record)
        judge = self._judge
        best = self._judge.best
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
    prepared: PreparedRun,
    outcome: Outcome,
    judge: Judge,
    records: Sequence[RoundRecord],
    out: Path | None,
) -> Result:
    taus = [record.effective_tau for record in records if record.tau > 0]
    budget = prepared.budget
    ledger = outcome.ledger
    model = prepared.model
    w = outcome.w
    loss = records[-1].best_loss if records else math.nan
    if judge.kept is not None:
        w = judge.kept.w
        loss = judge.kept.loss
    private = budget.by_noise
    if prepared.train is not None and private is None:
        loss = loss_over(model, w, prepared.train)
    figures = judge.final(w)
    sources = prepared.meters.sources
    spent = budget.totals(ledger.spent)
    if private is not None and budget.delta is not None:
        rho = budget.of_noise(ledger.spent)
        if out is not None:
            rho = max(
                rho, paid_in(out)
            )  # of a last round, which nodes may have opened though it was never closed
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
        overshoot={
            name: max(0.0, spent[name] - limit) for name, limit in budget.limits.items()
        },
        sources=sources,
        trial_seconds=prepared.trial_seconds if "measured" in sources.values() else 0.0,
        stopped_by=outcome.stopped_by,
        note=prepared.dataset.note,
        run=out,
        w=w,
        model=TrainedModel(
            str(prepared.settings.model), model, w, prepared.dataset.empty()
        ),
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
        where = (
            "data were with the nodes"
            if prepared.train is None
            else "model, data or a rule was given in Python"
        )
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
