"""The paper's tasks: each is a file of settings that works, can be copied, and can be
changed by options.
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
    """Runs a command that should work, in a folder of its own; gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> str:
        code, out, err = run_command(capsys, *command.split())
        assert code == 0, err
        return out

    return run


@pytest.fixture
def students(tmp_path: Path) -> Path:
    """A folder of data with a small user-knowledge: 40 students, four levels that are well
    apart.
    """
    rng = np.random.default_rng(0)
    levels = ("very_low", "Low", "Middle", "High")
    rows = [",".join(f"{each:.2f}" for each in rng.normal(number / 3, 0.05, 5).clip(0, 1)) + f",{level}"
            for number, level in enumerate(levels) for _ in range(10)]  # fmt: skip
    (tmp_path / "data/user-knowledge").mkdir(parents=True)
    (tmp_path / "data/user-knowledge/user_knowledge.csv").write_text(
        "\n".join(["STG,SCG,STR,LPR,PEG,UNS", *rows])
    )
    return tmp_path / "data"


def settings_of(name: str, **options: Any) -> Settings:
    return Settings(**{**Settings.from_toml(tasks.path(name)), **options})


class TestFiles:
    def test_the_papers_tasks_are_there(self) -> None:
        assert set(TASKS) <= set(tasks.names())

    @pytest.mark.parametrize("name", tasks.names())
    def test_each_is_valid_settings_of_what_there_is(self, name: str) -> None:
        settings = settings_of(name)
        assert settings.model in MODELS
        assert settings.dataset in data.DATASETS

    @pytest.mark.parametrize("name", TASKS)
    def test_each_is_what_its_name_says(self, name: str) -> None:
        settings = settings_of(name)
        assert (settings.model, settings.dataset, settings.batch_size) == TASKS[name]

    @pytest.mark.parametrize("name", tasks.names())
    def test_each_has_the_papers_parameters(self, name: str) -> None:
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
    def test_past_the_paper_one_phi_is_for_all(self, name: str) -> None:
        expected = Method(
            AdaptiveTau(0.0025, leap=True),
            AutoStep(),
            correct_drift=True,
            delta="parameters",
            by_speed=100,
        )
        assert build_method(settings_of(name, method="frugal")) == expected

    @pytest.mark.parametrize("name", tasks.names())
    def test_each_leaves_to_the_person_where_data_lies_and_which_seed(
        self, name: str
    ) -> None:
        settings = settings_of(name)
        assert (settings.data_dir, settings.seed, settings.device) == (None, 0, "auto")

    def test_descent_on_whole_shards_of_images_is_on_a_thousand_of_them(self) -> None:
        settings = settings_of("svm-dgd-mnist")
        assert (settings.train_samples, settings.test_samples) == (1000, 1000)

    def test_a_name_that_is_none_is_refused_with_those_that_are(self) -> None:
        with pytest.raises(
            UserError, match=r"unknown task 'svm'; use one of .*kmeans-user-knowledge"
        ):
            tasks.path("svm")

    @pytest.mark.parametrize("name", ["../tasks/cnn-mnist", "", "cnn-mnist.toml"])
    def test_a_path_is_no_name(self, name: str) -> None:
        with pytest.raises(UserError, match="unknown task"):
            tasks.path(name)


class TestCommands:
    def test_the_list_has_a_line_for_each(self, fedbudget: Command) -> None:
        lines = fedbudget("tasks").splitlines()
        assert [line.split()[0] for line in lines] == list(tasks.names())
        assert all(
            tasks.title(name) in line
            for name, line in zip(tasks.names(), lines, strict=True)
        )
        assert not any("#" in line for line in lines)

    @pytest.mark.parametrize("name", tasks.names())
    def test_what_is_printed_is_a_file_of_the_same_settings(
        self, fedbudget: Command, tmp_path: Path, name: str
    ) -> None:
        config = tmp_path / "mine.toml"
        config.write_text(fedbudget(f"tasks {name}"))
        assert (
            settings_from({"config": config})
            == settings_from({"task": name})
            == settings_of(name)
        )

    def test_a_copy_gives_the_same_run(
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

    def test_options_come_before_the_task(self) -> None:
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

    def test_a_run_keeps_the_options_that_were_given(
        self, fedbudget: Command, tmp_path: Path, students: Path
    ) -> None:
        fedbudget(
            f"run --task kmeans-user-knowledge --data-dir {students} --nodes 3 --case 2 --clusters 2 "
            "--budget time=1s --json --out mine"
        )
        kept = Settings(**Settings.from_toml(tmp_path / "mine/config.toml"))
        assert kept == settings_of(
            "kmeans-user-knowledge",
            data_dir=str(students),
            nodes=3,
            partition="case:2",
            clusters=2,
            budget=("time=1s",),
        )

    def test_a_task_and_a_file_at_once_are_refused(self) -> None:
        with pytest.raises(UserError, match="give task or config, not both"):
            settings_from({"task": "cnn-mnist", "config": Path("mine.toml")})

    def test_a_comparison_takes_a_task_too(
        self, fedbudget: Command, students: Path
    ) -> None:
        common = (
            f"--task kmeans-user-knowledge --data-dir {students} --budget time=1s --json"
        )
        (found,) = json.loads(
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
            *(each["loss"] for each in found["fixed"]),
            found["adaptive"]["loss"],
        ] == alone
        assert len(set(alone)) > 1


class TestOnRealData:
    # At w = 0 half the squared margin of every sample is ½, and so is half the variance of
    # a standardised target.
    @pytest.mark.parametrize("name", ["svm-sgd-mnist", "svm-dgd-mnist", "linear-energy"])
    def test_a_task_learns(self, fedbudget: Command, name: str) -> None:
        folder = folder_with(TASKS[name][1])
        found = json.loads(
            fedbudget(
                f"run --task {name} --data-dir {folder} --json --budget time=2s --out run"
            )
        )
        assert 0 < found["loss"] < 0.5
        assert found["accuracy"] is None or found["accuracy"] > 0.75

    def test_clusters_get_nearer_to_the_students(self, fedbudget: Command) -> None:
        folder, name = folder_with("user-knowledge"), "kmeans-user-knowledge"
        found = json.loads(
            fedbudget(
                f"run --task {name} --data-dir {folder} --json --budget time=2s --out run"
            )
        )
        x = data.load("user-knowledge", data_dir=folder).train.x
        centres = np.random.default_rng(0).random(20, dtype=np.float32).reshape(4, 1, 5)
        initial = 0.5 * ((x - centres) ** 2).sum(axis=2).min(axis=0).mean()
        assert 0 < found["loss"] < 0.9 * initial
        assert found["accuracy"] is None

    def test_other_seeds_take_other_images_and_a_thousand_of_each(
        self, fedbudget: Command
    ) -> None:
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
    def test_a_network_fits_its_images(
        self, fedbudget: Command, tmp_path: Path, name: str, parameters: int
    ) -> None:
        """How well it learns is for the slow tests."""
        folder = folder_with(TASKS[name][1])
        few = "--train-samples 100 --test-samples 20 --batch-size 10 --rounds 1 --evaluations 1"
        found = json.loads(
            fedbudget(f"run --task {name} --data-dir {folder} --json {few} --out run")
        )
        assert np.isfinite(found["loss"])
        assert found["stopped_by"] == "rounds"
        assert (
            json.loads((tmp_path / "run/summary.json").read_text())["parameters"]
            == parameters
        )

    @pytest.mark.slow
    def test_the_network_learns_digits(self, fedbudget: Command) -> None:
        folder = folder_with("mnist")
        found = json.loads(
            fedbudget(f"run --task cnn-mnist --data-dir {folder} --case 1 --json --out run")
        )
        assert found["accuracy"] > 0.80
        assert found["stopped_by"] == "time"

    @pytest.mark.slow
    def test_on_all_digits_adaptive_tau_is_as_good_as_the_best_fixed_one(
        self, fedbudget: Command
    ) -> None:
        paper = self.compared(fedbudget, "--method paper")
        regrets = {case: found["regret"] for case, found in paper.items()}
        assert all(regret <= 0.05 for regret in regrets.values()), regrets

    @pytest.mark.slow
    def test_past_the_paper_it_is_better_where_data_differ_and_loses_next_to_nothing(
        self, fedbudget: Command
    ) -> None:
        frugal = self.compared(fedbudget, "--step-size 0.01")
        regrets = {case: found["regret"] for case, found in frugal.items()}
        assert all(regret <= 0.03 for regret in regrets.values()), regrets
        assert max(regrets[2], regrets[4]) < 0
        paper = self.compared(fedbudget, "--method paper")
        for case in (2, 4):
            ours, theirs = (
                found[case]["adaptive"]["loss"] - found[1]["adaptive"]["loss"]
                for found in (frugal, paper)
            )
            assert ours <= theirs / 4

    @pytest.mark.slow
    def test_past_the_paper_with_a_step_size_of_its_own_it_is_never_behind(
        self, fedbudget: Command
    ) -> None:
        auto, paper = (
            self.compared(fedbudget, options)
            for options in ("--step-size auto", "--method paper")
        )
        for case in (1, 2, 3, 4):
            assert auto[case]["adaptive"]["loss"] <= paper[case]["adaptive"]["loss"], case

    def compared(self, fedbudget: Command, options: str) -> dict[int, Any]:
        """The SVM on all of MNIST, by case."""
        common = f"--task svm-sgd-mnist --data-dir {folder_with('mnist')} --cases 1,2,3,4 --seeds 5 --json"
        taus = "--taus 1,2,3,5,7,10,20,30,50,70,100"
        found = {
            case["case"]: case
            for case in json.loads(fedbudget(f"compare {common} {taus} {options}"))["cases"]
        }
        assert sorted(found) == [1, 2, 3, 4]
        return found

    @pytest.mark.slow
    def test_half_of_the_nodes_absent_costs_next_to_nothing(
        self, fedbudget: Command
    ) -> None:
        common = f"--model svm --dataset mnist --data-dir {folder_with('mnist')} --nodes 10 --case 2 --json --step-size 0.01"
        losses = {
            share: [
                json.loads(
                    fedbudget(
                        f"run {common} --participation {share} --seed {seed} --out {share}-{seed}"
                    )
                )["loss"]
                for seed in range(3)
            ]
            for share in (1, 0.5)
        }
        assert np.mean(losses[0.5]) == pytest.approx(np.mean(losses[1]), abs=0.003)
