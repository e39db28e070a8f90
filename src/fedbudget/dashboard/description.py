"""A run in plain words, for people who were not there."""

from collections.abc import Sequence
from dataclasses import replace

from fedbudget.resources import RESOURCES
from fedbudget.runs.figures import figure
from fedbudget.runs.folder import Run
from fedbudget.runs.record import average_tau


def describe(run: Run, others: Sequence[Run] = ()) -> str:
    """A paragraph: what was spent, what was gained, what ended it, and what a fixed τ gave where that was tried.

    Args:
      others: runs to look among for those with the same settings but for τ.
    """
    if not run.rounds:
        return "No round is over yet."
    return " ".join((_work(run), _costs(run), _gain(run), _end(run), *_fixed_tau(run, others)))


def _work(run: Run) -> str:
    taus = [record.effective_tau for record in run.rounds if record.tau > 0]
    so_far = "" if run.summary else " so far"
    if run.settings.method == "centralized":
        return f"Training in one place made {sum(taus):,} updates{so_far}."
    chosen = f"average τ {average_tau(taus):.1f}" if run.settings.tau == "adaptive" else f"τ = {run.settings.tau}"
    return (
        f"The run made {len(taus):,} aggregations{so_far}, with {sum(taus):,} local updates on every node ({chosen})."
    )


def _costs(run: Run) -> str:
    last = run.rounds[-1].spent
    parts = []
    for name, limit in run.settings.limits().limits.items():
        resource, over = RESOURCES[name], last[name] - limit
        beyond = f", {resource.format(over)} more than it had" if over > 0 else ""
        parts.append(f"{resource.format(last[name])} of {resource.format(limit)} ({name}{beyond})")
    return f"It spent {_listed(parts)}."


def _gain(run: Run) -> str:
    first, last = run.rounds[0], run.rounds[-1]
    loss = (run.summary or {}).get("loss")
    reached = last.best_loss if loss is None else loss
    text = f"The loss went from {first.loss:.4g} to {reached:.4g}"
    known = [record.accuracy for record in run.rounds if record.accuracy is not None]
    accuracy = (run.summary or {}).get("accuracy", known[-1] if known else None)
    if known and accuracy is not None:
        text += f", and accuracy on the test samples from {known[0]:.1%} to {accuracy:.1%}"
    errors = [record.metrics["rmse"] for record in run.rounds if record.metrics and "rmse" in record.metrics]
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
        reached = [target for target, is_reached in run.summary.get("until", {}).items() if is_reached]
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
