"""Sums of reports along the tree of nodes: the same bits for every grouping."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.control import AdaptiveTau
from fedbudget.data.shards import Shards
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    LocalError,
    PeerError,
    ReportLayout,
    TrainReport,
)
from fedbudget.protocol.state import Outcome
from fedbudget.protocol.sums import (
    GrowingSum,
    ReportAdder,
    Sums,
    add_up,
    add_up_in_numpy,
    branches,
    norms,
    slope,
    squared_norms,
)
from support.hand_made import ONE, make
from support.methods import METHODS, bits, new_aggregator, read_costs, simulated_time
from support.problems import problem


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    "parameters", [1, 7, 129, 784, 2**16, 2**16 + 1, 99_999, 1_000_003]
)
def test_norms_match_numpy(nodes: int, parameters: int) -> None:
    """Norms computed in parts have the bits of numpy over the whole vector."""
    rng = np.random.default_rng(parameters)
    vectors, others = rng.normal(size=(2, nodes, parameters)).astype(np.float32)
    assert np.array_equal(
        squared_norms(vectors), np.square(vectors, dtype=np.float64).sum(axis=1)
    )
    apart = np.sqrt(np.square(vectors - others, dtype=np.float64).sum(axis=1))
    assert np.array_equal(norms(vectors, others), apart)
    from_one = np.sqrt(np.square(vectors - others[0], dtype=np.float64).sum(axis=1))
    assert np.array_equal(norms(vectors, others[0]), from_one)


def test_norms_of_noncontiguous_rows() -> None:
    """As without running statistics: the rows are not contiguous in memory."""
    whole = np.random.default_rng(0).normal(size=(5, 100_000)).astype(np.float32)
    some = whole[:, :70_000]
    assert np.array_equal(
        squared_norms(some), np.square(some, dtype=np.float64).sum(axis=1)
    )


def test_norms_make_no_large_copy() -> None:
    vectors, others = np.ones((2, 1, 2_000_000), np.float32)
    tracemalloc.start()
    norms(vectors, others)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < vectors.nbytes / 4


def test_norms_of_diverged_vectors() -> None:
    vectors = np.array([[np.inf, 1.0], [3.0, 4.0]], np.float32)
    assert norms(vectors).tolist() == [np.inf, 5.0]
    assert np.isnan(norms(vectors, vectors)[0])


def test_slope_is_zero_without_distance() -> None:
    assert slope(np.array([2.0, 2.0]), np.array([0.5, 1e-11])).tolist() == [4.0, 0.0]


def level_by_level(numbers: Int64, values: Float64) -> Float64:
    """Sum the tree level by level: all pairs, then all pairs of the next level."""
    held: dict[int, Float64] = dict(zip(numbers.tolist(), values, strict=True))
    while set(held) != {0}:
        above: dict[int, Float64] = {}
        for number in sorted(held):
            above[number // 2] = (
                above[number // 2] + held[number] if number // 2 in above else held[number]
            )
        held = above
    return held[0]


def some_nodes(seed: int, count: int) -> tuple[Int64, Float64, Float64]:
    """Numbers with gaps, weights, and values of very different magnitude.

    Summing in another order changes the bits.
    """
    rng = np.random.default_rng(seed)
    numbers = np.sort(rng.choice(3 * count, count, replace=False))
    values = rng.normal(size=(count, 4)) * 10.0 ** rng.integers(-8, 9, (count, 4))
    return numbers, rng.integers(1, 100, count).astype(np.float64), values


def test_three_nodes_by_hand() -> None:
    # 1e16 + 1 is 1e16 in float64: the 1 is lost unless nodes 1 and 2 are a pair.
    column = np.array([[1e16], [1.0], [-1e16]])
    assert add_up(np.array([0, 1, 2]), np.ones(3), column) == 0
    assert add_up(np.array([1, 2, 3]), np.ones(3), column) == 0
    assert add_up(np.array([1, 4, 5]), np.ones(3), column) == 1e16 + (1 - 1e16)
    assert add_up(np.array([7]), np.array([3.0]), np.array([[0.5]])) == 1.5
    assert add_up(np.array([], np.int64), np.array([]), np.empty((0, 2))).tolist() == [0, 0]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 200))
def test_sum_follows_the_tree(seed: int, count: int) -> None:
    numbers, weights, values = some_nodes(seed, count)
    expected = level_by_level(numbers, weights[:, None] * values)
    np.testing.assert_array_equal(add_up(numbers, weights, values), expected)
    np.testing.assert_array_equal(add_up_in_numpy(numbers, weights, values), expected)


@pytest.mark.parametrize("columns", [1, 1023, 1024, 1025, 70_000])
def test_columns_are_summed_in_parts(columns: int) -> None:
    values = np.random.default_rng(2).normal(size=(3, columns))
    total = add_up(np.array([0, 1, 2]), np.array([1.0, 2.0, 3.0]), values)
    np.testing.assert_array_equal(total, (values[0] + 2 * values[1]) + 3 * values[2])


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 600), max_size=5),
)
def test_any_ranges_give_same_bits(seed: int, count: int, cuts: list[int]) -> None:
    """Partial sums over any ranges of nodes add up to the same bits."""
    numbers, weights, values = some_nodes(seed, count)
    begins: list[int] = []
    sums: list[Float64] = []
    for first, end in pairwise(
        sorted({0, *(cut for cut in cuts if cut < 3 * count), 3 * count})
    ):
        for begin, after in pairwise(branches(first, end).tolist()):
            own = (numbers >= begin) & (numbers < after)
            begins.append(begin)
            sums.append(add_up(numbers[own], weights[own], values[own]))
    together = add_up(np.array(begins), np.ones(len(begins)), np.array(sums))
    assert together.tobytes() == add_up(numbers, weights, values).tobytes()


@given(first=st.integers(0, 2000), count=st.integers(0, 2000))
def test_branches_are_whole_subtrees(first: int, count: int) -> None:
    """Branches fill the range, and each is one subtree."""
    found = branches(first, first + count).tolist()
    assert found[0] == first
    assert found[-1] == first + count
    for begin, end in pairwise(found):
        size = end - begin
        assert size > 0
        assert size & (size - 1) == 0
        assert begin % size == 0
    assert len(found) <= 2 * max(1, count).bit_length() + 1


@given(st.sets(st.integers(0, 40), min_size=1), st.randoms(use_true_random=False))
def test_growing_sum_ignores_order(numbers: set[int], random: Any) -> None:
    nodes = np.array(sorted(numbers))
    values = (
        np.random.default_rng(len(nodes)).normal(size=(len(nodes), 3)).astype(np.float32)
    )
    weights = 1.0 + nodes
    growing, order = GrowingSum(), list(range(len(nodes)))
    random.shuffle(order)
    for row in order:
        growing.add_node(int(nodes[row]), weights[row], values[row])
    assert growing.total().tobytes() == add_up(nodes, weights, values).tobytes()


def test_growing_sum_holds_few_vectors() -> None:
    growing = GrowingSum()
    for node in range(1000):
        growing.add_node(node, 1.0, np.ones(1, np.float32))
        assert len(growing) == (node + 1).bit_count()
    assert growing.total() == 1000


NODES = 11


def joined(parties: Sequence[Sums]) -> Sums:
    """Sums of several parties, which keep their reports and send only sums."""

    def distances(name: str, mean: Float32) -> Float64:
        return np.concatenate([party.distance_sums(name, mean) for party in parties])

    return replace(Sums.merge(parties), distances=distances)


def fleet(name: str, method: str, batch: int | None, first: int, end: int) -> Fleet:
    case = problem(name, 12)
    parts = np.array_split(np.argsort(case.x[:, 0]), NODES)[first:end]
    return Fleet(
        case.model,
        Shards.of(case.table, parts),
        batch=batch,
        seed=9,
        features=METHODS[method].features,
        numbers=range(first, end),
    )


def rounds(
    name: str, method: str, batch: int | None, cuts: Sequence[int] | None
) -> list[object]:
    """Run with simulated costs; `cuts` separate the nodes of the parties."""
    aggregator = new_aggregator(name, method)
    time = simulated_time()
    ranges = list(pairwise(cuts or (0, NODES)))
    fleets = [fleet(name, method, batch, first, end) for first, end in ranges]
    edges = [branches(first, end)[:-1] for first, end in ranges]
    broadcast: Broadcast | Outcome = aggregator.start()
    found: list[object] = []
    while isinstance(broadcast, Broadcast):
        reports = [own.answer(broadcast) for own in fleets]
        costs = read_costs(time, broadcast)
        if cuts is None:
            broadcast = aggregator.receive(reports[0], costs)
        else:
            parties = [
                Sums.of(report, broadcast.report, begins)
                for report, begins in zip(reports, edges, strict=True)
            ]
            broadcast = aggregator.receive(joined(parties), costs)
        found.append(bits([aggregator.last, broadcast]))
    return found


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("method", METHODS)
def test_sums_of_parties_give_same_bits(method: str, batch: int | None) -> None:
    whole = rounds("svm", method, batch, None)
    assert len(whole) > 5
    for cuts in ((0, 11), (0, 4, 11), (0, 1, 5, 6, 11)):
        assert rounds("svm", method, batch, cuts) == whole


@pytest.mark.parametrize("cuts", [range(12), (0, 1, 5, 6, 11)])
def test_report_adder_ignores_order(cuts: Sequence[int]) -> None:
    """For single nodes, and for fleets of several."""
    whole = rounds("svm", "accelerated", 3, None)
    aggregator = new_aggregator("svm", "accelerated")
    time = simulated_time()
    random = np.random.default_rng(1)
    assert not aggregator.method.needs_reports
    fleets = [fleet("svm", "accelerated", 3, first, end) for first, end in pairwise(cuts)]
    broadcast: Broadcast | Outcome = aggregator.start()
    found: list[object] = []
    while isinstance(broadcast, Broadcast):
        adder = ReportAdder(broadcast)
        for number in random.permutation(len(fleets)):
            adder.add(fleets[number].answer(broadcast))
        broadcast = aggregator.receive(adder.sums(), read_costs(time, broadcast))
        found.append(bits([aggregator.last, broadcast]))
    assert found == whole


def report(broadcast: Broadcast, w: Float32, nodes: Int64) -> TrainReport:
    losses = 1 + nodes / 6
    slopes = np.where(nodes % 3 == 0, np.nan, losses)
    numbers = {"losses": losses, "best_losses": losses, "rho": slopes, "beta": slopes}
    vectors = {"w": w, "gradients": w + 1}
    layout = broadcast.report
    return TrainReport(
        round=broadcast.round,
        nodes=nodes,
        sizes=nodes + 1,
        numbers={name: numbers[name] for name in layout.numbers},
        vectors={name: vectors[name] for name in layout.vectors},
    )


@pytest.mark.parametrize("broken", [(), (2,), (0, 5, 6), tuple(range(7))])
def test_sums_drop_diverged_nodes(broken: tuple[int, ...]) -> None:
    """Sums drop the same nodes as whole reports."""
    nodes = np.arange(7)
    w = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    w[list(broken)] = np.nan
    one = make(controller=AdaptiveTau())
    other = make(controller=AdaptiveTau())
    for _ in range(2):
        broadcast = one.pending or one.start()
        if other.pending is None:
            other.start()
        answer = one.receive(report(broadcast, w, nodes), ONE)
        parts = [
            Sums.of(
                report(broadcast, w[first:end], nodes[first:end]),
                broadcast.report,
                branches(first, end)[:-1],
            )
            for first, end in ((0, 3), (3, 7))
        ]
        assert bits(other.receive(joined(parts), ONE)) == bits(answer)
        assert bits(other.last) == bits(one.last)
        assert one.last is not None
        assert one.last.left_out == broken


LAYOUT = ReportLayout(("losses", "best_losses", "beta"), ("w",), ("beta",))


def three_nodes() -> TrainReport:
    """Three nodes with sizes 1, 2 and 5; the last two have no β, or no finite w."""
    return TrainReport(
        round=2,
        nodes=np.arange(3),
        sizes=np.array([1, 2, 5]),
        numbers={
            "losses": np.array([1.0, 2.0, 3.0]),
            "best_losses": np.array([1.0, 1.0, 5.0]),
            "beta": np.array([4.0, np.nan, 9.0]),
        },
        vectors={"w": np.array([[3, 0], [0, 3], [np.inf, 0]], np.float32)},
    )


class TestByHand:
    def test_totals_by_name(self) -> None:
        """Nodes that diverged have losses, but no part in vectors and optional numbers."""
        sums = Sums.of(three_nodes(), LAYOUT)
        assert dict(sums.totals) == {
            "data": 8,
            "used": 3,
            "losses": 1 + 4 + 15,
            "best_losses": 1 + 2 + 25,
            "beta": 4,
            "beta_of": 1,
            "squared_loss_gap": 2 * 1 + 5 * 4,
        }
        assert sums.left_out == (2,)
        assert sums.vectors["w"].tolist() == [[3, 6]]
        assert sums.mean("w").tolist() == [1, 2]
        assert sums.weighted_mean("losses") == 20 / 8
        assert sums.weighted_mean("beta") == sums.mean_beta == 4
        assert sums.largest_beta == 9  # also of a node that diverged
        assert sums.loss_gap == -1

    def test_distances_of_usable_nodes(self) -> None:
        """The first two nodes are 2√2 and √2 from their mean (1, 2)."""
        sums = Sums.of(three_nodes(), LAYOUT)
        expected = 1 * np.sqrt(8) + 2 * np.sqrt(2)
        distances = sums.distance_sums("w", np.array([1, 2], np.float32))
        assert distances.tolist() == [[pytest.approx(expected)]]

    def test_other_numbers_of_the_same_nodes(self) -> None:
        """Sums keep their vectors when numbers of their report are capped."""
        given = three_nodes()
        sums = Sums.of(given, LAYOUT)
        capped = {**given.numbers, "losses": np.zeros(3)}
        after = sums.with_report(replace(given, numbers=capped), LAYOUT)
        assert after.totals == {**sums.totals, "losses": 0, "squared_loss_gap": 1 + 2 + 125}
        assert after.mean("w").tolist() == [1, 2]
        assert after.left_out == (2,)


class TestReportAdder:
    def test_keeps_numbers_without_vectors(self) -> None:
        aggregator = make()
        broadcast = aggregator.start()
        adder = ReportAdder(broadcast)
        w = np.ones((1, 2), np.float32)
        kept = adder.add(report(broadcast, w, np.array([0])))
        assert not kept.vectors
        assert kept.numbers["losses"].tolist() == [1]
        assert adder.vectors == 1
        sums = adder.sums()
        with pytest.raises(LocalError, match="distances from the mean need every report"):
            sums.distance_sums("w", w[0])

    def test_refuses_other_reports(self) -> None:
        broadcast = make().start()
        wrong = report(broadcast, np.ones((1, 3), np.float32), np.array([0]))
        with pytest.raises(PeerError, match="w has shape"):
            ReportAdder(broadcast).add(wrong)


def test_sums_of_old_round_are_refused() -> None:
    aggregator = make()
    broadcast = aggregator.start()
    given = report(broadcast, np.ones((2, 2), np.float32), np.arange(2))
    sums = Sums.of(given, broadcast.report)
    aggregator.receive(sums, ONE)
    with pytest.raises(PeerError, match="round 1 in round 2"):
        aggregator.receive(sums, ONE)
