"""A node, as Flower's ClientApp is called: with one message, in a process that may be gone after it.

What the node remembers is in the context that Flower keeps for it: how its fleet stood after each of the last two
rounds that it made, because the last may not have been counted. A node that does not remember what it must says so.

A person's mistake (a file that is not there) is an answer too, and not an error: it is told where the run was started.
"""

from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbudget.engines.flower import records
from fedbudget.engines.remote.messages import Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.models.base import Model
from fedbudget.protocol.messages import LocalError, PeerError
from fedbudget.protocol.state import FleetState


@dataclass(frozen=True)
class NodeSetup:
    """How a node takes part.

    Args:
      partition: which share of the run's dataset it has, if that is what it has.
      device: where PyTorch computes.
      model: its own, where it is not one that goes by a name.
    """

    data: NodeData
    partition: int | None = None
    device: str = "auto"
    model: Model | None = None


Setup = Callable[[Context], NodeSetup]
"""Finds that out; what is wrong with it is told where the run was started."""

_ROUNDS = 2  # that are remembered
_MEMORY = "fedbudget"  # how the names of all our records in the context begin
_warm: set[str] = set()  # runs that this process has made an update of


def reply(message: Message, context: Context, setup: Setup) -> Message:
    """What the node's samples are like, what a round takes before the first, or a round."""
    content = message.content
    kind = message.metadata.message_type
    try:
        welcome = None if kind == "query.describe" else records.welcome_in(content)
        node = setup(context)
        worker = Worker(node.data, device=node.device, model=node.model)
        if welcome is None:
            answer = records.hello_out(worker.hello(str(context.node_id)), node.partition)
        elif kind.startswith("query"):
            answer = records.costs_out(worker.start(welcome))
        else:
            answer = _train(worker, welcome, content, context.state)
    except (UserError, PeerError) as error:
        answer = records.refusal_out(str(error))
    return Message(answer, reply_to=message)


def _train(
    worker: Worker, welcome: Welcome, content: RecordDict, state: RecordDict
) -> RecordDict:
    base_round = records.base_round_in(content)
    worker.accept(welcome)
    try:
        memories = recall(state, welcome)
        worker.recall(memories)
    except (LocalError, KeyError, ValueError) as error:
        return records.refusal_out(f"the memory cannot be read: {error}", lost=True)
    if base_round not in (0, *memories):
        reason = f"the memory cannot stand after round {base_round}, only after {sorted(memories)}"
        return records.refusal_out(reason, lost=True)
    request = records.request_in(content, worker.w_after(base_round))
    if request.broadcast.tau > 0 and welcome.run not in _warm:
        worker.warm_up(request)
        _warm.add(welcome.run)
    answer = worker.answer(request)
    remember(state, welcome, worker.memories(_ROUNDS))
    fewer_bits = request.broadcast.compress not in (None, "none")
    encoded = worker.encode(answer.report) if fewer_bits else None
    return records.answer_out(answer.report, answer.costs, answer.tallies, encoded)


def remember(state: RecordDict, welcome: Welcome, memories: dict[int, FleetState]) -> None:
    """Puts memories in the place of all that were there."""
    for name in [name for name in state if name.startswith(_MEMORY)]:
        del state[name]
    state[_MEMORY] = ConfigRecord({"run": welcome.run, "rounds": list(memories)})
    for number, memory in memories.items():
        state[f"{_MEMORY}-{number}-arrays"], state[f"{_MEMORY}-{number}-numbers"] = (
            records.memory_out(memory)
        )


def recall(state: RecordDict, welcome: Welcome) -> dict[int, FleetState]:
    """The memories of this run, by their rounds; a context may be older than the run."""
    known = state.config_records.get(_MEMORY)
    if known is None or known["run"] != welcome.run:
        return {}
    names = [f"{_MEMORY}-{int(number)}" for number in known["rounds"]]  # type: ignore[union-attr]
    arrays = state.array_records
    numbers = state.config_records
    memories = [
        records.memory_in(arrays[f"{name}-arrays"], numbers[f"{name}-numbers"])
        for name in names
    ]
    return {memory.broadcast.round: memory for memory in memories}
