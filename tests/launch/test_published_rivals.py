"""Published methods that change local updates: the same run in process, over gRPC and on
Ray.
"""

from typing import Any

import pytest

import fedbudget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    # Ray's own, found whenever they are collected.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

COMMON: dict[str, Any] = {
    "dataset": "digits", "model": "softmax", "nodes": 3, "partition": "dirichlet:0.3", "tau": 5, "step_size": 0.1,
    "rounds": 5, "budget": "time=1h", "costs": "simulated", "method": "frugal", "drift_correction": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "rival"),
    [
        ("network", {"proximal": 0.3}),
        ("ray", {"proximal": 0.3}),
        ("ray", {"workload": "by-data"}),
    ],
)
def test_every_engine_gives_the_same_bits(engine: Any, rival: dict[str, Any]) -> None:
    plain, here = fedbudget.train(**COMMON), fedbudget.train(**COMMON, **rival)
    assert here.w.tobytes() != plain.w.tobytes()
    assert fedbudget.train(**COMMON, **rival, engine=engine).w.tobytes() == here.w.tobytes()
