"""A Flower grid in this process that calls the real ClientApp for every node.

Messages and contexts pass through Flower's serialization, so only serialized content
arrives. A test can make a node fail, forget, be away, or withhold its reply."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedbudget.flower import client

FIRST = 100
"""Flower's ID of the first node."""


def serialized(content: RecordDict) -> RecordDict:
    """Return the content after serialization and deserialization."""
    return recorddict_from_proto(recorddict_to_proto(content))


class LocalGrid(Grid):
    """Calls nodes directly.

    Args:
      run_config: the run configuration.
      node_configs: one configuration per node; Flower's IDs are FIRST, FIRST + 1, ...
      app: the ClientApp of all nodes.
    """

    def __init__(
        self,
        run_config: UserConfig,
        node_configs: Iterable[UserConfig],
        app: ClientApp = client,
    ) -> None:
        self.contexts = {
            number: Context(7, number, config, RecordDict(), run_config)
            for number, config in enumerate(node_configs, FIRST)
        }
        # The identity that Flower writes into new messages.
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = 7
        TaskIdentity.node_id = 1
        self.away: set[int] = set()
        self.before: Callable[[int, Message], None] = lambda node, message: None
        """Called before a node; an exception makes the node fail."""
        self.withheld: Callable[[int, Message], bool] = lambda node, message: False
        """Whether a reply is still withheld; called at every pull."""
        self.received: list[tuple[int, str, RecordDict]] = []  # node, kind, content
        self._app = app
        self._numbers = itertools.count()
        self._replies: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{next(self._numbers)}"
            sent.append(message.metadata.message_id)
            self._replies[sent[-1]] = self._answer(message.metadata.dst_node_id, message)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        available = [
            name
            for name in message_ids
            if not self.withheld(
                self._replies[name].metadata.src_node_id, self._replies[name]
            )
        ]
        return [self._replies.pop(name) for name in available]

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.away]

    def _answer(self, node: int, message: Message) -> Message:
        arrived = Message(serialized(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        self.received.append((node, message.metadata.message_type, arrived.content))
        # A copy, as if the node ran in another process.
        context = context_from_proto(context_to_proto(self.contexts[node]))
        try:
            self.before(node, arrived)
            reply: Message = self._app(arrived, context)
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=arrived)
        self.contexts[node] = context_from_proto(context_to_proto(context))
        reply.content = serialized(reply.content)
        return reply

    # Required by the Grid interface, unused here.

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *arguments: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


def partitions(nodes: int, order: Iterable[int] | None = None) -> list[UserConfig]:
    """Node configurations for a shared, partitioned dataset."""
    return [
        {"partition-id": number, "num-partitions": nodes}
        for number in order or range(nodes)
    ]


def run_config(**settings: Any) -> UserConfig:
    """Flower's run configuration for these settings."""
    config: Mapping[str, Any] = {
        name.replace("_", "-"): value for name, value in settings.items()
    }
    return dict(config)
