"""Reading tables from a `.csv` file or a DataFrame.

- A `.csv` file has a header line. Its fields are separated by commas, tabs or semicolons;
  with semicolons, decimal commas are accepted.
- DataFrames may come from pandas, polars or a similar library. None of them is imported
  here.
- Problems do not stop the reading. Each one is recorded with its column, the number of
  affected rows and one row number.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.data.columns import (
    category_name,
    is_missing,
    looks_like_dates,
    parse_cells,
)
from fedbudget.data.tables import (
    LONG_NAME,
    MOST_CATEGORIES,
    ColumnValues,
    Problem,
    RawTable,
    TableOptions,
    TextColumn,
    missing_cells,
)
from fedbudget.errors import UserError

PLAIN = TableOptions()

_MOST_DETECTED = 50  # a text column with more distinct values is not taken for a category
_SHOWN = 5  # categories in a remark
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
_ID_NAME = re.compile(
    r"(?i:(.*[\s_.-])?(id|index|key|nr|no|number|column \d+))|.*[a-z](Id|ID)"
)
_Cells = Sequence[str] | Float64


def read_csv(
    path: Path, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """Read the table in a file.

    Args:
      labelled: whether the target must be present; if it is, it is read in any case.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse_csv(file, str(path), options, labelled=labelled)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def parse_csv(
    lines: Iterable[str], name: str, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """Read the table in the lines of a file; see `read_csv`."""
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
    uneven = []
    for fields in reader:
        if len(fields) == len(header):
            rows.append(fields)
            numbers.append(reader.line_num)
        elif fields:
            uneven.append(f"row {reader.line_num} with {len(fields)}")
    problems = []
    if uneven:
        do = "1 row does" if len(uneven) == 1 else f"{len(uneven)} rows do"
        text = f"{do} not have the header's {len(header)} fields, such as {uneven[0]}"
        problems.append(Problem("fields", "", text))
    elif not rows:
        raise UserError(f"{name} has a header but no rows")

    columns: dict[str, _Cells] = {}
    for index, title in enumerate(header):
        title = title or f"column {index + 1}"
        if len(title) > LONG_NAME:
            text = (
                f"the name of column {index + 1} has {len(title)} characters; "
                f"at most {LONG_NAME} are possible"
            )
            problems.append(Problem("long", title, text))
        if title in columns:
            text = f"two columns are called {title}: give each its own name"
            problems.append(Problem("twice", title, text))
        elif not header[index] and title not in options.drop:
            text = f"{title} has no name in the header: `drop` it, or name it"
            problems.append(Problem("unnamed", title, text, "drop", title))
        texts = [fields[index].strip() for fields in rows]
        if delimiter == ";":
            texts = list(map(_with_decimal_point, texts))
        columns[title] = texts
    return _table(name, columns, np.array(numbers, np.int64), options, problems, labelled)


def delimiter_of(header: str) -> str:
    """Return the field separator of a file, given its first line."""
    return max(",;\t", key=header.count)


def _with_decimal_point(text: str) -> str:
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text


def is_frame(value: Any) -> bool:
    """Return whether the value is a DataFrame of any library."""
    return all(hasattr(value, name) for name in ("columns", "dtypes", "__getitem__"))


def from_frame(
    frame: Any, name: str, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """Read the table in a DataFrame or a mapping of columns; row numbers start at 0."""
    titles = list(frame.columns if is_frame(frame) else frame)
    rows = len(frame[titles[0]]) if titles else 0
    if not rows:
        raise UserError(f"{name} has no rows")
    columns = {str(title): _cells(np.asarray(frame[title])) for title in titles}
    if len(columns) < 1 + labelled:
        raise UserError(f"{name}: needs at least one feature and the target")
    problems = []
    if len(columns) < len(titles):
        text = "two columns have the same name: give each its own name"
        problems.append(Problem("twice", "", text))
    return _table(name, columns, np.arange(rows), options, problems, labelled)


def _cells(values: Any) -> _Cells:
    """Return a column of a DataFrame: numbers as they are, anything else as text."""
    if values.ndim > 1:
        values = values[:, 0]
    elif values.dtype.kind in "iuf":
        return np.asarray(values, np.float64)
    return ["" if value is None else str(value).strip() for value in values]


def read_consistently(
    readers: Sequence[Callable[[TableOptions], RawTable]], options: TableOptions
) -> list[RawTable]:
    """Read several tables with the same target and the same categories.

    The target of the first table is the target of all. A column that is a category in one
    table is a category in all.

    Args:
      readers: each reads one table.
    """
    first = readers[0](options)
    options = replace(options, target=first.target)
    tables = [first, *(read(options) for read in readers[1:])]
    doubtful = [
        {problem.column for problem in table.problems if problem.kind in ("ID", "text")}
        for table in tables
    ]
    categories = {
        name
        for table, excluded in zip(tables, doubtful, strict=True)
        for name, values in table.columns.items()
        if isinstance(values, TextColumn) and name not in excluded
    }
    options = replace(options, categorical=(*options.categorical, *sorted(categories)))
    return [
        read(options) if categories & names else table
        for table, read, names in zip(tables, readers, doubtful, strict=True)
    ]


def _table(
    name: str,
    columns: Mapping[str, _Cells],
    lines: Any,
    options: TableOptions,
    problems: list[Problem],
    labelled: bool,
) -> RawTable:
    target = list(columns)[-1] if options.target is None else options.target
    if labelled and target not in columns:
        raise UserError(f"{name} has no column {target!r}; it has {', '.join(columns)}")
    reader = _ColumnReader(lines.tolist(), options, problems)
    features = {
        title: reader.feature(title, cells)
        for title, cells in columns.items()
        if title != target and title not in options.drop
    }
    if not features:
        raise UserError(f"{name} has no column except the target {target} and dropped ones")
    targets = reader.targets(target, columns[target]) if target in columns else None
    dropped = tuple(title for title in options.drop if title in columns)
    noted = (tuple(problems), tuple(reader.remarks))
    return RawTable(name, features, target, targets, lines, dropped, *noted)


@dataclass(frozen=True)
class _ColumnReader:
    """Converts cells to columns, and records problems and remarks."""

    lines: list[int]
    options: TableOptions
    problems: list[Problem]
    remarks: list[str] = field(default_factory=list)

    def feature(self, name: str, cells: _Cells) -> ColumnValues:
        values = self._column(name, cells)
        missing = missing_cells(values)
        if missing.any() and self.options.impute is None:
            if missing.all():
                self._note("empty", name, " has no value in any row: `drop` it", "drop")
            else:
                text = (
                    f" has no value in {self._share(missing)}: "
                    "`impute` mean, median or most-frequent, or `drop` it"
                )
                self._note("missing", name, text, "impute")
        return values

    def targets(self, name: str, cells: _Cells) -> ColumnValues:
        values: ColumnValues
        if isinstance(cells, np.ndarray):
            values = cells
            missing = np.isnan(cells)
        else:
            parsed = parse_cells(cells)
            missing = parsed.missing
            values = parsed.numbers
            if parsed.words:
                texts = ["" if is_missing(text) else text for text in cells]
                values = TextColumn.of(texts)
                self._check_class_names(name, texts)
        if missing.any():
            share = self._share(missing)
            text = f", the target, has no value in {share}: leave these rows out"
            self._note("no target", name, text)
        if isinstance(values, np.ndarray):
            self._check_finite(name, values, ", the target,")
        if self.options.classes is not None:
            self._check_known_classes(name, cells, self.options.classes)
        return values

    def _column(self, name: str, cells: _Cells) -> ColumnValues:
        if name in self.options.categorical:
            return self._category(name, cells)
        if isinstance(cells, np.ndarray):
            numbers = cells
        else:
            parsed = parse_cells(cells)
            if not parsed.are_numbers:
                return self._text(name, cells)
            numbers = parsed.numbers
            if parsed.words:
                example = next(iter(parsed.words))
                present = len(cells) - int(parsed.missing.sum())
                text = (
                    f" has numbers, but not in {parsed.words.total()} of {present} rows, "
                    f"such as {example!r} in {self._row(list(cells).index(example))}: "
                    "correct them, or leave them empty and `impute`"
                )
                self._note("no number", name, text)
                # Reported already; NaN would be reported again as missing.
                numbers = np.where(np.isnan(numbers) & ~parsed.missing, 0.0, numbers)
        self._check_finite(name, numbers)
        self._remark_on_id(name, numbers)
        return numbers

    def _text(self, name: str, cells: Sequence[str]) -> ColumnValues:
        texts = _category_names(cells)
        counts = Counter(filter(None, texts))
        rows = counts.total()
        index = next(index for index, text in enumerate(texts) if text)
        example = f"({_short(cells[index])!r} in {self._row(index)})"

        if looks_like_dates(counts):
            text = (
                f" looks like a date {example}: `drop` it, "
                "or convert it to a number, such as days since a fixed date"
            )
            self._note("date", name, text, "drop")
        elif (
            len(counts) <= _MOST_DETECTED
            and 2 * len(counts) < rows
            and max(map(len, counts)) <= LONG_NAME
        ):
            self.remarks.append(f"{name} is treated as a category: {_listed(counts)}")
            return TextColumn.of(texts)
        elif len(counts) > 0.9 * rows:
            every = "every row" if len(counts) == rows else "nearly every row"
            text = f" has a different text in {every}, like an ID {example}: `drop` it"
            self._note("ID", name, text, "drop")
        else:
            text = (
                f" is text with {len(counts)} different values in {rows} rows {example}: "
                "`drop` it, or add it to `categorical` if it is a category"
            )
            self._note("text", name, text, "drop")
        # A placeholder without missing cells, so that no second problem is reported.
        return TextColumn.of(["refused"] * len(texts))

    def _category(self, name: str, cells: _Cells) -> TextColumn:
        column = TextColumn.of(_category_names(map(str, cells)))
        if max(map(len, column.names), default=0) > LONG_NAME:
            text = (
                f" has a text of more than {LONG_NAME} characters, "
                "too long for a category: `drop` it"
            )
            self._note("long", name, text, "drop")
        if len(column.names) > MOST_CATEGORIES:
            text = (
                f" has {len(column.names)} different values; "
                f"a category can have at most {MOST_CATEGORIES}: `drop` it"
            )
            self._note("many", name, text, "drop")
        return column

    def _check_finite(self, name: str, numbers: Float64, role: str = "") -> None:
        infinite = np.flatnonzero(np.isinf(numbers)).tolist()
        if infinite:
            self._note("infinite", name, f"{role} is not finite in {self._rows(infinite)}")

    def _check_class_names(self, name: str, texts: Sequence[str]) -> None:
        if self.options.classes is not None:
            return
        counts = Counter(filter(None, texts))
        example = next(iter(counts))
        where = f"({_short(example)!r} in {self._row(texts.index(example))})"
        remedy = "name another column with `target`"
        if looks_like_dates(counts):
            self._note("date", name, f", the target, looks like a date {where}: {remedy}")
        elif len(counts) > _MOST_DETECTED and len(counts) > 0.9 * counts.total():
            text = (
                ", the target, has a different text in nearly every row, "
                f"like an ID {where}: {remedy}"
            )
            self._note("ID", name, text)

    def _check_known_classes(
        self, name: str, cells: _Cells, classes: tuple[str, ...]
    ) -> None:
        valid = set(map(category_name, classes))
        unknown: dict[str, list[int]] = {}
        for index, cell in enumerate(map(str, cells)):
            if not is_missing(cell) and (label := category_name(cell)) not in valid:
                unknown.setdefault(label, []).append(index)
        for label, rows in unknown.items():
            text = (
                f", the target, is {label!r} in {self._rows(rows)}, "
                f"not one of the `classes` {', '.join(classes)}"
            )
            self._note(f"label {label}", name, text)

    def _remark_on_id(self, name: str, numbers: Float64) -> None:
        if len(numbers) < 10 or not _ID_NAME.fullmatch(name):
            return
        whole = not (numbers != np.round(numbers)).any()
        if whole and len(np.unique(numbers)) == len(numbers):
            self.remarks.append(
                f"{name} has a different number in every row: `drop` it if it is an ID"
            )

    def _note(self, kind: str, column: str, text: str, option: str | None = None) -> None:
        """Record a problem; the text continues after the column's name."""
        value = "mean" if option == "impute" else column
        self.problems.append(Problem(kind, column, f"{column}{text}", option, value))

    def _share(self, flags: Any) -> str:
        return f"{flags.sum()} of {len(flags)} rows, such as {self._row(flags.argmax())}"

    def _rows(self, rows: Sequence[int]) -> str:
        row = self._row(rows[0])
        return f"1 row ({row})" if len(rows) == 1 else f"{len(rows)} rows, such as {row}"

    def _row(self, index: int) -> str:
        return f"row {self.lines[index]}"


def _category_names(texts: Iterable[str]) -> list[str]:
    return ["" if is_missing(text) else category_name(text) for text in texts]


def _listed(counts: Mapping[str, int]) -> str:
    names = sorted(counts)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
