"""Mini-batches: without repetition, equal for shards of equal size, one shared by
successive rounds.
"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.errors import UserError

Batch = tuple[int, ...]


def sampler(*sizes: int, batch: int | None, seed: int = 3) -> Sampler:
    return Sampler(np.array(sizes), batch, seed)


def batches(indices: BatchIndices, node: int = 0, size: int = 0) -> list[Batch]:
    """Mini-batches of one node in a round."""
    return [
        tuple(indices.of(node, update, size).tolist()) for update in range(indices.updates)
    ]


def all_batches(own: Sampler, taus: list[int]) -> list[Batch]:
    """Mini-batch of every local update over several rounds."""
    return [batch for tau in taus for batch in batches(own.round(tau))]


@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    tau=st.integers(1, 60),
)
def test_no_repetition_within_a_pass(size: int, batch: int, seed: int, tau: int) -> None:
    batch = min(batch, size)
    used = batches(sampler(size, batch=batch, seed=seed).round(tau))
    per_pass = size // batch
    for first in range(0, tau, per_pass):
        positions = [position for own in used[first : first + per_pass] for position in own]
        assert (
            len(set(positions))
            == len(positions)
            == batch * len(used[first : first + per_pass])
        )
        assert all(0 <= position < size for position in positions)


@settings(deadline=None, max_examples=50)
@given(taus=st.lists(st.integers(2, 6), min_size=2, max_size=8), seed=st.integers(0, 10**6))
def test_rounds_continue_the_pass(taus: list[int], seed: int) -> None:
    own = sampler(30, batch=4, seed=seed)
    rounds = [batches(own.round(tau)) for tau in taus]
    new = rounds[0] + [batch for later in rounds[1:] for batch in later[1:]]
    assert new == batches(sampler(30, batch=4, seed=seed).round(len(new)))


def test_equal_sizes_share_positions() -> None:
    indices = sampler(20, 35, 20, 35, batch=4).round(5)
    assert batches(indices, 0) == batches(indices, 2)
    assert batches(indices, 1) == batches(indices, 3)
    assert batches(indices, 0) != batches(indices, 1)


@pytest.mark.parametrize("size", [20, 35])
def test_sampling_independent_of_fleet(size: int) -> None:
    alone, among = sampler(size, batch=4), sampler(20, 35, 50, batch=4)
    node = [20, 35, 50].index(size)
    for tau in (1, 3, 1, 1, 2, 0):
        assert batches(alone.round(tau)) == batches(among.round(tau), node)


def test_seed_and_pass_change_batches() -> None:
    first = batches(sampler(50, batch=5, seed=1).round(20))
    assert first[:10] != batches(sampler(50, batch=5, seed=2).round(10))
    assert set(first[:10]) != set(first[10:])  # the second pass is shuffled again


@settings(deadline=None, max_examples=50)
@given(taus=st.lists(st.integers(2, 6), min_size=2, max_size=8), seed=st.integers(0, 10**6))
def test_successive_rounds_share_a_batch(taus: list[int], seed: int) -> None:
    own = sampler(300, batch=5, seed=seed)
    rounds = [batches(own.round(tau)) for tau in taus]
    for before, after in pairwise(rounds):
        assert after[0] == before[-1]
        assert after[1] != after[0]


def test_tau_1_uses_batches_twice() -> None:
    used = all_batches(sampler(100, batch=5), [1] * 20)
    assert used[0::2] == used[1::2]
    assert len(set(used)) == 10


@settings(deadline=None, max_examples=50)
@given(
    taus=st.lists(st.integers(1, 3), min_size=1, max_size=12), seed=st.integers(0, 10**6)
)
def test_three_uses_before_longer_round(taus: list[int], seed: int) -> None:
    """A batch is the last of a round, then of a round of one update, then the first of a
    longer round.
    """
    used = all_batches(sampler(300, batch=5, seed=seed), taus)
    ends = np.cumsum(taus)
    for i in range(len(used) - 2):
        if len(set(used[i : i + 3])) == 1:
            third = int(np.searchsorted(ends, i + 2, side="right"))
            assert taus[third - 1] == 1
            assert taus[third] > 1
    assert all(len(set(used[i : i + 4])) > 1 for i in range(len(used) - 3))


def test_zero_updates_repeat_last_batch() -> None:
    """The sampler state does not change."""
    own, other = sampler(40, batch=5), sampler(40, batch=5)
    last = batches(own.round(3))[-1]
    other.round(3)
    assert batches(own.round(0)) == batches(own.round(0)) == [last]
    assert batches(own.round(4)) == batches(other.round(4))
    own = sampler(40, batch=5)
    once, again = batches(own.round(1)), batches(own.round(1))
    assert once == again == batches(own.round(0))  # also after two uses of one batch


def test_whole_shards() -> None:
    indices = sampler(3, 5, batch=None).round(2)
    assert batches(indices, 0, size=3) == [(0, 1, 2)] * 2
    assert batches(indices, 1, size=5) == [(0, 1, 2, 3, 4)] * 2


def test_small_shard_fills_the_batch() -> None:
    """Each sample appears two or three times. Other nodes are not affected."""
    own = sampler(20, 3, batch=8)
    for batch in batches(own.round(50), 1):
        assert sorted(Counter(batch)) == [0, 1, 2]
        assert sorted(Counter(batch).values()) == [2, 3, 3]
    # Not always the same sample is repeated.
    assert len({batch.count(0) for batch in batches(own.round(50), 1)}) == 2
    alone = sampler(20, batch=8)
    alone.round(50), alone.round(50)
    assert batches(own.round(5), 0) == batches(alone.round(5))


@pytest.mark.parametrize("batch", [0, -1])
def test_batch_size_must_be_positive(batch: int) -> None:
    with pytest.raises(UserError, match=f"batch_size must be at least 1, not {batch}"):
        sampler(20, batch=batch)


def test_fresh_batches_never_repeat() -> None:
    """Without aggregation, an epoch uses every sample once."""
    sampler = Sampler(np.array([60]), 10, seed=5)
    for _ in range(3):
        epoch = [sampler.round(1, fresh=True).positions[0, 0] for _ in range(6)]
        assert sorted(np.concatenate(epoch)) == list(range(60))


@settings(deadline=None, max_examples=50)
@given(
    before=st.lists(st.integers(1, 6), max_size=5),
    ours=st.lists(st.integers(0, 6), max_size=8),
    its=st.lists(st.integers(0, 6), max_size=8),
    ours_first=st.booleans(),
)
def test_forks_are_independent(
    before: list[int], ours: list[int], its: list[int], ours_first: bool
) -> None:
    own = sampler(7, 12, batch=3)
    all_batches(own, before)
    twin = own.fork()
    again = twin.fork()  # a fork of a fork
    pairs = [(own, ours), (twin, its), (again, ours)]
    for one, taus in pairs if ours_first else pairs[::-1]:
        undisturbed = sampler(7, 12, batch=3)
        all_batches(undisturbed, before)
        assert all_batches(one, taus) == all_batches(undisturbed, taus)
