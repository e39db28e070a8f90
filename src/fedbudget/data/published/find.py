"""Published datasets on this machine: where they are looked for, and how what is missing comes there.

They are looked for in `--data-dir`, then `FEDBUDGET_DATA`, then the user's cache folder. A dataset comes from one
place, and there from one folder or archive, so that copies of different kinds are not mixed. Finding looks at names
alone; what the files hold is for the reader, or for `fedbudget data check`.

What is missing is asked of the sources one after the other. What one source gave stays, also when all fail in the end.
Only files with the right contents ever get their names.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedbudget.data.contents import PART
from fedbudget.data.published.catalogue import PublishedDataset, dataset_named
from fedbudget.data.published.sources import Source
from fedbudget.data.published.transfer import File, Progress, Target
from fedbudget.errors import UserError


class DatasetMissing(UserError):
    """No file of a dataset is in any of the places."""


def find(name: str, data_dir: Path | None) -> dict[str, Path]:
    """Where each file of a dataset lies: itself, with `.gz`, or the archive that holds it. Missing ones are left out.

    Raises:
      DatasetMissing: no place has any of them.
    """
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


def files_in(dataset: PublishedDataset, place: Path) -> dict[str, Path]:
    """The files of a dataset in one place: in the folder that has the most of them, or else in an archive."""
    folders = [place / folder for folder in dataset.folders]
    candidates = [stored_in(folder, dataset) for folder in folders]
    if dataset.archive is not None:
        # Taken to be complete: to look inside would be to unzip all of it each time.
        archives = [folder / dataset.archive for folder in (place, *folders)]
        candidates += [{file.name: path for file in dataset.files} for path in archives if path.is_file()]
    return max(candidates, key=len)  # of equals the first


def stored_in(folder: Path, dataset: PublishedDataset) -> dict[str, Path]:
    """The files of a dataset that lie in a folder, plain or zipped."""
    forms = [(file.name, folder / f"{file.name}{suffix}") for file in dataset.files for suffix in (".gz", "")]
    return {name: path for name, path in forms if path.is_file()}  # plain comes last, and stays


def container(paths: Mapping[str, Path]) -> Path:
    """What files lie in that belong together: their archive, or their folder."""
    path = next(iter(paths.values()))
    return path if path.name.endswith(".tar.gz") else path.parent


def get(
    name: str, data_dir: Path, progress: Progress | None = None, sources: Sequence[Source] | None = None
) -> dict[str, Path]:
    """Fetches what is missing of a dataset, or has wrong contents.

    Args:
      name: of a published dataset.
      data_dir: gets a folder for the dataset.
      progress: is called as it goes.
      sources: where to look; the dataset's own when not given.

    Returns:
      Where each file lies.
    """
    dataset = dataset_named(name)
    if not _missing(dataset.files, paths := files_in(dataset, data_dir)):
        return paths
    target = Target(_writable(data_dir / dataset.folders[0]), progress or Progress())
    missing, problems = _missing(dataset.files, stored_in(target.folder, dataset)), []
    for source in dataset.sources if sources is None else sources:
        if not missing:
            break
        target.progress.on_source(source.name)
        try:
            source.fetch(missing, target)
        except UserError as problem:
            problems.append(f"{source.name}: {' '.join(str(problem).split())}")
        missing = _missing(missing, stored_in(target.folder, dataset))
    if missing:
        with suppress(OSError):
            target.folder.rmdir()  # which it can only if nothing came
        part = "" if len(missing) == len(dataset.files) else f"{len(missing)} of {len(dataset.files)} files of "
        raise UserError(f"{part}{name} could not be fetched: {'; '.join(problems) or 'there is no source'}")
    for left_over in target.folder.glob(f"*{PART}"):
        left_over.unlink()  # of sources that broke off before another one had it all
    return files_in(dataset, data_dir)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error.strerror or error}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written to: Permission denied")
    return folder


def _missing(files: Sequence[File], paths: dict[str, Path]) -> list[File]:
    """The files that are not there with the right contents."""
    return [file for file in files if file.name not in paths or not file.matches(paths[file.name])]
