"""The picture of a run: a PNG for every kind of run, and another one when something else
happened.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedbudget
from fedbudget import data
from fedbudget.arrays import Float32
from fedbudget.runs.plot import chosen_tau, losses, plot_run
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.types import Tau
from support.made_runs import record

DIGITS = data.load("digits")
BUDGETS = {
    "one resource": ["time=3s"],
    "five resources": ["time=3s", "energy=1kJ", "bytes=1MB", "cpu=10s", "money=1"],
}


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The chunks of a PNG; each must have the checksum that it says."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        body = png[at + 4 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length]) == (
            zlib.crc32(body),
        )
        yield body[:4], body[4:]
        at += 12 + length


def picture(result: fedbudget.Result) -> bytes:
    return plot_run(result.rounds, result.budget, title="a run")


@pytest.mark.parametrize("resources", BUDGETS)
@pytest.mark.parametrize("tau", ["adaptive", 7])
@pytest.mark.parametrize("rounds", [1, None])
def test_every_kind_of_run_has_a_whole_picture(
    resources: str, tau: Tau, rounds: int | None
) -> None:
    result = fedbudget.train(
        dataset=DIGITS, budget=BUDGETS[resources], tau=tau, rounds=rounds
    )
    drawn = picture(result)
    found = list(chunks(drawn))
    assert found[0][0] == b"IHDR"
    assert found[-1] == (b"IEND", b"")
    width, height = struct.unpack(">II", found[0][1][:8])
    pixels = matplotlib.image.imread(io.BytesIO(drawn))
    assert pixels.shape[:2] == (height, width)
    assert min(width, height) > 500
    for part in np.array_split(pixels, 3):  # three rows of plots, none of them blank
        assert part.std() > 0.01


def test_a_model_without_accuracy_and_losses_that_are_no_numbers_are_drawn_too() -> None:
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


def test_real_targets_have_their_error_drawn() -> None:
    rounds = [record(number, accuracy=None) for number in range(1, 9)]
    evaluated = [replace(each, metrics={"rmse": 9.0 / each.round}) for each in rounds]
    budget = {"time": 20.0, "bytes": 1e6}
    without, drawn = (plot_run(each, budget, title="error") for each in (rounds, evaluated))
    assert without != drawn


def test_the_picture_follows_the_records() -> None:
    result = fedbudget.train(dataset=DIGITS, budget="time=3s")
    changed = replace(
        result,
        rounds=[*result.rounds[:-2], replace(result.rounds[-2], tau=1), result.rounds[-1]],
    )
    one, same, other = (
        matplotlib.image.imread(io.BytesIO(picture(each)))
        for each in (result, result, changed)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def legend(
    draw: Callable[[Axes, Sequence[RoundRecord], Sequence[float]], None],
    rounds: Sequence[RoundRecord],
) -> list[str]:
    """What the legend of a panel names."""
    axis = Figure().subplots()
    draw(axis, rounds, [float(record.round) for record in rounds])
    found = axis.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_unknown_reasons_are_drawn_after_known_ones() -> None:
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


def test_the_loss_of_the_best_parameters_is_not_called_the_best_loss() -> None:
    """On a round's own mini-batch it can rise, and a best loss cannot."""
    rounds = [record(1, best_loss=0.2), record(2, best_loss=0.3)]
    assert legend(losses, rounds) == [
        "of the latest parameters",
        "of the best parameters so far",
    ]
