"""Aggregators that send one node something else, or run other attacks, over real gRPC.

In each case no sum is opened. Most attacks end before any node has sent its vector.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.engines.engine import RoundTerms
from fedbudget.engines.grpc import certificates
from fedbudget.engines.grpc.masked_sums import MaskedSums
from fedbudget.engines.grpc.masking_node import MaskingOptions
from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.grpc.peers import Peer, Peers
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.stream import frames, pack
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.protocol.features import held_out
from fedbudget.protocol.features.drift import DriftCatchUp, DriftPart
from fedbudget.protocol.features.validation import ValidationCatchUp
from fedbudget.protocol.messages import Broadcast, CatchUp, PrivateRound, TrainRound
from fedbudget.secure.identity import Trust
from fedbudget.secure.masked_sum import MaskedSum
from fedbudget.secure.messages import Confirmed, Group, Shares, TallyShape, Terms
from support.masked_network import masked, masked_sums, started
from support.networked import LONG, METHODS, RUN, Network, node_numbers, wait_until

Change = Callable[[Any], Any]
ODD = "node-1"
ALSO = {"survivors": "node-0"}
"""A second node that receives the changed message."""

UNFIT = "another task, model, state or group"


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> dict[str, Change]:
    """Changes of messages to one node, by their name. A broadcast is changed decoded."""
    changes: dict[str, Change] = {}
    send = Peers.send

    def lying(self: Peers, peer: Peer, messages: list[bytes]) -> None:
        sent: list[bytes] = []
        for message in messages:
            frame = wire.unpack(message)
            change = changes.get(frame.name)
            if peer.name not in (ODD, ALSO.get(frame.name)) or change is None:
                sent.append(message)
            elif frame.name == "broadcast":
                sent += frames(change(peer))
            else:
                sent += pack(change(wire.read(frame)))
        send(self, peer, sent)

    monkeypatch.setattr(Peers, "send", lying)
    return changes


def with_broadcast(net: Network, change: Change, *, catch_up: bool = False) -> Change:
    """Replace the broadcast to one node.

    Args:
      catch_up: whether to send it to a node that has no memory.
    """

    def packed(peer: Peer) -> wire.Packed:
        pending = net.server._rounds.pending
        assert pending is not None
        base_round = 0 if catch_up else net.server.members[peer.name].base_round
        return wire.pack_broadcast(change(pending.broadcast), base_round, catch_up=catch_up)

    return packed


def in_task(**fields: Any) -> dict[str, Change]:
    def change(welcome: Welcome) -> Welcome:
        return replace(welcome, task=replace(welcome.task, **fields))

    return {"welcome": change}


def in_group(change: Change) -> dict[str, Change]:
    return {"group": change}


def swapped(group: Group) -> Group:
    first, second, *others = group.ring
    return replace(group, ring=(second, first, *others))


def without_last(group: Group) -> Group:
    last = [name for name in group.ring if name != ODD][-1]
    return replace(group, ring=tuple(name for name in group.ring if name != last))


def unchecked(self: MaskedSum, name: str, shares: Shares) -> None:
    """Receive shares that do not fit, as a lying aggregator does."""
    sealed = defaultdict(lambda: bytes(50), shares.shares)
    self.sent[name] = replace(shares, shares=sealed)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(in_task(most_counted=1), id="weights"),
        pytest.param(in_task(most_counted=2**39), id="scale"),
        pytest.param(in_task(seed=8), id="task"),
        pytest.param({"terms": lambda terms: Terms(0.9)}, id="threshold"),
        pytest.param(in_group(swapped), id="places"),
        pytest.param(in_group(without_last), id="group"),
        pytest.param(
            in_group(lambda group: replace(group, tally=TallyShape(2))), id="tally"
        ),
    ],
)
def test_other_terms_open_nothing(
    changes: dict[str, Change],
    lie: dict[str, Change],
    received: list[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "group" in changes:
        monkeypatch.setattr(MaskedSum, "receive_shares", unchecked)
    lie |= changes
    with masked() as net:
        started(net)
        assert not net.round(left=2.0).enough
        wait_until(lambda: UNFIT in caplog.text)
    assert_nothing_opened(received)


def opened_by(received: list[bytes]) -> int:
    """Return how many nodes have sent shares that open a sum."""
    return sum(wire.unpack(data).name == "opened" for data in received)


def assert_nothing_opened(received: list[bytes]) -> None:
    """No node has sent a share that opens a sum."""
    assert opened_by(received) == 0


def nudged(broadcast: Broadcast) -> Broadcast:
    w = broadcast.w.copy()
    w[0] = np.nextafter(w[0], np.float32(1))
    return replace(broadcast, w=w)


def roomier(broadcast: Broadcast) -> Broadcast:
    """A coordinate that changes the range of all others."""
    w = broadcast.w.copy()
    w[-1] = 2.0**30
    return replace(broadcast, w=w)


def longer(broadcast: Broadcast) -> Broadcast:
    assert hasattr(broadcast, "tau")
    return replace(broadcast, tau=broadcast.tau + 1, effective=broadcast.tau + 1)  # type: ignore[call-arg]


@pytest.mark.parametrize("change", [nudged, roomier, longer])
def test_other_broadcast_opens_nothing(
    change: Change,
    lie: dict[str, Change],
    received: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with masked("fixed") as net:
        started(net)
        assert net.round().enough
        wait_until(lambda: opened_by(received) == 4)
        received.clear()
        lie["broadcast"] = with_broadcast(net, change)
        assert not net.round(left=2.0).enough
        wait_until(lambda: UNFIT in caplog.text)
        assert_nothing_opened(received)


def far(part: Any) -> dict[str, Any]:
    """A false mean of all drift corrections. With a very large one, the local updates of a
    node would follow from that alone."""
    return {"mean": np.full_like(part.mean, 1e9)}


def far_mean(part: Any) -> dict[str, Any]:
    """A false mean of w. Where it is very large, its validation loss is known."""
    return {"mean": replace(part.mean, w=np.full_like(part.mean.w, 1e30))}


def far_best(part: Any) -> dict[str, Any]:
    """The same for the best validated w."""
    return {"w": np.full_like(part.w, 1e30)}


@pytest.mark.parametrize(
    ("method", "kind", "lying"),
    [
        ("accelerated", DriftCatchUp, far),
        ("validated", ValidationCatchUp, far_mean),
        ("validated", ValidationCatchUp, far_best),
    ],
)
def test_other_state_opens_nothing(
    method: str,
    kind: Any,
    lying: Change,
    lie: dict[str, Change],
    received: list[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One node receives a false state of earlier rounds, as if it had been away."""
    monkeypatch.setattr(held_out, "FEWEST_ROWS", 2)

    def changed(broadcast: Broadcast) -> Broadcast:
        assert broadcast.catch_up is not None
        parts = broadcast.catch_up.parts
        assert any(isinstance(each, kind) for each in parts)
        lies = [
            replace(each, **lying(each)) if isinstance(each, kind) else each
            for each in parts
        ]
        return replace(broadcast, catch_up=CatchUp(broadcast.catch_up.best, tuple(lies)))

    with masked(method) as net:
        started(net)
        for _ in range(2):
            assert net.round().enough
        wait_until(lambda: opened_by(received) == 8)
        received.clear()
        lie["broadcast"] = with_broadcast(net, changed, catch_up=True)
        assert not net.round(left=2.0).enough
        wait_until(lambda: UNFIT in caplog.text)
        assert_nothing_opened(received)


def test_other_noise_split_opens_nothing(
    lie: dict[str, Change], received: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with masked("private") as net:
        started(net)
        net.round()
        wait_until(lambda: opened_by(received) == 4)
        received.clear()
        lie["group"] = lambda group: replace(group, sharers=group.sharers + 1)
        broadcast = net.begin(left=2.0)
        assert isinstance(broadcast, PrivateRound)
        assert not net.finish().enough
        wait_until(lambda: UNFIT in caplog.text)
        assert_nothing_opened(received)


def test_other_survivors_open_nothing(
    lie: dict[str, Change], received: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four nodes hear that a third one has left, in order to open both its secrets.

    Each list has too few confirmations, although the aggregator forges others.
    """
    monkeypatch.setattr(
        MaskedSum,
        "receive_confirmed",
        lambda self, name, confirmed: self.confirmed.update(
            {
                name: Confirmed(
                    self.attempt, defaultdict(lambda: bytes(16), confirmed.proofs)
                )
            }
        ),
    )
    notices: list[str] = []
    with masked() as net:
        for node in range(4):
            net.join(node, notify=notices.append)
        net.start(4)
        sums = masked_sums(net)
        ring = sorted(
            sums._participants,
            key=lambda name: sha256(sums._ring_salt + name.encode()).digest(),
        )
        left = ring.index("node-3")
        lie["survivors"] = lambda survivors: replace(survivors, absent=(left,))
        assert not net.round(left=2.0).enough
        wait_until(
            lambda: any("has not confirmed these survivors" in text for text in notices)
        )
    assert_nothing_opened(received)


def test_weight_of_one_node_reveals_nothing(
    monkeypatch: pytest.MonkeyPatch, received: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """All other nodes are to count as one sample each, and to vanish beside the scale."""
    send = Peers.send

    def lying(self: Peers, peer: Peer, messages: list[bytes]) -> None:
        sent: list[bytes] = []
        for message in messages:
            frame = wire.unpack(message)
            if frame.name == "welcome":
                welcome: Welcome = wire.read(frame)
                cap = 2**39 if peer.name == ODD else 1
                task = replace(welcome.task, most_counted=cap)
                sent += pack(replace(welcome, task=task))
            else:
                sent.append(message)
        send(self, peer, sent)

    monkeypatch.setattr(Peers, "send", lying)
    with masked() as net:
        joined = started(net)
        assert not net.round(left=2.0).enough
        for each in joined:
            with pytest.raises(RefusedByAggregator, match=UNFIT):
                each.result(LONG)
    assert_nothing_opened(received)


def test_same_model_opens_for_one_set(caplog: pytest.LogCaptureFixture) -> None:
    """The same w under two numbers of a round, with and without one node."""
    with masked("fixed") as net:
        joined = started(net)
        broadcast = net.begin()
        assert net.server.finish().enough

        def again(number: int, change: Change, left: float) -> bool:
            for member in net.server.members.values():
                member.base_round = 0
            repeated = change(replace(broadcast, round=number))
            net.server.begin(repeated, RoundTerms(1, LONG, left))
            return net.server.finish().enough

        assert again(2, lambda same: same, LONG)
        net.leave(joined[3])
        assert not again(3, lambda same: same, 2.0)
        assert "has opened this round with other nodes and declines" in caplog.text
        # This is not prevented: a model that differs a little (see the guide).
        assert again(4, nudged, LONG)


def test_task_stays_the_same_in_a_run() -> None:
    """With another cap in a second round, the sums would differ by one vector."""
    with masked() as net:
        joined = started(net)
        net.round()
        address = net.address
        members = net.server.members.snapshot()
        net.server.close(Farewell("later", again=True))
        sums = MaskedSums(RUN, 2 / 3, Trust())
        net.server = AggregatorServer(address, run=RUN, tokens=Tokens(), reports=sums)
        net.server.open()
        net.server.start(replace(net.task, most_counted=15), members)
        for each in joined:
            with pytest.raises(RefusedByAggregator, match="changed the task within a run"):
                each.result(LONG)


def test_node_can_require_more_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """The aggregator leaves a node out that requires more; the node refuses otherwise."""
    with masked() as net:
        for node in range(3):
            net.join(node)
        net.join(3, masking=MaskingOptions(least=5))
        net.start(4)
        assert node_numbers(net.round()) == [0, 1, 2]
        assert "node-3 requires sums over 5 nodes; 4 are here" in caplog.text


def test_known_nodes_are_the_least(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that knows 5 others requires 6 nodes, unless its user chooses fewer."""
    known = tmp_path / "known"
    lines = [f"other-{number} {number:064x}" for number in range(5)]
    known.write_text("\n".join(lines))
    notices: list[str] = []
    with masked() as net:
        for node in range(3):
            net.join(node)
        net.join(3, masking=MaskingOptions(known=known), notify=notices.append)
        net.start(4)
        assert node_numbers(net.round()) == [0, 1, 2]
        assert "node-3 requires sums over 6 nodes; 4 are here" in caplog.text
    assert any(f"other nodes need the keys in {known}" in text for text in notices)


def test_first_keys_are_announced() -> None:
    notices: list[str] = []
    with masked() as net:
        net.join(0, notify=notices.append)
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        net.ready(1)
    assert any("the first key of each other node is trusted" in text for text in notices)


def test_smaller_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aggregator ignores the smallest number of nodes that all require."""
    monkeypatch.setattr(MaskedSums, "_suitable", lambda self, names: set(names))
    monkeypatch.setattr(MaskedSums, "fewest", 3)
    notices: list[str] = []
    with masked() as net:
        for node in range(4):
            net.join(node, masking=MaskingOptions(least=5), notify=notices.append)
        net.start(4)
        assert not net.round(left=2.0).enough
        wait_until(
            lambda: any("a group of 4; this node requires 5" in text for text in notices)
        )


def test_diverged_node_abstains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node without a finite report sends no vector, and not one of zeros: the sum over
    fewer nodes than the threshold stays closed.
    """
    from fedbudget.engines.remote.worker import Worker

    answer = Worker.answer
    diverged: set[int] = set()

    def diverging(self: Worker, request: Any) -> Any:
        found = answer(self, request)
        if not diverged & set(found.report.nodes.tolist()):
            return found
        w = np.full_like(found.report.vectors["w"], np.nan)
        return replace(found, report=replace(found.report, vectors={"w": w}))

    monkeypatch.setattr(Worker, "answer", diverging)
    with masked("fixed") as net:
        started(net)
        diverged.add(2)
        assert node_numbers(net.round()) == [0, 1, 3]
        assert "node-2's report is not finite" in caplog.text
        diverged.add(1)
        net.begin()
        collected = net.server.finish()
        assert collected.summed is not None
        assert collected.summed.totals["losses"] == np.inf  # type: ignore[union-attr]
        assert collected.summed.totals["used"] == 0  # type: ignore[union-attr]


def test_aggregator_certificate_joins_no_sum(
    tmp_path: Path, received: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """The aggregator takes part as a node with its own certificate, from the same CA."""
    names = ["node-0", "node-1", "node-2"]
    certificates.make(tmp_path, hosts=["localhost"], nodes=names)

    def options(file: str) -> MaskingOptions:
        cert, key = (tmp_path / f"{file}.{end}" for end in ("pem", "key"))
        return MaskingOptions(cert=cert, key=key, ca=tmp_path / "ca.pem")

    with masked() as net:
        for node, own in enumerate(names):
            net.join(node, masking=options(own))
        net.join(3, name="localhost", masking=options("aggregator"))
        net.start(4)
        assert not net.round(left=2.0).enough
        wait_until(lambda: "localhost is not the name in its certificate" in caplog.text)
    assert_nothing_opened(received)


def test_no_node_has_a_number_of_updates_of_its_own(
    received: list[bytes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes receive the same message: one update for node 3, and a thousand for the
    others, whose updates lead to almost the same sum as none. The sum would be the gradient
    of node 3.
    """
    by_speed = replace(METHODS["accelerated"], by_speed=1000)
    monkeypatch.setitem(METHODS, "by speed", by_speed)
    with masked("by speed") as net:
        joined = [net.join(node) for node in range(4)]
        net.server.wait_for(4, lambda: False)
        net.server.start(replace(net.task, tau_max=1000))
        for each in joined:
            with pytest.raises(RefusedByAggregator, match="other numbers of local updates"):
                each.result(LONG)
    assert_nothing_opened(received)


def test_own_correction_is_not_amplified(received: list[bytes]) -> None:
    """All nodes receive the same message. Only node 3 may keep its memory, so only it has a
    correction of its own, which a large factor lets outweigh all updates.
    """
    with masked() as net:
        joined = started(net)
        net.round()
        net.round()
        wait_until(lambda: opened_by(received) == 8)
        received.clear()
        pending = net.aggregator.pending
        assert isinstance(pending, TrainRound)
        parts = tuple(
            replace(part, correct=True, strength=1e6)
            if isinstance(part, DriftPart)
            else part
            for part in pending.parts
        )
        for member in net.server.members.values():
            member.base_round = 2 if 3 in member.numbers else 0
        lie = replace(pending, parts=parts, eta=1e-3)
        net.server.begin(lie, RoundTerms(1, LONG, 2.0))
        assert not net.server.finish().enough
        assert not any(each.done() for each in joined)  # they would accept a true message
    assert_nothing_opened(received)


def test_noise_is_divided_only_with_verified_nodes(received: list[bytes]) -> None:
    """An aggregator divides the noise of a node's samples among nodes that it invents. The
    node relies on its own noise, because it was not started with secure aggregation.
    """
    with masked("sums") as net:
        joined = net.join(0, masking=MaskingOptions())
        net.server.wait_for(1, lambda: False)
        net.server.start(net.task)
        with pytest.raises(RefusedByAggregator, match="which an aggregator could invent"):
            joined.result(LONG)
    names = {wire.unpack(data).name for data in received}
    assert names == {"hello", "refusal"}
