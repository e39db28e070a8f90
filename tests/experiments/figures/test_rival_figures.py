"""Figures of tuned rivals: rows, times to a loss, and claims that hold or fail."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import rivals as rivals_figure
from benchmarks.rivals import (
    FIGURES,
    Rivals,
    TimesToLoss,
    own_and_best,
    times_to_loss,
)

import fedbudget
from fedbudget import data
from fedbudget.experiments import cells, reproduce
from fedbudget.experiments.cells import Columns, Failure
from fedbudget.experiments.figures.figure import Claim, GridSize, Row, Rows, where
from fedbudget.experiments.rivals import (
    Rival,
    RivalComparison,
    TunedResult,
    published_rivals,
)
from fedbudget.settings.settings import Settings

SHORT: dict[str, Any] = {
    "model": "softmax",
    "budget": ("time=1s",),
    "nodes": 3,
    "partition": "case:2",
}
ONE = Rival("FedAvg", {}, {"tau": (3,), "step_size": (0.3,)})


class ShortRivals(Rivals):
    """One task, and one rival with one cell and no further search."""

    def settings(self, data_dir: str | None) -> list[Settings]:
        return [Settings(**SHORT, evaluations=1)]

    def rivals(self, size: GridSize) -> Sequence[Rival]:
        return [ONE]

    def climbs(self, size: GridSize) -> int:
        return 0


@pytest.fixture(scope="module")
def reproduction(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    figure = ShortRivals("rivals", "Rivals", ("digits",), long=True)
    out = tmp_path_factory.mktemp("reproduction")
    reproduce.make(figure, out, GridSize(2), jobs=1)
    rows = figure.make(
        figure.settings(None), GridSize(2), out / "rivals", jobs=1, progress=lambda *_: None
    )
    return out, rows


def run(seed: int, **options: Any) -> fedbudget.Result:
    return fedbudget.train(dataset="digits", seed=seed, **SHORT, **options)


PLAIN: dict[str, Any] = {
    "tau": 3,
    "step_size": 0.3,
    "method": "frugal",
    "drift_correction": False,
}


def test_rows_equal_separate_runs(reproduction: tuple[Path, Rows]) -> None:
    _, rows = reproduction
    own, paper, averaging = rows
    assert [row["method"] for row in rows] == ["default", "paper", "FedAvg"]
    for row, options in ((own, {}), (paper, {"method": "paper"}), (averaging, PLAIN)):
        assert row["loss"] == pytest.approx(
            sum(run(seed, **options).loss for seed in (0, 1)) / 2
        )
    assert averaging["knobs"] == "τ = 3, η = 0.3"
    assert (averaging["tuning_runs"], averaging["budget_seconds"]) == (2, 1.0)


def test_times_equal_separate_runs(reproduction: tuple[Path, Rows]) -> None:
    (averaging,) = where(reproduction[1], method="FedAvg")
    reached = [
        run(seed, until=f"loss={run(seed, **PLAIN).loss!r}", evaluations=25)
        for seed in (0, 1)
    ]
    assert [result.stopped_by for result in reached] == ["target", "target"]
    assert averaging["own_seconds"] == pytest.approx(
        sum(result.spent["time"] for result in reached) / 2
    )
    assert averaging["seconds"] is None  # it ends above the default


def test_page_has_table_and_claims(reproduction: tuple[Path, Rows]) -> None:
    out, _ = reproduction
    (result,) = reproduce.read_figures(out, FIGURES.values())
    assert (
        result.made_of
        == "mean of 2 runs of each method at its best, tuned over full grids, on digits"
    )
    assert result.table is not None
    assert [row[:2] for row in result.table[1:]] == [
        ("digits", name) for name in ("default", "paper", "FedAvg")
    ]
    assert result.table[3][5] == "never"
    assert result.table[3][6].endswith("% of the budget")
    assert [claim.holds for claim in result.claims] == [True, True]
    assert result.picture.stat().st_size > 1000


def test_finished_runs_are_reused(
    reproduction: tuple[Path, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(settings: Settings, **how: Any) -> Columns | Failure:
        raise AssertionError("a finished run was repeated")

    monkeypatch.setattr(cells, "attempt", attempt)
    out, before = reproduction
    figure = ShortRivals("rivals", "Rivals", ("digits",), long=True)
    assert (
        figure.make(
            figure.settings(None),
            GridSize(2),
            out / "rivals",
            jobs=1,
            progress=lambda *_: None,
        )
        == before
    )


class TestTimesToLoss:
    """Three seeds, by hand."""

    def times(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        seconds: Sequence[float | None],
        other: float = 2.0,
    ) -> TimesToLoss:
        def attempt(settings: Settings, **how: Any) -> Columns | Failure:
            assert settings.until is not None
            spent = seconds[settings.seed] if settings.tau == 3 else 0.25
            if settings.seed == 2 and settings.tau != 3:
                return Failure("out of memory")
            return {
                "stopped_by": ["time" if spent is None else "target"],
                "spent_time": [spent or 1.0],
            }

        monkeypatch.setattr(cells, "attempt", attempt)
        own = TunedResult("default", {}, 1.0, None, cell=Settings(), losses=(1.0, 1.0, 1.0))
        tuned = TunedResult(
            "FedAvg", {}, other, None, cell=Settings(tau=3), losses=(other,) * 3
        )
        comparison = RivalComparison("", own, (tuned,))
        times = times_to_loss(comparison, folder=tmp_path, seeds=range(3), jobs=1)
        return times["FedAvg"]

    def test_times_are_medians(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.times(tmp_path, monkeypatch, [0.9, None, 0.5]) == TimesToLoss(0.9, 0.25)

    def test_better_run_counts_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = self.times(tmp_path, monkeypatch, [None, None, 0.5], other=0.9)
        assert times.other == 1.0

    def test_unreached_loss_has_no_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.times(tmp_path, monkeypatch, [0.9, None, None]).other is None


def rows_of(**losses: float | None) -> list[Row]:
    common = {
        "accuracy": 0.9,
        "knobs": "",
        "tuning_runs": 1,
        "seconds": 1.0,
        "own_seconds": None,
        "budget_seconds": 4.0,
    }
    return [
        {"task": "a task", "method": name, "loss": loss, **common}
        for name, loss in losses.items()
    ]


class TestClaims:
    def claims(self, **losses: float | None) -> list[Claim]:
        return FIGURES["rivals"].claims(rows_of(**losses))

    def test_paper_method_is_no_rival(self) -> None:
        own, best = own_and_best(rows_of(default=1.0, paper=0.1, FedAvg=3.0, FedAdam=2.0))
        assert (own["method"], best["method"]) == ("default", "FedAdam")

    @pytest.mark.parametrize(
        ("best", "holds"),
        [(1.0, [True, False]), (0.96, [True, False]), (0.9, [False, False])],
    )
    def test_claims_fail_if_rival_wins(self, best: float, holds: list[bool]) -> None:
        assert [
            claim.holds for claim in self.claims(default=1.0, FedAvg=2.0, FedAdam=best)
        ] == holds

    def test_claims_hold_if_none_wins(self) -> None:
        assert [
            claim.holds for claim in self.claims(default=1.0, FedAvg=2.0, FedAdam=None)
        ] == [True, True]


class TestTasks:
    def test_tasks_are_valid(self) -> None:
        for name in ("rivals", "more-rivals", "niid-bench"):
            figure = FIGURES[name]
            settings = figure.settings(None)
            assert {each.dataset for each in settings} <= set(data.DATASETS)
            assert len(set(settings)) == len(figure.tasks)
            assert {each.method for each in settings} == {Settings().method}
            assert all("time" in each.limits().limits for each in settings)

    def test_published_accuracies_match_tasks(self) -> None:
        assert rivals_figure.PUBLISHED.keys() == rivals_figure.TASKS["niid-bench"].keys()
        assert {each["nodes"] for each in rivals_figure.TASKS["niid-bench"].values()} == {
            10
        }

    def test_table_has_published_accuracies(self) -> None:
        task = "Fashion-MNIST, 2 labels"
        rows = [{**row, "task": task} for row in rows_of(default=1.0, SCAFFOLD=2.0)]
        table = FIGURES["niid-bench"].table(rows)
        assert table is not None
        assert [row[4] for row in table[1:]] == ["", "33.8 ± 41.2"]

    def test_minimum_number_of_runs(self) -> None:
        figure = FIGURES["rivals"]
        (first, *_) = figure.settings(None)
        runs = figure.runs(first, GridSize(5)).cells
        assert len(runs) == 5 + sum(
            [len(rival.cells(first)) for rival in published_rivals()]
        )
        assert replace(first, seed=4) in runs
