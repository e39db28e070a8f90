"""Figures and texts of a run as JSON values, for the page and the report.

Rules here:
- Many rounds are thinned to the resolution of a screen. Of each stretch of rounds, the
  smallest and the largest value of every curve are kept, and every change of the reason,
  the first round and the last. No spike is lost, and no value is interpolated.
- JSON has no NaN and no infinity; they become null.
- Amounts come with their text, so that units are formatted in one place.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.dashboard.run_reader import RunSnapshot
from fedbudget.errors import UserError
from fedbudget.forecasts.curve import LEVEL
from fedbudget.launch.method import build_method
from fedbudget.resources import RESOURCES
from fedbudget.resources.privacy import replacement_text
from fedbudget.runs.explain import explain
from fedbudget.runs.folder import Run
from fedbudget.runs.nodes import names_of
from fedbudget.runs.record import RoundRecord, average_tau, json_value
from fedbudget.runs.text import NAMES, format_metric, run_title
from fedbudget.trackers.tracker import parameters

MAX_ROUNDS = 1500
"""Rounds of a chart, about; never more than twice this number."""

_RECENT = 20  # rounds, for the current pace
_CURVE_POINTS = 80  # of a G curve, about
_LABELS = {"balanced_accuracy": "Balanced accuracy"}  # of tiles; else those of tables
_FIELDS = (
    "round",
    "t",
    "tau",
    "reason",
    "eta",
    "loss",
    "best_loss",
    "validation",
    "validation_best",
    "accuracy",
    "rho",
    "beta",
    "delta",
    "wall",
)


def view(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return all values of a run's page except G curves."""
    run = snapshot.run
    return {
        "name": snapshot.name,
        "title": run_title(run.settings),
        "settings": {
            name: f"{value:.6g}" if isinstance(value, float) else str(value)
            for name, value in parameters(run.settings).items()
        },
        "resources": [
            {"name": name, "unit": RESOURCES[name].unit, "limit": limit}
            for name, limit in run.settings.limits().limits.items()
        ],
        "columns": columns(thinned(run.rounds)),
        **now(snapshot),
    }


def now(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the values that change during a run, except its rows."""
    run = snapshot.run
    summary = run.summary or {}
    last = run.rounds[-1] if run.rounds else None
    accuracies = _accuracies(run)
    return {
        "state": snapshot.state,
        "paragraph": describe(run),
        "rounds": last.round if last else 0,
        "loss": json_value(summary.get("loss", last.best_loss if last else None)),
        "validation": _validation(run),
        "accuracy": summary.get("accuracy", accuracies[-1] if accuracies else None),
        "metrics": metric_tiles(run),
        "average_tau": average_tau(_taus(run)) or None,
        "summary": run.summary,
        "forecast": forecast(snapshot),
        "gauges": gauges(snapshot),
        "nodes": _with_work(snapshot.nodes, run.rounds),
        "excluded": names_of(snapshot.nodes, last.excluded if last else ()),
        "written": snapshot.written,
    }


def metric_tiles(run: Run) -> list[dict[str, str]]:
    """Return the metrics on test samples except accuracy, at the end or the latest."""
    figures: dict[str, Any] = run.summary or {}
    evaluated = next((record for record in reversed(run.rounds) if record.metrics), None)
    if evaluated is not None and not figures:
        figures = {"metrics": evaluated.metrics, "spread": evaluated.spread}
    metrics = figures.get("metrics") or {}
    to_beat = figures.get("to_beat", {})
    tiles = []
    for name in NAMES:
        if name in metrics and name not in ("accuracy", "f1_binary"):
            note = ""
            if name == "rmse" and "rmse" in to_beat:
                note = f"predicting the mean {format_metric('rmse', to_beat['rmse'])}"
            text = format_metric(name, metrics[name])
            label = _LABELS.get(name, NAMES[name])
            tiles.append({"name": name, "label": label, "text": text, "note": note})
    if spread := figures.get("spread"):
        metric = "rmse" if "rmse" in metrics else "accuracy"
        tenth = format_metric(metric, spread["tenth"])
        median = format_metric(metric, spread["median"])
        tile = {
            "name": "worst",
            "label": f"Worst of {spread['nodes']:.0f} nodes",
            "text": format_metric(metric, spread["worst"]),
            "note": f"tenth percentile {tenth}, median {median}",
        }
        tiles.append(tile)
    return tiles


def rows(snapshot: RunSnapshot, first: int, last: int) -> dict[str, Any]:
    """Return the columns of rounds `first` to `last`, thinned if there are many."""
    rounds = snapshot.run.rounds
    start = bisect_left(rounds, first, key=lambda record: record.round)
    end = bisect_right(rounds, last, key=lambda record: record.round)
    selected = rounds[start:end]
    return {"columns": columns(thinned(selected)), "exact": len(selected) <= MAX_ROUNDS}


def columns(records: Sequence[RoundRecord]) -> dict[str, Any]:
    """Return records by column; costs by column and resource."""
    by_name: dict[str, Any] = {
        name: [_value(getattr(record, name)) for record in records] for name in _FIELDS
    }
    by_name["rmse"] = [_value((record.metrics or {}).get("rmse")) for record in records]
    resources = list(records[0].spent) if records else []
    for name in ("c", "b", "spent"):
        by_name[name] = {
            resource: [_value(getattr(record, name)[resource]) for record in records]
            for resource in resources
        }
    return by_name


def thinned(records: Sequence[RoundRecord], most: int = MAX_ROUNDS) -> list[RoundRecord]:
    """Return a subset of the records that gives the same chart.

    Args:
      records: in order.
      most: return all records up to this number; otherwise at most twice this number.
    """
    if len(records) <= most:
        return list(records)
    resource = next(iter(records[0].spent))
    values = [
        [
            *(getattr(each, name) for name in ("tau", "loss", "rho", "beta", "delta")),
            each.c[resource],
            each.b[resource],
        ]
        for each in records
    ]
    curves = np.array(values, np.float64).T
    kept = {0, len(records) - 1}
    for curve in curves:
        kept |= _extremes(curve, most // (2 * len(curves)))

    figures = [(record.metrics or {}).get("rmse", record.accuracy) for record in records]
    accuracy = np.array(figures, np.float64)
    validation = np.array([record.validation for record in records], np.float64)
    for figure, share in ((accuracy, 4), (validation, 8)):
        evaluated = np.flatnonzero(~np.isnan(figure))
        if len(evaluated) <= most // share:
            kept |= set(evaluated.tolist())
        else:
            kept |= _extremes(figure, most // (2 * share))

    reasons = np.array([record.reason for record in records])
    changes = np.flatnonzero(reasons[1:] != reasons[:-1]) + 1
    kept |= set(_evenly(changes, most // 2).tolist())
    return [records[index] for index in sorted(kept)]


def gauges(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Return spent and remaining amount of each resource, and when it will be spent."""
    rounds = snapshot.run.rounds
    limits = snapshot.run.settings.limits().limits
    spent_by_name = rounds[-1].spent if rounds else dict.fromkeys(limits, 0.0)
    running = snapshot.state == "running"
    result = []
    for name, limit in limits.items():
        show = RESOURCES[name].format
        spent = spent_by_name[name]
        left = max(0.0, limit - spent)
        seconds = _seconds_left(rounds, name, left) if running else None
        gauge = {
            "name": name,
            "spent": spent,
            "limit": limit,
            "share": spent / limit,
            "text": f"{show(spent)} of {show(limit)}{_replaced(snapshot, name, spent)}",
            "left": show(left),
            "over": show(spent - limit) if spent > limit else None,
            "source": _source(snapshot, name),
            "until": None if seconds is None else snapshot.written + seconds,
        }
        result.append(gauge)
    return result


def _source(snapshot: RunSnapshot, name: str) -> str | None:
    """Return the source of an amount, which is in the summary of a finished run.

    A seeded ε is simulated from the first round on.
    """
    if RESOURCES[name].by_noise and snapshot.run.settings.privacy_noise == "seeded":
        return "simulated"
    sources: dict[str, str] = (snapshot.run.summary or {}).get("sources", {})
    return sources.get(name)


def _replaced(snapshot: RunSnapshot, name: str, spent: float) -> str:
    """Return the ε of replacing a unit as text; empty for other resources."""
    settings = snapshot.run.settings
    if settings.privacy_delta is None or not RESOURCES[name].by_noise:
        return ""
    unit = settings.privacy_unit or "node"
    return f"; {replacement_text(spent, settings.privacy_delta, unit)}"


def forecast(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """Return the forecast of the loss; None before the first round.

    The forecast is for the end of the budget, or for 50 % more budget after the run.
    """
    run = snapshot.run
    if not run.rounds:
        return None
    result = snapshot.forecasts.of(run.rounds, run.settings.limits().limits, run.summary)
    interval = {} if result.loss is None else result.loss.to_json()
    return {
        "ended": run.summary is not None,
        "chance": LEVEL,
        **interval,
        "reason": result.reason,
        "validated": result.validated,
    }


def choice(snapshot: RunSnapshot, number: int) -> dict[str, Any]:
    """Return a round, the reason for its τ, and the controller's G curve.

    Args:
      snapshot: the run.
      number: of the round.
    """
    rounds = snapshot.run.rounds
    at = bisect_left(rounds, number, key=lambda record: record.round)
    if at == len(rounds) or rounds[at].round != number:
        known = f"rounds 1 to {rounds[-1].round}" if rounds else "none yet"
        raise UserError(f"{snapshot.name} has no round {number}; it has {known}")
    record = rounds[at]
    # An explanation needs this round and the one before.
    shortened = replace(snapshot.run, rounds=rounds[max(0, at - 1) : at + 1])
    controller = build_method(snapshot.run.settings).controller
    explanation = explain(shortened, number, controller)
    marked = {explanation.record.tau - 1, (explanation.minimum or 0) - 1}
    drawn = _drawn(len(explanation.curve), marked)
    return {
        "record": {name: _value(getattr(record, name)) for name in _FIELDS},
        "spent": {
            name: RESOURCES[name].format(amount) for name, amount in record.spent.items()
        },
        "sentence": "; ".join(
            filter(None, (explanation.sentence, explanation.shared, explanation.without))
        ),
        "candidates": explanation.candidates[drawn].tolist(),
        "curve": [_value(float(f"{value:.6g}")) for value in explanation.curve[drawn]],
        "quantity": explanation.quantity,
        "minimum": explanation.minimum,
        "present": record.nodes,
        "missed": len(record.missed) + len(record.left_out),
    }


def _with_work(
    nodes: dict[str, Any] | None, rounds: Sequence[RoundRecord]
) -> dict[str, Any] | None:
    """Return nodes.json with each node's updates in the last round shared by speed."""
    work = next(
        (record.work for record in reversed(rounds[-_RECENT:]) if record.work), None
    )
    if nodes is None or work is None:
        return nodes
    by_node = {node: at for at, node in enumerate(work["node"])}

    def with_updates(node: dict[str, Any]) -> dict[str, Any]:
        at = by_node.get(node["numbers"][0]) if node.get("numbers") else None
        if at is None:
            return node
        return node | {name: work[name][at] for name in ("updates", "idle", "idle_equal")}

    return {**nodes, "nodes": [with_updates(node) for node in nodes.get("nodes", [])]}


def _seconds_left(rounds: Sequence[RoundRecord], name: str, left: float) -> float | None:
    if len(rounds) < 2:
        return None
    before = rounds[-min(len(rounds), _RECENT)]
    last = rounds[-1]
    spent = last.spent[name] - before.spent[name]
    seconds = last.wall - before.wall
    return left / spent * seconds if spent > 0 and seconds > 0 else None


def _value(value: Any) -> Any:
    return json_value(value) if isinstance(value, float) else value


def _extremes(values: Float64, buckets: int) -> set[int]:
    """Return the indices of the smallest and largest finite value of each stretch."""
    indices: set[int] = set()
    for bucket in np.array_split(np.arange(len(values)), buckets):
        known = bucket[np.isfinite(values[bucket])]
        if len(known):
            indices.add(int(known[np.argmin(values[known])]))
            indices.add(int(known[np.argmax(values[known])]))
    return indices


def _evenly(indices: Int64, most: int) -> Int64:
    """Return at most `most` of the indices, the first and the last among them."""
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, most).round().astype(np.int64)]


def _drawn(points: int, marked: set[int]) -> Int64:
    """Return the points of a curve to draw: dense for small τ, with the marked ones."""
    if points <= _CURVE_POINTS:
        return np.arange(points)
    spaced = np.geomspace(1, points, _CURVE_POINTS).round().astype(np.int64) - 1
    wanted = [index for index in marked if 0 <= index < points]
    return np.union1d(spaced, np.array(wanted, np.int64))


def describe(run: Run, others: Sequence[Run] = ()) -> str:
    """Return a paragraph on a run: its work, costs, gain and end.

    Args:
      run: the run.
      others: of these, the paragraph compares runs that differ in τ alone.
    """
    if not run.rounds:
        return "No round has finished yet."
    sentences = [_work(run), _costs(run), _gain(run), _end(run), _fixed_tau(run, others)]
    warnings = [f"Warning: {each}." for each in (run.summary or {}).get("warnings", [])]
    return " ".join(filter(None, [*warnings, *sentences]))


def _taus(run: Run) -> list[float]:
    return [record.effective_tau for record in run.rounds if record.tau > 0]


def _accuracies(run: Run) -> list[float]:
    return [record.accuracy for record in run.rounds if record.accuracy is not None]


def _validation(run: Run) -> float | None:
    """Return the validation loss of the result, or the lowest so far."""
    if run.summary is not None:
        return json_value(run.summary.get("validation_loss"))
    validated = [record.validation_best for record in run.rounds]
    return next((loss for loss in reversed(validated) if loss is not None), None)


def _rmses(run: Run) -> list[float]:
    metrics = [record.metrics or {} for record in run.rounds]
    return [each["rmse"] for each in metrics if "rmse" in each]


def _work(run: Run) -> str:
    taus = _taus(run)
    so_far = "" if run.summary else " so far"
    if run.settings.method == "centralized":
        return f"Centralized training made {round(sum(taus)):,} updates{so_far}."
    tau = f"τ = {run.settings.tau}"
    if run.settings.tau == "adaptive":
        tau = f"average τ {average_tau(taus):.1f}"
    return (
        f"The run made {len(taus):,} aggregations{so_far}, with {round(sum(taus)):,} local "
        f"updates on every node ({tau})."
    )


def _costs(run: Run) -> str:
    last = run.rounds[-1].spent
    parts = []
    for name, limit in run.settings.limits().limits.items():
        show = RESOURCES[name].format
        over = last[name] - limit
        excess = f", {show(over)} over the budget" if over > 0 else ""
        parts.append(f"{show(last[name])} of {show(limit)} ({name}{excess})")
    return f"It spent {_listed(parts)}."


def _gain(run: Run) -> str:
    summary = run.summary or {}
    loss = summary.get("loss")
    if loss is None:
        loss = run.rounds[-1].best_loss
    text = f"The loss went from {run.rounds[0].loss:.4g} to {loss:.4g}"
    validation = _validation(run)
    if validation is not None:
        validated = [record.validation for record in run.rounds]
        start = next(each for each in validated if each is not None)
        text += f", the validation loss from {start:.4g} to {validation:.4g}"
    errors = _rmses(run)
    if accuracies := _accuracies(run):
        accuracy = summary.get("accuracy", accuracies[-1])
        if accuracy is not None:
            change = f"from {accuracies[0]:.4f} to {accuracy:.4f}"
            text += f", and accuracy on the test samples {change}"
    elif errors:
        first = format_metric("rmse", errors[0])
        last = format_metric("rmse", summary.get("metrics", {}).get("rmse", errors[-1]))
        text += f", and RMSE on the test samples from {first} to {last}"
    return f"{text}."


def _end(run: Run) -> str:
    summary = run.summary or {}
    by = summary.get("stopped_by")
    reached = [target for target, done in summary.get("until", {}).items() if done]
    sentences = {
        None: "It has not ended.",
        "interrupted": "It was interrupted.",
        "rounds": f"It ended after {len(run.rounds):,} rounds, as requested.",
        "target": f"It ended because {_listed(reached or ['its target'])} was reached.",
        "plateau": "It ended because it no longer improved.",
        "validation": "It ended because the validation loss no longer improved.",
        "converged": "It ended because it had converged.",
        "callback": "It was ended by a callback.",
    }
    return sentences.get(by, f"It ended because the budget for {by} was used up.")


def _fixed_tau(run: Run, others: Sequence[Run]) -> str:
    """Return the losses of runs that differ from an adaptive run in τ alone."""
    losses = []
    for other in others:
        loss = (other.summary or {}).get("loss")
        fixed = other.settings.tau != "adaptive"
        same = replace(other.settings, tau="adaptive") == run.settings
        if fixed and same and loss is not None:
            losses.append((int(other.settings.tau), float(loss)))
    if not losses:
        return ""
    parts = [f"{loss:.4g} with τ = {tau}" for tau, loss in sorted(losses)]
    return f"With the same budget and a fixed τ, the loss was {_listed(parts)}."


def _listed(parts: Sequence[str]) -> str:
    """
    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
