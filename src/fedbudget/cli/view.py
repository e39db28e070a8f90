"""Display of a run: a live view on a terminal, a plain log elsewhere, and the result.

View and log go to standard error, so that standard output can be piped.
"""

import json as jsonlib
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbudget.cli.console import decimals, plain_table
from fedbudget.cli.dashboard import run_dashboard
from fedbudget.cli.forecast import interval_text
from fedbudget.cli.options import OutputOptions
from fedbudget.errors import UserError, flag
from fedbudget.forecasts.curve import LEVEL
from fedbudget.forecasts.forecast import Forecast, LatestForecast, next_forecast
from fedbudget.launch.execute import default_folder, execute
from fedbudget.launch.prepared import Callback, PreparedRun
from fedbudget.models.compiling import COMPILING, on_compiling
from fedbudget.node_status import NodeStatus
from fedbudget.resources import RESOURCES
from fedbudget.result import Result, SiteLoss
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.text import metrics_text, spread_text
from fedbudget.trackers.tracker import Tracker

PRIVACY = "privacy"  # the resource of this name
LOSSES = (
    "loss: latest parameters; loss wᶠ: best parameters so far; both on the round's "
    "samples, so both can rise"
)
VALIDATED = (
    "loss: on training samples of the round; validation: on held-out training samples, "
    "which choose the model; accuracy: on test samples"
)
_NOTICE_SECONDS = 1.0  # of preparation before a notice
_LOG_LINES = 25  # of a plain log, at most, over the whole budget
_MAX_NODES = 12  # shown in the live view
_MAX_ROUNDS = 12  # shown in the live view, the latest ones
_WIDTHS = {
    "round": 5,
    "τ": 4,
    "η": 8,
    "chosen by": 22,
    "loss": 8,
    "loss wᶠ": 8,
    "validation": 10,
    "accuracy": 8,
    "ρ̂": 7,
    "β̂": 7,
    "δ̂": 7,
    "ε": 7,
    "spent": 6,
}
"""All columns of a table of rounds, and their widths in a plain log."""
_NOT_PRIVATE = ("loss", "loss wᶠ", "validation", "ρ̂", "β̂", "δ̂")
"""Columns that a private run does not report."""


def make_run(
    prepared: PreparedRun,
    output: OutputOptions,
    trackers: Sequence[Tracker],
    folder: Path | None = None,
) -> Result:
    """Execute a prepared run and show its progress.

    Args:
      prepared: the run.
      output: the output options of the command.
      trackers: started and stopped with the run.
      folder: of a resumed run; None for `output.out` or a new folder.
    """
    folder = folder or output.out or default_folder(prepared.settings)
    if not output.json:
        for remark in (*prepared.dataset.remarks, *prepared.dataset.warnings):
            _print_remark("data", remark)
        print_privacy_remarks(prepared)
    with (
        run_dashboard(folder, wanted=output.dashboard),
        watching(prepared, quiet=output.json) as callbacks,
    ):
        return execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)


@contextmanager
def preparing(
    launched: AbstractContextManager[PreparedRun],
    what: str = "preparing, on first use kernels are compiled",
) -> Iterator[PreparedRun]:
    """Yield the prepared run; print a notice if preparation takes more than a second.

    The notice appears on a terminal only. A log has a line for compilation alone, when
    kernels are in fact compiled.

    Args:
      launched: prepares the run when it is entered.
      what: start of the notice.
    """
    notice = threading.Timer(
        _NOTICE_SECONDS, lambda: print(f"{what}; this takes some seconds", file=sys.stderr)
    )
    notice.daemon = True
    with ExitStack() as stack:
        stack.enter_context(
            on_compiling(lambda: print(COMPILING, file=sys.stderr, flush=True))
        )
        if sys.stderr.isatty():
            notice.start()
        try:
            prepared = stack.enter_context(launched)
        finally:
            notice.cancel()
        yield prepared


def print_privacy_remarks(prepared: PreparedRun) -> None:
    """Print the unit and the limits of ε to standard error; nothing without privacy."""
    settings = prepared.settings
    dataset = prepared.dataset
    if prepared.budget.by_noise is None:
        return
    unit = "node"
    count = settings.nodes or 1
    remarks = ["ε protects each node with all its samples"]
    if settings.privacy_unit == "sample":
        unit = "sample"
        count = len(dataset.train)
        remarks = ["ε protects each sample"]
    delta = prepared.budget.delta or 0.0
    if count * delta >= 1 and count > 1:
        remarks.append(
            f"`privacy_delta` {delta:g} allows one {unit} to be published as it is: "
            f"set it below 1/{count}"
        )
    if settings.privacy_noise == "seeded":
        remarks.append(
            "the noise follows from `seed` and hides nothing from those who know the seed; "
            "otherwise set `privacy_noise` secret"
        )
    if dataset.standardization is not None:
        remarks.append(
            "the model contains the exact means and deviations of columns, and ε does not "
            "cover them"
        )
    _print_remark("privacy", "; ".join(remarks))


def _print_remark(topic: str, remark: str) -> None:
    print(f"{topic}: {UserError(remark).spelled(flag)}", file=sys.stderr, flush=True)


@contextmanager
def watching(prepared: PreparedRun, *, quiet: bool) -> Iterator[Sequence[Callback]]:
    """Yield callbacks that show the rounds of a run.

    Nothing is shown before the first round, so that an early error is the only output.

    Args:
      prepared: the run.
      quiet: yield no callback.
    """
    console = Console(stderr=True)
    if quiet:
        yield ()
    elif console.is_terminal:
        view = _LiveView(prepared)
        live = Live(console=console, refresh_per_second=12)

        def show(record: RoundRecord) -> None:
            live.start()
            live.update(view.add(record))

        try:
            yield (show,)
        finally:
            live.stop()
    else:
        yield (_plain_log(prepared),)


def print_result(result: Result, *, json: bool = False) -> None:
    """Print the result in a few lines on standard output, or as one JSON object."""
    if json:
        print(jsonlib.dumps(result.to_json()))
        return
    for warning in result.warnings:
        print(f"warning: {warning}")
    figures = [metrics_text(result.accuracy, result.metrics, result.to_beat)]
    if result.validation_loss is not None:
        losses = f"training loss {result.loss:.4f}"
        figures.insert(0, f"{losses}, validation loss {result.validation_loss:.4f}")
    elif not (math.isnan(result.loss) and result.privacy_delta):
        figures.insert(0, f"loss {result.loss:.4f}")
    if any(figures):
        print(", ".join(filter(None, figures)))
    if result.spread:
        print(spread_text(result.spread, _test_metric(result)))
    if len(result.sites) > 1:
        print(_sites_text(result.sites))
    print(_work_text(result))
    if result.privacy_delta and result.rounds and result.rounds[-1].t == 0:
        print(
            "nothing was trained: the run ended with the first round, in which nodes only "
            "report the norms of their updates"
        )
    for target, reached in result.until.items():
        print(f"target {target} {'reached' if reached else 'not reached'}")
    if result.overfitting is not None:
        advice = "; to keep the parameters from before, use --keep best-on-test"
        print(f"{result.overfitting}{advice if result.kept_round is None else ''}")
    if result.kept_round is not None and result.stopped_by != "target":
        samples = "test" if result.validation_loss is None else "validation"
        print(
            f"kept: the parameters at the start of round {result.kept_round}, the best on "
            f"{samples} samples"
        )
    if result.note:
        print(f"data: {result.note}")
    for name in result.budget:
        print(_spent_text(result, name))
    if "measured" in result.sources.values() and result.trial_seconds:
        seconds = RESOURCES["time"].format(result.trial_seconds)
        print(f"not counted: {seconds} of trial rounds before the clock started")
    more = next_forecast(
        result.rounds, result.budget, {"loss": result.loss, "accuracy": result.accuracy}
    )
    if more.loss is not None and result.stopped_by != "validation":
        kind = "loss" if result.validation_loss is None else "training loss"
        print(f"{kind} with 50 % more budget: {interval_text(more.loss)}")
    if result.run is not None:
        print(f"run: {result.run}")


def _sites_text(sites: Mapping[str, SiteLoss]) -> str:
    """Return the best, the median and the worst node by validation loss."""
    order = sorted(sites, key=lambda name: sites[name].loss)
    shown = {"best": order[0], "median": order[len(order) // 2], "worst": order[-1]}
    texts = [f"{word} {name} {sites[name].loss:.4f}" for word, name in shown.items()]
    return f"validation loss of {len(order)} nodes: {', '.join(texts)}"


def _test_metric(figures: Result | RoundRecord) -> str:
    return "rmse" if figures.accuracy is None else "accuracy"


def _work_text(result: Result) -> str:
    work = f"{result.local_updates} local updates, centralized"
    if result.aggregations:
        work = (
            f"{result.aggregations} aggregations, {result.local_updates} local updates "
            f"per node, average τ {result.average_tau:.1f}"
        )
    end = result.stopped_by
    if end == "validation":
        return f"{work}\n{_validation_stop_text(result)}"
    return f"{work}; {end if end == 'interrupted' else f'stopped by {end}'}"


def _validation_stop_text(result: Result) -> str:
    share = max(result.spent[name] / limit for name, limit in result.budget.items())
    return (
        f"stopped after {100 * share:.0f} % of the budget: the validation loss has not "
        f"improved significantly since round {result.improved_round}"
    )


def _spent_text(result: Result, name: str) -> str:
    show = RESOURCES[name].format
    text = f"{show(result.spent[name])} of {show(result.budget[name])} spent"
    if result.stopped_by in ("target", "plateau", "validation"):
        text += f", {show(result.left[name])} left"
    elif result.overshoot[name]:
        text += f", {show(result.overshoot[name])} over"
    source = result.sources[name]
    if name == PRIVACY:
        return f"{name}: ε = {text} ({source}, at δ = {result.privacy_delta:g})"
    return f"{name}: {text} ({source})"


def headings(budget: Mapping[str, float], *, validated: bool) -> tuple[str, ...]:
    """Return the headings of a table of rounds.

    A private run has a column for ε, and none for the figures that nodes do not report.

    Args:
      budget: limits by resource.
      validated: whether nodes hold out rows; w^f is then not the result.
    """
    hidden: tuple[str, ...] = _NOT_PRIVATE
    if PRIVACY not in budget:
        hidden = ("ε", "loss wᶠ" if validated else "validation")
    return tuple(name for name in _WIDTHS if name not in hidden)


def cells(
    record: RoundRecord, budget: Mapping[str, float], *, validated: bool
) -> tuple[str, ...]:
    """Return a round as a row of texts, one for each of the `headings`."""
    texts = {
        "round": str(record.round),
        "τ": record.tau_text,
        "η": decimals(record.eta if record.tau and record.eta else None, ".3g"),
        "chosen by": record.reason,
        "loss": decimals(record.loss),
        "loss wᶠ": decimals(record.best_loss),
        "validation": decimals(record.validation),
        "accuracy": decimals(record.accuracy),
        "ρ̂": decimals(record.rho, ".3f"),
        "β̂": decimals(record.beta, ".3f"),
        "δ̂": decimals(record.delta, ".3f"),
        "ε": decimals(record.spent.get(PRIVACY), ".4g"),
        "spent": f"{_spent_share(record, budget):.0%}",
    }
    return tuple(texts[name] for name in headings(budget, validated=validated))


def _spent_share(record: RoundRecord, budget: Mapping[str, float]) -> float:
    """Return the largest spent share of any resource."""
    return max(record.spent[name] / limit for name, limit in budget.items())


def rounds_table(records: list[RoundRecord], budget: Mapping[str, float]) -> Table:
    """Return a table of rounds."""
    validated = any(record.validation is not None for record in records)
    rows = [cells(record, budget, validated=validated) for record in records]
    columns = headings(budget, validated=validated)
    return plain_table(columns, rows, left=("chosen by",), no_wrap=True)


class _LiveView:
    """Gauges of the budget above the latest rounds."""

    def __init__(self, prepared: PreparedRun) -> None:
        self._title = prepared.title
        self._node_statuses = prepared.engine.node_statuses
        self._budget = prepared.budget.limits
        self._validates = prepared.validates
        self._records: list[RoundRecord] = []
        self._forecasts = LatestForecast()
        self._metrics = ""
        self._spread = ""

    def add(self, record: RoundRecord) -> Group:
        self._records.append(record)
        if record.accuracy is not None or record.metrics:
            self._metrics = metrics_text(record.accuracy, record.metrics or {})
        if record.spread:
            self._spread = spread_text(record.spread, _test_metric(record))
        lines = [self._metrics, self._spread]
        if PRIVACY not in self._budget:
            lines.append(_forecast_text(self._forecasts.of(self._records, self._budget)))
        parts: list[RenderableType] = [
            Text(self._title, style="bold"),
            self._gauges(record),
            *(Text(line) for line in lines if line),
            rounds_table(self._records[-_MAX_ROUNDS:], self._budget),
        ]
        if PRIVACY not in self._budget:
            parts.append(Text(VALIDATED if self._validates else LOSSES, style="dim"))
        if nodes := self._node_statuses():
            parts += [Text(""), nodes_table(nodes)]
        return Group(*parts)

    def _gauges(self, record: RoundRecord) -> Table:
        gauges = Table.grid(padding=(0, 1))
        for name, limit in self._budget.items():
            show = RESOURCES[name].format
            spent = record.spent[name]
            bar = ProgressBar(total=limit, completed=min(spent, limit), width=40)
            gauges.add_row(name, bar, f"{show(spent)} of {show(limit)}")
        return gauges


def _forecast_text(forecast: Forecast) -> str:
    if forecast.loss is None:
        return f"loss at the end unknown: {forecast.reason}"
    text = f"loss at the end {interval_text(forecast.loss)}, {100 * LEVEL:.0f} % interval"
    if forecast.accuracy is not None:
        text += f"\naccuracy at the end {interval_text(forecast.accuracy)}"
    return text


def nodes_table(nodes: Sequence[NodeStatus]) -> Table:
    """Return a table of remote nodes; of many, absent nodes and missed rounds first."""
    columns = (
        "node",
        "samples",
        "ms per update",
        "updates",
        "idle",
        "rounds",
        "missed",
        "now",
    )
    shown = nodes
    if len(nodes) > _MAX_NODES:
        shown = sorted(nodes, key=lambda node: (node.state != "away", -(node.missed or 0)))
        shown = shown[: _MAX_NODES - 1]
    rows: list[Sequence[str]] = []
    for node in shown:
        row = (
            node.name,
            f"{node.samples:,}",
            "" if node.step_seconds is None else f"{1000 * node.step_seconds:.2f}",
            str(node.updates or ""),
            decimals(node.idle, ".0%"),
            str(node.rounds),
            str(node.missed or ""),
            node.state or "",
        )
        rows.append(row)
    if len(shown) < len(nodes):
        rows.append((f"and {len(nodes) - len(shown)} more",))
    return plain_table(columns, rows, left=("node", "now"), no_wrap=True)


def _plain_log(prepared: PreparedRun) -> Callback:
    """Return a callback that prints rounds evenly over the budget, with first and last."""
    budget = prepared.budget.limits
    validated = prepared.validates
    columns = headings(budget, validated=validated)
    next_share = 0.0
    first = True

    def print_row(texts: tuple[str, ...]) -> None:
        aligned = [
            text.rjust(_WIDTHS[name]) for text, name in zip(texts, columns, strict=True)
        ]
        print("  ".join(aligned), file=sys.stderr, flush=True)

    def watch(record: RoundRecord) -> None:
        nonlocal next_share, first
        if first:
            first = False
            print(f"{prepared.title}; budget {prepared.budget}", file=sys.stderr)
            print_row(columns)
        share = _spent_share(record, budget)
        if record.round <= 3 or share >= next_share or record.tau <= 0:
            next_share = share + 1 / _LOG_LINES
            print_row(cells(record, budget, validated=validated))

    return watch
