"""What makes a run: an engine carries messages between an aggregator and nodes, wherever these are, until it is over.

An engine is made ready by launch/, and is run once. All but `run` may be asked of it at any time, from any thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbudget.node_status import NodeStatus
from fedbudget.protocol.aggregator import Outcome, Round
from fedbudget.protocol.messages import Broadcast

Observer = Callable[[Round, Broadcast], None]
"""Called with every round when it is over, and the broadcast that it began with."""

Condition = Callable[[], bool]
Save = Callable[[], None]


class Engine(ABC):
    """Makes a run, once everything is ready; the baselines are engines too."""

    @abstractmethod
    def run(self, *, observe: Observer, interrupted: Condition = lambda: False, save: Save = lambda: None) -> Outcome:
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

    def state(self) -> Mapping[str, Any] | None:
        """What a checkpoint must hold of it, as plain JSON; None where its runs cannot be resumed."""
        return None
