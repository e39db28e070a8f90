"""Tuned rivals: grids, the best cell, reused runs and failed runs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget.budget.control import FixedTau
from fedbudget.budget.step_size import FixedStep
from fedbudget.errors import UserError
from fedbudget.experiments import cells
from fedbudget.experiments.cells import Columns, Failure
from fedbudget.experiments.rivals import (
    FALL,
    Rival,
    RivalComparison,
    TunedResult,
    compare_rivals,
    published_rivals,
    untuned_rivals,
)
from fedbudget.launch.method import build_method
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.features.local_step import DeltaSgd, DistanceOverGradients
from fedbudget.protocol.update import (
    Average,
    FedAdam,
    FedExP,
    FedYogi,
    Prodigy,
    ServerMomentum,
)
from fedbudget.settings.settings import Settings
from support.commands import run_command

pytestmark = pytest.mark.usefixtures("one_numba_thread")

SHORT = Settings(model="svm", budget=("time=1s",), nodes=3, partition="case:2")
AVERAGING = Rival("FedAvg", {}, {"tau": (2, 9), "step_size": (0.01, 0.2)})


class TestGrid:
    @pytest.mark.parametrize(
        ("quick", "sizes"),
        [
            (False, [5 * 7, 5 * 7 * 2, 5 * 7 * 6, 5 * 7 * 6, 5 * 7, 5 * 7 * 4, 5 * 7]),
            (True, [9, 9, 27, 27, 9, 18, 9]),
        ],
    )
    def test_grid_has_every_combination(self, quick: bool, sizes: list[int]) -> None:
        cells = [rival.cells(SHORT) for rival in published_rivals(quick=quick)]
        assert [len(set(each)) for each in cells] == [len(each) for each in cells] == sizes

    def test_cells_are_published_methods(self) -> None:
        """Cells have fixed τ and η, and no estimation."""
        own = replace(
            SHORT,
            update="fedyogi",
            server_beta2=0.5,
            step_size=0.7,
            step_fall=0.1,
            delta="gradient",
        )
        first = {
            rival.name: build_method(rival.cells(own)[0])
            for rival in published_rivals(taus=[4])
        }
        assert {name: method.update for name, method in first.items()} == {
            "FedAvg": Average(),
            "FedAvgM": ServerMomentum(0.5),
            "FedAdam": FedAdam(step_size=0.003),
            "FedYogi": FedYogi(step_size=0.003),
            "SCAFFOLD": Average(),
            "FedProx": Average(),
            "FedNova": Average(),
        }
        assert {
            name: method.proximal for name, method in first.items() if method.proximal
        } == {"FedProx": 0.001}
        assert [name for name, method in first.items() if method.correct_drift] == [
            "SCAFFOLD"
        ]
        for method in first.values():
            assert (method.controller, method.step_size) == (FixedTau(4), FixedStep(0.003))
            assert not any(isinstance(each, EstimateSlopes) for each in method.features)


class TestSeparateRuns:
    """Two seeds with a budget of one second, in one process."""

    def results(self, seed: int, **settings: Any) -> fedbudget.Result:
        common: dict[str, Any] = {"budget": "time=1s", "nodes": 3, "case": 2, "seed": seed}
        return fedbudget.train(model="svm", **common, **settings)

    def mean(self, name: str, **settings: Any) -> float:
        return float(
            np.mean([getattr(self.results(seed, **settings), name) for seed in (0, 1)])
        )

    def test_losses_equal_separate_runs(self, tmp_path: Path) -> None:
        comparison = compare_rivals(
            SHORT, folder=tmp_path, rivals=[AVERAGING], seeds=[0, 1], jobs=1
        )
        (paper, averaging) = comparison.others
        assert (comparison.own.name, paper.name, averaging.name) == (
            "default",
            "paper",
            "FedAvg",
        )
        plain: dict[str, Any] = {"method": "frugal", "drift_correction": False}
        knobs = {**averaging.knobs, **plain}
        assert averaging.loss == pytest.approx(self.mean("loss", **knobs))
        assert averaging.accuracy == pytest.approx(self.mean("accuracy", **knobs))
        assert comparison.own.loss == pytest.approx(self.mean("loss"))
        assert paper.loss == pytest.approx(self.mean("loss", method="paper"))
        assert (comparison.own.runs, paper.runs, dict(paper.knobs)) == (0, 0, {})
        assert comparison.title == "svm on digits, 3 nodes, case:2"
        for tau in (2, 9):
            for eta in (0.01, 0.2):
                assert (
                    averaging.loss
                    <= self.mean("loss", tau=tau, step_size=eta, **plain) + 1e-3
                )

    def test_paper_method_has_one_row(self, tmp_path: Path) -> None:
        paper = replace(SHORT, method="paper")
        comparison = compare_rivals(paper, folder=tmp_path, rivals=[], seeds=[0], jobs=1)
        assert (comparison.own.name, comparison.others) == ("paper", ())
        assert comparison.own.loss == pytest.approx(self.results(0, method="paper").loss)


class TestUntuned:
    def test_methods(self) -> None:
        """Whatever the task chooses, as for tuned rivals."""
        own = replace(SHORT, step_size=0.7, step_fall=0.1, update="fedyogi")
        made = {rival.name: rival.cells(own) for rival in untuned_rivals()}
        methods = {name: build_method(cell) for name, (cell,) in made.items()}
        assert {name: method.update for name, method in methods.items()} == {
            "FedExP": FedExP(),
            "Prodigy": Prodigy(),
            "Δ-SGD": Average(),
            "DoG": Average(),
        }
        assert [method.local_step for method in methods.values()] == [
            None,
            None,
            DeltaSgd(),
            DistanceOverGradients(),
        ]
        etas = [method.step_size.first().eta for method in methods.values()]
        assert etas == [0.1, 0.1, 0.2, 1.0]

    def test_they_have_one_run_a_seed(self, tmp_path: Path) -> None:
        rivals = untuned_rivals()
        done = []
        comparison = compare_rivals(
            SHORT,
            folder=tmp_path,
            rivals=rivals,
            seeds=[0, 1],
            jobs=1,
            progress=lambda made, of, failed: done.append((made, failed)),
        )
        _, *others = comparison.others
        assert [other.name for other in others] == [rival.name for rival in rivals]
        assert {(other.runs, other.tuned_to) for other in others} == {(0, "nothing")}
        assert all(other.loss < math.inf for other in others)
        assert done[-1] == (2 * 2 + 2 * 4, 0)


class TestTuning:
    def attempt(self, settings: Settings, **how: Any) -> Columns | Failure:
        """A synthetic loss with its minimum at τ = 3 and η = 30, outside the grid. Larger η
        diverges, and τ = 9 fails. A falling step size improves seed 0 and worsens seed 1.
        """
        if settings.tau == 9:
            return Failure("out of memory")
        eta, tau = settings.step_size or 1.0, settings.tau
        if not isinstance(eta, float) or not isinstance(tau, int):
            return {"loss": [5.0], "accuracy": [0.5]}
        loss = 1 + abs(math.log(eta / 30)) + abs(math.log(tau / 3))
        if settings.step_fall:
            loss += 0.5 if settings.seed == 1 else -0.1
        return {"loss": [None if eta > 50 else loss], "accuracy": [0.75]}

    @pytest.fixture
    def simulated_valley(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cells, "attempt", self.attempt)

    def test_search_leaves_the_grid(self, simulated_valley: None, tmp_path: Path) -> None:
        rival = Rival("FedAvg", {}, {"tau": (1, 10), "step_size": (0.1, 1.0)})
        (_, one), (_, two) = (
            compare_rivals(
                SHORT, folder=tmp_path, rivals=[rival], seeds=seeds, jobs=1
            ).others
            for seeds in ([0], [0, 1])
        )
        assert dict(one.knobs) == {"tau": 3, "step_size": 30.0, "step_fall": FALL}
        assert dict(two.knobs) == {"tau": 3, "step_size": 30.0}
        assert [one.loss, two.loss] == pytest.approx([0.9, 1.0])
        assert two.runs == one.runs + 3  # the second seed of three

    def test_failed_runs_have_infinite_loss(
        self, simulated_valley: None, tmp_path: Path
    ) -> None:
        calls: list[tuple[int, int, int]] = []
        failing = Rival("failing", {}, {"tau": (9,), "step_size": (0.2,)})
        diverged = Rival("diverged", {}, {"tau": (3,), "step_size": (60.0,)})
        comparison = compare_rivals(
            SHORT,
            folder=tmp_path,
            rivals=[failing, diverged],
            seeds=[0],
            jobs=1,
            progress=lambda *counts: calls.append(counts),
        )
        for other in comparison.others[1:]:
            assert (other.loss, comparison.ratio(other)) == (math.inf, math.inf)
            assert {**other.to_json()}["loss"] is None
        # The default, the paper's method, and each rival's cell with and without a falling
        # step size. Both cells of the first rival fail.
        assert calls[-1] == (2 + 2 + 2, 2 + 2 + 2, 2)
        assert [counts[0] for counts in calls] == sorted(counts[0] for counts in calls)
        assert json.loads(json.dumps(comparison.to_json()))["others"][2]["ratio"] is None

    def test_failing_untuned_method_ends_comparison(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(
            cells, "attempt", lambda settings, **how: Failure("no memory left")
        )
        with pytest.raises(
            UserError, match="a run with nothing tuned failed: no memory left"
        ):
            compare_rivals(SHORT, folder=tmp_path, rivals=[AVERAGING], seeds=[0], jobs=1)

    def test_finished_runs_are_reused(
        self, simulated_valley: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        rival = Rival("FedAvg", {}, {"tau": (2,), "step_size": (0.01, 0.03)})
        before = compare_rivals(
            SHORT, folder=tmp_path, rivals=[rival], seeds=[0, 1], jobs=1
        )

        def never(settings: Settings, **how: Any) -> Columns:
            raise AssertionError("a finished run was repeated")

        monkeypatch.setattr(cells, "attempt", never)
        assert (
            compare_rivals(SHORT, folder=tmp_path, rivals=[rival], seeds=[0, 1], jobs=1)
            == before
        )

    @pytest.mark.parametrize(
        ("settings", "options", "message"),
        [
            (
                Settings(method="centralized"),
                {},
                "method centralized has no rivals; use method accelerated, frugal or",
            ),
            (SHORT, {"seeds": []}, "at least one seed"),
            (SHORT, {"rivals": [Rival("x", {}, {"tau": ()})]}, "one value of each knob"),
            (SHORT, {"jobs": 0}, "jobs must be at least 1, not 0"),
            (replace(SHORT, dataset="nowhere"), {}, "unknown dataset 'nowhere'"),
        ],
    )
    def test_wrong_options_are_refused(
        self, settings: Settings, options: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match=message):
            compare_rivals(settings, folder=tmp_path, **options)


def test_ratios_by_hand() -> None:
    own = TunedResult("default", {}, 0.4, 0.9)
    other = TunedResult("FedAvg", {"tau": 3}, 0.5, None, 70)
    assert RivalComparison("", own, (other,)).ratio(other) == pytest.approx(1.25)
    assert RivalComparison("", replace(own, loss=math.inf), (other,)).ratio(other) is None
    assert RivalComparison("svm on digits", own, (other,)).to_json() == {
        "title": "svm on digits",
        "own": {"name": "default", "knobs": {}, "loss": 0.4, "accuracy": 0.9, "runs": 0},
        "others": [
            {
                "name": "FedAvg",
                "knobs": {"tau": 3},
                "loss": 0.5,
                "accuracy": None,
                "runs": 70,
                "ratio": 1.25,
            },
        ],
    }


class TestCommand:
    """`fedbudget compare --rivals` on a custom table, with two processes."""

    COMMAND = (
        "compare --rivals --quick --taus 5 --seeds 1 --budget time=1s "
        "--model linear --dataset homes.csv --jobs 2"
    )

    @pytest.fixture(autouse=True)
    def homes_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(200, 3))
        rows[:, 2] += rows[:, 0] - rows[:, 1]
        np.savetxt("homes.csv", rows, delimiter=",", header="size,age,price", comments="")

    def printed(self, options: str, capsys: pytest.CaptureFixture[str]) -> str:
        code, out, _ = run_command(capsys, *self.COMMAND.split(), *options.split())
        assert code == 0
        return out

    def test_table_equals_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        (comparison,) = json.loads(
            self.printed("--partition dirichlet:0.5 --json", capsys)
        )["comparisons"]
        assert comparison["title"] == "linear on homes.csv, 5 nodes, dirichlet:0.5"
        names = "paper FedAvg FedAvgM FedAdam FedYogi SCAFFOLD FedProx FedNova"
        names += " FedExP Prodigy Δ-SGD DoG"
        assert [other["name"] for other in comparison["others"]] == names.split()
        table = self.printed("--partition dirichlet:0.5", capsys).splitlines()
        assert (
            table[0] == f"{comparison['title']}: loss on all training samples "
            "at the end of time=1s, one run"
        )
        for line, row in zip(
            table[2:], [comparison["own"], *comparison["others"]], strict=False
        ):
            ratio = row.get("ratio", 1.0)
            assert line.split()[:4] == [
                row["name"],
                f"{row['loss']:.4g}",
                f"{ratio:.3g}",
                str(row["runs"]),
            ]
            if "server_step_size" in row["knobs"]:
                assert f"τ = 5, η = {row['knobs']['step_size']:g}, server step = " in line
            assert ("falling" in line) == ("step_fall" in row["knobs"])

    def test_one_table_per_case(self, capsys: pytest.CaptureFixture[str]) -> None:
        titles = [
            line
            for line in self.printed("--cases 1,3", capsys).splitlines()
            if line.startswith("linear on")
        ]
        assert [title.split(": loss")[0] for title in titles] == [
            f"linear on homes.csv, 5 nodes, case:{case}" for case in (1, 3)
        ]
