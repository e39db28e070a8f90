"""MLflow holds the data of the run folder, read back with MLflow's client."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedbudget
from fedbudget.runs.folder import Run
from fedbudget.trackers.mlflow import Mlflow
from fedbudget.trackers.tracker import RunInfo, parameters

VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")
ROUNDS = 500


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run of 500 rounds, tracked in the default store of MLflow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        home = tmp_path_factory.mktemp("home")
        monkeypatch.chdir(home)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        fedbudget.train(
            model="svm",
            dataset="digits",
            case=2,
            budget=["time=1000s", "bytes=1GB"],
            rounds=ROUNDS,
            spend_all=True,
            out="runs/one",
            track=["mlflow"],
        )
        yield home


@pytest.fixture
def client(home: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{home / 'mlflow.db'}")


@pytest.fixture
def tracked(client: Any) -> Any:
    experiment = client.get_experiment_by_name("fedbudget").experiment_id
    (run,) = client.search_runs([experiment])
    return run


def test_rounds_are_steps(home: Path, client: Any, tracked: Any) -> None:
    lines = [
        json.loads(line)
        for line in (home / "runs/one/rounds.jsonl").read_text().splitlines()
    ]
    assert len(lines) == ROUNDS + 1
    for metric in ("loss", "best_loss", "accuracy", "rho", "beta", "delta", "nodes"):
        history = client.get_metric_history(tracked.info.run_id, metric)
        expected = [
            (line["round"], line[metric]) for line in lines if line[metric] is not None
        ]
        assert [(point.step, point.value) for point in history] == expected, metric
    for metric in ("tau", "eta"):
        history = client.get_metric_history(tracked.info.run_id, metric)
        assert [(point.step, point.value) for point in history] == [
            (each["round"], each[metric]) for each in lines[:-1]
        ]
    for kind in ("spent", "c", "b"):
        for resource in ("time", "bytes"):
            history = client.get_metric_history(tracked.info.run_id, f"{kind}/{resource}")
            assert [(point.step, point.value) for point in history] == [
                (line["round"], line[kind][resource]) for line in lines
            ]


def test_steps_have_the_rounds_time(home: Path, client: Any, tracked: Any) -> None:
    history = client.get_metric_history(tracked.info.run_id, "loss")
    times = [point.timestamp for point in history]
    assert times == sorted(times)
    assert tracked.info.start_time <= times[0] <= times[-1] <= tracked.info.end_time


def test_name_settings_and_summary(home: Path, tracked: Any) -> None:
    run = Run.open(home / "runs/one")
    assert run.summary is not None
    assert (tracked.info.run_name, tracked.info.status) == ("one", "FINISHED")
    info = RunInfo(home / "runs/one", "", run.settings, 0.0)
    assert tracked.data.params == {
        name: str(value) for name, value in parameters(info.settings).items()
    }
    assert tracked.data.params["partition"] == "case:2"
    assert tracked.data.tags["mlflow.note.content"].startswith(
        "svm on digits, 5 nodes, case:2, adaptive τ"
    )
    assert (
        tracked.data.tags["fedbudget.stopped_by"] == run.summary["stopped_by"] == "rounds"
    )
    assert tracked.data.tags["fedbudget.source.bytes"] == "declared"
    assert tracked.data.metrics["final/loss"] == run.summary["loss"]
    assert tracked.data.metrics["final/spent/bytes"] == run.summary["spent"]["bytes"]


def test_artifacts_equal_the_files(
    home: Path, client: Any, tracked: Any, tmp_path: Path
) -> None:
    names = {file.path for file in client.list_artifacts(tracked.info.run_id)}
    assert names == {"model.safetensors", "plot.png", "config.toml", "summary.json"}
    for name in names:
        downloaded = client.download_artifacts(tracked.info.run_id, name, str(tmp_path))
        assert Path(downloaded).read_bytes() == (home / "runs/one" / name).read_bytes()


def test_environment_sets_the_store(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    for name in ("two", "three"):
        fedbudget.train(budget="time=1000s", rounds=3, out=tmp_path / name, track="mlflow")
    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("another").experiment_id])
    assert {run.info.run_name for run in runs} == {"two", "three"}
    assert not (tmp_path / "mlflow.db").exists()


def test_unwritable_store_keeps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}"
    )
    result = fedbudget.train(
        budget="time=1000s", rounds=3, out=tmp_path / "run", track="mlflow"
    )
    assert (result.aggregations, (tmp_path / "run/plot.png").exists()) == (3, True)
    (line,) = [
        line.getMessage() for line in caplog.records if line.name == "fedbudget.trackers"
    ]
    assert line.startswith("mlflow failed; the run continues without it: ")
    assert "\n" not in line


def test_mlflow_is_silent_and_offline(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "def report(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        "        print(event, arguments)\n"
        "sys.addaudithook(report)\n"
        "import fedbudget\n"
        "fedbudget.train(budget='time=1000s', rounds=3, out='run', track='mlflow')\n"
    )
    unset = {
        "CI",
        "PYTEST_CURRENT_TEST",
        "PYTEST_VERSION",
        "MLFLOW_DISABLE_TELEMETRY",
        "DO_NOT_TRACK",
        *VARIABLES,
    }
    # MLflow sends no telemetry if it detects a test.
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert (tmp_path / "mlflow.db").exists()


def test_status_of_unfinished_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    summary = Run.open(home / "runs/one").summary
    assert summary is not None
    endings = (None, "FAILED"), ({**summary, "status": "interrupted"}, "KILLED")
    for ended, status in endings:
        tracker = Mlflow()
        tracker.start(RunInfo(home / "runs/one", "", fedbudget.Settings(), 0.0))
        tracker.finish(ended)
        assert tracker._client.get_run(tracker._run).info.status == status
