"""Commands that are made from declarations: their options, their help, and what a shell completes."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from click.shell_completion import ShellComplete

import fedbudget.settings
from fedbudget.cli import options
from fedbudget.cli.main import app
from fedbudget.cli.options import settings_from
from fedbudget.option import declarations
from fedbudget.settings import Settings, node_arguments

ROOT: Any = typer.main.get_command(app)
OPTIONS = [each for name, each in vars(options).items() if name.endswith("Options")]


def params(*arguments: str) -> dict[str, Any]:
    """What a command is given."""
    found: dict[str, Any] = ROOT.commands[arguments[0]].make_context(arguments[0], list(arguments[1:])).params
    return found


def help_of(command: str) -> str:
    text: str = ROOT.commands[command].get_help(click.Context(ROOT.commands[command], info_name=command))
    return text


def completions(*words: str) -> list[str]:
    """What a shell offers for the last of these words."""
    shell = ShellComplete(ROOT, {}, "fedbudget", "_FEDBUDGET_COMPLETE")
    return [each.value for each in shell.get_completions(list(words[:-1]), words[-1])]


class TestOptions:
    def test_every_option_is_declared_once(self) -> None:
        """But for two: where to listen and where to connect to, and the pace of one node and of several."""
        names = Counter(name for cls in (Settings, *OPTIONS) for name in declarations(cls))
        assert {name for name, times in names.items() if times > 1} == {"address", "pace"}

    @pytest.mark.parametrize("command", ["run", "serve", "join", "local", "compare", "sweep"])
    def test_a_command_has_the_settings_that_name_it(self, command: str) -> None:
        has = {each.name for each in ROOT.commands[command].params}
        known = declarations(Settings)
        assert {name for name in known if name in has} == {name for name in known if known[name].within(command)}

    def test_one_new_line_in_settings_is_an_option_everywhere(self) -> None:
        """A field, and its line for Python, in a copy of settings.py; no other file knows about it."""
        source = Path(fedbudget.settings.__file__).read_text(encoding="utf-8")
        field = '    warm_up: Count = option(3, "Rounds to warm up.", "method", _ONE_RUN)\n'
        for before, line in (
            ("    clusters: Count = option(", field),
            ("    clusters: Count\n", "    warm_up: Count\n"),
        ):
            assert source.count(before) == 1
            source = source.replace(before, line + before)
        code = """
            import sys, types
            module = sys.modules["fedbudget.settings"] = types.ModuleType("fedbudget.settings")
            exec(compile(sys.stdin.read(), "settings.py", "exec"), module.__dict__)
            import typer
            from fedbudget.cli.main import app
            from fedbudget.cli.options import settings_from
            from fedbudget.engines.flower.configuration import wanted
            commands = typer.main.get_command(app).commands
            for command in ("run", "serve", "local"):
                given = commands[command].make_context(command, ["--warm-up", "4"]).params
                assert settings_from(given, command).warm_up == 4
            assert not [each for each in commands["compare"].params if each.name == "warm_up"]
            assert "warm-up = 3" in module.Settings().to_toml().splitlines()
            assert module.read_settings({"warm-up": 5}, "file") == {"warm_up": 5}
            assert module.Settings.from_python(warm_up=6).warm_up == 6
            assert wanted({"warm-up": 7}).settings.warm_up == 7
        """
        lines = "\n".join(line.removeprefix(" " * 12) for line in code.splitlines())
        done = subprocess.run([sys.executable, "-c", lines], input=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_a_node_process_gets_all_that_its_share_depends_on(self) -> None:
        """Every setting that `join` has, as given to the aggregator; such as the share that is held out for testing."""
        settings = Settings(
            *("softmax", "homes.csv", "/data", "price", 0.5, 1000),
            **{"partition": "dirichlet:0.5", "seed": 3, "device": "cpu"},  # type: ignore[arg-type]
        )
        given = params("join", "127.0.0.1:7700", *node_arguments(settings))
        joined, known = settings_from(given, "join"), declarations(Settings)
        mine = [name for name in known if known[name].within("join")]
        assert [getattr(joined, name) for name in mine] == [getattr(settings, name) for name in mine]
        assert {"dataset", "target", "test_share", "train_samples", "partition", "seed"} <= set(mine)


class TestHelp:
    def test_the_options_that_most_need_come_first(self) -> None:
        first, second = help_of("run").split("Most used:\n")[1].split("\n\n")[:2]
        for name in ("--model", "--dataset", "--nodes", "--budget", "--case", "--config", "--out"):
            assert f"  {name} " in first
        assert second.startswith("Data:\n")

    @pytest.mark.parametrize(
        ("command", "line"),
        [
            ("run", "How many nodes.  [default: 5, or one per file]"),
            ("run", "Of everything random.  [default: 0]"),
            ("run", "(clocks and meters of the machines).  [default: simulated]"),
            ("serve", "(clocks and meters of the machines).  [default: measured]"),
            ("serve", "before the first round.  [default: --min-nodes]"),
            ("serve", "The most nodes to let in.  [default: 1000]"),
            ("local", "How many node processes to start.  [default: 5]"),
            ("compare", "Cases to compare in.  [default: 1,2,3,4]"),
            ("sweep", "The sweep's folder.  [default: sweeps/ and the file's name]"),
        ],
    )
    def test_defaults_are_those_of_the_command(self, command: str, line: str) -> None:
        assert line.split() in _windows(help_of(command).split(), len(line.split()))

    def test_summaries_are_whole(self) -> None:
        listed = ROOT.get_help(click.Context(ROOT, info_name="fedbudget")).split("Commands:\n")[1].splitlines()
        assert len(listed) == len(ROOT.commands)
        assert [line for line in listed if not line.endswith(".") or line.endswith("..")] == []


class TestCompletion:
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["run", "--model", "s"], ["svm", "softmax"]),
            (["compare", "--dataset", "m"], ["mnist"]),
            (["serve", "--task", "svm-"], ["svm-dgd-mnist", "svm-digits", "svm-sgd-mnist"]),
            (["local", "--method", ""], ["frugal", "paper", "centralized", "asynchronous"]),
            (["run", "--engine", ""], ["in-process", "ray"]),
            (["run", "--step-size", ""], ["auto"]),
            (["run", "--step-"], ["--step-size"]),
            (["data", "get", "c"], ["cifar-10"]),
            (["tasks", "linear"], ["linear-energy"]),
            (["swe"], ["sweep"]),
        ],
    )
    def test_values(
        self, words: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert completions(*words) == expected

    @pytest.mark.parametrize("command", [["show"], ["explain"], ["report"], ["evaluate"], ["serve", "--resume"]])
    def test_folders_of_runs(self, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("runs/one", "runs/two", "other"):
            Path(name).mkdir(parents=True)
            Path(name, "config.toml").touch()
        Path("runs/empty").mkdir()
        assert completions(*command, "") == ["other", "runs/one", "runs/two"]
        assert completions(*command, "runs/t") == ["runs/two"]
        assert completions(*command, f"{tmp_path}/o") == [f"{tmp_path}/other"]

    def test_datasets_in_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("mine.csv", "mine.txt", "mice.npz"):
            Path(name).touch()
        assert completions("run", "--dataset", "mi") == ["mice.npz", "mine.csv"]

    def test_a_shell_is_answered_without_anything_slow(self) -> None:
        """As bash asks, in a process of its own."""
        asked = {"COMP_WORDS": "fedbudget run --model s", "COMP_CWORD": "3", "_FEDBUDGET_COMPLETE": "complete_bash"}
        code = (
            "import atexit, sys; from fedbudget.cli.main import main\n"
            "atexit.register(lambda: print({'numpy', 'numba', 'matplotlib'} & set(sys.modules)))\n"
            "main()"
        )
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
        assert done.stdout.split() == ["svm", "softmax", "set()"], done.stderr


def _windows(words: list[str], length: int) -> list[list[str]]:
    return [words[at : at + length] for at in range(len(words) - length + 1)]
