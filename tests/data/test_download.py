"""Downloads from servers on this machine: contents are checked, broken transfers resume,
failed sources are replaced.
"""

import csv
import gzip
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xlwt

from fedbudget import __version__
from fedbudget.data.download import Unavailable, knowledge_csv, knowledge_table
from fedbudget.data.download import archive as archive_of
from fedbudget.data.download import mirror as mirror_of
from fedbudget.data.published import PUBLISHED, dataset_named, files_in, get
from fedbudget.errors import UserError
from support.fetching import (
    CONTENTS,
    HERE,
    LARGE,
    PLAIN,
    ZIPPED,
    CheckingProgress,
    archive,
    failure,
    fetch,
    folder_contents,
    mirror,
    write_partial,
)
from support.real_data import folder_with
from support.web import Web, dataset_of, serving, tar_of

pytestmark = pytest.mark.usefixtures("small")

LOST = 1 << 14  # bytes that a broken connection may lose
PART = "small/large.bin.gz.part"
ARCHIVE = tar_of({f"dir/{name}": contents for name, contents in CONTENTS.items()})
WRONG = {name: gzip.compress(b"something else") for name in ZIPPED}
SPREADSHEET = "Data_User_Modeling_Dataset_Hamdi Tolga KAHRAMAN.xls"
HEADER = ["STG", "SCG", "STR", "LPR", "PEG", " UNS"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the small dataset, and use no proxy."""
    monkeypatch.setitem(PUBLISHED, "small", dataset_of(CONTENTS))
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(ZIPPED) as web:
        yield web


@pytest.fixture
def other() -> Iterator[Web]:
    with serving(ZIPPED) as web:
        yield web


def test_files_are_downloaded_once(web: Web, tmp_path: Path) -> None:
    """Files are stored in the form in which they were sent."""
    progress = CheckingProgress(tmp_path)
    result = get("small", tmp_path, progress, [mirror(web)])
    assert result == {name: tmp_path / f"small/{name}.gz" for name in CONTENTS}
    assert folder_contents(tmp_path) == HERE
    assert progress.names == ["large.bin", "little.bin"]
    assert {request.agent for request in web.requests} == {f"fedbudget/{__version__}"}
    assert len(web.requests) == 2
    assert fetch(tmp_path, mirror(web)) == result
    assert len(web.requests) == 2


def test_broken_download_resumes(web: Web, tmp_path: Path) -> None:
    web.cut["large.bin.gz"] = 150_000
    size = len(ZIPPED["large.bin.gz"])
    message = failure(tmp_path, mirror(web))
    kept = len(folder_contents(tmp_path)[PART])
    assert 150_000 - LOST <= kept <= 150_000
    assert f"broke off after {kept:,} of {size:,} bytes" in message
    assert folder_contents(tmp_path) == {
        PART: ZIPPED["large.bin.gz"][:kept],
        "small/little.bin.gz": ZIPPED["little.bin.gz"],
    }
    web.cut.clear()
    web.requests.clear()
    fetch(tmp_path, mirror(web))
    assert [(request.path, request.range, request.sent) for request in web.requests] == [
        ("large.bin.gz", f"bytes={kept}-", size - kept)
    ]
    assert folder_contents(tmp_path) == HERE


def test_interrupted_download_resumes(web: Web, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        get("small", tmp_path, CheckingProgress(tmp_path, stop_at=100_000), [mirror(web)])
    kept = folder_contents(tmp_path)[PART]
    assert len(kept) >= 100_000
    assert ZIPPED["large.bin.gz"].startswith(kept)
    fetch(tmp_path, mirror(web))
    assert web.requests[1].range == f"bytes={len(kept)}-"
    assert folder_contents(tmp_path) == HERE


def test_other_mirror_resumes(web: Web, other: Web, tmp_path: Path) -> None:
    web.cut["large.bin.gz"] = 150_000
    fetch(tmp_path, mirror(web), mirror(other))
    (request,) = other.requests
    assert request.path == "large.bin.gz"
    assert request.sent <= len(ZIPPED["large.bin.gz"]) - 150_000 + LOST
    assert folder_contents(tmp_path) == HERE


@pytest.mark.parametrize("manner", ["ignores_range", "wrong_range", "refuses_range"])
def test_server_without_ranges_restarts(manner: str, web: Web, tmp_path: Path) -> None:
    write_partial(tmp_path, ZIPPED["large.bin.gz"][:1000])
    setattr(web, manner, True)
    fetch(tmp_path, mirror(web))
    assert web.requests[0].range == "bytes=1000-"
    assert folder_contents(tmp_path) == HERE


def test_complete_part_is_not_resent(web: Web, tmp_path: Path) -> None:
    write_partial(tmp_path, ZIPPED["large.bin.gz"])
    fetch(tmp_path, mirror(web))
    assert [request.sent for request in web.requests] == [0, len(ZIPPED["little.bin.gz"])]
    assert folder_contents(tmp_path) == HERE


@pytest.mark.parametrize("size", [1000, 10_000_000])
def test_wrong_part_is_replaced(size: int, web: Web, tmp_path: Path) -> None:
    write_partial(tmp_path, bytes(size))
    fetch(tmp_path, mirror(web))
    assert folder_contents(tmp_path) == HERE


def test_wrong_contents_use_next_source(web: Web, other: Web, tmp_path: Path) -> None:
    web.files = WRONG
    assert "large.bin has wrong contents, little.bin has wrong contents" in failure(
        tmp_path, mirror(web)
    )
    assert folder_contents(tmp_path) == {}
    fetch(tmp_path, mirror(web), mirror(other))
    assert folder_contents(tmp_path) == HERE


@pytest.mark.parametrize(
    "body",
    [b"<html>not found</html>", gzip.compress(LARGE[:6] + bytes(100_000_000))],
    ids=["no gzip", "gzip bomb"],
)
def test_other_bodies_are_rejected(body: bytes, web: Web, tmp_path: Path) -> None:
    web.files = dict.fromkeys(ZIPPED, body)
    assert "has wrong contents" in failure(tmp_path, mirror(web))
    assert folder_contents(tmp_path) == {}


def test_next_source_sends_missing_files(web: Web, other: Web, tmp_path: Path) -> None:
    del web.files["little.bin.gz"]
    fetch(tmp_path, mirror(web), mirror(other))
    assert other.paths == ["little.bin.gz"]
    assert folder_contents(tmp_path) == HERE


def test_complete_files_stay_after_failure(web: Web, tmp_path: Path) -> None:
    del web.files["little.bin.gz"]
    assert failure(tmp_path, mirror(web)).startswith(
        "1 of 2 files of small could not be downloaded: 127.0.0.1:"
    )
    assert folder_contents(tmp_path) == {"small/large.bin.gz": ZIPPED["large.bin.gz"]}


def test_failure_lists_every_source(web: Web, other: Web, tmp_path: Path) -> None:
    web.files = {}
    other.files = WRONG
    hosts = [url.removeprefix("http://").removesuffix("/") for url in (web.url, other.url)]
    with serving({}) as gone:
        pass
    assert failure(tmp_path, mirror(web), mirror(other), mirror_of(gone.url)) == (
        f"small could not be downloaded: {hosts[0]}: 404 Not Found; "
        f"{hosts[1]}: large.bin has wrong contents, little.bin has wrong contents; "
        f"{gone.url.removeprefix('http://').removesuffix('/')}: Connection refused"
    )
    assert not (tmp_path / "small").exists()
    assert failure(tmp_path).endswith("small could not be downloaded: there is no source")


def test_endless_response_is_stopped(web: Web, tmp_path: Path) -> None:
    web.endless = True
    progress = CheckingProgress(tmp_path)
    with pytest.raises(UserError, match="sends more than 401,424 bytes for large"):
        get("small", tmp_path, progress, [mirror(web)])
    assert 0 < progress.most <= 400_000 + 400 + 1024
    assert folder_contents(tmp_path) == {}


def test_large_content_length_is_rejected(web: Web, tmp_path: Path) -> None:
    web.files = dict.fromkeys(ZIPPED, bytes(2_000_000))
    progress = CheckingProgress(tmp_path)
    with pytest.raises(UserError, match="wants to send 2,000,000 bytes"):
        get("small", tmp_path, progress, [mirror(web)])
    assert progress.most == 0
    assert folder_contents(tmp_path) == {}


def test_plain_files_stay_plain(web: Web, tmp_path: Path) -> None:
    web.files = CONTENTS
    fetch(tmp_path, mirror_of(web.url))
    assert folder_contents(tmp_path) == PLAIN


@pytest.mark.parametrize(("option", "value"), [("no_length", True), ("encoding", "gzip")])
def test_unusual_headers(option: str, value: Any, web: Web, tmp_path: Path) -> None:
    """No length, or gzip as the encoding of a `.gz`, which a client would unzip in
    transit.
    """
    setattr(web, option, value)
    fetch(tmp_path, mirror(web))
    assert folder_contents(tmp_path) == HERE


def test_redirects_keep_the_range(web: Web, tmp_path: Path) -> None:
    web.moved = True
    write_partial(tmp_path, ZIPPED["large.bin.gz"][:1000])
    fetch(tmp_path, mirror(web))
    assert [request.range for request in web.requests[:2]] == ["bytes=1000-"] * 2
    assert folder_contents(tmp_path) == HERE


def test_requests_is_imported_lazily() -> None:
    """It takes long to load, and most commands never download."""
    program = "import sys, fedbudget.cli.main, fedbudget.data.published\n"
    program += "sys.exit('requests' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


class TestExistingFiles:
    def test_right_contents_are_kept(self, web: Web, tmp_path: Path) -> None:
        (tmp_path / "SMALL/raw").mkdir(parents=True)
        for name, contents in CONTENTS.items():
            (tmp_path / "SMALL/raw" / name).write_bytes(contents)
        assert fetch(tmp_path, mirror(web)) == {
            name: tmp_path / f"SMALL/raw/{name}" for name in CONTENTS
        }
        assert web.requests == []

    def test_wrong_contents_are_replaced(self, web: Web, tmp_path: Path) -> None:
        """The new file may have another form."""
        (tmp_path / "small").mkdir()
        (tmp_path / "small/large.bin").write_bytes(b"damaged")
        (tmp_path / "small/little.bin").write_bytes(CONTENTS["little.bin"])
        get("small", tmp_path, sources=[mirror(web)])
        assert web.paths == ["large.bin.gz"]
        assert folder_contents(tmp_path) == {
            "small/large.bin.gz": ZIPPED["large.bin.gz"],
            "small/little.bin": CONTENTS["little.bin"],
        }

    def test_wrong_contents_stay_without_source(self, web: Web, tmp_path: Path) -> None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small/large.bin").write_bytes(b"damaged")
        with pytest.raises(UserError):
            get("small", tmp_path, sources=[])
        assert folder_contents(tmp_path) == {"small/large.bin": b"damaged"}

    def test_unwritable_folder(self, web: Web, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        message = "file/small cannot be written to: Not a directory"
        with pytest.raises(UserError, match=message):
            get("small", tmp_path / "file", sources=[mirror(web)])
        assert web.requests == []


class TestSources:
    def test_default_sources(
        self, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            PUBLISHED, "small", replace(dataset_named("small"), sources=(mirror(web),))
        )
        get("small", tmp_path)
        assert folder_contents(tmp_path) == HERE


class TestArchive:
    def test_only_named_tar_members_written(self, web: Web, tmp_path: Path) -> None:
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
        get("small", folder, CheckingProgress(folder), [archive(web, "all.tar.gz")])
        assert folder_contents(tmp_path) == {
            f"a/b/{name}": contents for name, contents in PLAIN.items()
        }
        assert not list(tmp_path.rglob(".*"))

    def test_zip_members(self, web: Web, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("../evil", b"evil")
            for name, contents in CONTENTS.items():
                file.writestr(f"dir/{name}", contents)
        web.files["all.zip"] = buffer.getvalue()
        fetch(tmp_path, archive(web, "all.zip"))
        assert folder_contents(tmp_path) == PLAIN

    def test_broken_archive_resumes(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = ARCHIVE
        web.cut["all.tar.gz"] = 123_456
        assert "broke off after 1" in failure(tmp_path, archive(web, "all.tar.gz"))
        ((name, kept),) = folder_contents(tmp_path).items()
        assert name == "small/all.tar.gz.part"
        web.cut.clear()
        fetch(tmp_path, archive(web, "all.tar.gz"))
        assert web.requests[-1].range == f"bytes={len(kept)}-"
        assert folder_contents(tmp_path) == PLAIN

    def test_part_removed_after_other_source(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = ARCHIVE
        web.cut["all.tar.gz"] = 123_456
        fetch(tmp_path, archive(web, "all.tar.gz"), mirror(web))
        assert folder_contents(tmp_path) == HERE

    def test_link_is_not_a_file(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = tar_of(
            {"dir/large.bin": "/etc/hostname", "dir/little.bin": CONTENTS["little.bin"]}
        )
        assert "has no large.bin" in failure(tmp_path, archive(web, "all.tar.gz"))
        assert folder_contents(tmp_path) == {"small/little.bin": CONTENTS["little.bin"]}

    def test_oversized_member_is_rejected(self, web: Web, tmp_path: Path) -> None:
        """The other members stay."""
        web.files["all.tar.gz"] = tar_of(
            {"dir/large.bin": LARGE + b"x", "dir/little.bin": CONTENTS["little.bin"]}
        )
        assert "large.bin is larger than the expected" in failure(
            tmp_path, archive(web, "all.tar.gz")
        )
        assert folder_contents(tmp_path) == {"small/little.bin": CONTENTS["little.bin"]}

    @pytest.mark.parametrize("name", ["all.tar.gz", "all.zip"])
    def test_damaged_archive_is_removed(self, name: str, web: Web, tmp_path: Path) -> None:
        web.files[name] = ARCHIVE[:200_000]
        assert f"{name} is damaged" in failure(tmp_path, archive(web, name))
        assert folder_contents(tmp_path) == {}

    def test_wrong_archive_part_is_replaced(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = ARCHIVE
        write_partial(tmp_path, bytes(1000), "all.tar.gz.part")
        fetch(tmp_path, archive(web, "all.tar.gz"))
        assert folder_contents(tmp_path) == PLAIN


class TestKnowledgeSheets:
    def test_sheets_become_one_table(self) -> None:
        """Remarks are dropped, and both spellings of "very low" become one."""
        train: list[list[object]] = [
            [*HEADER, "", "Remarks"],
            [0.0, 0.08, 1.0, 0.325, 0.9, "very_low", "", "of the authors"],
        ]
        blank: list[object] = ["", "", "", "", "", "", "", "more"]
        test: list[list[object]] = [
            ["remark", *HEADER],
            ["", 0.1, 0.2, 0.3, 0.4, 0.5, "Very Low"],
            ["", 1.0, 1.0, 1.0, 1.0, 1.0, " High "],
        ]
        assert knowledge_csv([[*train, blank], test]).splitlines() == [
            "STG,SCG,STR,LPR,PEG,UNS",
            "0,0.08,1,0.325,0.9,very_low",
            "0.1,0.2,0.3,0.4,0.5,very_low",
            "1,1,1,1,1,High",
        ]

    def test_unexpected_sheets_are_rejected(self) -> None:
        with pytest.raises(Unavailable, match="a sheet has no column PEG"):
            knowledge_csv([[["STG", "SCG", "STR", "LPR", "UNS"]]])
        with pytest.raises(Unavailable, match="instead of five numbers and a level"):
            knowledge_csv([[HEADER, [0.1, "", 0.2, 0.3, 0.4, "Low"]]])
        with pytest.raises(Unavailable, match="a sheet has no column LPR"):
            knowledge_csv([[]])

    def test_spreadsheet_is_converted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = (
            b"STG,SCG,STR,LPR,PEG,UNS\n"
            b"0.1,0.2,0.3,0.4,0.5,very_low\n"
            b"0,0,1,0.25,0.5,Middle\n"
        )
        monkeypatch.setitem(
            PUBLISHED, "small", dataset_of({"user_knowledge.csv": expected})
        )
        sheets = spreadsheet(
            [[0.1, 0.2, 0.3, 0.4, 0.5, "Very Low"]], [[0.0, 0.0, 1.0, 0.25, 0.5, "Middle"]]
        )
        result = convert("small", sheets, tmp_path)
        assert result["user_knowledge.csv"].read_bytes() == expected

    def test_real_table_round_trip(self, tmp_path: Path) -> None:
        path = files_in(dataset_named("user-knowledge"), folder_with("user-knowledge"))[
            "user_knowledge.csv"
        ]
        with path.open(newline="") as file:
            rows = [[*map(float, row[:5]), row[5]] for row in list(csv.reader(file))[1:]]
        test_rows = [
            [*row[:5], "Very Low" if row[5] == "very_low" else row[5]] for row in rows[258:]
        ]
        result = convert("user-knowledge", spreadsheet(rows[:258], test_rows), tmp_path)
        checksum = hashlib.sha256(result["user_knowledge.csv"].read_bytes()).hexdigest()
        assert (
            checksum == "86f11893ad1be525c0c2fd8dda9983bd6bf52c42416bcacdd7a77016b43dec4c"
        )

    @pytest.mark.parametrize(
        "contents",
        [b"", b"not a spreadsheet", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)],
    )
    def test_damaged_spreadsheet(self, contents: bytes, tmp_path: Path) -> None:
        message = r"127.0.0.1:.*: the spreadsheet cannot be read: "
        with pytest.raises(UserError, match=message):
            convert("user-knowledge", contents, tmp_path)

    def test_missing_extra_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "xlrd", None)
        with pytest.raises(UserError, match=r"needs pip install 'fedbudget\[xls\]'"):
            convert("user-knowledge", spreadsheet([], []), tmp_path)


def spreadsheet(
    train: Sequence[Sequence[object]], test: Sequence[Sequence[object]]
) -> bytes:
    book = xlwt.Workbook()
    for name, rows in (("Information", []), ("Training_Data", train), ("Test_Data", test)):
        sheet = book.add_sheet(name)
        for number, row in enumerate([HEADER, *rows]):
            for column, cell in enumerate(row):
                sheet.write(number, column, cell)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def convert(name: str, sheets: bytes, folder: Path) -> dict[str, Path]:
    """Convert a spreadsheet that a server sends in a zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(SPREADSHEET, sheets)
    with serving({"all.zip": buffer.getvalue()}) as web:
        url = f"{web.url}all.zip"
        source = archive_of(url, SPREADSHEET, 1_000_000, knowledge_table)
        return get(name, folder, sources=[source])
