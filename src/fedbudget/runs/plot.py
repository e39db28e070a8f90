"""The plot of a run, from its records: loss, accuracy, spending, τ, η and estimates."""

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbudget.budget.control import Reason
from fedbudget.errors import requires_package
from fedbudget.resources import RESOURCES
from fedbudget.runs.record import RoundRecord

with requires_package("a picture of a run"):
    import matplotlib

matplotlib.use("Agg", force=False)

# Okabe and Ito's palette: colour-blind readers can tell the colours apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#666666"


class Marker(NamedTuple):
    """Shape and colour of the rounds with one reason."""

    shape: str
    colour: str
    filled: bool = True


MARKERS: dict[str, Marker] = {
    Reason.START: Marker("o", GREY, filled=False),
    Reason.MINIMUM: Marker("o", BLUE),
    Reason.BALANCE: Marker("o", BLUE),
    Reason.SEARCH_LIMIT: Marker("^", ORANGE),
    Reason.LENGTH: Marker("^", GREEN),
    Reason.BUDGET: Marker("s", PURPLE),
    Reason.SPREAD: Marker("v", ORANGE),
    Reason.REST: Marker("h", PURPLE),
    Reason.PRIVACY: Marker("o", GREEN),
    Reason.LENGTHS: Marker("o", PURPLE, filled=False),
    Reason.NEWTON: Marker("D", GREEN),
    Reason.CANDIDATE: Marker("D", GREEN, filled=False),
    Reason.FIXED: Marker("D", BLUE),
    Reason.RECOVERY: Marker("X", ORANGE),
}
"""The same as on the dashboard, in dashboard/page/charts.js."""

# Fields of records in small panels, named by their first letter.
_SMALL = (
    ("eta", "η, step size", PURPLE),
    ("rho", "ρ̂, Lipschitz", BLUE),
    ("beta", "β̂, smoothness", ORANGE),
    ("delta", "δ̂, divergence", GREEN),
)
# For other reasons, in turn.
_OTHER_MARKERS = tuple(Marker(shape, GREEN) for shape in "*PsD")
_LINE_STYLES = ("-", "--", "-.", ":", (0, (1, 3)))


def plot_run(
    rounds: Sequence[RoundRecord], budget: Mapping[str, float], *, title: str
) -> bytes:
    """Return the plot of a run as a PNG; see `run_figure`."""
    picture = io.BytesIO()
    run_figure(rounds, budget, title=title).savefig(picture, format="png")
    return picture.getvalue()


def run_figure(
    rounds: Sequence[RoundRecord], budget: Mapping[str, float], *, title: str
) -> Figure:
    """Return the plot of a run.

    Args:
      rounds: records of all rounds.
      budget: limits by resource; the first one is the x axis.
      title: title of the plot.
    """
    figure = Figure(figsize=(10, 8), layout="constrained", dpi=120)
    figure.suptitle(title)
    panels = figure.subplot_mosaic(
        "LLLLLLAAAAAA;TTTTTTSSSSSS;eeerrrbbbddd", height_ratios=[4, 4, 3]
    )
    resource = RESOURCES[next(iter(budget))]
    x = [record.spent[resource.name] for record in rounds]
    losses(panels["L"], rounds, x)
    _accuracy(panels["A"], rounds, x)
    chosen_tau(panels["T"], rounds, x)
    _spent(panels["S"], rounds, budget)
    for name, label, colour in _SMALL:
        _small(panels[name[0]], name, label, colour, rounds, x)
    unit = f" ({resource.unit})" if resource.unit else ""
    limit = budget[resource.name]
    for name, axis in panels.items():
        axis.grid(alpha=0.25)
        if name != "S":
            axis.set_xlabel(f"{resource.name} spent{unit}")
            axis.set_xlim(0, 1.02 * max([limit, *x]))
            axis.axvline(limit, color=GREY, linestyle=":", linewidth=1)
    return figure


def losses(axis: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    """Plot F(w) and F(w^f) on the round's samples, and the validation loss.

    On mini-batches, the first two can rise.
    """
    latest = [record.loss for record in rounds]
    best = [record.best_loss for record in rounds]
    axis.plot(x, latest, color=BLUE, label="training, latest parameters")
    axis.plot(x, best, color=ORANGE, linestyle="--", label="training, best so far")
    validation = _present(x, [record.validation for record in rounds])
    if validation:
        axis.plot(*zip(*validation, strict=True), color=GREEN, ls=":", label="validation")
        lowest = _present(x, [record.validation_best for record in rounds])
        axis.plot(
            *zip(*lowest, strict=True), color=GREEN, label="validation, lowest so far"
        )
    axis.set_ylabel("loss")
    axis.legend()


def chosen_tau(axis: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    """Plot τ of every round, with a marker for its reason."""
    points = [
        (spent, record) for spent, record in zip(x, rounds, strict=True) if record.tau > 0
    ]
    at = [spent for spent, _ in points]
    taus = [record.tau for _, record in points]
    axis.step(at, taus, where="pre", color=GREY, lw=0.7)
    for reason, marker in _markers(record.reason for _, record in points).items():
        chosen = [
            number for number, (_, each) in enumerate(points) if each.reason == reason
        ]
        # "$" would start a formula, and a label that starts with "_" would be hidden.
        label = f" {reason}".replace("$", r"\$")
        spent = [at[number] for number in chosen]
        height = [taus[number] for number in chosen]
        axis.scatter(
            spent,
            height,
            s=18,
            marker=marker.shape,
            edgecolors=marker.colour,
            facecolors=marker.colour if marker.filled else "none",
            label=label,
            zorder=3,
        )
    most = [max((record.work or {}).get("updates") or [record.tau]) for _, record in points]
    if any(record.work for _, record in points):
        label = " slowest to fastest node"
        axis.fill_between(at, taus, most, step="pre", color=GREY, alpha=0.2, label=label)
    axis.set_ylabel("τ, local updates in a round")
    axis.set_ylim(0, 1.5 * max(most, default=1))  # space for the legend
    axis.legend(
        title="chosen by",
        ncols=3,
        loc="upper center",
        fontsize="x-small",
        title_fontsize="x-small",
    )


def _markers(reasons: Iterable[str]) -> dict[str, Marker]:
    """Return the marker of each reason; those in the table come first."""
    present = dict.fromkeys(reasons)
    others = [reason for reason in present if reason not in MARKERS]
    markers = {
        str(reason): marker for reason, marker in MARKERS.items() if reason in present
    }
    return markers | dict(zip(others, cycle(_OTHER_MARKERS), strict=False))


def _accuracy(axis: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    """Plot the accuracy on test samples, or the RMSE for real targets."""
    name = "accuracy"
    points = _present(x, [record.accuracy for record in rounds])
    if not points:
        errors = _present(x, [(record.metrics or {}).get("rmse") for record in rounds])
        if errors:
            name = "RMSE"
            points = errors
    axis.set_ylabel(f"{name} on test samples")
    if points:
        axis.plot(*zip(*points, strict=True), color=GREEN, marker=".")
    else:
        _write(axis, "no accuracy for this model or data")


def _spent(axis: Axes, rounds: Sequence[RoundRecord], budget: Mapping[str, float]) -> None:
    numbers = [record.round for record in rounds]
    for (name, limit), style in zip(budget.items(), _LINE_STYLES, strict=False):
        share = [100 * record.spent[name] / limit for record in rounds]
        label = f"{name}, of {RESOURCES[name].format(limit)}"
        axis.plot(numbers, share, linestyle=style, label=label)
    axis.axhline(100, color=GREY, linestyle=":", linewidth=1)
    axis.set_xlabel("round")
    axis.set_ylabel("budget spent (%)")
    axis.legend()


def _small(
    axis: Axes,
    name: str,
    label: str,
    colour: str,
    rounds: Sequence[RoundRecord],
    x: Sequence[float],
) -> None:
    """Plot one field of the records in a small panel, with few and short tick labels."""
    values = [
        getattr(record, name) if record.tau > 0 or name != "eta" else None
        for record in rounds
    ]
    points = _present(x, values)
    axis.set_ylabel(label)
    if points:
        axis.plot(*zip(*points, strict=True), color=colour)
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(scilimits=(-2, 3))
        axis.locator_params(nbins=4)
    else:
        _write(axis, "not\nestimated")


def _present(
    x: Sequence[float], values: Sequence[float | None]
) -> list[tuple[float, float]]:
    """Return the points that have a value."""
    return [(at, y) for at, y in zip(x, values, strict=True) if y is not None]


def _write(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
