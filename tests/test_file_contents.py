"""Contents of plain, zipped and archived files: damaged files raise an error."""

import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.data.download import File
from fedbudget.errors import UserError
from fedbudget.file_contents import open_contents
from support.web import tar_of

CONTENTS = bytes(range(256)) * 40
FILE = File("a.bin", len(CONTENTS), hashlib.sha256(CONTENTS).hexdigest())


class TestOpenContents:
    @pytest.mark.parametrize("form", ["a.bin", "a.bin.gz", "small.tar.gz"])
    def test_all_forms(self, form: str, tmp_path: Path) -> None:
        path = written(tmp_path, form)
        with open_contents(path, "a.bin") as stream:
            assert stream.read() == CONTENTS
        assert FILE.matches(path)
        assert not replace(FILE, sha256=hashlib.sha256(b"other").hexdigest()).matches(path)

    def test_archive_member_without_extraction(self, tmp_path: Path) -> None:
        members: dict[str, bytes | str] = {
            "../../a.bin": b"first",
            "dir/b.bin": "/etc/passwd",
            "dir/c.bin": b"cc",
        }
        (tmp_path / "deep/er").mkdir(parents=True)
        path = tmp_path / "deep/er/small.tar.gz"
        path.write_bytes(tar_of(members))
        with open_contents(path, "c.bin") as stream:
            assert stream.read() == b"cc"
        with (
            pytest.raises(UserError, match=r"has no file b\.bin"),
            open_contents(path, "b.bin"),
        ):
            pass
        assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]

    def test_missing_file(self, tmp_path: Path) -> None:
        with (
            pytest.raises(UserError, match=r"gone\.gz cannot be read"),
            open_contents(tmp_path / "gone.gz", "gone"),
        ):
            pass

    @pytest.mark.parametrize("form", ["a.bin.gz", "small.tar.gz"])
    @given(data=st.data())
    def test_damage_is_always_detected(
        self, form: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """The error names the path."""
        path = written(tmp_path_factory.mktemp("damaged"), form)
        whole = path.read_bytes()
        if data.draw(st.booleans()):
            path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        else:
            where = data.draw(st.integers(0, len(whole) - 1))
            path.write_bytes(
                whole[:where] + bytes([data.draw(st.integers(0, 255))]) + whole[where + 1 :]
            )
        contents, message = None, ""
        try:
            with open_contents(path, "a.bin") as stream:
                contents = stream.read()
        except UserError as error:
            message = str(error)
        assert (contents is None) == (str(path) in message)
        assert FILE.matches(path) == (contents == CONTENTS)

    @pytest.mark.parametrize("length", range(12))
    def test_archive_cut_within_header(self, length: int, tmp_path: Path) -> None:
        path = written(tmp_path, "small.tar.gz")
        path.write_bytes(path.read_bytes()[:length])
        with (
            pytest.raises(UserError, match=r"small\.tar\.gz"),
            open_contents(path, "a.bin"),
        ):
            pass

    def test_wrong_length_does_not_match(self, tmp_path: Path) -> None:
        path = written(tmp_path, "a.bin.gz")
        path.write_bytes(gzip.compress(CONTENTS + b"x"))
        assert not FILE.matches(path)
        path.write_bytes(gzip.compress(CONTENTS[:-1]))
        assert not FILE.matches(path)

    def test_errors_of_the_caller_pass(self, tmp_path: Path) -> None:
        with (
            pytest.raises(OSError, match="disk is full"),
            open_contents(written(tmp_path, "a.bin.gz"), "a.bin"),
        ):
            raise OSError("disk is full")


def written(folder: Path, form: str) -> Path:
    path = folder / form
    if form.endswith(".tar.gz"):
        path.write_bytes(
            tar_of(
                {"./small/b.bin": b"b", "./small/a.bin": CONTENTS, "./small/c.bin": b"cc"}
            )
        )
    else:
        path.write_bytes(gzip.compress(CONTENTS) if form.endswith(".gz") else CONTENTS)
    return path
