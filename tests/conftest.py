"""Environment and fixtures of all tests."""

import os
from collections.abc import Iterator

import pytest

# Set before PyTorch is loaded. Its threads otherwise spin while they wait, and two test
# processes on two cores take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Use one thread, like node processes.

    Several threads sum in another order. On a busy machine they also wait for each other
    longer than small steps take.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_numba_thread() -> Iterator[None]:
    """Use one thread, because hundreds of small runs do not benefit from more.

    The results are the same bits.
    """
    import numba

    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(threads)
