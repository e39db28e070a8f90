"""Hostile reports: one node of three sends arbitrary numbers, and the run continues with
the other two.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbudget.budget.budget import Budget, Costs
from fedbudget.engines.remote.members import Members
from fedbudget.engines.remote.messages import Answer, Ready
from fedbudget.engines.remote.round import PendingRound
from fedbudget.engines.remote.wire import pack, read_ready, unpack
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import Broadcast, PeerError
from fedbudget.protocol.state import Outcome
from fedbudget.resources import within
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Metering, Reading, Usage
from support.fleets import single_node_fleets, sorted_parts
from support.hand_made import with_values
from support.methods import METHODS
from support.problems import problem

CASE = problem("softmax", seed=4)
LIMITS = {"time": 40.0, "cpu": 400.0, "energy": 4000.0}
ARBITRARY = st.floats() | st.sampled_from(
    [3.4e38, -3.4e38, 1e30, 1e14, -1e14, 9e11, 1e-30, -1.0, 0.0]
)
READINGS = {
    "time": Reading(0.1, 0.5),
    "cpu": Reading(0.1, 0.4),
    "energy": Reading(1.0, 4.0),
}


def with_any_number(answer: Answer, data: st.DataObject) -> Answer:
    """The answer with at most one field of the report and one cost replaced."""
    report = answer.report
    readings = dict(answer.costs.readings)
    present = {**report.numbers, **report.vectors}
    field = data.draw(st.sampled_from(sorted(present)))
    value = data.draw(ARBITRARY)
    with np.errstate(over="ignore"):
        report = with_values(report, **{field: np.full_like(present[field], value)})
    name = data.draw(st.sampled_from([*readings, "nothing"]))
    if name != "nothing":
        readings[name] = Reading(data.draw(ARBITRARY), data.draw(ARBITRARY))
    if data.draw(st.booleans()):
        readings.pop("cpu", None)
    return replace(answer, report=report, costs=Usage(readings))


@pytest.mark.parametrize("name", ["accelerated", "frugal"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_run_continues_within_budget(name: str, data: st.DataObject) -> None:
    meters = Meters.of(Budget(LIMITS), Metering(network=True))
    expected = Costs(np.array([0.1, 0.3, 3.0]), np.array([0.4, 0.9, 9.0]))
    aggregator = Aggregator(
        CASE.start(0),
        method=METHODS[name],
        budget=meters.budget,
        expected=expected,
        rounds=8,
    )
    features = METHODS[name].features
    fleets = single_node_fleets(CASE, sorted_parts(CASE, 3), features=features)
    members = Members[str]()
    for node in range(3):
        members.join(f"n{node}", [20])
    message: Broadcast | Outcome = aggregator.start()
    spent = np.zeros(3)
    while isinstance(message, Broadcast):
        pending: PendingRound[str] = PendingRound(message, least=1)
        counted = 0
        for node, fleet in enumerate(fleets):
            pending.ask(f"n{node}")
            answer = Answer(fleet.answer(message), Usage(READINGS))
            if node == 2:
                answer = with_any_number(answer, data)
            try:
                ready = read_ready(unpack(pack(Ready(answer.costs)).message))
                costs = within(ready.costs, 0.6, message.steps)
            except PeerError:
                pending.withdraw(f"n{node}")  # the server drops this peer
                continue
            pending.receive(f"n{node}", replace(answer, costs=costs))
            counted += node < 2
        collected = pending.close(members, {})
        assert counted == 2
        assert {0, 1} <= {int(answer.nodes[0]) for answer in collected.answers}
        own = {"time": 0.6, "cpu": 0.1}
        usage = collected.usage(message.steps, own, 1000)[0]
        message = aggregator.receive(
            collected.reports, meters.read(usage), peers=collected.peers
        )
        now: Any = aggregator.ledger.spent
        assert (now >= spent).all()
        assert np.isfinite(now).all()
        spent = now
        assert np.isfinite(aggregator.state.w).all()
    assert spent[0] <= LIMITS["time"]
