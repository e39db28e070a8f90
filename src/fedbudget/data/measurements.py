"""The paper's two tables of measurements: appliances' energy use, and users' knowledge. All samples are trained on."""

import csv
import io
from pathlib import Path

import numpy as np

from fedbudget.data.columns import Columns
from fedbudget.data.contents import at_most, open_contents
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.layout import Layout, LayoutColumn
from fedbudget.data.published.find import find
from fedbudget.data.read_tables import parse_csv
from fedbudget.data.tables import TableOptions, require_usable
from fedbudget.errors import UserError

_MOST_BYTES = 50_000_000  # four times the larger of the two
_LEVELS = ("very_low", "Low", "Middle", "High")


def energy(data_dir: Path | None) -> Dataset:
    """19,735 records of a house's sensors and weather, to predict the energy use of its appliances, in Wh.

    Features and target are standardised. There are no classes: the Cases distribute samples by clusters.
    """
    columns, layout = _read("energy", "energydata_complete.csv", data_dir, target="Appliances", without=("date",))
    if columns.numbers is None:
        raise UserError("energy: Appliances must be numbers")
    return Dataset("energy", Part(columns.x, values=columns.numbers), layout=layout).standardised()


def user_knowledge(data_dir: Path | None) -> Dataset:
    """403 students, each with five degrees of study and success in [0, 1], and one of four levels of knowledge."""
    columns, layout = _read("user-knowledge", "user_knowledge.csv", data_dir, target="UNS")
    number = {level.lower(): index for index, level in enumerate(_LEVELS)}
    names = [name.lower().replace(" ", "_") for name in columns.class_names or ()]
    unknown = sorted(set(names) - set(number))
    if unknown:
        raise UserError(f"user-knowledge: level {unknown[0]!r} is not one of {', '.join(_LEVELS)}")
    labels = np.array([number[name] for name in names], dtype=np.int64)
    part = Part(columns.x.astype(np.float32), labels)
    return Dataset("user-knowledge", part, classes=_LEVELS, layout=layout)


def _read(
    name: str, file: str, data_dir: Path | None, *, target: str, without: tuple[str, ...] = ()
) -> tuple[Columns, Layout]:
    path = find(name, data_dir)[file]
    with open_contents(path, file) as stream:
        contents = at_most(stream, _MOST_BYTES, path)
    try:
        text = contents.tobytes().decode("utf-8-sig")
        table = parse_csv(io.StringIO(text, newline=""), str(path), TableOptions(target, without))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    require_usable([table])
    layout = Layout(tuple(map(LayoutColumn, table.columns)), target, table.dropped)
    return table.samples(layout.encode(table)), layout
