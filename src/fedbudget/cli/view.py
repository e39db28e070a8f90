"""Display of a run: a live view on a terminal, a plain log elsewhere, and the result.

View and log go to standard error, so that standard output can be piped.
"""

import json as jsonlib
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbudget.cli.console import decimals, loss_text, plain_table, print_table
from fedbudget.cli.dashboard import run_dashboard
from fedbudget.cli.forecast import extension_text, interval_text, loss_name
from fedbudget.cli.options import OutputOptions
from fedbudget.errors import UserError, flag
from fedbudget.forecasts.curve import LEVEL
from fedbudget.forecasts.forecast import Forecast, LatestForecast, next_forecast
from fedbudget.launch.execute import default_folder, execute
from fedbudget.launch.prepared import Callback, PreparedRun
from fedbudget.models.compiling import COMPILING, on_compiling
from fedbudget.node_status import NodeStatus
from fedbudget.protocol.site_figures import SiteFigures
from fedbudget.resources import RESOURCES
from fedbudget.resources.privacy import replacement_text
from fedbudget.result import Result, SiteLoss
from fedbudget.runs.folder import ROUNDS
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.stored_rounds import StoredRounds
from fedbudget.runs.text import metrics_text, spread_text
from fedbudget.trackers.tracker import Tracker
from fedbudget.trained.personal import site_summary, site_table, site_title

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
_LOG_LINES = 25  # of a plain log, about, over the whole budget
_LOG_SECONDS = 5.0  # between two lines of a slow log, at first
_LOG_PAUSE = 0.05  # longest time between two lines, relative to the run so far
_MAX_NODES = 12  # shown in the live view
_MAX_ROUNDS = 12  # shown in the live view, the latest ones
_OTHER_LINES = 14  # of the live view, besides rounds
_WIDTHS = {
    "round": 6,
    "τ": 6,
    "η": 8,
    "chosen by": 18,
    "loss": 8,
    "loss wᶠ": 8,
    "validation": 10,
    "accuracy": 8,
    "ρ̂": 8,
    "β̂": 8,
    "δ̂": 8,
    "ε": 7,
    "spent": 5,
}
"""All columns of a table of rounds, and their widths."""
_VERBOSE = ("δ̂", "β̂", "ρ̂", "loss wᶠ", "η", "chosen by")
"""Columns that are hidden by default."""
_DISPENSABLE = (*_VERBOSE, "accuracy", "validation")
"""Columns that a narrow terminal does not show, the first ones first."""
_NOT_PRIVATE = ("loss", "loss wᶠ", "validation", "ρ̂", "β̂", "δ̂")
"""Columns that a private run does not report."""
_LITTLE = 0.01  # relative improvement
_HINT_ROUNDS = 100  # before a hint that a run has converged
_CLEAR_SHARE = 0.95  # of the budget, after which a forecast of its end is worthless


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
        prepared = _announcing(prepared)
    with (
        run_dashboard(folder, wanted=output.dashboard),
        watching(
            prepared,
            quiet=output.json,
            verbose=output.verbose,
            records=StoredRounds(folder / ROUNDS),
        ) as callbacks,
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
            "the noise follows from `seed` and hides nothing from those who know the seed, "
            "so ε is only simulated; otherwise set `privacy_noise` secret"
        )
    if prepared.exact_tests is not None:
        remarks.append(
            f"metrics of {prepared.exact_tests} test samples are exact, in every evaluated "
            "round and in the result, and ε does not cover these samples (`test_share` 0 "
            "holds out none)"
        )
    if prepared.settings.personal:
        remarks.append("ε does not cover the `personal` models in the folder of the run")
    public = dataset.layout is not None and dataset.layout.public
    if dataset.standardization is not None and not public:
        remarks.append(
            "the model contains the exact means and deviations of columns, and ε does not "
            "cover them"
        )
    _print_remark("privacy", "; ".join(remarks))
    limit = prepared.budget.limits[PRIVACY]
    replaced = replacement_text(limit, delta, unit)
    _print_remark("privacy", f"at most ε = {limit:g} if a {unit} is left out, {replaced}")


def _print_remark(topic: str, remark: str) -> None:
    print(f"{topic}: {UserError(remark).spelled(flag)}", file=sys.stderr, flush=True)


def _announcing(prepared: PreparedRun) -> PreparedRun:
    """Return a run that prints its title, its costs and its expected length.

    It prints them when its folder exists, so that an error before is the only output.
    """

    def announce(folder: Path) -> None:
        prepared.folder_made(folder)
        console = Console(stderr=True)
        for line in _expectations(prepared):
            # A terminal breaks lines between words, a log does not break them.
            soft = not console.is_terminal
            console.print(line, highlight=False, markup=False, soft_wrap=soft)

    return replace(prepared, folder_made=announce)


def _expectations(prepared: PreparedRun) -> Iterator[str]:
    """Yield lines about a run before its first round.

    The first has the budget with the source of each cost; another the expected number of
    rounds, and how long they take on this machine if the time is simulated.
    """
    budget = prepared.budget
    sources = prepared.meters.sources
    limits = [
        f"{name}={RESOURCES[name].format(limit)} ({sources[name]})"
        for name, limit in budget.limits.items()
    ]
    yield f"{prepared.title}; budget {', '.join(limits)}"
    simulated = prepared.meters.time.source == "simulated"
    if simulated:
        yield (
            "simulated time is that of the paper's laptops and Raspberry Pis; "
            f"{flag('costs')} measured uses the time of this machine"
        )
    rounds = prepared.expected_rounds
    if rounds is None:
        return
    # τ of the paper's controllers grows from 1, and longer rounds are fewer.
    usual = prepared.settings.tau != "adaptive" or prepared.settings.method == "accelerated"
    text = f"expected: {'about' if usual else 'at most'} {_rough(rounds)} rounds"
    seconds = prepared.expected_seconds
    if simulated and seconds is not None:
        text += f", {_duration(seconds)} on this machine"
    yield text


def _rough(count: float) -> str:
    """Return a count with two digits.

    >>> _rough(54.4), _rough(13_123_456)
    ('54', '13,000,000')
    """
    digits = max(0, math.floor(math.log10(max(count, 1.0))) - 1)
    return f"{round(count, -digits):,.0f}"


def _duration(seconds: float) -> str:
    """Return a rough duration.

    >>> _duration(0.4), _duration(14.2), _duration(5000), _duration(1e5)
    ('less than a second', '14s', '83min', '28h')
    """
    if seconds < 1:
        return "less than a second"
    if seconds < 2 * 60:
        return f"{seconds:.0f}s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f}min"
    return f"{_rough(seconds / 3600)}h"


@contextmanager
def watching(
    prepared: PreparedRun,
    *,
    quiet: bool,
    verbose: bool = False,
    records: StoredRounds | None = None,
) -> Iterator[Sequence[Callback]]:
    """Yield callbacks that show the rounds of a run.

    Nothing is shown before the first round, so that an early error is the only output.

    Args:
      prepared: the run.
      quiet: yield no callback.
      verbose: show all columns.
      records: keeps the records of a run with a folder.
    """
    console = Console(stderr=True)
    if quiet:
        yield ()
    elif console.is_terminal:
        view = _LiveView(prepared, console, verbose=verbose, records=records)
        live = Live(console=console, refresh_per_second=12)

        def show(record: RoundRecord) -> None:
            live.start()
            live.update(view.add(record))

        try:
            yield (show,)
        finally:
            live.stop()
    else:
        yield (_plain_log(prepared, verbose=verbose, records=records),)


def finish(result: Result, *, json: bool = False) -> None:
    """Print the result; end with exit code 130 if the run was interrupted."""
    print_result(result, json=json)
    if result.stopped_by == "interrupted":
        raise typer.Exit(130)


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
    if result.site_report:
        _print_sites(result.site_report)
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
        kept = f"parameters at the start of round {result.kept_round}"
        if result.kept_mean:
            kept = f"mean of the parameters up to round {result.kept_round}"
        print(f"kept: the {kept}, the best on {samples} samples")
    if result.note:
        print(f"data: {result.note}")
    for name in result.budget:
        print(_spent_text(result, name))
    if result.personal_seconds is not None:
        seconds = RESOURCES["time"].format(result.personal_seconds)
        print(f"not counted: {seconds} of personal models after the last round")
    if "measured" in result.sources.values() and result.trial_seconds:
        seconds = RESOURCES["time"].format(result.trial_seconds)
        print(f"not counted: {seconds} of trial rounds before the clock started")
    more = next_forecast(result.rounds, result.budget, vars(result))
    if more.loss is not None:
        now = result.validation_loss if more.validated else result.loss
        text = extension_text(more.loss, now or 0.0)
        print(f"{loss_name(validated=more.validated)} with 50 % more budget: {text}")
    if result.run is not None:
        print(f"run: {result.run}")


def _print_sites(report: Mapping[str, SiteFigures]) -> None:
    """Print the site report."""
    headings, rows = site_table(report)
    print(site_title(report))
    print_table(headings, rows, left=("site",))
    for line in site_summary(report):
        print(line)


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
        stop = validation_stop_text(result.spent, result.budget, result.improved_round)
        return f"{work}\n{stop}"
    passive = end in ("interrupted", "converged")
    return f"{work}; {end if passive else f'stopped by {end}'}"


def validation_stop_text(
    spent: Mapping[str, float], budget: Mapping[str, float], improved_round: int | None
) -> str:
    """Return why validation ended a run.

    Args:
      spent, budget: by the names of resources.
      improved_round: the last round with a significant improvement.
    """
    share = max(spent.get(name, 0.0) / limit for name, limit in budget.items())
    return (
        f"stopped after {100 * share:.0f} % of the budget: the validation loss has not "
        f"improved significantly since round {improved_round}"
    )


def _spent_text(result: Result, name: str) -> str:
    show = RESOURCES[name].format
    text = f"{show(result.spent[name])} of {show(result.budget[name])} spent"
    if result.stopped_by in ("target", "plateau", "validation", "converged"):
        text += f", {show(result.left[name])} left"
    elif result.overshoot[name]:
        text += f", {show(result.overshoot[name])} over"
    source = result.sources[name]
    if name == PRIVACY:
        spent = f"{name}: ε = {text} ({source}, at δ = {result.privacy_delta:g})"
        if result.privacy is None:
            return spent
        given = result.privacy
        other = replacement_text(given.epsilon, given.delta, given.unit)
        if given.all_runs is None:
            return f"{spent}; {other}"
        every = replacement_text(given.all_runs, given.delta, given.unit)
        return (
            f"{spent}; {other}\nprivacy ledger: ε = {given.all_runs:.4g} in all runs on "
            f"these data; {every}"
        )
    return f"{name}: {text} ({source})"


def headings(
    budget: Mapping[str, float],
    *,
    validated: bool,
    verbose: bool = True,
    width: int | None = None,
) -> tuple[str, ...]:
    """Return the headings of a table of rounds.

    A private run has a column for ε, and none for the figures that nodes do not report.

    Args:
      budget: limits by resource.
      validated: whether nodes hold out rows; w^f is then not the result.
      verbose: return all columns, not only those that fit 60 characters.
      width: leave out columns that do not fit this number of characters.
    """
    hidden: tuple[str, ...] = _NOT_PRIVATE
    if PRIVACY not in budget:
        hidden = ("ε", "loss wᶠ" if validated else "validation")
    if not verbose:
        hidden += _VERBOSE
    shown = [name for name in _WIDTHS if name not in hidden]
    for name in _DISPENSABLE:
        if width is None or sum(_WIDTHS[each] + 1 for each in shown) <= width:
            break
        if name in shown:
            shown.remove(name)
    return tuple(shown)


def cells(
    record: RoundRecord, budget: Mapping[str, float], columns: Sequence[str]
) -> tuple[str, ...]:
    """Return a round as a row of texts, one for each of the `headings`."""
    texts = {
        "round": str(record.round),
        "τ": record.tau_text,
        "η": decimals(record.eta if record.tau and record.eta else None, ".3g"),
        "chosen by": record.reason,
        "loss": loss_text(record.loss),
        "loss wᶠ": loss_text(record.best_loss),
        "validation": loss_text(record.validation),
        "accuracy": decimals(record.accuracy),
        "ρ̂": decimals(record.rho, ".3g"),
        "β̂": decimals(record.beta, ".3g"),
        "δ̂": decimals(record.delta, ".3g"),
        "ε": decimals(record.spent.get(PRIVACY), ".4g"),
        "spent": f"{_spent_share(record, budget):.0%}",
    }
    return tuple(texts[name] for name in columns)


def _spent_share(record: RoundRecord, budget: Mapping[str, float]) -> float:
    """Return the largest spent share of any resource."""
    return max(record.spent[name] / limit for name, limit in budget.items())


def rounds_table(
    records: Sequence[RoundRecord],
    budget: Mapping[str, float],
    *,
    verbose: bool = False,
    width: int | None = None,
) -> Table:
    """Return a table of rounds.

    Args:
      verbose: show all columns.
      width: of the terminal; None if it is unlimited.
    """
    validated = any(record.validation is not None for record in records)
    columns = headings(budget, validated=validated, verbose=verbose, width=width)
    rows = [cells(record, budget, columns) for record in records]
    return plain_table(columns, rows, left=("chosen by",), no_wrap=True)


def _convergence_hint(records: Sequence[RoundRecord]) -> str:
    """Return a hint if the second half of the rounds has hardly improved the loss."""
    if len(records) < _HINT_ROUNDS:
        return ""
    now = records[-1]
    before = records[len(records) // 2]
    name = "loss" if now.validation_best is None else "validation loss"
    new = now.best_loss if now.validation_best is None else now.validation_best
    old = before.best_loss if now.validation_best is None else before.validation_best
    if old is None or not (old > 0 and new > (1 - _LITTLE) * old):
        return ""
    return (
        f"the last {len(records) - len(records) // 2} rounds improved the best {name} by "
        f"less than 1 %; Ctrl-C ends the run and keeps its result, {flag('patience')} ends "
        "such a run by itself"
    )


def _seconds_left(record: RoundRecord, share: float) -> str:
    """Return the time to the end of the budget at the pace so far; empty if unknown."""
    if not 0 < share < 0.99 or record.wall < 1:
        return ""
    return _duration(record.wall * (1 - share) / share)


class _LiveView:
    """Gauges of the budget above the latest rounds."""

    def __init__(
        self,
        prepared: PreparedRun,
        console: Console,
        *,
        verbose: bool,
        records: StoredRounds | None = None,
    ) -> None:
        self._console = console
        self._verbose = verbose
        self._node_statuses = prepared.engine.node_statuses
        self._budget = prepared.budget.limits
        self._validates = prepared.validates
        self._records: list[RoundRecord] | StoredRounds = [] if records is None else records
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
        share = _spent_share(record, self._budget)
        if PRIVACY not in self._budget and share < _CLEAR_SHARE:
            lines.append(_forecast_text(self._forecasts.of(self._records, self._budget)))
        if left := _seconds_left(record, share):
            lines.append(f"{left} left at this pace")
        lines.append(_convergence_hint(self._records))
        height = self._console.height
        most = min(_MAX_ROUNDS, max(3, height - _OTHER_LINES))
        width = self._console.width
        parts: list[RenderableType] = [
            self._gauges(record),
            *(Text(line) for line in lines if line),
            rounds_table(
                self._records[-most:], self._budget, verbose=self._verbose, width=width
            ),
        ]
        if PRIVACY not in self._budget and self._verbose:
            parts.append(Text(VALIDATED if self._validates else LOSSES, style="dim"))
        if nodes := self._node_statuses():
            parts += [Text(""), nodes_table(nodes, width)]
        return Group(*parts)

    def _gauges(self, record: RoundRecord) -> Table:
        gauges = Table.grid(padding=(0, 1))
        for name, limit in self._budget.items():
            show = RESOURCES[name].format
            spent = record.spent[name]
            width = max(10, min(40, self._console.width - 32))
            bar = ProgressBar(total=limit, completed=min(spent, limit), width=width)
            gauges.add_row(name, bar, f"{show(spent)} of {show(limit)}")
        return gauges


def _forecast_text(forecast: Forecast) -> str:
    name = loss_name(validated=forecast.validated)
    if forecast.loss is None:
        return f"{name} at the end unknown: {forecast.reason}"
    text = f"{name} at the end {interval_text(forecast.loss)}, {100 * LEVEL:.0f} % interval"
    if forecast.accuracy is not None:
        text += f"\naccuracy at the end {interval_text(forecast.accuracy)}"
    return text


def nodes_table(nodes: Sequence[NodeStatus], width: int = 80) -> Table:
    """Return a table of remote nodes; of many, absent nodes and missed rounds first.

    Args:
      width: of the terminal; a narrow one has fewer columns.
    """
    columns = ["node", "samples", "ms per update", "updates", "idle", "rounds", "missed"]
    columns.append("now")
    if width < 80:
        columns = ["node", "updates", "idle", "missed", "now"]
    shown = nodes
    if len(nodes) > _MAX_NODES:
        shown = sorted(nodes, key=lambda node: (node.state != "away", -(node.missed or 0)))
        shown = shown[: _MAX_NODES - 1]
    rows: list[Sequence[str]] = []
    for node in shown:
        step = node.step_seconds
        texts = {
            "node": node.name,
            "samples": f"{node.samples:,}",
            "ms per update": "" if step is None else f"{1000 * step:.2f}",
            "updates": str(node.updates or ""),
            "idle": decimals(node.idle, ".0%"),
            "rounds": str(node.rounds),
            "missed": str(node.missed or ""),
            "now": node.state or "",
        }
        rows.append([texts[name] for name in columns])
    if len(shown) < len(nodes):
        rows.append((f"and {len(nodes) - len(shown)} more",))
    return plain_table(columns, rows, left=("node", "now"), no_wrap=True)


def _plain_log(
    prepared: PreparedRun, *, verbose: bool, records: StoredRounds | None
) -> Callback:
    """Return a callback that prints some rounds, the first ones and the last among them.

    Lines are spread evenly over the budget. If that takes long, more lines show that the
    run goes on: after five seconds, later less often.
    """
    budget = prepared.budget.limits
    columns = headings(budget, validated=prepared.validates, verbose=verbose)
    shown: list[RoundRecord] | StoredRounds = [] if records is None else records
    next_share = 0.0
    next_wall = 0.0
    hinted = False

    def print_row(texts: Sequence[str], last: str) -> None:
        aligned = [
            text.rjust(_WIDTHS[name]) for text, name in zip(texts, columns, strict=True)
        ]
        print(" ".join(aligned), last, file=sys.stderr, flush=True)

    def watch(record: RoundRecord) -> None:
        nonlocal next_share, next_wall, hinted
        if not shown:
            print_row(columns, " left")
        shown.append(record)
        share = _spent_share(record, budget)
        due = share >= next_share or record.wall >= next_wall
        if record.round <= 3 or due or record.tau <= 0:
            next_share = share + 1 / _LOG_LINES
            next_wall = record.wall + max(_LOG_SECONDS, _LOG_PAUSE * record.wall)
            left = _seconds_left(record, share)
            print_row(cells(record, budget, columns), f" {left}" if left else "")
            if not hinted and (hint := _convergence_hint(shown)):
                print(hint, file=sys.stderr, flush=True)
                hinted = True

    return watch
