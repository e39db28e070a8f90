"""A line of rounds.jsonl: JSON that is read back to the same record."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.budget.budget import Budget, Costs, Ledger
from fedbudget.budget.control import Estimates, Reason
from fedbudget.protocol.features.drift import Divergence
from fedbudget.protocol.state import Round
from fedbudget.runs.record import RoundRecord, average_tau, update_weighted_tau

finite = st.floats(-1e300, 1e300)
whole = st.integers(0, 2**53)
amounts = st.dictionaries(
    st.sampled_from(["time", "energy", "bytes", "cpu", "money"]), finite, min_size=1
)
records = st.builds(
    RoundRecord,
    round=st.integers(1, 2**53),
    t=whole,
    tau=whole,
    reason=st.sampled_from([str(reason) for reason in Reason]),
    eta=finite,
    loss=finite,
    best_loss=finite,
    accuracy=st.none() | finite,
    rho=finite,
    beta=finite,
    delta=finite,
    kept=st.lists(st.sampled_from(["rho", "beta", "delta"])).map(tuple),
    c=amounts,
    b=amounts,
    spent=amounts,
    nodes=whole,
    left_out=st.lists(whole).map(tuple),
    wall=finite,
    corrected=st.booleans(),
    plain_delta=st.none() | finite,
    corrected_delta=st.none() | finite,
    missed=st.lists(whole).map(tuple),
    test_loss=st.none() | finite,
    expected_c=st.none() | amounts,
    expected_b=st.none() | amounts,
    metrics=st.none() | st.dictionaries(st.sampled_from(["f1", "auc"]), finite, min_size=1),
    spread=st.none()
    | st.fixed_dictionaries(dict.fromkeys(["worst", "tenth", "median", "nodes"], finite)),
)
records |= records.map(lambda each: replace(each, rho=None, beta=None, delta=None))

COSTS = Costs(np.array([0.01, 0.0]), np.array([0.1, 5000.0]))
LEDGER = Ledger.open(Budget.parse(["time=15s", "bytes=1MB"]), COSTS).charge_extra(
    np.array([3.5, 60_000.0])
)
ROUND = Round(
    round=12,
    t=70,
    tau=8,
    reason=Reason.SEARCH_LIMIT,
    eta=0.01,
    loss=0.5,
    best_loss=0.4,
    estimates=Estimates(1.0, 2.0, 3.0),
    kept=("beta",),
    ledger=LEDGER,
    expected=Costs(np.array([0.02, 0.0]), np.array([0.2, 5000.0])),
    nodes=5,
    left_out=(3,),
    corrected=True,
    divergence=Divergence(7.0, 6.0),
    missed=(1, 4),
)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@given(record=records)
def test_record_round_trip(record: RoundRecord) -> None:
    line = record.to_json()
    assert "\n" not in line
    assert RoundRecord.from_json(line) == record


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_is_null(loss: float) -> None:
    record = replace(
        RoundRecord.of(ROUND, accuracy=None, wall=1.0), loss=loss, best_loss=loss
    )
    fields = json.loads(record.to_json(), parse_constant=refuse)
    assert fields["loss"] is None
    assert fields["best_loss"] is None
    assert math.isnan(RoundRecord.from_json(record.to_json()).loss)


def test_fields_of_a_record() -> None:
    record = RoundRecord.of(ROUND, accuracy=0.9, wall=1.25, test_loss=0.3)
    assert json.loads(record.to_json()) == {
        "round": 12,
        "t": 70,
        "tau": 8,
        "reason": "search limit",
        "eta": 0.01,
        "loss": 0.5,
        "best_loss": 0.4,
        "accuracy": 0.9,
        "rho": 1.0,
        "beta": 2.0,
        "delta": 3.0,
        "kept": ["beta"],
        "c": {"time": 0.01, "bytes": 0.0},
        "b": {"time": 0.1, "bytes": 5000.0},
        "spent": {"time": 3.5, "bytes": 60_000.0},
        "nodes": 5,
        "left_out": [3],
        "wall": 1.25,
        "corrected": True,
        "plain_delta": 7.0,
        "corrected_delta": 6.0,
        "missed": [1, 4],
        "test_loss": 0.3,
        "expected_c": {"time": 0.02, "bytes": 0.0},
        "expected_b": {"time": 0.2, "bytes": 5000.0},
    }


def test_only_evaluated_rounds_have_metrics() -> None:
    """Rounds without an evaluation have no such fields."""
    record = RoundRecord.of(ROUND, accuracy=0.9, wall=0.0, metrics={"f1": 0.8}, spread=None)
    fields = json.loads(record.to_json())
    assert fields["metrics"] == {"f1": 0.8}
    assert "spread" not in fields


def test_missing_estimates_are_none() -> None:
    record = RoundRecord.of(replace(ROUND, estimates=None), accuracy=None, wall=0.0)
    assert (record.rho, record.beta, record.delta) == (None, None, None)


@pytest.mark.parametrize(
    ("taus", "average", "weighted"),
    [
        ([], 0.0, 0.0),
        ([7], 7.0, 7.0),
        ([1, 1, 1], 1.0, 1.0),
        ([1, 10, 100], 37.0, 91.0),
        ([2, 4], 3.0, 20 / 6),
    ],
)
def test_average_tau_per_round_and_update(
    taus: list[int], average: float, weighted: float
) -> None:
    """Users see the mean over rounds. The paper's figures use the mean over local updates,
    each with the τ of its round.
    """
    assert average_tau(taus) == pytest.approx(average)
    assert update_weighted_tau(taus) == pytest.approx(weighted)
    by_update = [tau for tau in taus for _ in range(tau)]
    assert update_weighted_tau(taus) == pytest.approx(
        np.mean(by_update) if by_update else 0.0
    )
