"""Commands and their options, each declared in one place."""

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

import fedbudget.settings.settings
from fedbudget.cli import options
from fedbudget.cli.main import app
from fedbudget.cli.options import settings_from
from fedbudget.launch.local import node_arguments
from fedbudget.settings import network as launch_options
from fedbudget.settings.option import declarations
from fedbudget.settings.settings import Settings
from support.commands import run_command
from support.synthetic_runs import SETTINGS, make_run

ROOT: Any = typer.main.get_command(app)
OPTIONS = [
    each
    for each in {**vars(options), **vars(launch_options)}.values()
    if getattr(each, "__name__", "").endswith("Options")
]


def params(*arguments: str) -> dict[str, Any]:
    """Parsed parameters of a command."""
    result: dict[str, Any] = (
        ROOT.commands[arguments[0]].make_context(arguments[0], list(arguments[1:])).params
    )
    return result


BOTH_SIDES = {"privacy_delta", "privacy_unit", "secure_aggregation", "secure_threshold"}
"""Options of an aggregator that a node sets too, and then requires of the aggregator."""


class TestOptions:
    def test_options_are_declared_once(self) -> None:
        """No shared option is also a setting or in two groups."""
        names = Counter(name for cls in (Settings, *OPTIONS) for name in declarations(cls))
        twice = {name for name, times in names.items() if times > 1}
        # One address to listen on, and one to connect to.
        assert twice == {"address", *BOTH_SIDES}

    @pytest.mark.parametrize(
        "command", ["run", "serve", "join", "local", "compare", "sweep"]
    )
    def test_commands_have_their_settings(self, command: str) -> None:
        has = {each.name for each in ROOT.commands[command].params} - (
            BOTH_SIDES if command == "join" else set()
        )
        known = declarations(Settings)
        assert {name for name in known if name in has} == {
            name for name in known if known[name].within(command)
        }

    def test_new_setting_becomes_an_option(self) -> None:
        """One field added to a copy of settings.py reaches commands, files, Python and
        Flower, without a change of another file.
        """
        source = Path(fedbudget.settings.settings.__file__).read_text(encoding="utf-8")
        field = '    warm_up: Count = option(3, "Rounds to warm up.", "method", _ONE_RUN)\n'
        before = "    clusters: Count = option("
        assert source.count(before) == 1
        source = source.replace(before, field + before)
        code = """
            import sys, types
            name = "fedbudget.settings.settings"
            module = sys.modules[name] = types.ModuleType(name)
            exec(compile(sys.stdin.read(), "settings.py", "exec"), module.__dict__)
            import typer
            from fedbudget.cli.main import app
            from fedbudget.cli.options import settings_from
            from fedbudget.launch.flower import read_run
            commands = typer.main.get_command(app).commands
            for command in ("run", "serve", "local"):
                given = commands[command].make_context(command, ["--warm-up", "4"]).params
                assert settings_from(given, command).warm_up == 4
            assert "warm_up" not in [each.name for each in commands["compare"].params]
            assert "warm-up = 3" in module.Settings().to_toml().splitlines()
            assert module.read_settings({"warm-up": 5}, "file") == {"warm_up": 5}
            assert module.Settings.combined({"warm_up": 6}).warm_up == 6
            assert read_run({"warm-up": 7}).settings.warm_up == 7
        """
        lines = "\n".join(line.removeprefix(" " * 12) for line in code.splitlines())
        done = subprocess.run(
            [sys.executable, "-c", lines], input=source, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def test_node_process_receives_data_settings(self) -> None:
        """A node process receives every setting of `join`, such as `test_share`."""
        settings = Settings(
            model="softmax",
            dataset="homes.csv",
            data_dir="/data",
            target="price",
            test_share=0.5,
            train_samples=1000,
            partition="dirichlet:0.5",
            seed=3,
            device="cpu",
            drop=("id", 'a,"b'),
            categorical=("x",),
            impute="median",
            standardise=False,
        )
        given = params("join", "127.0.0.1:7700", *node_arguments(settings))
        joined, known = settings_from(given, "join"), declarations(Settings)
        names = [name for name in known if known[name].within("join")]
        assert [getattr(joined, name) for name in names] == [
            getattr(settings, name) for name in names
        ]
        required = "dataset target drop test_share train_samples partition seed"
        assert set(required.split()) <= set(names)


def test_terminal_without_greek_letters(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-m", "fedbudget", "explain", str(tmp_path / "run")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "adaptive ?, frugal: 20 rounds" in done.stdout


def test_system_error_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not the temporary file that was being written."""

    def fail(*_: object, **__: object) -> None:
        path = tmp_path / ".predictions.csv.0123abcd.new"
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("fedbudget.runs.overview.find_runs", fail)
    code, _, err = run_command(capsys, "runs", str(tmp_path))
    assert code == 1
    assert err == f"fedbudget: {tmp_path}/predictions.csv: Permission denied\n"


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_run(tmp_path / "first", summary={"loss": 0.25})
    other = replace(SETTINGS, tau=10, seed=7)
    second = make_run(tmp_path / "second", 7, settings=other, summary={"loss": 0.125})
    code, out, _ = run_command(capsys, "compare", str(first), str(second))
    rows = {line.split()[0]: line.split()[-2:] for line in out.splitlines()}
    assert code == 0
    assert rows["loss"] == ["0.2500", "0.1250"]
    assert rows["rounds"] == ["20", "7"]
    assert rows["--tau"] == ["adaptive", "10"]
    assert rows["--seed"] == ["3", "7"]
    assert "--model" not in rows  # equal
    _, out, _ = run_command(capsys, "compare", str(first), str(second), "--json")
    assert set(json.loads(out)["different"]) == {"tau", "seed"}
