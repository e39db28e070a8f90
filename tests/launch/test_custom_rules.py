"""Custom rules from Python run at the aggregator, so every engine gives the same run."""

from dataclasses import dataclass
from typing import Any

import pytest

import fedbudget
from fedbudget import ControlInputs, Decision, RoundRecord
from support.own_rules import OWN, train


def test_network_engine_gives_same_run() -> None:
    here = train()
    there = train(engine="network")
    assert [record.tau for record in here.rounds] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 0]
    assert [(record.tau, record.reason, record.loss) for record in there.rounds] == [
        (record.tau, record.reason, record.loss) for record in here.rounds
    ]
    assert there.w.tobytes() == here.w.tobytes()


@pytest.mark.parametrize("name", sorted(OWN))
def test_each_rule_changes_the_run(name: str) -> None:
    none = dict.fromkeys(OWN)
    assert train(**{**none, name: OWN[name]}).w.tobytes() != train(**none).w.tobytes()


@dataclass(frozen=True)
class UpToTwenty:
    """Begins with 7 updates and doubles them, up to 20."""

    estimates: bool = False

    def first(self) -> Decision:
        return Decision(7, "seven to begin with")

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return Decision(min(20, 2 * previous.tau), "at most 20")


class CappedAtTwenty(UpToTwenty):
    """The same, and the budget may raise τ to 20."""

    tau_max = 20


@pytest.mark.parametrize("seconds", [2.0, 2.5, 3.0, 3.5])
@pytest.mark.parametrize("controller", [UpToTwenty(), CappedAtTwenty()], ids=["no", "20"])
def test_first_and_cap_of_controller_hold(controller: Any, seconds: float) -> None:
    """No budget raises τ above the cap, not even for the last round. Only a controller with
    `tau_max` allows a short budget to lengthen its rounds, the first included.
    """
    result = fedbudget.train(
        dataset="digits",
        costs="simulated",
        budget=f"time={seconds}s",
        controller=controller,
    )
    taus = [record.tau for record in result.rounds if record.tau]
    assert taus[0] == 7 or (isinstance(controller, CappedAtTwenty) and taus[0] > 7)
    assert max(taus) <= 20


def test_callback_stops_run() -> None:
    seen: list[int] = []

    def stop(record: RoundRecord) -> bool:
        seen.append(record.round)
        return record.round == 3

    result = train(callbacks=[stop])
    assert result.stopped_by == "callback"
    assert seen == [1, 2, 3]
    assert len(result.rounds) == 3


def test_callback_stops_network_run() -> None:
    result = train(engine="network", callbacks=[lambda record: record.round == 3])
    assert result.stopped_by == "callback"
    assert len(result.rounds) < 9


def test_target_stops_network_run() -> None:
    """Only nodes hold training samples, so the loss comes from their reports."""
    result = train(engine="network", until="loss=0.45", controller=None, rounds=200)
    assert (result.stopped_by, result.until) == ("target", {"loss=0.45": True})
    assert result.loss <= 0.45
    assert result.kept_round is not None
    assert 3 <= result.kept_round < 200
