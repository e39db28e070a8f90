"""A node's own limits: what it refuses to do, and its privacy account.

No sample leaves a node, but updates reveal something about samples: the update of a
mini-batch of one sample reveals that sample. So a node has its own limits. It refuses a
request beyond them, with a reason that the aggregator receives too.

The privacy account of a node is a file that outlives runs:

    {"rho": 0.31, "runs": {"5f0c...": {"rho": 0.31, "round": 12}}}

- ρ adds up over all runs and all aggregators.
- A node pays before it answers, also for an answer that is lost or repeated: it cannot know
  what became of it.
- It trusts the aggregator to add the noise that a round's cost promises. If single samples
  are protected, the node adds the noise itself.
- Privacy of a node and privacy of a sample do not add up. An account is for one of them; an
  account for samples has "unit": "sample".
- Two nodes with the same samples must share one file; they lock it in turn.
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
from fedbudget.protocol.features.sample_privacy import SamplePrivacy
from fedbudget.protocol.features.workload import most_updates
from fedbudget.protocol.messages import (
    Broadcast,
    Private,
    SampleNormRound,
    SampleRound,
)
from fedbudget.resources.privacy import MAX_EPSILON, epsilon_of, rho_of

_UNITS = {False: "nodes", True: "single samples"}


class BeyondLimits(UserError):
    """An aggregator requests something that this node refuses."""


@dataclass(frozen=True)
class NodeLimits:
    """Limits on tasks and rounds.

    Args:
      min_batch: minimum number of samples in a mini-batch; whole shards are always allowed.
      max_tau: maximum number of local updates in a round.
      min_interval: minimum number of seconds between two answers; a faster aggregator
        waits.
    """

    min_batch: int = 1
    max_tau: int = MOST_UPDATES
    min_interval: float = 0.0

    def __post_init__(self) -> None:
        counts = min(self.min_batch, self.max_tau)
        if counts < 1 or not 0 <= self.min_interval < math.inf:
            raise UserError(
                "`min_batch` and `max_tau` must be at least 1, and `min_interval` "
                "(seconds) at least 0"
            )

    def require_task(self, task: Task, smallest: int) -> None:
        """Raise `BeyondLimits` if the task is not allowed.

        Args:
          smallest: size of the smallest shard; a mini-batch of the whole shard is allowed.
        """
        if task.batch is not None and task.batch < min(self.min_batch, smallest):
            raise BeyondLimits(
                f"mini-batches of {task.batch} samples are requested, which would reveal "
                f"too much of each; this node's `min_batch` is {self.min_batch}"
            )

    def require_round(self, broadcast: Broadcast) -> None:
        """Raise `BeyondLimits` if the round is not allowed."""
        if isinstance(broadcast, Private) and broadcast.evaluate:
            raise BeyondLimits(
                "an evaluation on test samples is requested, which the privacy budget does "
                "not cover"
            )
        most = most_updates(broadcast)
        if most > self.max_tau:
            raise BeyondLimits(
                f"{most} local updates are requested in a round; this node's `max_tau` is "
                f"{self.max_tau}"
            )


@dataclass(frozen=True)
class PrivacyAccount:
    """A node's own privacy limit.

    Args:
      path: of the file.
      limit: maximum ε of all runs together.
      delta: δ.
      per_sample: whether it protects each sample, not the node with all its samples.
    """

    path: Path
    limit: float
    delta: float
    per_sample: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise UserError(f"`privacy_delta` is between 0 and 1, not {self.delta:g}")
        if not 0 < self.limit <= MAX_EPSILON:
            raise UserError(
                f"`privacy_limit` is an ε of more than 0 and at most {MAX_EPSILON:g}, not "
                f"{self.limit:g}"
            )

    @property
    def spent(self) -> float:
        """ε of all runs until now."""
        return epsilon_of(self._read()["rho"], self.delta)

    def require_readable(self) -> None:
        """Raise `UserError` if the file exists and is not an account."""
        self._read()

    def require_private(self, task: Task) -> None:
        """Raise `BeyondLimits` if a run is not private, or if the limit is reached."""
        units = {each.name: each for each in task.built_features}
        privacy = units.get(SamplePrivacy.name)
        if privacy is None:
            raise BeyondLimits(
                "this run is not private, and this node has a `privacy_limit`"
            )
        self._require_unit(isinstance(privacy, SamplePrivacy))
        self._require(self._read(), 0.0)

    def pay(self, run: str, broadcast: Broadcast) -> None:
        """Pay for a round of a run; raise `BeyondLimits` if that exceeds the limit."""
        if not isinstance(broadcast, Private) or not 0 < broadcast.rho < math.inf:
            raise BeyondLimits(
                "this round is not private, and this node has a `privacy_limit`"
            )
        self._require_unit(isinstance(broadcast, SampleRound | SampleNormRound))
        with self._locked():
            account = self._read()
            self._require(account, broadcast.rho)
            paid = account["runs"].get(run, {"rho": 0.0})["rho"] + broadcast.rho
            account["runs"][run] = {"rho": paid, "round": broadcast.round}
            account["rho"] += broadcast.rho
            try:
                durable_files.replace(self.path, json.dumps(account).encode())
            except OSError as error:
                raise WorkError(
                    f"{self.path} cannot be written: {error.strerror}"
                ) from None

    def _require_unit(self, per_sample: bool) -> None:
        if per_sample != self.per_sample:
            raise BeyondLimits(
                f"this run protects {_UNITS[per_sample]}, and this node's `privacy_limit` "
                f"is for {_UNITS[self.per_sample]}: they do not add up (`privacy_unit`)"
            )

    def _require(self, account: dict[str, Any], more: float) -> None:
        after = account["rho"] + more
        if after >= rho_of(self.limit, self.delta):
            raise BeyondLimits(
                f"this node's `privacy_limit` is ε = {self.limit:g} at δ = {self.delta:g}; "
                f"it has spent ε = {epsilon_of(account['rho'], self.delta):.3g} in "
                f"{len(account['runs'])} runs ({self.path}), and would reach "
                f"{epsilon_of(after, self.delta):.3g}"
            )

    def _read(self) -> dict[str, Any]:
        unit = "sample" if self.per_sample else "node"
        try:
            account = json.loads(self.path.read_text(encoding="utf-8"))
            if not (0 <= account["rho"] < math.inf and isinstance(account["runs"], dict)):
                raise ValueError(f"ρ is {account['rho']}")
            if account.get("unit", "node") != unit:
                raise ValueError(
                    f"it is for {_UNITS[not self.per_sample]}, unlike `privacy_unit`"
                )
        except FileNotFoundError:
            account = {"rho": 0.0, "runs": {}}
            return account | {"unit": unit} if self.per_sample else account
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{self.path} is not a node's account of privacy: {error}"
            ) from None
        return dict(account)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes on this machine."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise WorkError(f"{self.path} cannot be locked: {error.strerror}") from None
