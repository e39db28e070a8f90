"""Secure aggregation on a real network: equal results, dropouts, and what the aggregator
can read.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from fedbudget.engines.grpc import masking_node
from fedbudget.engines.grpc.masked_sums import MaskedSums
from fedbudget.engines.grpc.masking_node import MaskingOptions
from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.errors import WorkError
from fedbudget.protocol import sums
from fedbudget.protocol.features.node_privacy import multipliers
from fedbudget.protocol.messages import NormRound, PrivateRound
from fedbudget.protocol.sums import NoisySums, Sums
from fedbudget.secure import contents
from fedbudget.secure.identity import KeyIdentity, signed_key
from fedbudget.secure.masked_sum import MaskedSum
from fedbudget.secure.messages import Group, Opened, Relay, Survivors
from support.masked_network import (
    LATE,
    PHASES,
    chi_square,
    die,
    masked,
    masked_sums,
    repeat_round,
    started,
)
from support.networked import (
    LONG,
    Network,
    network,
    node_numbers,
    wait_until,
    without_network,
)


def assert_close(
    net: Network, present: list[list[int]], method: str = "accelerated"
) -> None:
    """Check that every w equals the w of plain rounds with the levels of β̂, to the
    resolution of float32.
    """
    exact = sums._largest
    with patch.object(
        sums,
        "_largest",
        lambda beta: contents._decode_beta(contents._encode_beta(exact(beta))),
    ):
        expected = without_network(present, method)
    for ours, plain in zip(net.all_w, expected, strict=True):
        assert ours == pytest.approx(plain, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("method", ["fixed", "accelerated"])
def test_masked_rounds_match_plain_rounds(method: str) -> None:
    with masked(method) as net:
        started(net)
        for _ in range(6):
            assert node_numbers(net.round()) == [0, 1, 2, 3]
        assert_close(net, [[0, 1, 2, 3]] * 6, method)
        assert net.server.counters.late == 0


@pytest.mark.parametrize("phase", PHASES)
def test_dropout_loses_only_its_report(phase: type, at_message: Any) -> None:
    """In the last phase the sum already contains its report, and other nodes open it."""
    with masked() as net:
        started(net)
        net.round()
        at_message["node-2", phase] = die
        collected = net.round()
        assert node_numbers(collected) == ([0, 1, 2, 3] if phase in LATE else [0, 1, 3])
        net.round()
        third = [0, 1, 2, 3] if phase in LATE else [0, 1, 3]
        assert_close(net, [[0, 1, 2, 3], third, [0, 1, 3]])


@pytest.mark.parametrize("phase", PHASES)
def test_silent_node_returns(phase: type, at_message: Any) -> None:
    with masked() as net:
        started(net)
        net.round()
        at_message["node-1", phase] = lambda: time.sleep(1.0)
        first = net.round(timeout=0.4)
        assert node_numbers(first) == ([0, 1, 2, 3] if phase in LATE else [0, 2, 3])
        for _ in range(100):
            if node_numbers(net.round(timeout=LONG)) == [0, 1, 2, 3]:
                break
            time.sleep(0.02)
        else:
            pytest.fail("node-1 did not return")


def test_round_waits_for_threshold(
    at_message: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of four nodes drop out and three are needed. The round completes when one
    returns.
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
        wait_until(lambda: len(net.server.descriptions()) == 2)
        wait_until(lambda: "a round waits for nodes: 2 here, 3 needed" in caplog.text)
        net.join(2, masking=options)
        assert len(net.finish().answers) == 3


def test_round_below_threshold_ends_empty(at_message: Any) -> None:
    with masked() as net:
        started(net)
        net.round()
        at_message["node-2", Relay] = at_message["node-3", Relay] = die
        collected = net.round(left=0.5)
        assert not collected.enough
        assert collected.answers == []


def test_interrupt_ends_waiting() -> None:
    with masked() as net:
        net.join(0), net.join(1)
        net.start(2)  # too few for a sum
        net.begin()
        net.server.wake()
        assert not net.finish().enough


def test_late_node_takes_part() -> None:
    with masked() as net:
        started(net, 3)
        net.round()
        net.join(3)
        net.ready(4)
        assert node_numbers(net.round()) == [0, 1, 2, 3]
        assert_close(net, [[0, 1, 2], [0, 1, 2, 3]])


def test_round_repeats_with_same_nodes() -> None:
    """As after a crash of the aggregator. With other nodes, the difference of the sums
    would reveal one report.
    """
    with masked() as net:
        joined = started(net)
        net.round()
        broadcast, first = net.begin(), net.server.finish()
        same = repeat_round(net, broadcast)
        assert isinstance(first.summed, Sums)
        assert isinstance(same.summed, Sums)
        assert (same.summed.vectors["w"] == first.summed.vectors["w"]).all()
        net.leave(joined[3])
        assert not repeat_round(net, broadcast, left=0.5).enough


# Data that the aggregator reads.


@pytest.mark.parametrize(("method", "rounds"), [("accelerated", 40), ("private", 110)])
def test_received_bytes_look_random(
    method: str, rounds: int, received: list[bytes], at_message: Any
) -> None:
    """Masked vectors, encrypted shares and seeds, also when nodes drop out. Only costs are
    readable.
    """
    with masked(method) as net:
        started(net)
        for _ in range(rounds):
            net.round()
        at_message["node-2", Relay] = die
        net.round()
    frames = [wire.unpack(message) for message in received]
    assert {frame.name for frame in frames} == {
        "hello",
        "ready",
        "masked report",
        "introduction",
        "shares",
        "confirmed",
        "opened",
    }
    reports = [frame for frame in frames if frame.name == "masked report"]
    assert len(reports) == 4 * rounds + 3
    for report in reports:  # the round, the attempt, the place of the vector, and costs
        assert [type(each) for each in msgspec.msgpack.decode(report.header)] == [
            int,
            int,
            int,
            list,
        ]
    sealed = [
        share
        for each in (wire.read(frame) for frame in frames if frame.name == "shares")
        for share in (each.seeds, *each.shares.values())
    ]
    for data in (b"".join(report.rest for report in reports), b"".join(sealed)):
        assert len(data) > 20_000
        # 255 degrees of freedom; probability 1e-7 outside.
        assert 140 < chi_square(data) < 395
    # The number of samples is constant, but its masked value differs in every report.
    first = [bytes(report.rest[:8]) for report in reports]
    assert len(set(first)) == len(first)


def test_aggregator_cannot_open_one_node(received: list[bytes], at_message: Any) -> None:
    """Per node and attempt, the shares of its own seed or those of its pair seeds are
    opened, never both.
    """
    with masked() as net:
        started(net)
        net.round()
        at_message["node-2", Relay] = die
        net.round()
    opened: dict[int, list[Opened]] = {}
    for message in received:
        frame = wire.unpack(message)
        if frame.name == "opened":
            each: Opened = wire.read(frame)
            opened.setdefault(each.attempt, []).append(each)
    assert len(opened) == 2
    for each_attempt in opened.values():
        own = {name for each in each_attempt for name in each.own}
        pairs = {name for each in each_attempt for name in each.pairs}
        assert not own & pairs
    last = max(opened)
    assert {name for each in opened[last] for name in each.pairs} == {"node-2"}


# Refusals.


def test_swapped_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The aggregator replaces the keys of a node in a later round."""
    group = MaskedSums._group

    def swapping(self: MaskedSums, attempt: Any, name: str, broadcast: Any) -> Group:
        original = group(self, attempt, name, broadcast)
        if name != "node-0" or broadcast.round < 2:
            return original
        forged = signed_key(KeyIdentity(), self._run, "node-1", b"p" * 32, time.time_ns())
        return replace(original, keys=(forged,))

    monkeypatch.setattr(MaskedSums, "_group", swapping)
    with masked() as net:
        joined = started(net)
        net.round()
        net.round()  # without it
        with pytest.raises(
            RefusedByAggregator, match="node-1 showed another identity earlier in this run"
        ):
            joined[0].result(LONG)


def test_replayed_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbudget.engines.grpc.masked_sums.time.time", lambda: 1000.0)
    notices: list[str] = []
    with masked() as net:
        for node in range(4):
            net.join(node, notify=notices.append)
        net.start(4)
        net.round()
        masked_sums(net).last_attempt -= 1
        net.begin()
        wait_until(lambda: any("replayed" in text for text in notices))
        assert net.finish().enough  # another attempt with a new number succeeds


def test_changed_identity_is_refused() -> None:
    with masked() as net:
        joined = started(net)
        net.round()
        net.leave(joined[2])
        again = net.join(2)  # a new process with a new key
        with pytest.raises(
            RefusedByAggregator, match="node-2 showed another identity earlier in this run"
        ):
            again.result(LONG)
        assert node_numbers(net.round()) == [0, 1, 3]


def test_saved_identity_is_accepted(tmp_path: Path) -> None:
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


def test_node_can_require_masking() -> None:
    with network() as net:
        joined = net.join(0, masking=MaskingOptions(required=True))
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        with pytest.raises(
            RefusedByAggregator, match="would see this node's reports one by one"
        ):
            joined.result(LONG)


def test_node_can_require_a_threshold() -> None:
    with masked(threshold=0.6) as net:
        joined = net.join(0)
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        with pytest.raises(
            RefusedByAggregator, match=r"secure-threshold is 0.6, and this node's is 0.667"
        ):
            joined.result(LONG)


def test_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fedbudget.secure.identity", None)
    with masked() as net:
        joined = net.join(0)
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        with pytest.raises(RefusedByAggregator, match="pip install"):
            joined.result(LONG)
    assert masking_node.describe_credential(b"k" * 32).endswith("6b" * 32)


def noisy_sums(collected: CollectedRound) -> NoisySums:
    assert isinstance(collected.summed, NoisySums)
    return collected.summed


def noise_over_plan(net: Network, rounds: int) -> float:
    """The variance of the sums relative to the paid noise; the updates are negligible."""
    result = []
    for _ in range(rounds):
        broadcast = net.begin()
        assert isinstance(broadcast, PrivateRound)
        updates = noisy_sums(net.finish()).updates
        assert updates is not None
        result.append(updates / (multipliers(broadcast).updates * broadcast.clip))
    return float(np.var(result))


def test_noise_covers_the_fewest_nodes() -> None:
    """Three of four nodes must stay, and two noise shares equal the paid noise: a node that
    reads the sum knows its own share.
    """
    with masked("private") as net:
        joined = started(net)
        assert (
            noisy_sums(net.round()).updates is None
        )  # the first round requests norms only
        # Six standard errors of 600 numbers.
        assert noise_over_plan(net, 100) == pytest.approx(4 / 2, rel=0.35)
        net.leave(joined[1])
        assert noise_over_plan(net, 90) == pytest.approx(3 / 2, rel=0.35)


@pytest.mark.parametrize("phase", PHASES)
def test_dropout_keeps_paid_noise(phase: type, at_message: Any) -> None:
    """With or without its report, the remaining shares cover the paid noise."""
    with masked("private") as net:
        started(net)
        net.round()
        for _ in range(3):
            net.round()
        at_message["node-2", phase] = die
        collected = net.round()
        assert node_numbers(collected) == ([0, 1, 2, 3] if phase in LATE else [0, 1, 3])
        assert noisy_sums(collected).nodes >= 3
        assert noise_over_plan(net, 60) == pytest.approx(3 / 2, rel=0.45)
        spent = net.aggregator.ledger.budget.totals(net.aggregator.ledger.spent)
        assert 0 < spent["privacy"] <= 1.0


def test_repeated_round_has_same_noise() -> None:
    """As after a crash of the aggregator. The mean of two independent noisy sums would have
    less noise.
    """
    with masked("private") as net:
        joined = started(net)
        net.round()
        net.round()
        broadcast, first = net.begin(), net.server.finish()
        same = repeat_round(net, broadcast)
        assert noisy_sums(first).updates is not None
        assert (noisy_sums(same).updates == noisy_sums(first).updates).all()  # type: ignore[union-attr]
        assert (noisy_sums(same).counts == noisy_sums(first).counts).all()
        net.leave(joined[3])
        assert not repeat_round(net, broadcast, left=0.5).enough


def test_round_is_paid_before_opening(at_message: Any) -> None:
    events: list[Any] = []
    with masked("private") as net:
        masked_sums(net).pay = lambda round_, rho: events.append((round_, rho))
        started(net)
        at_message["node-1", Survivors] = lambda: events.append("opened")
        broadcast = net.begin()
        net.finish()
        assert isinstance(broadcast, NormRound)
        assert events == [(1, broadcast.rho), "opened"]


def test_reopened_round_is_paid_once(
    at_message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both attempts open the same sum of the same nodes."""
    paid: list[int] = []
    sums: list[MaskedSum] = []
    can_open = MaskedSum.can_open

    def not_the_first(self: MaskedSum) -> bool:
        if self not in sums:
            sums.append(self)
        return self is not sums[0] and can_open(self)

    with masked("private", 2 / 3) as net:
        masked_sums(net).pay = lambda round_, rho: paid.append(round_)
        net.join(3, name="node-4")
        started(net, 5)
        monkeypatch.setattr(MaskedSum, "can_open", not_the_first)
        at_message["node-4", Relay] = die
        assert node_numbers(net.round()) == [0, 1, 2, 3]
        assert [len(each.circle) for each in sums] == [5, 4]
        assert [each.fewest for each in sums] == [4, 4]  # four nodes alone would need three
        assert paid == [1]
        assert node_numbers(net.round()) == [0, 1, 2, 3]
        assert paid == [1, 2]


def test_unpaid_round_is_not_opened(at_message: Any) -> None:
    opened: list[str] = []

    def pay(round_: int, rho: float) -> None:
        raise WorkError("the disk is full")

    with masked("private") as net:
        masked_sums(net).pay = pay
        started(net)
        at_message["node-1", Survivors] = lambda: opened.append("node-1")
        with pytest.raises(WorkError, match="the disk is full"):
            net.round()
        assert opened == []


@pytest.mark.parametrize("sharers", [0, 1000])
def test_node_refuses_wrong_noise_split(
    sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregator that claims more nodes would reduce the noise of each."""
    group = MaskedSums._group

    def claiming(self: MaskedSums, *arguments: Any) -> Group:
        return replace(group(self, *arguments), sharers=sharers)

    monkeypatch.setattr(MaskedSums, "_group", claiming)
    with masked("private") as net:
        joined = started(net)
        assert not net.round(left=1.0).enough
        for node in joined:
            with pytest.raises(
                RefusedByAggregator, match=f"divides the noise among {sharers} nodes"
            ):
                node.result(LONG)
