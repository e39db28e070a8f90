"""Sums over samples: their sensitivity after rounding, and the noise of nodes' shares."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.noise import SimulatedSums
from fedbudget.errors import WorkError
from fedbudget.models import per_sample
from fedbudget.models.builtin import Softmax, SquaredSvm
from fedbudget.protocol.features.node_privacy import multipliers
from fedbudget.protocol.features.sample_privacy import SampleSums
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    PeerError,
    Private,
    SampleNormReport,
    SampleSumNormRound,
    SampleSumReport,
    SampleSumRound,
)
from fedbudget.protocol.sums import NoisySums
from fedbudget.randomness import Stream, generator
from fedbudget.resources.privacy import epsilon_of
from fedbudget.secure.contents import SHARE_BITS, PrivateContents, SampleContents
from fedbudget.secure.graph import needed, sharers
from fedbudget.secure.masked_sum import TooFewLeft
from support.masked_network import chi_square
from support.masking import masked_round, members_of
from support.private import DELTA, run_to_end, sample_sum_aggregator

PARAMETERS = 3000
CLIP = 2.0


def sum_round(
    rho: float = 0.01, parameters: int = PARAMETERS, w: Float32 | None = None
) -> SampleSumRound:
    start = np.zeros(parameters, np.float32) if w is None else w
    return SampleSumRound(round=3, w=start, rho=rho, clip=CLIP)


def norm_round(rho: float = 0.01) -> SampleSumNormRound:
    return SampleSumNormRound(round=1, w=np.zeros(4, np.float32), rho=rho)


def sum_report(sums: Float64, size: int = 10, decay: float = 0.0) -> SampleSumReport:
    nodes = np.arange(len(sums))
    vectors: dict[str, Any] = {"sums": sums}
    return SampleSumReport(
        round=3,
        nodes=nodes,
        sizes=np.full(len(nodes), size),
        numbers={"decay": np.full(len(nodes), decay)},
        vectors=vectors,
    )


def octave_report(octaves: Float64) -> SampleNormReport:
    nodes = np.arange(len(octaves))
    sizes = np.full(len(nodes), 10)
    return SampleNormReport(round=1, nodes=nodes, sizes=sizes, numbers={"octaves": octaves})


def contents_of(broadcast: Broadcast, m: int = 9) -> SampleContents:
    contents = PrivateContents.of(broadcast, m)
    assert isinstance(contents, SampleContents)
    return contents


def opened(contents: SampleContents, total: Any, nodes: int, size: int = 10) -> NoisySums:
    sizes = np.full(nodes, size)
    sums = contents.open(contents.broadcast, total, np.arange(nodes), sizes, 0).sums
    assert isinstance(sums, NoisySums)
    return sums


def simulated(secure: SimulatedSums, report: Any, broadcast: Broadcast) -> Float64:
    sums = secure.opened(report, broadcast)
    assert isinstance(sums, NoisySums)
    assert sums.updates is not None
    return sums.updates


@pytest.mark.parametrize(("nodes", "dropped"), [(10, 0), (10, 3), (20, 0), (20, 6)])
def test_opened_sum_has_claimed_noise(nodes: int, dropped: int) -> None:
    """The variance is that of the central mechanism times n/m. Without the share of a
    curious node, it is at least that of the central mechanism.
    """
    m = sharers(needed(nodes, 2 / 3))
    broadcast = sum_round()
    contents = contents_of(broadcast, m)
    zero_report = sum_report(np.zeros((1, PARAMETERS)))
    members = members_of(nodes)
    random = generator(nodes + dropped, Stream.NOISE_SHARES).bytes
    vectors = {name: contents.encode(zero_report, random) for name in members}
    total, summed = masked_round(
        members, vectors, before_vectors=list(members)[:dropped], share=2 / 3
    )
    left = nodes - dropped
    assert len(summed) == left
    updates = opened(contents, total, left).updates
    assert updates is not None
    central = math.sqrt(1 / (2 * broadcast.rho)) * CLIP
    error = math.sqrt(2 / PARAMETERS)  # of an estimated variance, relative
    variance = float(np.var(updates)) / central**2
    assert variance == pytest.approx(left / m, rel=4 * error)
    assert (left - 1) / m >= 1


def test_octaves_have_claimed_noise() -> None:
    broadcast = norm_round()
    contents = contents_of(broadcast)
    report = octave_report(np.zeros(1))
    random = generator(0, Stream.NOISE_SHARES).bytes
    vectors = [contents.values(report) + contents.noise(9, random) for _ in range(300)]
    counts = [opened(contents, each.view(np.uint64), 9).counts[0] for each in vectors]
    central = math.sqrt(1 / (2 * broadcast.rho)) * 8  # a sample changes its octave by 8
    assert np.std(counts) == pytest.approx(central, rel=4 / math.sqrt(2 * 300))


def test_too_few_survivors_open_nothing() -> None:
    """Thirteen of twenty are left, and fourteen are needed."""
    contents = contents_of(sum_round(parameters=5), sharers(needed(20, 2 / 3)))
    members = members_of(20)
    report = sum_report(np.ones((1, 5)))
    vectors = {name: contents.encode(report) for name in members}
    with pytest.raises(TooFewLeft):
        masked_round(members, vectors, before_vectors=list(members)[:7])


def test_simulated_sum_needs_enough_nodes() -> None:
    secure = SimulatedSums(9, seed=0)
    broadcast = sum_round(parameters=5)
    with pytest.raises(WorkError, match="9 nodes are left, 10 are needed"):
        secure.opened(sum_report(np.zeros((9, 5))), broadcast)
    assert simulated(secure, sum_report(np.zeros((10, 5))), broadcast).shape == (5,)


def test_one_share_is_small_but_masked() -> None:
    """A single vector has an m-th of the paid variance. Its masked form looks uniform."""
    m = 9
    contents = contents_of(sum_round(), m)
    report = sum_report(np.zeros((1, PARAMETERS)))
    random = generator(1, Stream.NOISE_SHARES).bytes
    share = contents.encode(report, random)
    paid = contents.largest * math.sqrt(1 / (2 * 0.01))
    ratio = float(np.var(share.view(np.int64))) / paid**2
    assert ratio == pytest.approx(1 / m, rel=4 * math.sqrt(2 / PARAMETERS))
    members = members_of(10)
    seen: list[bytes] = []
    masked_round(members, dict.fromkeys(members, share), seen=seen)
    assert chi_square(share.tobytes()) > 1000
    for sent in seen:
        assert chi_square(sent) < 255 + 6 * math.sqrt(2 * 255)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    parameters=st.integers(1, 400),
    samples=st.integers(1, 60),
    rho=st.floats(1e-4, 5.0),
    m=st.integers(2, 200),
    scale=st.floats(-6, 6),
)
def test_one_sample_moves_at_most_s(
    seed: int, parameters: int, samples: int, rho: float, m: int, scale: float
) -> None:
    """S² = 2ρ m s², whatever the gradients are and however they are rounded."""
    rng = np.random.default_rng(seed)
    contents = contents_of(sum_round(rho, parameters), m)
    rows = rng.standard_normal((samples, parameters)) * 10.0**scale
    rows *= np.minimum(1, CLIP / np.linalg.norm(rows, axis=1))[:, None]
    if seed % 2:
        rows[0] = CLIP / math.sqrt(parameters)
    whole = contents.in_steps(rows.sum(axis=0), samples)
    without = contents.in_steps(rows[1:].sum(axis=0), samples)
    moved = sum(step * step for step in (whole - without).tolist())
    limit = 2 * rho * m * 4.0**SHARE_BITS
    assert contents.largest**2 == pytest.approx(limit)
    assert moved <= limit


def test_large_w_hides_no_rounding() -> None:
    """A w of 1e30 leaves no digits to the gradients. Added to them as a float, one sample
    would decide to which of two distant numbers the sum is rounded.
    """
    parameters = 20
    w = np.full(parameters, 1e30, np.float32)
    contents = contents_of(sum_round(0.05, parameters, w))
    row = np.random.default_rng(0).standard_normal(parameters)
    row *= CLIP / np.linalg.norm(row)
    one = contents.values(sum_report(row[None] * 50, 50, decay=5.0))
    other = contents.values(sum_report(row[None] * 49, 50, decay=5.0))
    distance = np.linalg.norm((one - other).astype(float))
    assert 0.99 * contents.largest < distance <= contents.largest


def test_octave_moves_at_most_s() -> None:
    contents = contents_of(norm_round(0.3))
    one = contents.values(octave_report(np.array([71.3])))
    other = contents.values(octave_report(np.array([71.3 - 8.0])))
    moved = abs(int(one[0] - other[0]))
    assert 0.999 * contents.largest <= moved <= contents.largest


@pytest.mark.parametrize("kind", [SquaredSvm, Softmax])
def test_sum_is_the_gradient_of_all(kind: Any) -> None:
    """Almost without noise, the opened sum is that of clipped gradients and of λ w."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 3)).astype(np.float32)
    softmax = kind is Softmax
    y = rng.integers(0, 2, 40) if softmax else rng.choice([-1.0, 1.0], 40)
    model = Softmax(3, 2, regularization=0.2) if softmax else SquaredSvm(3)
    table = Table(x, y.astype(np.float32))
    shards = Shards.of(table, [np.arange(15), np.arange(15, 40)])
    fleet = Fleet(model, shards, batch=None, seed=0, features=[SampleSums()])
    w = rng.standard_normal(model.parameters).astype(np.float32)
    broadcast = replace(sum_round(1e7, w=w), round=1)
    report = fleet.answer(broadcast)
    report.require_answers(broadcast)
    contents = contents_of(broadcast)
    total = (contents.values(report) + contents.noise(2)).view(np.uint64)
    sums = opened(contents, total, 2, 20)
    rows = np.arange(40, dtype=np.int32)
    exact = per_sample.clipped_sum(model, w, table, rows, CLIP)
    exact = exact + 40 * model.regularization * w
    assert sums.updates == pytest.approx(exact, rel=1e-3, abs=2e-2)
    assert sums.samples == 40


def test_report_keeps_all_digits() -> None:
    """A sum of many gradients has too few digits in float32 for the last one."""
    table = Table(np.ones((9, 3), np.float32) / 3, np.ones(9, np.float32))
    shards = Shards.of(table, [np.arange(9)])
    fleet = Fleet(SquaredSvm(3), shards, batch=None, seed=0, features=[SampleSums()])
    report = fleet.answer(SampleSumRound(round=1, w=np.zeros(3, "f4"), rho=1.0, clip=CLIP))
    assert report.vectors["sums"].dtype == np.float64


@pytest.mark.parametrize("seed", range(2))
def test_accounting_equals_central_mechanism(seed: int) -> None:
    """Each round costs as much as one Gaussian mechanism with the sensitivity C."""
    rng = np.random.default_rng([seed, 38])
    nodes = int(rng.integers(3, 30))
    limits = {"time": float(rng.uniform(2, 4)), "privacy": float(rng.uniform(0.5, 8))}
    run = sample_sum_aggregator(limits, nodes, 20)
    secure = SimulatedSums(sharers(needed(nodes, 2 / 3)), seed)

    def answer(broadcast: Broadcast) -> Any:
        known: Any = sum_report(rng.standard_normal((nodes, 20)))
        if isinstance(broadcast, SampleSumNormRound):
            known = octave_report(np.full(nodes, 10.0))
        return secure.opened(replace(known, round=broadcast.round), broadcast)

    broadcasts = run_to_end(run, answer)
    accountant = PLDAccountant()
    for each in broadcasts:
        assert isinstance(each, Private)
        assert each.steps == 1
        sigma = min(multipliers(each))
        assert each.rho == pytest.approx(1 / (2 * sigma**2))
        assert contents_of(each).largest * sigma == pytest.approx(3 * 2.0**SHARE_BITS)
        accountant.compose(dp_accounting.GaussianDpEvent(sigma))
    spent = run.ledger.budget.totals(run.ledger.spent)["privacy"]
    assert spent == pytest.approx(accountant.get_epsilon(DELTA), abs=1e-3)
    rho = sum(each.rho for each in broadcasts if isinstance(each, Private))
    assert spent == pytest.approx(epsilon_of(rho, DELTA), rel=1e-9)
    assert spent <= limits["privacy"]
    assert run.payment is None  # paid when the sum was opened


def test_step_follows_mean_gradient() -> None:
    """w moves by η times the sum over the number of samples of all nodes in it."""
    run = sample_sum_aggregator({"time": 20.0, "privacy": 4.0}, 5, 3)
    run.start()
    run.receive(NoisySums(1, 5, np.array([50.0]), None, 50), run.ledger.costs)
    broadcast = run.pending
    assert isinstance(broadcast, SampleSumRound)
    assert broadcast.clip == pytest.approx(0.5 * 2.0)  # a mean of one octave
    eta = run.state.step_size.eta
    total = np.array([3.0, -1.0, 0.5])
    run.receive(NoisySums(2, 4, np.zeros(0), total, 40), run.ledger.costs)
    assert run.state.w == pytest.approx(-eta * total / 40, rel=1e-6)


def test_excessive_noise_is_refused() -> None:
    with pytest.raises(PeerError, match="more noise than 64 bits hold"):
        contents_of(sum_round(1e-9, 5000))


def test_seeded_shares_repeat() -> None:
    broadcast = sum_round(parameters=5)
    report = sum_report(np.zeros((10, 5)))
    one = simulated(SimulatedSums(9, 3), report, broadcast)
    two = simulated(SimulatedSums(9, 3), report, broadcast)
    assert np.array_equal(one, two)
    assert not np.array_equal(one, simulated(SimulatedSums(9), report, broadcast))
