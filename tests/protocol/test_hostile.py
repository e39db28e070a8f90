"""One node of three says anything at all: the run goes on, and nothing that is not a sane
number is kept of it.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbudget.budget.budget import Budget, Costs
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import NUMBERS, VECTORS, Broadcast, Report
from support.fleets import alone, sorted_parts
from support.methods import METHODS
from support.problems import problem

CASE = problem("softmax", seed=4)
ANYTHING = st.floats(width=32) | st.sampled_from(
    [3.4e38, -3.4e38, 1e30, -1e30, 9e11, 1e-30]
)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_number_of_one_node_ends_a_run(name: str, data: st.DataObject) -> None:
    aggregator = Aggregator(
        CASE.start(0),
        method=METHODS[name],
        budget=Budget({"time": 100.0}),
        expected=Costs(np.array([1.0]), np.array([1.0])),
        rounds=6,
    )
    fleets = alone(CASE, sorted_parts(CASE, 3))
    message: Broadcast | Outcome = aggregator.start()
    while isinstance(message, Broadcast):
        *honest, other = [fleet.answer(message) for fleet in fleets]
        field = data.draw(
            st.sampled_from(
                [each for each in (*NUMBERS, *VECTORS) if getattr(other, each) is not None]
            )
        )
        other = replace(
            other, **{field: np.full_like(getattr(other, field), data.draw(ANYTHING))}
        )
        message = aggregator.receive(
            Report.merge([*honest, other]), Costs(np.array([0.5]), np.array([0.5]))
        )
        state = aggregator.state
        assert np.isfinite(state.w).all()
        assert np.isfinite(state.best).all()
        assert 0 < state.step_size.eta < np.inf
        if state.estimates is not None:
            assert all(np.isfinite(value) for value in vars(state.estimates).values())
