"""What the Ray engine does before it has a cluster; tests/test_cluster.py is about runs on
one.
"""

import numpy as np
import pytest

from fedbudget.engines import ray as engine
from fedbudget.errors import WorkError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:many"])
def test_a_cluster_that_is_not_there_is_told_at_once(address: str) -> None:
    with (
        pytest.raises(WorkError, match=f"Ray cannot be reached at {address}: "),
        engine.cluster(address),
    ):
        pass


def test_shares_are_even_and_made_up_of_few_branches() -> None:
    for nodes in (1, 5, 200, 99_999, 100_000, 1_000_000):
        for actors in (1, 2, 3, 7, 64):
            if actors > nodes:
                continue
            found = np.array(engine.group_bounds(nodes, actors))
            shares = np.diff(found)
            assert shares.sum() == nodes
            assert shares.min() > 0
            assert shares.max() <= nodes / actors * 1.13 + 1
