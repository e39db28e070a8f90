"""`fedbudget sweep`: interrupted and resumed, with failing runs, with and without a
terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow import parquet

from fedbudget.experiments.sweep import Sweep, run
from support.commands import run_command

FEDBUDGET = Path(sys.executable).with_name("fedbudget")
PATIENCE = 120.0  # seconds; the machine may have to compile first
GRID = """
nodes = 4
budget = 'time=12s'
[grid]
case = [1, 2]
tau = ['adaptive', 1, 10]
seeds = 5
"""


def fedbudget(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    return run_command(capsys, *command.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Existing cells with inode and modification time, which change on every write."""
    cells = [(path.name, path.stat()) for path in (folder / "cells").glob("*.json")]
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in cells}


@contextmanager
def started(*options: str, until: Path, cells: int) -> Iterator[subprocess.Popen[str]]:
    """Start a sweep in a new session, as a terminal does, and wait for some cells."""
    process = subprocess.Popen(
        [str(FEDBUDGET), "sweep", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    began = time.monotonic()
    try:
        while len(cells_in(until)) < cells:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.005)
        yield process
    finally:
        process.kill()
        process.communicate()


def alive_in_session(number: int) -> list[str]:
    """Pids of the running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == number and state not in "ZX":
            found.append(path.parent.name)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The results of the grid without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "grid.toml").write_text(GRID)
    run(Sweep.read(folder / "grid.toml"), folder, jobs=1)
    return (folder / "results.parquet").read_bytes()


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_interrupted_sweep_resumes_to_same_bytes(
    folder: Path, whole: bytes, jobs: str
) -> None:
    """No finished run is repeated."""
    (folder / "grid.toml").write_text(GRID)
    options = ["grid.toml", "--jobs", jobs]
    with started(*options, until=folder / "sweeps" / "grid", cells=3) as process:
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole process group
        began = time.monotonic()
        out, err = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - began < 10
    before = cells_in(folder / "sweeps" / "grid")
    assert 3 <= len(before) < 30
    last = (
        f"fedbudget: interrupted; {len(before)} of 30 runs are done; "
        "run the same command to continue"
    )
    assert (process.returncode, out, err.splitlines()[-1]) == (130, "", last)
    assert all(
        re.fullmatch(r"\d+ of 30 runs done, 0 failed", line)
        for line in err.splitlines()[:-1]
    )
    if sys.platform == "linux":
        time.sleep(0.5)  # the system reaps ended processes
        assert alive_in_session(process.pid) == []
    assert not (folder / "sweeps" / "grid" / "results.parquet").exists()

    subprocess.run(
        [FEDBUDGET, "sweep", *options], check=True, capture_output=True, timeout=PATIENCE
    )
    after = cells_in(folder / "sweeps" / "grid")
    assert len(after) == 30
    assert before.items() <= after.items()
    assert (folder / "sweeps" / "grid" / "results.parquet").read_bytes() == whole


def test_failed_run_is_repeated_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures are recorded; once their cause is gone, only the failed runs repeat."""
    (folder / "s.toml").write_text(
        "budget = 'time=1s'\nbatch-size = 10\nnodes = 3\n"
        "[grid]\ndataset = ['digits', 'own.csv']\nseeds = 2\n"
    )
    code, out, err = fedbudget("sweep s.toml --jobs 1", capsys)
    assert code == 1
    assert re.fullmatch(
        r"fedbudget: 2 of 4 runs failed; the first: own\.csv does not exist",
        err.splitlines()[-1],
    )
    assert out.splitlines()[-1] == "results: sweeps/s/results.parquet, 4 rows"
    errors = parquet.read_table("sweeps/s/results.parquet")["error"].to_pylist()
    assert errors == [None, None, "own.csv does not exist", "own.csv does not exist"]
    before = cells_in(folder / "sweeps" / "s")
    assert len(before) == 2

    (folder / "own.csv").write_text("a,b,y\n" + "1,2,0\n3,5,1\n" * 40)
    assert fedbudget("sweep s.toml --jobs 1", capsys)[0] == 0
    after = cells_in(folder / "sweeps" / "s")
    assert len(after) == 4
    assert before.items() <= after.items()
    assert parquet.read_table("sweeps/s/results.parquet")["error"].null_count == 4


def test_failing_cell_does_not_stop_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "s.toml").write_text(
        "budget = 'time=1s'\nbatch-size = 200\n[grid]\nnodes = [10, 3]\nseeds = 2\n"
    )
    code, out, err = fedbudget("sweep s.toml --jobs 2 --json", capsys)
    assert code == 1
    printed = json.loads(out)
    assert (printed["runs"], printed["failed"]) == (4, 2)
    assert [(row["nodes"], row["runs"]) for row in printed["means"]] == [(10, 0), (3, 2)]
    assert re.fullmatch(
        r"fedbudget: 2 of 4 runs failed; the first: batch-size 200 is larger .*\n", err
    )


class TestOutput:
    def test_json_contains_means_over_seeds(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "s.toml").write_text(
            "budget = 'time=1s'\n[grid]\ncase = [1, 2]\ntau = [1, 10]\nseeds = 3\n"
        )
        code, out, err = fedbudget("sweep s.toml --jobs 1 --out here --json", capsys)
        assert (code, out.count("\n"), err) == (0, 1, "")
        printed = json.loads(out)
        assert (printed["results"], printed["runs"], printed["failed"]) == (
            "here/results.parquet",
            12,
            0,
        )
        losses = parquet.read_table("here/results.parquet")["loss"].to_pylist()
        assert [(row["case"], row["tau"], row["runs"]) for row in printed["means"]] == [
            (1, 1, 3),
            (1, 10, 3),
            (2, 1, 3),
            (2, 10, 3),
        ]
        for index, row in enumerate(printed["means"]):
            assert row["loss"] == pytest.approx(sum(losses[3 * index : 3 * index + 3]) / 3)

    def test_log_and_table_are_short(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A log has a line for each tenth of the runs, a table 40 rows."""
        steps = [round(0.001 * step, 3) for step in range(1, 51)]
        (folder / "s.toml").write_text(
            f"budget = 'time=0.5s'\ntau = 1\n[grid]\nstep-size = {steps}\n"
        )
        code, out, err = fedbudget("sweep s.toml --jobs 1", capsys)
        assert code == 0
        assert [line.split()[0] for line in err.splitlines()] == [
            str(count) for count in range(0, 51, 5)
        ]
        lines = out.splitlines()
        assert lines[1].split() == ["step_size", "runs", "loss", "accuracy"]
        assert [line.split()[0] for line in lines[2:42]] == [
            str(step) for step in steps[:40]
        ]
        assert lines[42:] == ["and 10 more", "results: sweeps/s/results.parquet, 50 rows"]

    def test_sweep_of_rounds_counts_rows(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "s.toml").write_text(
            "each = 'round'\nrounds = 4\ntau = 1\n[grid]\nseeds = 2\n"
        )
        out = fedbudget("sweep s.toml --jobs 1", capsys)[1]
        found = parquet.read_table("sweeps/s/results.parquet")
        assert out == f"results: sweeps/s/results.parquet, {found.num_rows} rows\n"
        assert found["seed"].to_pylist() == [0] * (found.num_rows // 2) + [1] * (
            found.num_rows // 2
        )

    def test_terminal_shows_a_progress_bar(self, folder: Path) -> None:
        (folder / "s.toml").write_text("budget = 'time=1s'\n[grid]\nseeds = 4\n")
        control, terminal = pty.openpty()
        done = subprocess.run(
            [FEDBUDGET, "sweep", "s.toml", "--jobs", "1"],
            stdout=subprocess.PIPE,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
            timeout=PATIENCE,
            check=True,
        )
        os.close(terminal)
        shown = b""
        while chunk := _read(control):
            shown += chunk
        assert b"4/4" in shown
        assert b"0 failed" in shown
        assert done.stdout.endswith(b"results: sweeps/s/results.parquet, 4 rows\n")


def _read(control: int) -> bytes:
    try:
        return os.read(control, 65536)
    except OSError:  # the other end is closed (Linux)
        return b""


def test_wrong_file_fails_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "s.toml").write_text("[grid]\ntaus = [1]\n")
    code, out, err = fedbudget("sweep s.toml", capsys)
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"fedbudget: s\.toml, \[grid\]: unknown key 'taus'; did you mean tau\?\n", err
    )
    assert [path.name for path in folder.iterdir()] == ["s.toml"]


@pytest.mark.parametrize("command", [["sweep", "s.toml"], ["reproduce", "all"]])
def test_missing_pyarrow_message(command: list[str], folder: Path) -> None:
    (folder / "s.toml").write_text("[grid]\nseeds = 2\n")
    code = "import sys; sys.modules['pyarrow'] = None; "
    code += f"from fedbudget.cli.main import main; main({command})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    complaint = "a sweep needs pyarrow; install it with: pip install 'fedbudget[sweep]'"
    assert done.stderr == f"fedbudget: {complaint}\n"
