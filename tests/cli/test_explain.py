"""`fedbudget explain`: the chart of G, and the reason for τ."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.budget.control import Estimates
from fedbudget.cli import console
from fedbudget.cli.runs import chart, explain
from fedbudget.runs.explain import Explanation
from support.synthetic_runs import make_run, record


def explanation(curve: list[float], tau: int = 1) -> Explanation:
    candidates = np.arange(1, len(curve) + 1)
    estimates = Estimates(1.0, 2.0, 3.0)
    chosen = record(2, tau=tau, reason="minimum of G", eta=0.01)
    return Explanation(chosen, candidates, np.array(curve), estimates)


def bars(curve: list[float]) -> dict[int, int]:
    """Length of each τ's bar; -1 for an infinite one."""
    lines = [line.split() for line in chart(explanation(curve))[1:]]
    return {int(tau): -1 if bar == "∞" else len(bar) for tau, _, bar, *_ in lines}


def test_bars_differ_on_steep_curves() -> None:
    """G of a real round. On a linear scale all bars but one had length 1."""
    measured = (
        "25.477 14.161 10.767 9.599 9.5411 10.247 11.625 13.7 16.697 20.9 26.523 34.6 "
        "45.705 61.9 85.7 121.69 1e3 1e6 1e9 8.5746e12"
    )
    lengths = bars([float(value) for value in measured.split()])
    assert (lengths[5], lengths[20]) == (1, 50)
    assert len(set(lengths.values())) >= len(lengths) - 3
    assert lengths[1] > lengths[2] > lengths[3] > lengths[5]
    assert lengths[5] < lengths[7] < lengths[12] < lengths[17]


@given(st.lists(st.floats(1e-3, 1e300), min_size=2, max_size=19))
def test_bars_are_monotonic_in_g(curve: list[float]) -> None:
    lengths = bars(curve)
    in_order = sorted(lengths, key=lambda tau: curve[tau - 1])
    sorted_lengths = [lengths[tau] for tau in in_order]
    assert sorted_lengths == sorted(sorted_lengths)
    assert sorted_lengths[0] == 1
    # The logarithms of two different values may round to the same number.
    assert sorted_lengths[-1] == (50 if math.log(max(curve)) > math.log(min(curve)) else 1)


def test_chart_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with the longest bar marked as chosen."""
    monkeypatch.setattr(console, "_UNLIMITED", 60)
    curve = [1.0 + tau for tau in range(20)]
    widths = [len(line) for line in chart(explanation(curve, tau=20))]
    assert 55 <= max(widths) <= 60


def test_infinite_and_flat_curves() -> None:
    assert bars([2.0, 1.0, math.inf]) == {1: 50, 2: 1, 3: -1}
    assert bars([3.0, 3.0]) == {1: 1, 2: 1}
    assert chart(explanation([math.inf, math.inf])) == ["G(τ) is not finite at any τ"]


def test_custom_reason_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(
        tmp_path / "run", [record(1), record(2), record(3, reason="warm-up", tau=4)]
    )
    explain(run=path, round=3)
    assert (
        "round 3: τ = 4, chosen by warm-up: the controller gave this reason itself."
        in capsys.readouterr().out
    )
