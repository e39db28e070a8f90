"""Settings and helpers of private runs, for nodes and for samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant

from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord

OF_NODES: dict[str, Any] = {
    "model": "softmax",
    "dataset": "digits",
    "nodes": 20,
    "budget": ["time=6s", "privacy=4"],
}
OF_SAMPLES: dict[str, Any] = {
    **OF_NODES,
    "nodes": 5,
    "budget": ["time=4s", "privacy=4"],
    "privacy_unit": "sample",
}


OF_SUMS: dict[str, Any] = {**OF_SAMPLES, "nodes": 8, "secure_aggregation": True}


class Died(Exception):
    """The process has died during a run."""


def die_after(rounds: int) -> list[Callable[[RoundRecord], None]]:
    """Callbacks that raise `Died` after `rounds` rounds."""

    def callback(record: RoundRecord) -> None:
        if record.round == rounds:
            raise Died

    return [callback]


def epsilon_by_library(run: Path, delta: float) -> float:
    """ε of all recorded noise of a run, by Google's accountant."""
    accountant = PLDAccountant()
    for record in Run.open(run).rounds:
        assert record.private is not None
        for name in ("noise", "count_noise"):
            if name in record.private:
                accountant.compose(dp_accounting.GaussianDpEvent(record.private[name]))
    return float(accountant.get_epsilon(delta))
