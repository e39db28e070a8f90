"""Rounds as steps of a Weights & Biases run.

The run goes to the project WANDB_PROJECT, or `fedbudget`. With WANDB_MODE=offline, nothing
leaves this machine: the run is written to WANDB_DIR, or `wandb/` in the folder of the run,
and `wandb sync` uploads it later. Without a login, runs are offline.
"""

import os
import shutil
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


class WeightsAndBiases:
    """A `tracker.Tracker` that writes to Weights & Biases."""

    name = "wandb"

    def __init__(self) -> None:
        self._run_info: RunInfo
        self._run: Any

    def start(self, run: RunInfo) -> None:
        import wandb  # slow to import

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.login(prompt=False):
            mode = "offline"
        self._run_info = run
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "fedbudget",
            name=run.name,
            notes=run.title,
            config={**parameters(run.settings), "fedbudget": __version__},
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
            reinit="create_new",
        )

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        for _, record in records:
            self._run.log(round_metrics(record), step=record.round)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is None:
            self._run.finish(exit_code=1)
            return
        self._run.summary.update(final_metrics(summary))
        self._run.summary["stopped_by"] = summary["stopped_by"]
        for name in (MODEL, PLOT, CONFIG, SUMMARY):
            file = self._run_info.folder / name
            if file.exists():
                # Of a file elsewhere, wandb makes a link and prints a warning.
                own = shutil.copy(file, self._run.dir)
                self._run.save(own, base_path=self._run.dir, policy="now")
        self._run.finish()
