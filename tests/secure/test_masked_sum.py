"""Secure aggregation in one process: dropouts in every phase, and secrets that must stay
closed.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.protocol.messages import PeerError
from fedbudget.secure import member as member_module
from fedbudget.secure import shamir
from fedbudget.secure.graph import needed, tolerated
from fedbudget.secure.identity import UntrustedKey
from fedbudget.secure.masked_sum import MaskedSum, MasksRemain, TooFewLeft
from fedbudget.secure.member import MaskingMember, list_digest
from fedbudget.secure.messages import Confirmations, Group, Relay, Survivors
from support.masking import (
    drawn_vectors,
    group_for,
    join,
    masked_round,
    members_of,
    new_masked_sum,
    open_sum,
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
        join(members, new_masked_sum(members, attempt, 3), attempt)
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


def masked_by(members: dict[str, MaskingMember], summed: MaskedSum) -> None:
    """Make all members mask a vector of zeros."""
    for name, relay in summed.relay().items():
        summed.receive_vector(name, members[name].mask(relay, np.zeros(3, np.uint64)))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_own_and_pair_seeds_stay_exclusive(data: st.DataObject) -> None:
    """The aggregator never recovers both kinds of seeds of a node, even if it sends each
    node another list of survivors, and c members collude with it.
    """
    members = members_of(data.draw(st.integers(3, 9)))
    names = list(members)
    share = data.draw(st.sampled_from([0.5, 2 / 3, 0.8]))
    summed = new_masked_sum(members, 1, 3, share)
    threshold = summed.threshold(names[0])
    colluders = set(names[: tolerated(len(names), threshold)])
    join(members, summed)
    masked_by(members, summed)
    lists = [
        tuple(sorted(data.draw(st.sets(st.integers(0, len(names) - 1), max_size=3))))
        for _ in range(2)
    ]
    confirmed: dict[str, Any] = {}
    seen = {name: data.draw(st.sampled_from(lists)) for name in names}
    for name, member in members.items():
        with suppress(PeerError):
            confirmed[name] = member.confirm(Survivors(1, seen[name])).proofs
    own = dict.fromkeys(names, len(colluders))
    pairs = dict.fromkeys(names, len(colluders))
    for name in confirmed.keys() - colluders:
        # Colluders confirm any list, with the keys that they have.
        proofs = {
            other: each[name]
            for other, each in confirmed.items()
            if name in each and seen[other] == seen[name]
        }
        for other in colluders - proofs.keys() - {names[at] for at in seen[name]}:
            attempt = members[other]._attempt
            assert attempt is not None
            attempt.list = list_digest(Survivors(1, seen[name]))
            proofs[other] = members[other]._pair(name).proof(attempt, other)
        try:
            opened = members[name].open(Confirmations(1, proofs))
        except PeerError:
            continue
        for owner in opened.own:
            own[owner] += 1
        for owner in opened.pairs:
            pairs[owner] += 1
    for name in names:
        assert own[name] < threshold or pairs[name] < threshold


def test_shares_need_confirmed_survivors() -> None:
    """A node opens nothing before t members of its group have the same list."""
    members = members_of(5, threshold=2 / 3)
    summed = new_masked_sum(members, 1, 3)
    join(members, summed)
    masked_by(members, summed)
    everyone = Survivors(1, ())
    proofs = {
        name: members[name].confirm(everyone).proofs["node-0"]
        for name in ("node-1", "node-2")
    }
    other = members["node-3"].confirm(Survivors(1, (4,))).proofs["node-0"]
    with pytest.raises(PeerError, match="after its survivors were confirmed"):
        members["node-0"].open(Confirmations(1, proofs))
    members["node-0"].confirm(everyone)
    with pytest.raises(PeerError, match="3 of a group confirm the survivors, 4 needed"):
        members["node-0"].open(Confirmations(1, proofs))
    for wrong in (other, bytes(16), proofs["node-1"]):
        with pytest.raises(PeerError, match="node-3 has not confirmed these survivors"):
            members["node-0"].open(Confirmations(1, {**proofs, "node-3": wrong}))
    with pytest.raises(PeerError, match="a second list of survivors"):
        members["node-0"].confirm(Survivors(1, (4,)))


@pytest.mark.parametrize("odd", ["node-0", "node-4"])
def test_other_contents_open_nothing(odd: str) -> None:
    """One node has received another model: its shares do not fit those of others."""
    members = members_of(5)
    summed = new_masked_sum(members, 1, 3)
    join(members, summed, contents=dict.fromkeys(members, b"same") | {odd: b"other"})
    for name, relay in summed.relay().items():
        with pytest.raises(UntrustedKey, match="another task, model, state or group"):
            members[name].mask(relay, np.zeros(3, np.uint64))


def test_remaining_masks_are_noticed() -> None:
    """A node masks with another seed: the aggregator refuses the noise that it opens."""
    members = members_of(4)
    summed = new_masked_sum(members, 1, 3)
    join(members, summed)
    attempt = members["node-2"]._attempt
    assert attempt is not None
    attempt.seeds = {**attempt.seeds, "node-0": bytes(16)}
    masked_by(members, summed)
    with pytest.raises(MasksRemain, match="the masks do not cancel"):
        open_sum(members, summed)


def test_shares_open_for_one_neighbour() -> None:
    """A sealed share opens for one receiver and in one direction."""
    members = members_of(3)
    summed = new_masked_sum(members, 1, 3)
    join(members, summed)
    shares = summed.sent
    sealed = {
        "node-1": shares["node-1"].shares["node-0"],
        "node-2": shares["node-2"].shares["node-0"],
    }
    for wrong in (
        shares["node-1"].shares["node-2"],
        shares["node-0"].shares["node-1"],
        bytes(50),
    ):
        with pytest.raises(UntrustedKey, match="node-1's shares do not fit"):
            members["node-0"].mask(
                Relay(1, {**sealed, "node-1": wrong}), np.zeros(3, np.uint64)
            )


# Refusals of a node.


def group_of(members: Any, **other: Any) -> Group:
    keys = tuple(
        member.signed_key for member in members.values() if member.name != "node-0"
    )
    fields: dict[str, Any] = {"round": 1, "attempt": 1, "ring": tuple(sorted(members))}
    fields |= {"tally": None, "keys": keys}
    return Group(**{**fields, **other})


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"ring": ("node-0", "node-1", "node-2")}, "a group of 3; this node requires 4"),
        ({"ring": ("node-1", "node-2", "node-3", "x")}, "without this node"),
        ({"ring": ("node-0", "node-1", "node-1", "node-2")}, "with a duplicate"),
        ({"sharers": 4}, "noise of 4 nodes in a group of 4"),
        (
            {"ring": ("node-0", "node-1", "node-2", "stranger")},
            "stranger, whose key was never sent",
        ),
    ],
)
def test_weak_groups_are_refused(other: dict[str, Any], reason: str) -> None:
    members = members_of(4)
    members["node-0"].least = 4
    with pytest.raises(PeerError, match=reason):
        members["node-0"].join(group_of(members, **other), 0.5, b"")


def test_groups_of_two_are_refused() -> None:
    members = members_of(4)
    with pytest.raises(PeerError, match="a group of 2; this node requires 3"):
        members["node-0"].join(group_of(members, ring=("node-0", "node-1")), 0.5, b"")


def test_low_threshold_is_refused() -> None:
    members = members_of(4, threshold=2 / 3)
    with pytest.raises(PeerError, match=r"threshold of 0.6; this node requires 0.667"):
        members["node-0"].join(group_of(members), 0.6, b"")


def test_attempts_are_never_repeated() -> None:
    """A repeated attempt would use the same masks twice."""
    members = members_of(4)
    members["node-0"].join(group_of(members, attempt=5), 0.5, b"")
    for attempt in (5, 4, 0):
        with pytest.raises(PeerError, match="replayed"):
            members["node-0"].join(group_of(members, attempt=attempt), 0.5, b"")


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
    # So may it in another order: an aggregator that has crashed may choose another one.
    turned = dict(reversed(members.items()))
    assert masked_round(turned, vectors, attempt=4)[1] == first
    # Another round may have another set.
    masked_round(members, vectors, attempt=5, number=2, before_vectors=["node-4"])


def test_same_contents_open_for_one_set() -> None:
    """The same model under another number of a round, with and without one node."""
    members = members_of(5)
    contents = dict.fromkeys(members, b"the same w")
    for number, absent in ((1, []), (2, []), (3, ["node-4"])):
        summed = new_masked_sum(members, number, 3)
        join(members, summed, number, absent, contents)
        masked_by(members, summed)
        if absent:
            with pytest.raises(TooFewLeft):
                open_sum(members, summed)
            assert summed.declined == summed.summed
        else:
            assert not open_sum(members, summed).any()


def test_forgotten_rounds_stay_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "_REMEMBERED", 3)
    members = members_of(3)
    vectors = drawn_vectors(members)
    for number in range(1, 8):
        masked_round(members, vectors, attempt=number, number=number)
    assert len(members["node-0"]._opened) == 6
    with pytest.raises(TooFewLeft):
        masked_round(members, vectors, attempt=8, number=1)


def test_nodes_refuse_too_few_survivors() -> None:
    members = members_of(5)
    summed = new_masked_sum(members, 1, 3)
    join(members, summed)
    relay = summed.relay()["node-0"]
    with pytest.raises(PeerError, match=r"of a group .* needed"):
        members["node-0"].mask(
            Relay(1, dict(list(relay.shares.items())[:2])), np.zeros(3, np.uint64)
        )
    members["node-0"].mask(relay, np.zeros(3, np.uint64))
    with pytest.raises(PeerError, match="3 of a group are in the sum, 4 needed"):
        members["node-0"].confirm(Survivors(1, (3, 4)))
    with pytest.raises(PeerError, match="without this node"):
        members["node-0"].confirm(Survivors(1, (0,)))
    with pytest.raises(PeerError, match="survivors outside the group"):
        members["node-0"].confirm(Survivors(1, (7,)))


def test_sum_covers_the_noise_paid_for() -> None:
    """With m noise shares, m + 1 vectors must be in the sum."""
    members = members_of(5)
    summed = new_masked_sum(members, 1, 3)
    with_sharers(members, summed, 4)
    with pytest.raises(PeerError, match="4 members are in the sum, 5 needed"):
        members["node-0"].confirm(Survivors(1, (4,)))
    assert members["node-0"].confirm(Survivors(1, ())).proofs


@pytest.mark.parametrize("colluding", [1, 2, 3])
def test_colluding_nodes_reduce_noise_by_a_bound(colluding: int) -> None:
    """c colluding nodes raise the cost of a sum over t or more nodes by (t-1)/(t-c) at
    most, however an aggregator divides the noise and whichever nodes it leaves out.
    """
    costs = []
    for sharers in range(1, 5):
        members = members_of(5)
        summed = new_masked_sum(members, 1, 3)
        with_sharers(members, summed, sharers)
        for absent in ((3, 4), (4,), ()):
            with suppress(PeerError):
                members["node-0"].confirm(Survivors(1, absent))
                costs.append(sharers / (5 - len(absent) - colluding))
                break
    fewest = needed(5, 2 / 3)
    assert len(costs) == 4
    assert max(costs) == (fewest - 1) / (fewest - colluding)


def with_sharers(
    members: dict[str, MaskingMember], summed: MaskedSum, sharers: int
) -> None:
    """Begin an attempt in which each node masks, with the noise divided by `sharers`."""
    keys = {name: member.signed_key for name, member in members.items()}
    for name, member in members.items():
        group = replace(group_for(summed, name, keys), sharers=sharers)
        summed.receive_shares(name, member.join(group, 2 / 3, b""))
    masked_by(members, summed)


@pytest.mark.parametrize("secret", ["own", "pairs"])
def test_wrong_share_is_left_out(secret: str) -> None:
    """With one share more than necessary, the sum is right without the wrong one."""
    members = members_of(6)
    vectors = drawn_vectors(members)
    summed = new_masked_sum(members, 1, 7)
    join(members, summed)
    for name, relay in summed.relay().items():
        if name != "node-5":
            summed.receive_vector(name, members[name].mask(relay, vectors[name]))
    survivors = summed.survivors()
    for name in sorted(summed.summed):  # node-0 opens first, so its share is used
        summed.receive_confirmed(name, members[name].confirm(survivors))
    owner = {"own": "node-1", "pairs": "node-5"}[secret]
    for name, confirmations in summed.confirmations().items():
        opened = members[name].open(confirmations)
        if name == "node-0":
            shares = {**getattr(opened, secret), owner: bytes(shamir.SHARE)}
            changed: Any = {secret: shares}
            opened = replace(opened, **changed)
        summed.receive_opened(name, opened)
    assert summed.wrong == [("node-0", owner)]
    assert (summed.open() == plain_sum(vectors, summed.summed)).all()


def test_wrong_secret_is_noticed() -> None:
    """A node divides another seed than that of its mask."""
    members = members_of(3)
    summed = new_masked_sum(members, 1, 3)
    join(members, summed)
    attempt = members["node-1"]._attempt
    assert attempt is not None
    sent = summed.sent["node-1"]
    digests = shamir.digest(b"another seed") + sent.digests[shamir.DIGEST :]
    summed.sent["node-1"] = replace(sent, digests=digests)
    masked_by(members, summed)
    with pytest.raises(TooFewLeft, match="node-1 has divided another secret than its own"):
        open_sum(members, summed)
