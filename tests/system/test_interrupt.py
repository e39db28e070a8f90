"""A run that is interrupted by Ctrl-C or a shutdown saves its results."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedbudget.runs.folder import Run
from support.processes import cli_options

FEDBUDGET = Path(sys.executable).with_name("fedbudget")
PATIENCE = 120.0  # seconds; the machine may have to compile first


@contextmanager
def long_run(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a long run and wait until some of its rounds are on disk."""
    settings = cli_options(
        model="svm",
        costs="measured",
        budget="time=600s",
        batch_size="full",
        out="run",
        validation=0,
    )
    process = subprocess.Popen(
        [str(FEDBUDGET), "run", *settings, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    began = time.monotonic()
    rounds = folder / "run" / "rounds.jsonl"
    try:
        while not rounds.exists() or rounds.read_bytes().count(b"\n") < 5:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def loss_on_digits(w: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    known = load_digits()
    x, y = known.data[:1437] / 16, np.where(known.target[:1437] % 2 == 0, 1, -1)
    return float(0.05 * w @ w + 0.5 * np.mean(np.maximum(0, 1 - y * (x @ w)) ** 2))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted_run_saves_its_results(tmp_path: Path, number: signal.Signals) -> None:
    with long_run(
        tmp_path, "--json", "--tau", "adaptive" if number == signal.SIGINT else "3"
    ) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "")
    printed = json.loads(out)
    run = Run.open(tmp_path / "run")
    assert run.summary is not None
    assert (run.summary["status"], run.summary["stopped_by"]) == (
        "interrupted",
        "interrupted",
    )
    assert printed.items() <= run.summary.items()
    assert [record.round for record in run.rounds] == list(range(1, len(run.rounds) + 1))
    assert (
        run.summary["local_updates"]
        == run.rounds[-1].t
        == sum(record.tau for record in run.rounds)
    )
    assert run.summary["spent"]["time"] == run.rounds[-1].spent["time"] < 600
    w = run.model().w.astype(np.float64)
    assert run.summary["loss"] == pytest.approx(loss_on_digits(w), rel=1e-5)
    assert run.summary["loss"] == pytest.approx(
        min(record.loss for record in run.rounds), rel=1e-5
    )
    assert (tmp_path / "run" / "plot.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    assert not list((tmp_path / "run").glob("*.new"))


def test_output_shows_the_interruption(tmp_path: Path) -> None:
    with long_run(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert out.splitlines()[1].endswith("; interrupted")
    assert "Traceback" not in err
