"""`fedbudget run` is killed or stopped at any moment and resumes to the same bits."""

import signal
import sys
from pathlib import Path

import pytest

from fedbudget import train
from fedbudget.result import Result
from fedbudget.runs.folder import Run
from support.processes import cli_options, commands, records, summary, without_wall

# Arguments: a phase, a round and the command. The process kills itself in that phase. It
# writes checkpoints as often as possible.
KILLED = """
import math, os, signal, sys
from fedbudget import durable_files
from fedbudget.cli.main import main
from fedbudget.engines.engine import Engine
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.runs import checkpoint
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import CHECKPOINT
from fedbudget.runs.folder import CONFIG, MODEL, RunWriter, _line

phase, when = sys.argv[1], int(sys.argv[2])
Engine.checkpoint_interval, checkpoint.SHARE = 1e-9, math.inf
receive, append, replace = Aggregator.receive, RunWriter.append, durable_files.replace
now = 0  # the latest received round

def die(where, *, unless=False):
    if where == phase and now >= when and not unless:
        os.kill(os.getpid(), signal.SIGKILL)

def killed_receive(self, report, costs, **how):
    global now
    now = self.state.round
    die("report there")
    answer = receive(self, report, costs, **how)
    die("aggregated")
    die("final loss known", unless=self.state.phase != "done")
    return answer

def killed_append(self, record):
    if phase == "half of the record written" and record.round == when:
        self._rounds.write(_line(record)[:40])
        die(phase)
    append(self, record)
    die("record written")

def killed_replace(path, content):
    half = phase == "half of the checkpoint written"
    if half and path.name == CHECKPOINT and now >= when:
        whole = b"".join(content)
        path.with_name(f".{path.name}.new").write_bytes(whole[:len(whole) // 2])
        die(phase)
    replace(path, content)
    phases = {
        CHECKPOINT: "checkpoint saved",
        MODEL: "model saved, no summary",
        CONFIG: "config written",
    }
    die(phases.get(path.name))

Aggregator.receive = killed_receive
RunWriter.append = killed_append
durable_files.replace = killed_replace
main(sys.argv[3:])
"""
OPTIONS = cli_options(
    model="svm", case=2, budget="time=4s", tau_max=8, participation=0.7, test_samples=50
)
PHASES = [
    ("checkpoint saved", 0),
    ("report there", 1),
    ("record written", 2),
    ("half of the checkpoint written", 4),
    ("aggregated", 6),
    ("half of the record written", 9),
    ("checkpoint saved", 11),
    ("report there", 14),
    ("final loss known", 0),
    ("model saved, no summary", 0),
]


def undisturbed() -> Result:
    options = {"participation": 0.7, "test_samples": 50, "tau_max": 8}
    return train(model="svm", dataset="digits", case=2, budget="time=4s", **options)  # type: ignore[arg-type]


def assert_same(run: Path, whole: Result) -> None:
    found = Run.open(run)
    assert without_wall(found.rounds) == without_wall(whole.rounds)
    assert found.model().w.tobytes() == whole.w.tobytes()
    assert summary(run)["spent"] == dict(whole.spent)
    assert summary(run)["status"] == "finished"


@pytest.mark.parametrize(
    "phases",
    [PHASES[5:6], pytest.param(PHASES, marks=pytest.mark.slow)],
    ids=["once", "ten times"],
)
def test_killed_in_successive_phases(tmp_path: Path, phases: list[tuple[str, int]]) -> None:
    with commands(tmp_path) as start:
        options = ["--out", "run", *OPTIONS]
        for phase, when in phases:
            killed = start.run(
                "run", *options, program=[sys.executable, "-c", KILLED, phase, str(when)]
            )
            assert killed.end() == -signal.SIGKILL, (phase, killed.errors)
            options = ["--resume", "run"]
        assert start.run("run", "--resume", "run").end() == 0
    assert_same(tmp_path / "run", undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "when"), PHASES)
def test_killed_once(tmp_path: Path, phase: str, when: int) -> None:
    with commands(tmp_path) as start:
        program = [sys.executable, "-c", KILLED, phase, str(when)]
        assert (
            start.run("run", "--out", "run", *OPTIONS, program=program).end()
            == -signal.SIGKILL
        )
        assert start.run("run", "--resume", "run").end() == 0
    assert_same(tmp_path / "run", undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", ["config written", "report there", "model saved, no summary"]
)
def test_killed_with_more_budget(tmp_path: Path, phase: str) -> None:
    """Earlier results stay, and the larger budget is not lost."""
    run = tmp_path / "run"
    options = ["--case", "2", "--tau-max", "8", "--test-samples", "50"]
    with commands(tmp_path) as start:
        for folder in ("run", "other"):
            assert (
                start.run("run", "--out", folder, *options, "--budget", "time=2s").end()
                == 0
            )
        before = (run / "model.safetensors").read_bytes()
        more = ["run", "--resume", "run", "--budget", "time=+2s"]
        program = [sys.executable, "-c", KILLED, phase, "0"]
        assert start.run(*more, program=program).end() == -signal.SIGKILL
        assert summary(run)["status"] == "running"
        assert ((run / "model.safetensors").read_bytes() == before) == (
            phase != "model saved, no summary"
        )
        assert start.run("run", "--resume", "run").end() == 0
        assert start.run("run", "--resume", "other", "--budget", "time=+2s").end() == 0
    assert without_wall(records(run)) == without_wall(records(tmp_path / "other"))
    assert (
        Run.open(run).model().w.tobytes()
        == Run.open(tmp_path / "other").model().w.tobytes()
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_signal(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    options = ["--case", "2", "--budget", "time=4000s", "--rounds", "20000", "--tau", "1"]
    with commands(tmp_path) as start:
        stopped = start.run("run", "--out", "run", *options)
        stopped.wait_until(lambda: len(records(run)) >= 50)
        assert stopped.end(number) == 130
        assert summary(run)["status"] == "interrupted"
        made = len(records(run))
        assert start.run("run", "--resume", "run", "--rounds", str(made + 40)).end() == 0
        assert (
            start.run(
                "run",
                "--out",
                "whole",
                *options[:-4],
                "--rounds",
                str(made + 40),
                "--tau",
                "1",
            ).end()
            == 0
        )
    assert without_wall(records(run)) == without_wall(records(tmp_path / "whole"))
    assert (
        Run.open(run).model().w.tobytes()
        == Run.open(tmp_path / "whole").model().w.tobytes()
    )
