"""Datasets are found where a person put them, in one piece."""

import gzip
from pathlib import Path

import pytest

from fedbudget.data.published import PUBLISHED, DatasetMissing, data_folders, find
from fedbudget.errors import UserError
from support.web import dataset_of

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
        (folder / name).write_bytes(
            gzip.compress(contents) if name.endswith(".gz") else contents
        )


class TestPlaces:
    def test_are_the_option_then_the_variable_then_the_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (what, cache), *others = data_folders(None)
        assert (what, others) == ("the cache folder", [])
        assert cache.is_relative_to(tmp_path)
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        option, variable = (
            ("--data-dir", tmp_path / "option"),
            ("FEDBUDGET_DATA", tmp_path / "variable"),
        )
        assert data_folders(tmp_path / "option") == [
            option,
            variable,
            ("the cache folder", cache),
        ]

    def test_an_empty_variable_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", "")
        assert [what for what, _ in data_folders(None)] == ["the cache folder"]

    def test_home_may_be_written_as_a_tilde(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", "~/data")
        assert [path for _, path in data_folders(Path("~/mine"))][:2] == [
            tmp_path / "home/mine",
            tmp_path / "home/data",
        ]


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
        assert find("small", tmp_path / "option") == {
            "b.bin": tmp_path / "option/small/b.bin"
        }
        assert set(find("small", tmp_path / "elsewhere")) == set(CONTENTS)

    def test_the_folder_with_the_most_files_is_taken_alone(self, tmp_path: Path) -> None:
        put(tmp_path / "small", "a.bin")
        put(tmp_path / "SMALL/raw", "b.bin", "c.bin.gz")
        assert {path.parent for path in find("small", tmp_path).values()} == {
            tmp_path / "SMALL/raw"
        }
        put(tmp_path / "small", "b.bin")
        assert {path.parent for path in find("small", tmp_path).values()} == {
            tmp_path / "small"
        }

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
        with pytest.raises(DatasetMissing):
            find("small", tmp_path)

    def test_nothing_anywhere_is_one_line_with_every_place_and_the_command_that_helps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        cache = data_folders(None)[-1][1]
        with pytest.raises(UserError) as error:
            find("small", tmp_path / "option")
        assert str(error.value) == (
            f"small was not found in {tmp_path}/option (--data-dir), {tmp_path}/variable (FEDBUDGET_DATA), "
            f"{cache} (the cache folder); download it with: fedbudget data get small"
        )

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(UserError, match="unknown dataset 'large'"):
            find("large", None)
