"""How all figures look: the same colour and marker for a case everywhere, which do not rely on colour alone."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from fedbudget.runs.plot import BLUE, GREEN, GREY, PURPLE, VERMILION

COLOURS = {1: BLUE, 2: VERMILION, 3: GREEN, 4: PURPLE}
MARKERS = {1: "o", 2: "s", 3: "^", 4: "D"}
LINES = {1: "-", 2: "--", 3: "-.", 4: ":"}
BASELINE = GREY
ACCURACY = "accuracy on test samples"
LOSS = "loss on all training samples"
TAU = "average τ*, weighted by updates"


def picture(width: float, height: float) -> Picture:
    return Picture(figsize=(width, height), layout="constrained", dpi=120)


def panels(titles: Sequence[str], columns: int = 4) -> tuple[Picture, list[Axes]]:
    """A picture with a small panel for each title, in lines."""
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    drawn = picture(3.3 * columns + 0.6, 3.1 * lines + 0.4)
    axes = list(drawn.subplots(lines, columns, squeeze=False).ravel())
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontsize="medium")
    for axis in axes[len(titles) :]:
        axis.remove()
    return drawn, axes[: len(titles)]


def case_line(axis: Axes, case: int, x: Sequence[float], y: Sequence[float], *, markers: bool = True) -> None:
    axis.plot(
        x,
        y,
        color=COLOURS[case],
        linestyle=LINES[case],
        marker=MARKERS[case] if markers else None,
        markersize=4,
        label=f"Case {case}",
    )


def log_scale(axis: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic axis with these numbers on it, written as numbers."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)


def finish(axis: Axes, x: str, y: str, *, legend: bool = False) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    if legend:
        axis.legend(fontsize="small")
