"""Fetches a published dataset: its sources one after the other, each for what is still missing.

What one source gave stays, also when all fail in the end. Only files with the right contents ever get their names.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedbudget.data.contents import PART
from fedbudget.data.published.catalogue import dataset_named
from fedbudget.data.published.find import files_in, stored_in
from fedbudget.data.published.sources import Source
from fedbudget.data.published.transfer import File, Progress, Target
from fedbudget.errors import UserError


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
