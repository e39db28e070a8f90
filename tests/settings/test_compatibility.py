"""The table of conflicts: what it refuses is refused early, and what it allows works."""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget.cli.main import main
from fedbudget.errors import UserError, flag
from fedbudget.launch.method import build_method
from fedbudget.protocol.update import UPDATE_RULES
from fedbudget.settings.compatibility import (
    CONFLICTS,
    Conflict,
    chosen_options,
    require_compatible,
)
from fedbudget.settings.option import declarations
from fedbudget.settings.settings import Settings

TABLE_OPTIONS = tuple(dict.fromkeys(name for row in CONFLICTS for name in row.options))
SETTINGS = tuple(name for name in TABLE_OPTIONS if name in declarations(Settings))
ENGINES = ("in-process", "ray", "network", "flower")

OTHERS: dict[str, tuple[Any, ...]] = {
    "engine": ENGINES,
    "privacy_limit": (None, 4.0),
    "pace": ((1.0, 2.0),),
    **dict.fromkeys(("rivals", "quick"), (False, True)),
    **dict.fromkeys(
        (
            "actors",
            "case",
            "cases",
            "config",
            "data",
            "energy_meter",
            "jobs",
            "out",
            "privacy_account",
            "ray_address",
            "resume",
            "shard",
            "task",
            "test",
        ),
        (None, "given"),
    ),
}
"""Values of the options that are not settings."""

NOT_DERIVED: dict[str, tuple[Any, ...]] = {
    "budget": (("privacy=4", "time=1s"),),
    "categorical": (("ward",),),
    "classes": (("ill", "well"),),
    "class_weights": ("balanced", (1.0, 2.0)),
    "drop": (("id",),),
    "gamma": (2.0,),
    "missing": (("<0.5",),),
    "nodes": (2, 5),
    "partition": ("case:2",),
    "schema": ("schema.toml",),
    "privacy_ledger": ("ledger.json",),
    "secure_threshold": (0.8,),
    "speeds": ((1.0, 2.0, 1.0, 1.0, 1.0),),
    "target": ("y",),
    "until": (("loss=0.001",),),
}
"""Values that do not follow from the type of the setting."""

OF_TABLES = ("schema", "target", "drop", "categorical", "impute", "missing", "classes")


@cache
def other_values(name: str) -> tuple[Any, ...]:
    """Return values of a setting that differ from its default."""
    declared = declarations(Settings)[name]
    samples = {bool: (True, False), int: (1, 7), float: (0.5,)}
    derived: list[Any] = list(declared.words)
    for kind in declared.kinds:
        derived += samples.get(kind, ())
    values = NOT_DERIVED.get(name, tuple(derived))
    return tuple(value for value in values if value != declared.default)


def unchecked(**given: Any) -> Settings:
    """Return settings without any check."""
    settings = object.__new__(Settings)
    for name, declared in declarations(Settings).items():
        object.__setattr__(settings, name, given.get(name, declared.default))
    return settings


def conflicts(engine: str | None = None, **given: Any) -> list[Conflict]:
    others = {} if engine is None else {"engine": engine}
    chosen = chosen_options(unchecked(**given), **others)
    return [row for row in CONFLICTS if row.applies(chosen)]


def refusal(engine: str | None = None, **given: Any) -> str | None:
    try:
        settings = Settings(**given)
        if engine is not None:
            require_compatible(settings, engine=engine)
    except UserError as error:
        return str(error)
    return None


def pairs() -> Iterator[dict[str, Any]]:
    for first, second in combinations(SETTINGS, 2):
        for values in product(other_values(first), other_values(second)):
            yield dict(zip((first, second), values, strict=True))


def names_all(message: str, options: Any) -> bool:
    return all(name in message for name in options)


def test_every_setting_has_another_value() -> None:
    assert all(map(other_values, SETTINGS))
    assert set(TABLE_OPTIONS) <= {*SETTINGS, *OTHERS}


def test_every_pair_of_settings() -> None:
    """A pair is refused if and only if the table has it; otherwise its method exists."""
    refused = 0
    for pair in pairs():
        message = refusal(**pair)
        rows = conflicts(**pair)
        assert bool(rows) == (message is not None), pair
        if message is None:
            build_method(Settings(**pair), sizes=[3, 4, 5, 6, 7])
            continue
        refused += 1
        assert len(message.splitlines()) == len(rows), pair
        assert all(names_all(message, row.options) for row in rows), pair
        if not any(conflicts(**{name: value}) for name, value in pair.items()):
            assert names_all(message, pair), pair
    assert refused > 300


@pytest.mark.parametrize("engine", ENGINES)
def test_every_setting_with_every_engine(engine: str) -> None:
    for name in SETTINGS:
        for value in other_values(name):
            rows = conflicts(engine, **{name: value})
            message = refusal(engine, **{name: value})
            assert bool(rows) == (message is not None)
            if message is not None and not conflicts(**{name: value}):
                assert names_all(message, ("engine", name))


def example(row: Conflict) -> dict[str, Any]:
    """Return options for which a row applies; fail if there are none."""
    candidates = []
    for name in row.options:
        values: tuple[Any, ...] = OTHERS.get(name, ())
        if name in SETTINGS:
            values = (*other_values(name), declarations(Settings)[name].default)
        candidates.append(values)
    for values in product(*candidates):
        given = dict(zip(row.options, values, strict=True))
        settings = {name: given[name] for name in row.options if name in SETTINGS}
        others = {name: given[name] for name in row.options if name not in SETTINGS}
        chosen = chosen_options(unchecked(**settings), **others)
        if row.applies(chosen):
            return vars(chosen)
    pytest.fail(f"{row.reason} never applies")


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: "-".join(row.options))
def test_every_row_can_apply(row: Conflict) -> None:
    error = UserError(row.message(**example(row)))
    assert names_all(str(error), row.options)
    # An engine is a command of its own for some readers, who have no such option.
    named = [flag(name) for name in row.options if name != "engine"]
    assert names_all(error.spelled(flag), named)
    assert "`" not in str(error)


def test_all_conflicts_in_one_message() -> None:
    with pytest.raises(UserError) as caught:
        Settings(method="centralized", attack="noise", update="fedadam", delta="gradient")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("method centralized has no ") for line in lines)


def test_options_of_update_rules() -> None:
    """A `server_` option is refused unless the rule has a field of its name."""
    for rule, option in product(
        UPDATE_RULES, ("step_size", "momentum", "beta2", "epsilon")
    ):
        known = option in {field.name for field in fields(UPDATE_RULES[rule])}
        given: dict[str, Any] = {"update": rule, f"server_{option}": 0.5}
        assert (refusal(**given) is None) == known, given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "--dataset", "none.csv", "--method", "paper", "--budget", "privacy=4"],
            "a --budget of privacy has its own method: --method must be accelerated",
        ),
        (
            ["run", "--dataset", "none.csv", "--step-fall", "0.3"],
            "--step-fall needs a --step-size that is a number",
        ),
        (
            ["run", "--dataset", "none.csv", "--engine", "ray", "--attack", "noise"],
            "--attack needs engine in-process",
        ),
        (
            ["local", "--dataset", "none.csv", "--workload", "by-data"],
            "--workload by-data works only with simulated nodes, not with engine network",
        ),
        (
            ["local", "--dataset", "none.csv", "--pace", "1,2", "--nodes", "5"],
            "--pace needs one value for each of the --nodes",
        ),
        (
            ["serve", "--data", "none.csv", "--secure-aggregation"],
            "(--data) cannot use --secure-aggregation; start a separate node",
        ),
        (
            ["serve", "--energy-meter", "rapl"],
            "--energy-meter needs data on this machine; set it at fedbudget join, or add "
            "--data",
        ),
        (
            ["serve", "--method", "centralized"],
            "--method centralized does not work with engine network",
        ),
        (
            [
                "compare",
                "--dataset",
                "none.csv",
                "--workload",
                "by-speed",
                "--proximal",
                "1",
            ],
            "--workload by-speed needs drift correction, which is off with --proximal 1",
        ),
        (
            ["sweep", "grid.toml"],
            "budget = ('privacy=4',), rounds = 1, seed = 0: rounds 1 trains nothing",
        ),
        (
            ["join", "127.0.0.1:1", "--data", "none.csv", "--shard", "1/2"],
            "give --data, or --dataset with --shard, not both",
        ),
    ],
)
def test_commands_refuse_before_reading_data(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.toml").write_text(
        "dataset = 'none.csv'\nprivacy-unit = 'sample'\n[grid]\n"
        "budget = [['privacy=4']]\nrounds = [2, 1]\nseeds = 1\n"
    )
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]


def test_python_refuses_before_reading_data() -> None:
    with pytest.raises(UserError, match=r"^attack needs engine in-process$"):
        fedbudget.serve(attack="noise", data="none.csv", model="svm")
    with pytest.raises(UserError, match=r"^secure_aggregation works only over gRPC"):
        fedbudget.train(dataset="none.csv", secure_aggregation=True)


def allowed_pairs() -> Iterator[dict[str, Any]]:
    """Yield pairs of one value each that an in-process run accepts."""
    for first, second in combinations(SETTINGS, 2):
        pair = {first: other_values(first)[0], second: other_values(second)[0]}
        if not conflicts("in-process", **pair):
            yield pair


def test_allowed_pairs_run() -> None:
    """Every allowed pair trains; the first round of a private run only measures norms."""
    rng = np.random.default_rng(0)
    shards = [(rng.normal(size=(8, 3)), np.arange(8) % 2) for _ in range(5)]
    for pair in allowed_pairs():
        options = {"budget": "time=1h", "nodes": 5, "rounds": 2, **pair}
        if pair.keys() & {"nodes", "partition", "privacy_ledger", *OF_TABLES}:
            # Shards have nodes and a partition, and are no tables. A ledger writes a file.
            continue
        result = fedbudget.train(model="softmax", shards=shards, **options)
        assert result.aggregations >= 1, pair
