"""Where published datasets are looked for: `--data-dir`, then `FEDBUDGET_DATA`, then the user's cache folder.

A dataset comes from one place, and there from one folder or archive, so that copies of different kinds are not mixed.
Finding looks at names alone; what the files hold is for the reader, or for `fedbudget data check`.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.data.published.stored import opened
from fedbudget.errors import UserError

if TYPE_CHECKING:
    from fedbudget.data.published.catalogue import Published

__all__ = ["NotHere", "find", "found_in", "opened", "places"]


class NotHere(UserError):
    """No file of a dataset is in any of the places."""


def find(name: str, data_dir: Path | None) -> dict[str, Path]:
    """Where each file of a dataset lies: itself, with `.gz`, or the archive that holds it. Missing ones are left out.

    Raises:
      NotHere: no place has any of them.
    """
    from fedbudget.data.published.catalogue import named  # slow to import, with all that fetching needs

    dataset = named(name)
    looked = places(data_dir)
    for _, folder in looked:
        if found := found_in(dataset, folder):
            return found
    where = ", ".join(f"{folder} ({what})" for what, folder in looked)
    raise NotHere(f"{name} is not here: looked in {where}; fedbudget data get {name} fetches it")


def places(data_dir: Path | None) -> list[tuple[str, Path]]:
    """The folders to look in, the first one first, each with what it is."""
    from platformdirs import user_cache_path

    chosen = [] if data_dir is None else [("--data-dir", data_dir.expanduser())]
    if variable := os.environ.get("FEDBUDGET_DATA"):
        chosen.append(("FEDBUDGET_DATA", Path(variable).expanduser()))
    return [*chosen, ("the cache folder", user_cache_path("fedbudget"))]


def found_in(dataset: "Published", place: Path) -> dict[str, Path]:
    """The files of a dataset in one place: in the folder that has the most of them, or else in an archive."""
    folders = [place / folder for folder in dataset.folders]
    candidates = [_files_in(dataset, folder) for folder in folders]
    if dataset.archive is not None:
        # Taken to be complete: to look inside would be to unzip all of it each time.
        archives = [folder / dataset.archive for folder in (place, *folders)]
        candidates += [{file.name: path for file in dataset.files} for path in archives if path.is_file()]
    return max(candidates, key=len)  # of equals the first


def _files_in(dataset: "Published", folder: Path) -> dict[str, Path]:
    forms = [(file.name, folder / f"{file.name}{suffix}") for file in dataset.files for suffix in (".gz", "")]
    return {name: path for name, path in forms if path.is_file()}  # plain comes last, and stays
