"""Masked sums over a real network stack: what they give, who drops out when, and what the
aggregator gets to see.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from fedbudget.engines.grpc import masking_node
from fedbudget.engines.grpc.masked_rounds import MaskedRounds
from fedbudget.engines.grpc.masking_node import MaskingOptions
from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.secure.contents import OpenedReports
from fedbudget.secure.identity import KeyIdentity, signed_key
from fedbudget.secure.messages import Group, Opened, Relay, Shares, Survivors, from_node
from support.masked_network import PHASES, chi_square, die, made_again, masked, started
from support.networked import LONG, Network, network, numbers, until, without_network


def assert_close(
    net: Network, present: list[list[int]], method: str = "accelerated"
) -> None:
    """All w are those of plain rounds, to the resolution of float32."""
    for ours, plain in zip(net.all_w, without_network(present, method), strict=True):
        assert ours == pytest.approx(plain, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("method", ["fixed", "accelerated"])
def test_masked_rounds_come_to_the_same(method: str) -> None:
    with masked(method) as net:
        started(net)
        for _ in range(6):
            assert numbers(net.round()) == [0, 1, 2, 3]
        assert_close(net, [[0, 1, 2, 3]] * 6, method)
        assert net.server.counters.late == 0


@pytest.mark.parametrize("phase", PHASES)
def test_a_node_that_dies_costs_nothing_but_its_report(
    phase: type, at_message: Any
) -> None:
    """In the last phase its report is in the sum already, and what opens it comes from
    others.
    """
    with masked() as net:
        started(net)
        net.round()
        at_message["node-2", phase] = die
        collected = net.round()
        assert numbers(collected) == ([0, 1, 2, 3] if phase is Survivors else [0, 1, 3])
        net.round()
        third = [0, 1, 2, 3] if phase is Survivors else [0, 1, 3]
        assert_close(net, [[0, 1, 2, 3], third, [0, 1, 3]])


@pytest.mark.parametrize("phase", PHASES)
def test_a_silent_node_is_left_out_and_comes_back(phase: type, at_message: Any) -> None:
    with masked() as net:
        started(net)
        net.round()
        at_message["node-1", phase] = lambda: time.sleep(1.0)
        first = net.round(timeout=0.4)
        assert numbers(first) == ([0, 1, 2, 3] if phase is Survivors else [0, 2, 3])
        for _ in range(100):
            if numbers(net.round(timeout=LONG)) == [0, 1, 2, 3]:
                break
            time.sleep(0.02)
        else:
            pytest.fail("it never came back")


def test_too_few_are_waited_for(
    at_message: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of four have gone, and three are needed: that is said, and the round is made when
    one is back.
    """
    options = MaskingOptions(identity=tmp_path / "node-2.key")
    with masked() as net:
        for node in (0, 1, 3):
            net.join(node)
        net.join(2, masking=options)
        net.start(4)
        net.round()
        at_message["node-2", Relay] = at_message["node-3", Relay] = die
        net.begin()
        until(lambda: len(net.server.descriptions()) == 2)
        until(lambda: "a round waits for nodes: 2 here, 3 needed" in caplog.text)
        net.join(2, masking=options)
        assert len(net.finish().answers) == 3


def test_too_few_end_a_round_in_order(at_message: Any) -> None:
    with masked() as net:
        started(net)
        net.round()
        at_message["node-2", Relay] = at_message["node-3", Relay] = die
        collected = net.round(left=0.5)
        assert not collected.enough
        assert collected.answers == []


def test_an_interruption_ends_the_waiting() -> None:
    with masked() as net:
        net.join(0), net.join(1)
        net.start(2)  # of which nobody makes a sum
        net.begin()
        net.server.wake()
        assert not net.finish().enough


def test_a_node_that_comes_later_takes_part() -> None:
    with masked() as net:
        started(net, 3)
        net.round()
        net.join(3)
        net.ready(4)
        assert numbers(net.round()) == [0, 1, 2, 3]
        assert_close(net, [[0, 1, 2], [0, 1, 2, 3]])


def test_a_round_is_made_again_with_the_same_nodes_alone() -> None:
    """As after a crash of the aggregator, which has forgotten it; with others, the
    difference would be one report.
    """
    with masked() as net:
        joined = started(net)
        net.round()
        broadcast, first = net.begin(), net.server.finish()
        same = made_again(net, broadcast)
        assert isinstance(first.summed, OpenedReports)
        assert isinstance(same.summed, OpenedReports)
        assert (same.summed.sums.w == first.summed.sums.w).all()  # type: ignore[union-attr]
        net.leave(joined[3])
        assert not made_again(net, broadcast, left=0.5).enough


# What the aggregator gets to see.


def test_all_that_is_received_looks_like_chance(
    received: list[pb.FromNode], at_message: Any
) -> None:
    """Masked vectors, encrypted shares and seeds, over rounds in which nodes drop out;
    besides, nothing but costs.
    """
    rounds = 40
    with masked() as net:
        started(net)
        for _ in range(rounds):
            net.round()
        at_message["node-2", Relay] = die
        net.round()
    kinds = {message.WhichOneof("kind") for message in received}
    assert kinds == {"hello", "ready", "report", "masking"}
    reports = [
        message.report for message in received if message.WhichOneof("kind") == "report"
    ]
    assert len(reports) == 4 * rounds + 3
    assert all(
        len(report.numbers) == 8 and not report.tallies for report in reports
    )  # the attempt's number
    said = [
        from_node(message.masking)
        for message in received
        if message.WhichOneof("kind") == "masking"
    ]
    sealed = [
        share
        for each in said
        if isinstance(each, Shares)
        for share in (each.seeds, *each.shares.values())
    ]
    for data in (b"".join(report.vectors for report in reports), b"".join(sealed)):
        assert len(data) > 20_000
        assert (
            140 < chi_square(data) < 395
        )  # of 255 degrees of freedom; beyond by chance once in ten million
    # Of one and the same figure, how many samples there are, no two nodes or rounds send
    # the same.
    first = [report.vectors[:8] for report in reports]
    assert len(set(first)) == len(first)


def test_nothing_that_is_received_opens_one_node(
    received: list[pb.FromNode], at_message: Any
) -> None:
    """Of every node and attempt, shares of its own seed were opened, or of its seeds with
    others; never of both.
    """
    with masked() as net:
        started(net)
        net.round()
        at_message["node-2", Relay] = die
        net.round()
    opened: dict[int, list[Opened]] = {}
    for message in received:
        if message.WhichOneof("kind") == "masking" and isinstance(
            each := from_node(message.masking), Opened
        ):
            opened.setdefault(each.attempt, []).append(each)
    assert len(opened) == 2
    for each_attempt in opened.values():
        own = {name for each in each_attempt for name in each.own}
        pairs = {name for each in each_attempt for name in each.pairs}
        assert not own & pairs
    last = max(opened)
    assert {name for each in opened[last] for name in each.pairs} == {"node-2"}


# What nodes and the aggregator refuse.


def test_a_swapped_key_is_refused_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aggregator that puts keys of its own in the place of a node's, in a later round,
    or from the first.
    """
    group = MaskedRounds._group

    def swapping(self: MaskedRounds, attempt: Any, name: str, broadcast: Any) -> Group:
        honest = group(self, attempt, name, broadcast)
        if name != "node-0" or broadcast.round < 2:
            return honest
        forged = signed_key(KeyIdentity(), self._run, "node-1", b"p" * 32, time.time_ns())
        return Group(
            **{
                **{key: getattr(honest, key) for key in Group.__struct_fields__},
                "keys": (forged,),
            }
        )

    monkeypatch.setattr(MaskedRounds, "_group", swapping)
    with masked() as net:
        joined = started(net)
        net.round()
        net.round()  # without it
        with pytest.raises(
            RefusedByAggregator,
            match="node-1 showed another identity earlier in this run",
        ):
            joined[0].result(LONG)


def test_a_replayed_group_is_refused_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbudget.engines.grpc.masked_rounds.time.time", lambda: 1000.0)
    told: list[str] = []
    with masked() as net:
        for node in range(4):
            net.join(node, notify=told.append)
        net.start(4)
        net.round()
        net.server._rounds._last_attempt -= 1  # type: ignore[attr-defined]
        net.begin()
        until(lambda: any("replayed" in text for text in told))
        assert net.finish().enough  # by another attempt, with a number of its own


def test_another_identity_under_a_name_is_refused_by_the_aggregator() -> None:
    with masked() as net:
        joined = started(net)
        net.round()
        net.leave(joined[2])
        again = net.join(2)  # a new process, with a new key that no file has kept
        with pytest.raises(
            RefusedByAggregator,
            match="node-2 showed another identity earlier in this run",
        ):
            again.result(LONG)
        assert numbers(net.round()) == [0, 1, 3]


def test_a_restarted_node_with_its_identity_is_let_in(tmp_path: Path) -> None:
    options = MaskingOptions(identity=tmp_path / "node-2.key")
    with masked() as net:
        for node in (0, 1, 3):
            net.join(node)
        joined = net.join(2, masking=options)
        net.start(4)
        net.round()
        net.leave(joined)
        net.join(2, masking=options)
        net.ready(4)
        assert len(net.round().answers) == 4
    assert (tmp_path / "node-2.key").stat().st_mode & 0o777 == 0o600


def test_a_node_that_insists_on_masks_refuses_who_has_none() -> None:
    with network() as net:
        joined = net.join(0, masking=MaskingOptions(required=True))
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        with pytest.raises(
            RefusedByAggregator, match="would see this node's reports one by one"
        ):
            joined.result(LONG)


def test_a_node_refuses_a_threshold_below_its_own() -> None:
    with masked(threshold=0.6) as net:
        joined = net.join(0, masking=MaskingOptions(threshold=0.75))
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        with pytest.raises(
            RefusedByAggregator, match=r"secure-threshold is 0.6, and this node's is 0.75"
        ):
            joined.result(LONG)


def test_the_library_is_asked_for_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fedbudget.secure.identity", None)
    with masked() as net:
        joined = net.join(0)
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        with pytest.raises(RefusedByAggregator, match="pip install"):
            joined.result(LONG)
    assert masking_node.describe_credential(b"k" * 32).endswith("6b" * 32)
