"""The plot of a run."""

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedbudget
from fedbudget import data
from fedbudget.arrays import Float32
from fedbudget.budget.control import Reason
from fedbudget.runs.plot import (
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PURPLE,
    Marker,
    chosen_tau,
    losses,
    plot_run,
)
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.types import Tau
from support.synthetic_runs import record

DIGITS = data.load("digits")
BUDGETS = {
    "one resource": ["time=3s"],
    "five resources": ["time=3s", "energy=1kJ", "bytes=1MB", "cpu=10s", "money=1"],
}


def test_markers_are_those_of_the_dashboard() -> None:
    """A reason has the same shape and colour in the plot and on the page."""
    charts = Path(fedbudget.__file__).parent / "dashboard/page/charts.js"
    table = re.findall(
        r'"(.+)": \{ symbol: "(.+)", colour: "(.+)" \}', charts.read_text(encoding="utf-8")
    )
    shapes = {"circle": "o", "triangle-up": "^", "triangle-down": "v", "square": "s"}
    shapes |= {"hexagon": "h", "diamond": "D", "x": "X"}
    colours = {"c1": BLUE, "c2": ORANGE, "c3": GREEN, "c4": PURPLE, "c5": GREY}
    on_page = {
        reason: Marker(
            shapes[symbol.removesuffix("-open")],
            colours[colour],
            filled=not symbol.endswith("-open"),
        )
        for reason, symbol, colour in table
    }
    assert on_page == MARKERS
    assert {*MARKERS} == {*Reason} - {Reason.FINAL}


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a PNG, and check the checksum of each."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    position = 8
    while position < len(png):
        (length,) = struct.unpack(">I", png[position : position + 4])
        body = png[position + 4 : position + 8 + length]
        assert struct.unpack(">I", png[position + 8 + length : position + 12 + length]) == (
            zlib.crc32(body),
        )
        yield body[:4], body[4:]
        position += 12 + length


def plot_of(result: fedbudget.Result) -> bytes:
    return plot_run(result.rounds, result.budget, title="a run")


@pytest.mark.parametrize("resources", BUDGETS)
@pytest.mark.parametrize("tau", ["adaptive", 7])
@pytest.mark.parametrize("rounds", [1, None])
def test_plot_is_a_complete_png(resources: str, tau: Tau, rounds: int | None) -> None:
    result = fedbudget.train(
        dataset=DIGITS, budget=BUDGETS[resources], tau=tau, rounds=rounds
    )
    plot = plot_of(result)
    png_chunks = list(chunks(plot))
    assert png_chunks[0][0] == b"IHDR"
    assert png_chunks[-1] == (b"IEND", b"")
    width, height = struct.unpack(">II", png_chunks[0][1][:8])
    pixels = matplotlib.image.imread(io.BytesIO(plot))
    assert pixels.shape[:2] == (height, width)
    assert min(width, height) > 500
    for part in np.array_split(pixels, 3):  # three rows, none of them blank
        assert part.std() > 0.01


def test_missing_accuracy_and_nan_losses() -> None:
    def distance(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        return 0.5 * float(np.square(x - w).sum(axis=1).mean()), w - x.mean(axis=0)

    model = fedbudget.FunctionModel(distance, initial=np.zeros(64), target="none")
    result = fedbudget.train(dataset=DIGITS, model=model, budget="time=2s")
    assert {record.accuracy for record in result.rounds} == {None}
    broken = [
        replace(record, loss=float("nan"), best_loss=float("nan"))
        for record in result.rounds
    ]
    for rounds in (result.rounds, broken):
        assert (
            list(chunks(plot_run(rounds, result.budget, title="no accuracy")))[-1][0]
            == b"IEND"
        )


def test_error_of_real_targets() -> None:
    rounds = [record(number, accuracy=None) for number in range(1, 9)]
    evaluated = [replace(each, metrics={"rmse": 9.0 / each.round}) for each in rounds]
    budget = {"time": 20.0, "bytes": 1e6}
    without, plot = (plot_run(each, budget, title="error") for each in (rounds, evaluated))
    assert without != plot


def test_plot_depends_on_the_records() -> None:
    result = fedbudget.train(dataset=DIGITS, budget="time=3s")
    changed = replace(
        result,
        rounds=[*result.rounds[:-2], replace(result.rounds[-2], tau=30), result.rounds[-1]],
    )
    one, same, other = (
        matplotlib.image.imread(io.BytesIO(plot_of(each)))
        for each in (result, result, changed)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def legend(
    draw: Callable[[Axes, Sequence[RoundRecord], Sequence[float]], None],
    rounds: Sequence[RoundRecord],
) -> list[str]:
    """Labels in the legend of a panel."""
    axis = Figure().subplots()
    draw(axis, rounds, [float(record.round) for record in rounds])
    shown = axis.get_legend()
    assert shown is not None
    return [text.get_text() for text in shown.get_texts()]


def test_legend_lists_unknown_reasons_last() -> None:
    reasons = ["warm-up", "budget", "costs $1, or $2", "start", "_own", "warm-up"]
    rounds = [
        record(number, reason=reason, tau=number)
        for number, reason in enumerate(reasons, 1)
    ]
    shown = [label.strip() for label in legend(chosen_tau, rounds)]
    assert shown == ["start", "budget", "warm-up", r"costs \$1, or \$2", "_own"]
    assert (
        list(chunks(plot_run(rounds, {"time": 20.0}, title="own reasons")))[-1][0]
        == b"IEND"
    )


def test_legend_of_losses() -> None:
    """The loss of the best parameters can rise: each round has its own mini-batch."""
    rounds = [record(1, best_loss=0.2), record(2, best_loss=0.3)]
    assert legend(losses, rounds) == [
        "training, latest parameters",
        "training, best so far",
    ]
    validated = [rounds[0], record(2, validation=0.4, validation_best=0.35)]
    assert legend(losses, validated)[2:] == ["validation", "validation, lowest so far"]
