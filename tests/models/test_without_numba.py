"""Built-in models without numba: the same numbers up to rounding, and a whole run without
heavy packages.
"""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.models import base
from support.hidden import without_packages
from support.problems import MODELS, problem


def assert_close(ours: Any, theirs: Any) -> None:
    assert np.linalg.norm(np.subtract(ours, theirs)) <= 1e-5 * np.linalg.norm(theirs)


@pytest.fixture
def numpy_only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(base, "compiled_kernels", lambda: None)
    return monkeypatch


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [None, 7])
def test_numpy_matches_compiled_kernels(
    name: str, batch: int | None, numpy_only: pytest.MonkeyPatch
) -> None:
    case = problem(name, seed=3, samples=2600, features=9, dtype=np.uint8)
    shards = Shards.of(
        case.table, [np.arange(10), np.arange(10, 400), np.arange(400, 2600)]
    )
    indices = (
        BatchIndices.whole(3, updates=4)
        if batch is None
        else Sampler(shards.size, batch, seed=1).round(4)
    )
    w, best = np.stack([case.start(node) for node in range(3)]), case.start(9)
    shift = 0.1 * np.stack([case.start(node + 20) for node in range(3)])

    def all_values() -> list[object]:
        descent = case.model.descend(w, shards, indices, 0.05, best, shift)
        losses = case.model.losses(best[None], shards, indices)
        accuracy = case.model.accuracy(best, case.table)
        return [
            descent.w,
            descent.losses,
            descent.gradients,
            descent.best_losses,
            losses,
            accuracy or 0.0,
        ]

    ours = all_values()
    numpy_only.undo()
    for mine, theirs in zip(ours, all_values(), strict=True):
        assert_close(mine, theirs)


def without_heavy(code: str, folder: Path) -> str:
    """Run a program without the heavy packages and return its output."""
    program = [sys.executable, "-c", without_packages(dedent(code))]
    done = subprocess.run(
        program, capture_output=True, text=True, cwd=folder, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "model",
    [
        "softmax",
        pytest.param("svm", marks=pytest.mark.slow),
        pytest.param("kmeans", marks=pytest.mark.slow),
    ],
)
def test_run_reaches_same_model(model: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    y = rng.integers(0, 2, 90)
    x = (rng.normal(size=(90, 6)) + 2 * y[:, None]).astype(np.float32)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    code = f"""
    import sys, numpy, fedbudget
    result = fedbudget.train(
        model={model!r}, dataset="all.npz", nodes=3, method="frugal", tau=4, step_size=0.05,
        rounds=8, out={{out!r}}, budget="time=1h", costs="simulated",
    )
    numpy.save({{out!r}} + ".npy", result.w)
    """
    without_heavy(code.replace("{out!r}", "'small'"), tmp_path)
    subprocess.run(
        [sys.executable, "-c", dedent(code.replace("{out!r}", "'whole'"))],
        cwd=tmp_path,
        check=True,
    )
    assert_close(np.load(tmp_path / "small.npy"), np.load(tmp_path / "whole.npy"))
    assert (tmp_path / "whole" / "plot.png").exists()
    assert not (tmp_path / "small" / "plot.png").exists()
