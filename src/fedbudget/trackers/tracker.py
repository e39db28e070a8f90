"""What a tracker is, and what it is told: the figures of a round and of a whole run, by the same names everywhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedbudget.runs.record import RoundRecord
from fedbudget.settings import Settings


@dataclass(frozen=True)
class RunInfo:
    """A run that is to be followed.

    Args:
      folder: of the run, whose name is the run's name.
      title: what the run is, in a line.
      settings: as in its config.toml.
      began: when its first round began, in seconds since 1970.
    """

    folder: Path
    title: str
    settings: Settings
    began: float

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def parameters(self) -> dict[str, str | int | float | bool]:
        """The settings by their names in config.toml, without those that are not given."""
        values = {name.replace("_", "-"): value for name, value in vars(self.settings).items() if value is not None}
        return {name: ", ".join(map(str, it)) if isinstance(it, tuple) else it for name, it in values.items()}


class TimedRecord(NamedTuple):
    """A round, and when it was over, in seconds since 1970."""

    time: float
    record: RoundRecord


class Tracker(Protocol):
    """Follows one run. Whatever it is told may take its time or fail; see background.py."""

    name: str

    def start(self, run: RunInfo) -> None:
        """Before the first round."""

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        """Rounds in their order, each once."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """After the last round.

        Args:
          summary: what is in summary.json, which is in the run's folder now, as are the model and the plot; None when
            the run failed.
        """


def round_metrics(record: RoundRecord) -> dict[str, float]:
    """A round's numbers by name; what is not known of a round, or is no finite number, is left out.

    The last round of a run may be but a loss that is evaluated: it has no τ and no η.
    """
    decided = ("tau", "eta") if record.tau else ()
    names = ("loss", "best_loss", "accuracy", *decided, "rho", "beta", "delta", "nodes")
    metrics: dict[str, float | None] = {name: getattr(record, name) for name in names}
    for kind, values in (("spent", record.spent), ("c", record.c), ("b", record.b)):
        metrics |= {f"{kind}/{resource}": cost for resource, cost in values.items()}
    for kind, figures in (("test", record.metrics), ("nodes", record.spread)):
        metrics |= {f"{kind}/{name}": value for name, value in (figures or {}).items() if name != "nodes"}
    return _finite(metrics)


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """A run's numbers at its end."""
    names = ("loss", "accuracy", "average_tau", "aggregations", "local_updates")
    metrics = {f"final/{name}": summary[name] for name in names}
    metrics |= {f"final/{name}": value for name, value in summary.get("metrics", {}).items()}
    metrics |= {f"final/nodes/{name}": value for name, value in summary.get("spread", {}).items() if name != "nodes"}
    for kind in ("spent", "overshoot"):
        metrics |= {f"final/{kind}/{resource}": value for resource, value in summary[kind].items()}
    return _finite(metrics)


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
