"""Fixtures for all tests of models."""

import pytest


@pytest.fixture(autouse=True)
def one_thread(one_torch_thread: None) -> None:
    """Use one PyTorch thread: steps this small gain nothing from more."""
