"""Metrics and parameters for trackers, and trackers by name."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from fedbudget.trackers import make_trackers
from fedbudget.trackers.tracker import RunInfo, final_metrics, parameters, round_metrics

RECORD = RoundRecord(
    round=7,
    t=30,
    tau=4,
    reason="minimum of G",
    eta=0.25,
    loss=0.5,
    best_loss=0.4,
    accuracy=0.9,
    rho=1.0,
    beta=2.0,
    delta=3.0,
    kept=(),
    c={"time": 0.1, "energy": 0.2},
    b={"time": 0.3, "energy": 0.4},
    spent={"time": 5.0, "energy": 6.0},
    nodes=8,
    left_out=(),
    wall=9.0,
)


def test_metrics_of_a_round() -> None:
    assert round_metrics(RECORD) == {
        "loss": 0.5,
        "best_loss": 0.4,
        "accuracy": 0.9,
        "tau": 4,
        "eta": 0.25,
        "rho": 1,
        "beta": 2,
        "delta": 3,
        "nodes": 8,
        "spent/time": 5,
        "spent/energy": 6,
        "c/time": 0.1,
        "c/energy": 0.2,
        "b/time": 0.3,
        "b/energy": 0.4,
    }


def test_metrics_of_an_evaluated_round() -> None:
    evaluated = replace(
        RECORD,
        metrics={"f1": 0.8, "own": math.nan},
        spread={"nodes": 4, "worst": 0.5},
        validation=0.7,
        validation_best=0.6,
    )
    values = round_metrics(evaluated)
    assert {
        name: values[name] for name in values.keys() - round_metrics(RECORD).keys()
    } == {
        "test/f1": 0.8,
        "nodes/worst": 0.5,
        "validation": 0.7,
        "validation_best": 0.6,
    }


def test_unknown_values_are_omitted() -> None:
    unknown = replace(
        RECORD,
        accuracy=None,
        rho=None,
        beta=0.0,
        delta=None,
        loss=math.nan,
        best_loss=math.inf,
    )
    left_out = round_metrics(RECORD).keys() - round_metrics(unknown).keys()
    assert left_out == {"accuracy", "rho", "delta", "loss", "best_loss"}
    assert round_metrics(unknown)["beta"] == 0


def test_final_evaluation_has_no_tau() -> None:
    assert round_metrics(RECORD).keys() - round_metrics(replace(RECORD, tau=0)).keys() == {
        "tau",
        "eta",
    }


def test_final_metrics() -> None:
    summary = {
        "loss": None,
        "accuracy": 0.5,
        "metrics": {"error": 2.0},
        "spread": {"nodes": 4, "worst": 0.25},
        "average_tau": 3.5,
        "aggregations": 4,
        "local_updates": 14,
        "spent": {"time": 1.5},
        "overshoot": {"time": 0.5},
        "stopped_by": "time",
    }
    assert final_metrics(summary) == {
        "final/accuracy": 0.5,
        "final/error": 2,
        "final/nodes/worst": 0.25,
        "final/average_tau": 3.5,
        "final/aggregations": 4,
        "final/local_updates": 14,
        "final/spent/time": 1.5,
        "final/overshoot/time": 0.5,
    }


def test_parameters_equal_the_settings_file() -> None:
    settings = Settings(
        budget=("time=1s", "bytes=2MB"), drift_correction=False, batch_size=3
    )
    values = parameters(settings)
    assert values["budget"] == "time=1s, bytes=2MB"
    assert values["batch-size"] == 3
    assert values["drift-correction"] is False
    lines = settings.to_toml().splitlines()
    assert values.keys() == {line.split(" = ")[0] for line in lines if " = " in line}


def test_run_has_the_folder_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    assert RunInfo(Path(), "", Settings(), 0.0).name == "one"


def test_trackers_by_name() -> None:
    trackers = make_trackers(["tensorboard", "mlflow", "tensorboard"])
    assert [tracker.name for tracker in trackers] == ["tensorboard", "mlflow"]
    with pytest.raises(
        UserError, match="unknown tracker 'comet'; known are mlflow, tensorboard, wandb"
    ):
        make_trackers(["mlflow", "comet"])


@pytest.mark.parametrize(
    ("name", "missing"),
    [("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("tensorboard", "tensorboard")],
)
def test_missing_package_names_the_extra(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(
        "fedbudget.trackers.find_spec", lambda module: None if module == missing else module
    )
    with pytest.raises(
        UserError,
        match=rf"needs {missing}; install it with: pip install 'fedbudget\[{name}\]'",
    ):
        make_trackers([name])


def test_mlflow_server_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    monkeypatch.setattr(
        "fedbudget.trackers.find_spec",
        lambda module: None if module == "sqlalchemy" else module,
    )
    assert [tracker.name for tracker in make_trackers(["mlflow"])] == ["mlflow"]
