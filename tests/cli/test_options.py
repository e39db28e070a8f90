"""Settings from options: options override a file, and a file overrides defaults."""

from pathlib import Path

import pytest

from fedbudget.cli.options import settings_from
from fedbudget.errors import UserError, flag
from fedbudget.settings.settings import Settings


def test_missing_options_take_defaults() -> None:
    given = dict.fromkeys(("model", "nodes", "tau", "budget", "config", "case", "phi"))
    assert settings_from({**given, "out": Path("x"), "json": True}) == Settings()
    assert settings_from({"budget": []}) == settings_from({"budget": ()}) == Settings()


def test_commands_have_their_own_defaults(tmp_path: Path) -> None:
    assert settings_from({}, "serve") == Settings(costs="measured")
    assert settings_from({}, "local") == Settings(costs="measured")
    config = tmp_path / "a.toml"
    config.write_text("nodes = 7\ncosts = 'simulated'\n")
    assert settings_from({"config": config}, "local") == Settings(nodes=7)


def test_precedence_of_option_and_file(
    tmp_path: Path,
) -> None:
    config = tmp_path / "a.toml"
    config.write_text("nodes = 7\nphi = 0.5\nbudget = ['time=9s', 'bytes=1MB']\ntau = 3\n")
    settings = settings_from({"config": config, "nodes": 2, "tau": "adaptive"})
    assert settings == Settings(
        nodes=2, phi=0.5, budget=("time=9s", "bytes=1MB"), tau="adaptive"
    )
    assert settings_from({"config": config, "budget": ["money=1"]}).budget == ("money=1",)


def test_zero_is_a_value(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("seed = 7\nwatts = 9.0\n")
    assert settings_from({"config": config, "seed": 0, "watts": 0.0}) == Settings(
        seed=0, watts=0.0
    )


def test_absent_flag_keeps_the_file(tmp_path: Path) -> None:
    """A resumed run keeps its flags, without their repetition."""
    config = tmp_path / "config.toml"
    config.write_text(Settings(spend_all=True).to_toml())
    assert settings_from({"config": config, "spend_all": False}).spend_all
    assert settings_from({"spend_all": True}).spend_all
    assert not settings_from({"spend_all": False}).spend_all


def test_case_sets_the_partition(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("partition = 'dirichlet:0.5'\n")
    assert settings_from({"case": 3}).partition == "case:3"
    assert settings_from({"case": 3, "config": config}).partition == "case:3"
    with pytest.raises(UserError) as refused:
        settings_from({"case": 3, "partition": "case:3"})
    assert refused.value.spelled(flag) == "give --case or --partition, not both"


def test_texts_become_numbers() -> None:
    settings = settings_from(
        {"tau": "12", "batch_size": "full", "step_size": "1e-3", "speeds": "4, 1,1"}
    )
    assert settings == Settings(
        tau=12, batch_size="full", step_size=0.001, speeds=(4.0, 1.0, 1.0)
    )
    settings = settings_from(
        {"tau": "adaptive", "batch_size": "32", "step_size": "auto", "target": "12"}
    )
    assert settings == Settings(
        tau="adaptive", batch_size=32, step_size="auto", target="12"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tau": "abc"},
            "--tau must be adaptive or a whole number of at least 1, not 'abc'",
        ),
        (
            {"tau": "1.5"},
            "--tau must be adaptive or a whole number of at least 1, not '1.5'",
        ),
        (
            {"batch_size": "half"},
            "--batch-size must be full or a whole number of at least 1, not 'half'",
        ),
        ({"step_size": "nan"}, "--step-size must be auto or a positive number, not 'nan'"),
        ({"clusters": ""}, "--clusters must be a whole number of at least 1, not ''"),
    ],
)
def test_errors_name_the_option(given: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        settings_from(given)
    assert refused.value.spelled(flag) == message
