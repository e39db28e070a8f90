"""The picture of a run, from its records alone: what was learned, what was spent, what was chosen, and why."""

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbudget.budget.control import Reason
from fedbudget.errors import requires_package
from fedbudget.resources import RESOURCES
from fedbudget.runs.record import RoundRecord

with requires_package("a picture of a run"):
    import matplotlib

matplotlib.use("Agg", force=False)


LATEST = "of the latest parameters"
BEST = "of the best parameters so far"
"""F(w) and F(w^f), both on the round's own samples: where these are a mini-batch, either can rise."""

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#666666"
_MARKERS: dict[str, tuple[str, str]] = {
    Reason.START: ("o", GREY),
    Reason.MINIMUM: ("o", BLUE),
    Reason.SEARCH_LIMIT: ("^", ORANGE),
    Reason.BUDGET: ("s", VERMILION),
    Reason.FIXED: ("o", BLUE),
    Reason.RECOVERY: ("X", PURPLE),
}
_OWN_MARKERS = (
    ("D", GREEN),
    ("v", ORANGE),
    ("P", BLUE),
    ("*", VERMILION),
)  # in turn, for any other reason


def plot_run(
    rounds: Sequence[RoundRecord], budget: Mapping[str, float], *, title: str
) -> bytes:
    """A PNG."""
    figure = Figure(figsize=(10, 8), layout="constrained", dpi=120)
    figure.suptitle(title)
    panels = figure.subplot_mosaic(
        "LLLLLLAAAAAA;TTTTTTSSSSSS;eeerrrbbbddd", height_ratios=[4, 4, 3]
    )
    resource = RESOURCES[next(iter(budget))]
    x = [record.spent[resource.name] for record in rounds]
    losses(panels["L"], rounds, x)
    chosen_tau(panels["T"], rounds, x)
    _spent(panels["S"], rounds, budget)
    _accuracy(panels["A"], rounds, x)
    _small(panels["e"], "eta", "η, step size", PURPLE, rounds, x)
    _small(panels["r"], "rho", "ρ̂, Lipschitz", BLUE, rounds, x)
    _small(panels["b"], "beta", "β̂, smoothness", ORANGE, rounds, x)
    _small(panels["d"], "delta", "δ̂, divergence", GREEN, rounds, x)
    unit = f" ({resource.unit})" if resource.unit else ""
    for name, axis in panels.items():
        axis.grid(alpha=0.25)
        if name != "S":
            axis.set_xlabel(f"{resource.name} spent{unit}")
            axis.set_xlim(0, 1.02 * max([budget[resource.name], *x]))
            axis.axvline(budget[resource.name], color=GREY, linestyle=":", linewidth=1)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def losses(axis: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    """F(w) and F(w^f)."""
    axis.plot(x, [record.loss for record in rounds], color=BLUE, label=LATEST)
    axis.plot(
        x, [record.best_loss for record in rounds], color=ORANGE, linestyle="--", label=BEST
    )
    axis.set_ylabel("loss on the round's samples")
    axis.legend()


def _accuracy(axis: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    """Or RMSE, where targets are real."""
    values = [record.accuracy for record in rounds]
    errors = [(record.metrics or {}).get("rmse") for record in rounds]
    real = not any(value is not None for value in values) and any(
        error is not None for error in errors
    )
    points = [
        (spent, value)
        for spent, value in zip(x, errors if real else values, strict=True)
        if value is not None
    ]
    axis.set_ylabel(f"{'RMSE' if real else 'accuracy'} on test samples")
    if points:
        axis.plot(*zip(*points, strict=True), color=GREEN, marker=".")
    else:
        _write(axis, "no accuracy for this model or data")


def chosen_tau(axis: Axes, rounds: Sequence[RoundRecord], x: Sequence[float]) -> None:
    """τ of every round, marked by what chose it."""
    taken = [
        (spent, record) for spent, record in zip(x, rounds, strict=True) if record.tau > 0
    ]
    axis.step(
        [spent for spent, _ in taken],
        [record.tau for _, record in taken],
        where="pre",
        color=GREY,
        lw=0.7,
    )
    for reason, (marker, colour) in _markers(record.reason for _, record in taken).items():
        spent, taus = zip(
            *((spent, record.tau) for spent, record in taken if record.reason == reason),
            strict=True,
        )
        label = f" {reason}".replace(
            "$", r"\$"
        )  # $ would begin a formula; what begins with _ has no place in a legend
        axis.scatter(spent, taus, marker=marker, color=colour, s=18, label=label, zorder=3)
    most = [max((record.work or {}).get("updates") or [record.tau]) for _, record in taken]
    if any(record.work for _, record in taken):
        at = [spent for spent, _ in taken]
        least = [record.tau for _, record in taken]
        axis.fill_between(
            at,
            least,
            most,
            step="pre",
            color=GREY,
            alpha=0.2,
            label=" of the slowest to the fastest",
        )
    axis.set_ylabel("τ, local updates in a round")
    axis.set_ylim(0, 1.5 * max(most, default=1))  # room for the legend
    axis.legend(
        title="chosen by",
        ncols=3,
        loc="upper center",
        fontsize="x-small",
        title_fontsize="x-small",
    )


def _markers(reasons: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Marker and colour of each reason there is: the known ones in their order, then others as they come."""
    present = dict.fromkeys(reasons)
    own = [reason for reason in present if reason not in _MARKERS]
    known: dict[str, tuple[str, str]] = {
        str(reason): look for reason, look in _MARKERS.items() if reason in present
    }
    return known | dict(zip(own, cycle(_OWN_MARKERS), strict=False))


def _spent(axis: Axes, rounds: Sequence[RoundRecord], budget: Mapping[str, float]) -> None:
    numbers = [record.round for record in rounds]
    for (name, limit), style in zip(
        budget.items(), ("-", "--", "-.", ":", (0, (1, 3))), strict=False
    ):
        share = [100 * record.spent[name] / limit for record in rounds]
        axis.plot(
            numbers,
            share,
            linestyle=style,
            label=f"{name}, of {RESOURCES[name].format(limit)}",
        )
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
    """A small panel: few numbers on the axes, and short ones."""
    of_rounds = zip(x, rounds, strict=True)
    known = [
        (at, getattr(each, name)) for at, each in of_rounds if each.tau > 0 or name != "eta"
    ]
    known = [(at, value) for at, value in known if value is not None]
    axis.set_ylabel(label)
    if known:
        axis.plot(*zip(*known, strict=True), color=colour)
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(scilimits=(-2, 3))
        axis.locator_params(nbins=4)
    else:
        _write(axis, "not\nestimated")


def _write(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
