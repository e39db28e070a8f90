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
from fedbudget.trackers.tracker import About, Moment, figures, final_figures

EXPERIMENT = "fedbudget"

_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # in one request, by MLflow's own limits
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class Mlflow:
    """See `tracker.Tracker`."""

    name = "mlflow"

    def __init__(self) -> None:
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
        self._last = 0  # round
        self._about: About
        self._client: Any
        self._run: str

    def start(self, about: About) -> None:
        from mlflow import MlflowClient  # slow to import
        from mlflow.entities import Param

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._about, self._client = about, MlflowClient()
        tags = {
            "mlflow.source.name": "fedbudget",
            "mlflow.note.content": about.title,
            "fedbudget.version": __version__,
            "fedbudget.run": str(about.folder.resolve()),
        }
        experiment, began = _experiment(self._client), int(1000 * about.began)
        created = self._client.create_run(experiment, run_name=about.name, start_time=began, tags=tags)
        self._run = created.info.run_id
        parameters = [Param(name, str(value)) for name, value in about.parameters().items()]
        for begin in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[begin : begin + _MOST_PARAMETERS])

    def rounds(self, moments: Sequence[Moment]) -> None:
        self._last = moments[-1].record.round
        self._log([(moment.time, moment.record.round, figures(moment.record)) for moment in moments])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is None:
            self._client.set_terminated(self._run, "FAILED")
            return
        self._log([(time.time(), self._last, final_figures(summary))])
        self._client.set_tag(self._run, "fedbudget.stopped_by", summary["stopped_by"])
        for resource, source in summary["sources"].items():
            self._client.set_tag(self._run, f"fedbudget.source.{resource}", source)
        for file in (MODEL, PLOT, CONFIG, SUMMARY):
            if (self._about.folder / file).exists():
                self._client.log_artifact(self._run, str(self._about.folder / file))
        self._client.set_terminated(self._run, _STATUS[summary["status"]])

    def _log(self, rows: "Sequence[tuple[float, int, Mapping[str, float]]]") -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * when), step) for when, step, found in rows for name, value in found.items()
        ]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _MOST_METRICS])


def _experiment(client: Any) -> str:
    """The id of the experiment that runs go to, which is made if it is not there."""
    from mlflow.exceptions import MlflowException

    known = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if known:
        return known
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException:  # another run may have made it just now
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return str(found.experiment_id)
