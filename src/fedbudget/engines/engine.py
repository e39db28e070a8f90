"""What makes a run: an engine carries messages between an aggregator and nodes, wherever these are, until it is over.

An engine is made ready by launch/, and is run once. All but `run` may be asked of it at any time, from any thread.

Ctrl-C and SIGTERM as a question that an engine can ask between rounds, so that a run always ends in order.
"""

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

from fedbudget.node_status import NodeStatus
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.state import AggregatorState

Observer = Callable[[Round, Broadcast], None]
"""Called with every round when it is over, and the broadcast that it began with."""

Condition = Callable[[], bool]
Save = Callable[[], None]


class Engine(ABC):
    """Makes a run, once everything is ready; the baselines are engines too.

    Args:
      checkpoint_interval: seconds between two checkpoints, at least. With 0 there is one after every round, and nobody
        reads of a round before it is in one: nodes elsewhere have spent what cannot be taken back. Rounds of which all
        is here are made again after a crash.
    """

    checkpoint_interval: ClassVar[float] = 1.0

    @abstractmethod
    def run(
        self,
        *,
        observe: Observer,
        interrupted: Condition = lambda: False,
        save: Save = lambda: None,
    ) -> Outcome:
        """Makes rounds until the budget is spent.

        Args:
          observe: the time it takes is not charged where nodes wait for it.
          interrupted: asked after every round; when it says so, the run ends with what it has.
          save: called when a run that was interrupted can be resumed from where it is.
        """

    def wake(self) -> None:  # noqa: B027 (most engines wait for nothing)
        """Ends what is being waited for, because the run is interrupted."""

    def node_statuses(self) -> Sequence[NodeStatus]:
        """How nodes on other machines are doing; none where nodes are simulated."""
        return ()

    def traffic(self) -> Mapping[str, int]:
        """What has passed over a network so far, in bytes and numbers by name."""
        return {}

    def state(self) -> tuple[AggregatorState[Any, Any], object] | None:
        """What a checkpoint must hold: the aggregator's state, and what else the engine must know to go on.

        The second is of frozen dataclasses, mappings, arrays and plain JSON. None where its runs cannot be resumed.
        """
        return None


@contextmanager
def interruptible(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether the run should end; a second Ctrl-C ends it at once.

    Signals can be caught in a program's main thread only; elsewhere they stay what they are.

    Args:
      wake: called when it should, for an engine that waits for something else.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        wake()

    before = {
        number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
