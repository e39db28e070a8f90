"""Over gRPC and in one process: the same w, to the bit, also with fewer bits sent, and with
a part of the nodes.
"""

from typing import Any

import numpy as np
import pytest

from fedbudget.engines.remote.engine import Participation
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import attendance
from fedbudget.launch.simulate import simulate
from fedbudget.settings.settings import Settings
from support.served import run_over_grpc

NODES = 4


@pytest.mark.parametrize(
    "how",
    [
        {"compress": "8-bit"},
        {"compress": "16-bit", "method": "paper"},
        {"compress": "8-bit", "method": "frugal", "update": "fedadam"},
        {"compress": "auto", "budget": ("time=1000s", "bytes=10MB"), "tau": 3},
        {"participation": 0.5},
        {"participation": 0.5, "compress": "8-bit"},
    ],
)
def test_over_grpc_as_in_one_process(how: dict[str, Any]) -> None:
    given: Any = {
        "model": "softmax",
        "partition": "case:2",
        "nodes": NODES,
        "rounds": 8,
        "combine": "mean",
    }
    settings = Settings(**{**given, "budget": ("time=1000s",), **how})
    here, there = execute(simulate(settings)), run_over_grpc(settings)
    assert [each.nodes for each in here.rounds] == [each.nodes for each in there.rounds]
    assert [each.loss for each in here.rounds] == [each.loss for each in there.rounds]
    assert here.w.tobytes() == there.w.tobytes()


def test_a_run_that_goes_on_asks_whom_it_would_have_asked() -> None:
    settings = Settings(nodes=20, participation=0.3, seed=4)

    def draw() -> Any:
        return attendance(settings)

    simulated = attendance(settings)
    assert simulated is not None
    drawn = [frozenset(np.flatnonzero(~next(simulated)).tolist()) for _ in range(30)]
    whole = Participation(draw)
    assert [whole.resting(number) for number in range(1, 31)] == drawn
    assert whole.resting(30) == drawn[29]
    assert whole.resting(7) == drawn[6]
    assert Participation(draw).resting(25) == drawn[24]
