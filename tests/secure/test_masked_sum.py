"""Secure aggregation in one process: dropouts in every phase, and secrets that must stay
closed.
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
from support.masking import (
    drawn_vectors,
    group_for,
    masked_round,
    members_of,
    new_masked_sum,
)


def plain_sum(vectors: dict[str, Any], names: Any) -> Any:
    return sum(
        (vectors[name] for name in names), np.zeros_like(next(iter(vectors.values())))
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dropouts_lose_only_their_vectors(data: st.DataObject) -> None:
    """Nodes drop out in any phase, as long as every group keeps its threshold."""
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
    assert (total == plain_sum(vectors, summed)).all()


def test_large_group_with_dropouts() -> None:
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
    assert len(new_masked_sum(members, 2, 1).group("node-0")) == 25
    assert (total == plain_sum(vectors, summed)).all()


@pytest.mark.parametrize("when", ["before_shares", "before_vectors", "before_opening"])
def test_nothing_opens_below_the_threshold(when: str) -> None:
    members = members_of(6)  # 4 of them are needed
    dropped: Any = {when: ["node-0", "node-3", "node-5"]}
    with pytest.raises(TooFewLeft):
        masked_round(members, drawn_vectors(members), **dropped)


def test_keys_serve_several_rounds() -> None:
    members = members_of(5)
    for number in range(1, 6):
        vectors = drawn_vectors(members, seed=number)
        dropped = [f"node-{number - 1}"]
        total, summed = masked_round(
            members, vectors, attempt=number, number=number, before_vectors=dropped
        )
        assert (total == plain_sum(vectors, summed)).all()


def test_attempts_have_different_seeds() -> None:
    """The seeds of a node whose vector is missing are opened for that attempt. No other
    attempt uses them.
    """
    members = members_of(4)
    seeds = []
    for attempt in (1, 2):
        summed = new_masked_sum(members, attempt, 3)
        keys = {name: member.signed_key for name, member in members.items()}
        for name, member in members.items():
            summed.receive_shares(name, member.join(group_for(summed, name, keys, attempt)))
        attempt_seeds = set()
        for member in members.values():
            assert member._attempt is not None
            attempt_seeds |= set(member._attempt.seeds.values())
        seeds.append(attempt_seeds)
    assert len(seeds[0]) == 6  # one for each pair
    assert not seeds[0] & seeds[1]


# Knowledge of the aggregator.


def test_masked_vectors_look_random() -> None:
    """Bytes of masked constant vectors pass a chi-square test, and the difference of two
    masked vectors has no repeated value.
    """
    members = members_of(5)
    vectors = {name: np.full(20_000, 12345, np.uint64) for name in members}
    received: list[bytes] = []
    for attempt in (1, 2):
        masked_round(members, vectors, attempt=attempt, number=attempt, seen=received)
    for data in received:
        counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
        expected = len(data) / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        # 255 degrees of freedom; a false alarm has a probability of 1e-7.
        assert 140 < chi_square < 395
    for first in range(len(received)):
        for second in range(first):
            difference = np.frombuffer(received[first], np.uint64) - np.frombuffer(
                received[second], np.uint64
            )
            assert len(np.unique(difference)) == len(difference)


def recoverable_secrets(summed: MaskedSum) -> tuple[set[str], set[str]]:
    """Nodes whose own seed, and nodes whose pair key, the aggregator can recover."""

    def recovered(kind: str) -> set[str]:
        counts = dict.fromkeys(summed.circle, 0)
        for opened in summed.opened.values():
            for name in getattr(opened, kind):
                counts[name] += 1
        return {name for name, count in counts.items() if count >= summed.threshold(name)}

    return recovered("own"), recovered("pairs")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_own_and_pair_seeds_stay_exclusive(data: st.DataObject) -> None:
    """The aggregator never recovers both kinds of seeds of a node, even if it sends each
    node different survivors: more than half of a group is needed.
    """
    members = members_of(data.draw(st.integers(3, 8)))
    summed = new_masked_sum(members, 1, 3, share=0.5)
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
            # Stored without the checks of an honest aggregator.
            summed.opened[name] = member.open(Survivors(1, (name, *others), bytes(32)))
        except PeerError:
            continue
    own, pairs = recoverable_secrets(summed)
    assert not own & pairs


def test_shares_open_for_one_neighbour() -> None:
    """A sealed share opens for one receiver and in one direction."""
    members = members_of(3)
    summed = new_masked_sum(members, 1, 3)
    keys = {name: member.signed_key for name, member in members.items()}
    shares = {
        name: member.join(group_for(summed, name, keys)) for name, member in members.items()
    }
    sealed = {
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
                Relay(1, {**sealed, "node-1": wrong}), np.zeros(3, np.uint64)
            )


# Refusals of a node.


def group_of(members: Any, **other: Any) -> Group:
    keys = tuple(
        member.signed_key for member in members.values() if member.name != "node-0"
    )
    names = tuple(sorted(members))
    fields: dict[str, Any] = {
        "round": 1,
        "attempt": 1,
        "names": names,
        "threshold": len(names),
        "weights": (1,),
    }
    fields |= {"scale": 0, "slots": 0, "headroom": 8, "tally": None, "keys": keys}
    return Group(**{**fields, **other})


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
def test_weak_groups_are_refused(other: dict[str, Any], reason: str) -> None:
    members = members_of(4)
    with pytest.raises(PeerError, match=reason):
        members["node-0"].join(group_of(members, **other))


def test_attempts_are_never_repeated() -> None:
    """A repeated attempt would use the same masks twice."""
    members = members_of(4)
    members["node-0"].join(group_of(members, attempt=5))
    for attempt in (5, 4, 0):
        with pytest.raises(PeerError, match="replayed"):
            members["node-0"].join(group_of(members, attempt=attempt))


def test_round_opens_for_one_set() -> None:
    """The difference of two sums over the same vectors could reveal one vector."""
    members = members_of(5)
    vectors = drawn_vectors(members)
    _, first = masked_round(members, vectors, attempt=1)
    # The same set may be opened again.
    total, second = masked_round(members, vectors, attempt=2)
    assert first == second == set(members)
    assert (total == plain_sum(vectors, first)).all()
    with pytest.raises(TooFewLeft):
        masked_round(members, vectors, attempt=3, before_vectors=["node-4"])
    # Another round may have another set.
    masked_round(members, vectors, attempt=4, number=2, before_vectors=["node-4"])


def test_nodes_refuse_too_few_survivors() -> None:
    members = members_of(5)
    summed = new_masked_sum(members, 1, 3)
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
    """A node with a wrong share spoils the round, and the sum is not revealed."""
    members = members_of(3)
    summed = new_masked_sum(members, 1, 3, share=1.0)
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
    # A wrong secret may have a valid length by chance. The sum is then noise, and not 0.
    assert total.any()
