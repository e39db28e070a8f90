"""Options become settings: given options come before a file's, and a file's before the
defaults.
"""

from pathlib import Path

import pytest

from fedbudget.cli.options import settings_from
from fedbudget.errors import UserError, flag
from fedbudget.settings.settings import Settings


def test_what_is_not_given_is_the_default() -> None:
    given = dict.fromkeys(("model", "nodes", "tau", "budget", "config", "case", "phi"))
    assert settings_from({**given, "out": Path("x"), "json": True}) == Settings()
    assert settings_from({"budget": []}) == settings_from({"budget": ()}) == Settings()


def test_a_command_may_have_a_default_of_its_own(tmp_path: Path) -> None:
    assert settings_from({}, "serve") == Settings(costs="measured")
    assert settings_from({}, "local") == Settings(costs="measured", nodes=5)
    config = tmp_path / "a.toml"
    config.write_text("nodes = 7\ncosts = 'simulated'\n")
    assert settings_from({"config": config}, "local") == Settings(nodes=7)


def test_an_option_comes_before_the_file_and_the_file_before_the_default(
    tmp_path: Path,
) -> None:
    config = tmp_path / "a.toml"
    config.write_text("nodes = 7\nphi = 0.5\nbudget = ['time=9s', 'bytes=1MB']\ntau = 3\n")
    settings = settings_from({"config": config, "nodes": 2, "tau": "adaptive"})
    assert settings == Settings(
        nodes=2, phi=0.5, budget=("time=9s", "bytes=1MB"), tau="adaptive"
    )
    assert settings_from({"config": config, "budget": ["money=1"]}).budget == ("money=1",)


def test_a_zero_that_was_given_is_not_mistaken_for_nothing(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("seed = 7\nwatts = 9.0\n")
    assert settings_from({"config": config, "seed": 0, "watts": 0.0}) == Settings(
        seed=0, watts=0.0
    )


def test_case_is_short_for_a_partition_and_comes_before_the_files(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("partition = 'dirichlet:0.5'\n")
    assert settings_from({"case": 3}).partition == "case:3"
    assert settings_from({"case": 3, "config": config}).partition == "case:3"
    with pytest.raises(UserError) as refused:
        settings_from({"case": 3, "partition": "case:3"})
    assert refused.value.spelled(flag) == "give --case or --partition, not both"


def test_texts_become_numbers_where_they_can() -> None:
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
def test_errors_speak_of_options(given: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        settings_from(given)
    assert refused.value.spelled(flag) == message
