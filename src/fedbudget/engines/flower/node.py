"""A node behind Flower's ClientApp: one message per call, perhaps one call per process.

The node's memory is in the context that Flower keeps for it: its state after each of its
last two rounds, because the aggregator may not have counted the last. A node without the
required memory reports that.

A user's mistake, such as a missing file, is sent as a refusal, so that it appears at the
start of the run. In a private run, the log of the node has it instead, because it may name
values.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbudget.engines.flower import records
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import (
    HIDDEN_REASON,
    LONG_REASON,
    NodeRefusal,
    Ready,
    Welcome,
)
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import NodeResult, Worker
from fedbudget.errors import PublicReason, UserError
from fedbudget.models.base import Model
from fedbudget.protocol.features.feature import FleetState
from fedbudget.protocol.messages import LocalError, LocalUpdates, PeerError, SiteRound

PARTITION = "partition"
"""Entry of a hello: index of the node's part of the run's dataset."""

LOG = logging.getLogger("fedbudget.flower")

_ROUNDS = 2  # number of rounds in memory
_MEMORY = "fedbudget"  # prefix of our records in the context
_warm: set[str] = set()  # runs of which this process has made an update


@dataclass(frozen=True)
class NodeSetup:
    """How a node takes part.

    Args:
      partition: index of its part of the run's dataset, if it has one.
      device: of PyTorch.
      model: its own model; None for a named model.
      keep_figures: whether the figures of its personal model stay here.
      batch_secret: hides the positions of mini-batches from the aggregator.
      on_result: called with the result of the run, if the aggregator sends it.
    """

    data: NodeData
    partition: int | None = None
    device: str = "auto"
    model: Model | None = None
    keep_figures: bool = False
    batch_secret: int | None = None
    on_result: Callable[[NodeResult], None] = lambda result: None


Setup = Callable[[Context], NodeSetup]
"""Returns a node's setup; its errors appear at the start of the run."""


def reply(
    message: Message, context: Context, setup: Setup, *, private: bool = False
) -> Message:
    """Answer a message: describe the samples, run a trial, or run a round.

    Args:
      private: whether the run is private.
    """
    content = message.content
    kind = message.metadata.message_type
    try:
        welcome: Welcome | None = None
        if kind != "query.describe":
            welcome = wire.read(records.frame(content, "welcome"))
        node = setup(context)
        worker = Worker(
            node.data,
            device=node.device,
            model=node.model,
            keep_figures=node.keep_figures,
            batch_secret=node.batch_secret,
            on_result=node.on_result,
        )
        if welcome is None:
            hello = worker.hello(str(context.node_id), private=private)
            answer = records.to_content(wire.pack(hello))
            if node.partition is not None:
                answer.config_records["hello"][PARTITION] = node.partition
        elif kind.startswith("query"):
            answer = records.to_content(wire.pack(Ready(worker.start(welcome))))
        else:
            answer = _train(worker, welcome, content, context.state)
    except (PublicReason, PeerError) as error:
        answer = _refusal(str(error))
    except Exception as error:  # Flower would send its text too
        if private:
            LOG.exception("this node refuses")
            answer = _refusal(HIDDEN_REASON)
        elif isinstance(error, UserError):
            answer = _refusal(str(error))
        else:
            raise
    return Message(answer, reply_to=message)


def _train(
    worker: Worker, welcome: Welcome, content: RecordDict, state: RecordDict
) -> RecordDict:
    encoded = records.broadcast(content, welcome.task, len(welcome.numbers))
    base_round = encoded.sent.base_round
    worker.accept(welcome)
    try:
        memories = recall(state, welcome)
        worker.recall(memories)
    except (LocalError, KeyError, ValueError) as error:
        return _refusal(f"the memory cannot be read: {error}", lost=True)
    if base_round not in (0, *memories):
        reason = (
            f"this node has no memory of round {base_round}, only of {sorted(memories)}"
        )
        return _refusal(reason, lost=True)

    request = encoded.request(worker.w_after(base_round))
    if isinstance(request.broadcast, LocalUpdates) and welcome.run not in _warm:
        worker.warm_up(request)
        _warm.add(welcome.run)
    answer = worker.answer(request)
    if not isinstance(request.broadcast, SiteRound):
        remember(state, welcome, worker.memories(_ROUNDS))
    vectors = worker.encode(answer.report)
    return records.to_content(
        wire.pack_report(answer.report, answer.costs, vectors, answer.tallies)
    )


def _refusal(reason: str, *, lost: bool = False) -> RecordDict:
    return records.to_content(wire.pack(NodeRefusal(reason[:LONG_REASON], lost)))


def remember(state: RecordDict, welcome: Welcome, memories: dict[int, FleetState]) -> None:
    """Replace all memories in the context by these."""
    for name in [name for name in state if name.startswith(_MEMORY)]:
        del state[name]
    state[_MEMORY] = ConfigRecord({"run": welcome.run, "rounds": list(memories)})
    for number, memory in memories.items():
        arrays, numbers = records.memory_out(memory)
        state[f"{_MEMORY}-{number}-arrays"] = arrays
        state[f"{_MEMORY}-{number}-numbers"] = numbers


def recall(state: RecordDict, welcome: Welcome) -> dict[int, FleetState]:
    """Memories of this run by round; a context may be older than the run."""
    index = state.config_records.get(_MEMORY)
    if index is None or index["run"] != welcome.run:
        return {}
    memories: dict[int, FleetState] = {}
    for number in index["rounds"]:  # type: ignore[union-attr]
        name = f"{_MEMORY}-{int(number)}"
        memory = records.memory_in(
            state.array_records[f"{name}-arrays"], state.config_records[f"{name}-numbers"]
        )
        memories[memory.broadcast.round] = memory
    return memories
