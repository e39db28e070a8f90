"""What holds for all tests of models."""

import pytest


@pytest.fixture(autouse=True)
def one_thread(one_torch_thread: None) -> None:
    """Steps this small are not worth sharing out among threads."""
