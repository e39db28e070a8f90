"""Download a small dataset from a server on this machine, and check every step."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedbudget.data.download import Progress, Source
from fedbudget.data.download import archive as archive_of
from fedbudget.data.download import mirror as mirror_of
from fedbudget.data.published import dataset_named, get
from fedbudget.errors import UserError
from support.web import Web

# Random bytes: they do not compress, and are larger than one read buffer.
LARGE = np.random.default_rng(0).bytes(400_000)
CONTENTS = {"large.bin": LARGE, "little.bin": b"little"}
ZIPPED = {
    f"{name}.gz": gzip.compress(contents, mtime=0) for name, contents in CONTENTS.items()
}
HERE = {f"small/{name}": contents for name, contents in ZIPPED.items()}
PLAIN = {f"small/{name}": contents for name, contents in CONTENTS.items()}


class CheckingProgress(Progress):
    """Checks at every step that files with their final name are complete.

    Args:
      stop_at: number of bytes after which the download is interrupted.
    """

    def __init__(self, folder: Path, stop_at: int | None = None) -> None:
        self._folder = folder / "small"
        self._stop_at = stop_at
        self.most = 0
        self.names: list[str] = []

    def on_bytes(self, name: str, done: int, total: int | None) -> None:
        self.most = max(self.most, done)
        self._look()
        if self._stop_at is not None and done >= self._stop_at:
            raise KeyboardInterrupt

    def on_file(self, name: str) -> None:
        self.names.append(name)
        self._look()

    def _look(self) -> None:
        for file in dataset_named("small").files:
            for path in (self._folder / file.name, self._folder / f"{file.name}.gz"):
                assert not path.exists() or file.matches(path)


def fetch(folder: Path, *sources: Source) -> dict[str, Path]:
    return get("small", folder, CheckingProgress(folder), sources)


def failure(folder: Path, *sources: Source) -> str:
    with pytest.raises(UserError) as error:
        fetch(folder, *sources)
    message = str(error.value)
    assert "\n" not in message
    return message


def folder_contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def mirror(web: Web) -> Source:
    return mirror_of(web.url, ".gz")


def archive(web: Web, name: str) -> Source:
    return archive_of(web.url + name, "dir/{name}", limit=1_000_000)


def write_partial(folder: Path, contents: bytes, name: str = "large.bin.gz.part") -> None:
    (folder / "small").mkdir()
    (folder / "small" / name).write_bytes(contents)
