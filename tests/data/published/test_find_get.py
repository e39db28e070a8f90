"""A dataset is fetched from its sources in their order, and only what is missing."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.data.published import PUBLISHED, dataset_named, get
from fedbudget.errors import UserError
from support.fetching import CONTENTS, HERE, ZIPPED, everything, fetch, mirror
from support.web import Web

pytestmark = pytest.mark.usefixtures("small")


class TestWhatIsThere:
    def test_the_right_contents_in_any_known_folder_are_enough(
        self, web: Web, tmp_path: Path
    ) -> None:
        (tmp_path / "SMALL/raw").mkdir(parents=True)
        for name, contents in CONTENTS.items():
            (tmp_path / "SMALL/raw" / name).write_bytes(contents)
        assert fetch(tmp_path, mirror(web)) == {
            name: tmp_path / f"SMALL/raw/{name}" for name in CONTENTS
        }
        assert web.requests == []

    def test_wrong_contents_are_replaced_also_by_another_form(
        self, web: Web, tmp_path: Path
    ) -> None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small/large.bin").write_bytes(b"damaged")
        (tmp_path / "small/little.bin").write_bytes(CONTENTS["little.bin"])
        get("small", tmp_path, sources=[mirror(web)])
        assert web.paths == ["large.bin.gz"]
        assert everything(tmp_path) == {
            "small/large.bin.gz": ZIPPED["large.bin.gz"],
            "small/little.bin": CONTENTS["little.bin"],
        }

    def test_wrong_contents_stay_as_long_as_there_is_nothing_better(
        self, web: Web, tmp_path: Path
    ) -> None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small/large.bin").write_bytes(b"damaged")
        with pytest.raises(UserError):
            get("small", tmp_path, sources=[])
        assert everything(tmp_path) == {"small/large.bin": b"damaged"}

    def test_a_folder_that_cannot_be_made_is_an_error_for_a_person(
        self, web: Web, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(
            UserError, match="file/small cannot be written to: Not a directory"
        ):
            get("small", tmp_path / "file", sources=[mirror(web)])
        assert web.requests == []


class TestSources:
    def test_each_dataset_asks_its_publishers_first(self) -> None:
        names = {
            name: [source.name for source in dataset.sources]
            for name, dataset in PUBLISHED.items()
        }
        assert names == {
            "mnist": [
                "ossci-datasets.s3.amazonaws.com",
                "storage.googleapis.com",
            ],
            "fashion-mnist": [
                "fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "raw.githubusercontent.com",
            ],
            "cifar-10": ["www.cs.toronto.edu"],
            "energy": ["raw.githubusercontent.com", "archive.ics.uci.edu"],
            "user-knowledge": ["archive.ics.uci.edu"],
            "small": [],
        }

    def test_the_datasets_own_sources_are_asked_when_none_are_given(
        self, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            PUBLISHED, "small", replace(dataset_named("small"), sources=(mirror(web),))
        )
        get("small", tmp_path)
        assert everything(tmp_path) == HERE
