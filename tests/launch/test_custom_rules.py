"""Custom rules from Python run at the aggregator, so every engine gives the same run."""

import pytest

from fedbudget import RoundRecord
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
