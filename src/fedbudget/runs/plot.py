"""The picture of a run, from its records alone: what was learned, what was spent, what was chosen, and why."""

import io
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg", force=False)

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbudget.budget import RESOURCES
from fedbudget.control import Reason
from fedbudget.runs.record import RoundRecord

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#666666"
_MARKERS = {
    Reason.START: ("o", GREY),
    Reason.MINIMUM: ("o", BLUE),
    Reason.SEARCH_LIMIT: ("^", ORANGE),
    Reason.BUDGET: ("s", VERMILION),
    Reason.FIXED: ("o", BLUE),
    Reason.RECOVERY: ("X", PURPLE),
}


def plot_run(rounds: Sequence[RoundRecord], budget: Mapping[str, float], *, title: str) -> bytes:
    """A PNG."""
    figure = Figure(figsize=(10, 8), layout="constrained", dpi=120)
    figure.suptitle(title)
    axes = figure.subplots(3, 2)
    resource = RESOURCES[next(iter(budget))]
    x = [record.spent[resource.name] for record in rounds]
    _learned(axes[0][0], axes[0][1], rounds, x)
    _chosen(axes[1][0], rounds, x)
    _spent(axes[1][1], rounds, budget)
    _estimated(axes[2][0], axes[2][1], rounds, x)
    unit = f" ({resource.unit})" if resource.unit else ""
    for axis in (axes[0][0], axes[0][1], axes[1][0], axes[2][0], axes[2][1]):
        axis.set_xlabel(f"{resource.name} spent{unit}")
        axis.set_xlim(0, max([budget[resource.name], *x]))
        axis.axvline(budget[resource.name], color=GREY, linestyle=":", linewidth=1)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _learned(loss: Axes, accuracy: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    loss.plot(x, [record.loss for record in rounds], color=BLUE, linewidth=1, label="F(w), latest")
    loss.plot(x, [record.best_loss for record in rounds], color=ORANGE, linestyle="--", label="F(w$^f$), best")
    loss.set_ylabel("loss")
    loss.legend()
    points = [(spent, record.accuracy) for spent, record in zip(x, rounds, strict=True) if record.accuracy is not None]
    accuracy.set_ylabel("accuracy on test samples")
    if points:
        accuracy.plot(*zip(*points, strict=True), color=GREEN, marker=".")
    else:
        _say(accuracy, "this model has no accuracy")


def _chosen(axis: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    taken = [(spent, record) for spent, record in zip(x, rounds, strict=True) if record.tau > 0]
    axis.step([spent for spent, _ in taken], [record.tau for _, record in taken], where="pre", color=GREY, lw=0.7)
    for reason, (marker, colour) in _MARKERS.items():
        chosen = [(spent, record.tau) for spent, record in taken if record.reason == reason]
        if chosen:
            spent, taus = zip(*chosen, strict=True)
            axis.scatter(spent, taus, marker=marker, color=colour, s=18, label=str(reason), zorder=3)
    axis.set_ylabel("τ, local updates in a round")
    axis.set_ylim(bottom=0)
    axis.legend(title="chosen by")


def _spent(axis: Axes, rounds: Sequence[RoundRecord], budget: Mapping[str, float]) -> None:
    numbers = [record.round for record in rounds]
    for (name, limit), style in zip(budget.items(), ("-", "--", "-.", ":", (0, (1, 3))), strict=False):
        share = [100 * record.spent[name] / limit for record in rounds]
        axis.plot(numbers, share, linestyle=style, label=f"{name}, of {RESOURCES[name].format(limit)}")
    axis.axhline(100, color=GREY, linestyle=":", linewidth=1)
    axis.set_xlabel("round")
    axis.set_ylabel("budget spent (%)")
    axis.legend()


def _estimated(left: Axes, right: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    known = [(spent, record) for spent, record in zip(x, rounds, strict=True) if record.rho is not None]
    if not known:
        for axis in (left, right):
            _say(axis, "nothing is estimated with a fixed τ")
        return

    def line(axis: Axes, name: str, label: str, colour: str, style: str = "-") -> None:
        axis.plot([at for at, _ in known], [getattr(each, name) for _, each in known], style, color=colour, label=label)
        axis.set_ylabel("estimate")
        axis.set_ylim(bottom=0)
        axis.legend()

    line(left, "rho", "ρ̂, Lipschitz", BLUE)
    line(left, "beta", "β̂, smoothness", ORANGE, "--")
    line(right, "delta", "δ̂, divergence of gradients", GREEN)


def _say(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
