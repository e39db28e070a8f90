"""Masked sums in one process: nodes that drop out in every phase, and what must never be
opened.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.protocol.messages import PeerError
from fedbudget.secure import shamir
from fedbudget.secure.graph import needed
from fedbudget.secure.identity import UntrustedKey
from fedbudget.secure.masked_sum import MaskedSum, TooFewLeft
from fedbudget.secure.messages import Group, Relay, Survivors
from support.masking import begun, drawn_vectors, group_for, masked_round, members_of


def total_of(vectors: dict[str, Any], names: Any) -> Any:
    return sum(
        (vectors[name] for name in names), np.zeros_like(next(iter(vectors.values())))
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_who_drops_out_costs_nothing_but_its_vector(data: st.DataObject) -> None:
    """In any phase, or in several, as long as the threshold of every group stays."""
    count = data.draw(st.integers(3, 9))
    share = data.draw(st.sampled_from([0.5, 2 / 3, 0.9]))
    members = members_of(count)
    names = list(members)
    spare = count - needed(count, share)
    dropping = data.draw(st.lists(st.sampled_from(names), max_size=spare, unique=True))
    phases = [data.draw(st.integers(0, 2)) for _ in dropping]
    phase = dict(zip(dropping, phases, strict=True))
    vectors = drawn_vectors(names)
    total, summed = masked_round(
        members,
        vectors,
        share=share,
        before_shares=[name for name in dropping if phase[name] == 0],
        before_vectors=[name for name in dropping if phase[name] == 1],
        before_opening=[name for name in dropping if phase[name] == 2],
    )
    assert summed == {name for name in names if phase.get(name, 2) == 2}
    assert (total == total_of(vectors, summed)).all()


def test_many_with_few_neighbours_and_a_quarter_gone() -> None:
    members = members_of(60)
    names = list(members)
    vectors = drawn_vectors(names)
    total, summed = masked_round(
        members,
        vectors,
        share=0.5,
        before_shares=names[3:60:12],
        before_vectors=names[5:60:12],
        before_opening=names[7:60:12],
    )
    assert len(summed) == 50
    assert len(begun(members, 2, 1).group("node-0")) == 25
    assert (total == total_of(vectors, summed)).all()


@pytest.mark.parametrize("when", ["before_shares", "before_vectors", "before_opening"])
def test_below_the_threshold_nothing_is_opened(when: str) -> None:
    members = members_of(6)  # of which 4 are needed
    gone: Any = {when: ["node-0", "node-3", "node-5"]}
    with pytest.raises(TooFewLeft):
        masked_round(members, drawn_vectors(members), **gone)


def test_rounds_follow_each_other_with_the_same_keys() -> None:
    members = members_of(5)
    for number in range(1, 6):
        vectors = drawn_vectors(members, seed=number)
        gone = [f"node-{number - 1}"]
        total, summed = masked_round(
            members, vectors, attempt=number, number=number, before_vectors=gone
        )
        assert (total == total_of(vectors, summed)).all()


def test_what_was_opened_in_a_round_opens_no_other() -> None:
    """The seeds of one whose vector never came become known for that attempt. They are
    those of no other.
    """
    members = members_of(4)
    seeds = []
    for attempt in (1, 2):
        summed = begun(members, attempt, 3)
        keys = {name: member.signed_key for name, member in members.items()}
        for name, member in members.items():
            summed.receive_shares(name, member.join(group_for(summed, name, keys, attempt)))
        drawn = set()
        for member in members.values():
            assert member._attempt is not None
            drawn |= set(member._attempt.seeds.values())
        seeds.append(drawn)
    assert len(seeds[0]) == 6  # of as many pairs
    assert not seeds[0] & seeds[1]


# What an aggregator has.


def test_all_that_is_received_looks_like_chance() -> None:
    """Chi-square over bytes, of vectors that are all alike; and the same vector masked
    twice has nothing in common.
    """
    members = members_of(5)
    vectors = {name: np.full(20_000, 12345, np.uint64) for name in members}
    seen: list[bytes] = []
    for attempt in (1, 2):
        masked_round(members, vectors, attempt=attempt, number=attempt, seen=seen)
    for data in seen:
        counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
        expected = len(data) / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert (
            140 < chi_square < 395
        )  # of 255 degrees of freedom; beyond by chance once in ten million
    for first in range(len(seen)):
        for second in range(first):
            difference = np.frombuffer(seen[first], np.uint64) - np.frombuffer(
                seen[second], np.uint64
            )
            assert len(np.unique(difference)) == len(difference)


def opened_so_far(summed: MaskedSum) -> tuple[set[str], set[str]]:
    """Whose own seed, and whose key to seeds with others, an aggregator could put together
    from all that it got.
    """

    def known(kind: str) -> set[str]:
        counts = dict.fromkeys(summed.circle, 0)
        for opened in summed.opened.values():
            for name in getattr(opened, kind):
                counts[name] += 1
        return {name for name, count in counts.items() if count >= summed.threshold(name)}

    return known("own"), known("pairs")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nobodys_own_seed_and_pairs_are_both_opened(data: st.DataObject) -> None:
    """Also where the aggregator tells every node other survivors, as it likes: more than
    half of a group are needed.
    """
    members = members_of(data.draw(st.integers(3, 8)))
    summed = begun(members, 1, 3, share=0.5)
    keys = {name: member.signed_key for name, member in members.items()}
    for name, member in members.items():
        summed.receive_shares(name, member.join(group_for(summed, name, keys)))
    for name, relay in summed.relay().items():
        members[name].mask(relay, np.zeros(3, np.uint64))
    for name, member in members.items():
        others = data.draw(
            st.sets(st.sampled_from([other for other in members if other != name]))
        )
        try:
            summed.opened[name] = member.open(
                Survivors(1, (name, *others), bytes(32))
            )  # as it comes, unchecked
        except PeerError:
            continue
    own, pairs = opened_so_far(summed)
    assert not own & pairs


def test_shares_are_read_by_nobody_else() -> None:
    """A share that was sealed for one neighbour is opened by no other, and not in another
    direction.
    """
    members = members_of(3)
    summed = begun(members, 1, 3)
    keys = {name: member.signed_key for name, member in members.items()}
    shares = {
        name: member.join(group_for(summed, name, keys)) for name, member in members.items()
    }
    mine = {
        "node-1": shares["node-1"].shares["node-0"],
        "node-2": shares["node-2"].shares["node-0"],
    }
    for wrong in (
        shares["node-1"].shares["node-2"],
        shares["node-0"].shares["node-1"],
        bytes(50),
    ):
        with pytest.raises(UntrustedKey, match="node-1's shares were not sent by node-1"):
            members["node-0"].mask(
                Relay(1, {**mine, "node-1": wrong}), np.zeros(3, np.uint64)
            )


# What a node refuses.


def group_of(members: Any, **other: Any) -> Group:
    keys = tuple(
        member.signed_key for member in members.values() if member.name != "node-0"
    )
    names = tuple(sorted(members))
    known: dict[str, Any] = {
        "round": 1,
        "attempt": 1,
        "names": names,
        "threshold": len(names),
        "weights": (1,),
    }
    known |= {"scale": 0, "slots": 0, "headroom": 8, "tally": None, "keys": keys}
    return Group(**{**known, **other})


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"names": ("node-0", "node-1"), "threshold": 2}, "fewer than 3"),
        ({"threshold": 2}, "requires at least"),
        ({"threshold": 9}, "requires at least"),
        ({"names": ("node-1", "node-2", "node-3")}, "without this node"),
        ({"names": ("node-0", "node-1", "node-1", "node-2")}, "with a duplicate"),
        (
            {"names": ("node-0", "node-1", "node-2", "stranger")},
            "stranger, whose key was never sent",
        ),
    ],
)
def test_a_group_that_would_open_too_easily_is_refused(
    other: dict[str, Any], reason: str
) -> None:
    members = members_of(4)
    with pytest.raises(PeerError, match=reason):
        members["node-0"].join(group_of(members, **other))


def test_an_attempt_is_never_made_again() -> None:
    """Or the same masks would be used twice."""
    members = members_of(4)
    members["node-0"].join(group_of(members, attempt=5))
    for attempt in (5, 4, 0):
        with pytest.raises(PeerError, match="replayed"):
            members["node-0"].join(group_of(members, attempt=attempt))


def test_a_round_is_opened_for_one_set_only() -> None:
    """The difference of two sums over the same vectors would be one node's."""
    members = members_of(5)
    vectors = drawn_vectors(members)
    _, first = masked_round(members, vectors, attempt=1)
    total, second = masked_round(
        members, vectors, attempt=2
    )  # with the same set it can be made again
    assert first == second == set(members)
    assert (total == total_of(vectors, first)).all()
    with pytest.raises(TooFewLeft):
        masked_round(members, vectors, attempt=3, before_vectors=["node-4"])
    masked_round(
        members, vectors, attempt=4, number=2, before_vectors=["node-4"]
    )  # another round


def test_too_few_survivors_are_refused_by_nodes() -> None:
    members = members_of(5)
    summed = begun(members, 1, 3)
    keys = {name: member.signed_key for name, member in members.items()}
    for name, member in members.items():
        summed.receive_shares(name, member.join(group_for(summed, name, keys)))
    relay = summed.relay()["node-0"]
    with pytest.raises(PeerError, match=r"of a group .* needed"):
        members["node-0"].mask(
            Relay(1, dict(list(relay.shares.items())[:2])), np.zeros(3, np.uint64)
        )
    members["node-0"].mask(relay, np.zeros(3, np.uint64))
    with pytest.raises(PeerError, match=r"of a group .* needed"):
        members["node-0"].open(Survivors(1, ("node-0", "node-1", "node-2"), bytes(32)))
    with pytest.raises(PeerError, match="without this node"):
        members["node-0"].open(
            Survivors(1, ("node-1", "node-2", "node-3", "node-4"), bytes(32))
        )


def test_wrong_shares_open_nothing() -> None:
    """A node that lies about a share spoils a round, and is not taken for right."""
    members = members_of(3)
    summed = begun(members, 1, 3, share=1.0)
    keys = {name: member.signed_key for name, member in members.items()}
    for name, member in members.items():
        summed.receive_shares(name, member.join(group_for(summed, name, keys)))
    for name, relay in summed.relay().items():
        vector = np.zeros(3, np.uint64)
        members[name].mask(relay, vector)
        summed.receive_vector(name, vector)
    for name, survivors in summed.survivors().items():
        opened = members[name].open(survivors)
        if name == "node-2":
            largest = (shamir.PRIME - 1).to_bytes(shamir.SHARE, "big")
            opened = type(opened)(
                opened.attempt, dict.fromkeys(opened.own, largest), opened.pairs
            )
        summed.receive_opened(name, opened)
    try:
        total = summed.open()
    except TooFewLeft:
        return
    assert (
        total.any()
    )  # by chance a wrong secret is still one of 16 bytes: then the sum is noise, and not 0
