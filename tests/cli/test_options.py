"""Options become settings: given options come before a file's, and a file's before the defaults."""

from pathlib import Path

import pytest

from fedbudget.cli.options import settings_from, whole_numbers
from fedbudget.errors import UserError
from fedbudget.settings import Settings


def test_what_is_not_given_is_the_default() -> None:
    given = dict.fromkeys(("model", "nodes", "tau", "budget", "config", "case", "phi"))
    assert settings_from({**given, "out": Path("x"), "json": True}) == Settings()
    assert settings_from({"budget": []}) == Settings()


def test_an_option_comes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("nodes = 7\nphi = 0.5\nbudget = ['time=9s', 'bytes=1MB']\ntau = 3\n")
    settings = settings_from({"config": config, "nodes": 2, "tau": "adaptive"})
    assert settings == Settings(nodes=2, phi=0.5, budget=("time=9s", "bytes=1MB"), tau="adaptive")
    assert settings_from({"config": config, "budget": ["money=1"]}).budget == ("money=1",)


def test_a_zero_that_was_given_is_not_mistaken_for_nothing(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("seed = 7\nwatts = 9.0\n")
    assert settings_from({"config": config, "seed": 0, "watts": 0.0}) == Settings(seed=0, watts=0.0)


def test_case_is_short_for_a_partition_and_comes_before_the_files(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("partition = 'dirichlet:0.5'\n")
    assert settings_from({"case": 3}).partition == "case:3"
    assert settings_from({"case": 3, "config": config}).partition == "case:3"
    with pytest.raises(UserError, match="give --case or --partition, not both"):
        settings_from({"case": 3, "partition": "case:3"})


def test_numbers_or_words() -> None:
    settings = settings_from({"tau": "12", "batch_size": "full"})
    assert (settings.tau, settings.batch_size) == (12, "full")
    settings = settings_from({"tau": "adaptive", "batch_size": "32"})
    assert (settings.tau, settings.batch_size) == ("adaptive", 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tau": "abc"}, "tau must be a whole number or adaptive, not 'abc'"),
        ({"tau": "1.5"}, "tau must be a whole number or adaptive, not '1.5'"),
        ({"batch_size": "half"}, "batch-size must be a whole number or full, not 'half'"),
    ],
)
def test_other_words_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_from(given)


def test_lists_of_whole_numbers() -> None:
    assert whole_numbers("taus", "1, 2,50") == [1, 2, 50]
    for text in ("", "1,,2", "1;2", "1,x"):
        with pytest.raises(UserError, match="taus must be a whole number"):
            whole_numbers("taus", text)
