"""Nodes of a simulation that attack it, so that people can see what a combination rule (protocol/combine.py) survives.

    sign-flip    the update goes the other way
    scale        it is ten times as long
    noise        in place of it there is noise, ten times as long
    label-flip   the node's samples have wrong labels, and it trains on them in good faith

The attackers are the nodes of the highest numbers. What they report besides w_i is as of an honest node.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedbudget.data.shards import Shards
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.randomness import Stream, generator

_TIMES = np.float32(10.0)


@dataclass(frozen=True)
class Attack:
    """What some nodes do to a run.

    Args:
      name: as above.
      first: the number of the first node that attacks; all after it do too.
      seed: of the run.
    """

    name: str
    first: int
    seed: int

    def on(self, report: Report, broadcast: Broadcast) -> Report:
        """A round's report, with what attackers say."""
        attackers = report.nodes >= self.first
        if report.w is None or self.name == "label-flip" or not attackers.any():
            return report
        updates_alone = broadcast.private is not None and not broadcast.private.per_sample  # are sent, and not w_i
        start = np.zeros_like(broadcast.w) if updates_alone else broadcast.w
        w, update = report.w.copy(), report.w[attackers] - start
        if self.name == "noise":
            noise = generator(self.seed, Stream.ATTACK, broadcast.round).standard_normal(update.shape, np.float32)
            sizes = [np.linalg.norm(each, axis=1, keepdims=True) for each in (update, noise)]
            update = noise * sizes[0] / sizes[1]
        w[attackers] = start + (-update if self.name == "sign-flip" else _TIMES * update)
        return replace(report, w=w)


def with_flipped_labels(shards: Shards, first: int) -> Shards:
    """The same shards, of which those from this node on have wrong labels: the last class for the first, and so on.

    Samples may be of several nodes, so that attackers get copies of theirs.
    """
    table = shards.table
    if table.store is not None or table.y.min() == table.y.max():
        raise UserError("`attack` label-flip needs arrays of samples with something to predict")
    rows = [shards.rows_of(node) for node in range(len(shards))]
    copied = np.concatenate(rows[first:])
    flipped = table.y.min() + table.y.max() - table.y[copied]
    wider = replace(table, x=np.concatenate([table.x, table.x[copied]]), y=np.concatenate([table.y, flipped]))
    at = len(table)
    for node in range(first, len(rows)):
        rows[node] = np.arange(at, at + len(rows[node]), dtype=np.int32)
        at += len(rows[node])
    return Shards.of(wider, rows)
