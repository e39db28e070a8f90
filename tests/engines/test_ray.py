"""The Ray engine without a cluster. tests/launch/test_on_ray.py runs on a cluster."""

import numpy as np
import pytest

from fedbudget.engines import ray as engine
from fedbudget.errors import WorkError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:many"])
def test_unreachable_cluster_is_reported(address: str) -> None:
    with (
        pytest.raises(WorkError, match=f"Ray cannot be reached at {address}: "),
        engine.cluster(address),
    ):
        pass


def test_actors_receive_even_shares() -> None:
    """No actor receives more than 113 % of the mean number of nodes, plus one."""
    for nodes in (1, 5, 200, 99_999, 100_000, 1_000_000):
        for actors in (1, 2, 3, 7, 64):
            if actors > nodes:
                continue
            bounds = np.array(engine.group_bounds(nodes, actors))
            shares = np.diff(bounds)
            assert shares.sum() == nodes
            assert shares.min() > 0
            assert shares.max() <= nodes / actors * 1.13 + 1
