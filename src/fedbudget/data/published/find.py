"""Where published datasets are looked for: `--data-dir`, then `FEDBUDGET_DATA`, then the user's cache folder.

A dataset comes from one place, and there from one folder or archive, so that copies of different kinds are not mixed.
Finding looks at names alone; what the files hold is for the reader, or for `fedbudget data check`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.errors import UserError

if TYPE_CHECKING:
    from fedbudget.data.published.catalogue import PublishedDataset


class DatasetMissing(UserError):
    """No file of a dataset is in any of the places."""


def find(name: str, data_dir: Path | None) -> dict[str, Path]:
    """Where each file of a dataset lies: itself, with `.gz`, or the archive that holds it. Missing ones are left out.

    Raises:
      DatasetMissing: no place has any of them.
    """
    from fedbudget.data.published.catalogue import dataset_named  # slow to import, with all that fetching needs

    dataset, folders = dataset_named(name), places(data_dir)
    for _, folder in folders:
        if paths := files_in(dataset, folder):
            return paths
    where = ", ".join(f"{folder} ({what})" for what, folder in folders)
    raise DatasetMissing(f"{name} is not here: looked in {where}; fedbudget data get {name} fetches it")


def places(data_dir: Path | None) -> list[tuple[str, Path]]:
    """The folders to look in, the first one first, each with what it is."""
    from platformdirs import user_cache_path

    chosen = [] if data_dir is None else [("--data-dir", data_dir.expanduser())]
    if variable := os.environ.get("FEDBUDGET_DATA"):
        chosen.append(("FEDBUDGET_DATA", Path(variable).expanduser()))
    return [*chosen, ("the cache folder", user_cache_path("fedbudget"))]


def files_in(dataset: "PublishedDataset", place: Path) -> dict[str, Path]:
    """The files of a dataset in one place: in the folder that has the most of them, or else in an archive."""
    folders = [place / folder for folder in dataset.folders]
    candidates = [stored_in(folder, dataset) for folder in folders]
    if dataset.archive is not None:
        # Taken to be complete: to look inside would be to unzip all of it each time.
        archives = [folder / dataset.archive for folder in (place, *folders)]
        candidates += [{file.name: path for file in dataset.files} for path in archives if path.is_file()]
    return max(candidates, key=len)  # of equals the first


def stored_in(folder: Path, dataset: "PublishedDataset") -> dict[str, Path]:
    """The files of a dataset that lie in a folder, plain or zipped."""
    forms = [(file.name, folder / f"{file.name}{suffix}") for file in dataset.files for suffix in (".gz", "")]
    return {name: path for name, path in forms if path.is_file()}  # plain comes last, and stays


def container(paths: Mapping[str, Path]) -> Path:
    """What files lie in that belong together: their archive, or their folder."""
    path = next(iter(paths.values()))
    return path if path.name.endswith(".tar.gz") else path.parent
