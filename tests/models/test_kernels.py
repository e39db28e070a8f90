"""Kernel drivers: the same bits for any split of the work, and enough precision for large
shards.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.models import LinearRegression
from fedbudget.models.base import Descent
from fedbudget.models.compiled import kernels as compiled
from support.problems import MODELS, Problem, problem

kernels: Any = compiled
DRIVERS = {"descend": kernels.descend, "descend_few": kernels.descend_few}
SIZES = (1, 127, 128, 129, 400, 2500)
"""Sizes around the block size, and one with more blocks than one pass sums."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


def run(
    driver: str,
    case: Problem,
    shards: Shards,
    indices: BatchIndices,
    w: Float32,
    shift: Float32 | None = None,
) -> Descent:
    """Run one round with the given driver, η = 0.05, and the losses of another w."""
    with pytest.MonkeyPatch.context() as patch:
        for name in DRIVERS:
            patch.setattr(kernels, name, DRIVERS[driver])
        return case.model.descend(w, shards, indices, 0.05, case.start(99), shift)


def assert_same_bits(one: Descent, other: Descent) -> None:
    for name, mine in vars(one).items():
        np.testing.assert_array_equal(mine, getattr(other, name), err_msg=name)


def shards_around_blocks(case: Problem) -> Shards:
    ends = np.cumsum(SIZES)
    return Shards.of(
        case.table,
        [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)],
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("features", [1, 3, 8, 33, 130])
def test_drivers_and_threads_same_bits(name: str, features: int) -> None:
    case = problem(name, seed=features, samples=sum(SIZES), features=features)
    shards = shards_around_blocks(case)
    indices = BatchIndices.whole(len(shards), updates=3)
    w = case.start(1)[None]
    numba.set_num_threads(1)
    alone = run("descend", case, shards, indices, w)
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    assert_same_bits(alone, run("descend", case, shards, indices, w))
    assert_same_bits(alone, run("descend_few", case, shards, indices, w))


@pytest.mark.parametrize("batch", [1, 100, 300])
def test_drivers_same_bits_on_batches(batch: int) -> None:
    """Also from a different w at each node."""
    case = problem("svm", seed=batch, samples=1600, features=20)
    shards = Shards.of(
        case.table, [np.arange(0, 300), np.arange(300, 900), np.arange(900, 1600)]
    )
    indices = Sampler(shards.size, batch, seed=4).round(4)
    w = np.stack([case.start(seed) for seed in range(3)])
    for shift in (None, np.stack([case.start(seed) for seed in range(10, 13)])):
        alone, shared = (run(driver, case, shards, indices, w, shift) for driver in DRIVERS)
        assert_same_bits(alone, shared)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_best_losses_use_first_batch(name: str, driver: str) -> None:
    case = problem(name, seed=7, samples=700)
    shards = Shards.of(case.table, [np.arange(0, 250), np.arange(250, 700)])
    indices = Sampler(shards.size, 200, seed=4).round(3)
    result = run(driver, case, shards, indices, case.start(1)[None])
    other = case.start(99).astype(np.float64)
    assert result.best_losses is not None
    for node in range(2):
        rows = shards.rows_of(node)[indices.of(node, 0, 0)]
        assert result.best_losses[node] == pytest.approx(
            case.loss(other, case.x[rows], case.y[rows]), rel=1e-5
        )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_shift_changes_step_not_gradient(name: str, driver: str) -> None:
    case = problem(name, seed=7, samples=300)
    parts = [np.arange(0, 140), np.arange(140, 300)]
    shift = np.stack([case.start(21), -case.start(22)])
    result = run(
        driver,
        case,
        Shards.of(case.table, parts),
        BatchIndices.whole(2, updates=4),
        case.start(1)[None],
        shift,
    )
    for node, gradient in enumerate(case.local(parts)):
        w = case.start(1).astype(np.float64)
        np.testing.assert_allclose(result.gradients[node], gradient(w), atol=1e-5)
        for _ in range(4):
            w = w - 0.05 * (gradient(w) + shift[node])
        np.testing.assert_allclose(result.w[node], w, atol=1e-5)


def test_large_shard_keeps_precision() -> None:
    case = problem(
        "linear", seed=2, samples=300_000, features=2, dtype=np.uint8, regularization=0.0
    )
    model, w = LinearRegression(2), np.array([1.0, -0.5], np.float32)
    result = model.descend(w[None], Shards.whole(case.table), BatchIndices.whole(1), 0.0)
    exact = w.astype(np.float64)
    np.testing.assert_array_equal(result.w[0], w)  # η = 0
    assert result.best_losses is None
    assert result.losses[0] == pytest.approx(case.loss(exact, case.x, case.y), rel=1e-6)
    np.testing.assert_allclose(
        result.gradients[0], case.gradient(exact, case.x, case.y), rtol=1e-5
    )


def test_concurrent_imports_of_kernels() -> None:
    """Runs in a new process with nothing imported; modules of numba import each other."""
    program = """
import sys, threading
from fedbudget.models.compiling import import_kernels

names = [
    "fedbudget.models.compiled.kernels",
    "fedbudget.models.compiled.tree_sum",
    "fedbudget.models.torch.layer_kernels",
]
started = threading.Barrier(len(names))
loaded = []

def load(name):
    started.wait()
    loaded.append(import_kernels(name).__name__)

threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(sorted(loaded) != sorted(names))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
