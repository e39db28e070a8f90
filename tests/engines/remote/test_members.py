"""Who takes part: numbers that stay with a node, and what is lost when one goes or forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.engines.remote.members import MAX_ROUNDS_AWAY, OWN, Members, name_order


def three() -> Members[str]:
    members: Members[str] = Members()
    for name, sizes in (("a", [5]), ("b", [3, 4]), ("c", [7])):
        members.join(name, sizes)
    return members


def test_numbers_follow_each_other() -> None:
    members = three()
    assert {name: member.numbers.tolist() for name, member in members.items()} == {
        "a": [0],
        "b": [1, 2],
        "c": [3],
    }
    assert members.numbers(["c", "b"]) == (1, 2, 3)
    assert members.nodes(["a", "b"]) == 3


def test_one_that_is_back_keeps_its_numbers() -> None:
    members = three()
    members["b"].base_round = 4
    back = members.join("b", [9, 9])
    assert (back.numbers.tolist(), back.sizes.tolist(), back.base_round) == (
        [1, 2],
        [3, 4],
        4,
    )


def test_another_key_takes_the_numbers_and_no_memory() -> None:
    members = three()
    members["b"].base_round, members["b"].rounds = 4, 3
    new = members.replace("b", "d", [6, 6])
    assert (new.numbers.tolist(), new.sizes.tolist(), new.base_round, new.rounds) == (
        [1, 2],
        [3, 4],
        0,
        3,
    )
    assert "b" not in members
    assert members.take_lost(5, {"a", "c", "d"}) == [1, 2]
    assert members.join("e", [1]).numbers.tolist() == [4]


@pytest.mark.parametrize("base_round", [0, 3])
def test_what_was_known_is_lost_once(base_round: int) -> None:
    """A node that was in no round has nothing to lose."""
    members = three()
    members["a"].base_round = base_round
    members["a"].forget()
    expected = [0] if base_round else []
    assert members.any_lost(5, members) is bool(expected)
    assert members.take_lost(5, members) == expected
    assert members.take_lost(5, members) == []
    assert members["a"].base_round == 0


def test_only_who_is_away_for_long_is_given_up() -> None:
    members = three()
    for member in members.values():
        member.base_round = 2
    away = {"a", "c"}  # all but b are connected
    assert not members.any_lost(2 + MAX_ROUNDS_AWAY, away)
    assert members.take_lost(2 + MAX_ROUNDS_AWAY, away) == []
    assert members.any_lost(3 + MAX_ROUNDS_AWAY, away)
    assert members.take_lost(3 + MAX_ROUNDS_AWAY, away) == [1, 2]
    assert [member.base_round for member in members.values()] == [2, 0, 2]


def test_a_snapshot_does_not_change() -> None:
    members = three()
    before = members.snapshot()
    members["a"].rounds += 1
    members.join("d", [1])
    assert (before["a"].rounds, list(before)) == (0, ["a", "b", "c"])


def test_status_of_one_that_is_away() -> None:
    member = three()["b"]
    member.missed = 2
    away, idle = member.status("b", "away", 100.0), member.status("b", "idle", 100.0)
    assert (away.numbers, away.samples, away.missed, away.last_seen) == ((1, 2), 7, 2, None)
    assert (idle.state, idle.last_seen) == ("idle", 100.0)


def test_names_are_ordered_by_their_numbers() -> None:
    names = ["node-10", "b", "node-9", "node-2-1", "node-2"]
    assert sorted(names, key=name_order) == ["b", "node-2", "node-2-1", "node-9", "node-10"]


@given(st.lists(st.integers(1, 2**40), min_size=3, max_size=8), st.floats(0.1, 1.0))
def test_none_has_more_than_its_share(sizes: list[int], share: float) -> None:
    """Where the share is less than one of so many, all count the same; rounding down to
    whole samples aside.
    """
    members: Members[str] = Members(share=share)
    for number, size in enumerate(sizes):
        members.join(f"n{number}", [size])
    counted = [int(member.counted.sum()) for member in members.values()]
    assert all(ours <= told for ours, told in zip(counted, sizes, strict=True))
    assert max(counted) <= max(share, 1 / len(sizes)) * sum(counted) + len(sizes)
    assert all(
        ours == told
        for ours, told in zip(counted, sizes, strict=True)
        if told <= share * sum(counted) - 1
    )


@pytest.mark.parametrize(
    ("share", "size", "counts"),
    [(None, 150, 150), (None, 500_000, 220), (None, 2**40, 1), (0.5, 2**40, 220)],
)
def test_what_a_claim_counts_for(share: float | None, size: int, counts: int) -> None:
    """Half of the average, beside nodes of 100 and 120 samples; beyond 10,000 times what
    most have, one sample, unless a user has said what share one may have."""
    members: Members[str] = Members(share=share)
    for name, each in (("a", 100), ("b", 120), ("c", size)):
        members.join(name, [each])
    assert members["c"].counted.tolist() == [counts]
    assert members["c"].oversized == (counts == 1)
    assert [members[name].counted.tolist() for name in "ab"] == [[100], [120]]


def test_who_counts_for_less_than_before_has_to_learn_drift_anew() -> None:
    """The aggregator's own samples count in full."""
    members: Members[str] = Members(share=0.5)
    members.join(OWN, [10_000])
    for name, size in (("a", 10), ("b", 900)):
        members.join(name, [size]).base_round = 3
    members.join("c", [40])
    assert [int(members[name].counted[0]) for name in (OWN, "a", "b", "c")] == [
        10_000,
        10,
        50,
        40,
    ]
    assert members.take_lost(4, {"a", "b", "c"}) == [2]
