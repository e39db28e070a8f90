"""The engine interface, and the handling of Ctrl-C and SIGTERM.

An engine runs rounds between an aggregator and nodes until the run is over. launch/
prepares an engine, and it runs once. All methods except `run` may be called at any time
and from any thread.
"""

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

from fedbudget.node_status import NodeStatus
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.state import AggregatorState, Outcome, Round

Observer = Callable[[Round, Broadcast], None]
"""Called after every round with its record and the broadcast that began it."""

Condition = Callable[[], bool]
Save = Callable[[], None]

Pay = Callable[[int, float], None]
"""Records the privacy cost ρ of a round durably: called with its number and ρ."""


def no_payment(round_: int, rho: float) -> None:
    """Record nothing: for runs that are not private, or whose noise follows from a seed."""


def settle(aggregator: Aggregator, pay: Pay) -> None:
    """Record the payment of the aggregator's last answer, before it is sent or observed."""
    if aggregator.payment is not None:
        pay(*aggregator.payment)


class Engine(ABC):
    """Runs the rounds of a prepared run; the baselines are engines too.

    Args:
      checkpoint_interval: minimum number of seconds between two checkpoints. With 0, a
        checkpoint follows every round and a round is published only after its checkpoint:
        nodes on other machines cannot undo what they spent. Local rounds are repeated
        after a crash.
    """

    checkpoint_interval: ClassVar[float] = 1.0

    @abstractmethod
    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
        pay: Pay = no_payment,
    ) -> Outcome:
        """Run rounds until the budget is spent.

        Args:
          observe: called after every round; its time is not charged while nodes wait.
          interrupted: called after every round; the run ends if it returns True.
          save: called when an interrupted run can be resumed from the current state.
          pay: records the privacy cost of a round before its result is sent or observed.

        Returns: the model and the reason for stopping.
        """

    def wake(self) -> None:  # noqa: B027 (most engines wait for nothing)
        """Stop waiting for nodes, because the run was interrupted."""

    def node_statuses(self) -> Sequence[NodeStatus]:
        """Status of each node on another machine; empty if nodes are simulated."""
        return ()

    def traffic(self) -> Mapping[str, int]:
        """Network traffic so far: bytes and counts by name."""
        return {}

    def state(self) -> tuple[AggregatorState[Any, Any], object] | None:
        """Contents of a checkpoint: the aggregator's state and the engine's own.

        The engine's own state consists of frozen dataclasses, mappings, arrays and plain
        JSON. None if the engine's runs cannot be resumed.
        """
        return None


@contextmanager
def interruptible(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first Ctrl-C or SIGTERM.

    A second Ctrl-C raises KeyboardInterrupt. Python handles signals in the main thread
    only; in other threads this has no effect.

    Args:
      wake: called at the first signal, for an engine that is waiting.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def request(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        wake()

    previous = {
        number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
