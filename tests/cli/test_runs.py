"""`fedbudget runs`: listing and removing runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedbudget.cli import console as cli_console
from support.commands import run_command
from support.synthetic_runs import make_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_of_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "runs" / "first", summary={"loss": 0.25, "stopped_by": "target"})
    make_run(here / "runs" / "second", 3, finished=False)
    (make_run(here / "elsewhere" / "third") / "config.toml").write_text("colour = 'blue'")
    code, out, _ = run_command(capsys, "runs", "runs", "elsewhere/third")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert "finished" in rows["runs/first"]
    assert "0.2500" in rows["runs/first"]
    assert " target " in rows["runs/first"]
    assert "2s (10%), 100kB (5%)" in rows["runs/first"]
    assert "broken off" in rows["runs/second"]
    assert "unknown key 'colour'" in rows["elsewhere/third"]
    result = json.loads(run_command(capsys, "runs", "--json")[1])["runs"]
    assert {each["run"]: each["state"] for each in result} == {
        "runs/first": "finished",
        "runs/second": "broken off",
    }


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (60, ["run", "state", "loss"]),
        (80, ["run", "state", "loss", "accuracy"]),
        (400, ["run", "state", "what", "loss", "accuracy", "spent", "stopped by", "began"]),
    ],
)
def test_narrow_terminal_shows_fewer_columns(
    width: int,
    headings: list[str],
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No name of a run is broken over two lines."""
    name = "20261119-045651-softmax-decimal"
    make_run(here / "runs" / name, summary={"loss": 0.25, "accuracy": 0.5})
    monkeypatch.setattr(cli_console, "_UNLIMITED", width)
    _, out, _ = run_command(capsys, "runs")
    header, row = (re.split(r"\s{2,}", line.strip()) for line in out.splitlines())
    assert header == headings
    assert row[0] == f"runs/{name}"


def test_no_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "runs") == (0, "no runs in runs\n", "")
    assert run_command(capsys, "runs", "list", "--json")[1] == '{"runs": []}\n'
    assert run_command(capsys, "runs", "nothing")[0] == 2


class TestRemove:
    def test_names_and_paths(self, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("one", "two", "three"):
            make_run(here / "runs" / name, 1)
        code, out, _ = run_command(capsys, "runs", "remove", "one", "runs/two", "--yes")
        assert (code, out) == (0, "removed runs/one\nremoved runs/two\n")
        assert [path.name for path in (here / "runs").iterdir()] == ["three"]

    def test_asks_for_confirmation(
        self,
        here: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        run = make_run(here / "runs" / "one", 1)
        code, _, err = run_command(capsys, "runs", "remove", "one")
        assert (code, "--yes" in err, run.exists()) == (2, True, True)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        for answer, exists in (("", True), ("n", True), ("y", False)):
            monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
            run_command(capsys, "runs", "remove", "one")
            assert run.exists() == exists

    def test_all_or_none(self, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = make_run(here / "runs" / "one", 1)
        (here / "runs" / "mine").mkdir()
        code, _, err = run_command(capsys, "runs", "remove", "one", "mine", "--yes")
        assert (code, "is not the folder of a run" in err) == (2, True)
        assert run.exists()


def test_list_imports_nothing_heavy(here: Path) -> None:
    """The list imports no package that computes, draws or serves."""
    make_run(here / "runs" / "one", 1)
    packages = "numba scipy matplotlib torch ray grpc flwr fedbudget.api fedbudget.models"
    heavy = set(packages.split())
    code = (
        f"import atexit, sys; atexit.register(lambda: print({heavy} & set(sys.modules)))\n"
        "sys.argv = ['fedbudget', 'runs']; from fedbudget.cli.main import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=here
    )
    assert result.stdout.splitlines()[-1] == "set()"
