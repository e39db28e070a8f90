"""Resumed runs in one process: to the same bits after a crash, and past the end with a
larger budget.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import ServerMomentum, train
from fedbudget.engines.engine import Engine
from fedbudget.errors import UserError
from fedbudget.launch import simulate
from fedbudget.launch.resume import require_same_settings
from fedbudget.result import Result
from fedbudget.runs import checkpoint, plot
from fedbudget.runs.folder import Run, read_summary
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from support.processes import sample_shards, without_wall

DATA: dict[str, Any] = {
    "model": "softmax",
    "shards": sample_shards(4),
    "test": sample_shards(5)[4],
}
TRIAL = Settings(model="svm", nodes=5, partition="case:4", seed=3)
METHODS: dict[str, dict[str, Any]] = {
    "frugal": {"tau_max": 8},
    "paper": {"method": "paper", "tau_max": 8},
    "mini-batches": {"batch_size": 8, "tau_max": 8, "budget": ["time=3s", "bytes=1MB"]},
    "absences": {"participation": 0.5, "tau_max": 8},
    "fewer bits": {"compress": "8-bit", "batch_size": 8, "tau_max": 8},
    "newton": {"method": "newton"},
    "by speed": {"speeds": "lognormal:1.0", "participation": 0.8, "tau_max": 8},
    "own rule": {"update": ServerMomentum(0.5), "batch_size": 8},
    "rule by name": {
        "update": "fedadam",
        "server_step_size": 0.05,
        "tau": 4,
        "step_size": 0.1,
        "step_fall": 0.5,
    },
    "step lengths": {"update": "fedexp", "tau": 4, "step_size": 0.1},
    "distance": {"update": "prodigy", "tau": 4, "step_size": 0.1},
    "curvature": {"local_step": "delta-sgd", "participation": 0.5, "tau": 4},
    "own steps": {"local_step": "dog", "participation": 0.5, "tau": 4},
    "centralized": {"method": "centralized", "batch_size": 8, "rounds": 40},
    "asynchronous": {"method": "asynchronous", "batch_size": 8},
}


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the plot, which takes longer than the run."""
    monkeypatch.setattr(plot, "plot_run", lambda *given, **how: b"")


@pytest.fixture
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a checkpoint after every round."""
    monkeypatch.setattr(Engine, "checkpoint_interval", 1e-9)
    monkeypatch.setattr(checkpoint, "SHARE", math.inf)


def run(**options: Any) -> Result:
    return train(**{**DATA, "budget": "time=3s", "costs": "simulated", **options})


def assert_same(resumed: Result, whole: Result) -> None:
    assert without_wall(resumed.rounds) == without_wall(whole.rounds)
    assert resumed.w.tobytes() == whole.w.tobytes()
    assert replace(resumed, w=whole.w, rounds=(), run=None) == replace(
        whole, rounds=(), run=None
    )


class TestInterruptedRun:
    """A copy of the folder equals the folder after a crash at that moment."""

    @pytest.mark.usefixtures("frequent_checkpoints")
    @pytest.mark.parametrize("name", METHODS)
    def test_resumed_run_gives_same_bits(self, tmp_path: Path, name: str) -> None:
        options = METHODS[name]
        out = tmp_path / "run"

        def crash(record: RoundRecord) -> None:
            if record.round in (1, 2, 7):
                shutil.copytree(
                    out, tmp_path / str(record.round), ignore=shutil.ignore_patterns(".*")
                )

        whole = run(**options, out=out, callbacks=[crash])
        assert whole.rounds[-1].round > 8
        for number in ("1", "2", "7"):
            again = train(**(DATA | options | {"budget": None}), resume=tmp_path / number)
            assert_same(again, whole)
            assert Run.open(tmp_path / number).model().w.tobytes() == whole.w.tobytes()

    def test_short_run_resumes_from_start(self, tmp_path: Path) -> None:
        """A short run has a checkpoint of its start and one of its end."""
        out = tmp_path / "run"

        def stop(record: RoundRecord) -> None:
            if record.round == 5:
                raise KeyError("an error of the user's callback")

        with pytest.raises(KeyError):
            run(out=out, callbacks=[stop])
        assert len(Run.open(out).rounds) == 5
        assert_same(train(**DATA, resume=out), run(out=tmp_path / "other"))

    def test_stopped_run_resumes(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        first = run(out=out, callbacks=[lambda record: record.round == 4])
        assert (first.stopped_by, len(first.rounds)) == ("callback", 4)
        longer = train(**DATA, resume=out, budget="time=+1s")
        assert without_wall(longer.rounds[:4]) == without_wall(first.rounds)
        assert (longer.rounds[4].round, longer.stopped_by) == (5, "time")
        assert 3 < longer.spent["time"] < 4.5


class TestMoreBudget:
    @pytest.mark.parametrize("batch_size", ["full", 8])
    @pytest.mark.parametrize("drift_correction", [True, False])
    def test_equals_run_with_larger_budget(
        self, tmp_path: Path, batch_size: Any, drift_correction: bool
    ) -> None:
        """Fixed rounds are equal, except for the evaluation round at the first end."""
        fixed = {
            "tau": 3,
            "step_size": 0.05,
            "batch_size": batch_size,
            "drift_correction": drift_correction,
        }
        run(**fixed, budget="time=1h", rounds=4, out=tmp_path / "run")
        longer = train(**DATA, resume=tmp_path / "run", rounds=9)
        whole = run(**fixed, budget="time=1h", rounds=9)
        evaluated = [record for record in longer.rounds if record.tau == 0]
        assert [record.round for record in evaluated] == [5, 11]
        fields = (
            "t",
            "tau",
            "eta",
            "loss",
            "delta",
            "corrected",
            "plain_delta",
            "corrected_delta",
            "nodes",
        )

        def rounds(result: Result) -> list[list[Any]]:
            return [
                [getattr(record, name) for name in fields]
                for record in result.rounds
                if record.tau
            ]

        assert rounds(longer) == rounds(whole)
        assert longer.loss == whole.loss
        assert longer.w.tobytes() == whole.w.tobytes()
        assert longer.aggregations == 9
        assert longer.local_updates == 27
        assert longer.stopped_by == "rounds"

    @pytest.mark.parametrize("name", ["centralized", "asynchronous"])
    def test_baselines_equal_larger_budget(self, tmp_path: Path, name: str) -> None:
        options = {"method": name, "batch_size": 8}
        run(**options, budget="time=1s", out=tmp_path / "run")
        longer = train(**DATA, resume=tmp_path / "run", budget="time=+1s")
        whole = run(**options, budget="time=2s")
        assert longer.w.tobytes() == whole.w.tobytes()
        assert longer.spent == whole.spent

    def test_folder_records_the_new_budget(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        first = run(out=out)
        longer = train(**DATA, resume=out, budget="time=+2s")
        assert without_wall(longer.rounds[: len(first.rounds)]) == without_wall(
            first.rounds
        )
        resumed = Run.open(out)
        summary = read_summary(out)
        assert resumed.settings.budget == ("time=5s",)
        assert resumed.rounds == longer.rounds
        assert summary is not None
        assert (summary["budget"], summary["spent"]) == ({"time": 5.0}, dict(longer.spent))
        assert 3 < longer.spent["time"] < 5.5

    @pytest.mark.usefixtures("frequent_checkpoints")
    def test_crash_while_extending(self, tmp_path: Path) -> None:
        out, copy = tmp_path / "run", tmp_path / "copy"
        first = run(out=out)
        end = len(first.rounds)

        def crash(record: RoundRecord) -> None:
            if record.round == end + 3:
                shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".*"))

        whole = train(**DATA, resume=out, budget="time=+2s", callbacks=[crash])
        assert Run.open(copy).model().w.tobytes() == first.w.tobytes()
        assert read_summary(copy) is None
        assert_same(train(**DATA, resume=copy), whole)

    def test_shortened_last_round_is_redone(self, tmp_path: Path) -> None:
        """The last round is shortened to fit. Interrupted before it and given a larger
        budget, the run continues with full rounds.
        """
        last = len(run(out=tmp_path / "whole").rounds) - 1
        run(out=tmp_path / "run", callbacks=[lambda record: record.round == last - 1])
        longer = train(**DATA, resume=tmp_path / "run", budget="time=6s")
        assert [record.tau for record in longer.rounds].index(0) == len(longer.rounds) - 1
        assert 5.5 < longer.spent["time"] < 6.5

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {},
                r"the run has finished; to resume it, extend budget, such as time=\+10min",
            ),
            ({"budget": "time=3s"}, "the run has finished"),
            ({"budget": "time=1s"}, "budget time=1s is below the .* already spent"),
            ({"budget": "time=+0.05s"}, "too little is left of time for one more round"),
            ({"budget": "bytes=+1MB"}, "a resumed run keeps its resources, time"),
            (
                {"budget": "time=+5s", "tau": 5},
                "tau is adaptive there, and cannot become 5",
            ),
            (
                {"budget": "time=+5s", "out": "elsewhere"},
                "resume uses the folder and the settings of the run",
            ),
            (
                {"budget": "time=+5s", "shards": [(2 * x, y) for x, y in sample_shards(4)]},
                "has changed since the run started",
            ),
            (
                {"budget": "time=+5s", "engine": "ray"},
                "the run used engine in-process",
            ),
            ({"budget": "time=+5s", "engine": "network"}, "use fedbudget serve"),
        ],
    )
    def test_refused_options_change_no_file(
        self, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        out = tmp_path / "run"
        run(out=out, seed=1)
        before = {each.name: each.read_bytes() for each in out.iterdir()}
        with pytest.raises(UserError, match=message):
            train(**{**DATA, **options}, resume=out)
        assert {each.name: each.read_bytes() for each in out.iterdir()} == before


def test_fleet_too_large_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose state exceeds the limit of a checkpoint start anew."""
    monkeypatch.setattr(simulate, "MOST_MEMORY", 0.0)
    first = run(out=tmp_path / "run")
    longer = train(**DATA, resume=tmp_path / "run", budget="time=+3s")
    assert (tmp_path / "run" / "checkpoint.safetensors").stat().st_size < 10_000
    assert longer.rounds[-1].t > first.rounds[-1].t
    assert longer.loss <= first.loss
    assert np.isfinite([record.loss for record in longer.rounds]).all()


def test_resumed_settings_must_match() -> None:
    require_same_settings(
        Path("run"), TRIAL, replace(TRIAL, budget=("time=1h",), rounds=3, evaluations=7)
    )
    with pytest.raises(
        UserError,
        match=r"run resumes with its own settings: tau is adaptive .* cannot become 5",
    ):
        require_same_settings(Path("run"), TRIAL, replace(TRIAL, tau=5))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["frugal", "paper"])
def test_loss_equals_larger_budget(tmp_path: Path, method: Any) -> None:
    """The mean loss over 20 seeds is within one deviation of a run with all the budget."""
    losses = []
    for seed in range(20):
        options: dict[str, Any] = {
            "model": "svm",
            "dataset": "digits",
            "case": 2,
            "method": method,
            "seed": seed,
        }
        train(**options, budget="time=10s", out=tmp_path / str(seed))
        longer = train(resume=tmp_path / str(seed), budget="time=+5s")
        losses.append((longer.loss, train(**options, budget="time=15s").loss))
    resumed, expected = np.array(losses).T
    assert abs(resumed.mean() - expected.mean()) < max(
        expected.std(), 0.005 * expected.mean()
    )
