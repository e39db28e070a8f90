"""Natural federations: published data of hospitals, stations, people or machines.

- Each dataset has a column that names the site of a row. By default, each site is a node.
- `read` returns the columns of a table by name, with missing cells. heart-disease is part
  of the package; the others are read from the files of `fedbudget data get`.
- Every site holds out a fifth of its rows for testing, drawn at random. A patient's
  recordings of one day, or neighbouring hours, can therefore be on both sides.
- Missing numbers become the mean of the training rows. Tables are standardised.
- Columns that would reveal the target are left out.

docs/guide/natural-federations.md lists sources and licences.
"""

import csv
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbudget import durable_files
from fedbudget.arrays import Float64
from fedbudget.data.agreement import class_sort_key
from fedbudget.data.columns import Columns, is_missing
from fedbudget.data.dataset import Dataset, hold_out
from fedbudget.data.files import from_columns, from_tables
from fedbudget.data.published import find
from fedbudget.data.read_tables import from_frame
from fedbudget.data.tables import RawTable, TableOptions
from fedbudget.errors import UserError
from fedbudget.file_contents import DAMAGED, at_most, open_contents
from fedbudget.settings.option import choices_text

TableColumns = Mapping[str, Sequence[str] | NDArray[Any]]
"""The columns of a table by name: texts, or numbers with NaN for missing ones."""

_MOST_BYTES = 10_000_000  # of one file
_YEARS = 5
_DAYS = 365.25  # in a year
_MOST_LIFE = 125  # cycles; a larger remaining life counts as this
_CONTEXT = 8  # characters before the one to predict
_FEWEST_CHARACTERS = 2000  # of a role
_MOST_CHARACTERS = 2000
_PNG = b"\x89PNG\r\n\x1a\n"
_SIDE = 105  # pixels of an Omniglot image
_BLOCK = 3  # pixels that become one
_MOST_PNG = 10_000  # bytes
_WINDS = (
    *("N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE"),
    *("S", "SSW", "SW", "WSW", "W", "WNW", "NW", "NNW"),
)


@dataclass(frozen=True)
class Federation:
    """A published table with a column of sites.

    Args:
      site: name of this column.
      target: column to predict.
      read: returns the columns, given the data folder to search first.
      categorical: columns with numbers that are categories.
    """

    site: str
    target: str
    read: Callable[[Path | None], TableColumns]
    categorical: tuple[str, ...] = ()

    @property
    def options(self) -> TableOptions:
        """How the table is read."""
        return TableOptions(
            self.target, categorical=self.categorical, impute="mean", site=self.site
        )

    def table(self, name: str, data_dir: Path | None) -> RawTable:
        """Return the table with its sites."""
        return from_frame(self.read(data_dir), name, self.options)


def heart_disease(_: Path | None) -> TableColumns:
    """920 patients of four hospitals; the target is whether they have heart disease.

    The published target has four degrees of disease. A cholesterol or a blood pressure of 0
    is a missing value: all patients in Switzerland have it.
    """
    with Path(__file__).with_name("heart-disease.csv").open(newline="") as file:
        columns = _columns(file)
    for name in ("trestbps", "chol"):
        columns[name] = ["" if text == "0" else text for text in columns[name]]
    degrees = columns.pop("num")
    return {**columns, "disease": ["no" if text == "0" else "yes" for text in degrees]}


def _tcga_brca(data_dir: Path | None) -> TableColumns:
    """352 patients with breast cancer in six regions; the target is death in five years.

    The region is that of the site in the patient's identifier. Patients whose observation
    ends alive within five years have no known target and are left out, as are patients of
    other regions.
    """
    paths = find("tcga-brca", data_dir)
    centers = _read_csv(paths, "centers.csv")
    regions = dict(zip(centers["TSS Code"], centers["Region"], strict=True))
    columns = _read_csv(paths, "brca.csv")
    site = np.array([regions[name.split("-")[1]] for name in columns.pop("pid")])
    died = _numbers(columns.pop("E")) == 1
    late = _numbers(columns.pop("T")) > _YEARS * _DAYS
    kept = (site != "Other") & (died | late)
    table: dict[str, Any] = {name: _numbers(texts)[kept] for name, texts in columns.items()}
    return {"region": site[kept], **table, "death": np.where(late[kept], "no", "yes")}


def _beijing_air(data_dir: Path | None) -> TableColumns:
    """412,029 hours at twelve stations; the target is log(1 + PM2.5) from the weather.

    Hours without PM2.5 are left out, and so are the other pollutants. Wind, hour and month
    are directions on a circle, as sine and cosine.
    """
    paths = find("beijing-air", data_dir)
    used = ("station", "PM2.5", "wd", *_WEATHER)
    parts = [_read_csv(paths, name, used) for name in sorted(paths)]
    columns = {name: [*chain(*(part[name] for part in parts))] for name in used}
    particles = _numbers(columns["PM2.5"])
    kept = ~np.isnan(particles)
    numbers = {name: _numbers(columns[name])[kept] for name in _WEATHER}
    angles = {wind: number / len(_WINDS) for number, wind in enumerate(_WINDS)}
    table: dict[str, Any] = {"station": np.array(columns["station"])[kept]}
    for name in ("TEMP", "PRES", "DEWP"):
        table[name] = numbers[name]
    table["log_rain"] = np.log1p(numbers["RAIN"])
    table["WSPM"] = numbers["WSPM"]
    wind = np.array([angles.get(text, np.nan) for text in columns["wd"]])[kept]
    turns = {"wind": wind, "hour": numbers["hour"] / 24, "month": numbers["month"] / 12}
    for name, turn in turns.items():
        table[f"{name}_sin"] = np.sin(2 * np.pi * turn)
        table[f"{name}_cos"] = np.cos(2 * np.pi * turn)
    return {**table, "log_PM2.5": np.log1p(particles[kept])}


_WEATHER = ("TEMP", "PRES", "DEWP", "WSPM", "RAIN", "hour", "month")


def _parkinsons(data_dir: Path | None) -> TableColumns:
    """5,875 voice recordings of 42 patients; the target is the motor UPDRS score.

    The total score contains the target. The published scores are interpolated between three
    visits, so the day of the recording is left out too.
    """
    columns = _read_csv(find("parkinsons", data_dir), "parkinsons_updrs.data")
    for name in ("test_time", "total_UPDRS"):
        del columns[name]
    patient = columns.pop("subject#")
    target = columns.pop("motor_UPDRS")
    return {"patient": patient, **columns, "motor_UPDRS": target}


def _cmapss(data_dir: Path | None) -> TableColumns:
    """20,631 cycles of 100 engines (FD001); the target is the remaining cycles.

    A remaining life above 125 cycles counts as 125: an engine does not wear at first.
    """
    name = "train_FD001.txt"
    rows = [line.split() for line in _text(find("cmapss", data_dir), name).splitlines()]
    if any(len(row) != len(_ENGINE_COLUMNS) for row in rows) or not rows:
        raise UserError(f"{name} must have {len(_ENGINE_COLUMNS)} numbers in every row")
    columns = dict(zip(_ENGINE_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    engine = _numbers(columns["engine"])
    cycle = _numbers(columns["cycle"])
    last = {number: cycle[engine == number].max() for number in np.unique(engine).tolist()}
    life = np.array([last[number] for number in engine.tolist()]) - cycle
    return {**columns, "remaining": life.clip(max=_MOST_LIFE)}


_ENGINE_COLUMNS = (
    *("engine", "cycle", "setting_1", "setting_2", "setting_3"),
    *(f"sensor_{number}" for number in range(1, 22)),
)

FEDERATIONS: Mapping[str, Federation] = {
    "heart-disease": Federation("hospital", "disease", heart_disease, ("cp", "restecg")),
    "tcga-brca": Federation("region", "death", _tcga_brca),
    "beijing-air": Federation("station", "log_PM2.5", _beijing_air),
    "parkinsons": Federation("patient", "motor_UPDRS", _parkinsons),
    "cmapss": Federation("engine", "remaining", _cmapss),
}
"""The federations with tables, by name."""


def table_dataset(
    name: str, data_dir: Path | None, test_share: float, seed: int = 0
) -> Dataset:
    """Return a federation of tables; see `load`."""
    federation = FEDERATIONS[name]
    table = federation.table(name, data_dir)
    dataset = from_tables(
        name, [table], federation.options, test_share=test_share, seed=seed
    )
    # The data are known: what their columns became needs no remark.
    return replace(dataset.standardised(), remarks=(), published=True)


def write_tables(name: str, data_dir: Path | None, folder: Path) -> list[Path]:
    """Write one `.csv` per site, such as the owner of the data would have.

    Args:
      name: of the federation.
      data_dir: the data folder to search first.
      folder: a new folder.

    Returns:
      The paths.
    """
    if name not in FEDERATIONS:
        known = choices_text(list(FEDERATIONS))
        raise UserError(f"{name} has no tables by site; use {known}")
    if folder.exists():
        raise UserError(f"{folder} exists already: choose a new folder")
    federation = FEDERATIONS[name]
    columns = dict(federation.read(data_dir))
    sites = np.asarray(columns.pop(federation.site))
    texts = [np.array(_cell_texts(values)) for values in columns.values()]
    folder.mkdir(parents=True)
    paths = []
    for site in sorted(set(sites.tolist()), key=class_sort_key):
        rows = np.flatnonzero(sites == site)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(each[rows].tolist() for each in texts), strict=True))
        paths.append(folder / f"{site}.csv")
        durable_files.replace(paths[-1], text.getvalue().encode())
    return paths


def _cell_texts(values: Sequence[str] | NDArray[Any]) -> list[str]:
    """Return the cells of a column, empty if they are missing."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return ["" if value != value else f"{value:.7g}" for value in values.tolist()]
    return list(map(str, values))


def shakespeare(data_dir: Path | None, test_share: float, seed: int = 0) -> Dataset:
    """The next character in the plays of Shakespeare, by role.

    A sample has the eight characters before it, each as one 0/1 feature per character of
    the alphabet. There are 99 roles with at least 2,000 characters, and up to 2,000
    samples of each.
    """
    text = _text(find("shakespeare", data_dir), "input.txt")
    speeches: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        role, colon, speech = block.strip().partition(":\n")
        if colon and "\n" not in role:
            speeches.setdefault(role, []).append(speech)
    symbols = sorted(set(text))
    number = {symbol: index for index, symbol in enumerate(symbols)}
    shards: dict[str, Columns] = {}
    for role in sorted(speeches):
        spoken = "\n".join(speeches[role])
        if len(spoken) >= _FEWEST_CHARACTERS:
            codes = np.array([number[symbol] for symbol in spoken], np.int64)
            codes = codes[: _MOST_CHARACTERS + _CONTEXT]
            windows = np.lib.stride_tricks.sliding_window_view(codes, _CONTEXT + 1)
            hot = windows[:, :-1, None] == np.arange(len(symbols))
            x = hot.reshape(len(windows), -1).astype(np.uint8)
            shards[role] = Columns(x, windows[:, -1].astype(np.float64))
    numbers = tuple(map(str, range(len(symbols))))
    names = tuple(symbol if symbol != "\n" else "newline" for symbol in symbols)
    names = tuple("space" if name == " " else name for name in names)
    dataset = _by_site("shakespeare", "role", shards, numbers, test_share, seed)
    return replace(dataset, classes=names, scale=1.0, published=True)


def omniglot(data_dir: Path | None, test_share: float, seed: int = 0) -> Dataset:
    """2,720 drawings of 136 characters from five alphabets, by the person who drew them.

    Each of the 20 people drew every character once. Images have 35x35 pixels with the
    share of ink, the means of 3x3 published pixels. A person's test samples are other
    characters than those of the next person, so that every character is trained.
    """
    name = "images_background_small1.zip"
    path = find("omniglot", data_dir)[name]
    drawings: dict[str, dict[str, NDArray[np.uint8]]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                place = PurePosixPath(member)
                if place.suffix == ".png":
                    drawer = place.stem.rpartition("_")[2]
                    with archive.open(member) as stream:
                        png = bytes(at_most(stream, _MOST_PNG, path))
                    own = drawings.setdefault(drawer, {})
                    character = "/".join(place.parent.parts[-2:])
                    own[character] = _ink(png, f"{path}: {member}")
    except (*DAMAGED, zipfile.BadZipFile, RuntimeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    classes = tuple(sorted({name for own in drawings.values() for name in own}))
    number = {name: index for index, name in enumerate(classes)}
    shards = {}
    for turn, drawer in enumerate(sorted(drawings)):
        own = drawings[drawer]
        order = np.roll(np.array(sorted(own)), turn * max(1, int(len(own) * test_share)))
        x = np.stack([own[name].ravel() for name in order])
        labels = np.array([number[name] for name in order], np.float64)
        shards[str(int(drawer))] = Columns(x, labels)
    numbers = tuple(map(str, range(len(classes))))
    dataset = _by_site("omniglot", "drawer", shards, numbers, test_share, seed)
    side = _SIDE // _BLOCK
    return replace(dataset, classes=classes, shape=(1, side, side), published=True)


SITES: Mapping[str, str] = {
    **{name: federation.site for name, federation in FEDERATIONS.items()},
    "shakespeare": "role",
    "omniglot": "drawer",
}
"""The column of sites of each natural federation."""


def load(
    name: str, data_dir: Path | None, test_share: float = 0.2, *, seed: int = 0
) -> Dataset:
    """Return a natural federation.

    Args:
      name: a key of `SITES`.
      data_dir: the data folder to search first.
      test_share: fraction of each site's samples to hold out for testing.
      seed: draws these samples.
    """
    if name in FEDERATIONS:
        return table_dataset(name, data_dir, test_share, seed)
    read = shakespeare if name == "shakespeare" else omniglot
    return read(data_dir, test_share, seed)


def _ink(png: bytes, name: str) -> NDArray[np.uint8]:
    """Return the ink of a black and white PNG, [35, 35] from 0 to 255."""
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 1, 0, 0, 0, 0)
    body = b""
    start = len(_PNG)
    while start + 8 <= len(png):
        size, kind = struct.unpack_from(">I4s", png, start)
        chunk = png[start + 8 : start + 8 + size]
        if kind == b"IHDR" and chunk != header:
            raise UserError(f"{name} is not a black and white PNG of {_SIDE}x{_SIDE}")
        if kind == b"IDAT":
            body += chunk
        start += 12 + size
    width = 1 + (_SIDE + 7) // 8  # a row starts with its filter
    lines = zlib.decompressobj().decompress(body, _SIDE * width)
    if not png.startswith(_PNG) or len(lines) < _SIDE * width or any(lines[::width]):
        raise UserError(f"{name} cannot be read as a PNG without filters")
    rows = np.frombuffer(lines, np.uint8).reshape(_SIDE, width)[:, 1:]
    ink = 1.0 - np.unpackbits(rows, axis=1)[:, :_SIDE]
    side = _SIDE // _BLOCK
    means = ink.reshape(side, _BLOCK, side, _BLOCK).mean(axis=(1, 3))
    return np.asarray((255 * means).round(), np.uint8)


def _by_site(
    name: str,
    column: str,
    shards: Mapping[str, Columns],
    classes: tuple[str, ...],
    test_share: float,
    seed: int,
) -> Dataset:
    """Return a dataset of arrays by site."""
    read = []
    for site in shards.values():
        kept, held = hold_out(len(site.x), test_share, seed)
        read.append((site.rows(kept), site.rows(held)))
    dataset = from_columns(name, read, TableOptions(classes=classes), tuple(shards))
    return replace(dataset, sites=tuple(shards), site_column=column, remarks=())


def _text(paths: Mapping[str, Path], name: str) -> str:
    if name not in paths:
        folder = next(iter(paths.values())).parent
        raise UserError(f"{name} is missing in {folder}: fetch the dataset again")
    with open_contents(paths[name], name) as stream:
        contents = at_most(stream, _MOST_BYTES, paths[name])
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{paths[name]} cannot be read: {error}") from None


def _read_csv(
    paths: Mapping[str, Path], name: str, used: Sequence[str] = ()
) -> dict[str, list[str]]:
    return _columns(io.StringIO(_text(paths, name), newline=""), used)


def _columns(lines: Iterable[str], used: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the columns of a `.csv` file with a header.

    Args:
      used: names of the columns to return; all by default.
    """
    reader = csv.reader(lines)
    header = next(reader, [])
    names = used or header
    pick = itemgetter(*map(header.index, names))
    columns = zip(*map(pick, filter(None, reader)), strict=True)
    return dict(zip(names, map(list, columns), strict=True))


def _numbers(texts: Sequence[str]) -> Float64:
    """Return numbers, NaN for missing cells."""
    number = {text: np.nan if is_missing(text) else float(text) for text in set(texts)}
    return np.array([number[text] for text in texts])
