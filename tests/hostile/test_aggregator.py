"""What an aggregator with bad intentions can get from a node with the default options."""

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import fedbudget

ROUND: dict[str, Any] = {
    "model": "softmax",
    "method": "frugal",
    "tau": 1,
    "rounds": 2,
    "batch_size": 8,
    "step_size": 0.1,
    "seed": 3,
    "validation": 0.0,
    "budget": "time=1000s",
    "costs": "simulated",
}


def samples() -> tuple[Any, Any]:
    chance = np.random.default_rng(1)
    return chance.normal(size=(60, 4)), chance.integers(0, 3, 60)


@pytest.mark.parametrize("seeded", [False, True])
def test_mini_batches_are_secret(seeded: bool) -> None:
    """An aggregator knows the rows of each mini-batch only if a node agrees to its seed.

    Knowing the rows, it can solve for samples from the gradients of enough mini-batches.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    join = partial(fedbudget.join, data=samples(), name="n", quiet=True)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join, address, seeded_batches=seeded)
        attacked = fedbudget.serve(address, nodes=1, **ROUND)
        joined.result()
    known = fedbudget.train(shards=[samples()], **ROUND)
    assert np.array_equal(attacked.w, known.w) == seeded
