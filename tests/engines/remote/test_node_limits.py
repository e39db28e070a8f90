"""A node's own limits: what it will not do it says why not, and the aggregator hears it."""

from dataclasses import replace
from typing import Any

import pytest

from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.remote.messages import RoundRequest, Welcome
from fedbudget.engines.remote.node_limits import BeyondLimits, NodeLimits
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast
from support.networked import LONG, aggregator, network, node_data, task, until


def worker(batch: int | None, **limits: Any) -> Worker:
    made = Worker(node_data(1), limits=NodeLimits(**limits))
    made.accept(Welcome("run", task(batch=batch), (0,)))
    return made


@pytest.mark.parametrize(("batch", "least"), [(None, 16), (16, 16), (20, 100)])
def test_mini_batches_that_are_large_enough(batch: int | None, least: int) -> None:
    """Of 20 samples: whole shards are what they are."""
    worker(batch, min_batch=least)


def test_mini_batches_that_are_too_small() -> None:
    with pytest.raises(
        BeyondLimits, match=r"mini-batches of 1 samples are requested.*min_batch is 16"
    ):
        worker(1, min_batch=16)


def test_more_local_updates_than_it_makes() -> None:
    ours, asked = worker(None, max_tau=5), aggregator().start()
    assert isinstance(asked, Broadcast)
    ours.answer(RoundRequest(replace(asked, tau=5), 0))
    with pytest.raises(
        BeyondLimits,
        match="6 local updates are requested in a round; this node's max_tau is 5",
    ):
        ours.answer(RoundRequest(replace(asked, tau=6), 0))


@pytest.mark.parametrize(
    "wrong", [{"min_batch": 0}, {"max_tau": 0}, {"min_interval": -1.0}]
)
def test_limits_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(UserError, match="at least 1"):
        NodeLimits(**wrong)


def test_classes_that_an_aggregator_does_not_know() -> None:
    asked = task()
    with pytest.raises(
        UserError, match="this node has class 'no', which the aggregator does not know"
    ):
        node_data(0).fleet(
            replace(asked, samples=replace(asked.samples, classes=("maybe", "yes"))), [0]
        )


def test_a_refusal_is_heard_by_the_aggregator_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with network(batch=2) as net:
        net.join(0)
        careful = net.join(1, worker=Worker(node_data(1), limits=NodeLimits(min_batch=16)))
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        with pytest.raises(
            RefusedByAggregator, match=r"mini-batches of 2 samples.*--min-batch is 16"
        ):
            careful.result(LONG)
        net.ready(1)
        net.aggregator.start()
        assert len(net.round().answers) == 1
        until(
            lambda: (
                "is dropped: it will not take part: mini-batches of 2 samples"
                in caplog.text
            )
        )
