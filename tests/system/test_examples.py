"""All examples run and reach the expected results."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedbudget import train
from fedbudget.python_file import load
from fedbudget.runs.folder import Run
from support.processes import cli_options

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(name: str) -> str:
    # On a busy machine several threads of PyTorch wait for each other.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        check=True,
        capture_output=True,
        text=True,
        cwd=EXAMPLES,
        env=one_thread,
    ).stdout


def test_five_lines_classify_even_and_odd() -> None:
    found = re.fullmatch(
        r"loss (\S+), accuracy (\S+), average τ (\S+)\n", output_of("five_lines.py")
    )
    assert found is not None
    loss, accuracy, tau = map(float, found.groups())
    assert loss < 0.246
    assert accuracy > 0.85
    assert 5 < tau < 40  # neither extreme, because the data of the nodes differ


def test_own_model_keeps_both_budgets() -> None:
    found = re.search(
        r"accuracy (\S+), stopped by \w+\nspent: (.*)\n", output_of("own_model.py")
    )
    assert found is not None
    assert float(found[1]) > 0.9
    assert "'bytes'" in found[2]


def test_own_torch_module_learns_digits() -> None:
    found = re.fullmatch(
        r"loss \S+, accuracy (\S+), average τ (\S+)\na blank image looks like a \d\n",
        output_of("own_torch_module.py"),
    )
    assert found is not None
    assert float(found[1]) > 0.8
    assert float(found[2]) > 1


def test_numpy_arrays_on_eight_nodes() -> None:
    found = re.fullmatch(
        r"8 nodes, loss (\S+), accuracy (\S+), stopped by bytes\n",
        output_of("numpy_arrays.py"),
    )
    assert found is not None
    assert float(found[1]) < 0.5  # the loss at w = 0
    assert float(found[2]) > 0.9


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_has_a_test(path: Path) -> None:
    tests = Path(__file__).parents[1]
    files = (Path(__file__), tests / "models/torch/test_other_libraries.py")
    assert any(path.name in file.read_text(encoding="utf-8") for file in files)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
def test_real_nodes_example_over_tls(tmp_path: Path) -> None:
    """A custom network on image files has the same w as in one process, with less than 25
    lines of user code.
    """
    trained: dict[str, Any] = {
        "tau": 3,
        "rounds": 6,
        "seed": 2,
        "batch_size": 25,
        "step_size": 0.05,
        "compress": "none",
        "validation": 0.0,  # measured costs decide which rounds validate
    }
    options = cli_options(**trained)
    real_nodes = EXAMPLES / "real_nodes"
    command = [
        sys.executable,
        str(real_nodes / "run.py"),
        str(tmp_path),
        "--budget",
        "time=1h",
        "--out",
        "run",
    ]
    # Several threads would sum in another order.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *options], check=True, env=one_thread, capture_output=True)

    images = load(f"{real_nodes}/ward.py:Images")
    # Nodes are numbered in the order of their names.
    shards = [images(tmp_path / name / "images") for name in ("east", "north", "south")]
    net = load(f"{real_nodes}/net.py:net")
    test = images(tmp_path / "aggregator/images")
    whole = train(
        model=net, shards=shards, test=test, budget="time=1h", costs="measured", **trained
    )
    run = Run.open(tmp_path / "aggregator/run")
    assert run.model().w.tobytes() == whole.w.tobytes()
    assert run.summary is not None
    assert run.summary["accuracy"] == whole.accuracy
    assert sum(map(lines_of_code, (real_nodes / "net.py", real_nodes / "ward.py"))) < 25


def lines_of_code(path: Path) -> int:
    """Number of lines without blank lines and the module docstring."""
    source = path.read_text(encoding="utf-8")
    head = ast.parse(source).body[0].end_lineno
    return len([line for line in source.splitlines()[head:] if line.strip()])
