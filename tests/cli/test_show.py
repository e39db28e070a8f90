"""`fedbudget show`: what is printed of a run, whole where nobody's terminal is the limit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.cli.runs import show
from support.made_runs import SETTINGS, make_run, record


def test_nothing_is_cut_when_piped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # as a shell may leave it behind
    rounds = [
        record(number, loss=0.123456 + number, reason="a long reason of my own")
        for number in range(1, 9)
    ]
    show(run=make_run(tmp_path / "run", rounds))
    out = capsys.readouterr().out
    assert "…" not in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    for own in rounds:
        found = lines[str(own.round)]
        assert " ".join(found[3:9]) == "a long reason of my own"
        assert found[9:11] == [f"{own.loss:.4f}", f"{own.best_loss:.4f}"]


def test_figures_agree_with_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier version's summary had another average τ, that did not agree with the
    numbers beside it.
    """
    show(run=make_run(tmp_path / "run", summary={"average_tau": 4.913}))
    out = capsys.readouterr().out
    assert "average tau: 4.6\naggregations: 20\nlocal updates: 92\n" in out
    assert out.startswith("svm on digits, 4 nodes, case:2, adaptive τ, frugal\n")


def test_the_loss_of_the_best_parameters_has_its_own_heading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(
        run=make_run(
            tmp_path / "run", [record(1, best_loss=0.25), record(2, best_loss=0.5)]
        )
    )
    out = capsys.readouterr().out
    heading = next(line for line in out.splitlines() if line.startswith("round"))
    assert heading.split()[3:9] == ["chosen", "by", "loss", "loss", "wᶠ", "accuracy"]
    assert (
        "loss wᶠ: best parameters so far; both on the round's samples, so both can rise"
        in out
    )


def test_a_private_run_has_epsilon_and_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(SETTINGS, method="accelerated", budget=("time=20s", "privacy=4"))
    rounds = [
        record(1, loss=math.nan, best_loss=math.nan, spent={"time": 1.0, "privacy": 3.25})
    ]
    summary = {"loss": None, "privacy_delta": 1e-6}
    show(run=make_run(tmp_path / "run", rounds, settings=settings, summary=summary))
    out = capsys.readouterr().out
    assert "loss" not in out
    assert "3.25    81%" in out
    assert "\nprivacy: ε = 3.25 of 4, at δ = 1e-06\n" in out
