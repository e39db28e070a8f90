"""Fetches a published dataset: its sources one after the other, each for what is still missing.

What one source gave stays, also when all fail in the end. Only files with the right contents ever get their names.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedbudget.data.published.catalogue import Published, named
from fedbudget.data.published.find import found_in
from fedbudget.data.published.sources import Source
from fedbudget.data.published.stored import PART, File, matches
from fedbudget.data.published.transfer import Progress, Silent, Unavailable
from fedbudget.errors import UserError

_SILENT = Silent()


def get(
    name: str, folder: Path, progress: Progress = _SILENT, sources: Sequence[Source] | None = None
) -> dict[str, Path]:
    """Fetches what is missing of a dataset, or has wrong contents.

    Args:
      name: of a published dataset.
      folder: of data; the dataset gets its own folder in it.
      progress: is told how it goes.
      sources: where to look; the dataset's own when not given.

    Returns:
      Where each file lies.
    """
    dataset = named(name)
    found = found_in(dataset, folder)
    if len(found) == len(dataset.files) and all(matches(found[file.name], file) for file in dataset.files):
        return found
    own = _made(folder / dataset.folders[0])
    missing, problems = _missing(dataset.files, own), []
    for source in dataset.sources if sources is None else sources:
        if not missing:
            break
        progress.trying(str(source))
        try:
            source.fetch(missing, own, progress)
        except Unavailable as problem:
            problems.append(f"{source}: {' '.join(str(problem).split())}")
        missing = _missing(missing, own)
    if missing:
        with suppress(OSError):
            own.rmdir()  # which it can only if nothing came
        raise UserError(_explanation(dataset, missing, problems))
    for part in own.glob(f"*{PART}"):
        part.unlink()  # of sources that broke off before another one had it all
    return found_in(dataset, folder)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error.strerror or error}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written to: Permission denied")
    return folder


def _missing(files: Sequence[File], folder: Path) -> list[File]:
    """The files that are not in a folder with the right contents."""
    return [file for file in files if not _is_here(file, folder)]


def _is_here(file: File, folder: Path) -> bool:
    # The plain form comes first, as it does when a dataset is looked for.
    forms = [path for path in (folder / file.name, folder / f"{file.name}.gz") if path.is_file()]
    return bool(forms) and matches(forms[0], file)


def _explanation(dataset: Published, missing: Sequence[File], problems: Sequence[str]) -> str:
    how_many = "" if len(missing) == len(dataset.files) else f"{len(missing)} of {len(dataset.files)} files of "
    return f"{how_many}{dataset.name} could not be fetched: {'; '.join(problems) or 'there is no source'}"
