"""One line of `rounds.jsonl`: what plots, tables and pages read of a round, and nothing else."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fedbudget.errors import printable

if TYPE_CHECKING:
    from fedbudget.protocol.aggregator import Round
    from fedbudget.protocol.messages import Private
    from fedbudget.protocol.workload import WorkShares


@dataclass(frozen=True)
class RoundRecord:
    """A round as plain numbers; see `protocol.aggregator.Round` for what they mean.

    Args:
      accuracy: of the w that the round started from, on the test samples; None where it was not evaluated.
      c, b, spent: per resource, by name: what a local update and the rest of the round cost, and all until its end.
      expected_c, expected_b: what the next τ is chosen with; None where that is what the round cost, or none is chosen.
      plain_delta, corrected_delta: the round's `divergence`.
      test_loss: as accuracy.
      metrics: further ones, as accuracy, by name.
      spread: how far nodes are apart in accuracy or RMSE, where they have test samples: `worst`, `tenth`, `median`, and
        how many `nodes` they are.
      wall: seconds since the run began, on this machine's clock.
      work: where faster nodes made more updates than τ: `effective`, what they counted as; `mean_idle` and
        `mean_idle_equal`, the share of that time that nodes waited, and would have with the same τ; and of up to 200
        nodes the lists `node`, `updates`, `idle` and `idle_equal`.
      private: of a private round: `clip`, the longest update that counted; `noise` and `count_noise`, in multiples of
        what one node can change, at least where nodes add it; and `rho`, what it cost.
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
    expected_c: dict[str, float] | None = None
    expected_b: dict[str, float] | None = None
    test_loss: float | None = None
    metrics: dict[str, float] | None = None
    spread: dict[str, float] | None = None
    work: dict[str, Any] | None = None
    private: dict[str, float] | None = None

    @property
    def effective_tau(self) -> float:
        """τ, or what the updates of nodes counted as that made different numbers of them."""
        return float(self.work["effective"]) if self.work else self.tau

    @property
    def tau_text(self) -> str:
        """τ for people: 4, or 4-16 where faster nodes made more; nothing where no update was made."""
        if not self.work or not self.work["updates"]:
            return str(self.tau or "")
        return f"{min(self.work['updates'])}-{max(self.work['updates'])}"

    @classmethod
    def of(
        cls, round_: "Round", *, accuracy: float | None, wall: float, **figures: Any
    ) -> "RoundRecord":
        """What has the same name in both is the same in both."""
        ledger = round_.ledger
        costs = round_.ledger.costs
        label = round_.ledger.budget.label
        values: dict[str, Any] = {name: getattr(round_, name, None) for name in _NAMES}
        values |= {
            "reason": str(round_.reason),
            "accuracy": accuracy,
            "wall": wall,
            **figures,
        }
        values |= {
            "c": label(costs.step),
            "b": label(costs.aggregation),
            "spent": ledger.budget.totals(ledger.spent),
        }
        if (expected := round_.expected) is not None:
            values |= {
                "expected_c": label(expected.step),
                "expected_b": label(expected.aggregation),
            }
        if (estimates := round_.estimates) is not None:
            values |= {
                "rho": estimates.rho,
                "beta": estimates.beta,
                "delta": estimates.delta,
            }
        values["work"] = None if round_.work is None else _work(round_.work)
        values["private"] = None if round_.private is None else _private(round_.private)
        if (divergence := round_.divergence) is not None:
            values |= {
                "plain_delta": divergence.plain,
                "corrected_delta": divergence.corrected,
            }
        return cls(**values)

    def to_json(self) -> str:
        may_be_nan = ("loss", "best_loss", "plain_delta", "corrected_delta")
        values = {
            **vars(self),
            **{name: json_value(getattr(self, name)) for name in may_be_nan},
        }
        return _ENCODER.encode(
            {name: value for name, value in values.items() if value or name not in _SELDOM}
        )

    @classmethod
    def from_json(cls, line: str) -> "RoundRecord":
        fields: dict[str, Any] = json.loads(line)
        for name in ("loss", "best_loss"):
            if fields[name] is None:
                fields[name] = math.nan
        for name in ("kept", "left_out", "missed"):
            fields[name] = tuple(fields.get(name, ()))
        fields["reason"] = printable(str(fields["reason"]))
        return cls(**fields)


_NAMES = tuple(each.name for each in fields(RoundRecord))

MOST_NODES = 200
"""Of more, only means are kept in a round's record."""

_SELDOM = (
    "metrics",
    "spread",
    "work",
    "private",
)  # in some rounds, and so not written where they are not there
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _work(shares: "WorkShares") -> dict[str, Any]:
    listed = len(shares.nodes) <= MOST_NODES
    each = {"node": shares.nodes, "updates": shares.updates}
    idle = {"idle": shares.idle, "idle_equal": shares.idle_equal}
    return {
        "effective": shares.effective,
        **{f"mean_{name}": round(float(values.mean()), 3) for name, values in idle.items()},
        **{name: values.tolist() if listed else [] for name, values in each.items()},
        **{
            name: values.round(3).tolist() if listed else []
            for name, values in idle.items()
        },
    }


def _private(private: "Private") -> dict[str, float]:
    from fedbudget.protocol.privacy import multipliers

    sigma = multipliers(private)
    told = {
        "clip": private.clip,
        "noise": sigma.updates,
        "count_noise": sigma.counts,
        "rho": private.rho,
    }
    told |= {} if private.samples is None else {"samples": private.samples}
    return {name: value for name, value in told.items() if 0 < value < math.inf}


def json_value(value: float | None) -> float | None:
    """JSON has no NaN or infinity: null instead."""
    return value if value is not None and math.isfinite(value) else None


def average_tau(taus: Sequence[float]) -> float:
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
