"""Archives and packages from real servers and processes: only what is expected is taken out
of them.
"""

import io
import zipfile
from pathlib import Path

import pytest

from fedbudget.data.published import get
from support.fetching import (
    CONTENTS,
    HERE,
    LARGE,
    PLAIN,
    Watch,
    archive,
    begin,
    everything,
    failure,
    fetch,
    mirror,
)
from support.web import Web, tar_of

pytestmark = pytest.mark.usefixtures("small")


class TestArchive:
    def test_members_of_a_tar_are_taken_by_name_and_nothing_else_is_written(
        self, web: Web, tmp_path: Path
    ) -> None:
        web.files["all.tar.gz"] = tar_of(
            {
                "../../evil": b"evil",
                "/tmp/little.bin": b"evil",
                "little.bin": b"elsewhere",
                "dir/readme": b"",
                "dir/little.bin": CONTENTS["little.bin"],
                "./dir/large.bin": LARGE,
            }
        )
        folder = tmp_path / "a/b"
        get("small", folder, Watch(folder), [archive(web, "all.tar.gz")])
        assert everything(tmp_path) == {
            f"a/b/{name}": contents for name, contents in PLAIN.items()
        }
        assert not list(tmp_path.rglob(".*"))

    def test_members_of_a_zip(self, web: Web, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("../evil", b"evil")
            for name, contents in CONTENTS.items():
                file.writestr(f"dir/{name}", contents)
        web.files["all.zip"] = buffer.getvalue()
        fetch(tmp_path, archive(web, "all.zip"))
        assert everything(tmp_path) == PLAIN

    def test_one_that_breaks_off_goes_on_and_leaves_nothing_behind(
        self, web: Web, tmp_path: Path
    ) -> None:
        web.files["all.tar.gz"] = tar_of(
            {f"dir/{name}": contents for name, contents in CONTENTS.items()}
        )
        web.cut["all.tar.gz"] = 123_456
        assert "broke off after 1" in failure(tmp_path, archive(web, "all.tar.gz"))
        ((name, kept),) = everything(tmp_path).items()
        assert name == "small/all.tar.gz.part"
        web.cut.clear()
        fetch(tmp_path, archive(web, "all.tar.gz"))
        assert web.requests[-1].range == f"bytes={len(kept)}-"
        assert everything(tmp_path) == PLAIN

    def test_the_part_of_one_source_is_removed_when_another_has_it_all(
        self, web: Web, tmp_path: Path
    ) -> None:
        web.files["all.tar.gz"] = tar_of(
            {f"dir/{name}": contents for name, contents in CONTENTS.items()}
        )
        web.cut["all.tar.gz"] = 123_456
        fetch(tmp_path, archive(web, "all.tar.gz"), mirror(web))
        assert everything(tmp_path) == HERE

    def test_a_link_is_not_a_file_and_what_is_missing_is_dataset_named(
        self, web: Web, tmp_path: Path
    ) -> None:
        web.files["all.tar.gz"] = tar_of(
            {"dir/large.bin": "/etc/hostname", "dir/little.bin": CONTENTS["little.bin"]}
        )
        assert "has no large.bin" in failure(tmp_path, archive(web, "all.tar.gz"))
        assert everything(tmp_path) == {"small/little.bin": CONTENTS["little.bin"]}

    def test_members_with_wrong_contents_or_too_many_are_refused_and_the_others_stay(
        self, web: Web, tmp_path: Path
    ) -> None:
        web.files["all.tar.gz"] = tar_of(
            {"dir/large.bin": LARGE + b"x", "dir/little.bin": CONTENTS["little.bin"]}
        )
        assert "large.bin is larger than the expected" in failure(
            tmp_path, archive(web, "all.tar.gz")
        )
        assert everything(tmp_path) == {"small/little.bin": CONTENTS["little.bin"]}

    @pytest.mark.parametrize("name", ["all.tar.gz", "all.zip"])
    def test_a_damaged_one_is_removed(self, name: str, web: Web, tmp_path: Path) -> None:
        whole = tar_of({f"dir/{name}": contents for name, contents in CONTENTS.items()})
        web.files[name] = whole[:200_000]
        assert f"{name} is damaged" in failure(tmp_path, archive(web, name))
        assert everything(tmp_path) == {}

    def test_a_beginning_of_something_else_is_dropped(
        self, web: Web, tmp_path: Path
    ) -> None:
        web.files["all.tar.gz"] = tar_of(
            {f"dir/{name}": contents for name, contents in CONTENTS.items()}
        )
        begin(tmp_path, bytes(1000), "all.tar.gz.part")
        fetch(tmp_path, archive(web, "all.tar.gz"))
        assert everything(tmp_path) == PLAIN
