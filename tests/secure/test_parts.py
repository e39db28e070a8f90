"""Secret sharing, masks, fixed-point encoding, and the graph of neighbours."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.secure import shamir
from fedbudget.secure.contents import (
    coordinate_range,
    decode,
    decode_figures,
    encode,
    encode_figures,
)
from fedbudget.secure.graph import needed, neighbours, tolerated
from fedbudget.secure.member import add_mask


@given(st.data())
def test_threshold_of_shares_recovers_secret(data: st.DataObject) -> None:
    secret = data.draw(st.binary(min_size=16, max_size=16))
    count = data.draw(st.integers(1, 12))
    threshold = data.draw(st.integers(1, count))
    shares = dict(enumerate(shamir.split(secret, count, threshold), start=1))
    kept = data.draw(
        st.lists(
            st.sampled_from(sorted(shares)),
            min_size=threshold,
            max_size=threshold,
            unique=True,
        )
    )
    assert shamir.combine({number: shares[number] for number in kept}) == secret


def test_fewer_shares_fit_any_secret() -> None:
    """For any secret there is a third share that fits two given shares."""
    first, second, _ = shamir.split(bytes(16), 3, 3)
    values = {1: int.from_bytes(first, "big"), 2: int.from_bytes(second, "big")}
    for secret in (1, 2**100 + 7):
        # The Lagrange weights at 0 are 3, -3 and 1.
        third = (secret - 3 * values[1] + 3 * values[2]) % shamir.PRIME
        shares = {1: first, 2: second, 3: third.to_bytes(17, "big")}
        assert int.from_bytes(shamir.combine(shares), "big") == secret


def test_field_has_prime_order() -> None:
    """Fermat's primality test to several bases."""
    assert all(
        pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13)
    )


def test_mixed_shares_are_refused() -> None:
    refused = 0
    for _ in range(20):
        mixed = {1: shamir.split(b"a" * 16, 2, 2)[0], 2: shamir.split(b"b" * 16, 2, 2)[1]}
        try:
            shamir.combine(mixed)
        except ValueError:
            refused += 1
    assert refused  # three of four values are not a valid secret


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30), st.floats(0, 1))
def test_encoded_vectors_add_up(values: list[float], weight: float) -> None:
    vector, largest = np.array(values, np.float64), 2.0**20
    total = (
        encode(weight * vector, largest)
        + encode(-vector, largest)
        + encode(vector, largest)
    )
    assert (
        np.abs(decode(total, largest) - weight * vector).max()
        <= 1.5 * largest * 2.0**-61 + 1e-15 * 1e6
    )


def test_largest_numbers_do_not_wrap() -> None:
    largest = coordinate_range(np.array([3.0], np.float32))
    vector = np.array([largest, -largest])
    assert (decode(encode(vector, largest), largest) == vector).all()
    assert (
        decode(encode(vector, largest) + encode(0.75 * vector, largest), largest)
        == 1.75 * vector
    ).all()


@given(st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=20))
def test_figures_add_up_exactly(figures: list[float]) -> None:
    total = sum(
        (encode_figures([each]) for each in figures[1:]), encode_figures(figures[:1])
    )
    # Each is rounded to 2^-60 at most; the sum of integers is exact and rounded once.
    assert decode_figures(total)[0] == pytest.approx(
        math.fsum(figures), rel=1e-15, abs=len(figures) * 2**-60
    )


def test_unencodable_figures_are_refused() -> None:
    for figure in (float("nan"), float("inf"), 1e19):
        with pytest.raises(ValueError, match="cannot be added up"):
            encode_figures([figure])


def test_masks_are_aes_counter_mode() -> None:
    """The first block of AES-128 with the zero key, from NIST's test vectors."""
    vector = np.zeros(2, np.uint64)
    add_mask(vector, bytes(16))
    assert vector.tobytes().hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"


def test_mask_continues_over_parts() -> None:
    long = np.zeros(100_001, np.uint64)
    add_mask(long, b"k" * 16)
    short = np.zeros(40_000, np.uint64)
    add_mask(short, b"k" * 16)
    assert (long[:40_000] == short).all()
    assert len(np.unique(long)) == len(long)  # no part is repeated


@pytest.mark.parametrize("count", [*range(1, 40), 64, 200, 1000])
def test_neighbours_are_mutual_and_few(count: int) -> None:
    circle = [f"node-{number}" for number in range(count)]
    graph = neighbours(circle)
    most = 4 * math.ceil(math.log2(max(2, count)))
    for name, others in graph.items():
        assert name not in others
        assert len(set(others)) == len(others) <= most + 1
        assert all(name in graph[other] for other in others)
    if count <= 16:
        assert all(len(others) == count - 1 for others in graph.values())


def test_graph_survives_losing_a_third() -> None:
    """A graph in two components would have two sums, each over fewer nodes."""
    rng = np.random.default_rng(3)
    circle = [f"node-{number}" for number in range(200)]
    graph = neighbours(circle)
    for _ in range(20):
        here = set(rng.permutation(circle)[: 2 * len(circle) // 3])
        reached, new = set(), {min(here)}
        while new:
            reached |= new
            new = {
                other for name in new for other in graph[name] if other in here
            } - reached
        assert reached == here


def test_threshold_is_more_than_half() -> None:
    for group in range(3, 60):
        for share in (0.01, 0.5, 0.6, 2 / 3, 1.0):
            assert tolerated(group, needed(group, share)) >= 1
        assert needed(group, 1.0) == group


def test_default_threshold_tolerates_a_third() -> None:
    """With c colluding members, 2t > n + c: no two sets of t share only colluders."""
    for group in range(3, 60):
        threshold = needed(group, 2 / 3)
        colluders = tolerated(group, threshold)
        assert 2 * threshold > group + colluders
        assert colluders >= (group - 1) // 3
        # One more could open both secrets: t each, if honest members reveal one of them.
        honest = group - colluders - 1
        assert 2 * (threshold - colluders - 1) <= honest
