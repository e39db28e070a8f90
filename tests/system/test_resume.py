"""An aggregator that is killed or stopped at any point of a round resumes to the same bits.

Nodes keep running and reconnect by themselves.
"""

import io
import signal
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from fedbudget import train
from fedbudget.cli.main import main
from fedbudget.launch import simulate
from fedbudget.result import Result
from fedbudget.runs.folder import Run
from support.processes import (
    Command,
    Commands,
    cli_options,
    commands,
    records,
    sample_shards,
    summary,
    without_wall,
)

OPTIONS = cli_options(
    model="softmax", costs="simulated", budget="time=3s", tau_max=5, seed=3
)

# Arguments: a phase, a round, the number of rounds that the run may be ahead of its disk,
# and the command. The process kills itself in that phase, like a crash or a power cut.
KILLED = """
import os, signal, sys, time
from fedbudget import durable_files
from fedbudget.cli.main import main
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.launch import execute
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import CHECKPOINT, MODEL, RunWriter, _line
from fedbudget.runs.record import RoundRecord

phase, when, ahead = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
execute.rounds_ahead = lambda parameters: ahead
begin = AggregatorServer.begin
finish = AggregatorServer.finish
save = Checkpoint.save
append = RunWriter.append
replace = durable_files.replace
now = 0  # the latest round

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def begun(server):
    pending = server._rounds.pending
    return pending is not None and pending.broadcast.round == now and pending.asked

def killed_begin(server, broadcast, terms):
    global now
    now = broadcast.round
    begin(server, broadcast, terms)
    if phase == "broadcast sent" and now == when:
        while not begun(server) or server._thread._tasks:
            time.sleep(0.001)
        die()

def killed_finish(server):
    collected = finish(server)
    if phase == "reports there" and now == when:
        die()
    return collected

def killed_save(checkpoint, folder):
    if any(RoundRecord.from_json(line).round == when for line in checkpoint.records):
        if phase == "reports of the next round there too":
            while not begun(servers[0]) or servers[0]._rounds.pending.awaited:
                time.sleep(0.001)
            die()
    save(checkpoint, folder)

def killed_replace(path, content):
    half = phase == "half of the checkpoint written"
    if half and path.name == CHECKPOINT and now >= when:
        whole = b"".join(content)
        path.with_name(f".{path.name}.new").write_bytes(whole[:len(whole) // 2])
        die()
    replace(path, content)
    if phase == "model saved, no summary" and path.name == MODEL:
        die()

def killed_append(writer, record):
    if record.round == when:
        if phase == "checkpoint saved, no record":
            die()
        if phase == "half of the record written":
            line = _line(record)
            writer._rounds.write(line[:len(line) // 2])
            die()
    append(writer, record)
    if phase == "record written" and record.round == when:
        die()

close = AggregatorServer.close

def killed_close(server, farewell):
    close(server, farewell)
    if phase == "nodes have left":
        die()

AggregatorServer.close = killed_close
servers = []
opened = AggregatorServer.open
AggregatorServer.open = lambda server: servers.append(server) or opened(server)
AggregatorServer.begin, AggregatorServer.finish = killed_begin, killed_finish
Checkpoint.save, RunWriter.append = killed_save, killed_append
durable_files.replace = killed_replace
main(sys.argv[4:])
"""

FIRST = ("broadcast sent", 1)
OTHERS = [
    ("broadcast sent", 4),
    ("reports of the next round there too", 5),
    ("checkpoint saved, no record", 7),
    ("half of the record written", 9),
    ("model saved, no summary", 0),
]
MORE = [
    ("reports there", 1),
    ("checkpoint saved, no record", 1),
    ("half of the checkpoint written", 3),
    ("record written", 6),
    ("reports there", 8),
]


def undisturbed(nodes: int = 2, **options: Any) -> Result:
    """The same run in one process; test_network.py checks that the bits are equal."""
    return train(
        model="softmax",
        shards=sample_shards(nodes),
        costs="simulated",
        budget="time=3s",
        tau_max=5,
        seed=3,
        **options,
    )


def crash(
    start: Commands, phase: str, when: int, *options: str, port: int = 0, ahead: int = 4
) -> Command:
    return start.serve(
        *options,
        port=port,
        program=[sys.executable, "-c", KILLED, phase, str(when), str(ahead)],
    )


def assert_extends(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Records that were once on disk stay unchanged."""
    assert after[: len(before)] == before


def assert_same_run(run: Path, whole: Result) -> None:
    found = Run.open(run)
    assert [record.round for record in found.rounds] == list(
        range(1, len(found.rounds) + 1)
    )
    assert without_wall(found.rounds) == without_wall(whole.rounds)
    assert found.model().w.tobytes() == whole.w.tobytes()
    assert found.summary is not None
    assert found.summary["status"] == "finished"
    assert found.summary["spent"] == dict(whole.spent)
    assert found.rounds[-2].spent["time"] < 3  # no round starts without budget
    assert found.summary["stopped_by"] == whole.stopped_by == "time"


@pytest.mark.parametrize(
    "phases",
    [
        OTHERS,
        pytest.param(
            sorted(MORE + OTHERS, key=lambda each: each[1] or 99), marks=pytest.mark.slow
        ),
    ],
)
def test_killed_in_successive_phases(tmp_path: Path, phases: list[tuple[str, int]]) -> None:
    run = tmp_path / "run"
    # At most one round ahead of the disk. Otherwise a crash may leave later rounds on disk,
    # and the next phase never happens.
    with commands(tmp_path) as start:
        aggregator = crash(start, *FIRST, "--nodes", "2", "--out", "run", *OPTIONS, ahead=1)
        port = aggregator.port
        nodes = start.nodes(port, 2)
        assert aggregator.end() == -signal.SIGKILL
        for phase, when in phases:
            before = without_wall(records(run))
            aggregator = crash(start, phase, when, "--resume", "run", port=port, ahead=1)
            assert aggregator.end() == -signal.SIGKILL, (phase, aggregator.errors)
            assert_extends(before, without_wall(records(run)))
        before = without_wall(records(run))
        aggregator = start.serve("--resume", "run", port=port)
        assert aggregator.end() == 0
        assert_extends(before, without_wall(records(run)))
        assert [node.end() for node in nodes] == [0, 0]
    assert_same_run(run, undisturbed())
    assert (
        "the run has finished; to resume it, extend --budget, such as time=+10min"
        in refused(run)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["paper", "frugal"])
@pytest.mark.parametrize("batch", ["full", "8"])
@pytest.mark.parametrize(("phase", "when"), [FIRST, *OTHERS, *MORE])
def test_killed_once(
    tmp_path: Path, phase: str, when: int, method: str, batch: str
) -> None:
    run = tmp_path / "run"
    options = [*OPTIONS, "--method", method, "--batch-size", batch]
    with commands(tmp_path) as start:
        aggregator = crash(start, phase, when, "--nodes", "3", "--out", "run", *options)
        port = aggregator.port
        nodes = start.nodes(port, 3)
        assert aggregator.end() == -signal.SIGKILL
        before = without_wall(records(run))
        aggregator = start.serve("--resume", "run", port=port)
        assert aggregator.end() == 0
        assert_extends(before, without_wall(records(run)))
        assert [node.end() for node in nodes] == [0, 0, 0]
    assert_same_run(
        run,
        undisturbed(3, method=method, batch_size=batch if batch == "full" else int(batch)),
    )


def test_killed_after_nodes_have_left(tmp_path: Path) -> None:
    """The result is complete before the nodes hear that the run is over."""
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        aggregator = crash(
            start, "nodes have left", 0, "--nodes", "2", "--out", "run", *OPTIONS
        )
        nodes = start.nodes(aggregator.port, 2)
        assert aggregator.end() == -signal.SIGKILL
        assert [node.end() for node in nodes] == [0, 0]
    assert_same_run(run, undisturbed())
    assert "the run has finished" in refused(run)


def test_killed_while_nodes_compute(tmp_path: Path) -> None:
    """The nodes reconnect and keep their state."""
    with commands(tmp_path) as start:
        aggregator = crash(
            start, "broadcast sent", 4, "--nodes", "2", "--out", "run", *OPTIONS
        )
        port = aggregator.port
        start.write(2)
        nodes = [start.held(port, node, 4) for node in (1, 2)]
        assert aggregator.end() == -signal.SIGKILL
        start.release_nodes()
        aggregator = start.serve("--resume", "run", port=port)
        assert aggregator.end() == 0
        assert [node.end() for node in nodes] == [0, 0]
    assert_same_run(tmp_path / "run", undisturbed())


def test_stopped_run_keeps_settings_and_costs(tmp_path: Path) -> None:
    """A resumed run continues with the spent amount; other settings are refused."""
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        aggregator = start.serve(
            "--nodes", "1", "--model", "softmax", "--budget", "time=1h", "--out", "run"
        )
        port = aggregator.port
        (node,) = start.nodes(port, 1)
        aggregator.wait_until(lambda: len(records(run)) >= 5)
        assert (aggregator.end(signal.SIGTERM), node.end()) == (130, 0)
        before, first = records(run), summary(run)
        assert (first["status"], first["stopped_by"]) == ("interrupted", "interrupted")
        # The cost of the unfinished round is in the summary but in no record.
        assert first["spent"]["time"] >= before[-1].spent["time"]

        assert "seed is 0 there, and cannot become 7" in refused(run, "--seed", "7")
        assert "budget bytes: a resumed run keeps its resources, time" in refused(
            run, "--budget", "bytes=2MB"
        )
        assert "budget time=0.001s is below the" in refused(run, "--budget", "time=1ms")
        assert "model is softmax there, and cannot become linear" in refused(
            run, "--model", "linear"
        )
        assert "omit --out" in refused(run, "--out", str(tmp_path / "elsewhere"))
        assert records(run) == before

        aggregator = start.serve("--resume", "run", "--model", "softmax", port=port)
        (node,) = start.nodes(port, 1)
        aggregator.wait_until(lambda: len(records(run)) >= len(before) + 5)
        assert Run.open(run).summary is None  # while the run continues
        assert (aggregator.end(signal.SIGINT), node.end()) == (130, 0)
    after = records(run)
    assert after[: len(before)] == before
    assert [record.round for record in after] == list(range(1, len(after) + 1))
    spent = [record.spent["time"] for record in after]
    assert spent == sorted(spent)
    assert spent[len(before)] >= first["spent"]["time"]
    assert summary(run)["spent"]["time"] >= spent[-1]


def test_finished_run_resumes_with_more_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New node processes start without state, like a run in one process whose node state
    is too large to save.
    """
    run = tmp_path / "run"
    more = ["--budget", "time=+2s"]
    options = [*OPTIONS, "--method", "paper"]
    with commands(tmp_path) as start:
        aggregator = start.serve("--nodes", "2", "--out", "run", *options)
        nodes = start.nodes(aggregator.port, 2)
        assert (aggregator.end(), *(node.end() for node in nodes)) == (0, 0, 0)
        aggregator = start.serve("--resume", "run", *more)
        nodes = start.nodes(aggregator.port, 2)
        assert (aggregator.end(), *(node.end() for node in nodes)) == (0, 0, 0)
    monkeypatch.setattr(simulate, "MOST_MEMORY", 0.0)
    undisturbed(method="paper", out=tmp_path / "alone")
    whole = train(
        model="softmax",
        shards=sample_shards(2),
        resume=tmp_path / "alone",
        budget="time=+2s",
    )
    found = Run.open(run)
    assert found.settings.budget == ("time=5s",)
    assert summary(run)["budget"] == {"time": 5.0}
    assert without_wall(found.rounds) == without_wall(whole.rounds)
    assert found.model().w.tobytes() == whole.w.tobytes()


def refused(run: Path, *options: str) -> str:
    """Try to resume; return the error message, which must be one line with exit code 2."""
    stderr = io.StringIO()
    with redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        main(["serve", "127.0.0.1:0", "--resume", str(run), *options])
    assert ended.value.code == 2
    (line,) = stderr.getvalue().splitlines()
    return line
