"""The status of nodes in nodes.json, written in the background."""

import threading
from collections import Counter
from pathlib import Path

import numpy as np

from fedbudget.api import train
from fedbudget.node_status import NodeStatus
from fedbudget.runs.nodes import MAX_LISTED, NODES, NodeStatusWriter, read, write_simulated


def test_simulated_run_lists_samples(tmp_path: Path) -> None:
    train(nodes=3, case=1, budget="time=1s", rounds=2, out=tmp_path / "run", test_share=0.2)
    status = read(tmp_path / "run")
    assert status is not None
    assert (status["count"], status["samples"]["total"]) == (3, 1437)  # 80 % of 1797
    assert sum(node["samples"] for node in status["nodes"]) == 1437
    assert [node["numbers"] for node in status["nodes"]] == [[0], [1], [2]]


def test_many_nodes_have_only_totals(tmp_path: Path) -> None:
    write_simulated(tmp_path, np.arange(1, MAX_LISTED + 2))
    status = read(tmp_path)
    assert status is not None
    assert status["nodes"] == []
    expected = {"total": 20301, "smallest": 1, "median": 101.0, "largest": 201}
    assert status["samples"] == expected


def test_unreadable_file_is_ignored(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    (tmp_path / NODES).write_text("[1]")
    assert read(tmp_path) is None
    (tmp_path / NODES).write_text('{"count')
    assert read(tmp_path) is None


def test_absent_node_keeps_last_seen(tmp_path: Path) -> None:
    times = iter([7.0, None, None])
    polled = threading.Event()

    def poll() -> list[NodeStatus]:
        last = next(times, None)
        if last is None:
            polled.set()
        return [NodeStatus("one", (0,), 5, last_seen=last), NodeStatus("two", (1,), 9)]

    writer = NodeStatusWriter(tmp_path, poll, interval=0.001)
    assert polled.wait(30)
    writer.close()
    status = read(tmp_path)
    assert status is not None
    assert [(node["name"], node["last_seen"]) for node in status["nodes"]] == [
        ("one", 7.0),
        ("two", None),
    ]


def test_close_writes_the_last_status(tmp_path: Path) -> None:
    writer = NodeStatusWriter(
        tmp_path, lambda: [NodeStatus("one", (0,), 5, missed=3)], interval=3600
    )
    writer.close()
    status = read(tmp_path)
    assert status is not None
    assert status["nodes"][0]["missed"] == 3


def test_list_prefers_absent_nodes(
    tmp_path: Path,
) -> None:
    nodes = [
        NodeStatus(str(n), (2 * n, 2 * n + 1), 5, state="idle", missed=n % 7, last_seen=1.0)
        for n in range(3 * MAX_LISTED)
    ]
    nodes[-1] = NodeStatus("gone", (9,), 5, state="away", missed=0)
    NodeStatusWriter(tmp_path, lambda: nodes, interval=3600).close()
    status = read(tmp_path)
    assert status is not None
    assert (len(status["nodes"]), status["nodes"][0]["name"]) == (MAX_LISTED, "gone")
    # 85 nodes missed six rounds and 85 missed five; nodes that missed four fill the list.
    assert Counter(node["missed"] for node in status["nodes"][1:]) == {
        6: 85,
        5: 85,
        4: MAX_LISTED - 1 - 170,
    }
    assert status["count"] == 6 * MAX_LISTED - 1
    assert status["samples"]["total"] == 15 * MAX_LISTED


def test_error_only_ends_the_writer(tmp_path: Path) -> None:
    def poll() -> list[NodeStatus]:
        raise OSError("no space left")

    NodeStatusWriter(tmp_path, poll, interval=0.001).close()
    assert read(tmp_path) is None
