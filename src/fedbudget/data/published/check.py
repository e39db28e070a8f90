"""What a person has of a published dataset: by the names of files alone, or by their contents."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedbudget.data.published.catalogue import Published, named
from fedbudget.data.published.find import NotHere, find
from fedbudget.data.published.stored import matches

OK, MISSING, WRONG = "ok", "missing", "wrong contents"


@dataclass(frozen=True)
class State:
    """The state of a dataset.

    Args:
      dataset: which one.
      where: the folder or archive it lies in; None if no file was found.
      files: of each file whether it is ok, missing, or has wrong contents.
      not_here: where no file was found, what to tell a person.
    """

    dataset: Published
    where: Path | None
    files: Mapping[str, str]
    not_here: str = ""

    @property
    def complete(self) -> bool:
        return all(state == OK for state in self.files.values())

    @property
    def missing(self) -> list[str]:
        return self.named(MISSING)

    def named(self, state: str) -> list[str]:
        """The files that are in a state."""
        return [name for name, each in self.files.items() if each == state]


def look(name: str, data_dir: Path | None) -> State:
    """Which files are there; what they hold is not looked at."""
    dataset = named(name)
    try:
        found = find(name, data_dir)
    except NotHere as error:
        return State(dataset, None, {file.name: MISSING for file in dataset.files}, str(error))
    files = {file.name: OK if file.name in found else MISSING for file in dataset.files}
    return State(dataset, where(found), files)


def check(name: str, data_dir: Path | None) -> State:
    """The same with the contents of every file looked at."""
    seen = look(name, data_dir)
    if seen.where is None:
        return seen
    found = find(name, data_dir)
    checksums = {file.name: file for file in seen.dataset.files}
    wrong = {file: WRONG for file, path in found.items() if not matches(path, checksums[file])}
    return State(seen.dataset, seen.where, {**seen.files, **wrong})


def where(found: Mapping[str, Path]) -> Path:
    """What files lie in that were found together: their archive, or their folder."""
    path = next(iter(found.values()))
    return path if path.name.endswith(".tar.gz") else path.parent
