"""Rounds as steps of an MLflow run.

Runs go where MLflow itself would put them: to MLFLOW_TRACKING_URI, or else to mlflow.db and mlruns/ in the current
folder; and into the experiment MLFLOW_EXPERIMENT_NAME, or else `fedbudget`. MLflow tells its makers how it is used; not
from here, unless MLFLOW_DISABLE_TELEMETRY says false.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedbudget import __version__
from fedbudget.runs.folder import CONFIG, MODEL, PLOT, SUMMARY
from fedbudget.trackers.tracker import RunInfo, TimedRecord, final_metrics, round_metrics

# in one request, by MLflow's own limits
_MOST_METRICS = 1000
_MOST_PARAMETERS = 100
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class Mlflow:
    """See `tracker.Tracker`."""

    name = "mlflow"

    def __init__(self) -> None:
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
        self._last = 0  # round
        self._run_info: RunInfo
        self._client: Any
        self._run: str

    def start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient  # slow to import
        from mlflow.entities import Param

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._run_info, self._client = run, MlflowClient()
        tags = {
            "mlflow.source.name": "fedbudget",
            "mlflow.note.content": run.title,
            "fedbudget.version": __version__,
            "fedbudget.run": str(run.folder.resolve()),
        }
        experiment = _experiment(self._client)
        began = int(1000 * run.began)
        created = self._client.create_run(
            experiment, run_name=run.name, start_time=began, tags=tags
        )
        self._run = created.info.run_id
        parameters = [Param(name, str(value)) for name, value in run.parameters().items()]
        for begin in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(
                self._run, params=parameters[begin : begin + _MOST_PARAMETERS]
            )

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        self._last = records[-1].record.round
        self._log(
            [
                (timed.time, timed.record.round, round_metrics(timed.record))
                for timed in records
            ]
        )

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is None:
            self._client.set_terminated(self._run, "FAILED")
            return
        self._log([(time.time(), self._last, final_metrics(summary))])
        self._client.set_tag(self._run, "fedbudget.stopped_by", summary["stopped_by"])
        for resource, source in summary["sources"].items():
            self._client.set_tag(self._run, f"fedbudget.source.{resource}", source)
        for file in (MODEL, PLOT, CONFIG, SUMMARY):
            if (self._run_info.folder / file).exists():
                self._client.log_artifact(self._run, str(self._run_info.folder / file))
        self._client.set_terminated(self._run, _STATUS[summary["status"]])

    def _log(self, rows: "Sequence[tuple[float, int, Mapping[str, float]]]") -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * when), step)
            for when, step, of in rows
            for name, value in of.items()
        ]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(
                self._run, metrics=metrics[begin : begin + _MOST_METRICS]
            )


def _experiment(client: Any) -> str:
    """The id of the experiment that runs go to, which is made if it is not there."""
    from mlflow.exceptions import MlflowException

    if known := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return known
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedbudget"
    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            if (
                experiment := client.get_experiment_by_name(name)
            ) is None:  # or another run has made it just now
                raise
    return str(experiment.experiment_id)
