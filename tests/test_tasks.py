"""The paper's tasks: settings files that work, can be copied, and can be overridden by
options.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import data, tasks
from fedbudget.budget.control import AdaptiveTau
from fedbudget.budget.spending import PaperSpending
from fedbudget.budget.step_size import AutoStep, FixedStep
from fedbudget.cli.options import settings_from
from fedbudget.errors import UserError
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.models.catalogue import MODELS
from fedbudget.protocol.features.validation import Validation
from fedbudget.protocol.method import Method
from fedbudget.settings.settings import Settings
from support.commands import run_command
from support.real_data import folder_with

TASKS = {
    "svm-sgd-mnist": ("svm", "mnist", 100),
    "svm-dgd-mnist": ("svm", "mnist", "full"),
    "linear-energy": ("linear", "energy", 100),
    "kmeans-user-knowledge": ("kmeans", "user-knowledge", "full"),
    "cnn-mnist": ("cnn", "mnist", 100),
    "cnn-fashion-mnist": ("cnn", "fashion-mnist", 100),
    "cnn-cifar-10": ("cnn", "cifar-10", 100),
    "svm-digits": ("svm", "digits", 100),
    "softmax-digits": ("softmax", "digits", 100),
    "mlp-digits": ("mlp", "digits", 100),
}
Command = Callable[[str], str]


@pytest.fixture
def fedbudget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Return a function that runs a command in an empty folder and returns its output."""
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> str:
        code, out, err = run_command(capsys, *command.split())
        assert code == 0, err
        return out

    return run


@pytest.fixture
def students(tmp_path: Path) -> Path:
    """A data folder with a small user-knowledge: 40 students in four separate levels."""
    rng = np.random.default_rng(0)
    levels = ("very_low", "Low", "Middle", "High")
    rows = []
    for number, level in enumerate(levels):
        for _ in range(10):
            features = rng.normal(number / 3, 0.05, 5).clip(0, 1)
            rows.append(",".join([*(f"{each:.2f}" for each in features), level]))
    (tmp_path / "data/user-knowledge").mkdir(parents=True)
    (tmp_path / "data/user-knowledge/user_knowledge.csv").write_text(
        "\n".join(["STG,SCG,STR,LPR,PEG,UNS", *rows])
    )
    return tmp_path / "data"


def settings_of(name: str, **options: Any) -> Settings:
    return Settings(**{**Settings.from_toml(tasks.path(name)), **options})


class TestSettings:
    def test_the_papers_tasks_exist(self) -> None:
        assert set(TASKS) <= set(tasks.names())

    @pytest.mark.parametrize("name", tasks.names())
    def test_model_and_dataset_exist(self, name: str) -> None:
        settings = settings_of(name)
        assert settings.model in MODELS
        assert settings.dataset in data.DATASETS

    @pytest.mark.parametrize("name", TASKS)
    def test_settings_match_the_name(self, name: str) -> None:
        settings = settings_of(name)
        assert (settings.model, settings.dataset, settings.batch_size) == TASKS[name]

    @pytest.mark.parametrize("name", tasks.names())
    def test_parameters_are_the_papers(self, name: str) -> None:
        settings = settings_of(name, method="paper")
        phi = 5e-5 if name.startswith("cnn-") else 0.025
        assert (settings.nodes, settings.budget, settings.costs) == (
            5,
            ("time=15s",),
            "simulated",
        )
        assert build_method(settings) == Method(
            AdaptiveTau(phi, gamma=10, tau_max=100),
            FixedStep(0.01),
            spending=PaperSpending(),
        )

    @pytest.mark.parametrize("name", tasks.names())
    def test_frugal_uses_one_phi(self, name: str) -> None:
        expected = Method(
            AdaptiveTau(0.0025, leap=True),
            AutoStep(),
            correct_drift=True,
            delta="parameters",
            by_speed=100,
            validation=Validation(),
        )
        assert build_method(settings_of(name, method="frugal")) == expected

    @pytest.mark.parametrize("name", tasks.names())
    def test_data_folder_and_seed_stay_default(self, name: str) -> None:
        settings = settings_of(name)
        assert (settings.data_dir, settings.seed, settings.device) == (None, 0, "auto")

    def test_full_shards_use_1000_images(self) -> None:
        settings = settings_of("svm-dgd-mnist")
        assert (settings.train_samples, settings.test_samples) == (1000, 1000)

    def test_unknown_name_lists_the_tasks(self) -> None:
        with pytest.raises(
            UserError, match=r"unknown task 'svm'; use one of .*kmeans-user-knowledge"
        ):
            tasks.path("svm")

    @pytest.mark.parametrize("name", ["../tasks/cnn-mnist", "", "cnn-mnist.toml"])
    def test_path_is_no_name(self, name: str) -> None:
        with pytest.raises(UserError, match="unknown task"):
            tasks.path(name)


class TestCommands:
    def test_list_has_one_line_per_task(self, fedbudget: Command) -> None:
        lines = fedbudget("tasks").splitlines()
        assert [line.split()[0] for line in lines] == list(tasks.names())
        assert all(
            tasks.title(name) in line
            for name, line in zip(tasks.names(), lines, strict=True)
        )
        assert not any("#" in line for line in lines)

    @pytest.mark.parametrize("name", tasks.names())
    def test_printed_task_has_same_settings(
        self, fedbudget: Command, tmp_path: Path, name: str
    ) -> None:
        config = tmp_path / "mine.toml"
        config.write_text(fedbudget(f"tasks {name}"))
        assert (
            settings_from({"config": config})
            == settings_from({"task": name})
            == settings_of(name)
        )

    def test_copied_task_gives_same_run(
        self, fedbudget: Command, tmp_path: Path, students: Path
    ) -> None:
        name = "kmeans-user-knowledge"
        (tmp_path / "mine.toml").write_text(fedbudget(f"tasks {name}"))
        common = f"--data-dir {students} --budget time=1s --json"
        task, copy = (
            json.loads(fedbudget(f"run {how} {common} --out {out}"))
            for how, out in ((f"--task {name}", "one"), ("--config mine.toml", "two"))
        )
        assert {**task, "run": None} == {**copy, "run": None}

    def test_options_override_the_task(self) -> None:
        given = {
            "task": "cnn-mnist",
            "model": "svm",
            "phi": 0.1,
            "case": 3,
            "budget": ["time=2s"],
            "batch_size": "full",
        }
        assert settings_from(given) == settings_of(
            "cnn-mnist",
            model="svm",
            phi=0.1,
            partition="case:3",
            budget=("time=2s",),
            batch_size="full",
        )

    def test_run_saves_the_options(
        self, fedbudget: Command, tmp_path: Path, students: Path
    ) -> None:
        fedbudget(
            f"run --task kmeans-user-knowledge --data-dir {students} --nodes 3 --case 2 "
            "--clusters 2 --budget time=1s --json --out mine"
        )
        kept = Settings(**Settings.from_toml(tmp_path / "mine/config.toml"))
        assert kept == settings_of(
            "kmeans-user-knowledge",
            data_dir=str(students),
            nodes=3,
            partition="case:2",
            clusters=2,
            budget=("time=1s",),
            validation=0.0,  # decided by the method
        )

    def test_task_and_file_are_exclusive(self) -> None:
        with pytest.raises(UserError, match="give task or config, not both"):
            settings_from({"task": "cnn-mnist", "config": Path("mine.toml")})

    def test_compare_accepts_a_task(self, fedbudget: Command, students: Path) -> None:
        common = (
            f"--task kmeans-user-knowledge --data-dir {students} --budget time=1s --json"
        )
        (result,) = json.loads(
            fedbudget(f"compare {common} --cases 2 --taus 1,10 --seeds 1")
        )["cases"]
        alone = [
            json.loads(
                fedbudget(
                    f"run {common} --case 2 --tau {tau} --method {method} --out tau-{tau}"
                )
            )["loss"]
            for tau, method in ((1, "paper"), (10, "paper"), ("adaptive", "accelerated"))
        ]
        assert [
            *(each["loss"] for each in result["fixed"]),
            result["adaptive"]["loss"],
        ] == alone
        assert len(set(alone)) > 1


class TestOnRealData:
    # At w = 0 the loss is 0.5: half the squared margin of every sample, or half the
    # variance of a standardised target.
    @pytest.mark.parametrize("name", ["svm-sgd-mnist", "svm-dgd-mnist", "linear-energy"])
    def test_task_learns(self, fedbudget: Command, name: str) -> None:
        folder = folder_with(TASKS[name][1])
        result = json.loads(
            fedbudget(
                f"run --task {name} --data-dir {folder} --json --budget time=2s --out run"
            )
        )
        assert 0 < result["loss"] < 0.5
        assert result["accuracy"] is None or result["accuracy"] > 0.75

    def test_kmeans_lowers_its_loss(self, fedbudget: Command) -> None:
        folder, name = folder_with("user-knowledge"), "kmeans-user-knowledge"
        result = json.loads(
            fedbudget(
                f"run --task {name} --data-dir {folder} --json --budget time=2s --out run"
            )
        )
        x = data.load("user-knowledge", data_dir=folder).train.x
        centres = np.random.default_rng(0).random(20, dtype=np.float32).reshape(4, 1, 5)
        initial = 0.5 * ((x - centres) ** 2).sum(axis=2).min(axis=0).mean()
        assert 0 < result["loss"] < 0.9 * initial
        assert result["accuracy"] is None

    def test_seed_selects_the_images(self, fedbudget: Command) -> None:
        folder = folder_with("mnist")
        command = (
            f"run --task svm-dgd-mnist --data-dir {folder} --json --budget time=1s --tau 5"
        )
        losses = [
            json.loads(fedbudget(f"{command} --seed {seed} --out {out}"))["loss"]
            for seed, out in ((1, "one"), (1, "again"), (2, "two"))
        ]
        assert losses[0] == losses[1] != losses[2]
        everything = data.load("mnist", data_dir=folder)
        first, second = (
            simulate(settings_of("svm-dgd-mnist", seed=seed), Overrides(dataset=everything))
            for seed in (1, 2)
        )
        for plan in (first, second):
            assert plan.test is not None
            assert (len(plan.train), len(plan.test)) == (1000, 1000)
            assert int(plan.shards.size.sum()) == 1000
        assert not np.array_equal(first.train.x, second.train.x)

    @pytest.mark.usefixtures("one_torch_thread")
    @pytest.mark.parametrize(
        ("name", "parameters"),
        [("cnn-mnist", 430_698), ("cnn-fashion-mnist", 430_698), ("cnn-cifar-10", 555_178)],
    )
    def test_network_accepts_its_images(
        self, fedbudget: Command, tmp_path: Path, name: str, parameters: int
    ) -> None:
        """The slow tests check how well it learns."""
        folder = folder_with(TASKS[name][1])
        few = "--train-samples 100 --test-samples 20 --batch-size 10 --rounds 1"
        few += " --evaluations 1"
        result = json.loads(
            fedbudget(f"run --task {name} --data-dir {folder} --json {few} --out run")
        )
        assert np.isfinite(result["loss"])
        assert result["stopped_by"] == "rounds"
        assert (
            json.loads((tmp_path / "run/summary.json").read_text())["parameters"]
            == parameters
        )

    @pytest.mark.slow
    def test_network_learns_digits(self, fedbudget: Command) -> None:
        folder = folder_with("mnist")
        result = json.loads(
            fedbudget(f"run --task cnn-mnist --data-dir {folder} --case 1 --json --out run")
        )
        assert result["accuracy"] > 0.80
        assert result["stopped_by"] == "time"

    @pytest.mark.slow
    def test_adaptive_tau_matches_best_fixed(self, fedbudget: Command) -> None:
        """On all of MNIST, the regret of the paper's method is at most 0.05."""
        paper = self.comparison(fedbudget, "--method paper")
        regrets = {case: result["regret"] for case, result in paper.items()}
        assert all(regret <= 0.05 for regret in regrets.values()), regrets

    @pytest.mark.slow
    def test_default_method_lowers_the_regret(self, fedbudget: Command) -> None:
        """The regret is at most 0.03, and negative in Cases 2 and 4. Non-IID data cost at
        most a quarter of the loss that they cost the paper's method.
        """
        default = self.comparison(fedbudget, "--step-size 0.01")
        regrets = {case: result["regret"] for case, result in default.items()}
        assert all(regret <= 0.03 for regret in regrets.values()), regrets
        assert max(regrets[2], regrets[4]) < 0
        paper = self.comparison(fedbudget, "--method paper")
        for case in (2, 4):
            ours, theirs = (
                result[case]["adaptive"]["loss"] - result[1]["adaptive"]["loss"]
                for result in (default, paper)
            )
            assert ours <= theirs / 4

    @pytest.mark.slow
    def test_automatic_step_beats_the_paper(self, fedbudget: Command) -> None:
        auto, paper = (
            self.comparison(fedbudget, options)
            for options in ("--step-size auto", "--method paper")
        )
        for case in (1, 2, 3, 4):
            assert auto[case]["adaptive"]["loss"] <= paper[case]["adaptive"]["loss"], case

    def comparison(self, fedbudget: Command, options: str) -> dict[int, Any]:
        """Compare fixed and adaptive τ for the SVM on all of MNIST, by case."""
        common = f"--task svm-sgd-mnist --data-dir {folder_with('mnist')} --json"
        common += " --cases 1,2,3,4 --seeds 5"
        taus = "--taus 1,2,3,5,7,10,20,30,50,70,100"
        result = {
            case["case"]: case
            for case in json.loads(fedbudget(f"compare {common} {taus} {options}"))["cases"]
        }
        assert sorted(result) == [1, 2, 3, 4]
        return result

    @pytest.mark.slow
    def test_half_participation_costs_little(self, fedbudget: Command) -> None:
        common = f"--model svm --dataset mnist --data-dir {folder_with('mnist')} --json"
        common += " --nodes 10 --case 2 --step-size 0.01"
        losses = {
            share: [
                json.loads(
                    fedbudget(
                        f"run {common} --participation {share} --seed {seed} "
                        f"--out {share}-{seed}"
                    )
                )["loss"]
                for seed in range(3)
            ]
            for share in (1, 0.5)
        }
        assert np.mean(losses[0.5]) == pytest.approx(np.mean(losses[1]), abs=0.003)
