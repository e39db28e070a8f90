"""Files from real servers: what comes is checked, what breaks off goes on, what fails falls
back.
"""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from fedbudget import __version__
from fedbudget.data.download import mirror as mirror_of
from fedbudget.data.published import get
from fedbudget.errors import UserError
from support.fetching import (
    CONTENTS,
    HERE,
    LARGE,
    PLAIN,
    ZIPPED,
    Watch,
    begin,
    everything,
    failure,
    fetch,
    mirror,
)
from support.web import Web, serving

pytestmark = pytest.mark.usefixtures("small")

LOST = 1 << 14  # bytes, at most, of a connection that breaks
PART = "small/large.bin.gz.part"
WRONG = {name: gzip.compress(b"something else") for name in ZIPPED}


def test_files_come_as_they_are_sent_and_only_once(web: Web, tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    found = get("small", tmp_path, watch, [mirror(web)])
    assert found == {name: tmp_path / f"small/{name}.gz" for name in CONTENTS}
    assert everything(tmp_path) == HERE
    assert watch.names == ["large.bin", "little.bin"]
    assert {request.agent for request in web.requests} == {f"fedbudget/{__version__}"}
    assert len(web.requests) == 2
    assert fetch(tmp_path, mirror(web)) == found
    assert len(web.requests) == 2


def test_what_breaks_off_goes_on_where_it_ended(web: Web, tmp_path: Path) -> None:
    web.cut["large.bin.gz"] = 150_000
    size = len(ZIPPED["large.bin.gz"])
    message = failure(tmp_path, mirror(web))
    kept = len(everything(tmp_path)[PART])
    assert 150_000 - LOST <= kept <= 150_000
    assert f"broke off after {kept:,} of {size:,} bytes" in message
    assert everything(tmp_path) == {
        PART: ZIPPED["large.bin.gz"][:kept],
        "small/little.bin.gz": ZIPPED["little.bin.gz"],
    }
    web.cut.clear()
    web.requests.clear()
    fetch(tmp_path, mirror(web))
    assert [(request.path, request.range, request.sent) for request in web.requests] == [
        ("large.bin.gz", f"bytes={kept}-", size - kept)
    ]
    assert everything(tmp_path) == HERE


def test_an_interrupt_leaves_what_came_for_the_next_time(web: Web, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        get("small", tmp_path, Watch(tmp_path, stop_at=100_000), [mirror(web)])
    kept = everything(tmp_path)[PART]
    assert len(kept) >= 100_000
    assert ZIPPED["large.bin.gz"].startswith(kept)
    fetch(tmp_path, mirror(web))
    assert web.requests[1].range == f"bytes={len(kept)}-"
    assert everything(tmp_path) == HERE


def test_another_mirror_goes_on_where_the_first_broke_off(
    web: Web, other: Web, tmp_path: Path
) -> None:
    web.cut["large.bin.gz"] = 150_000
    fetch(tmp_path, mirror(web), mirror(other))
    (request,) = other.requests
    assert request.path == "large.bin.gz"
    assert request.sent <= len(ZIPPED["large.bin.gz"]) - 150_000 + LOST
    assert everything(tmp_path) == HERE


@pytest.mark.parametrize("manner", ["ignores_range", "wrong_range", "refuses_range"])
def test_a_server_that_cannot_go_on_starts_over(
    manner: str, web: Web, tmp_path: Path
) -> None:
    begin(tmp_path, ZIPPED["large.bin.gz"][:1000])
    setattr(web, manner, True)
    fetch(tmp_path, mirror(web))
    assert web.requests[0].range == "bytes=1000-"
    assert everything(tmp_path) == HERE


def test_a_part_that_is_complete_is_not_sent_again(web: Web, tmp_path: Path) -> None:
    begin(tmp_path, ZIPPED["large.bin.gz"])
    fetch(tmp_path, mirror(web))
    assert [request.sent for request in web.requests] == [0, len(ZIPPED["little.bin.gz"])]
    assert everything(tmp_path) == HERE


@pytest.mark.parametrize("size", [1000, 10_000_000])
def test_a_beginning_of_something_else_is_dropped_and_the_same_server_asked_again(
    size: int, web: Web, tmp_path: Path
) -> None:
    begin(tmp_path, bytes(size))
    fetch(tmp_path, mirror(web))
    assert everything(tmp_path) == HERE


def test_wrong_contents_are_removed_and_the_next_source_is_asked(
    web: Web, other: Web, tmp_path: Path
) -> None:
    web.files = WRONG
    assert "large.bin has wrong contents, little.bin has wrong contents" in failure(
        tmp_path, mirror(web)
    )
    assert everything(tmp_path) == {}
    fetch(tmp_path, mirror(web), mirror(other))
    assert everything(tmp_path) == HERE


def test_what_is_not_gzip_at_all_is_wrong_contents_too(web: Web, tmp_path: Path) -> None:
    web.files = dict.fromkeys(ZIPPED, b"<html>not found</html>")
    assert "has wrong contents" in failure(tmp_path, mirror(web))
    assert everything(tmp_path) == {}


def test_the_next_source_is_asked_only_for_what_is_missing(
    web: Web, other: Web, tmp_path: Path
) -> None:
    del web.files["little.bin.gz"]
    fetch(tmp_path, mirror(web), mirror(other))
    assert other.paths == ["little.bin.gz"]
    assert everything(tmp_path) == HERE


def test_what_one_source_gave_stays_when_all_fail(web: Web, tmp_path: Path) -> None:
    del web.files["little.bin.gz"]
    assert failure(tmp_path, mirror(web)).startswith(
        "1 of 2 files of small could not be downloaded: 127.0.0.1:"
    )
    assert everything(tmp_path) == {"small/large.bin.gz": ZIPPED["large.bin.gz"]}


def test_no_source_is_one_line_that_says_of_each_why(
    web: Web, other: Web, tmp_path: Path
) -> None:
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


def test_bytes_without_end_are_refused_when_there_are_too_many(
    web: Web, tmp_path: Path
) -> None:
    web.endless = True
    watch = Watch(tmp_path)
    with pytest.raises(UserError, match="sends more than 401,424 bytes for large"):
        get("small", tmp_path, watch, [mirror(web)])
    assert 0 < watch.most <= 400_000 + 400 + 1024
    assert everything(tmp_path) == {}


def test_a_server_that_wants_to_send_too_much_is_not_listened_to(
    web: Web, tmp_path: Path
) -> None:
    web.files = dict.fromkeys(ZIPPED, bytes(2_000_000))
    watch = Watch(tmp_path)
    with pytest.raises(UserError, match="wants to send 2,000,000 bytes"):
        get("small", tmp_path, watch, [mirror(web)])
    assert watch.most == 0
    assert everything(tmp_path) == {}


def test_what_unzips_to_more_than_it_should_is_refused(web: Web, tmp_path: Path) -> None:
    web.files = dict.fromkeys(ZIPPED, gzip.compress(LARGE[:6] + bytes(100_000_000)))
    assert "wrong contents" in failure(tmp_path, mirror(web))
    assert everything(tmp_path) == {}


def test_a_server_need_not_say_how_much_it_sends(web: Web, tmp_path: Path) -> None:
    web.no_length = True
    fetch(tmp_path, mirror(web))
    assert everything(tmp_path) == HERE


def test_plain_files_come_plain(web: Web, tmp_path: Path) -> None:
    web.files = CONTENTS
    fetch(tmp_path, mirror_of(web.url))
    assert everything(tmp_path) == PLAIN


def test_what_is_said_to_be_encoded_stays_zipped(web: Web, tmp_path: Path) -> None:
    """Some servers say of a `.gz` that gzip is its encoding: it would be unzipped on the
    way.
    """
    web.encoding = "gzip"
    fetch(tmp_path, mirror(web))
    assert everything(tmp_path) == HERE


def test_a_server_may_send_on(web: Web, tmp_path: Path) -> None:
    web.moved = True
    begin(tmp_path, ZIPPED["large.bin.gz"][:1000])
    fetch(tmp_path, mirror(web))
    assert [request.range for request in web.requests[:2]] == ["bytes=1000-"] * 2
    assert everything(tmp_path) == HERE


def test_libraries_for_fetching_are_loaded_late() -> None:
    """They take long to load, and most commands never fetch."""
    program = "import sys, fedbudget.cli.main, fedbudget.data.published\n"
    program += "sys.exit('requests' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
