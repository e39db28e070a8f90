"""What a person sees of a run: a live view on a terminal, a plain log elsewhere, and the result at the end.

The view goes to standard error, so that results on standard output can be piped on.
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

from fedbudget.cli.console import plain_table
from fedbudget.cli.dashboard import beside
from fedbudget.cli.forecast import interval_text
from fedbudget.cli.options import OutputOptions
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, flag
from fedbudget.forecasts.curve import LEVEL
from fedbudget.forecasts.forecast import Forecast, LatestForecast, next_forecast
from fedbudget.launch.execute import default_folder, execute
from fedbudget.launch.prepared import Callback, PreparedRun
from fedbudget.models.compiling import COMPILING, on_compiling
from fedbudget.node_status import NodeStatus
from fedbudget.resources import RESOURCES
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.text import metrics_text, spread_text
from fedbudget.trackers.tracker import Tracker

PRIVACY = "privacy"  # as budgets have it
_PATIENCE = 1.0  # seconds before a person is told what takes so long
_LOG_LINES = 25  # of a plain log, at most, over the whole budget
_NODES = 12  # of those shown, at most
_ROUNDS = 12  # the same of the latest
_WIDTHS = {
    "round": 5,
    "τ": 4,
    "η": 8,
    "chosen by": 22,
    "loss": 8,
    "loss wᶠ": 8,
    "accuracy": 8,
    "ρ̂": 7,
    "β̂": 7,
    "δ̂": 7,
    "ε": 7,
    "spent": 6,
}
"""All columns of a table of rounds, and how wide they are in a plain log."""
_NEVER_TOLD = ("loss", "loss wᶠ", "ρ̂", "β̂", "δ̂")  # by nodes of a private run
LOSSES = "loss: of the latest parameters; loss wᶠ: of the best so far; both on the round's samples, so either can rise"


@contextmanager
def preparing(
    launched: AbstractContextManager[PreparedRun],
    what: str = "preparing, on first use kernels are compiled",
) -> Iterator[PreparedRun]:
    """The run, when it is ready. A person is told when that takes long; a log should hold nothing but what happened, so
    that kernels are in it where they are compiled."""
    notice = threading.Timer(
        _PATIENCE, lambda: print(f"{what}, which takes some seconds", file=sys.stderr)
    )
    notice.daemon = True
    with ExitStack() as stack:
        stack.enter_context(on_compiling(tell_of_compiling))
        if sys.stderr.isatty():
            notice.start()
        try:
            prepared = stack.enter_context(launched)
        finally:
            notice.cancel()
        yield prepared


def tell_of_compiling() -> None:
    print(COMPILING, file=sys.stderr, flush=True)


def make_run(
    prepared: PreparedRun,
    output: OutputOptions,
    trackers: Sequence[Tracker],
    folder: Path | None = None,
) -> Result:
    """Makes a run that is ready, and shows it while it is made.

    Args:
      folder: of a run that goes on; otherwise it is the one asked for, or a new one.
    """
    folder = folder or output.out or default_folder(prepared.settings)
    if not output.json:
        tell_of_data(prepared.dataset)
        tell_of_privacy(prepared)
    with (
        beside(folder, wanted=output.dashboard),
        watching(prepared, quiet=output.json) as callbacks,
    ):
        return execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)


def tell_of_data(dataset: Dataset) -> None:
    """What a person should know of the data before the start."""
    for remark in (*dataset.remarks, *dataset.warnings):
        print(f"data: {UserError(remark).spelled(flag)}", file=sys.stderr, flush=True)


def tell_of_privacy(prepared: PreparedRun) -> None:
    """What ε is of, and what it does not cover; nothing where there is none."""
    settings = prepared.settings
    dataset = prepared.dataset
    if prepared.budget.by_noise is None:
        return
    per_sample = settings.privacy_unit == "sample"
    delta = prepared.budget.delta or 0.0
    remarks = [
        "ε is of " + ("each sample" if per_sample else "each node with all its samples")
    ]
    if (
        many := len(dataset.train) if per_sample else settings.nodes or 1
    ) * delta >= 1 and many > 1:
        one = "sample" if per_sample else "node"
        remarks += [
            f"`privacy_delta` {delta:g} allows a {one} to be told as it is: take less than 1/{many}"
        ]
    if settings.privacy_noise == "seeded":
        remarks += [
            "noise follows from `seed`, and hides nothing from who knows it (else `privacy_noise` secret)"
        ]
    if dataset.standardization is not None:
        remarks += [
            "means and deviations of columns are in the model as they are, and ε does not cover them"
        ]
    print(
        f"privacy: {UserError('; '.join(remarks)).spelled(flag)}",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def watching(prepared: PreparedRun, *, quiet: bool) -> Iterator[Sequence[Callback]]:
    """Gives callbacks that show a run's rounds as they come; none when quiet.

    Nothing is shown before the first round, so that a mistake found before it is all that there is to read.
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
    """The result in a few lines on standard output, or as one JSON object."""
    if json:
        print(jsonlib.dumps(result.to_json()))
        return
    metrics = metrics_text(result.accuracy, result.metrics, result.to_beat)
    loss = (
        ""
        if math.isnan(result.loss) and result.privacy_delta
        else f"loss {result.loss:.4f}"
    )
    if figures := ", ".join(filter(None, (loss, metrics))):
        print(figures)
    if result.spread:
        print(spread_text(result.spread, "rmse" if result.accuracy is None else "accuracy"))
    made = f"{result.local_updates} local updates in one place"
    if result.aggregations:
        updates = f"{result.local_updates} local updates per node, average τ {result.average_tau:.1f}"
        made = f"{result.aggregations} aggregations, {updates}"
    print(
        f"{made}; {'' if result.stopped_by == 'interrupted' else 'stopped by '}{result.stopped_by}"
    )
    if result.privacy_delta and result.rounds and result.rounds[-1].t == 0:
        print(
            "nothing was trained: it ended with the first round, in which nodes only tell how long updates are"
        )
    for target, reached in result.until.items():
        print(f"target {target} {'reached' if reached else 'not reached'}")
    if result.overfitting is not None:
        advice = (
            ""
            if result.kept_round is not None
            else "; --keep best-on-test gives the parameters from before"
        )
        print(f"{result.overfitting}{advice}")
    if result.kept_round is not None and result.stopped_by != "target":
        print(
            f"kept: the parameters that round {result.kept_round} began with, the best on test samples"
        )
    if result.note:
        print(f"data: {result.note}")
    for name, limit in result.budget.items():
        resource = RESOURCES[name]
        over = result.overshoot[name]
        beyond = f", {resource.format(over)} over" if over else ""
        if result.stopped_by in ("target", "plateau"):
            beyond = f", {resource.format(result.left[name])} left"
        spent = f"{resource.format(result.spent[name])} of {resource.format(limit)} spent{beyond}"
        if name == PRIVACY:
            print(
                f"{name}: ε = {spent} ({result.sources[name]}, at δ = {result.privacy_delta:g})"
            )
        else:
            print(f"{name}: {spent} ({result.sources[name]})")
    if "measured" in result.sources.values() and result.trial_seconds:
        print(
            f"not in this: {RESOURCES['time'].format(result.trial_seconds)} of trial rounds, before the clock started"
        )
    more = next_forecast(
        result.rounds, result.budget, {"loss": result.loss, "accuracy": result.accuracy}
    )
    if more.loss is not None:
        print(f"half as much again would bring the loss to {interval_text(more.loss)}")
    if result.run is not None:
        print(f"run: {result.run}")


def headings(budget: Mapping[str, float]) -> tuple[str, ...]:
    """Of a table of rounds: where privacy is limited, ε is in it in place of what nodes do not tell then."""
    left_out = _NEVER_TOLD if PRIVACY in budget else ("ε",)
    return tuple(name for name in _WIDTHS if name not in left_out)


def cells(record: RoundRecord, budget: Mapping[str, float]) -> tuple[str, ...]:
    """A round as a row of text, under the headings of a table of rounds."""

    def number(value: float | None, form: str = ".4f") -> str:
        return "" if value is None else format(value, form)

    texts = {
        "round": str(record.round),
        "τ": record.tau_text,
        "η": number(record.eta if record.tau and record.eta else None, ".3g"),
        "chosen by": record.reason,
        "loss": number(record.loss),
        "loss wᶠ": number(record.best_loss),
        "accuracy": number(record.accuracy),
        "ρ̂": number(record.rho, ".3f"),
        "β̂": number(record.beta, ".3f"),
        "δ̂": number(record.delta, ".3f"),
        "ε": number(record.spent.get(PRIVACY), ".4g"),
        "spent": f"{_share(record, budget):.0%}",
    }
    return tuple(texts[name] for name in headings(budget))


def _share(record: RoundRecord, budget: Mapping[str, float]) -> float:
    """How much is spent of the resource that there is least left of."""
    return max(record.spent[name] / limit for name, limit in budget.items())


def rounds_table(records: list[RoundRecord], budget: Mapping[str, float]) -> Table:
    table = plain_table(headings(budget), left=("chosen by",), no_wrap=True)
    for record in records:
        table.add_row(*cells(record, budget))
    return table


class _LiveView:
    """Gauges of the budget above the latest rounds."""

    def __init__(self, prepared: PreparedRun) -> None:
        self._title = prepared.title
        self._node_statuses = prepared.engine.node_statuses
        self._budget = prepared.budget.limits
        self._records: list[RoundRecord] = []
        self._forecasts = LatestForecast()
        self._metrics = self._spread = ""

    def add(self, record: RoundRecord) -> Group:
        self._records.append(record)
        if record.accuracy is not None or record.metrics:
            self._metrics = metrics_text(record.accuracy, record.metrics or {})
        if record.spread:
            self._spread = spread_text(
                record.spread, "rmse" if record.accuracy is None else "accuracy"
            )
        gauges = Table.grid(padding=(0, 1))
        for name, limit in self._budget.items():
            resource = RESOURCES[name]
            spent = record.spent[name]
            amounts = f"{resource.format(spent)} of {resource.format(limit)}"
            gauges.add_row(
                name,
                ProgressBar(total=limit, completed=min(spent, limit), width=40),
                amounts,
            )
        parts: list[RenderableType] = [
            Text(self._title, style="bold"),
            gauges,
            *(Text(line) for line in (self._metrics, self._spread) if line),
        ]
        if PRIVACY in self._budget:
            parts += [rounds_table(self._records[-_ROUNDS:], self._budget)]
        else:
            parts += [
                Text(_forecast_text(self._forecasts.of(self._records, self._budget))),
                rounds_table(self._records[-_ROUNDS:], self._budget),
                Text(LOSSES, style="dim"),
            ]
        if nodes := self._node_statuses():
            parts += [Text(""), nodes_table(nodes)]
        return Group(*parts)


def _forecast_text(forecast: Forecast) -> str:
    if forecast.loss is None:
        return f"loss at the end not known: {forecast.reason}"
    accuracy = (
        ""
        if forecast.accuracy is None
        else f"\naccuracy at the end {interval_text(forecast.accuracy)}"
    )
    return f"loss at the end {interval_text(forecast.loss)} with a chance of {LEVEL:.0%}{accuracy}"


def nodes_table(nodes: Sequence[NodeStatus]) -> Table:
    """Nodes on other machines; of many, those first that there is something to say of."""
    headings = (
        "node",
        "samples",
        "ms per update",
        "updates",
        "idle",
        "rounds",
        "missed",
        "now",
    )
    table = plain_table(headings, left=("node", "now"), no_wrap=True)
    shown = nodes
    if len(nodes) > _NODES:
        shown = sorted(nodes, key=lambda node: (node.state != "away", -(node.missed or 0)))[
            : _NODES - 1
        ]
    for node in shown:
        cost = "" if node.step_seconds is None else f"{1000 * node.step_seconds:.2f}"
        work = str(node.updates or ""), "" if node.idle is None else f"{node.idle:.0%}"
        table.add_row(
            node.name,
            f"{node.samples:,}",
            cost,
            *work,
            str(node.rounds),
            str(node.missed or ""),
            node.state,
        )
    if len(shown) < len(nodes):
        table.add_row(f"and {len(nodes) - len(shown)} more")
    return table


def _plain_log(prepared: PreparedRun) -> Callback:
    """One line now and then, evenly over the budget, with the first rounds and the last."""
    budget = prepared.budget.limits
    columns = headings(budget)
    next_share = 0.0
    first = True

    def line(texts: tuple[str, ...]) -> None:
        aligned = [
            text.rjust(_WIDTHS[name]) for text, name in zip(texts, columns, strict=True)
        ]
        print("  ".join(aligned), file=sys.stderr, flush=True)

    def watch(record: RoundRecord) -> None:
        nonlocal next_share, first
        if first:
            first = False
            print(f"{prepared.title}; budget {prepared.budget}", file=sys.stderr)
            line(columns)
        share = _share(record, budget)
        if record.round > 3 and share < next_share and record.tau > 0:
            return
        next_share = share + 1 / _LOG_LINES
        line(cells(record, budget))

    return watch
