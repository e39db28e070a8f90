"""`fedbudget forecast`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.cli.forecast import extension_text
from fedbudget.forecasts.forecast import Interval, forecast
from support.commands import run_command
from support.synthetic_runs import make_run


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    exit_code, out, err = run_command(capsys, "forecast", *arguments)
    assert exit_code == code
    return err if code else out


def test_tables_and_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every resource has a column. A target out of reach has a reason instead of a cost."""
    path = str(make_run(tmp_path / "run", 100, finished=False))
    out = printed(
        capsys,
        path,
        "--budget",
        "time=+10s",
        "--until",
        "loss=0.205",
        "--until",
        "loss=0.1",
    )
    headings, row = (line.split() for line in out.splitlines()[1:3])
    assert headings == ["time", "bytes", "loss", "accuracy"]
    assert row[:2] == ["30s", "1.5MB"]
    assert "loss 0.205: time 16" in out
    assert "loss 0.1: cost unknown: at 25 times the present spending" in out


def test_validation_loss_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(
        tmp_path / "run",
        100,
        finished=False,
        every=lambda own: replace(own, validation_best=0.3 + own.best_loss),
    )
    lines = printed(
        capsys, str(path), "--budget", "time=+10s", "--until", "loss=0.505"
    ).splitlines()
    assert "; validation loss 0.5080, " in lines[0]
    assert lines[1].split() == ["time", "bytes", "validation", "loss", "accuracy"]
    assert lines[3].startswith("validation loss 0.505: time 16")


def test_no_improvement_is_stated() -> None:
    assert extension_text(Interval(0.5, 0.49, 0.5), 0.50001) == (
        "no improvement expected, 0.5000 (0.4900 to 0.5000)"
    )
    assert extension_text(Interval(0.49, 0.48, 0.5), 0.5) == "0.4900 (0.4800 to 0.5000)"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", 100, finished=False)
    assert json.loads(printed(capsys, str(path), "--json")) == forecast(path).to_json()


def test_too_few_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_run(tmp_path / "run", 3, finished=False))
    out = printed(capsys, path, "--until", "accuracy=0.9")
    assert "accuracy 0.9: cost unknown: 3 rounds are complete; 8 are needed" in out
    assert "loss unknown: 3 rounds are complete" in printed(capsys, path)


def test_unknown_resource(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_run(tmp_path / "run", 20))
    assert "keeps its resources, time, bytes" in printed(
        capsys, path, "--budget", "energy=+5J", code=2
    )
