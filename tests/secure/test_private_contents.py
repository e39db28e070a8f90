"""Noise shares of nodes reach the paid noise despite dropouts, and every contribution is
bounded.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32
from fedbudget.protocol.features.node_privacy import (
    ALL_OCTAVES,
    clipped,
    multipliers,
    noise_size,
    release,
    reported_norms,
    with_noise,
)
from fedbudget.protocol.messages import (
    Broadcast,
    NormReport,
    NormRound,
    PeerError,
    Private,
    PrivateRound,
    UpdateReport,
)
from fedbudget.protocol.sums import NoisySums
from fedbudget.resources.privacy import epsilon_of
from fedbudget.secure.contents import SHARE_BITS, PrivateContents
from fedbudget.secure.graph import needed
from fedbudget.secure.graph import sharers as sharers_for
from fedbudget.secure.masked_sum import TooFewLeft
from fedbudget.secure.messages import Shares
from support.masking import masked_round, members_of, new_masked_sum
from support.private import DELTA, aggregator, run_to_end

PARAMETERS = 4000


def private_round(clip: float, rho: float, parameters: int = PARAMETERS) -> PrivateRound:
    w = np.zeros(parameters, np.float32)
    return PrivateRound(round=3, w=w, tau=5, eta=0.1, clip=clip, rho=rho)


def norm_round(rho: float, parameters: int) -> NormRound:
    w = np.zeros(parameters, np.float32)
    return NormRound(round=3, w=w, tau=5, eta=0.1, rho=rho)


def report_of(broadcast: Broadcast, updates: Float32, first: int = 0) -> NormReport:
    nodes = first + np.arange(len(updates))
    known: dict[str, Any] = {
        "round": broadcast.round,
        "nodes": nodes,
        "sizes": np.ones_like(nodes),
        "numbers": {"lengths": reported_norms(updates)},
    }
    if isinstance(broadcast, PrivateRound):
        vectors = {"updates": clipped(updates, broadcast.clip)}
        return UpdateReport(**known, vectors=vectors)
    return NormReport(**known)


def encode_and_open(
    broadcast: Broadcast, reports: list[NormReport], sharers: int
) -> NoisySums:
    contents = PrivateContents.of(broadcast, sharers)
    vectors = [contents.encode(report) for report in reports]
    assert {len(vector) for vector in vectors} == {contents.length}
    nodes = np.concatenate([report.nodes for report in reports])
    total = np.array(vectors).sum(axis=0)
    sums = contents.open(broadcast, total, nodes, np.ones_like(nodes), 0).sums
    assert isinstance(sums, NoisySums)
    return sums


@pytest.mark.parametrize(
    ("nodes", "dropped"), [(10, 0), (10, 2), (10, 3), (40, 0), (40, 10)]
)
def test_update_noise_is_sufficient(nodes: int, dropped: int) -> None:
    """With n of m needed nodes left, the variance is n/m of the paid one."""
    fewest = needed(nodes, 2 / 3)
    sharers = sharers_for(fewest)
    broadcast = private_round(2.0, 0.01)
    contents = PrivateContents.of(broadcast, sharers)
    zero_report = report_of(broadcast, np.zeros((1, PARAMETERS), np.float32))
    members = members_of(nodes)
    vectors = {name: contents.encode(zero_report) for name in members}
    total, summed = masked_round(
        members,
        vectors,
        before_vectors=list(members)[:: nodes // max(1, dropped)][:dropped],
    )
    assert len(summed) == nodes - dropped >= fewest
    numbers = np.arange(len(summed))
    known = contents.open(broadcast, total, numbers, np.ones_like(numbers), 0).sums
    assert isinstance(known, NoisySums)
    assert known.updates is not None
    planned = multipliers(broadcast).updates * broadcast.clip
    variance = np.var(known.updates) / planned**2
    # The tolerance is nearly seven standard errors.
    assert variance == pytest.approx(len(summed) / sharers, rel=0.15)
    assert variance - 1 / sharers > 0.85  # without the share of a curious node


@pytest.mark.parametrize("nodes", [4, 9])
def test_count_noise_is_sufficient(nodes: int) -> None:
    sharers = needed(nodes, 2 / 3)
    cases: list[tuple[Broadcast, float]] = [
        (private_round(2.0, 0.1, 3), 0.5),
        (norm_round(0.1, 3), ALL_OCTAVES),
    ]
    for broadcast, sensitivity in cases:
        zero_report = report_of(broadcast, np.zeros((1, 3), np.float32))
        counts = np.array(
            [
                encode_and_open(broadcast, [zero_report] * sharers, sharers).counts
                for _ in range(600)
            ]
        )
        noise = counts - 0.5 * sharers
        planned = multipliers(broadcast).counts * sensitivity
        # The tolerance is nearly seven standard errors of the smallest sample.
        assert np.std(noise) == pytest.approx(planned, rel=0.2)
        assert abs(np.mean(noise)) < 6 * planned / math.sqrt(noise.size)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.floats(1e-4, 5.0),
    st.integers(3, 200),
    st.floats(-8, 8),
)
def test_update_norms_are_bounded(
    seed: int, parameters: int, rho: float, sharers: int, octave: float
) -> None:
    """The norm of any update after rounding is at most S: √m times the deviation of a
    share, divided by σ.
    """
    broadcast = private_round(2.0**octave, rho, parameters)
    contents = PrivateContents.of(broadcast, sharers)
    rng = np.random.default_rng(seed)
    kind = rng.integers(4)
    update = rng.standard_normal(parameters) * 10.0 ** rng.uniform(-6, 6)
    if kind == 1:
        update = np.full(parameters, broadcast.clip / math.sqrt(parameters))
    elif kind == 2:
        update = np.where(np.arange(parameters) == 0, broadcast.clip, 0.0)
    elif kind == 3:
        update[0] = np.nan
    steps = contents.rounded(update.astype(np.float32)).tolist()
    limit = math.sqrt(sharers) * 2**SHARE_BITS / multipliers(broadcast).updates
    assert sum(step * step for step in steps) <= limit * limit
    counts = contents.length - contents.parameters
    assert (
        contents.height**2 * counts
        <= sharers * 4**SHARE_BITS / multipliers(broadcast).counts ** 2
    )


def test_rounding_error_is_small() -> None:
    contents = PrivateContents.of(private_round(1.0, 0.02), 10)
    update = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    update /= np.float32(np.linalg.norm(update))
    restored = contents.rounded(update) / contents.largest
    assert np.linalg.norm(restored - update) < 1e-3


def test_sums_equal_central_noise() -> None:
    """Almost without noise, both give the mean of clipped updates and the next C."""
    rng = np.random.default_rng(1)
    updates = rng.standard_normal((9, 30)).astype(np.float32)
    for broadcast in (private_round(4.0, 1e7, 30), norm_round(1e7, 30)):
        parts = [
            report_of(broadcast, updates[:2]),
            *(report_of(broadcast, updates[i : i + 1], i) for i in range(2, 9)),
        ]
        known = release(encode_and_open(broadcast, parts, 6), broadcast)
        zeros = np.zeros(noise_size(broadcast))
        whole = report_of(broadcast, updates)
        plain = release(with_noise(whole, broadcast, zeros), broadcast)
        assert known.clip == pytest.approx(plain.clip, rel=1e-2)
        if isinstance(broadcast, PrivateRound):
            assert known.update == pytest.approx(plain.update, abs=5e-3)


@pytest.mark.parametrize("seed", range(8))
def test_random_runs_keep_their_budget(seed: int) -> None:
    """The aggregator receives only noisy sums, of any allowed number of nodes."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(3, 40))
    parameters = int(rng.integers(1, 30))
    epsilon = float(rng.uniform(0.2, 12))
    run = aggregator(
        {"time": float(rng.uniform(2, 20)), "privacy": epsilon}, nodes, parameters
    )
    sharers = needed(nodes, 2 / 3)

    def answer(broadcast: Broadcast) -> NoisySums:
        here = int(rng.integers(sharers, nodes + 1))
        updates = rng.standard_normal((here, 1, parameters)).astype(
            np.float32
        ) * np.float32(rng.uniform(0.01, 30))
        return encode_and_open(
            broadcast,
            [report_of(broadcast, each, at) for at, each in enumerate(updates)],
            sharers,
        )

    rounds = run_to_end(run, answer)
    rho = sum(each.rho for each in rounds if isinstance(each, Private))
    spent = run.ledger.budget.totals(run.ledger.spent)
    assert spent["privacy"] == pytest.approx(epsilon_of(rho, DELTA), rel=1e-9)
    assert spent["privacy"] <= epsilon
    assert np.isfinite(run.state.w).all()


def test_sum_of_too_few_stays_closed() -> None:
    """In a large circle, groups and the whole sum have separate thresholds."""
    members = members_of(60)
    summed = new_masked_sum(members, 1, 5, 0.5)
    summed.fewest = 58
    summed.sent = dict.fromkeys(list(members)[3:], Shares(1, b"", {}, b""))
    with pytest.raises(TooFewLeft, match="57 nodes are left, 58 are needed"):
        summed.relay()


def test_excessive_noise_is_refused() -> None:
    with pytest.raises(PeerError, match="more noise than 64 bits hold"):
        PrivateContents.of(private_round(1.0, 1e-15), 3)
