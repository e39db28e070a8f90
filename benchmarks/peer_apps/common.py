"""Input and output of every app.

    python -m benchmarks.peer_apps.NAME WORK.npz RESULT.npz

WORK contains x (bytes), y (±1), the rows of each node [nodes, samples], and the
mini-batches of every round as positions in these rows [rounds, nodes, updates, batch].
RESULT contains the end time of each round, by the app's clock, and w after it.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ETA, REGULARIZATION = np.float32(0.01), np.float32(0.1)


@dataclass(frozen=True)
class Work:
    """W1 with features in memory as float32, so that a round loads nothing."""

    x: list[Any]  # of each node, [samples, features]
    y: list[Any]  # of each node, [samples]
    batches: Any  # [rounds, nodes, updates, batch]

    @property
    def rounds(self) -> int:
        return len(self.batches)

    @property
    def nodes(self) -> int:
        return len(self.x)

    @classmethod
    def load(cls, path: Path) -> "Work":
        with np.load(path) as found:
            x, y, rows, batches = (found[name] for name in ("x", "y", "rows", "batches"))
        return cls(
            [_scaled(x[own]) for own in rows],
            [y[own].astype(np.float32) for own in rows],
            batches,
        )

    @staticmethod
    def of_node(path: Path, node: int) -> tuple[Any, Any, Any]:
        """Return x, y and mini-batches [rounds, updates, batch] of one node."""
        with np.load(path) as found:
            own = found["rows"][node]
            return (
                _scaled(found["x"][own]),
                found["y"][own].astype(np.float32),
                found["batches"][:, node],
            )


def _scaled(pixels: Any) -> Any:
    return pixels.astype(np.float32) / np.float32(255)


def descend(w: Any, x: Any, y: Any, batches: Any) -> Any:
    """Make τ local updates of the squared SVM from w, in numpy."""
    w = w.copy()
    for rows in batches:
        batch, target = x[rows], y[rows]
        slack = np.maximum(0, 1 - target * (batch @ w))
        w -= ETA * (REGULARIZATION * w - (target * slack) @ batch / np.float32(len(rows)))
    return w


def main(run: Callable[[Work, Callable[[Any], None]], None]) -> None:
    """Run an app, which yields w after every round."""
    work = Work.load(Path(sys.argv[1]))
    ended: list[float] = []
    ws: list[Any] = []

    def report(w: Any) -> None:
        ended.append(time.perf_counter())
        ws.append(np.array(w, np.float32))

    run(work, report)
    np.savez(sys.argv[2], ended=ended, w=ws)
