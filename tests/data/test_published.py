"""Published datasets: their catalogue, and the folders in which they are found."""

import gzip
import re
from pathlib import Path

import pytest

from fedbudget.data.published import (
    PUBLISHED,
    DatasetMissing,
    data_folders,
    dataset_named,
    files_in,
    find,
)
from fedbudget.errors import UserError
from support.real_data import folder_with
from support.web import dataset_of

CONTENTS = {"a.bin": bytes(range(256)) * 40, "b.bin": b"b", "c.bin": b"cc"}
SMALL = dataset_of(CONTENTS, archive="small.tar.gz")


@pytest.fixture
def small_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("small_dataset")
class TestFolders:
    def test_folder_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The option, then the variable, then the cache."""
        (label, cache), *others = data_folders(None)
        assert (label, others) == ("the cache folder", [])
        assert cache.is_relative_to(tmp_path)
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        option, variable = (
            ("--data-dir", tmp_path / "option"),
            ("FEDBUDGET_DATA", tmp_path / "variable"),
        )
        expected = [option, variable, ("the cache folder", cache)]
        assert data_folders(tmp_path / "option") == expected

    def test_empty_variable_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", "")
        assert [label for label, _ in data_folders(None)] == ["the cache folder"]

    def test_tilde_is_expanded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", "~/data")
        expected = [tmp_path / "home/mine", tmp_path / "home/data"]
        assert [path for _, path in data_folders(Path("~/mine"))][:2] == expected


@pytest.mark.usefixtures("small_dataset")
class TestFind:
    def test_plain_files_before_zipped(self, tmp_path: Path) -> None:
        put(tmp_path / "small", "a.bin.gz", "b.bin", "c.bin", "c.bin.gz")
        here = tmp_path / "small"
        assert find("small", tmp_path) == {
            "a.bin": here / "a.bin.gz",
            "b.bin": here / "b.bin",
            "c.bin": here / "c.bin",
        }

    def test_folders_are_not_mixed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Missing files are not taken from another folder."""
        put(tmp_path / "option/small", "b.bin")
        put(tmp_path / "variable/small", *CONTENTS)
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        assert find("small", tmp_path / "option") == {
            "b.bin": tmp_path / "option/small/b.bin"
        }
        assert set(find("small", tmp_path / "elsewhere")) == set(CONTENTS)

    def test_folder_with_most_files_wins(self, tmp_path: Path) -> None:
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
    def test_complete_files_before_archive(self, folder: str, tmp_path: Path) -> None:
        archive = tmp_path / folder / "small.tar.gz"
        put(tmp_path / "small", "a.bin", "b.bin")
        archive.parent.mkdir(parents=True, exist_ok=True)
        archive.write_bytes(b"not read")
        assert find("small", tmp_path) == dict.fromkeys(CONTENTS, archive)
        put(tmp_path / "small", *CONTENTS)
        assert find("small", tmp_path)["a.bin"] == tmp_path / "small/a.bin"

    def test_partial_files_and_folders_ignored(self, tmp_path: Path) -> None:
        put(tmp_path / "small")
        (tmp_path / "small/a.bin.part").write_bytes(CONTENTS["a.bin"])
        (tmp_path / "small/b.bin").mkdir()
        with pytest.raises(DatasetMissing):
            find("small", tmp_path)

    def test_missing_dataset_message(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        cache = data_folders(None)[-1][1]
        with pytest.raises(UserError) as error:
            find("small", tmp_path / "option")
        assert str(error.value) == (
            f"small was not found in {tmp_path}/option (--data-dir), {tmp_path}/variable "
            f"(FEDBUDGET_DATA), "
            f"{cache} (the cache folder); download it with: fedbudget data get small"
        )


def test_catalogue_entries() -> None:
    for name, dataset in PUBLISHED.items():
        assert dataset_named(name) is dataset
        assert dataset.name == name
        assert dataset.sources
        assert dataset.licence


def test_checksums_are_unique() -> None:
    checksums = [file.sha256 for dataset in PUBLISHED.values() for file in dataset.files]
    assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in checksums)
    assert len(set(checksums)) == len(checksums) == 16 + 2 + 12 + 4


def test_file_sizes_match_formats() -> None:
    """A header, then one byte per pixel or label."""
    for name in ("mnist", "fashion-mnist"):
        images, labels = 16 + 28 * 28 * 60_000, 8 + 60_000
        test_images, test_labels = 16 + 28 * 28 * 10_000, 8 + 10_000
        assert [file.size for file in dataset_named(name).files] == [
            images,
            labels,
            test_images,
            test_labels,
        ]
    assert {file.size for file in dataset_named("cifar-10").files} == {
        10_000 * (1 + 3 * 32 * 32)
    }


def test_unknown_name_lists_known_ones() -> None:
    message = "unknown dataset 'imagenet'; published ones are mnist, fashion-mnist, "
    with pytest.raises(UserError, match=message):
        dataset_named("imagenet")


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_files_match_checksums(name: str) -> None:
    paths = files_in(dataset_named(name), folder_with(name))
    for file in dataset_named(name).files:
        if file.name in paths:
            assert file.matches(paths[file.name]), file.name
