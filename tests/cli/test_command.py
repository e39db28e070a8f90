"""Commands that are made from declarations: which options they have, and that one place
declares each.
"""

import subprocess
import sys
from collections import Counter
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

ROOT: Any = typer.main.get_command(app)
OPTIONS = [
    each
    for each in {**vars(options), **vars(launch_options)}.values()
    if getattr(each, "__name__", "").endswith("Options")
]


def params(*arguments: str) -> dict[str, Any]:
    """What a command is given."""
    found: dict[str, Any] = (
        ROOT.commands[arguments[0]].make_context(arguments[0], list(arguments[1:])).params
    )
    return found


BOTH_SIDES = {"privacy_delta", "privacy_unit", "secure_aggregation", "secure_threshold"}
"""What an aggregator is told for a run, and a node for itself, which it then holds the
aggregator to.
"""


class TestOptions:
    def test_every_option_is_declared_once(self) -> None:
        """Of those that commands share, none is a setting as well, or in two groups."""
        names = Counter(name for cls in (Settings, *OPTIONS) for name in declarations(cls))
        twice = {name for name, times in names.items() if times > 1}
        assert twice == {
            "address",
            *BOTH_SIDES,
        }  # an address to listen on, and one to connect to

    @pytest.mark.parametrize(
        "command", ["run", "serve", "join", "local", "compare", "sweep"]
    )
    def test_a_command_has_the_settings_that_name_it(self, command: str) -> None:
        has = {each.name for each in ROOT.commands[command].params} - (
            BOTH_SIDES if command == "join" else set()
        )
        known = declarations(Settings)
        assert {name for name in known if name in has} == {
            name for name in known if known[name].within(command)
        }

    def test_one_new_line_in_settings_is_an_option_everywhere(self) -> None:
        """A field in a copy of settings.py; its line for Python is for type checkers. No
        other file knows about it.
        """
        source = Path(fedbudget.settings.settings.__file__).read_text(encoding="utf-8")
        field = '    warm_up: Count = option(3, "Rounds to warm up.", "method", _ONE_RUN)\n'
        before = "    clusters: Count = option("
        assert source.count(before) == 1
        source = source.replace(before, field + before)
        code = """
            import sys, types
            module = sys.modules["fedbudget.settings.settings"] = types.ModuleType("fedbudget.settings.settings")
            exec(compile(sys.stdin.read(), "settings.py", "exec"), module.__dict__)
            import typer
            from fedbudget.cli.main import app
            from fedbudget.cli.options import settings_from
            from fedbudget.launch.flower import read_run
            commands = typer.main.get_command(app).commands
            for command in ("run", "serve", "local"):
                given = commands[command].make_context(command, ["--warm-up", "4"]).params
                assert settings_from(given, command).warm_up == 4
            assert not [each for each in commands["compare"].params if each.name == "warm_up"]
            assert "warm-up = 3" in module.Settings().to_toml().splitlines()
            assert module.read_settings({"warm-up": 5}, "file") == {"warm_up": 5}
            assert module.Settings.from_python(warm_up=6).warm_up == 6
            assert read_run({"warm-up": 7}).settings.warm_up == 7
        """
        lines = "\n".join(line.removeprefix(" " * 12) for line in code.splitlines())
        done = subprocess.run(
            [sys.executable, "-c", lines], input=source, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def test_a_node_process_gets_all_that_its_share_depends_on(self) -> None:
        """Every setting that `join` has, as given to the aggregator; such as the share that
        is held out for testing.
        """
        shared: dict[str, Any] = {
            **{
                "model": "softmax",
                "dataset": "homes.csv",
                "data_dir": "/data",
                "target": "price",
                "test_share": 0.5,
            },
            **{
                "train_samples": 1000,
                "partition": "dirichlet:0.5",
                "seed": 3,
                "device": "cpu",
            },
            **{
                "drop": ("id", 'a,"b'),
                "categorical": ("x",),
                "impute": "median",
                "standardise": False,
            },
        }
        settings = Settings(**shared)
        given = params("join", "127.0.0.1:7700", *node_arguments(settings))
        joined, known = settings_from(given, "join"), declarations(Settings)
        mine = [name for name in known if known[name].within("join")]
        assert [getattr(joined, name) for name in mine] == [
            getattr(settings, name) for name in mine
        ]
        assert {
            "dataset",
            "target",
            "drop",
            "test_share",
            "train_samples",
            "partition",
            "seed",
        } <= set(mine)
