"""Reads tables: a `.csv`, or a DataFrame of pandas, polars or the like, which is never imported here.

A `.csv` has a header line, and commas, tabs, or semicolons (then with decimal commas) between fields. Nothing that is
wrong ends the reading: each problem is noted with its column, how many rows have it, and one of these rows.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.data.columns import category_name, is_missing, kinds_of, looks_like_dates
from fedbudget.data.tables import (
    LONG_NAME,
    MOST_CATEGORIES,
    ColumnValues,
    Problem,
    RawTable,
    TableOptions,
    Words,
    missing_cells,
)
from fedbudget.errors import UserError

FEW_WORDS = 50
"""A column of words that has at most so many different ones, and fewer than half as many as rows, is a category."""

PLAIN = TableOptions()
_SAMPLE = 5  # words that are shown
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
_ID_NAME = re.compile(
    r"(?i:(.*[\s_.-])?(id|index|key|nr|no|number|column \d+))|.*[a-z](Id|ID)"
)
_Cells = Sequence[str] | Float64


def read_csv(
    path: Path, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """The table in a file.

    Args:
      labelled: whether it must have the target; one that is there is read in any case.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse_csv(file, str(path), options, labelled=labelled)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def parse_csv(
    lines: Iterable[str], name: str, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """The table in the lines of a file; see `read_csv`."""
    rest = iter(lines)
    first = next(rest, "")
    delimiter = delimiter_of(first)
    reader = csv.reader(chain([first], rest), delimiter=delimiter)
    header = [" ".join(text.split()) for text in next(reader, [])]
    if len(header) < 1 + labelled:
        raise UserError(
            f"{name}: needs a header line with at least one feature and the target"
        )
    rows = []
    numbers = []
    uneven = {}
    for fields in reader:
        if len(fields) == len(header):
            rows.append(fields)
            numbers.append(reader.line_num)
        elif fields:
            uneven[reader.line_num] = len(fields)
    problems = []
    if uneven:
        line, count = next(iter(uneven.items()))
        has = "row has" if len(uneven) == 1 else "rows have"
        other = f"another number of fields than the header, which has {len(header)}"
        problems.append(
            Problem(
                "fields", "", f"{len(uneven)} {has} {other}, such as row {line}: {count}"
            )
        )
    elif not rows:
        raise UserError(f"{name} has a header but no rows")
    columns: dict[str, _Cells] = {}
    for place, title in enumerate(header):
        title = title or f"column {place + 1}"
        if len(title) > LONG_NAME:
            problems.append(
                Problem(
                    "long",
                    title,
                    f"column {place + 1} has a name of {len(title)} characters",
                )
            )
        if title in columns:
            problems.append(
                Problem(
                    "twice",
                    title,
                    f"two columns are called {title}: each needs a name of its own",
                )
            )
        elif not header[place] and title not in options.drop:
            text = f"{title} has no name in the header: `drop` it, or name it"
            problems.append(Problem("unnamed", title, text, "drop", title))
        texts = [fields[place].strip() for fields in rows]
        columns[title] = (
            [_with_point(text) for text in texts] if delimiter == ";" else texts
        )
    return _table(
        name, columns, np.array(numbers, np.int64), options, problems, labelled=labelled
    )


def delimiter_of(header: str) -> str:
    """What is between the fields of a file, by its first line."""
    return max(",;\t", key=header.count)


def is_frame(value: Any) -> bool:
    """Whether it is a DataFrame, of whichever library."""
    return (
        hasattr(value, "columns")
        and hasattr(value, "dtypes")
        and hasattr(value, "__getitem__")
    )


def from_frame(
    frame: Any, name: str, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """The table in a DataFrame; rows are counted from 0."""
    if not len(frame):
        raise UserError(f"{name} has no rows")
    columns = {str(title): _cells(np.asarray(frame[title])) for title in frame.columns}
    if len(columns) < 1 + labelled:
        raise UserError(f"{name}: needs at least one feature and the target")
    problems = []
    if len(columns) < len(list(frame.columns)):
        problems.append(
            Problem(
                "twice", "", "two columns have the same name: each needs a name of its own"
            )
        )
    return _table(
        name, columns, np.arange(len(frame)), options, problems, labelled=labelled
    )


def read_alike(
    readers: Sequence[Callable[[TableOptions], RawTable]], options: TableOptions
) -> list[RawTable]:
    """Several tables: the target of the first is that of all, and what some take for a category all do.

    Args:
      readers: read a table each.
    """
    first = readers[0](options)
    options = replace(options, target=first.target)
    tables = [first, *(read(options) for read in readers[1:])]
    unsure = [
        {problem.column for problem in table.problems if problem.kind in ("ID", "text")}
        for table in tables
    ]
    sure = {
        name
        for table, not_sure in zip(tables, unsure, strict=True)
        for name, values in table.columns.items()
        if isinstance(values, Words) and name not in not_sure
    }
    again = replace(options, categorical=(*options.categorical, *sorted(sure)))
    pairs = zip(tables, readers, unsure, strict=True)
    return [read(again) if sure & not_sure else table for table, read, not_sure in pairs]


def _cells(values: Any) -> _Cells:
    """A column of a DataFrame: numbers as they are, everything else as the text that a file would have."""
    if values.ndim == 1 and values.dtype.kind in "iuf":
        return np.asarray(values, np.float64)
    return [
        "" if value is None else str(value).strip()
        for value in (values if values.ndim == 1 else values[:, 0])
    ]


def _with_point(text: str) -> str:
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text


def _table(
    name: str,
    columns: Mapping[str, _Cells],
    lines: Any,
    options: TableOptions,
    problems: list[Problem],
    *,
    labelled: bool,
) -> RawTable:
    target = next(reversed([*columns])) if options.target is None else options.target
    if labelled and target not in columns:
        raise UserError(f"{name} has no column {target!r}; it has {', '.join(columns)}")
    reading = _Reading(lines.tolist(), options, problems, [])
    features = {
        title: reading.feature(title, cells)
        for title, cells in columns.items()
        if title != target and title not in options.drop
    }
    if not features:
        raise UserError(
            f"{name} has no column but the target, {target}, and what is dropped"
        )
    targets = reading.targets(target, columns[target]) if target in columns else None
    dropped = tuple(title for title in options.drop if title in columns)
    return RawTable(
        name,
        features,
        target,
        targets,
        lines,
        dropped,
        tuple(problems),
        tuple(reading.remarks),
    )


class _Reading:
    """Turns cells into columns, and notes what is wrong or taken for granted."""

    def __init__(
        self,
        lines: list[int],
        options: TableOptions,
        problems: list[Problem],
        remarks: list[str],
    ) -> None:
        self._lines = lines
        self._options = options
        self._problems = problems
        self.remarks = remarks

    def feature(self, name: str, cells: _Cells) -> ColumnValues:
        values = self._column(name, cells)
        gone = missing_cells(values)
        if gone.any() and self._options.impute is None:
            if gone.all():
                self._note(
                    "empty", name, " has no value in any row: `drop` it", "drop", name
                )
            else:
                where = f" has no value in {gone.sum()} of {len(gone)} rows, such as {self._row(gone.argmax())}"
                cure = "`impute` mean, median or most-frequent, or `drop` it"
                self._note("missing", name, f"{where}: {cure}", "impute", "mean")
        return values

    def targets(self, name: str, cells: _Cells) -> ColumnValues:
        kinds = kinds_of(cells) if not isinstance(cells, np.ndarray) else None
        numbers = (
            cells
            if isinstance(cells, np.ndarray)
            else None
            if kinds is None or kinds.words
            else kinds.numbers
        )
        gone = (
            np.isnan(cells)
            if isinstance(cells, np.ndarray)
            else np.array([is_missing(text) for text in cells])
        )
        if gone.any():
            where = f"{gone.sum()} of {len(gone)} rows, such as {self._row(gone.argmax())}"
            self._note(
                "no target",
                name,
                f", the target, has no value in {where}: leave these rows out",
            )
        values: ColumnValues
        if numbers is not None:
            self._require_finite(name, numbers, ", the target,")
            values = numbers
        else:
            texts = ["" if is_missing(text) else text for text in cells]
            values = Words.of(texts)
            self._require_classes(name, Counter(filter(None, texts)), texts)
        if self._options.classes is not None:
            self._require_known(name, cells)
        return values

    def _column(self, name: str, cells: _Cells) -> ColumnValues:
        if name in self._options.categorical:
            return self._category(name, cells)
        if isinstance(cells, np.ndarray):
            self._require_finite(name, cells)
            self._remark_on_id(name, cells)
            return cells
        kinds = kinds_of(cells)
        if not kinds.are_numbers:
            return self._words(name, cells)
        if kinds.words:
            text = next(iter(kinds.words))
            count = kinds.words.total()
            rows = len(cells) - int(kinds.missing.sum())
            where = f"such as {text!r} in {self._row(list(cells).index(text))}"
            also = ": correct them, or leave them empty and `impute`"
            self._note(
                "no number",
                name,
                f" has numbers, but not in {count} of {rows} rows, {where}{also}",
            )
        self._require_finite(name, kinds.numbers)
        self._remark_on_id(name, kinds.numbers)
        return (
            np.where(np.isnan(kinds.numbers) & ~kinds.missing, 0.0, kinds.numbers)
            if kinds.words
            else kinds.numbers
        )

    def _words(self, name: str, cells: Sequence[str]) -> ColumnValues:
        texts = ["" if is_missing(text) else category_name(text) for text in cells]
        counts = Counter(filter(None, texts))
        place = next(place for place, text in enumerate(texts) if text)
        example = f"{_short(cells[place])!r} in {self._row(place)}"
        rows = counts.total()
        if looks_like_dates(counts):
            number = "or turn it into a number, such as days since then"
            self._note(
                "date",
                name,
                f" looks like a date ({example}): `drop` it, {number}",
                "drop",
                name,
            )
        elif (
            len(counts) <= FEW_WORDS
            and 2 * len(counts) < rows
            and max(map(len, counts)) <= LONG_NAME
        ):
            self.remarks.append(f"{name} is taken for a category: {_listed(counts)}")
            return Words.of(texts)
        elif len(counts) > 0.9 * rows:
            every = "every row" if len(counts) == rows else "nearly every row"
            self._note(
                "ID",
                name,
                f" has another text in {every}, like an ID ({example}): `drop` it",
                "drop",
                name,
            )
        else:
            text = f" is text, {len(counts)} different ones in {rows} rows ({example})"
            self._note(
                "text",
                name,
                f"{text}: `drop` it, or `categorical` if they are categories",
                "drop",
                name,
            )
        return Words.of(["refused"] * len(texts))  # nothing is missing of what is not used

    def _category(self, name: str, cells: _Cells) -> Words:
        texts = [str(cell) for cell in cells]
        words = Words.of(
            ["" if is_missing(text) else category_name(text) for text in texts]
        )
        if max(map(len, words.names), default=0) > LONG_NAME:
            self._note(
                "long",
                name,
                f" has a text of more than {LONG_NAME} characters: no category",
                "drop",
                name,
            )
        if len(words.names) > MOST_CATEGORIES:
            most = f"{MOST_CATEGORIES} is the most for a category"
            self._note(
                "many",
                name,
                f" has {len(words.names)} different values, and {most}: `drop` it",
                "drop",
                name,
            )
        return words

    def _require_finite(self, name: str, numbers: Float64, role: str = "") -> None:
        wrong = np.isinf(numbers)
        if wrong.any():
            rows = "1 row" if wrong.sum() == 1 else f"{wrong.sum()} rows, such as"
            at = (
                self._row(wrong.argmax())
                if wrong.sum() > 1
                else f"({self._row(wrong.argmax())})"
            )
            self._note("infinite", name, f"{role} is not finite in {rows} {at}")

    def _require_classes(self, name: str, counts: Counter[str], texts: list[str]) -> None:
        if self._options.classes is not None or not counts:
            return
        example = next(iter(counts))
        where = f"{_short(example)!r} in {self._row(texts.index(example))}"
        which = "name another with `target`"
        if looks_like_dates(counts):
            self._note("date", name, f", the target, looks like a date ({where}): {which}")
        elif len(counts) > FEW_WORDS and len(counts) > 0.9 * counts.total():
            text = (
                f", the target, has another text in nearly every row, like an ID ({where})"
            )
            self._note("ID", name, f"{text}: {which}")

    def _require_known(self, name: str, cells: _Cells) -> None:
        classes = set(map(category_name, self._options.classes or ()))
        labels = [category_name(str(cell)) for cell in cells if not is_missing(str(cell))]
        for label, count in Counter(
            label for label in labels if label not in classes
        ).items():
            row = self._row(
                next(
                    place
                    for place, cell in enumerate(cells)
                    if category_name(str(cell)) == label
                )
            )
            known = ", ".join(self._options.classes or ())
            rows = f"1 row ({row})" if count == 1 else f"{count} rows, such as {row}"
            text = f", the target, is {label!r} in {rows}, which is none of the `classes` {known}"
            self._note(f"label {label}", name, text)

    def _remark_on_id(self, name: str, numbers: Float64) -> None:
        whole = (
            len(numbers) >= 10
            and _ID_NAME.fullmatch(name)
            and not (numbers != np.round(numbers)).any()
        )
        if whole and len(np.unique(numbers)) == len(numbers):
            self.remarks.append(
                f"{name} has another number in every row: `drop` it if it is an ID"
            )

    def _note(
        self, kind: str, column: str, text: str, option: str | None = None, value: str = ""
    ) -> None:
        """The text goes on from the column's name."""
        self._problems.append(Problem(kind, column, f"{column}{text}", option, value))

    def _row(self, place: Any) -> str:
        return f"row {self._lines[int(place)]}"


def _listed(counts: Mapping[str, int]) -> str:
    names = sorted(counts)
    more = f" and {len(names) - _SAMPLE} more" if len(names) > _SAMPLE else ""
    return ", ".join(names[:_SAMPLE]) + more


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
