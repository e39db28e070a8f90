"""An aggregator and fleets of which only the state is left between rounds go on to the same
bits.
"""

import pickle
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget
from fedbudget.budget.control import FixedTau, Reason
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import FixedStep
from fedbudget.errors import UserError
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import LocalError
from fedbudget.protocol.method import Method
from fedbudget.protocol.state import Phase, Quantize
from support.hand_made import ONE, go_on, make, report
from support.methods import (
    METHODS,
    bits,
    new_aggregator,
    nodes,
    one_round,
    resume,
    simulated_time,
)
from support.problems import MODELS

METHOD = Method(FixedTau(3), FixedStep(0.1), spending=PaperSpending())  # of `make`


def halfway(new: Float32, old: Float32) -> Float32:
    """A w that 16-bit differences leave."""
    return np.asarray(old + (new - old).astype(np.float16), np.float32)


def _reborn(old: Fleet, new: Fleet) -> Fleet:
    """The new one with the old one's memory, as another process would have it; as it is
    before the first round.
    """
    with suppress(LocalError):
        new.recall(pickle.loads(pickle.dumps(old.memory())))
    return new


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("quantize", [None, halfway])
@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "frugal") for name in MODELS), *(("svm", how) for how in METHODS)],
)
def test_resuming_after_every_round_changes_no_bit(
    name: str, method: str, batch: int | None, quantize: Quantize | None
) -> None:
    def run(*, resumed: bool) -> list[object]:
        aggregator, fleets, time = (
            new_aggregator(name, method, quantize=quantize),
            nodes(name, batch),
            simulated_time(),
        )
        aggregator.start()
        rounds: list[object] = []
        while aggregator.pending is not None:
            if resumed:
                before, aggregator = (
                    aggregator.pending,
                    resume(aggregator.state, method, quantize=quantize),
                )
                assert bits(aggregator.pending) == bits(before)
                fleets = [
                    _reborn(fleet, new)
                    for fleet, new in zip(fleets, nodes(name, batch), strict=True)
                ]
            round_ = one_round(aggregator, fleets, time)
            rounds.append(bits(round_))
            if method == "astray" and round_.record is not None:
                reasons.add(round_.record.reason)
        assert isinstance(round_.answer, Outcome)
        ended = resume(aggregator.state, method, quantize=quantize)
        assert ended.state.phase is Phase.DONE
        assert bits(ended.outcome) == bits(round_.answer)
        return rounds

    reasons: set[str] = set()
    undisturbed = run(resumed=False)
    assert len(undisturbed) > 5
    assert (method != "astray") or Reason.RECOVERY in reasons
    assert run(resumed=True) == undisturbed


def test_what_comes_after_does_not_change_it() -> None:
    aggregator, fleets, time = (
        new_aggregator("svm", "frugal"),
        nodes("svm", 5),
        simulated_time(),
    )
    aggregator.start()
    for _ in range(3):
        one_round(aggregator, fleets, time)
    state = aggregator.state
    before = bits(state)
    for _ in range(3):
        one_round(aggregator, fleets, time)
    assert bits(state) == before
    assert bits(aggregator.state) != before


def test_what_is_pending_is_what_was_said_last_until_the_run_ends() -> None:
    aggregator = make()
    pending = [aggregator.pending]
    broadcast = aggregator.start()
    pending.append(aggregator.pending)
    again = go_on(aggregator.receive(report(broadcast, 1), ONE))
    pending.append(aggregator.pending)
    assert aggregator.outcome is None
    outcome = aggregator.interrupt()
    pending.append(aggregator.pending)
    assert [bits(each) for each in pending] == [None, bits(broadcast), bits(again), None]
    assert bits(aggregator.outcome) == bits(outcome)


class TestWhatItWasNotTakenFrom:
    def test_another_budget_is_refused(self) -> None:
        aggregator = make()
        aggregator.start()
        with pytest.raises(
            UserError, match="a budget of time=1000s, not of time=10s, bytes=10B"
        ):
            Aggregator.resume(
                aggregator.state, method=METHOD, budget=Budget({"time": 10, "bytes": 10})
            )

    @pytest.mark.parametrize("correct", [False, True])
    def test_drift_that_is_corrected_or_not(self, correct: bool) -> None:
        aggregator = make(correct_drift=not correct)
        aggregator.start()
        with pytest.raises(UserError, match="and must resume with(out)? it"):
            Aggregator.resume(
                aggregator.state,
                method=replace(METHOD, correct_drift=correct),
                budget=Budget({"time": 10}),
            )

    def test_another_request_is_refused(self) -> None:
        aggregator = make()
        aggregator.start()
        with pytest.raises(UserError, match="began with other requests to its nodes"):
            Aggregator.resume(
                aggregator.state,
                method=replace(METHOD, delta="parameters"),
                budget=Budget({"time": 10}),
            )


def test_more_may_have_been_spent_than_it_says() -> None:
    """As where a round was broken off: what it cost is charged, and the round is made
    again.
    """
    aggregator = make(20)
    go_on(aggregator.receive(report(aggregator.start(), 1), ONE))
    state = replace(
        aggregator.state, ledger=aggregator.ledger.charge_extra(np.array([7.0]))
    )
    again = Aggregator.resume(state, method=METHOD, budget=Budget({"time": 20}))
    assert again.pending is not None
    third = go_on(again.receive(report(again.pending, 1), ONE))
    assert again.ledger.spent.tolist() == [15]
    assert (third.tau, third.stop) == (2, True)  # (20 - 15 - 1 - 2) / 1


def test_a_fleet_has_something_to_remember_after_a_round_and_recalls_only_what_is_its_own() -> (
    None
):
    first, second, _ = nodes("svm", None)
    with pytest.raises(LocalError, match="no memory before its first round"):
        first.memory()
    broadcast = new_aggregator("svm", "fixed").start()
    first.answer(broadcast)
    memory = first.memory()
    with pytest.raises(LocalError, match="the memory has 2 nodes"):
        second.recall(replace(memory, losses=np.zeros(2)))
    assert bits(second.answer(broadcast)) == bits(
        nodes("svm", None)[1].answer(broadcast)
    )  # refused, it has changed nothing
