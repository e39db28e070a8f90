"""Execute a prepared run: records, checkpoints, trackers, result."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedbudget import __version__, durable_files
from fedbudget.arrays import Float32
from fedbudget.engines.engine import (
    Pay,
    PersonalModels,
    RoundEngine,
    interruptible,
    no_payment,
)
from fedbudget.engines.noise import open_payments, paid_in
from fedbudget.engines.privacy_ledger import PrivacyLedger
from fedbudget.engines.remote.task import rounds_ahead
from fedbudget.errors import UserError
from fedbudget.evaluation.evaluator import Evaluator
from fedbudget.evaluation.kept import KEPT
from fedbudget.evaluation.targets import overfitting
from fedbudget.forecasts.forecast import next_forecast
from fedbudget.launch.prepared import Callback, PreparedRun
from fedbudget.launch.privacy import (
    guarantee,
    ledger_name,
    open_ledger,
    with_ledger,
)
from fedbudget.protocol.features.feature import Chosen
from fedbudget.protocol.state import Outcome, Round
from fedbudget.resources.privacy import PrivacyGuarantee, epsilon_of
from fedbudget.result import Result, SiteLoss
from fedbudget.runs import nodes
from fedbudget.runs.checkpoint import CheckpointWriter
from fedbudget.runs.folder import PLOT, ROUNDS, Run, RunWriter
from fedbudget.runs.nodes import NodeStatusWriter
from fedbudget.runs.overview import RUNS
from fedbudget.runs.record import RoundRecord, average_tau
from fedbudget.runs.stored_rounds import StoredRounds
from fedbudget.runs.text import model_title
from fedbudget.settings.settings import Settings
from fedbudget.trackers.tracker import RunInfo, Tracker, tracking
from fedbudget.trained.model import TrainedModel, personal_path


def execute(
    prepared: PreparedRun,
    *,
    out: Path | None = None,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Execute the run and return its result.

    Args:
      out: folder in which every round is written.
      callbacks: called with the record of every round.
      plot: whether to draw the run at its end, if matplotlib is installed.
      trackers: trackers that follow the folder of the run.
    """
    if trackers and out is None:
        raise UserError("a tracked run needs a folder; set it with `out`")
    engine = prepared.engine
    evaluator = Evaluator(prepared)
    ledger = open_ledger(prepared.settings, prepared.dataset)
    if ledger is not None:
        ledger.read()  # a damaged one is refused before the first round
    with interruptible(engine.wake) as interrupted, ExitStack() as stack:
        writer: RunWriter | None = None
        earlier: Sequence[RoundRecord] = ()
        pay: Pay = no_payment
        if out is not None:
            resumed = prepared.resumed is not None
            writer = stack.enter_context(closing(_writer(prepared, out)))
            prepared.folder_made(writer.path)
            pay = open_payments(prepared.aggregator, writer.path, resumed=resumed)
            if resumed:
                earlier = Run.open(writer.path).rounds
                evaluator.resume(earlier, writer.path)
            if engine.checkpoint_interval == 0:  # such a run may have any number of rounds
                earlier = StoredRounds(writer.path / ROUNDS, len(earlier))
        name = ledger_name(out)
        pay = with_ledger(ledger, pay, name)
        if prepared.sums is not None:
            prepared.sums.pay = with_ledger(ledger, prepared.sums.pay, name)
        callbacks = [*prepared.callbacks, *callbacks]
        if writer is not None and trackers:
            began = time.time() - (earlier[-1].wall if earlier else 0.0)
            info = RunInfo(writer.path, prepared.title, prepared.settings, began)
            followed = stack.enter_context(tracking(trackers, info, earlier))
            callbacks.insert(0, followed.observe)
        recorder = stack.enter_context(
            closing(_Recorder(prepared, evaluator, writer, callbacks, earlier))
        )
        results: list[Result] = []
        summary: dict[str, Any] = {}

        def conclude(outcome: Outcome) -> None:
            """Save the result, before nodes hear that the run is over and end.

            Otherwise a crash in between would lose rounds, and a resumed run would wait for
            nodes that never return.
            """
            recorder.finish()
            personal: list[PersonalModels] = []
            if prepared.settings.personal and not interrupted():
                w = outcome.w if evaluator.kept is None else evaluator.kept.w
                personal = _personal_models(prepared, w)
            if recorder.stopped_by is not None and (
                outcome.stopped_by == "interrupted" or evaluator.target_reached
            ):
                by = "interrupted" if interrupted() else recorder.stopped_by
                outcome = replace(outcome, stopped_by=by)
            result = _result(prepared, outcome, evaluator, recorder.records, out, ledger)
            if personal:
                result = _with_personal(prepared, result, personal[0])
            if writer is not None:
                summary.update(_save(prepared, writer, result))
            results.append(result)

        engine.run(
            observe=recorder.observe,
            interrupted=lambda: interrupted() or recorder.stopped_by is not None,
            save=recorder.save,
            pay=pay,
            after=conclude,
        )
        (result,) = results
        if writer is not None:
            if plot and find_spec("matplotlib") is not None:
                # matplotlib is slow to import.
                from fedbudget.runs.plot import plot_run

                writer.replace(
                    PLOT, plot_run(result.rounds, result.budget, title=prepared.title)
                )
            if trackers:
                followed.finish(summary)
    return result


def default_folder(settings: Settings) -> Path:
    """Return a new folder under runs/, named after time, model and dataset."""
    dataset = Path(settings.dataset).stem
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{model_title(settings)}-{dataset}"
    path = RUNS / stem
    number = 2
    while path.exists():
        path = RUNS / f"{stem}-{number}"
        number += 1
    return path


def _writer(prepared: PreparedRun, out: Path) -> RunWriter:
    if prepared.resumed is not None:
        return RunWriter.resume(out, _config(prepared), prepared.resumed.records)
    writer = RunWriter(out, _config(prepared))
    if prepared.shards is not None:
        speeds = prepared.meters.speeds
        nodes.write_simulated(
            out,
            prepared.shards.size,
            None if speeds is None else speeds.values,
            prepared.site_names,
        )
    return writer


class _Recorder:
    """Converts rounds to records, writes them, and calls the callbacks.

    If rounds cannot be repeated, a record is written together with its checkpoint.

    Args:
      earlier: records of a resumed run.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        evaluator: Evaluator,
        writer: RunWriter | None,
        callbacks: Sequence[Callback],
        earlier: Sequence[RoundRecord],
    ) -> None:
        self.records: list[RoundRecord] | StoredRounds = (
            earlier if isinstance(earlier, StoredRounds) else list(earlier)
        )
        self.stopped_by: str | None = None
        self._prepared = prepared
        self._evaluator = evaluator
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
            self._checkpoints.flush()  # so that even a crash in round 1 can be resumed
        if self._held:
            self._statuses = NodeStatusWriter(writer.path, prepared.engine.node_statuses)

    def observe(self, round_: Round, w: Float32) -> None:
        figures = self._evaluator.evaluate_if_due(round_, w)
        wall = time.perf_counter() - self._began
        record = RoundRecord.of(
            round_,
            accuracy=figures.accuracy,
            test_loss=figures.loss,
            wall=wall,
            metrics=dict(figures.metrics) or None,
            spread=dict(figures.spread) or None,
        )
        self.records.append(record)
        evaluator = self._evaluator
        best = evaluator.best
        stopped_by = evaluator.stop_reason(self.records, figures, round_, w)
        if (
            self._writer is not None
            and evaluator.best is not None
            and evaluator.best is not best
        ):
            self._writer.replace(KEPT, evaluator.best.to_bytes())
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
        """Save the state of the run soon, in the background."""
        state = None if self._checkpoints is None else self._prepared.engine.state()
        if self._checkpoints is not None and state is not None:
            last = record if self._held or not self.records else self.records[-1]
            self._checkpoints.save(*state, last)

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if self._statuses is not None:
            self._statuses.close()
        if self._checkpoints is not None:
            self._checkpoints.flush()

    def close(self) -> None:
        """End the threads."""
        if self._statuses is not None:
            self._statuses.close()
        if self._checkpoints is not None:
            self._checkpoints.close()


def _result(
    prepared: PreparedRun,
    outcome: Outcome,
    evaluator: Evaluator,
    records: Sequence[RoundRecord],
    out: Path | None,
    ledger_of_data: PrivacyLedger | None,
) -> Result:
    taus = [record.effective_tau for record in records if record.tau > 0]
    budget = prepared.budget
    ledger = outcome.ledger
    model = prepared.model
    w = outcome.w
    loss = records[-1].best_loss if records else math.nan
    if evaluator.kept is not None:
        w = evaluator.kept.w
        loss = evaluator.kept.loss
    private = budget.by_noise
    if private is None:
        known = prepared.training_loss(w)
        loss = loss if known is None else known
    chosen = outcome.chosen if evaluator.kept is None else None
    kept_round = None if chosen is None else chosen.round
    if evaluator.kept is not None:
        kept_round = evaluator.kept.round
    figures = evaluator.final(w)
    sources = prepared.meters.sources
    spent = budget.totals(ledger.spent)
    privacy: PrivacyGuarantee | None = None
    if private is not None and budget.delta is not None:
        # A last round that was never closed is paid for, since nodes may have opened it.
        rho = max(budget.privacy_part(ledger.spent), 0.0 if out is None else paid_in(out))
        spent[private] = epsilon_of(rho, budget.delta)
        if prepared.settings.privacy_noise == "seeded":
            sources = {**sources, private: "simulated"}
        privacy = guarantee(
            prepared.settings,
            spent[private],
            budget.delta,
            ledger_of_data,
            prepared.exact_tests,
        )
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
            str(prepared.settings.model), model, w, prepared.dataset.empty(), privacy
        ),
        rounds=records,
        validation_loss=None if chosen is None else chosen.loss,
        validation_start=None if chosen is None else chosen.first_loss,
        improved_round=None if chosen is None else chosen.improved,
        sites=_sites(prepared, chosen),
        until=evaluator.reached_by(loss if chosen is None else chosen.loss, figures),
        kept_round=kept_round,
        kept_mean=chosen is not None and chosen.mean,
        overfitting=None if prepared.validates else overfitting(records),
        to_beat=figures.to_beat,
        spread=figures.spread,
        privacy_delta=budget.delta,
        privacy=privacy,
    )


def _sites(prepared: PreparedRun, chosen: Chosen | None) -> dict[str, SiteLoss]:
    """Return the validation losses of each node by its name."""
    if chosen is None:
        return {}
    names = _node_names(prepared)
    return {
        names(int(number)): SiteLoss(chosen.first_sites.get(number), loss)
        for number, loss in chosen.sites.items()
    }


def _node_names(prepared: PreparedRun) -> Callable[[int], str]:
    """Return the function from a node's number to its name."""
    names = {
        number: status.name if len(status.numbers) == 1 else f"{status.name}/{number}"
        for status in prepared.engine.node_statuses()
        for number in status.numbers
    }
    names.update(enumerate(prepared.site_names))
    return lambda number: names.get(number, f"node {number}")


def _personal_models(prepared: PreparedRun, w: Float32) -> list[PersonalModels]:
    engine = prepared.engine
    assert isinstance(engine, RoundEngine)
    models = engine.personalise(w, figures=prepared.budget.by_noise is None)
    return [] if models is None else [models]


def _with_personal(prepared: PreparedRun, result: Result, models: PersonalModels) -> Result:
    """Return the result with personal models and their figures, in the target's unit."""
    units = prepared.dataset.standardization
    unit = 1.0 if units is None else units.target_deviation
    names = _node_names(prepared)
    return replace(
        result,
        site_report={
            names(number): figures.in_unit(unit)
            for number, figures in models.figures.items()
        },
        personal={
            names(number): result.model.corrected(each.w, each.shift)
            for number, each in models.models.items()
        },
        personal_seconds=models.seconds,
    )


def _config(prepared: PreparedRun) -> str:
    config = prepared.settings.to_toml()
    if not prepared.repeatable:
        why = "The model, the data or a rule was given in Python"
        if prepared.train is None:
            why = "The data stayed on the nodes"
        config = f"# {why}: this file alone does not repeat the run.\n{config}"
    return f"# fedbudget {__version__}\n{config}"


def _save(prepared: PreparedRun, writer: RunWriter, result: Result) -> dict[str, Any]:
    """Write the summary and the trained model; return the summary."""
    traffic = prepared.engine.traffic()
    summary = {
        **result.to_json(),
        "status": "interrupted" if result.stopped_by == "interrupted" else "finished",
        **({"network": dict(traffic)} if traffic else {}),
        **({"solver": prepared.solver} if prepared.solver else {}),
        "parameters": prepared.model.parameters,
        "forecast": next_forecast(result.rounds, result.budget, vars(result)).to_json(),
        "version": __version__,
    }
    for name, model in result.personal.items():
        path = personal_path(writer.path, name)
        path.parent.mkdir(exist_ok=True)
        durable_files.replace(path, model.saved().to_bytes())
    writer.finish(summary, result.model.saved().to_bytes())
    return summary
