"""Rivals that are tuned: their grids, the best cell by separate runs, runs that are kept,
and runs that fail.
"""

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
)
from fedbudget.launch.method import build_method
from fedbudget.protocol.update import Average, FedAdam, FedYogi, ServerMomentum
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
    def test_has_every_combination_once(self, quick: bool, sizes: list[int]) -> None:
        cells = [rival.cells(SHORT) for rival in published_rivals(quick=quick)]
        assert [len(set(each)) for each in cells] == [len(each) for each in cells] == sizes

    def test_cells_are_the_published_methods(self) -> None:
        """With fixed τ and η, and nothing that only serves estimation."""
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
            assert not method.request.estimate


class TestAgainstSeparateRuns:
    """Two seeds of a second, in one process."""

    def results(self, seed: int, **settings: Any) -> fedbudget.Result:
        common: dict[str, Any] = {"budget": "time=1s", "nodes": 3, "case": 2, "seed": seed}
        return fedbudget.train(model="svm", **common, **settings)

    def mean(self, name: str, **settings: Any) -> float:
        return float(
            np.mean([getattr(self.results(seed, **settings), name) for seed in (0, 1)])
        )

    def test_all_figures(self, tmp_path: Path) -> None:
        found = compare_rivals(
            SHORT, folder=tmp_path, rivals=[AVERAGING], seeds=[0, 1], jobs=1
        )
        (paper, averaging) = found.others
        assert (found.own.name, paper.name, averaging.name) == (
            "default",
            "paper",
            "FedAvg",
        )
        plain: dict[str, Any] = {"method": "frugal", "drift_correction": False}
        knobs = {**averaging.knobs, **plain}
        assert averaging.loss == pytest.approx(self.mean("loss", **knobs))
        assert averaging.accuracy == pytest.approx(self.mean("accuracy", **knobs))
        assert found.own.loss == pytest.approx(self.mean("loss"))
        assert paper.loss == pytest.approx(self.mean("loss", method="paper"))
        assert (found.own.runs, paper.runs, dict(paper.knobs)) == (0, 0, {})
        assert found.title == "svm on digits, 3 nodes, case:2"
        for tau in (2, 9):
            for eta in (0.01, 0.2):
                assert (
                    averaging.loss
                    <= self.mean("loss", tau=tau, step_size=eta, **plain) + 1e-3
                )

    def test_a_method_that_is_the_papers_has_one_row(self, tmp_path: Path) -> None:
        paper = replace(SHORT, method="paper")
        found = compare_rivals(paper, folder=tmp_path, rivals=[], seeds=[0], jobs=1)
        assert (found.own.name, found.others) == ("paper", ())
        assert found.own.loss == pytest.approx(self.results(0, method="paper").loss)


class TestRuns:
    def made(self, settings: Settings, **how: Any) -> Columns | Failure:
        """A valley: the best is τ = 3 and η = 30, beyond the grid; above that it diverges,
        and with τ = 9 it fails.

        With a fall, η = 30 is even better, but seed 1 does not think so.
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
    def faked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cells, "attempt", self.made)

    def test_finds_the_best_beyond_the_edge_and_by_all_seeds(
        self, faked: None, tmp_path: Path
    ) -> None:
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

    def test_those_that_fail_or_diverge_count_as_infinite(
        self, faked: None, tmp_path: Path
    ) -> None:
        seen: list[tuple[int, int, int]] = []
        lost = Rival("lost", {}, {"tau": (9,), "step_size": (0.2,)})
        diverged = Rival("diverged", {}, {"tau": (3,), "step_size": (60.0,)})
        found = compare_rivals(
            SHORT,
            folder=tmp_path,
            rivals=[lost, diverged],
            seeds=[0],
            jobs=1,
            progress=lambda *told: seen.append(told),
        )
        for other in found.others[1:]:
            assert (other.loss, found.ratio(other)) == (math.inf, math.inf)
            assert {**other.to_json()}["loss"] is None
        # The method and the paper's, and each rival's cell with a fall and without; those
        # of the first fail.
        assert seen[-1] == (2 + 2 + 2, 2 + 2 + 2, 2)
        assert [told[0] for told in seen] == sorted(told[0] for told in seen)
        assert json.loads(json.dumps(found.to_json()))["others"][2]["ratio"] is None

    def test_a_method_that_cannot_be_run_ends_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(
            cells, "attempt", lambda settings, **how: Failure("no memory left")
        )
        with pytest.raises(
            UserError, match="a run with nothing tuned failed: no memory left"
        ):
            compare_rivals(SHORT, folder=tmp_path, rivals=[AVERAGING], seeds=[0], jobs=1)

    def test_what_is_done_stays_done(
        self, faked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        rival = Rival("FedAvg", {}, {"tau": (2,), "step_size": (0.01, 0.03)})
        before = compare_rivals(
            SHORT, folder=tmp_path, rivals=[rival], seeds=[0, 1], jobs=1
        )

        def never(settings: Settings, **how: Any) -> Columns:
            raise AssertionError("made again")

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
                "centralized descent has no rivals: use method accelerated, frugal or paper",
            ),
            (SHORT, {"seeds": []}, "at least one seed"),
            (SHORT, {"rivals": [Rival("x", {}, {"tau": ()})]}, "one value of each knob"),
            (SHORT, {"jobs": 0}, "jobs must be at least 1, not 0"),
            (replace(SHORT, dataset="nowhere"), {}, "unknown dataset 'nowhere'"),
        ],
    )
    def test_what_cannot_work_is_refused(
        self, settings: Settings, options: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match=message):
            compare_rivals(settings, folder=tmp_path, **options)


def test_ratios_by_hand() -> None:
    own, other = (
        TunedResult("default", {}, 0.4, 0.9),
        TunedResult("FedAvg", {"tau": 3}, 0.5, None, 70),
    )
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
    """On samples of a person's own, in parallel."""

    COMMAND = "compare --rivals --quick --taus 5 --seeds 1 --budget time=1s --model linear --dataset homes.csv --jobs 2"

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(200, 3))
        rows[:, 2] += rows[:, 0] - rows[:, 1]
        np.savetxt("homes.csv", rows, delimiter=",", header="size,age,price", comments="")

    def printed(self, options: str, capsys: pytest.CaptureFixture[str]) -> str:
        code, out, _ = run_command(capsys, *self.COMMAND.split(), *options.split())
        assert code == 0
        return out

    def test_prints_what_its_json_says(self, capsys: pytest.CaptureFixture[str]) -> None:
        (found,) = json.loads(self.printed("--partition dirichlet:0.5 --json", capsys))[
            "comparisons"
        ]
        assert found["title"] == "linear on homes.csv, 5 nodes, dirichlet:0.5"
        names = [
            "paper",
            "FedAvg",
            "FedAvgM",
            "FedAdam",
            "FedYogi",
            "SCAFFOLD",
            "FedProx",
            "FedNova",
        ]
        assert [other["name"] for other in found["others"]] == names
        table = self.printed("--partition dirichlet:0.5", capsys).splitlines()
        assert (
            table[0]
            == f"{found['title']}: loss on all training samples at the end of time=1s, one run"
        )
        for line, row in zip(table[2:], [found["own"], *found["others"]], strict=False):
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

    def test_a_table_for_each_case(self, capsys: pytest.CaptureFixture[str]) -> None:
        titles = [
            line
            for line in self.printed("--cases 1,3", capsys).splitlines()
            if line.startswith("linear on")
        ]
        assert [title.split(": loss")[0] for title in titles] == [
            f"linear on homes.csv, 5 nodes, case:{case}" for case in (1, 3)
        ]
