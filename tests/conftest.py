"""What holds for all tests."""

import os
from collections.abc import Iterator

import pytest

# Before PyTorch is loaded, whose threads would otherwise spin while they wait: two
# processes of tests on two cores then take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """As node processes have: more add up in another order, and on a busy machine they wait
    for each other longer than small steps take."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_numba_thread() -> Iterator[None]:
    """Hundreds of small runs are not worth sharing out among threads; the figures are the
    same bits.
    """
    import numba

    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(threads)
