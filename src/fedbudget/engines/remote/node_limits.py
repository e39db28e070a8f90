"""What a node will do for an aggregator, and what it will not, whoever asks.

No sample leaves a node, but what leaves it tells of them: the update of a mini-batch of one sample tells that sample.
So a node has limits of its own. What is beyond them is refused in words that the aggregator hears, too.

What a node has told of itself in private runs, in a file of its own that outlasts them, and how much it may tell.

    {"rho": 0.31, "runs": {"5f0c...": {"rho": 0.31, "round": 12}}}

ρ of all runs adds up, whoever the aggregators were. A node pays before it answers, also for an answer that is lost or
made again: it cannot know what became of it. It takes the aggregator's word that noise is added for what a round says
it costs; where single samples are protected, it adds the noise itself. What is told of a node and of a sample does not
add up to one figure: an account is of one of them, and says so where that is samples ("unit": "sample"). Two nodes with
the same samples need the same file, and take turns with it.
"""

import fcntl
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbudget import durable_files
from fedbudget.engines.remote.task import MOST_UPDATES, Task
from fedbudget.errors import UserError, WorkError
from fedbudget.protocol.messages import Broadcast
from fedbudget.resources.privacy import MOST, epsilon_of, rho_of


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
        if (
            self.min_batch < 1
            or self.max_tau < 1
            or not 0 <= self.min_interval < float("inf")
        ):
            raise UserError(
                "`min_batch` and `max_tau` are at least 1, and `min_interval` is in seconds, 0 or more"
            )

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
            raise BeyondLimits(
                "what test samples say of the model is asked for, which a private run does not pay for"
            )
        most = (
            broadcast.tau
            if broadcast.work is None
            else max(broadcast.tau, broadcast.work.most)
        )
        if most > self.max_tau:
            raise BeyondLimits(
                f"{most} local updates are asked for in a round; this node's `max_tau` is {self.max_tau}"
            )


_UNITS = {False: "nodes", True: "single samples"}


@dataclass(frozen=True)
class PrivacyAccount:
    """A node's own limit of privacy.

    Args:
      path: of the file.
      limit: ε of all runs together.
      delta: δ.
      per_sample: it is of each sample, and not of the node with all of them.
    """

    path: Path
    limit: float
    delta: float
    per_sample: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise UserError(f"`privacy_delta` is between 0 and 1, not {self.delta:g}")
        if not 0 < self.limit <= MOST:
            raise UserError(
                f"`privacy_limit` is an ε of more than 0 and at most {MOST:g}, not {self.limit:g}"
            )

    @property
    def spent(self) -> float:
        """ε of all runs until now."""
        return epsilon_of(self._read()["rho"], self.delta)

    def require_readable(self) -> None:
        """Refuses a file that is there, and is no account."""
        self._read()

    def require_private(self, task: Task) -> None:
        """Refuses a run that is not private, or that there is nothing left for."""
        if not task.request.private:
            raise BeyondLimits(
                "this run is not private, and this node has a `privacy_limit`"
            )
        self._require_unit(task.request.per_sample)
        self._require(self._read(), 0.0)

    def pay(self, run: str, broadcast: Broadcast) -> None:
        """Pays for a round of a run, or refuses it."""
        private = broadcast.private
        if private is None or not 0 < private.rho < math.inf:
            raise BeyondLimits(
                "this round is not private, and this node has a `privacy_limit`"
            )
        self._require_unit(private.per_sample)
        with self._locked():
            known = self._read()
            self._require(known, private.rho)
            of_run = known["runs"].get(run, {"rho": 0.0})
            known["runs"][run] = {
                "rho": of_run["rho"] + private.rho,
                "round": broadcast.round,
            }
            try:
                durable_files.replace(
                    self.path,
                    json.dumps({**known, "rho": known["rho"] + private.rho}).encode(),
                )
            except OSError as error:
                raise WorkError(
                    f"{self.path} cannot be written: {error.strerror}"
                ) from None

    def _require_unit(self, per_sample: bool) -> None:
        if per_sample != self.per_sample:
            raise BeyondLimits(
                f"this run protects {_UNITS[per_sample]}, and this node's `privacy_limit` is of "
                f"{_UNITS[self.per_sample]}: they do not add up (`privacy_unit`)"
            )

    def _require(self, known: dict[str, Any], more: float) -> None:
        after = known["rho"] + more
        if after >= rho_of(self.limit, self.delta):
            raise BeyondLimits(
                f"this node's `privacy_limit` is ε = {self.limit:g} at δ = {self.delta:g}; it has told "
                f"ε = {epsilon_of(known['rho'], self.delta):.3g} in {len(known['runs'])} runs ({self.path}), and would "
                f"come to {epsilon_of(after, self.delta):.3g}"
            )

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            if not (0 <= known["rho"] < math.inf and isinstance(known["runs"], dict)):
                raise ValueError(f"ρ is {known['rho']}")
            if known.get("unit", "node") != ("sample" if self.per_sample else "node"):
                raise ValueError(
                    f"it is of {_UNITS[not self.per_sample]}, and `privacy_unit` says otherwise"
                )
        except FileNotFoundError:
            return {
                "rho": 0.0,
                "runs": {},
                **({"unit": "sample"} if self.per_sample else {}),
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{self.path} is not a node's account of privacy: {error}"
            ) from None
        return dict(known)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among processes of this machine."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise WorkError(f"{self.path} cannot be locked: {error.strerror}") from None
