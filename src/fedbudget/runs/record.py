"""One line of `rounds.jsonl`: what plots, tables and pages read of a round, and nothing else."""

import json
import math
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
    def of(cls, happened: Round, *, accuracy: float | None, wall: float) -> "RoundRecord":
        ledger, estimates, apart = happened.ledger, happened.estimates, happened.divergence
        return cls(
            round=happened.round,
            t=happened.t,
            tau=happened.tau,
            reason=str(happened.reason),
            eta=happened.eta,
            loss=happened.loss,
            best_loss=happened.best_loss,
            accuracy=accuracy,
            rho=None if estimates is None else estimates.rho,
            beta=None if estimates is None else estimates.beta,
            delta=None if estimates is None else estimates.delta,
            kept=happened.kept,
            c=ledger.budget.label(ledger.costs.step),
            b=ledger.budget.label(ledger.costs.aggregation),
            spent=ledger.budget.label(ledger.spent),
            nodes=happened.nodes,
            left_out=happened.left_out,
            wall=wall,
            corrected=happened.corrected,
            plain_delta=None if apart is None else apart.plain,
            corrected_delta=None if apart is None else apart.corrected,
            missed=happened.missed,
        )

    def to_json(self) -> str:
        doubtful = ("loss", "best_loss", "plain_delta", "corrected_delta")
        return _ENCODER.encode({**vars(self), **{name: json_value(getattr(self, name)) for name in doubtful}})

    @classmethod
    def from_json(cls, line: str) -> "RoundRecord":
        found: dict[str, Any] = json.loads(line)
        for name in ("loss", "best_loss"):
            if found[name] is None:
                found[name] = math.nan
        for name in ("kept", "left_out", "missed"):
            found[name] = tuple(found.get(name, ()))
        return cls(**found)


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def json_value(value: float | None) -> float | None:
    """JSON has no NaN or infinity: null instead."""
    return value if value is not None and math.isfinite(value) else None


def average_tau(taus: list[int]) -> float:
    """Σ τ_k² / Σ τ_k: the τ that an average local update belongs to."""
    return sum(tau * tau for tau in taus) / sum(taus) if any(taus) else 0.0
