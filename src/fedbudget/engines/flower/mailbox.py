"""Messages to nodes behind Flower's grid, and their replies.

A node that is sent a message owes a reply, until that has come or Flower says that it never will.

Flower tells nobody when a reply has come: it is asked again and again here, more often than its own `send_and_receive`
does, because whoever waits pays for the time. How often nodes ask for their messages is Flower's affair.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbudget.engines.flower import records
from fedbudget.engines.remote.members import Counters

LONG_LIFE = 3600.0
"""Seconds for which any message is good, at least: machines' clocks differ, so it is long."""

POLL = 0.1
"""Seconds between two looks, at most."""

_QUICKEST, _OFTEN = 0.005, 20  # seconds between two looks, and how many in the time waited so far
_LOOK_FOR_NODES = 1.0  # seconds between two looks at who is connected
_PATIENCE = 600.0  # seconds for an answer before the first round
_Result = TypeVar("_Result")


class Reply(NamedTuple):
    """What has come from a node.

    Args:
      node: Flower's number of it.
      round: that it was asked for; 0 before the first.
    """

    node: int
    round: int
    message: Message


class Mailbox:
    """Sends messages over a grid, and collects replies.

    Args:
      counters: of what has passed.
    """

    def __init__(self, grid: Grid, counters: Counters) -> None:
        self.online: set[int] = set()  # Flower's numbers of nodes that were connected at the last look
        self.round_trip = np.inf  # seconds of the quickest message to all: the first may have had to start something
        self.keeps_errors = False  # what Flower raises is kept as `error`, and not raised
        self.error = ""
        self._grid = grid
        self._counters = counters
        self._owed: dict[str, tuple[int, int]] = {}  # who owes a reply and of which round, by the message
        self._looked = -np.inf

    def look_for_nodes(self) -> set[int]:
        """Who is connected now, or was a moment ago."""
        if time.monotonic() - self._looked > _LOOK_FOR_NODES:
            self.online = self._call(lambda: set(self._grid.get_node_ids()), self.online)
            self._looked = time.monotonic()
        return self.online

    def owing(self) -> set[int]:
        return {node for node, _ in self._owed.values()}

    def send(self, contents: Mapping[int, RecordDict], kind: str, *, life: float = LONG_LIFE, round_: int = 0) -> None:
        """Sends to nodes that owe nothing.

        Args:
          life: for how many seconds the messages are good.
        """
        group = str(round_) if round_ else ""
        messages = [Message(content, node, kind, ttl=life, group_id=group) for node, content in contents.items()]
        none: set[str] = set()
        sent = self._call(lambda: set(self._grid.push_messages(messages)), none) if messages else none
        for message in messages:
            if message.metadata.message_id in sent:
                self._owed[message.metadata.message_id] = message.metadata.dst_node_id, round_
                self._counters.sent += records.size(message.content)

    def replies(self) -> list[Reply]:
        """Those that have come."""
        waiting, none, replies = list(self._owed), list[Message](), []
        for message in self._call(lambda: list(self._grid.pull_messages(waiting)), none) if waiting else none:
            owed = self._owed.pop(message.metadata.reply_to_message_id, None)
            if owed is not None:
                self._counters.received += records.size(message.content) if message.has_content() else 0
                replies.append(Reply(*owed, message))
        return replies

    def exchange(self, contents: Mapping[int, RecordDict], kind: str) -> dict[int, Message]:
        """Sends to all, and waits for all."""
        began = time.monotonic()
        self.send(contents, kind)
        replies: dict[int, Message] = {}
        while self._owed and time.monotonic() < began + _PATIENCE:
            time.sleep(pause(began))
            replies |= {reply.node: reply.message for reply in self.replies()}
        self.round_trip = min(self.round_trip, time.monotonic() - began)
        return replies

    def _call(self, call: Callable[[], _Result], otherwise: _Result) -> _Result:
        """What Flower gives. It may raise anything, when the run is stopped or the SuperLink is gone."""
        try:
            return call()
        except Exception as error:
            if not self.keeps_errors:
                raise
            self.error = self.error or f"Flower carries no more messages of this run: {error}"
            return otherwise


def pause(began: float) -> float:
    """Seconds until the next look: few where replies take milliseconds, as in a simulation."""
    return min(POLL, max(_QUICKEST, (time.monotonic() - began) / _OFTEN))
