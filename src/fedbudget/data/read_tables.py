"""Reading tables from a `.csv`, `.parquet` or Arrow file or a DataFrame.

- A `.csv` or `.tsv` file has a header line. Its fields are separated by commas, tabs or
  semicolons; with tabs and semicolons, decimal commas are accepted. The encoding is UTF-8,
  UTF-16 with a byte order mark, or else Windows-1252, a superset of printable Latin-1.
- `.parquet`, `.feather` and `.arrow` files need pyarrow. Their rows are numbered from 0,
  like those of a DataFrame.
- DataFrames may come from pandas, polars, pyarrow or a similar library. None of them is
  imported here.
- Problems do not stop the reading. Each one is recorded with its column, the number of
  affected rows and one row number.
"""

import csv
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.data.agreement import class_sort_key
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
from fedbudget.errors import UserError, requires_package

PLAIN = TableOptions()

_MOST_DETECTED = 50  # a text column with more distinct values is not taken for a category
_SHOWN = 5  # categories in a remark
_FEWEST = 2  # rows of a site
_LATIN = "cp1252"
_BLOCK = 2**20  # bytes
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
_ID_NAME = re.compile(
    r"(?i:(.*[\s_.-])?(id|index|key|nr|no|number|column \d+))|.*[a-z](Id|ID)"
)
_Cells = Sequence[str] | Float64


TABLES = (".csv", ".tsv", ".parquet", ".feather", ".arrow")
"""Endings of files that hold a table."""

TEXT_FILES = (".csv", ".tsv")
"""Those of text files."""


def is_table(path: Path) -> bool:
    """Return whether a file holds a table, by its name."""
    return path.suffix.lower() in TABLES


def read_file(
    path: Path, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """Read the table in a file.

    Args:
      labelled: whether the target must be present; if it is, it is read in any case.
    """
    if path.suffix.lower() not in TEXT_FILES:
        return from_frame(read_arrow(path), str(path), options, labelled=labelled)
    try:
        encoding = encoding_of(path)
        with path.open(newline="", encoding=encoding) as file:
            table = parse_csv(file, str(path), options, labelled=labelled)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if encoding != _LATIN:
        return table
    remark = (
        f"{path} is not UTF-8 and was read as Windows-1252 (Latin-1); if its texts look "
        "wrong, save it as UTF-8"
    )
    return replace(table, remarks=(remark, *table.remarks))


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file: UTF-8, UTF-16, or else Windows-1252."""
    decoder = getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        block = file.read(_BLOCK)
        if block.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            return "utf-16"
        try:
            while block:
                decoder.decode(block)
                block = file.read(_BLOCK)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return _LATIN
    return "utf-8-sig"


def read_arrow(path: Path) -> dict[str, Any]:
    """Return the columns of a Parquet or Arrow file as arrays, by name."""
    with requires_package(f"reading {path.suffix}", "parquet"):
        from pyarrow import ArrowException, ArrowInvalid, ipc, parquet
    try:
        if path.suffix.lower() == ".parquet":
            table = parquet.read_table(path)
        else:
            try:
                table = ipc.open_file(path).read_all()
            except ArrowInvalid:  # written as a stream
                with path.open("rb") as stream:
                    table = ipc.open_stream(stream).read_all()
        columns = [column.to_numpy() for column in table.columns]
    except (OSError, ArrowException) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    named = dict(zip(table.column_names, columns, strict=True))
    if len(named) < len(columns):
        raise UserError(f"{path}: two columns have the same name: give each its own name")
    return named


def parse_csv(
    lines: Iterable[str], name: str, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """Read the table in the lines of a `.csv` file; see `read_file`."""
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
        title = title or _unnamed(index, options)
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
            text = f"{title} has no name in the header, like the index of a DataFrame"
            text += ": `drop` it, or name it"
            problems.append(Problem("unnamed", title, text, (("drop", title),)))
        texts = [fields[index].strip() for fields in rows]
        if delimiter != ",":
            texts = list(map(_with_decimal_point, texts))
        columns[title] = texts
    return _table(name, columns, np.array(numbers, np.int64), options, problems, labelled)


def _unnamed(index: int, options: TableOptions) -> str:
    """Return a name for a column without one; `drop` may use that of pandas."""
    pandas_name = f"Unnamed: {index}"
    return pandas_name if pandas_name in options.drop else f"column {index + 1}"


def delimiter_of(header: str) -> str:
    """Return the field separator of a file, given its first line."""
    return max(",;\t", key=header.count)


def _with_decimal_point(text: str) -> str:
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text


def is_frame(value: Any) -> bool:
    """Return whether the value is a DataFrame or an Arrow table, or (DataFrame, y)."""
    if type(value) is tuple and len(value) == 2:
        value = value[0]
    return any(all(hasattr(value, name) for name in names) for names in (_FRAME, _ARROW))


_FRAME = ("columns", "dtypes", "__getitem__")
_ARROW = ("column_names", "schema", "__getitem__")


def from_frame(
    frame: Any, name: str, options: TableOptions = PLAIN, *, labelled: bool = True
) -> RawTable:
    """Read the table in a DataFrame or a mapping of columns; row numbers start at 0.

    Args:
      frame: a DataFrame, an Arrow table, a mapping, or (DataFrame, y).
      labelled: whether the target must be present.
    """
    y = None
    if type(frame) is tuple:
        frame, y = frame
    titles = list(frame)
    if hasattr(frame, "columns"):
        titles = list(getattr(frame, "column_names", frame.columns))
    given = {str(title): frame[title] for title in titles}
    problems = []
    if len(given) < len(titles):
        text = "two columns have the same name: give each its own name"
        problems.append(Problem("twice", "", text))
    if y is not None:
        target = options.target or str(getattr(y, "name", None) or "target")
        if target in given:
            raise UserError(
                f"{name}: {target} is a column of x and the name of y; give y another name"
            )
        given[target] = y
        options = replace(options, target=target)
    rows = len(next(iter(given.values()))) if given else 0
    if not rows:
        raise UserError(f"{name} has no rows")
    categorical = [
        title
        for title, values in given.items()
        if str(getattr(values, "dtype", "")) == "category"
    ]
    options = replace(options, categorical=(*options.categorical, *categorical))
    columns = {title: _cells(np.asarray(values)) for title, values in given.items()}
    for title, cells in columns.items():
        if len(cells) != rows:
            raise UserError(f"{name}: {title} has {len(cells)} rows, not {rows}")
    if len(columns) < 1 + labelled:
        raise UserError(f"{name}: needs at least one feature and the target")
    return _table(name, columns, np.arange(rows), options, problems, labelled)


def _cells(values: Any) -> _Cells:
    """Return a column of a DataFrame: numbers as they are, anything else as text."""
    if not values.ndim:
        raise UserError(f"a column must have one value per row, not {values.item()!r}")
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


def by_site(name: str, tables: Sequence[RawTable], column: str) -> list[RawTable]:
    """Return one table per site, sorted by the site.

    Args:
      name: of all tables together, for errors.
      tables: with the same columns.
      column: name of the column with the sites.

    Raises:
      UserError: the column looks like an ID, or a site has a single row.
    """
    pieces: dict[str, list[RawTable]] = {}
    for table in tables:
        assert table.sites is not None
        for code, site in enumerate(table.sites.names):
            rows = np.flatnonzero(table.sites.codes == code)
            if len(rows):
                pieces.setdefault(site, []).append(table.rows(rows))
    sites = sorted(pieces, key=class_sort_key)
    sizes = {site: sum(map(len, pieces[site])) for site in sites}
    total = sum(sizes.values())
    if 2 * len(sites) > total:
        raise UserError(
            f"{name}: {column} has {len(sites)} different values in {total} rows, like an "
            "ID: name the column of the sites with `partition` by:COLUMN"
        )
    small = [site for site in sites if sizes[site] < _FEWEST]
    if small:
        raise UserError(
            f"{name}: {len(small)} of {len(sites)} sites in {column} have fewer than "
            f"{_FEWEST} rows: {_listed(small)}. A node cannot train on them: leave these "
            "rows out, or give them the name of another site"
        )
    return [_joined(site, pieces[site]) for site in sites]


def _joined(name: str, tables: Sequence[RawTable]) -> RawTable:
    """Return the rows of tables with the same columns as one table."""
    first = tables[0]
    if len(tables) == 1:
        return replace(first, name=name)
    columns = {
        title: _joined_column([table.columns[title] for table in tables])
        for title in first.columns
    }
    targets = [table.targets for table in tables if table.targets is not None]
    return replace(
        first,
        name=name,
        columns=columns,
        targets=_joined_column(targets) if targets else None,
        lines=np.concatenate([table.lines for table in tables]),
        sites=None,
    )


def _joined_column(parts: Sequence[ColumnValues]) -> ColumnValues:
    """Return the values of all parts; those without any value fit both kinds."""
    if not any(isinstance(part, TextColumn) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    texts: list[str] = []
    for part in parts:
        texts += part.texts if isinstance(part, TextColumn) else [""] * len(part)
    return TextColumn.of(texts)


def _table(
    name: str,
    columns: dict[str, _Cells],
    lines: Any,
    options: TableOptions,
    problems: list[Problem],
    labelled: bool,
) -> RawTable:
    site = options.site
    for needed in (site, options.target if labelled else None):
        if needed is not None and needed not in columns:
            raise UserError(f"{name} has no column {needed!r}; it has {', '.join(columns)}")
    if site is not None and site == options.target:
        raise UserError(f"{site} is the `target`; it cannot name the sites too")
    reader = _ColumnReader(lines.tolist(), options, problems)
    sites = None if site is None else reader.sites(site, columns.pop(site))
    target = options.target or next(reversed(columns), "")
    features = {
        title: reader.feature(title, cells)
        for title, cells in columns.items()
        if title != target and title not in options.drop
    }
    if not features:
        raise UserError(f"{name} has no column except the target {target} and dropped ones")
    targets = reader.targets(target, columns[target]) if target in columns else None
    dropped = tuple(title for title in options.drop if title in columns)
    if site is not None:
        dropped = (site, *dropped)
    noted = (tuple(problems), tuple(reader.remarks))
    return RawTable(name, features, target, targets, lines, dropped, *noted, sites)


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
                self._note(
                    "empty", name, " has no value in any row: `drop` it", ("drop", name)
                )
            else:
                text = (
                    f" has no value in {self._share(missing)}: "
                    "`impute` mean, median or most-frequent, or `drop` it"
                )
                self._note("missing", name, text, ("impute", "mean"))
        return values

    def sites(self, name: str, cells: _Cells) -> TextColumn:
        sites = TextColumn.of(self._names(map(str, cells)))
        missing = missing_cells(sites)
        if missing.any():
            text = (
                f", the site of each row, has no value in {self._share(missing)}: "
                "name the sites of these rows, or leave them out"
            )
            self._note("no site", name, text)
        return sites

    def targets(self, name: str, cells: _Cells) -> ColumnValues:
        values: ColumnValues
        if isinstance(cells, np.ndarray):
            values = cells
            missing = np.isnan(cells)
        else:
            parsed = parse_cells(cells, self.options.missing)
            missing = parsed.missing
            values = parsed.numbers
            if parsed.words:
                texts = ["" if self._is_missing(text) else text for text in cells]
                values = TextColumn.of(texts)
                self._check_class_names(name, texts)
        if missing.any():
            share = self._share(missing)
            text = f", the target, has no value in {share}: leave these rows out"
            self._note("no target", name, text)
        if isinstance(values, np.ndarray):
            self._check_finite(name, values, ", the target,")
        if self.options.classes:
            self._check_known_classes(name, cells, self.options.classes)
        return values

    def _column(self, name: str, cells: _Cells) -> ColumnValues:
        if name in self.options.categorical:
            return self._category(name, cells)
        if isinstance(cells, np.ndarray):
            numbers = cells
        else:
            parsed = parse_cells(cells, self.options.missing)
            if not parsed.are_numbers and name not in self.options.numeric:
                return self._text(name, cells)
            numbers = parsed.numbers
            if parsed.words:
                example = next(iter(parsed.words))
                present = len(cells) - int(parsed.missing.sum())
                what = "must be a number, but is"
                remedies: list[tuple[str, str]] = []
                advice = "correct them, or leave them empty"
                if name not in self.options.numeric:
                    what = "has numbers, but"
                    remedies, advice = self._without(name, parsed.words)
                text = (
                    f" {what} not in {parsed.words.total()} of {present} rows, "
                    f"such as {example!r} in {self._row(list(cells).index(example))}: "
                    f"{advice}"
                )
                self._note("no number", name, text, *remedies)
                # Reported already; NaN would be reported again as missing.
                numbers = np.where(np.isnan(numbers) & ~parsed.missing, 0.0, numbers)
        self._check_finite(name, numbers)
        self._remark_on_id(name, numbers)
        return numbers

    def _without(
        self, name: str, words: Iterable[str]
    ) -> tuple[list[tuple[str, str]], str]:
        """Return the options that accept a column of numbers and words, and an advice."""
        different = sorted(words)
        if len(different) > _SHOWN or "," in "".join(different):
            return [("drop", name)], "correct them, or `drop` it"
        markers = ",".join(different)
        advice = (
            "correct them, or treat them as missing with "
            f"`missing={markers}` and `impute=mean`"
        )
        return [("missing", markers), ("impute", "mean")], advice

    def _text(self, name: str, cells: Sequence[str]) -> ColumnValues:
        texts = self._names(cells)
        counts = Counter(filter(None, texts))
        rows = counts.total()
        index = next(index for index, text in enumerate(texts) if text)
        example = f"({_short(cells[index])!r} in {self._row(index)})"

        commas = sum(map(bool, map(_DECIMAL_COMMA.fullmatch, counts)))
        if commas > 0.5 * len(counts):
            text = (
                f" has numbers with decimal commas {example}: write them with decimal "
                "points; a file may separate its fields by semicolons instead"
            )
            self._note("comma", name, text)
        elif looks_like_dates(counts):
            text = (
                f" looks like a date {example}: `drop` it, "
                "or convert it to a number, such as days since a fixed date"
            )
            self._note("date", name, text, ("drop", name))
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
            self._note("ID", name, text, ("drop", name))
        else:
            text = (
                f" is text with {len(counts)} different values in {rows} rows {example}: "
                "`drop` it, or add it to `categorical` if it is a category"
            )
            self._note("text", name, text, ("drop", name))
        # A placeholder without missing cells, so that no second problem is reported.
        return TextColumn.of(["refused"] * len(texts))

    def _category(self, name: str, cells: _Cells) -> TextColumn:
        column = TextColumn.of(self._names(map(str, cells)))
        if max(map(len, column.names), default=0) > LONG_NAME:
            text = (
                f" has a text of more than {LONG_NAME} characters, "
                "too long for a category: `drop` it"
            )
            self._note("long", name, text, ("drop", name))
        if len(column.names) > MOST_CATEGORIES:
            text = (
                f" has {len(column.names)} different values; "
                f"a category can have at most {MOST_CATEGORIES}: `drop` it"
            )
            self._note("many", name, text, ("drop", name))
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
            label = category_name(cell)
            if label not in valid and not self._is_missing(cell):
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

    def _note(self, kind: str, column: str, text: str, *remedies: tuple[str, str]) -> None:
        """Record a problem; the text continues after the column's name."""
        self.problems.append(Problem(kind, column, f"{column}{text}", remedies))

    def _is_missing(self, text: str) -> bool:
        return is_missing(text) or text in self.options.missing

    def _names(self, texts: Iterable[str]) -> list[str]:
        """Return cells as names of categories, empty for missing ones."""
        cells = list(texts)
        names = {
            text: "" if self._is_missing(text) else category_name(text)
            for text in set(cells)
        }
        return [names[text] for text in cells]

    def _share(self, flags: Any) -> str:
        return f"{flags.sum()} of {len(flags)} rows, such as {self._row(flags.argmax())}"

    def _rows(self, rows: Sequence[int]) -> str:
        row = self._row(rows[0])
        return f"1 row ({row})" if len(rows) == 1 else f"{len(rows)} rows, such as {row}"

    def _row(self, index: int) -> str:
        return f"row {self.lines[index]}"


def _listed(counts: Iterable[str]) -> str:
    names = sorted(counts, key=class_sort_key)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
