"""A run in plain words, for people who were not there.

What charts and gauges show of a run, as plain JSON values: the one source of the page and of the report.

Rules here:
- Many rounds are thinned to what a screen can show: of each stretch of rounds the smallest and the largest value of
  every curve, every change of the reason, the first round and the last. No spike is lost, and no value is made up.
- JSON has no NaN or infinity: null instead.
- Amounts come with their text, so that units are known in one place.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.dashboard.run_reader import RunSnapshot
from fedbudget.errors import UserError, key
from fedbudget.forecasts.curve import LEVEL
from fedbudget.launch.method import build_method
from fedbudget.resources import RESOURCES
from fedbudget.runs.explain import explain
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord, average_tau, json_value
from fedbudget.runs.text import NAMES, figure, run_title
from fedbudget.settings.settings import Settings


def describe(run: Run, others: Sequence[Run] = ()) -> str:
    """A paragraph: what was spent, what was gained, what ended it, and what a fixed τ gave where that was tried.

    Args:
      others: runs to look among for those with the same settings but for τ.
    """
    if not run.rounds:
        return "No round is over yet."
    return " ".join(
        (_work(run), _costs(run), _gain(run), _end(run), *_fixed_tau(run, others))
    )


def _work(run: Run) -> str:
    taus = [record.effective_tau for record in run.rounds if record.tau > 0]
    so_far = "" if run.summary else " so far"
    if run.settings.method == "centralized":
        return f"Training in one place made {sum(taus):,} updates{so_far}."
    chosen = (
        f"average τ {average_tau(taus):.1f}"
        if run.settings.tau == "adaptive"
        else f"τ = {run.settings.tau}"
    )
    return f"The run made {len(taus):,} aggregations{so_far}, with {sum(taus):,} local updates on every node ({chosen})."


def _costs(run: Run) -> str:
    last = run.rounds[-1].spent
    parts = []
    for name, limit in run.settings.limits().limits.items():
        resource = RESOURCES[name]
        over = last[name] - limit
        beyond = f", {resource.format(over)} more than it had" if over > 0 else ""
        parts.append(
            f"{resource.format(last[name])} of {resource.format(limit)} ({name}{beyond})"
        )
    return f"It spent {_listed(parts)}."


def _gain(run: Run) -> str:
    first = run.rounds[0]
    last = run.rounds[-1]
    loss = (run.summary or {}).get("loss")
    reached = last.best_loss if loss is None else loss
    text = f"The loss went from {first.loss:.4g} to {reached:.4g}"
    known = [record.accuracy for record in run.rounds if record.accuracy is not None]
    accuracy = (run.summary or {}).get("accuracy", known[-1] if known else None)
    if known and accuracy is not None:
        text += f", and accuracy on the test samples from {known[0]:.1%} to {accuracy:.1%}"
    errors = [
        record.metrics["rmse"]
        for record in run.rounds
        if record.metrics and "rmse" in record.metrics
    ]
    if errors and not known:
        last_error = (run.summary or {}).get("metrics", {}).get("rmse", errors[-1])
        text += f", and RMSE on the test samples from {figure('rmse', errors[0])} to {figure('rmse', last_error)}"
    return f"{text}."


def _end(run: Run) -> str:
    by = None if run.summary is None else run.summary.get("stopped_by")
    if run.summary is None or by is None:
        return "It has not ended."
    if by == "interrupted":
        return "It was interrupted."
    if by == "rounds":
        return f"It ended after the {len(run.rounds):,} rounds that were asked for."
    if by == "target":
        reached = [
            target
            for target, is_reached in run.summary.get("until", {}).items()
            if is_reached
        ]
        return f"It ended because {_listed(reached or ['its target'])} was reached."
    if by == "plateau":
        return "It ended because it no longer improved."
    if by == "callback":
        return "It was ended by a callback."
    return f"It ended because the budget for {by} was used up."


def _fixed_tau(run: Run, others: Sequence[Run]) -> list[str]:
    """The same budget with a fixed τ, where it was tried."""
    if run.settings.tau != "adaptive":
        return []
    tried = sorted(
        (int(other.settings.tau), float(other.summary["loss"]))
        for other in others
        if other.settings.tau != "adaptive"
        and replace(other.settings, tau="adaptive") == run.settings
        and other.summary is not None
        and other.summary.get("loss") is not None
    )
    if not tried:
        return []
    parts = [f"{loss:.4g} with τ = {tau}" for tau, loss in tried]
    return [f"With the same budget and τ fixed, the loss came to {_listed(parts)}."]


def _listed(parts: Sequence[str]) -> str:
    """
    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


MAX_ROUNDS = 1500
"""Rounds of a chart, about; never more than twice as many."""

_RECENT = 20  # rounds that the time left is figured from
_CURVE = 80  # points of a G curve, about
_FIELDS = (
    "round",
    "t",
    "tau",
    "reason",
    "eta",
    "loss",
    "best_loss",
    "accuracy",
    "rho",
    "beta",
    "delta",
    "wall",
)


def view(snapshot: RunSnapshot) -> dict[str, Any]:
    """All that the page of a run shows, but for G curves."""
    run = snapshot.run
    limits = snapshot.run.settings.limits().limits
    return {
        "name": snapshot.name,
        "title": run_title(run.settings),
        "settings": _settings(run.settings),
        "resources": [
            {"name": name, "unit": RESOURCES[name].unit, "limit": limit}
            for name, limit in limits.items()
        ],
        "columns": columns(thinned(run.rounds)),
        **now(snapshot),
    }


def now(snapshot: RunSnapshot) -> dict[str, Any]:
    """What changes while a run goes on, besides its rows."""
    run = snapshot.run
    evaluated = next(
        (record.accuracy for record in reversed(run.rounds) if record.accuracy is not None),
        None,
    )
    last = run.rounds[-1] if run.rounds else None
    return {
        "state": snapshot.state,
        "paragraph": describe(run),
        "rounds": last.round if last else 0,
        "loss": json_value(
            (run.summary or {}).get("loss", last.best_loss if last else None)
        ),
        "accuracy": (run.summary or {}).get("accuracy", evaluated),
        "metrics": metric_tiles(run),
        "average_tau": average_tau(
            [record.effective_tau for record in run.rounds if record.tau > 0]
        )
        or None,
        "summary": run.summary,
        "forecast": forecast(snapshot),
        "gauges": gauges(snapshot),
        "nodes": _with_work(snapshot.nodes, run.rounds),
        "written": snapshot.written,
    }


def metric_tiles(run: Run) -> list[dict[str, str]]:
    """What is shown of test samples besides accuracy: of the run's end, or as last evaluated."""
    looked = next((record for record in reversed(run.rounds) if record.metrics), None)
    end = run.summary or {}
    metrics = (
        end.get("metrics")
        or (looked.metrics if looked is not None and not end else None)
        or {}
    )
    spread = end.get("spread") or (
        looked.spread if looked is not None and not end else None
    )
    to_beat = end.get("to_beat", {})
    notes = (
        {"rmse": f"of the mean {figure('rmse', to_beat['rmse'])}"}
        if "rmse" in to_beat
        else {}
    )
    tiles = [
        {
            "name": name,
            "label": NAMES[name],
            "text": figure(name, metrics[name]),
            "note": notes.get(name, ""),
        }
        for name in NAMES
        if name in metrics and name not in ("accuracy", "f1_binary")
    ]
    if spread:
        of = "rmse" if "rmse" in metrics else "accuracy"
        others = f"tenth percentile {figure(of, spread['tenth'])}, median {figure(of, spread['median'])}"
        label = f"Worst of {spread['nodes']:.0f} nodes"
        tiles.append(
            {
                "name": "worst",
                "label": label,
                "text": figure(of, spread["worst"]),
                "note": others,
            }
        )
    return tiles


def rows(snapshot: RunSnapshot, first: int, last: int) -> dict[str, Any]:
    """The columns of rounds `first` to `last`: exact where they are few enough, else thinned."""
    rounds = snapshot.run.rounds
    start = bisect_left(rounds, first, key=lambda record: record.round)
    end = bisect_right(rounds, last, key=lambda record: record.round)
    selected = rounds[start:end]
    return {"columns": columns(thinned(selected)), "exact": len(selected) <= MAX_ROUNDS}


def columns(records: Sequence[RoundRecord]) -> dict[str, Any]:
    """Records by column; those per resource by name again."""
    by_name: dict[str, Any] = {
        name: [_value(getattr(record, name)) for record in records] for name in _FIELDS
    }
    by_name["rmse"] = [_value((record.metrics or {}).get("rmse")) for record in records]
    resources = list(records[0].spent) if records else []
    for name in ("c", "b", "spent"):
        by_name[name] = {
            each: [_value(getattr(record, name)[each]) for record in records]
            for each in resources
        }
    return by_name


def thinned(records: Sequence[RoundRecord], most: int = MAX_ROUNDS) -> list[RoundRecord]:
    """All of few records; of many, those that make the same picture."""
    if len(records) <= most:
        return list(records)
    resource = next(iter(records[0].spent))
    curves = [
        _array([getattr(record, name) for record in records])
        for name in ("tau", "loss", "rho", "beta", "delta")
    ]
    curves += [
        _array([getattr(record, name)[resource] for record in records])
        for name in ("c", "b")
    ]
    kept = {0, len(records) - 1}
    for curve in curves:
        kept |= _extremes(curve, most // (2 * len(curves)))
    accuracy = _array(
        [(record.metrics or {}).get("rmse", record.accuracy) for record in records]
    )
    evaluated = np.flatnonzero(~np.isnan(accuracy))
    kept |= (
        set(evaluated.tolist())
        if len(evaluated) <= most // 4
        else _extremes(accuracy, most // 8)
    )
    reasons = np.array([record.reason for record in records])
    changes = np.flatnonzero(reasons[1:] != reasons[:-1]) + 1
    kept |= set(_evenly(changes, most // 2).tolist())
    return [records[index] for index in sorted(kept)]


def gauges(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Of each resource what was spent, what is left, and until when at the pace of the last rounds."""
    rounds = snapshot.run.rounds
    limits = snapshot.run.settings.limits().limits
    spent = rounds[-1].spent if rounds else dict.fromkeys(limits, 0.0)
    sources = (snapshot.run.summary or {}).get("sources", {})
    by_resource = []
    for name, limit in limits.items():
        resource = RESOURCES[name]
        left = max(0.0, limit - spent[name])
        seconds = _seconds_left(rounds, name, left) if snapshot.state == "running" else None
        by_resource.append(
            {
                "name": name,
                "spent": spent[name],
                "limit": limit,
                "share": spent[name] / limit,
                "text": f"{resource.format(spent[name])} of {resource.format(limit)}",
                "left": resource.format(left),
                "over": resource.format(spent[name] - limit)
                if spent[name] > limit
                else None,
                "source": sources.get(name),
                "until": None if seconds is None else snapshot.written + seconds,
            }
        )
    return by_resource


def forecast(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """The loss at the end of the budget, or with half as much again where the run has ended; None before all rounds."""
    run = snapshot.run
    if not run.rounds:
        return None
    found = snapshot.forecasts.of(run.rounds, run.settings.limits().limits, run.summary)
    interval = {} if found.loss is None else found.loss.to_json()
    return {
        "ended": run.summary is not None,
        "chance": LEVEL,
        **interval,
        "reason": found.reason,
    }


def choice(snapshot: RunSnapshot, number: int) -> dict[str, Any]:
    """One round, why it had its τ, and the G curve that the controller looked at."""
    rounds = snapshot.run.rounds
    at = bisect_left(rounds, number, key=lambda record: record.round)
    if at == len(rounds) or rounds[at].round != number:
        last = rounds[-1].round if rounds else 0
        raise UserError(
            f"{snapshot.name} has no round {number}; it has {f'rounds 1 to {last}' if last else 'none yet'}"
        )
    record = rounds[at]
    two = replace(
        snapshot.run, rounds=rounds[max(0, at - 1) : at + 1]
    )  # all that is needed of the run
    explanation = explain(two, number, build_method(snapshot.run.settings).controller)
    drawn = _drawn(
        len(explanation.curve),
        {tau - 1 for tau in (explanation.tau, explanation.minimum or 0)},
    )
    return {
        "record": {
            name: values[0] for name, values in columns([record]).items() if name in _FIELDS
        },
        "spent": {
            name: RESOURCES[name].format(amount) for name, amount in record.spent.items()
        },
        "sentence": "; ".join(filter(None, (explanation.sentence, explanation.shared))),
        "candidates": explanation.candidates[drawn].tolist(),
        "G": [_value(float(f"{value:.6g}")) for value in explanation.curve[drawn]],
        "minimum": explanation.minimum,
        "present": record.nodes,
        "missed": len(record.missed) + len(record.left_out),
    }


def _with_work(
    nodes: dict[str, Any] | None, rounds: Sequence[RoundRecord]
) -> dict[str, Any] | None:
    """What nodes.json says, with who made how many updates in the last round that they shared by speed."""
    work = next(
        (record.work for record in reversed(rounds[-_RECENT:]) if record.work), None
    )
    if nodes is None or work is None:
        return nodes
    by_node = {node: at for at, node in enumerate(work["node"])}

    def own(node: dict[str, Any]) -> dict[str, Any]:
        at = by_node.get(node["numbers"][0]) if node.get("numbers") else None
        return (
            node
            if at is None
            else node | {name: work[name][at] for name in ("updates", "idle", "idle_equal")}
        )

    return {**nodes, "nodes": [own(node) for node in nodes.get("nodes", [])]}


def _settings(settings: Settings) -> dict[str, str]:
    """As in config.toml, without what was left open."""
    values = {
        key(name): value for name, value in vars(settings).items() if value is not None
    }
    return {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
    }


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


def _array(values: Sequence[float | None]) -> Float64:
    return np.array(values, dtype=np.float64)


def _extremes(values: Float64, buckets: int) -> set[int]:
    """Where the smallest and the largest finite value of each stretch are."""
    indices: set[int] = set()
    for bucket in np.array_split(np.arange(len(values)), buckets):
        known = bucket[np.isfinite(values[bucket])]
        if len(known):
            indices |= {
                int(known[np.argmin(values[known])]),
                int(known[np.argmax(values[known])]),
            }
    return indices


def _evenly(indices: Int64, most: int) -> Int64:
    """No more than so many of them, the first and the last among them."""
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, most).round().astype(np.int64)]


def _drawn(points: int, wanted: set[int]) -> Int64:
    """Which points of a curve to draw: close together where τ is small, always with those that are marked."""
    if points <= _CURVE:
        return np.arange(points)
    spaced = np.geomspace(1, points, _CURVE).round().astype(np.int64) - 1
    return np.union1d(
        spaced, np.array([index for index in wanted if 0 <= index < points], np.int64)
    )
