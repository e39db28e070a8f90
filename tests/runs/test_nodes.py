"""Who takes part is written for people to see, and nothing waits for it."""

import threading
from collections import Counter
from pathlib import Path

import numpy as np

from fedbudget.api import train
from fedbudget.node_status import NodeStatus
from fedbudget.runs.nodes import MAX_LISTED, NODES, NodeStatusWriter, read, write_simulated


def test_a_simulated_run_says_how_many_samples_each_node_has(tmp_path: Path) -> None:
    train(nodes=3, case=1, budget="time=1s", rounds=2, out=tmp_path / "run", test_share=0.2)
    found = read(tmp_path / "run")
    assert found is not None
    assert (found["count"], found["samples"]["total"]) == (3, 1437)  # four fifths of 1797
    assert sum(node["samples"] for node in found["nodes"]) == 1437
    assert [node["numbers"] for node in found["nodes"]] == [[0], [1], [2]]


def test_of_many_nodes_only_figures_about_all_are_kept(tmp_path: Path) -> None:
    write_simulated(tmp_path, np.arange(1, MAX_LISTED + 2))
    found = read(tmp_path)
    assert found is not None
    assert found["nodes"] == []
    assert found["samples"] == {
        "total": 20301,
        "smallest": 1,
        "median": 101.0,
        "largest": 201,
    }


def test_what_cannot_be_read_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    (tmp_path / NODES).write_text("[1]")
    assert read(tmp_path) is None
    (tmp_path / NODES).write_text('{"count')
    assert read(tmp_path) is None


def test_who_is_away_was_last_seen_when_it_was_there(tmp_path: Path) -> None:
    seen = iter([7.0, None, None])
    looked = threading.Event()

    def call() -> list[NodeStatus]:
        last = next(seen, None)
        if last is None:
            looked.set()
        return [NodeStatus("one", (0,), 5, last_seen=last), NodeStatus("two", (1,), 9)]

    writer = NodeStatusWriter(tmp_path, call, interval=0.001)
    assert looked.wait(30)
    writer.close()
    found = read(tmp_path)
    assert found is not None
    assert [(node["name"], node["last_seen"]) for node in found["nodes"]] == [
        ("one", 7.0),
        ("two", None),
    ]


def test_the_last_roll_is_called_when_it_is_closed(tmp_path: Path) -> None:
    writer = NodeStatusWriter(
        tmp_path, lambda: [NodeStatus("one", (0,), 5, missed=3)], interval=3600
    )
    writer.close()
    found = read(tmp_path)
    assert found is not None
    assert found["nodes"][0]["missed"] == 3


def test_of_very_many_nodes_those_are_listed_that_are_away_or_have_missed_most(
    tmp_path: Path,
) -> None:
    nodes = [
        NodeStatus(str(n), (2 * n, 2 * n + 1), 5, state="idle", missed=n % 7, last_seen=1.0)
        for n in range(3 * MAX_LISTED)
    ]
    nodes[-1] = NodeStatus("gone", (9,), 5, state="away", missed=0)
    NodeStatusWriter(tmp_path, lambda: nodes, interval=3600).close()
    found = read(tmp_path)
    assert found is not None
    assert (len(found["nodes"]), found["nodes"][0]["name"]) == (MAX_LISTED, "gone")
    # Of 599 nodes, six rounds were missed by 85, five by 85 more, and then four by those
    # that fill the list.
    assert Counter(node["missed"] for node in found["nodes"][1:]) == {
        6: 85,
        5: 85,
        4: MAX_LISTED - 1 - 170,
    }
    assert (found["count"], found["samples"]["total"]) == (
        6 * MAX_LISTED - 1,
        15 * MAX_LISTED,
    )


def test_trouble_ends_the_roll_and_nothing_else(tmp_path: Path) -> None:
    def call() -> list[NodeStatus]:
        raise OSError("no space left")

    NodeStatusWriter(tmp_path, call, interval=0.001).close()
    assert read(tmp_path) is None
