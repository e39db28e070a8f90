"""Options on the command line: help in groups with defaults, and shell completion."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from click.shell_completion import ShellComplete

from fedbudget.cli.main import app

ROOT: Any = typer.main.get_command(app)


def help_of(command: str) -> str:
    text: str = ROOT.commands[command].get_help(
        click.Context(ROOT.commands[command], info_name=command)
    )
    return text


def completions(*words: str) -> list[str]:
    """Completions that a shell offers for the last word."""
    shell = ShellComplete(ROOT, {}, "fedbudget", "_FEDBUDGET_COMPLETE")
    return [each.value for each in shell.get_completions(list(words[:-1]), words[-1])]


class TestHelp:
    def test_most_used_options_come_first(self) -> None:
        first, second = help_of("run").split("Most used:\n")[1].split("\n\n")[:2]
        for name in (
            "--model",
            "--dataset",
            "--nodes",
            "--budget",
            "--case",
            "--config",
            "--out",
        ):
            assert f"  {name} " in first
        assert second.startswith("Data:\n")

    @pytest.mark.parametrize(
        ("command", "line"),
        [
            ("run", "Number of nodes.  [default: 5, or one per file or"),
            ("run", "Random seed.  [default: 0]"),
            ("run", "[default: simulated; measured for your own data or model]"),
            ("compare", "(by clocks and meters).  [default: simulated]"),
            ("serve", "(by clocks and meters).  [default: measured]"),
            ("serve", "before the first round.  [default: --min-nodes]"),
            ("serve", "Maximum number of nodes.  [default: 1000]"),
            ("local", "Number of node processes to start.  [default: 5, or"),
            (
                "compare",
                "Cases to compare in.  [default: 1,2,3,4; with --rivals --partition]",
            ),
            ("sweep", "Folder of the sweep.  [default: sweeps/ and the name of the file]"),
        ],
    )
    def test_defaults_of_each_command(self, command: str, line: str) -> None:
        assert line.split() in _windows(help_of(command).split(), len(line.split()))

    @pytest.mark.parametrize(
        ("command", "options"),
        [
            ("run", ("privacy=4", "--privacy-unit sample")),
            ("serve", ("privacy=4", "--privacy-unit sample", "--secure-aggregation")),
            ("local", ("privacy=8", "--secure-aggregation")),
            ("join", ("--privacy-limit 4", "--secure-aggregation --identity")),
        ],
    )
    def test_examples_show_privacy_options(
        self, command: str, options: tuple[str, ...]
    ) -> None:
        examples = " ".join(
            help_of(command).split("Examples:")[1].split("Most used:")[0].split()
        )
        assert [each for each in options if each not in examples] == []

    @pytest.mark.parametrize(
        "command",
        [name for name, each in ROOT.commands.items() if "Examples:" in (each.help or "")],
    )
    def test_examples_break_no_option(self, command: str) -> None:
        examples = help_of(command).split("Examples:")[1].split("\n\n")
        assert [
            each
            for each in examples
            if each.lstrip().startswith("fedbudget") and "-\n" in each
        ] == []

    def test_summaries_are_not_cut(self) -> None:
        listed = (
            ROOT.get_help(click.Context(ROOT, info_name="fedbudget"))
            .split("Commands:\n")[1]
            .splitlines()
        )
        assert len(listed) == len(ROOT.commands)
        assert [
            line for line in listed if not line.endswith(".") or line.endswith("..")
        ] == []


class TestCompletion:
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["run", "--model", "s"], ["svm", "softmax"]),
            (["compare", "--dataset", "m"], ["mnist", "mnist-small"]),
            (["serve", "--task", "svm-"], ["svm-dgd-mnist", "svm-digits", "svm-sgd-mnist"]),
            (
                ["local", "--method", ""],
                ["accelerated", "frugal", "paper", "newton", "centralized", "asynchronous"],
            ),
            (["run", "--engine", ""], ["in-process", "ray", "network"]),
            (["run", "--step-size", ""], ["auto"]),
            (["run", "--step-"], ["--step-size", "--step-fall"]),
            (["data", "get", "c"], ["cifar-10", "cmapss"]),
            (["tasks", "linear"], ["linear-energy"]),
            (["swe"], ["sweep"]),
        ],
    )
    def test_completed_values(
        self,
        words: list[str],
        expected: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert completions(*words) == expected

    @pytest.mark.parametrize(
        "command", [["show"], ["explain"], ["report"], ["evaluate"], ["serve", "--resume"]]
    )
    def test_completed_run_folders(
        self, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("runs/one", "runs/two", "other"):
            Path(name).mkdir(parents=True)
            Path(name, "config.toml").touch()
        Path("runs/empty").mkdir()
        assert completions(*command, "") == ["other", "runs/one", "runs/two"]
        assert completions(*command, "runs/t") == ["runs/two"]
        assert completions(*command, f"{tmp_path}/o") == [f"{tmp_path}/other"]

    def test_completed_data_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("mine.csv", "mine.txt", "mice.npz"):
            Path(name).touch()
        assert completions("run", "--dataset", "mi") == ["mice.npz", "mine.csv"]

    def test_completion_imports_nothing_slow(self) -> None:
        """Bash starts a process for each completion."""
        environment = {
            "COMP_WORDS": "fedbudget run --model s",
            "COMP_CWORD": "3",
            "_FEDBUDGET_COMPLETE": "complete_bash",
        }
        code = (
            "import atexit, sys; from fedbudget.cli.main import main\n"
            "heavy = {'numpy', 'numba', 'matplotlib'}\n"
            "atexit.register(lambda: print(heavy & set(sys.modules)))\n"
            "main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == ["svm", "softmax", "set()"], done.stderr


def _windows(words: list[str], length: int) -> list[list[str]]:
    return [words[at : at + length] for at in range(len(words) - length + 1)]
