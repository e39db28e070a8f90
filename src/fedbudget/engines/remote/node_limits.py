"""What a node will do for an aggregator, and what it will not, whoever asks.

No sample leaves a node, but what leaves it tells of them: the update of a mini-batch of one sample tells that sample.
So a node has limits of its own. What is beyond them is refused in words that the aggregator hears, too.
"""

from dataclasses import dataclass

from fedbudget.engines.remote.task import MOST_UPDATES, Task
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast


class BeyondLimits(UserError):
    """An aggregator asks for what this node will not do."""


@dataclass(frozen=True)
class NodeLimits:
    """A node's own limits.

    Args:
      min_batch: the fewest samples in a mini-batch; whole shards are as they are.
      max_tau: the most local updates in a round.
      min_interval: seconds from one answer to the next, at least: a quicker aggregator waits.
    """

    min_batch: int = 1
    max_tau: int = MOST_UPDATES
    min_interval: float = 0.0

    def __post_init__(self) -> None:
        if self.min_batch < 1 or self.max_tau < 1 or not 0 <= self.min_interval < float("inf"):
            raise UserError("`min_batch` and `max_tau` are at least 1, and `min_interval` is in seconds, 0 or more")

    def require_task(self, task: Task, smallest: int) -> None:
        """Refuses a task.

        Args:
          smallest: samples of the smallest shard; a mini-batch that has them all is not refused.
        """
        if task.batch is not None and task.batch < min(self.min_batch, smallest):
            raise BeyondLimits(
                f"mini-batches of {task.batch} samples are asked for, which would tell too much of each; this node's "
                f"`min_batch` is {self.min_batch}"
            )

    def require_round(self, broadcast: Broadcast) -> None:
        """Refuses a round."""
        if broadcast.private is not None and broadcast.evaluate:
            raise BeyondLimits("what test samples say of the model is asked for, which a private run does not pay for")
        most = broadcast.tau if broadcast.work is None else max(broadcast.tau, broadcast.work.most)
        if most > self.max_tau:
            raise BeyondLimits(
                f"{most} local updates are asked for in a round; this node's `max_tau` is {self.max_tau}"
            )
