"""Data of charts, gauges and metric tiles, and the description of a run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.budget.control import AdaptiveTau, ControlInputs, Decision, Estimates, Reason
from fedbudget.dashboard import series
from fedbudget.dashboard.run_reader import RunReader, RunSnapshot
from fedbudget.launch.method import build_method
from fedbudget.resources.privacy import replacement_epsilon
from fedbudget.runs.folder import Run
from fedbudget.runs.nodes import write_simulated
from fedbudget.settings.settings import Settings
from support.synthetic_runs import SETTINGS, held_by_writer, make_run, many_rounds, record


def snapshot_of(path: Path) -> RunSnapshot:
    return RunReader(path).read()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunSnapshot:
    return snapshot_of(many_rounds(tmp_path_factory.mktemp("long") / "run", 10_000))


def test_few_rounds_are_not_thinned() -> None:
    records = [record(number) for number in range(1, 101)]
    assert series.thinned(records) == records


def test_thinning_keeps_extremes_and_evaluations(long_run: RunSnapshot) -> None:
    records = long_run.run.rounds
    kept = series.thinned(records)
    assert 500 < len(kept) <= 2 * series.MAX_ROUNDS
    assert (kept[0], kept[-1]) == (records[0], records[-1])
    for name in ("loss", "tau"):
        every, some = ([getattr(each, name) for each in these] for these in (records, kept))
        assert (min(some), max(some)) == (min(every), max(every))  # including the spike
    assert [each for each in records if each.accuracy is not None] == [
        each for each in kept if each.accuracy is not None
    ]


@given(
    st.lists(
        st.tuples(st.floats(-10, 10), st.sampled_from(["start", "budget"])),
        min_size=1,
        max_size=400,
    )
)
def test_thinning_of_random_rounds(
    given: list[tuple[float, str]],
) -> None:
    records = [
        record(at, loss=loss, reason=reason) for at, (loss, reason) in enumerate(given, 1)
    ]
    kept = series.thinned(records, 56)
    numbers = [each.round for each in kept]
    assert numbers == sorted(set(numbers))
    assert len(kept) <= 2 * 56
    assert {1, len(records)} <= set(numbers)
    losses = [each.loss for each in kept]
    assert (min(losses), max(losses)) == (
        min(loss for loss, _ in given),
        max(loss for loss, _ in given),
    )


def test_thinning_keeps_changes_of_reason() -> None:
    reasons = {700: "budget", 701: "minimum of G", 1500: "search limit"}
    records = [record(number) for number in range(1, 3001)]
    now = "minimum of G"
    for at, each in enumerate(records):
        now = reasons.get(each.round, now)
        records[at] = replace(each, reason=now)
    assert {700, 701, 1500} <= {each.round for each in series.thinned(records)}


def test_short_range_is_exact(long_run: RunSnapshot) -> None:
    rows = series.rows(long_run, 3000, 3500)
    assert rows["exact"] is True
    assert rows["columns"]["round"] == list(range(3000, 3501))
    assert rows["columns"]["spent"]["time"][0] == long_run.run.rounds[2999].spent["time"]
    whole = series.rows(long_run, 1, 10_000)
    assert whole["exact"] is False
    assert len(whole["columns"]["round"]) <= 2 * series.MAX_ROUNDS
    assert series.rows(long_run, 20_000, 30_000)["columns"]["round"] == []


def test_nan_becomes_null(tmp_path: Path) -> None:
    path = make_run(
        tmp_path / "run",
        [record(1, loss=math.nan, best_loss=math.nan)],
        summary={"loss": None},
    )
    view = series.view(snapshot_of(path))
    assert view["columns"]["loss"] == [None]
    json.dumps(view, allow_nan=False)


REAL = {"accuracy": None, "metrics": {"rmse": 12.5, "mae": 8.0, "r2": 0.75}}
SPREAD = {"nodes": 4, "worst": 20.0, "tenth": 18.0, "median": 11.0}


def test_metric_tiles(
    tmp_path: Path,
) -> None:
    rounds = [record(1, **REAL, spread=SPREAD), record(2, accuracy=None)]
    view = series.view(snapshot_of(make_run(tmp_path / "run", rounds, finished=False)))
    assert view["columns"]["rmse"] == [12.5, None]
    tiles = {
        each["name"]: (each["label"], each["text"], each["note"])
        for each in view["metrics"]
    }
    assert tiles == {
        "rmse": ("RMSE", "12.5", ""),
        "mae": ("MAE", "8", ""),
        "r2": ("R²", "0.7500", ""),
        "worst": ("Worst of 4 nodes", "20", "tenth percentile 18, median 11"),
    }
    end = {"loss": 0.1, "metrics": {"rmse": 11.0}, "to_beat": {"rmse": 25.0}}
    ended = series.view(snapshot_of(make_run(tmp_path / "ended", rounds, summary=end)))[
        "metrics"
    ]
    assert ended == [
        {"name": "rmse", "label": "RMSE", "text": "11", "note": "predicting the mean 25"}
    ]


def test_gauges_of_a_running_run(
    tmp_path: Path,
) -> None:
    # The run spends 0.2 s and 10 kB per second; after 40 rounds 16 s and 1.8 MB are left.
    with held_by_writer(make_run(tmp_path / "run", 40, finished=False)) as path:
        snapshot = snapshot_of(path)
        time, traffic = series.gauges(snapshot)
    assert (time["text"], time["left"], time["over"]) == ("4s of 20s", "16s", None)
    assert time["share"] == pytest.approx(0.2)
    assert time["until"] - snapshot.written == pytest.approx(16 / 0.2)
    assert traffic["until"] - snapshot.written == pytest.approx(1.8e6 / 10e3)


def test_pace_of_the_last_rounds(tmp_path: Path) -> None:
    slow = [record(number, wall=100.0 * number) for number in range(1, 31)]
    quick = [record(number, wall=3000 + 0.1 * (number - 30)) for number in range(31, 61)]
    with held_by_writer(
        make_run(tmp_path / "run", [*slow, *quick], finished=False)
    ) as path:
        snapshot = snapshot_of(path)
        # 14 s are left, at 1 s per second.
        assert series.gauges(snapshot)[0]["until"] - snapshot.written == pytest.approx(14.0)


def test_gauges_of_a_finished_run(tmp_path: Path) -> None:
    path = make_run(
        tmp_path / "run", [record(1), record(2, spent={"time": 20.5, "bytes": 1e6})]
    )
    time, traffic = series.gauges(snapshot_of(path))
    assert (time["over"], time["until"], time["source"]) == ("0.5s", None, "simulated")
    assert (traffic["over"], traffic["left"]) == (None, "1MB")


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("unit", ["node", "sample"])
def test_gauge_of_private_run(unit: Any, finished: bool, tmp_path: Path) -> None:
    """It has both figures of ε, and calls a seeded one simulated, also during the run."""
    settings = replace(
        SETTINGS,
        method="accelerated",
        budget=("time=20s", "privacy=4"),
        privacy_delta=1e-5,
        privacy_unit=unit,
        privacy_noise="seeded",
    )
    costs = {"time": 0.1, "privacy": 0.0}
    rounds = [record(1, c=costs, b=costs, spent={"time": 1.0, "privacy": 1.0})]
    path = make_run(tmp_path / "run", rounds, settings=settings, finished=finished)
    snapshot = snapshot_of(path)
    _, gauge = series.gauges(snapshot)
    other = replacement_epsilon(1.0, 1e-5)
    assert gauge["text"] == f"1 of 4; ε = {other:.4g} if a {unit} is replaced, not left out"
    assert gauge["source"] == "simulated"
    assert "(simulated ε)" in series.view(snapshot)["title"]


def test_curve_equals_the_controllers(tmp_path: Path) -> None:
    choice = series.choice(snapshot_of(make_run(tmp_path / "run")), 7)
    controller = build_method(SETTINGS).controller
    assert isinstance(controller, AdaptiveTau)
    inputs = ControlInputs(
        Estimates(1.0, 2.0, 3.0),
        0.01,
        np.array([0.01, 0.0]),
        np.array([0.05, 5e3]),
        SETTINGS.limits().array,
    )
    curve = controller.curve(Decision(5, Reason.MINIMUM), inputs)
    assert choice["candidates"] == list(range(1, 51))
    assert choice["curve"] == pytest.approx(curve.tolist(), rel=1e-5)
    assert choice["minimum"] == int(np.argmin(curve)) + 1
    assert choice["sentence"] == "G(τ) is smallest at τ = 5"
    assert (choice["record"]["round"], choice["spent"]) == (
        7,
        {"time": "0.7s", "bytes": "35kB"},
    )


def test_long_curve_keeps_marked_points(tmp_path: Path) -> None:
    settings = replace(SETTINGS, tau_max=5000, gamma=1000.0)
    records = [record(1), record(2), record(3, tau=777)]
    choice = series.choice(
        snapshot_of(make_run(tmp_path / "run", records, settings=settings)), 3
    )
    assert len(choice["candidates"]) < 100
    assert {777, choice["minimum"], 1, 1000} <= set(choice["candidates"])


def test_average_tau_counts_all_rounds(tmp_path: Path, long_run: RunSnapshot) -> None:
    # τ is 3 + number % 11. In 10,000 = 909 x 11 + 1 rounds each of 3..13 occurs 909 times,
    # and 4 occurs 910 times.
    assert series.now(long_run)["average_tau"] == pytest.approx(
        (909 * sum(range(3, 14)) + 4) / 10_000
    )
    final = [record(1, tau=2), record(2, tau=5), record(3, tau=0, reason="final loss")]
    assert series.now(snapshot_of(make_run(tmp_path / "run", final)))["average_tau"] == 3.5
    assert (
        series.now(snapshot_of(make_run(tmp_path / "none", 0, finished=False)))[
            "average_tau"
        ]
        is None
    )


def test_settings_of_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = series.view(snapshot_of(make_run(tmp_path / "run")))[
        "settings"
    ]
    assert settings["budget"] == "time=20s, bytes=2MB"
    assert (settings["nodes"], settings["tau-max"], "phi" in settings) == (
        "4",
        "100",
        False,
    )


def test_forecast_of_end_and_extension(tmp_path: Path) -> None:
    """The loss is 0.2 + 0.8/n: 200 rounds fit 20 s, and 300 fit a budget 50 % larger."""
    running = make_run(tmp_path / "on", 100, finished=False)
    ended = make_run(tmp_path / "ended", 200)
    first, second = (
        series.now(RunReader(path).read())["forecast"] for path in (running, ended)
    )
    assert not first["ended"]
    assert first["median"] == pytest.approx(0.204, abs=0.002)
    assert second["ended"]
    assert second["low"] <= second["median"] <= second["high"]
    few = series.now(RunReader(make_run(tmp_path / "few", 3, finished=False)).read())[
        "forecast"
    ]
    assert few["reason"] == "3 rounds are complete; 8 are needed"
    assert (
        series.now(RunReader(make_run(tmp_path / "none", 0, finished=False)).read())[
            "forecast"
        ]
        is None
    )


def test_description_of_a_finished_run(tmp_path: Path) -> None:
    run = Run.open(make_run(tmp_path / "run", summary={"loss": 0.25, "accuracy": 0.875}))
    # Rounds 1 and 2 have one update, the other 18 have five: 92 / 20 on average.
    assert series.describe(run) == (
        "The run made 20 aggregations, with 92 local updates on every node "
        "(average τ 4.6). "
        "It spent 2s of 20s (time) and 100kB of 2MB (bytes). "
        "The loss went from 1 to 0.25, "
        "and accuracy on the test samples from 0.5000 to 0.8750. "
        "It ended because the budget for time was used up."
    )


def test_description_of_a_running_run(tmp_path: Path) -> None:
    text = series.describe(Run.open(make_run(tmp_path / "run", 3, finished=False)))
    assert text.startswith(
        "The run made 3 aggregations so far, with 7 local updates on every node"
    )
    assert text.endswith("It has not ended.")


def test_validation_is_shown(tmp_path: Path) -> None:
    """Every second round validates. The lowest loss before is that of round 19."""
    rounds = [
        record(at, validation=1 + 1 / at, validation_best=1 + 1 / at)
        if at % 2
        else record(at)
        for at in range(1, 21)
    ]
    running = series.view(snapshot_of(make_run(tmp_path / "a", rounds, finished=False)))
    assert running["columns"]["validation"][:3] == [2.0, None, pytest.approx(4 / 3)]
    assert running["validation"] == 1 + 1 / 19
    assert running["forecast"]["validated"]
    warnings = ["training did not help"]
    ended = {"validation_loss": 1.04, "stopped_by": "validation", "warnings": warnings}
    finished = series.view(snapshot_of(make_run(tmp_path / "b", rounds, summary=ended)))
    assert finished["validation"] == finished["forecast"]["median"] == 1.04
    assert finished["paragraph"].startswith("Warning: training did not help. The run made")
    assert "the validation loss from 2 to 1.04" in finished["paragraph"]
    assert "ended because the validation loss no longer improved." in finished["paragraph"]


def test_excluded_nodes_are_named(tmp_path: Path) -> None:
    rounds = [record(1), record(2, excluded=(1, 3))]
    path = make_run(tmp_path / "run", rounds, finished=False)
    write_simulated(path, np.array([5, 5]), names=["north", "south"])
    snapshot = snapshot_of(path)
    assert series.view(snapshot)["excluded"] == ["south", "node 3"]
    assert (
        "the losses of south, node 3 did not count"
        in series.choice(snapshot, 2)["sentence"]
    )
    assert "did not count" not in series.choice(snapshot, 1)["sentence"]


def test_thinning_keeps_the_lowest_validation() -> None:
    records = [
        record(at, validation=1 + (at - 2001) ** 2 if at % 2 else None)
        for at in range(1, 4001)
    ]
    kept = [each.validation for each in series.thinned(records)]
    assert min(loss for loss in kept if loss is not None) == 1.0


def test_description_of_an_overrun(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", [record(1, spent={"time": 20.5, "bytes": 1e6})])
    assert "20.5s of 20s (time, 0.5s over the budget)" in series.describe(Run.open(path))


def test_description_without_rounds_or_accuracy(tmp_path: Path) -> None:
    assert (
        series.describe(Run.open(make_run(tmp_path / "none", 0, finished=False)))
        == "No round has finished yet."
    )
    path = make_run(
        tmp_path / "blind", [record(1, accuracy=None)], summary={"accuracy": None}
    )
    assert "accuracy" not in series.describe(Run.open(path))


def test_description_compares_fixed_tau(tmp_path: Path) -> None:
    def run(name: str, loss: float, **changes: Any) -> Run:
        settings = Settings(**{**vars(SETTINGS), **changes})
        return Run.open(
            make_run(tmp_path / name, settings=settings, summary={"loss": loss})
        )

    adaptive = run("adaptive", 0.2)
    ten = run("ten", 0.3, tau=10)
    one = run("one", 0.4, tau=1)
    other = run("other", 0.1, tau=5, seed=9)
    text = series.describe(adaptive, [adaptive, ten, one, other])
    assert text.endswith(
        "With the same budget and a fixed τ, "
        "the loss was 0.4 with τ = 1 and 0.3 with τ = 10."
    )
    assert "fixed" not in series.describe(ten, [adaptive, one])
    assert "fixed" not in series.describe(adaptive, [adaptive, other])
