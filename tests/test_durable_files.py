"""Durable files: atomic replacement, retries, and reserved file descriptors."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fedbudget import durable_files
from fedbudget.durable_files import with_retries
from support.small_disk import fill, small_disk

EXHAUST_DESCRIPTORS = """
import os, sys
from pathlib import Path
from fedbudget import durable_files
from fedbudget.durable_files import reserve_descriptors, with_retries
reserve_descriptors()
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for text in (b"one", b"two"):
    with_retries(lambda: durable_files.replace(Path(sys.argv[1]), text))
try:
    os.open(os.devnull, os.O_RDONLY)
except OSError:
    print("none left")
"""


class TestReplace:
    def test_file_is_replaced(self, tmp_path: Path) -> None:
        for content in (b"first", b"", b"third"):
            durable_files.replace(tmp_path / "file", content)
            assert (tmp_path / "file").read_bytes() == content
            assert names(tmp_path) == {"file"}

    @pytest.mark.parametrize("free", [0, 4096, 8192])
    def test_full_disk_keeps_the_old_file(self, tmp_path: Path, free: int) -> None:
        """No temporary file remains either."""
        with small_disk(tmp_path / "disk", 2**18) as disk:
            durable_files.replace(disk / "file", b"old")
            fill(disk, but=free)
            with pytest.raises(OSError, match="No space left"):
                durable_files.replace(disk / "file", bytes(3 * 4096))
            assert (disk / "file").read_bytes() == b"old"
            assert names(disk) == {"file", "filler"}
            (disk / "filler").unlink()
            durable_files.replace(disk / "file", b"new")
            assert (disk / "file").read_bytes() == b"new"

    def test_interrupted_stream_keeps_old_file(self, tmp_path: Path) -> None:
        durable_files.replace(tmp_path / "file", b"old")
        with (
            suppress(KeyboardInterrupt),
            durable_files.replacing(tmp_path / "file") as file,
        ):
            file.write(b"new")
            raise KeyboardInterrupt
        assert (tmp_path / "file").read_bytes() == b"old"
        assert names(tmp_path) == {"file"}

    def test_last_writer_to_close_wins(self, tmp_path: Path) -> None:
        with (
            durable_files.replacing(tmp_path / "file") as first,
            durable_files.replacing(tmp_path / "file") as second,
        ):
            first.write(b"first")
            second.write(b"second")
        assert (tmp_path / "file").read_bytes() == b"first"
        assert names(tmp_path) == {"file"}

    def test_permissions_match_a_new_file(self, tmp_path: Path) -> None:
        (tmp_path / "other").touch()
        durable_files.replace(tmp_path / "file", b"")
        assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode

    def test_missing_folder_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            durable_files.replace(tmp_path / "none" / "file", b"")


class TestRetries:
    def test_writes_without_free_descriptors(self, tmp_path: Path) -> None:
        limited = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh"]
        command = [*limited, sys.executable, "-c", EXHAUST_DESCRIPTORS]
        done = subprocess.run(
            [*command, str(tmp_path / "file")], capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.stderr) == ("none left\n", "")
        assert (tmp_path / "file").read_bytes() == b"two"

    def test_temporary_errors_are_retried(self) -> None:
        errors = iter([errno.ENOSPC, errno.ENOSPC, None])

        def action() -> str:
            number = next(errors)
            if number is not None:
                raise OSError(number, os.strerror(number))
            return "done"

        assert with_retries(action) == "done"

    @pytest.mark.parametrize(
        ("number", "patience"), [(errno.EACCES, 10.0), (errno.ENOSPC, 0.0)]
    )
    def test_permanent_errors_are_raised(self, number: int, patience: float) -> None:
        def action() -> None:
            raise OSError(number, os.strerror(number))

        with pytest.raises(OSError, match=os.strerror(number)):
            with_retries(action, patience)


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}
