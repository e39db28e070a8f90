"""A time budget holds even if a node hangs; the node still receives the farewell."""

import signal
from pathlib import Path

import pytest

from support.processes import cli_options, commands, records, summary


@pytest.mark.parametrize(
    "method", ["frugal", pytest.param("fixed", marks=pytest.mark.slow)]
)
def test_node_hangs_near_the_end(tmp_path: Path, method: str) -> None:
    """The round closes without the node, early enough to evaluate the last w.

    `test_suspended_node_receives_farewell` checks what a node reads after it wakes up.
    """
    run, options = tmp_path / "run", ["--tau", "5"] if method == "fixed" else []
    with commands(tmp_path) as start:
        start.write(3)
        aggregator = start.serve(
            *cli_options(nodes=3, model="softmax", budget="time=6s", out="run"),
            "--spend-all",
            *options,
        )
        stay = [
            start.join(aggregator.port, "--data", f"n{node}.npz", name=f"n{node}")
            for node in (1, 2)
        ]
        hangs = start.join(aggregator.port, "--data", "n3.npz", name="n3")
        aggregator.wait_until(
            lambda: any(record.spent["time"] > 3 for record in records(run))
        )
        hangs.send(signal.SIGSTOP)
        assert aggregator.end() == 0
        assert [node.end() for node in stay] == [0, 0]
        hangs.end(signal.SIGKILL)
    found, rounds = summary(run), records(run)
    assert found["stopped_by"] == "time"
    assert found["overshoot"]["time"] == 0
    assert found["spent"]["time"] > 4  # the aggregator waited for the node
    assert (rounds[-1].tau, rounds[-1].nodes) == (0, 2)  # final loss of the others
    assert rounds[-2].missed == (2,)


@pytest.mark.parametrize(
    "when", [2, 20], ids=["computing in a thread", "computing in the event loop"]
)
def test_suspended_node_receives_farewell(tmp_path: Path, when: int) -> None:
    """The node reads before it sends its report. Sending would only show that the
    aggregator is gone.
    """
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "3", "--model", "softmax", "--budget", "time=3s", "--out", "run"
        )
        start.write(3)
        stay = [
            start.join(aggregator.port, "--data", f"n{node}.npz", name=f"n{node}")
            for node in (1, 2)
        ]
        hangs = start.failing(aggregator.port, 3, when, signal.SIGSTOP)
        assert aggregator.end() == 0
        assert [node.end() for node in stay] == [0, 0]
        assert hangs.end(signal.SIGCONT) == 0
        assert "n3: the run is over; took part in" in hangs.errors.splitlines()[-1]
