"""A node's own limits: what it refuses to do, and its privacy account.

No sample leaves a node, but updates reveal something about samples: the update of a
mini-batch of one sample reveals that sample. So a node has its own limits. It refuses a
request beyond them, with a reason that the aggregator receives too.

The privacy account of a node is a ledger (engines/privacy_ledger.py) that outlives runs:

- ρ adds up over all runs and all aggregators.
- By default there are two files: one for the samples, and one for the node's name. Both are
  charged, and the larger one counts. A new name therefore does not give the same samples a
  new account, and changed samples do not give the same node one.
- A node pays before it answers, also for an answer that is lost or repeated: it cannot know
  what became of it. A node that restarts in a round has lost the secret of its noise. It
  pays again and answers, because a stored report would be as sensitive as the samples, and
  a refusal would remove each node that restarts from the run.
- It trusts the aggregator to add the noise that a round's cost promises. If single samples
  are protected, the node adds the noise itself.
- Two nodes with the same samples must share a file; they lock it in turn.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbudget.engines.privacy_ledger import UNITS, PrivacyLedger, charge
from fedbudget.engines.remote.task import MOST_UPDATES, Task
from fedbudget.errors import PublicReason, UserError
from fedbudget.protocol.features.sample_privacy import SamplePrivacy
from fedbudget.protocol.features.workload import most_updates
from fedbudget.protocol.messages import Broadcast, Private
from fedbudget.resources.privacy import (
    MAX_EPSILON,
    epsilon_of,
    replacement_text,
    rho_of,
)

_VECTORS = 10
"""Fewest vectors of the length of w that a node needs."""


class BeyondLimits(PublicReason):
    """An aggregator requests something that this node refuses.

    Args:
      message: the reason, which is sent to the aggregator.
      local: an addition for the node's own user. It is not sent: the name of an account's
        file may follow from samples.
    """

    def __init__(self, message: str, local: str = "") -> None:
        super().__init__(message)
        self.local = local


def memory_bytes() -> float:
    """Memory of this machine; infinite if it is not known."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


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
        needed = 4 * _VECTORS * task.parameters
        if needed > memory_bytes():
            raise BeyondLimits(
                f"the model has {task.parameters} parameters; a node needs at least "
                f"{needed / 1e9:.3g} GB for it, which this machine does not have"
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
      others: further files of the same samples.
      data: fingerprint of the samples.
    """

    path: Path
    limit: float
    delta: float
    per_sample: bool = False
    others: tuple[Path, ...] = ()
    data: str = ""

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
        return max(ledger.spent(self.delta) for ledger in self._ledgers)

    def require_readable(self) -> None:
        """Raise `UserError` if a file exists and is not an account."""
        for ledger in self._ledgers:
            ledger.read()

    def require_left(self) -> None:
        """Raise `BeyondLimits` if the limit is reached."""
        for ledger in self._ledgers:
            self._require(ledger, ledger.read(), 0.0)

    def require_private(self, task: Task) -> None:
        """Raise `BeyondLimits` if a run is not private, or if the limit is reached."""
        units = {each.name: each for each in task.built_features}
        privacy = units.get(SamplePrivacy.name)
        if privacy is None:
            raise BeyondLimits(
                "this run is not private, and this node has a `privacy_limit`"
            )
        self._require_unit(isinstance(privacy, SamplePrivacy))
        self.require_left()

    def pay(self, run: str, broadcast: Broadcast) -> None:
        """Pay for a round of a run; raise `BeyondLimits` if that exceeds the limit."""
        if not isinstance(broadcast, Private) or not 0 < broadcast.rho < math.inf:
            raise BeyondLimits(
                "this round is not private, and this node has a `privacy_limit`"
            )
        self._require_unit(broadcast.per_sample)
        rho = broadcast.rho

        def require(ledger: PrivacyLedger, content: dict[str, Any]) -> None:
            self._require(ledger, content, rho)

        charge(self._ledgers, run, broadcast.round, rho, require)

    @property
    def _ledgers(self) -> list[PrivacyLedger]:
        paths = self.path, *self.others
        return [PrivacyLedger(path, self.per_sample, self.data) for path in paths]

    def _require_unit(self, per_sample: bool) -> None:
        if per_sample != self.per_sample:
            raise BeyondLimits(
                f"this run protects {UNITS[per_sample]}, and this node's `privacy_limit` "
                f"is for {UNITS[self.per_sample]}: they do not add up (`privacy_unit`)"
            )

    def _require(self, ledger: PrivacyLedger, content: dict[str, Any], more: float) -> None:
        after = content["rho"] + more
        if after >= rho_of(self.limit, self.delta):
            spent = epsilon_of(content["rho"], self.delta)
            unit = "sample" if self.per_sample else "node"
            raise BeyondLimits(
                f"this node's `privacy_limit` is ε = {self.limit:g} at δ = {self.delta:g}; "
                f"it has spent ε = {spent:.3g} "
                f"({replacement_text(spent, self.delta, unit)}) in "
                f"{len(content['runs'])} runs, and would reach "
                f"{epsilon_of(after, self.delta):.3g}",
                local=f" (account: {ledger.path})",
            )
