"""Datasets are found where a person put them, in one piece; damaged files are errors, never wrong contents."""

import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.data.published.catalogue import PUBLISHED
from fedbudget.data.published.find import NotHere, find, opened, places
from fedbudget.data.published.stored import matches
from fedbudget.errors import UserError
from support.web import dataset_of, tar_of

CONTENTS = {"a.bin": bytes(range(256)) * 40, "b.bin": b"b", "c.bin": b"cc"}
SMALL = dataset_of(CONTENTS, archive="small.tar.gz")


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "small", SMALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDBUDGET_DATA", raising=False)


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        contents = CONTENTS[name.removesuffix(".gz")]
        (folder / name).write_bytes(gzip.compress(contents) if name.endswith(".gz") else contents)


class TestPlaces:
    def test_are_the_option_then_the_variable_then_the_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (what, cache), *others = places(None)
        assert (what, others) == ("the cache folder", [])
        assert cache.is_relative_to(tmp_path)
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        option, variable = ("--data-dir", tmp_path / "option"), ("FEDBUDGET_DATA", tmp_path / "variable")
        assert places(tmp_path / "option") == [option, variable, ("the cache folder", cache)]

    def test_an_empty_variable_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", "")
        assert [what for what, _ in places(None)] == ["the cache folder"]

    def test_home_may_be_written_as_a_tilde(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", "~/data")
        assert [path for _, path in places(Path("~/mine"))][:2] == [tmp_path / "home/mine", tmp_path / "home/data"]


class TestFind:
    def test_files_plain_or_zipped_and_plain_ones_first(self, tmp_path: Path) -> None:
        put(tmp_path / "small", "a.bin.gz", "b.bin", "c.bin", "c.bin.gz")
        here = tmp_path / "small"
        assert find("small", tmp_path) == {
            "a.bin": here / "a.bin.gz",
            "b.bin": here / "b.bin",
            "c.bin": here / "c.bin",
        }

    def test_missing_ones_are_left_out_and_not_made_up_from_another_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tmp_path / "option/small", "b.bin")
        put(tmp_path / "variable/small", *CONTENTS)
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        assert find("small", tmp_path / "option") == {"b.bin": tmp_path / "option/small/b.bin"}
        assert set(find("small", tmp_path / "elsewhere")) == set(CONTENTS)

    def test_the_folder_with_the_most_files_is_taken_alone(self, tmp_path: Path) -> None:
        put(tmp_path / "small", "a.bin")
        put(tmp_path / "SMALL/raw", "b.bin", "c.bin.gz")
        assert {path.parent for path in find("small", tmp_path).values()} == {tmp_path / "SMALL/raw"}
        put(tmp_path / "small", "b.bin")
        assert {path.parent for path in find("small", tmp_path).values()} == {tmp_path / "small"}

    @pytest.mark.parametrize("folder", ["", "small", "SMALL/raw"])
    def test_an_archive_stands_for_all_files_unless_they_are_there_themselves(
        self, folder: str, tmp_path: Path
    ) -> None:
        archive = tmp_path / folder / "small.tar.gz"
        put(tmp_path / "small", "a.bin", "b.bin")
        archive.parent.mkdir(parents=True, exist_ok=True)
        archive.write_bytes(b"not looked at")
        assert find("small", tmp_path) == dict.fromkeys(CONTENTS, archive)
        put(tmp_path / "small", *CONTENTS)
        assert find("small", tmp_path)["a.bin"] == tmp_path / "small/a.bin"

    def test_a_part_or_a_folder_is_not_a_file(self, tmp_path: Path) -> None:
        put(tmp_path / "small")
        (tmp_path / "small/a.bin.part").write_bytes(CONTENTS["a.bin"])
        (tmp_path / "small/b.bin").mkdir()
        with pytest.raises(NotHere):
            find("small", tmp_path)

    def test_nothing_anywhere_is_one_line_with_every_place_and_the_command_that_helps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        cache = places(None)[-1][1]
        with pytest.raises(UserError) as error:
            find("small", tmp_path / "option")
        assert str(error.value) == (
            f"small is not here: looked in {tmp_path}/option (--data-dir), {tmp_path}/variable (FEDBUDGET_DATA), "
            f"{cache} (the cache folder); fedbudget data get small fetches it"
        )

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(UserError, match="unknown dataset 'large'"):
            find("large", None)


class TestOpened:
    @pytest.mark.parametrize("form", ["a.bin", "a.bin.gz", "small.tar.gz"])
    def test_gives_the_contents_whatever_the_form(self, form: str, tmp_path: Path) -> None:
        path = written(tmp_path, form)
        with opened(path, "a.bin") as stream:
            assert stream.read() == CONTENTS["a.bin"]
        assert matches(path, SMALL.files[0])
        assert not matches(path, replace(SMALL.files[0], sha256=hashlib.sha256(b"other").hexdigest()))

    def test_a_member_is_found_by_its_name_and_nothing_is_extracted(self, tmp_path: Path) -> None:
        members: dict[str, bytes | str] = {"../../a.bin": b"first", "dir/b.bin": "/etc/passwd", "dir/c.bin": b"cc"}
        (tmp_path / "deep/er").mkdir(parents=True)
        path = tmp_path / "deep/er/small.tar.gz"
        path.write_bytes(tar_of(members))
        with opened(path, "c.bin") as stream:
            assert stream.read() == b"cc"
        with pytest.raises(UserError, match=r"has no file b\.bin"), opened(path, "b.bin"):
            pass
        assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]

    def test_a_file_that_is_gone_is_an_error_for_a_person(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"gone\.gz cannot be read"), opened(tmp_path / "gone.gz", "gone"):
            pass

    @pytest.mark.parametrize("form", ["a.bin.gz", "small.tar.gz"])
    @given(data=st.data())
    def test_what_is_damaged_is_an_error_that_names_the_path_and_never_taken_for_right(
        self, form: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = written(tmp_path_factory.mktemp("damaged"), form)
        whole = path.read_bytes()
        if data.draw(st.booleans()):
            path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        else:
            where = data.draw(st.integers(0, len(whole) - 1))
            path.write_bytes(whole[:where] + bytes([data.draw(st.integers(0, 255))]) + whole[where + 1 :])
        contents, message = None, ""
        try:
            with opened(path, "a.bin") as stream:
                contents = stream.read()
        except UserError as error:
            message = str(error)
        assert (contents is None) == (str(path) in message)
        assert matches(path, SMALL.files[0]) == (contents == CONTENTS["a.bin"])

    @pytest.mark.parametrize("length", range(12))
    def test_an_archive_cut_within_its_header_is_damaged(self, length: int, tmp_path: Path) -> None:
        path = written(tmp_path, "small.tar.gz")
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(UserError, match=r"small\.tar\.gz"), opened(path, "a.bin"):
            pass

    def test_what_goes_on_after_the_right_contents_does_not_match(self, tmp_path: Path) -> None:
        path = written(tmp_path, "a.bin.gz")
        path.write_bytes(gzip.compress(CONTENTS["a.bin"] + b"x"))
        assert not matches(path, SMALL.files[0])
        path.write_bytes(gzip.compress(CONTENTS["a.bin"][:-1]))
        assert not matches(path, SMALL.files[0])

    def test_errors_of_the_reader_are_its_own(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="disk is full"), opened(written(tmp_path, "a.bin.gz"), "a.bin"):
            raise OSError("disk is full")


def written(folder: Path, form: str) -> Path:
    path = folder / form
    if form.endswith(".tar.gz"):
        path.write_bytes(tar_of({"./small/b.bin": b"b", "./small/a.bin": CONTENTS["a.bin"], "./small/c.bin": b"cc"}))
    else:
        put(folder, form)
    return path
