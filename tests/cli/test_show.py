"""`fedbudget show`."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedbudget.cli.runs import show
from fedbudget.resources.privacy import replacement_epsilon
from support.synthetic_runs import SETTINGS, make_run, record


def test_piped_table_is_not_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # a shell may export it
    rounds = [
        record(number, loss=0.123456 + number, reason="a long reason of my own")
        for number in range(1, 9)
    ]
    show(run=make_run(tmp_path / "run", rounds), verbose=True)
    out = capsys.readouterr().out
    assert "…" not in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    for each in rounds:
        cells = lines[str(each.round)]
        assert " ".join(cells[3:9]) == "a long reason of my own"
        assert cells[9:11] == [f"{each.loss:.4f}", f"{each.best_loss:.4f}"]


def test_average_tau_agrees_with_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed average τ is computed from the rounds, not read from the summary."""
    show(run=make_run(tmp_path / "run", summary={"average_tau": 4.913}))
    out = capsys.readouterr().out
    assert "average tau: 4.6\naggregations: 20\nlocal updates: 92\n" in out
    assert out.startswith("svm on digits, 4 nodes, case:2, adaptive τ, frugal\n")


def test_warnings_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = "the model is worse than untrained for north"
    show(run=make_run(tmp_path / "run", summary={"warnings": [warning]}))
    title, first, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("svm on digits")
    assert first == f"warning: {warning}"


def test_end_by_validation_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {
        "stopped_by": "validation",
        "improved_round": 14,
        "validation_loss": 0.25,
        "spent": {"time": 6.2},
    }
    settings = replace(SETTINGS, budget=("time=20s",))
    show(run=make_run(tmp_path / "run", settings=settings, summary=summary))
    lines = capsys.readouterr().out.splitlines()
    assert "validation loss: 0.25" in lines
    assert (
        "stopped after 31 % of the budget: the validation loss has not improved "
        "significantly since round 14"
    ) in lines


def test_heading_of_best_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [record(1, best_loss=0.25), record(2, best_loss=0.5)])
    show(run=run, verbose=True)
    out = capsys.readouterr().out
    heading = next(line for line in out.splitlines() if line.startswith("round"))
    assert heading.split()[3:9] == ["chosen", "by", "loss", "loss", "wᶠ", "accuracy"]
    assert (
        "loss wᶠ: best parameters so far; both on the round's samples, so both can rise"
        in out
    )


@pytest.mark.parametrize("noise", ["secret", "seeded"])
def test_private_run_shows_epsilon(
    noise: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(
        SETTINGS,
        method="accelerated",
        budget=("time=20s", "privacy=4"),
        privacy_noise=noise,
    )
    costs = {"time": 0.1, "privacy": 0.0}
    spent = {"time": 1.0, "privacy": 3.25}
    nothing = {"loss": math.nan, "best_loss": math.nan}
    rounds = [record(1, **nothing, c=costs, b=costs, spent=spent)]
    summary = {"loss": None, "privacy_delta": 1e-6}
    show(run=make_run(tmp_path / "run", rounds, settings=settings, summary=summary))
    out = capsys.readouterr().out
    assert "loss" not in out
    assert "3.25    81%" in out
    other = replacement_epsilon(3.25, 1e-6)
    simulated = ""
    if noise == "seeded":
        simulated = " (simulated: the noise follows from the seed)"
    line = f"ε = 3.25 of 4{simulated}, at δ = 1e-06; ε = {other:.4g} if a node"
    assert f"\nprivacy: {line}" in out
    assert ("(simulated ε)" in out) == bool(simulated)
