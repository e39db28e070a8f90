"""A grid in this process: every node is the real ClientApp, called with a message as if it
had come over a network.

Messages and contexts go through Flower's own serialisation on their way, so that nothing
but what it carries arrives. A test may make a node fail, forget, be away, or keep its reply
back."""

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
"""Flower's number of the first node."""


def carried(content: RecordDict) -> RecordDict:
    """As it arrives."""
    return recorddict_from_proto(recorddict_to_proto(content))


class LocalGrid(Grid):
    """Nodes that are called directly.

    Args:
      run_config: the run's.
      node_configs: of each node; Flower's numbers of them are FIRST, FIRST + 1 and so on.
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
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            1,
            7,
            1,
        )  # whose messages are made here
        self.away: set[int] = set()
        self.before: Callable[[int, Message], None] = lambda node, message: None
        """Called before a node is; what it raises is the node's failure."""
        self.kept_back: Callable[[int, Message], bool] = lambda node, message: False
        """Whether a reply does not come yet; asked again and again."""
        self.heard: list[tuple[int, str, RecordDict]] = []  # node, kind, content
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
        come = [
            name
            for name in message_ids
            if not self.kept_back(
                self._replies[name].metadata.src_node_id, self._replies[name]
            )
        ]
        return [self._replies.pop(name) for name in come]

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.away]

    def _answer(self, node: int, message: Message) -> Message:
        arrived = Message(carried(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        self.heard.append((node, message.metadata.message_type, arrived.content))
        context = context_from_proto(
            context_to_proto(self.contexts[node])
        )  # another process
        try:
            self.before(node, arrived)
            reply: Message = self._app(arrived, context)
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=arrived)
        self.contexts[node] = context_from_proto(context_to_proto(context))
        reply.content = carried(reply.content)
        return reply

    # What a grid has besides.

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
    """Configurations of nodes that share a dataset."""
    return [
        {"partition-id": number, "num-partitions": nodes}
        for number in order or range(nodes)
    ]


def asked(**settings: Any) -> UserConfig:
    """A run's configuration."""
    found: Mapping[str, Any] = {
        name.replace("_", "-"): value for name, value in settings.items()
    }
    return dict(found)
