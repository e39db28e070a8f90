"""Who takes part in a run, for those who look at it: `nodes.json` in the run's folder.

Rules here:
- Nothing in this file is needed to repeat a run or to go on with it; it is written for people, and read by pages.
- Rounds never wait for it, and a run does without it where it cannot be written. Nodes on other machines are looked at
  from a thread of its own, about once a second; what goes wrong there ends the looking and nothing else.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import durable_files
from fedbudget.arrays import Float64, Int64
from fedbudget.node_status import NodeStatus

NODES = "nodes.json"
MAX_LISTED = 200
"""Of more nodes than this only some are listed, or none where they are simulated; figures are about all."""

_INTERVAL = 1.0  # seconds


def write_simulated(folder: Path, sizes: Int64, speeds: Float64 | None = None) -> None:
    """Writes of nodes that are simulated, once: how many samples each has, [nodes], and how fast it is, if they differ.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     write_simulated(Path(name), np.array([3, 4]))
    ...     [node["samples"] for node in read(Path(name))["nodes"]]
    [3, 4]
    """
    fast = [None] * len(sizes) if speeds is None else speeds.round(4).tolist()
    listed = [
        NodeStatus(str(number), (number,), int(size), speed=speed)
        for number, (size, speed) in enumerate(zip(sizes, fast, strict=True))
    ]
    with contextlib.suppress(OSError):
        _write(folder, len(sizes), sizes, listed if len(listed) <= MAX_LISTED else [])


def read(folder: Path) -> dict[str, Any] | None:
    """What `nodes.json` says; None where there is none, or none that can be read."""
    try:
        content = json.loads((folder / NODES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


class NodeStatusWriter:
    """Writes how nodes on other machines are, again and again, until it is closed.

    Args:
      statuses: gives the nodes as they are now; one whose `last_seen` is None is away.
    """

    def __init__(
        self,
        folder: Path,
        statuses: Callable[[], Sequence[NodeStatus]],
        *,
        interval: float = _INTERVAL,
    ) -> None:
        self._folder = folder
        self._statuses = statuses
        self._interval = interval
        self._over = threading.Event()
        self._last_seen: dict[str, float] = {}
        self._thread = threading.Thread(
            target=self._work, name="fedbudget-node-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Returns when the last status is on disk."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self._interval)
            with contextlib.suppress(
                OSError, RuntimeError
            ):  # a full disk, or a network that has ended
                self._write(self._statuses())

    def _write(self, nodes: Sequence[NodeStatus]) -> None:
        self._last_seen |= {
            node.name: node.last_seen for node in nodes if node.last_seen is not None
        }
        known = [
            NodeStatus(**{**vars(node), "last_seen": self._last_seen.get(node.name)})
            for node in nodes
        ]
        if len(known) > MAX_LISTED:  # those first that there is something to say of
            known = sorted(
                known, key=lambda node: (node.state != "away", -(node.missed or 0))
            )[:MAX_LISTED]
        sizes = np.array([node.samples for node in nodes], np.int64)
        _write(self._folder, sum(len(node.numbers) for node in nodes), sizes, known)


def _write(folder: Path, count: int, sizes: Int64, listed: Sequence[NodeStatus]) -> None:
    content = {
        "count": count,
        "samples": {
            "total": int(sizes.sum()),
            "smallest": int(sizes.min(initial=sizes.max(initial=0))),
            "median": float(np.median(sizes)) if len(sizes) else 0.0,
            "largest": int(sizes.max(initial=0)),
        },
        "nodes": [vars(node) for node in listed],
    }
    durable_files.replace(folder / NODES, (json.dumps(content) + "\n").encode())
