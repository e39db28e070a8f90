"""Rounds as steps of an MLflow run.

Runs go to MLflow's usual place: MLFLOW_TRACKING_URI, or mlflow.db and mlruns/ in the
current folder. The experiment is MLFLOW_EXPERIMENT_NAME, or `fedbudget`. MLflow's usage
statistics are off, unless MLFLOW_DISABLE_TELEMETRY is set to false.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedbudget import __version__
from fedbudget.runs.folder import CONFIG, MODEL, PLOT
from fedbudget.runs.summary import SUMMARY
from fedbudget.trackers.tracker import (
    RunInfo,
    TimedRecord,
    final_metrics,
    parameters,
    round_metrics,
)

_BATCH_SIZES = {"metrics": 1000, "params": 100}  # MLflow's limits for one request
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class Mlflow:
    """A `tracker.Tracker` that writes to MLflow."""

    name = "mlflow"

    def __init__(self) -> None:
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
        self._last_round = 0
        self._run_info: RunInfo
        self._client: Any
        self._run: str

    def start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient  # slow to import
        from mlflow.entities import Param

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._run_info = run
        self._client = MlflowClient()
        tags = {
            "mlflow.source.name": "fedbudget",
            "mlflow.note.content": run.title,
            "fedbudget.version": __version__,
            "fedbudget.run": str(run.folder.resolve()),
        }
        created = self._client.create_run(
            _experiment(self._client),
            run_name=run.name,
            start_time=int(1000 * run.began),
            tags=tags,
        )
        self._run = created.info.run_id
        settings = parameters(run.settings).items()
        self._log("params", [Param(name, str(value)) for name, value in settings])

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        metrics = []
        for when, record in records:
            self._last_round = record.round
            metrics += _metrics(round_metrics(record), when, record.round)
        self._log("metrics", metrics)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is None:
            self._client.set_terminated(self._run, "FAILED")
            return
        metrics = _metrics(final_metrics(summary), time.time(), self._last_round)
        self._log("metrics", metrics)
        self._client.set_tag(self._run, "fedbudget.stopped_by", summary["stopped_by"])
        for resource, source in summary["sources"].items():
            self._client.set_tag(self._run, f"fedbudget.source.{resource}", source)
        for name in (MODEL, PLOT, CONFIG, SUMMARY):
            file = self._run_info.folder / name
            if file.exists():
                self._client.log_artifact(self._run, str(file))
        self._client.set_terminated(self._run, _STATUS[summary["status"]])

    def _log(self, kind: str, values: list[Any]) -> None:
        size = _BATCH_SIZES[kind]
        for start in range(0, len(values), size):
            batch = values[start : start + size]
            self._client.log_batch(self._run, **{kind: batch})


def _metrics(values: Mapping[str, float], when: float, step: int) -> list[Any]:
    from mlflow.entities import Metric

    milliseconds = int(1000 * when)
    return [Metric(name, value, milliseconds, step) for name, value in values.items()]


def _experiment(client: Any) -> str:
    """Return the id of the experiment; create it if it does not exist."""
    from mlflow.exceptions import MlflowException

    if known := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return known
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedbudget"
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
            # Another run has created it in the meantime.
    return str(experiment.experiment_id)
