"""Files that are written whole or not at all."""

from contextlib import suppress
from pathlib import Path

import pytest

from fedbudget import durable_files
from support.small_disk import fill, small_disk


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for content in (b"first", b"", b"third"):
        durable_files.replace(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
        assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("room", [0, 4096, 8192])
def test_on_a_full_disk_what_was_there_stays_and_nothing_lies_beside_it(
    tmp_path: Path, room: int
) -> None:
    with small_disk(tmp_path / "disk", 2**18) as disk:
        durable_files.replace(disk / "file", b"old")
        fill(disk, but=room)
        with pytest.raises(OSError, match="No space left"):
            durable_files.replace(disk / "file", bytes(3 * 4096))
        assert (disk / "file").read_bytes() == b"old"
        assert {each.name for each in disk.iterdir()} == {"file", "filler"}
        (disk / "filler").unlink()
        durable_files.replace(disk / "file", b"new")
        assert (disk / "file").read_bytes() == b"new"


def test_an_error_while_streaming_leaves_the_old_file(tmp_path: Path) -> None:
    durable_files.replace(tmp_path / "file", b"old")
    with suppress(KeyboardInterrupt), durable_files.replacing(tmp_path / "file") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_of_two_writers_the_last_wins(tmp_path: Path) -> None:
    with (
        durable_files.replacing(tmp_path / "file") as first,
        durable_files.replacing(tmp_path / "file") as second,
    ):
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_permissions_are_those_of_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    durable_files.replace(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        durable_files.replace(tmp_path / "none" / "file", b"")
