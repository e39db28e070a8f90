"""Run folders with synthetic records, whose formulas can be checked by hand."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbudget.runs import folder
from fedbudget.runs.folder import ROUNDS, RunWriter
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings

SETTINGS = Settings(
    model="svm",
    nodes=4,
    partition="case:2",
    method="frugal",
    budget=("time=20s", "bytes=2MB"),
    seed=3,
)


def record(number: int, **changes: Any) -> RoundRecord:
    """Record of a round that spends 0.1 s and 5 kB, and takes 0.5 s of wall-clock time."""
    usual = RoundRecord(
        round=number,
        t=5 * number,
        tau=1 if number < 3 else 5,
        reason="start" if number < 3 else "minimum of G",
        eta=0.01,
        loss=0.2 + 0.8 / number,
        best_loss=0.2 + 0.8 / number,
        accuracy=0.5 + 0.4 * (1 - 1 / number) if number % 5 == 1 else None,
        rho=None if number < 2 else 1.0,
        beta=None if number < 2 else 2.0,
        delta=None if number < 2 else 3.0,
        kept=(),
        c={"time": 0.01, "bytes": 0.0},
        b={"time": 0.05, "bytes": 5e3},
        spent={"time": 0.1 * number, "bytes": 5e3 * number},
        nodes=4,
        left_out=(),
        wall=0.5 * number,
    )
    return replace(usual, **changes)


def make_run(
    path: Path,
    rounds: int | Sequence[RoundRecord] = 20,
    *,
    settings: Settings = SETTINGS,
    summary: dict[str, Any] | None = None,
    finished: bool = True,
    every: Callable[[RoundRecord], RoundRecord] = lambda own: own,
) -> Path:
    """Write the folder of a run; return its path.

    Args:
      rounds: records, or the number of records of `record`.
      summary: overrides fields of the summary.
      every: changes each record.
    """
    records = (
        [every(record(number)) for number in range(1, rounds + 1)]
        if isinstance(rounds, int)
        else list(rounds)
    )
    writer = RunWriter(path, settings.to_toml())
    for each in records:
        writer.append(each)
    if finished:
        taus = [each.tau for each in records]
        usual = {
            "loss": records[-1].best_loss,
            "accuracy": 0.9,
            "average_tau": sum(taus) / len(taus),
            "aggregations": len(taus),
            "local_updates": sum(taus),
            "spent": records[-1].spent,
            "budget": dict(settings.limits().limits),
            "overshoot": {"time": 0.0, "bytes": 0.0},
            "sources": {"time": "simulated", "bytes": "declared"},
            "stopped_by": "time",
            "status": "finished",
        }
        writer.finish({**usual, **(summary or {})}, b"")
    else:
        writer.close()
    return path


@contextmanager
def held_by_writer(path: Path) -> Iterator[Path]:
    """Lock the run, as the process that writes it does."""
    with (path / ROUNDS).open("rb") as file:
        folder.hold(file)
        yield path


def many_rounds(path: Path, rounds: int) -> Path:
    """Write a finished run of many rounds with one spike in the loss."""
    lines = []
    for number in range(1, rounds + 1):
        share = number / rounds
        spike = 5.0 if number == rounds // 3 + 7 else 0.0
        changes = {
            "loss": 0.3 + 0.1 * math.sin(number) + spike,
            "tau": 3 + number % 11,
            "accuracy": 0.5 + 0.4 * share if number % 200 == 0 else None,
            "spent": {"time": 19 * share, "bytes": 1e6 * share},
        }
        lines.append(record(number, **changes).to_json() + "\n")
    make_run(path)
    (path / "rounds.jsonl").write_text("".join(lines))
    return path


def summary_of(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return summary
