"""The result of a run in Python: texts, pictures, DataFrames, and the line of progress."""

import io
import math
import re
import sys

import numpy as np
import pytest

import fedbudget
from fedbudget.launch.progress import ProgressLine


@pytest.fixture(scope="module")
def result() -> fedbudget.Result:
    return fedbudget.train(dataset="digits", budget="time=1s", costs="simulated")


def test_texts_fit_a_line(result: fedbudget.Result) -> None:
    text = repr(result)
    assert text.startswith(f"<Result: softmax on digits, loss {result.loss:.4f}, ")
    for each in (text, repr(result.rounds[-1])):
        assert "\n" not in each
        assert len(each) < 220


def test_html_has_figures_and_plot(result: fedbudget.Result) -> None:
    html = result._repr_html_()
    assert f"accuracy {result.accuracy:.4f}" in html
    assert len(re.findall('<img alt="plot of the run"', html)) == 1
    assert "<" not in html.split("<br>")[1]
    assert len(html) < 1_000_000


def test_plot_has_the_losses(result: fedbudget.Result) -> None:
    losses = [record.loss for record in result.rounds]
    lines = [line for axis in result.plot().axes for line in axis.get_lines()]
    assert any(np.array_equal(line.get_ydata(), losses) for line in lines)


def test_rounds_as_frame(result: fedbudget.Result) -> None:
    frame = result.to_pandas()
    assert len(frame) == len(result.rounds)
    assert frame["tau"].tolist() == [record.tau for record in result.rounds]
    spent = [record.spent["time"] for record in result.rounds]
    assert frame["spent.time"].tolist() == spent
    assert not any(isinstance(each, dict) for column in frame for each in frame[column])


class TestProgress:
    def test_one_line_in_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other outputs get nothing, unless it is asked for."""
        written = io.StringIO()
        monkeypatch.setattr(sys, "stderr", written)
        given = {"dataset": "digits", "budget": "time=1s", "costs": "simulated"}
        fedbudget.train(**given)  # type: ignore[arg-type]
        assert written.getvalue() == ""
        result = fedbudget.train(**given, progress=True)  # type: ignore[arg-type]
        text = written.getvalue()
        assert text.count("\n") == 1
        last = text.rstrip().rpartition("\r")[2]
        assert f"of the budget, round {len(result.rounds)}, " in last

    def test_narrow_ascii_terminal(
        self, monkeypatch: pytest.MonkeyPatch, result: fedbudget.Result
    ) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii"))
        monkeypatch.setenv("COLUMNS", "40")
        line = ProgressLine.__new__(ProgressLine)
        line.__dict__ |= {
            "_title": "softmax, adaptive τ",
            "_budget": {"time": 1.0},
            "_display": None,
            "_began": 0.0,
            "_shown": -math.inf,
            "_width": 0,
        }
        line(result.rounds[0])
        line.end()
        assert max(map(len, raw.getvalue().split(b"\r"))) <= 40
