"""One line of `rounds.jsonl`: what plots, tables and pages read of a round, and nothing else."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedbudget.protocol.aggregator import Round


@dataclass(frozen=True)
class RoundRecord:
    """A round as plain numbers; see `protocol.aggregator.Round` for what they mean.

    Args:
      accuracy: of the w that the round started from, on the test samples; None where it was not evaluated.
      c, b, spent: per resource, by name.
      plain_delta, corrected_delta: the round's `divergence`.
      wall: seconds since the run began, on this machine's clock.
    """

    round: int
    t: int
    tau: int
    reason: str
    eta: float
    loss: float
    best_loss: float
    accuracy: float | None
    rho: float | None
    beta: float | None
    delta: float | None
    kept: tuple[str, ...]
    c: dict[str, float]
    b: dict[str, float]
    spent: dict[str, float]
    nodes: int
    left_out: tuple[int, ...]
    wall: float
    corrected: bool = False
    plain_delta: float | None = None
    corrected_delta: float | None = None
    missed: tuple[int, ...] = ()

    @classmethod
    def of(cls, round_: Round, *, accuracy: float | None, wall: float) -> "RoundRecord":
        ledger, estimates, divergence = round_.ledger, round_.estimates, round_.divergence
        return cls(
            round=round_.round,
            t=round_.t,
            tau=round_.tau,
            reason=str(round_.reason),
            eta=round_.eta,
            loss=round_.loss,
            best_loss=round_.best_loss,
            accuracy=accuracy,
            rho=None if estimates is None else estimates.rho,
            beta=None if estimates is None else estimates.beta,
            delta=None if estimates is None else estimates.delta,
            kept=round_.kept,
            c=ledger.budget.label(ledger.costs.step),
            b=ledger.budget.label(ledger.costs.aggregation),
            spent=ledger.budget.label(ledger.spent),
            nodes=round_.nodes,
            left_out=round_.left_out,
            wall=wall,
            corrected=round_.corrected,
            plain_delta=None if divergence is None else divergence.plain,
            corrected_delta=None if divergence is None else divergence.corrected,
            missed=round_.missed,
        )

    def to_json(self) -> str:
        may_be_nan = ("loss", "best_loss", "plain_delta", "corrected_delta")
        return _ENCODER.encode({**vars(self), **{name: json_value(getattr(self, name)) for name in may_be_nan}})

    @classmethod
    def from_json(cls, line: str) -> "RoundRecord":
        fields: dict[str, Any] = json.loads(line)
        for name in ("loss", "best_loss"):
            if fields[name] is None:
                fields[name] = math.nan
        for name in ("kept", "left_out", "missed"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def json_value(value: float | None) -> float | None:
    """JSON has no NaN or infinity: null instead."""
    return value if value is not None and math.isfinite(value) else None


def average_tau(taus: Sequence[int]) -> float:
    """Local updates divided by aggregations; 0 before the first.

    Args:
      taus: of the rounds that made updates.

    >>> average_tau([1, 2, 9])
    4.0
    """
    return sum(taus) / len(taus) if taus else 0.0


def update_weighted_tau(taus: Sequence[int]) -> float:
    """Σ τ² / Σ τ, the τ that an average local update belongs to: the paper's average, for its figures alone.

    >>> update_weighted_tau([1, 1, 8])
    6.6
    """
    return sum(tau * tau for tau in taus) / sum(taus) if any(taus) else 0.0
