"""Rules of one's own, given from Python: the same run by every engine, because they are used at the aggregator."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget import ControlInputs, Decision, RoundRecord
from fedbudget.arrays import Float32, Int64
from fedbudget.settings import EngineName


@dataclass(frozen=True)
class Doubling:
    """Twice as many local updates in every round; more than settings would let the built-in one make."""

    estimates: bool = False

    def first(self) -> Decision:
        return Decision(1, "one to begin with")

    def next(self, previous: Decision, inputs: ControlInputs) -> Decision:
        return Decision(2 * previous.tau, "twice the last")


@dataclass(frozen=True)
class Median:
    """Of every parameter the median over nodes."""

    needs_reports: bool = True

    def combine(self, w: Float32, sizes: Int64, nodes: Int64) -> Float32:
        return np.asarray(np.median(w, axis=0), np.float32)


OWN: dict[str, Any] = {"controller": Doubling(), "update": fedbudget.ServerMomentum(0.5), "combine": Median()}


def trained(engine: EngineName = "in-process", **own: Any) -> fedbudget.Result:
    asked: dict[str, Any] = {"nodes": 3, "case": 2, "budget": "time=1000s", "rounds": 9, "step_size": 0.01}
    return fedbudget.train(**asked, engine=engine, **own)


RAY = pytest.param(
    "ray",
    marks=[
        pytest.mark.xdist_group("ray"),
        # Ray leaves its processes to the system when it ends.
        pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    ],
)


@pytest.mark.parametrize("engine", [RAY, "network"])
def test_same_run_by_every_engine(engine: EngineName) -> None:
    here, there = trained(**OWN), trained(engine, **OWN)
    assert [record.tau for record in here.rounds] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 0]
    assert [(record.tau, record.reason, record.loss) for record in there.rounds] == [
        (record.tau, record.reason, record.loss) for record in here.rounds
    ]
    assert there.w.tobytes() == here.w.tobytes()


@pytest.mark.parametrize("name", ["controller", "update", "combine"])
def test_each_alone_makes_a_difference(name: str) -> None:
    assert trained(**{name: OWN[name]}).w.tobytes() != trained().w.tobytes()


def test_a_callback_ends_the_run_after_its_round() -> None:
    seen: list[int] = []

    def stop(record: RoundRecord) -> bool:
        seen.append(record.round)
        return record.round == 3

    result = trained(callbacks=[stop])
    assert (result.stopped_by, seen, len(result.rounds)) == ("callback", [1, 2, 3], 3)


def test_a_callback_ends_a_run_over_a_network() -> None:
    result = trained("network", callbacks=[lambda record: record.round == 3])
    assert result.stopped_by == "callback"
    assert len(result.rounds) < 9
