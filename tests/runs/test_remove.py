"""Runs are removed, and nothing else is."""

from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.runs.folder import RunWriter
from fedbudget.runs.overview import FILES, remove
from support.made_runs import SETTINGS, make_run


def test_a_run_goes_with_its_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in FILES:
        (run / name.replace("*", "1")).touch()
    (run / ".summary.json.12ab.new").touch()
    assert remove(run)
    assert not run.exists()


def test_other_files_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    (run / "data").mkdir()
    assert not remove(run)
    assert sorted(path.name for path in run.iterdir()) == ["data", "notes.txt"]
    with pytest.raises(UserError, match="is not the folder of a run"):
        remove(run)


def test_a_run_that_is_being_made_stays(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", SETTINGS.to_toml())
    with pytest.raises(UserError, match="is being written to"):
        remove(tmp_path / "run")
    writer.close()
    assert remove(tmp_path / "run")


def test_a_link_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(UserError, match="is a link"):
        remove(tmp_path / "link")
    assert (run / "config.toml").is_file()


@pytest.mark.parametrize("name", ["nothing", "folder", "file"])
def test_what_is_not_a_run_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.toml").touch()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not the folder of a run"):
        remove(tmp_path / name)
    assert (tmp_path / "folder" / "config.toml").exists()
