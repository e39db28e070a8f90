"""Private rounds whose sums are masked: nodes add the noise, and the aggregator sees
nothing without it.
"""

from typing import Any

import msgspec
import numpy as np
import pytest

from fedbudget.engines.grpc.masked_rounds import MaskedRounds
from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.round import CollectedRound
from fedbudget.errors import WorkError
from fedbudget.protocol.privacy import NoisySums, multipliers
from fedbudget.secure.masked_sum import MaskedSum
from fedbudget.secure.messages import Group, Relay, Shares, Survivors, from_node
from support.masked_network import PHASES, chi_square, die, made_again, masked, started
from support.networked import LONG, Network, numbers


def known(collected: CollectedRound) -> NoisySums:
    assert isinstance(collected.summed, NoisySums)
    return collected.summed


def noise_over_plan(net: Network, rounds: int) -> float:
    """The variance of sums, in multiples of what was paid for; of updates there is hardly
    anything in them.
    """
    found = []
    for _ in range(rounds):
        broadcast = net.begin()
        sums, private = known(net.finish()).sums, broadcast.private
        assert private is not None
        assert sums.w is not None
        found.append(sums.w[0] / (multipliers(private).updates * private.clip))
    return float(np.var(found))


def test_noise_is_as_planned_for_the_fewest_and_more_where_more_are_there() -> None:
    """Three of four must stay, and two shares are as much as is paid for: whoever looks at
    a sum knows one of them.
    """
    with masked("private") as net:
        joined = started(net)
        assert known(net.round()).sums.w is None  # the first, which asks for lengths
        assert noise_over_plan(net, 100) == pytest.approx(
            4 / 2, rel=0.35
        )  # six standard errors of 600 numbers
        net.leave(joined[1])
        assert noise_over_plan(net, 90) == pytest.approx(3 / 2, rel=0.35)


@pytest.mark.parametrize("phase", PHASES)
def test_a_node_that_dies_takes_no_noise_away(phase: type, at_message: Any) -> None:
    """Whether its part is in the sum or not, there are shares for what is paid."""
    with masked("private") as net:
        started(net)
        net.round()
        for _ in range(3):
            net.round()
        at_message["node-2", phase] = die
        collected = net.round()
        assert numbers(collected) == ([0, 1, 2, 3] if phase is Survivors else [0, 1, 3])
        assert known(collected).sums.nodes >= 3
        assert noise_over_plan(net, 60) == pytest.approx(3 / 2, rel=0.45)
        spent = net.aggregator.ledger.budget.totals(net.aggregator.ledger.spent)
        assert 0 < spent["privacy"] <= 1.0


def test_all_that_is_received_looks_like_chance(
    received: list[pb.FromNode], at_message: Any
) -> None:
    """No update, no length, no count: masked vectors and sealed shares, and what rounds
    cost.
    """
    rounds = 110
    with masked("private") as net:
        started(net)
        for _ in range(rounds):
            net.round()
        at_message["node-2", Relay] = die
        net.round()
    assert {message.WhichOneof("kind") for message in received} == {
        "hello",
        "ready",
        "report",
        "masking",
    }
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


def test_a_round_that_is_made_again_has_the_same_noise() -> None:
    """As after a crash of the aggregator: of two sums with noise of their own, the mean
    would have less.
    """
    with masked("private") as net:
        joined = started(net)
        net.round()
        net.round()
        broadcast, first = net.begin(), net.server.finish()
        same = made_again(net, broadcast)
        assert (known(same).sums.w == known(first).sums.w).all()  # type: ignore[union-attr]
        assert (known(same).counts == known(first).counts).all()
        net.leave(joined[3])
        assert not made_again(net, broadcast, left=0.5).enough


def test_a_round_is_paid_for_before_it_is_opened(at_message: Any) -> None:
    happened: list[Any] = []
    with masked("private") as net:
        net.server.pay_before_opening(lambda round_, rho: happened.append((round_, rho)))
        started(net)
        at_message["node-1", Survivors] = lambda: happened.append("opened")
        private = net.begin().private
        net.finish()
        assert private is not None
        assert happened == [(1, private.rho), "opened"]


def test_a_round_that_is_opened_twice_is_paid_for_once(
    at_message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever can be opened of it is the same, and by the same nodes."""
    paid: list[int] = []
    sums: list[MaskedSum] = []
    can_open = MaskedSum.can_open

    def not_the_first(self: MaskedSum) -> bool:
        if self not in sums:
            sums.append(self)
        return self is not sums[0] and can_open(self)

    with masked("private", 2 / 3) as net:
        net.server.pay_before_opening(lambda round_, rho: paid.append(round_))
        net.join(3, name="node-4")
        started(net, 5)
        monkeypatch.setattr(MaskedSum, "can_open", not_the_first)
        at_message["node-4", Relay] = die
        assert numbers(net.round()) == [0, 1, 2, 3]
        assert [len(each.circle) for each in sums] == [5, 4]
        assert [each.fewest for each in sums] == [4, 4]  # of four alone it would be three
        assert paid == [1]
        assert numbers(net.round()) == [0, 1, 2, 3]
        assert paid == [1, 2]


def test_what_cannot_be_paid_for_is_not_opened(at_message: Any) -> None:
    opened: list[str] = []

    def pay(round_: int, rho: float) -> None:
        raise WorkError("the disk is full")

    with masked("private") as net:
        net.server.pay_before_opening(pay)
        started(net)
        at_message["node-1", Survivors] = lambda: opened.append("node-1")
        with pytest.raises(WorkError, match="the disk is full"):
            net.round()
        assert opened == []


@pytest.mark.parametrize("sharers", [0, 3, 1000])
def test_a_node_adds_noise_for_no_more_than_must_stay(
    sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregator that says there are many more would have less noise; of four, three
    open a sum, one may look.
    """
    group = MaskedRounds._group

    def lying(self: MaskedRounds, *arguments: Any) -> Group:
        return msgspec.structs.replace(group(self, *arguments), sharers=sharers)

    monkeypatch.setattr(MaskedRounds, "_group", lying)
    with masked("private") as net:
        joined = started(net)
        assert not net.round(left=1.0).enough
        for node in joined:
            with pytest.raises(
                RefusedByAggregator, match=f"divides the noise among {sharers} nodes"
            ):
                node.result(LONG)
