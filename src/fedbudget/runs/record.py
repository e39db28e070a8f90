"""One line of `rounds.jsonl`: all that plots, tables and pages read of a round.

A file may come from elsewhere: types and ranges of a line are checked when it is read.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from fedbudget.errors import printable_texts
from fedbudget.file_contents import parsed_json

if TYPE_CHECKING:
    from fedbudget.protocol.features.workload import WorkShares
    from fedbudget.protocol.state import Round

MAX_LISTED = 200
"""If there are more nodes, a record contains only their means."""

_OPTIONAL = ("metrics", "spread", "work", "private", "extra", "excluded")
"""Fields that are written only if they are not empty."""
_VALIDATION = ("validation", "validation_best", "validation_error", "dropout")
"""Fields that are written only if w was validated, or updates had dropout."""
_NESTED = (
    *("c", "b", "spent", "expected_c", "expected_b"),
    *("metrics", "spread", "work", "private", "extra"),
)
"""Fields that are mappings, or None."""
_MAY_BE_NAN = ("loss", "best_loss", "plain_delta", "corrected_delta")
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_LONGEST_LINE = 2**24  # characters
_LARGEST = 1e300

Whole = Annotated[int, Meta(ge=0, le=2**53)]
Number = int | float
Amounts = dict[str, Number]


class Spread(TypedDict):
    """The spread of a metric over nodes, see `RoundRecord`."""

    worst: Number
    tenth: Number
    median: Number
    nodes: Number


class WorkRecord(TypedDict):
    """The shared work of a round, see `RoundRecord`."""

    effective: Number
    mean_idle: Number
    mean_idle_equal: Number
    node: list[Whole]
    updates: list[Whole]
    idle: list[Number]
    idle_equal: list[Number]


@dataclass(frozen=True, repr=False)
class RoundRecord:
    """A round as plain numbers; `protocol.aggregator.Round` describes the other fields.

    Args:
      accuracy: accuracy of the round's initial w on test samples; None if not evaluated.
      c, b: cost of a local update and of the rest of the round, by resource.
      spent: total spending at the end of the round, by resource.
      expected_c, expected_b: costs for the choice of the next τ; None if they equal c and
        b, or no τ is chosen.
      plain_delta, corrected_delta: the round's `divergence`.
      test_loss: loss on test samples, as `accuracy`.
      metrics: further metrics on test samples by name, as `accuracy`.
      spread: accuracy or RMSE over nodes that hold test samples: `worst`, `tenth`,
        `median`, and the number of `nodes`.
      wall: seconds since the start of the run, on this machine's clock.
      work: set if faster nodes made more than τ updates. `effective`: equivalent τ.
        `mean_idle` and `mean_idle_equal`: idle fraction of the update time, actual and with
        equal τ. Lists for up to 200 nodes: `node`, `updates`, `idle`, `idle_equal`.
      private: set in a private round. `clip`: largest norm of an update. `noise` and
        `count_noise`: noise relative to the influence of one node, a lower bound if nodes
        add it. `rho`: cost.
      extra: numbers of features of your own, by name.
      excluded: numbers of the nodes whose losses do not count; written only if there are
        any.
    """

    round: Annotated[int, Meta(ge=1, le=2**53)]
    t: Whole
    tau: Whole
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
    nodes: Whole
    left_out: tuple[Whole, ...]
    wall: float
    corrected: bool = False
    plain_delta: float | None = None
    corrected_delta: float | None = None
    missed: tuple[Whole, ...] = ()
    expected_c: dict[str, float] | None = None
    expected_b: dict[str, float] | None = None
    test_loss: float | None = None
    metrics: Amounts | None = None
    spread: Amounts | None = None
    work: dict[str, Any] | None = None
    private: Amounts | None = None
    extra: Amounts | None = None
    validation: float | None = None
    validation_best: float | None = None
    validation_error: float | None = None
    dropout: float | None = None
    excluded: tuple[Whole, ...] = ()

    def __repr__(self) -> str:
        spent = ", ".join(f"{name}={value:.4g}" for name, value in self.spent.items())
        return (
            f"RoundRecord(round={self.round}, tau={self.tau}, reason={self.reason!r}, "
            f"eta={self.eta:.4g}, loss={self.loss:.4g}, spent: {spent})"
        )

    def flat(self) -> dict[str, Any]:
        """Return the fields by name; those of a mapping as `spent.time`."""
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Mapping):
                values |= {f"{name}.{key}": each for key, each in value.items()}
            elif name not in _NESTED:
                values[name] = value
        return values

    @property
    def effective_tau(self) -> float:
        """τ, or the equivalent τ if nodes made different numbers of updates."""
        return float(self.work["effective"]) if self.work else self.tau

    @property
    def tau_text(self) -> str:
        """τ for display: 4, or 4-16 if faster nodes made more; empty without updates."""
        if not self.work or not self.work["updates"]:
            return str(self.tau or "")
        return f"{min(self.work['updates'])}-{max(self.work['updates'])}"

    @classmethod
    def of(
        cls, round_: "Round", *, accuracy: float | None, wall: float, **figures: Any
    ) -> "RoundRecord":
        """Return the record of a round.

        Args:
          round_: the round; fields with the same name are copied.
          accuracy: see `RoundRecord`.
          wall: see `RoundRecord`.
          figures: further fields from an evaluation.
        """
        ledger = round_.ledger
        amounts = {"c": ledger.costs.step, "b": ledger.costs.aggregation}
        if round_.expected is not None:
            amounts["expected_c"] = round_.expected.step
            amounts["expected_b"] = round_.expected.aggregation
        limits = ledger.budget.limits
        given = vars(round_)
        values: dict[str, Any] = {
            name: given.get(name) for name in cls.__dataclass_fields__
        }
        values |= {
            **figures,
            "reason": str(round_.reason),
            "accuracy": accuracy,
            "wall": wall,
            **{
                name: dict(zip(limits, each.tolist(), strict=True))
                for name, each in amounts.items()
            },
            "spent": ledger.budget.totals(ledger.spent),
            "work": None if round_.work is None else _work(round_.work),
            "extra": dict(round_.extra) or None,
            "excluded": tuple([each.node for each in round_.excluded]),
        }
        if round_.estimates is not None:
            values |= {
                name: getattr(round_.estimates, name) for name in ("rho", "beta", "delta")
            }
        if round_.divergence is not None:
            values["plain_delta"] = round_.divergence.plain
            values["corrected_delta"] = round_.divergence.corrected
        return cls(**values)

    def to_json(self) -> str:
        """Return the record as a line of JSON, without the line end."""
        values = {
            name: value
            for name, value in vars(self).items()
            if value or name not in _OPTIONAL
            if value is not None or name not in _VALIDATION
        }
        for name in _MAY_BE_NAN:
            value = values[name]
            if value is not None and not math.isfinite(value):
                values[name] = None
        return _ENCODER.encode(values)

    @classmethod
    def from_json(cls, line: str) -> "RoundRecord":
        """Read a line of JSON; raise ValueError, KeyError or TypeError if it is invalid."""
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"a round has more than {_LONGEST_LINE} characters")
        values: Any = parsed_json(line)
        if not isinstance(values, dict):
            raise ValueError("a round must be a mapping")
        require_moderate(values)
        for name in ("loss", "best_loss"):
            if values[name] is None:
                values[name] = math.nan
        if unknown := sorted({*values} - {each.name for each in fields(cls)}):
            raise ValueError(f"a round has an unknown field {unknown[0]}")
        record: RoundRecord = msgspec.convert(printable_texts(values), cls)
        record._require_consistent()
        return record

    def require_resources(self, names: Collection[str]) -> None:
        """Raise ValueError unless the costs are of these resources."""
        amounts = (self.c, self.b, self.spent, self.expected_c, self.expected_b)
        if any(each is not None and {*each} != {*names} for each in amounts):
            raise ValueError(f"costs of round {self.round} are of other resources")

    def _require_consistent(self) -> None:
        estimates = [each is None for each in (self.rho, self.beta, self.delta)]
        if any(estimates) and not all(estimates):
            raise ValueError(f"round {self.round} has only some estimates")
        if self.spread is not None:
            msgspec.convert(self.spread, Spread)
        if self.work is not None:
            msgspec.convert(self.work, WorkRecord)
            lists = [self.work[name] for name in ("node", "updates", "idle", "idle_equal")]
            if len({*map(len, lists)}) > 1:
                raise ValueError(f"lists of round {self.round} differ in length")
        private = self.private or {}
        if "noise" in private and not {"clip", "rho"} <= {*private}:
            raise ValueError(f"the private round {self.round} is incomplete")


def require_moderate(values: Any) -> None:
    """Raise ValueError for numbers in nested values that cannot be shown."""
    if isinstance(values, Mapping):
        for each in values.values():
            require_moderate(each)
    elif isinstance(values, list):
        for each in values:
            require_moderate(each)
    elif isinstance(values, int | float) and not abs(values) <= _LARGEST:
        raise ValueError("a number is not finite, or too large")


def json_value(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def average_tau(taus: Sequence[float]) -> float:
    """Return local updates divided by aggregations; 0 before the first.

    Args:
      taus: τ of the rounds that made updates.

    >>> average_tau([1, 2, 9])
    4.0
    """
    return sum(taus) / len(taus) if taus else 0.0


def update_weighted_tau(taus: Sequence[int]) -> float:
    """Return Σ τ² / Σ τ, the mean τ over local updates, which the paper's figures show.

    >>> update_weighted_tau([1, 1, 8])
    6.6
    """
    return sum(tau * tau for tau in taus) / sum(taus) if any(taus) else 0.0


def _work(shares: "WorkShares") -> dict[str, Any]:
    lists = {
        "node": shares.nodes,
        "updates": shares.updates,
        "idle": shares.idle.round(3),
        "idle_equal": shares.idle_equal.round(3),
    }
    listed = len(shares.nodes) <= MAX_LISTED
    return {
        "effective": shares.effective,
        "mean_idle": round(float(shares.idle.mean()), 3),
        "mean_idle_equal": round(float(shares.idle_equal.mean()), 3),
        **{name: values.tolist() if listed else [] for name, values in lists.items()},
    }
