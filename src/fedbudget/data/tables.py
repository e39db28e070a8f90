"""Tables of named columns, and the layout that turns their columns into features.

- A `RawTable` holds numbers, texts and missing cells. Its problems are collected while it
  is read (read_tables.py) and reported in one error.
- A `Layout` is the same for every table. It finds columns by name, in any order. A numeric
  column becomes one feature, a category becomes one 0/1 feature per category. A missing
  cell receives the column's fill value. A category that the layout does not contain is 0
  in all features of its column.
- A `TableSchema` is a layout that was written down without looking at the data. Numbers are
  clipped to its ranges, and categories that it does not contain become `OTHER`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import float_info
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fedbudget.arrays import Flags, Float64, Int64
from fedbudget.data.columns import Columns, class_name
from fedbudget.errors import UserError
from fedbudget.settings.option import Impute

LONG_NAME = 200
"""Most characters in the name of a column or a category."""

MOST_CATEGORIES = 1000
"""Most categories of one column."""

# Control characters are excluded because other machines print these names.
ColumnName = Annotated[str, Meta(max_length=LONG_NAME, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
"""The name of a column or of a category."""

OTHER = "(other)"
"""Category of a schema for missing values and for all values that it does not list."""

_Finite = Annotated[float, Meta(ge=-float_info.max, le=float_info.max)]
Range = tuple[_Finite, _Finite]
"""The lowest and the highest number of a column."""


@dataclass(frozen=True)
class TableOptions:
    """The user's options for tables.

    Args:
      target: the column to predict; the last column by default.
      drop: columns to leave out.
      categorical: columns to treat as categories, whatever they contain.
      impute: how to fill missing cells; by default they are refused.
      classes: all classes, in order; by default the classes in the data.
      schema: public schema that all other options but `site` follow from.
      site: column whose values are the nodes; it is not a feature.
      missing: further texts that mark a missing cell, such as `<0.5`.
      numeric: columns that must be numbers, however many cells are not.
    """

    target: str | None = None
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    impute: Impute | None = None
    classes: tuple[str, ...] | None = None
    schema: "TableSchema | None" = None
    site: str | None = None
    missing: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()

    def require_unused(self, name: str) -> None:
        """Refuse options for named columns, because the data `name` has none."""
        if self.site is not None:
            raise UserError(
                f"`partition` by:{self.site} is for tables; {name} has no named columns"
            )
        for option in ("schema", "drop", "categorical", "impute", "missing"):
            if getattr(self, option):
                raise UserError(f"`{option}` is for tables; {name} has no named columns")


@dataclass(frozen=True)
class TextColumn:
    """A column of texts.

    Args:
      codes: index of each row's text in `names`, -1 if it is missing, [rows].
      names: the distinct texts, sorted.
    """

    codes: NDArray[np.int32]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, chosen: Int64) -> "TextColumn":
        return replace(self, codes=self.codes[chosen])

    def counts(self) -> dict[str, int]:
        """Return the number of rows per text, without texts that no row has."""
        counts = np.bincount(self.codes[self.codes >= 0], minlength=len(self.names))
        pairs = zip(self.names, counts.tolist(), strict=True)
        return {name: count for name, count in pairs if count}

    @classmethod
    def of(cls, texts: Sequence[str]) -> "TextColumn":
        """Create the column from each row's text, empty if it is missing."""
        names = sorted({text for text in texts if text})
        code = {"": -1} | {name: number for number, name in enumerate(names)}
        return cls(np.array([code[text] for text in texts], np.int32), tuple(names))

    @property
    def texts(self) -> list[str]:
        """The text of each row, empty if it is missing."""
        return [*map((*self.names, "").__getitem__, self.codes.tolist())]


ColumnValues = Float64 | TextColumn
"""A column: numbers with NaN for missing ones, or texts, [rows]."""


@dataclass(frozen=True)
class Problem:
    """One problem of a table.

    Args:
      kind: a short identifier; the same kind in several tables is reported once.
      column: the name of the column, empty if the problem is not in one column.
      text: the message; it names options in backticks.
      remedies: the options that solve the problem together, and their values.
    """

    kind: str
    column: str
    text: str
    remedies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RawTable:
    """Rows of named columns.

    Args:
      name: of the table, for errors.
      columns: the features by name, in order.
      target: name of the column to predict, or None.
      targets: its values, none of them missing.
      lines: line number of each row in the file, [rows].
      dropped: names of the columns that were left out.
      problems: everything that is wrong with the table.
      remarks: how columns were interpreted, for the user.
      sites: the site of each row, if a column names it.
    """

    name: str
    columns: Mapping[str, ColumnValues]
    target: str | None
    targets: ColumnValues | None
    lines: Int64
    dropped: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = field(default=(), repr=False)
    remarks: tuple[str, ...] = ()
    sites: TextColumn | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self, chosen: Int64) -> "RawTable":
        """Return the table with only the chosen rows."""
        columns = {name: values[chosen] for name, values in self.columns.items()}
        targets = None if self.targets is None else self.targets[chosen]
        sites = None if self.sites is None else self.sites[chosen]
        lines = self.lines[chosen]
        return replace(self, columns=columns, targets=targets, lines=lines, sites=sites)

    def samples(self, x: Float64) -> Columns:
        """Return the targets together with encoded features [rows, features]."""
        if isinstance(self.targets, TextColumn):
            return Columns(x, np.array(self.targets.names)[self.targets.codes])
        return Columns(x, self.targets)


def missing_cells(values: ColumnValues) -> Flags:
    """Return which rows have no value, [rows]."""
    return values.codes < 0 if isinstance(values, TextColumn) else np.isnan(values)


def require_usable(tables: Sequence[RawTable], name: str | None = None) -> None:
    """Raise one error with all problems of the tables and the options that help.

    Args:
      name: of all tables together; the name of the first by default.
    """
    alike: dict[tuple[str, str], list[tuple[str, Problem]]] = {}
    for table in tables:
        for problem in table.problems:
            same = alike.setdefault((problem.kind, problem.column), [])
            same.append((table.name, problem))
    if not alike:
        return

    texts = []
    remedies: dict[str, dict[str, None]] = {}
    by_hand = False
    for same in alike.values():
        (file, first), *others = same
        more = f" (the same in {_count(len(others), 'more file')})" if others else ""
        texts.append(f"{file}: {first.text}{more}")
        for _, problem in same:
            by_hand |= not problem.remedies
            for option, value in problem.remedies:
                remedies.setdefault(option, {})[value] = None
    if len(texts) == 1:
        raise UserError(texts[0])

    lines = [f"{name or tables[0].name} cannot be used as it is:", *texts]
    message = "\n  ".join(lines)
    if remedies:
        options = [f"`{name}={','.join(values)}`" for name, values in remedies.items()]
        first_step = "Correct the rest in the data, then try" if by_hand else "Try"
        message += f"\n{first_step}: {' '.join(options)}"
    raise UserError(message)


@dataclass(frozen=True)
class LayoutColumn:
    """One column of a layout.

    Args:
      name: of the column.
      categories: in order, for a category; None for numbers.
      fill: replaces a missing cell; None if no cell may be missing.
      range: public range of numbers, to which they are clipped.
      other: the last category, which stands for all values that are not in `categories`.
    """

    name: ColumnName
    categories: (
        Annotated[tuple[ColumnName, ...], Meta(max_length=MOST_CATEGORIES)] | None
    ) = None
    fill: float | ColumnName | None = None
    range: Range | None = None
    other: ColumnName | None = None

    @property
    def public(self) -> bool:
        """Whether a public schema declares the column."""
        return self.range is not None or self.other is not None

    def encode(self, values: ColumnValues) -> Float64:
        """Return the features, [rows, features]. A column without values fits any kind."""
        missing = missing_cells(values)
        if missing.any() and self.fill is None:
            raise UserError(
                f"{self.name} has {_count(missing.sum(), 'missing value')}, "
                "but the model has no replacement for them: train with `impute`"
            )
        if self.categories is None:
            if isinstance(values, TextColumn):
                if not missing.all():
                    example = next(iter(values.counts()))
                    raise UserError(
                        f"{self.name} has text, such as {example!r}, but it must be numbers"
                    )
                values = np.full(len(values), np.nan)
            numbers = np.where(missing, float(self.fill or 0.0), values)
            if self.range is not None:
                numbers = numbers.clip(*self.range)
            return numbers[:, None]

        if not isinstance(values, TextColumn):
            if not missing.all():
                raise UserError(
                    f"{self.name} has numbers, but it is a category: "
                    "add it to `categorical`"
                )
            values = TextColumn(np.full(len(values), -1, np.int32), ())
        # A text that is not a category has the code -1, and no 1 in its row.
        code = {name: number for number, name in enumerate(self.categories)}
        unknown = -1 if self.other is None else len(self.categories) - 1
        code_of = [code.get(name, unknown) for name in (*values.names, str(self.fill))]
        codes = np.array(code_of, np.int64)[values.codes]  # -1, missing, is the fill value
        encoded = np.zeros((len(codes), len(self.categories)))
        rows = np.flatnonzero(codes >= 0)
        encoded[rows, codes[rows]] = 1.0
        return encoded


@dataclass(frozen=True)
class Layout:
    """How columns become features.

    Args:
      columns: in the order of their features.
      target: name of the column to predict.
      dropped: names of columns to leave out if they are present.
      missing: further texts that mark a missing cell.
    """

    columns: tuple[LayoutColumn, ...]
    target: ColumnName | None = None
    dropped: tuple[ColumnName, ...] = ()
    missing: tuple[ColumnName, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def public(self) -> bool:
        """Whether a public schema declares all columns."""
        return all(column.public for column in self.columns)

    @property
    def features(self) -> int:
        """The number of features."""
        return len(self.feature_names)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The name of each feature: the column's, or `sex=male` for a category.

        >>> sex = LayoutColumn("sex", ("female", "male"))
        >>> Layout((LayoutColumn("age"), sex)).feature_names
        ('age', 'sex=female', 'sex=male')
        """
        names: list[str] = []
        for column in self.columns:
            if column.categories is None:
                names.append(column.name)
            else:
                names += [f"{column.name}={category}" for category in column.categories]
        return tuple(names)

    def options_for(self, given: TableOptions) -> TableOptions:
        """Return the options to read a table for this layout.

        Missing cells are accepted here; `encode` refuses them if a column has no fill
        value.

        Args:
          given: the user's options: more columns to drop, another target, classes.
        """
        categories = [
            column.name for column in self.columns if column.categories is not None
        ]
        dropped = tuple(dict.fromkeys((*self.dropped, *given.drop)))
        return TableOptions(
            given.target or self.target,
            dropped,
            tuple(categories),
            "mean",
            given.classes,
            missing=(*self.missing, *given.missing),
            numeric=tuple(name for name in self.names if name not in categories),
        )

    def encode(self, table: RawTable) -> Float64:
        """Return the features of a table's rows, [rows, features].

        Args:
          table: its columns may be in any order.

        Raises:
          UserError: a column is missing, unknown, or of another kind.
        """
        self.require_names(table.columns, table.name)
        try:
            features = [
                column.encode(table.columns[column.name]) for column in self.columns
            ]
        except UserError as error:
            raise UserError(f"{table.name}: {error.args[0]}") from None
        return np.concatenate(features, axis=1)

    def unseen(self, table: RawTable) -> dict[str, dict[str, int]]:
        """Return, by column, the number of rows per category that the layout lacks."""
        unseen = {}
        for column in self.columns:
            values = table.columns[column.name]
            if column.categories is not None and isinstance(values, TextColumn):
                if column.other is not None:
                    continue
                counts = values.counts()
                unseen[column.name] = {
                    name: counts[name] for name in counts if name not in column.categories
                }
        return {name: counts for name, counts in unseen.items() if counts}

    def require_names(self, names: Collection[str], where: str) -> None:
        """Refuse column names other than the layout's; their order does not matter.

        Args:
          where: name of the table, for the error.
        """
        missing = [name for name in self.names if name not in names]
        extra = [name for name in names if name not in self.names]
        wrong = [f"has no column {', '.join(missing)}"] if missing else []
        if extra:
            columns = "column" if len(extra) == 1 else "columns"
            wrong.append(f"has the unknown {columns} {', '.join(extra)} (`drop`)")
        if wrong:
            expected = ", ".join(self.names)
            raise UserError(f"{where} {' and '.join(wrong)}; the columns are {expected}")


@dataclass(frozen=True)
class TableSchema:
    """A layout that follows from no data, and the values of the target.

    Args:
      layout: all of its columns are public.
      classes: all classes in order; empty for a real target.
      target_range: range of a real target, to which it is clipped.
    """

    layout: Layout
    classes: tuple[str, ...] = ()
    target_range: Range | None = None

    @property
    def options(self) -> TableOptions:
        """How tables of the schema are read."""
        options = self.layout.options_for(TableOptions(classes=self.classes))
        return replace(options, schema=self)

    @property
    def scale(self) -> tuple[Float64, Float64]:
        """Middle and half width of every feature, [features]; 0 and 1 for a category."""
        middles: list[float] = []
        widths: list[float] = []
        for column in self.layout.columns:
            middle, width = centre(column.range)
            middles += [middle] * len(column.categories or (None,))
            widths += [width] * len(column.categories or (None,))
        return np.array(middles), np.array(widths)

    def fitted(self, table: RawTable) -> RawTable:
        """Return a table with targets of the schema, and remarks on values outside it.

        Raises:
          UserError: a column is missing, unknown, or of another kind.
        """
        names = table.columns
        missing = [name for name in self.layout.names if name not in names]
        extra = [name for name in names if name not in self.layout.names]
        if missing:
            raise UserError(f"{table.name} has no column {', '.join(missing)}: `schema`")
        if extra:
            raise UserError(
                f"{table.name} has columns that are not in the `schema`: "
                f"{', '.join(extra)}; add them to its key drop"
            )
        remarks = [
            f"{column.name}: {text}"
            for column in self.layout.columns
            if (text := _outside(column, table.columns[column.name]))
        ]
        targets = table.targets
        if self.classes and isinstance(targets, np.ndarray):
            targets = TextColumn.of(list(map(class_name, targets)))
        elif self.target_range is not None and targets is not None:
            if isinstance(targets, TextColumn):
                raise UserError(
                    f"{table.name}: {table.target}, the target, has text, but the `schema` "
                    "declares a range"
                )
            target = LayoutColumn(str(table.target), range=self.target_range)
            if text := _outside(target, targets):
                remarks.append(f"{target.name}: {text}")
            targets = targets.clip(*self.target_range)
        return replace(table, targets=targets, remarks=(*table.remarks, *remarks))


def centre(range_: Range | None) -> tuple[float, float]:
    """Return the middle and half the width of a range; 0 and 1 without one.

    >>> centre((20, 100)), centre((3, 3))
    ((60.0, 40.0), (3.0, 1.0))
    """
    if range_ is None:
        return 0.0, 1.0
    low, high = range_
    return low / 2 + high / 2, high / 2 - low / 2 or 1.0


def _outside(column: LayoutColumn, values: ColumnValues) -> str:
    """Describe the values that a schema does not contain; empty if there are none."""
    if column.range is not None and isinstance(values, np.ndarray):
        low, high = column.range
        rows = int(((values < low) | (values > high)).sum())
        return f"{_count(rows, 'value')} clipped to {low:g} ... {high:g}" if rows else ""
    if column.categories is None or not isinstance(values, TextColumn):
        return ""
    unknown = {
        name: count
        for name, count in values.counts().items()
        if name not in column.categories
    }
    rows = sum(unknown.values())
    return f"{_count(rows, 'row')} with other categories" if rows else ""


def describe_unseen(unseen: Mapping[str, Mapping[str, int]]) -> str:
    """Describe the result of `Layout.unseen`.

    >>> describe_unseen({"sex": {"x": 2, "u": 1}})
    'sex x (2 rows), sex u (1 row)'
    """
    return ", ".join(
        f"{column} {name} ({_count(count, 'row')})"
        for column, counts in unseen.items()
        for name, count in counts.items()
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
