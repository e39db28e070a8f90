"""Fixtures: a network after two rounds."""

from collections.abc import Iterator

import pytest

from support.networked import Network, network
from support.raw_peers import two_rounds


@pytest.fixture
def net() -> Iterator[Network]:
    """Two nodes after two rounds."""
    with network() as ours:
        two_rounds(ours)
        yield ours
