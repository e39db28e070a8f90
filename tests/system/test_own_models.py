"""A custom PyTorch model in real processes: killed, resumed, late and mismatched nodes.

Every process reads the model from a file. The tests are slow because each process loads
PyTorch."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from fedbudget import Settings
from fedbudget.data.files import from_shards
from fedbudget.launch.prepared import Overrides
from fedbudget.models.own import load_model
from fedbudget.runs.folder import Run
from support.processes import (
    Commands,
    checkpoint,
    cli_options,
    commands,
    records,
    sample_shards,
    train_with_absences,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, WIDTH), nn.GroupNorm(2, WIDTH), nn.ReLU())
        self.score = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.score(self.body(x))

def smooth(output, y):
    return nn.functional.cross_entropy(output, y, label_smoothing=0.2)
"""
ROUNDS = 12
TRAINED = {
    "tau": 3,
    "rounds": ROUNDS,
    "seed": 3,
    "method": "frugal",
    "step_size": 0.1,
    "batch_size": 20,
}
OPTIONS = cli_options(**TRAINED)
OPTIONS += ["--costs", "simulated", "--budget", "time=1000000s", "--out", "run"]
MODEL = ["--model", "net.py:Net"]
# A blocked node is not left out while another node loads PyTorch.
PATIENT = ["--round-timeout", "60"]


def write(start: Commands, nodes: int, width: int = 8) -> None:
    start.write(nodes)
    (start.folder / "net.py").write_text(NET.replace("WIDTH", str(width)))


def in_one_process(folder: Path, present: list[list[int]]) -> bytes:
    """w of the same run in one process, with these nodes in each round."""
    known: dict[str, Any] = {**TRAINED, "budget": ("time=1000000s",), "partition": "files"}
    nodes = 1 + max(node for round_ in present for node in round_)
    overrides = Overrides(
        dataset=from_shards(sample_shards(nodes), None),
        model=load_model(f"{folder}/net.py:Net"),
    )
    return train_with_absences(Settings(**known), overrides, present)


def test_killed_aggregator_resumes_to_same_w(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        write(start, 2)
        aggregator = start.serve("--nodes", "2", *OPTIONS, *MODEL, *PATIENT)
        port = aggregator.port
        nodes = [
            start.held(port, 1, 7, *MODEL),
            start.join(port, "--data", "n2.npz", *MODEL, name="n2"),
        ]
        aggregator.wait_until(lambda: len(records(run)) == 6)
        assert aggregator.end(signal.SIGKILL) == -signal.SIGKILL

        write(start, 2, width=10)
        other = start.serve("--resume", "run")
        assert other.end() == 2
        assert (
            "net has changed since the run started: parameter body.0.weight is 10 x 6 of "
            "float32 now, and 8 x 6 of float32 in the run to resume" in other.errors
        )
        write(start, 2)
        aggregator = start.serve("--resume", "run", port=port)
        start.release_nodes()
        assert aggregator.end() == 0
        assert [node.end() for node in nodes] == [0, 0]
    assert [record.round for record in records(run)] == list(range(1, ROUNDS + 2))
    assert Run.open(run).settings.model == f"{tmp_path.resolve()}/net.py:Net"
    assert Run.open(run).model().w.tobytes() == in_one_process(
        tmp_path, [[0, 1]] * (ROUNDS + 1)
    )


def test_killed_node_and_late_node(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        write(start, 3)
        aggregator = start.serve("--nodes", "2", *OPTIONS, *MODEL, *PATIENT)
        port = aggregator.port
        stays = start.held(port, 1, 6, *MODEL)
        killed = start.failing(port, 2, 4, signal.SIGKILL, *MODEL)
        assert killed.end() == -signal.SIGKILL
        aggregator.wait_until(lambda: len(records(run)) == 5)
        late = start.join(port, "--data", "n3.npz", *MODEL, name="n3")
        late.wait_for("n3: joined")
        start.release_nodes()
        assert aggregator.end() == 0
        assert [node.end() for node in (stays, late)] == [0, 0]
    present = [[0, 1]] * 3 + [[0]] * 3 + [[0, 2]] * (ROUNDS - 5)
    assert [record.nodes for record in records(run)] == list(map(len, present))
    assert {record.round: record.missed for record in records(run) if record.missed} == {
        4: (1,)
    }
    assert Run.open(run).model().w.tobytes() == in_one_process(tmp_path, present)


def test_killed_node_returns_with_its_number(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with commands(tmp_path) as start:
        write(start, 2)
        aggregator = start.serve("--nodes", "2", *OPTIONS, *MODEL, *PATIENT)
        port = aggregator.port
        stays = start.held(port, 1, 6, *MODEL)
        assert start.failing(port, 2, 4, signal.SIGKILL, *MODEL).end() == -signal.SIGKILL
        aggregator.wait_until(lambda: len(records(run)) == 5)
        again = start.join(port, "--data", "n2.npz", *MODEL, name="n2")
        again.wait_for("n2: joined")
        start.release_nodes()
        assert aggregator.end() == 0
        assert [node.end() for node in (stays, again)] == [0, 0]
    assert [record.nodes for record in records(run)] == [2] * 3 + [1] * 3 + [2] * (
        ROUNDS - 5
    )
    members = checkpoint(run).engine["members"]
    assert {name: member["numbers"] for name, member in members.items()} == {
        "n1": [0],
        "n2": [1],
    }


def test_different_model_at_node_is_refused(tmp_path: Path) -> None:
    """Both sides print the difference."""
    with commands(tmp_path) as start:
        write(start, 2)
        (tmp_path / "wider.py").write_text(NET.replace("WIDTH", "10"))
        (tmp_path / "smooth.py").write_text(
            "from fedbudget.models import TorchModel\n"
            "from net import Net, smooth\n"
            "model = TorchModel(Net, loss=smooth)"
        )
        aggregator = start.serve("--nodes", "2", *OPTIONS, *MODEL, *PATIENT)
        port = aggregator.port
        first = start.join(port, "--data", "n1.npz", *MODEL, name="n1")
        for name, model, words in (
            (
                "wider",
                "wider.py:Net",
                "parameter body.0.weight is 10 x 6 of float32 at the node, and 8 x 6 of "
                "float32 at the aggregator",
            ),
            (
                "smooth",
                "smooth.py:model",
                r"the loss is smooth, written as \w+ at the node, and the usual one at the",
            ),
        ):
            wrong = start.join(port, "--data", "n2.npz", "--model", model, name=name)
            assert wrong.end() == 1
            assert len(wrong.errors.splitlines()) == 1
            assert re.match(
                f"fedbudget: 127.0.0.1:{port} refused {name}: {name} cannot take part: "
                f"its model is not the aggregator's: {words}",
                wrong.errors,
            )
            aggregator.wait_for(f"{name} at .* is refused: .*{words}")
        second = start.join(port, "--data", "n2.npz", *MODEL, name="n2")
        assert [each.end() for each in (aggregator, first, second)] == [0, 0, 0]
    run = Run.open(tmp_path / "run")
    assert run.model().w.tobytes() == in_one_process(tmp_path, [[0, 1]] * (ROUNDS + 1))
    assert run.summary is not None
    assert run.summary["network"]["refused"] == 2


def test_local_nodes_find_the_model(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        write(start, 0)
        of_digits = NET.replace("nn.Linear(6,", "nn.Linear(64,").replace(
            "WIDTH, 3", "WIDTH, 10"
        )
        (tmp_path / "net.py").write_text(
            of_digits.replace("WIDTH", "8").replace(
                "self.body(x)", "self.body(x.flatten(1))"
            )
        )
        options = [*OPTIONS, *MODEL, "--nodes", "3", "--case", "2", "--rounds", "4"]
        assert start.run("local", *options).end() == 0
        (tmp_path / "run").rename(tmp_path / "over-network")
        assert start.run("run", *options).end() == 0
    assert (tmp_path / "run/model.safetensors").read_bytes() == (
        tmp_path / "over-network/model.safetensors"
    ).read_bytes()
