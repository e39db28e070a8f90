"""Rules of one's own, given from Python: the same run by every engine, because they are
used at the aggregator.
"""

import pytest

from fedbudget import RoundRecord
from support.own_rules import OWN, train


def test_same_run_over_a_network() -> None:
    here, there = train(), train(engine="network")
    assert [record.tau for record in here.rounds] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 0]
    assert [(record.tau, record.reason, record.loss) for record in there.rounds] == [
        (record.tau, record.reason, record.loss) for record in here.rounds
    ]
    assert there.w.tobytes() == here.w.tobytes()


@pytest.mark.parametrize("name", sorted(OWN))
def test_each_alone_makes_a_difference(name: str) -> None:
    none = dict.fromkeys(OWN)
    assert train(**{**none, name: OWN[name]}).w.tobytes() != train(**none).w.tobytes()


def test_a_callback_ends_the_run_after_its_round() -> None:
    seen: list[int] = []

    def stop(record: RoundRecord) -> bool:
        seen.append(record.round)
        return record.round == 3

    result = train(callbacks=[stop])
    assert (result.stopped_by, seen, len(result.rounds)) == ("callback", [1, 2, 3], 3)


def test_a_callback_ends_a_run_over_a_network() -> None:
    result = train(engine="network", callbacks=[lambda record: record.round == 3])
    assert result.stopped_by == "callback"
    assert len(result.rounds) < 9


def test_a_target_ends_a_run_over_a_network() -> None:
    """Of training samples nobody but the nodes knows: the loss that is told is what they
    have reported.
    """
    result = train(engine="network", until="loss=0.45", controller=None, rounds=200)
    assert (result.stopped_by, result.until) == ("target", {"loss=0.45": True})
    assert result.loss <= 0.45
    assert result.kept_round is not None
    assert 3 <= result.kept_round < 200
