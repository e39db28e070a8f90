"""The nodes of a run, for display: `nodes.json` in its folder.

- The file is not needed to repeat or resume a run.
- Rounds never wait for it, and a run continues if it cannot be written. For nodes on other
  machines, a thread writes it about once a second. Errors there do not affect the run.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import numpy as np

from fedbudget import durable_files
from fedbudget.arrays import Float64, Int64
from fedbudget.errors import printable_texts
from fedbudget.file_contents import read_json
from fedbudget.node_status import NodeStatus
from fedbudget.runs.record import Number, Whole, require_moderate

NODES = "nodes.json"
MAX_LISTED = 200
"""Of more nodes only some are listed, or none if they are simulated. Totals cover all."""

_MAX_SIZE = 2**24  # bytes


class _Sizes(TypedDict):
    total: Whole
    smallest: Whole
    median: Number
    largest: Whole


class _Content(TypedDict):
    count: Whole
    samples: _Sizes
    nodes: list[NodeStatus]


def write_simulated(
    folder: Path, sizes: Int64, speeds: Float64 | None = None, names: Sequence[str] = ()
) -> None:
    """Write the simulated nodes of a run, once.

    Args:
      folder: folder of the run.
      sizes: number of samples of each node, [nodes].
      speeds: speed of each node, [nodes]; None if they are equal.
      names: of the nodes; their numbers by default.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     write_simulated(Path(name), np.array([3, 4]))
    ...     [node["samples"] for node in read(Path(name))["nodes"]]
    [3, 4]
    """
    listed = []
    if len(sizes) <= MAX_LISTED:
        fast = [None] * len(sizes) if speeds is None else speeds.round(4).tolist()
        named = names or [*map(str, range(len(sizes)))]
        listed = [
            NodeStatus(name, (number,), int(size), speed=speed)
            for number, (name, size, speed) in enumerate(
                zip(named, sizes, fast, strict=True)
            )
        ]
    with contextlib.suppress(OSError):
        _write(folder, len(sizes), sizes, listed)


def read(folder: Path) -> dict[str, Any] | None:
    """Return the content of `nodes.json`; None if it is missing or unreadable."""
    try:
        content: dict[str, Any] = printable_texts(read_json(folder / NODES, _MAX_SIZE))
        msgspec.convert(content, _Content)
        require_moderate(content)
    except (OSError, ValueError, RecursionError):
        return None
    return content


def names_of(content: dict[str, Any] | None, numbers: Sequence[int]) -> list[str]:
    """Return the names of nodes by their numbers.

    Args:
      content: of `nodes.json`; None without the file.
      numbers: of the nodes.

    >>> names_of({"nodes": [{"name": "clinic", "numbers": [0, 1]}]}, [0, 1, 2])
    ['clinic', 'node 2']
    """
    listed = (content or {}).get("nodes", [])
    named = {
        number: str(node["name"]) for node in listed for number in node.get("numbers") or ()
    }
    found = [named.get(number, str(number)) for number in numbers]
    return list(dict.fromkeys(f"node {name}" if name.isdigit() else name for name in found))


@dataclass(eq=False)
class NodeStatusWriter:
    """Writes the status of nodes on other machines periodically, until it is closed.

    Args:
      folder: folder of the run.
      statuses: returns the current nodes; a node is away if its `last_seen` is None.
      interval: seconds between two writes.
    """

    folder: Path
    statuses: Callable[[], Sequence[NodeStatus]]
    _: KW_ONLY
    interval: float = 1.0

    def __post_init__(self) -> None:
        self._closed = threading.Event()
        self._last_seen: dict[str, float] = {}
        self._thread = threading.Thread(
            target=self._work, name="fedbudget-node-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Return when the last status is on disk."""
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(self.interval)
            # The disk may be full, or the network closed.
            with contextlib.suppress(OSError, RuntimeError):
                self._write(self.statuses())

    def _write(self, nodes: Sequence[NodeStatus]) -> None:
        for node in nodes:
            if node.last_seen is not None:
                self._last_seen[node.name] = node.last_seen
        listed = [replace(node, last_seen=self._last_seen.get(node.name)) for node in nodes]
        if len(listed) > MAX_LISTED:  # nodes with problems first
            listed.sort(key=lambda node: (node.state != "away", -(node.missed or 0)))
        sizes = np.array([node.samples for node in nodes], np.int64)
        count = sum(len(node.numbers) for node in nodes)
        _write(self.folder, count, sizes, listed[:MAX_LISTED])


def _write(folder: Path, count: int, sizes: Int64, listed: Sequence[NodeStatus]) -> None:
    content = {
        "count": count,
        "samples": {
            "total": int(sizes.sum()),
            "smallest": int(sizes.min()) if len(sizes) else 0,
            "median": float(np.median(sizes)) if len(sizes) else 0.0,
            "largest": int(sizes.max(initial=0)),
        },
        "nodes": [vars(node) for node in listed],
    }
    durable_files.replace(folder / NODES, (json.dumps(content) + "\n").encode())
