"""Datasets, and how they are distributed over nodes."""

from pathlib import Path

from fedbudget.data import files, natural
from fedbudget.data.builtin import DATASETS
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.natural import SITES
from fedbudget.data.read_tables import PLAIN
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError, unknown
from fedbudget.settings.option import choices_text


def load(
    name: str,
    options: TableOptions = PLAIN,
    *,
    test_share: float = 0.2,
    data_dir: str | Path | None = None,
    standardise: bool | None = None,
) -> Dataset:
    """Load a dataset by its name (see builtin.py) or by its path (see files.py).

    Args:
      name: the name, or the path of a table, a `.npz` or a folder.
      options, standardise: only for your own data, as in `files.load`.
      test_share: fraction to hold out of your own data, or of a natural federation.
      data_dir: the folder to search first for a named dataset.
    """
    if name in DATASETS:
        if standardise is not None:
            raise UserError(f"`standardise` is for your own data; {name} is used unchanged")
        if options.classes is not None:
            raise UserError(f"`classes` is for your own data; {name} has its own classes")
        folder = None if data_dir is None else Path(data_dir)
        if name not in SITES:
            options.require_unused(name)
            return DATASETS[name](folder)
        if options.site not in (None, SITES[name]):
            other = f"`partition` by:{options.site} does not fit {name}"
            raise UserError(f"{other}: it has by:{SITES[name]}")
        for option in ("target", "drop", "categorical", "impute"):
            if getattr(options, option):
                raise UserError(
                    f"`{option}` is for your own tables; {name} is used unchanged"
                )
        return natural.load(name, folder, test_share)
    path = Path(name)
    if path.suffix.lower() in files.ENDINGS or path.is_dir():
        return files.load(path, options, test_share=test_share, standardise=standardise)
    if path.exists():
        raise UserError(f"{path}: only {choices_text(files.ENDINGS)} files can be read")
    endings = choices_text(files.ENDINGS)
    use = f"use {', '.join(DATASETS)}, or the path of a {endings}, or of a folder"
    raise unknown("dataset", name, DATASETS, use)


__all__ = ["DATASETS", "Dataset", "Part", "load"]
