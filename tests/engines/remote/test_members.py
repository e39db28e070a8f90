"""Members of a run: stable node numbers, lost memory, and the weight of claimed samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.engines.remote.members import MAX_ROUNDS_AWAY, OWN, Members, name_order


def three() -> Members[str]:
    members: Members[str] = Members()
    for name, sizes in (("a", [5]), ("b", [3, 4]), ("c", [7])):
        members.join(name, sizes)
    return members


def test_numbers_are_consecutive() -> None:
    members = three()
    assert {name: member.numbers.tolist() for name, member in members.items()} == {
        "a": [0],
        "b": [1, 2],
        "c": [3],
    }
    assert members.numbers(["c", "b"]) == (1, 2, 3)
    assert members.nodes(["a", "b"]) == 3


def test_returning_node_keeps_its_numbers() -> None:
    members = three()
    members["b"].base_round = 4
    back = members.join("b", [9, 9])
    assert (back.numbers.tolist(), back.sizes.tolist(), back.base_round) == (
        [1, 2],
        [3, 4],
        4,
    )


def test_replacement_takes_numbers_without_memory() -> None:
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
def test_lost_memory_is_reported_once(base_round: int) -> None:
    """A node without a counted round has nothing to lose."""
    members = three()
    members["a"].base_round = base_round
    members["a"].forget()
    expected = [0] if base_round else []
    assert members.any_lost(5, members) is bool(expected)
    assert members.take_lost(5, members) == expected
    assert members.take_lost(5, members) == []
    assert members["a"].base_round == 0


def test_long_absence_loses_memory() -> None:
    members = three()
    for member in members.values():
        member.base_round = 2
    away = {"a", "c"}  # all but b are connected
    assert not members.any_lost(2 + MAX_ROUNDS_AWAY, away)
    assert members.take_lost(2 + MAX_ROUNDS_AWAY, away) == []
    assert members.any_lost(3 + MAX_ROUNDS_AWAY, away)
    assert members.take_lost(3 + MAX_ROUNDS_AWAY, away) == [1, 2]
    assert [member.base_round for member in members.values()] == [2, 0, 2]


def test_snapshot_is_independent() -> None:
    members = three()
    before = members.snapshot()
    members["a"].rounds += 1
    members.join("d", [1])
    assert (before["a"].rounds, list(before)) == (0, ["a", "b", "c"])


def test_status_of_absent_node() -> None:
    member = three()["b"]
    member.missed = 2
    away, idle = member.status("b", "away", 100.0), member.status("b", "idle", 100.0)
    assert (away.numbers, away.samples, away.missed, away.last_seen) == ((1, 2), 7, 2, None)
    assert (idle.state, idle.last_seen) == ("idle", 100.0)


def test_names_sort_by_their_numbers() -> None:
    names = ["node-10", "b", "node-9", "node-2-1", "node-2"]
    assert sorted(names, key=name_order) == ["b", "node-2", "node-2-1", "node-9", "node-10"]


@given(st.lists(st.integers(1, 2**40), min_size=3, max_size=8), st.floats(0.1, 1.0))
def test_no_node_exceeds_its_share(sizes: list[int], share: float) -> None:
    """Up to rounding to whole samples. If the share is below 1/n, all nodes weigh the
    same.
    """
    members: Members[str] = Members(share=share)
    for number, size in enumerate(sizes):
        members.join(f"n{number}", [size])
    counted = [int(member.counted.sum()) for member in members.values()]
    assert all(ours <= claimed for ours, claimed in zip(counted, sizes, strict=True))
    assert max(counted) <= max(share, 1 / len(sizes)) * sum(counted) + len(sizes)
    assert all(
        ours == claimed
        for ours, claimed in zip(counted, sizes, strict=True)
        if claimed <= share * sum(counted) - 1
    )


@pytest.mark.parametrize(
    ("share", "size", "counts"),
    [(None, 150, 150), (None, 500_000, 220), (None, 2**40, 1), (0.5, 2**40, 220)],
)
def test_weight_of_claimed_samples(share: float | None, size: int, counts: int) -> None:
    """The other nodes have 100 and 120 samples. By default a node weighs at most half of
    the average. A claim of more than 10,000 times the median counts as one sample, unless
    you set a share.
    """
    members: Members[str] = Members(share=share)
    for name, each in (("a", 100), ("b", 120), ("c", size)):
        members.join(name, [each])
    assert members["c"].counted.tolist() == [counts]
    assert members["c"].oversized == (counts == 1)
    assert [members[name].counted.tolist() for name in "ab"] == [[100], [120]]


def test_reduced_weight_resets_drift() -> None:
    """The samples of the aggregator count in full."""
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
