"""Runs with nodes of different speeds: their costs, and the recorded work."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.method import build_method
from fedbudget.launch.simulate import simulate
from fedbudget.resources.speeds import Speeds
from fedbudget.result import Result
from fedbudget.runs import nodes
from fedbudget.runs.explain import explain
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings


def run(**options: Any) -> Result:
    return fedbudget.train(
        **{"model": "softmax", "case": 2, "budget": "time=3s", "evaluations": 1, **options}
    )


@pytest.mark.parametrize("method", ["accelerated", "paper"])
def test_equal_speeds_change_nothing(method: Any) -> None:
    plain, equal = (run(method=method, speeds=speeds) for speeds in (None, (1,) * 5))
    assert equal.w.tobytes() == plain.w.tobytes()
    assert equal.spent == plain.spent


@pytest.mark.parametrize("method", ["frugal", "paper"])
def test_slowest_node_sets_round_time(method: Any) -> None:
    """With the same τ for all, one node at a quarter of the speed makes updates four times
    slower and changes no parameter.
    """
    options = {
        "method": method,
        "tau": 3,
        "rounds": 4,
        "budget": "time=100s",
        "validation": 0.0,  # it costs as much as some local updates
    }
    plain, slow = (run(**options, speeds=speeds) for speeds in (None, (1, 1, 0.25, 1, 1)))
    assert slow.w.tobytes() == plain.w.tobytes()
    for one, other in zip(plain.rounds, slow.rounds, strict=True):
        assert other.c["time"] == pytest.approx(4 * one.c["time"])
        assert other.b == one.b
        assert other.work is None


def test_speeds_follow_the_seed() -> None:
    speeds = [
        Speeds.of("lognormal:0.5", 4000, np.random.default_rng(seed)).values
        for seed in (1, 1, 2)
    ]
    assert speeds[0].tolist() == speeds[1].tolist() != speeds[2].tolist()
    assert np.log(speeds[0]).mean() == pytest.approx(0, abs=0.03)
    assert np.log(speeds[0]).std() == pytest.approx(0.5, abs=0.03)


class TestRecordedWork:
    SPEEDS = (4.0, 4.0, 1.0, 1.0, 1.0)

    def test_updates_and_idle_of_nodes(self, tmp_path: Path) -> None:
        result = run(speeds=self.SPEEDS, out=tmp_path / "run")
        shared = [record for record in result.rounds if record.work]
        assert len(shared) > 5
        for record in shared:
            assert record.work is not None
            fast, slow = record.work["updates"][:2], record.work["updates"][2:]
            assert (fast, slow) == ([4 * record.tau] * 2, [record.tau] * 3)
            assert record.work["idle"] == [0.0] * 5
            assert record.work["idle_equal"] == [0.75, 0.75, 0.0, 0.0, 0.0]
            assert record.effective_tau == pytest.approx(record.tau * 10 / 7)
            assert record.tau_text == f"{record.tau}-{4 * record.tau}"
        made = sum(record.effective_tau for record in result.rounds if record.tau)
        assert result.local_updates == round(made)
        listed = nodes.read(tmp_path / "run")
        assert listed is not None
        assert [node["speed"] for node in listed["nodes"]] == list(self.SPEEDS)
        opened = Run.open(tmp_path / "run")
        assert [each.work for each in opened.rounds] == [
            each.work for each in result.rounds
        ]
        explained = explain(
            opened, shared[0].round, build_method(opened.settings).controller
        )
        assert (
            "idle for 0% of the update time instead of 30% with equal τ" in explained.shared
        )

    def test_many_nodes_have_only_means(self) -> None:
        result = run(
            speeds="lognormal:1.0", nodes=201, rounds=3, partition="draw:20", case=None
        )
        work, *_ = (record.work for record in result.rounds if record.work)
        assert work["updates"] == work["idle"] == []
        assert 0 <= work["mean_idle"] < 0.5 < work["mean_idle_equal"] < 1
        assert json.loads(json.dumps(work)) == work


def test_slowed_node_delays_few_rounds() -> None:
    """One node slows to a tenth after round 10. Updates per second of the others recover
    to 70 % by round 16.
    """
    prepared = simulate(
        Settings(model="softmax", partition="case:2", budget=("time=40s",), speeds=(1,) * 5)
    )
    updates, times = [], []

    def observe(record: RoundRecord) -> None:
        updates.append(record.work["updates"][0] if record.work else record.tau)
        times.append(record.tau * record.c["time"] + record.b["time"])
        if record.round == 10:
            object.__setattr__(
                prepared.meters, "speeds", Speeds(np.array([1, 1, 1, 1, 0.1]))
            )

    execute(prepared, callbacks=[observe])

    def rate(first: int, last: int) -> float:
        return float(sum(updates[first:last]) / sum(times[first:last]))

    assert rate(10, 13) < rate(3, 10) / 3
    assert rate(15, 45) > 0.7 * rate(3, 10)
    assert np.median(times[15:45]) < 1.3 * np.median(times[3:10])


def test_energy_budget_gives_equal_work() -> None:
    default, equal = (
        run(speeds=TestRecordedWork.SPEEDS, budget="energy=100J", workload=workload)
        for workload in (None, "equal")
    )
    assert len(default.rounds) > 5
    assert default.w.tobytes() == equal.w.tobytes()


def test_number_of_speeds() -> None:
    with pytest.raises(UserError, match="needs one number for each of the 5 nodes, not 2"):
        run(speeds=(1, 2))
