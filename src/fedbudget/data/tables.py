"""Tables of named columns, raw: numbers, words and missing cells, before a `Layout` makes features of them.

Whatever is wrong with tables is found in one go (read_tables.py), and told in one error.

How the columns of a table become features: the same for every table, whatever the order of its columns.

A column is found by its name. Numbers are a feature each; a category is as many as it has categories, of which the one
that a row has is 1 and the others are 0. A missing cell gets the column's value for that, where there is one. A
category that nobody had when the layout was made is 0 in all of these features.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fedbudget.arrays import Flags, Float64, Int64
from fedbudget.data.columns import Columns
from fedbudget.errors import UserError
from fedbudget.settings.option import Impute


@dataclass(frozen=True)
class TableOptions:
    """What a person says of tables.

    Args:
      target: the column to predict; the last when not given.
      drop: columns that are left out.
      categorical: columns that are categories, whatever is in them.
      impute: what missing cells get; they are refused when not given.
      classes: all classes that there are, in order; those that are found when not given.
    """

    target: str | None = None
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    impute: Impute | None = None
    classes: tuple[str, ...] | None = None

    def require_none(self, name: str) -> None:
        """Refuses what can be said of tables alone, where there is none.

        Args:
          name: of what there is.
        """
        for option in ("drop", "categorical", "impute"):
            if getattr(self, option):
                raise UserError(
                    f"`{option}` is for tables, and {name} is none: it has no columns with names"
                )


@dataclass(frozen=True)
class Words:
    """A column of words.

    Args:
      codes: the place of each row's word among all, -1 where it is missing, [rows].
      names: the different words, in order.
    """

    codes: NDArray[np.int32]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)

    def counts(self) -> dict[str, int]:
        """How many rows have each word, of those that some have."""
        counts = np.bincount(self.codes[self.codes >= 0], minlength=len(self.names))
        return {
            name: int(count)
            for name, count in zip(self.names, counts, strict=True)
            if count
        }

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Words":
        """From each row's word, an empty one where it is missing."""
        names = sorted({text for text in texts if text})
        place = {"": -1} | {name: number for number, name in enumerate(names)}
        return cls(np.array([place[text] for text in texts], np.int32), tuple(names))


ColumnValues = Float64 | Words
"""A column: numbers, NaN where one is missing, or words, [rows]."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with a table.

    Args:
      kind: what, in a word or two: problems of several tables that are of one kind are told once.
      column: of which column, if it is of one.
      text: in words; with the options that do away with it in backticks.
      option, value: the option that does, in most cases, and what to give it.
    """

    kind: str
    column: str
    text: str
    option: str | None = None
    value: str = ""


@dataclass(frozen=True)
class RawTable:
    """Rows of named columns.

    Args:
      name: what to call it in errors.
      columns: the features by name, in order.
      target: the name of the column to predict; None where there is none.
      targets: its values, of which none is missing.
      lines: where each row is, as an editor counts, [rows].
      dropped: names of columns that were left out.
      problems: all that is wrong with it.
      remarks: what was taken for what, in words.
    """

    name: str
    columns: Mapping[str, ColumnValues]
    target: str | None
    targets: ColumnValues | None
    lines: Int64
    dropped: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = field(default=(), repr=False)
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self, chosen: NDArray[np.int64]) -> "RawTable":
        """Some of the rows."""
        columns = {name: _rows(values, chosen) for name, values in self.columns.items()}
        targets = None if self.targets is None else _rows(self.targets, chosen)
        return replace(self, columns=columns, targets=targets, lines=self.lines[chosen])

    def samples(self, x: Float64) -> Columns:
        """The targets, with features that were made of the columns, [rows, features]."""
        if isinstance(self.targets, Words):
            return Columns(
                x, words=np.array(self.targets.names, np.str_)[self.targets.codes]
            )
        return Columns(x, self.targets)


def missing_cells(values: ColumnValues) -> Flags:
    """Which rows have no value, [rows]."""
    return values.codes < 0 if isinstance(values, Words) else np.isnan(values)


def require_usable(tables: Sequence[RawTable], name: str | None = None) -> None:
    """One error with all that is wrong with some tables, and with what would do away with it.

    Args:
      name: of all of them together.
    """
    alike: dict[tuple[str, str], list[tuple[str, Problem]]] = {}
    for table in tables:
        for problem in table.problems:
            alike.setdefault((problem.kind, problem.column), []).append(
                (table.name, problem)
            )
    if not alike:
        return
    texts = [
        f"{found[0][0]}: {found[0][1].text}{_in_others(len(found) - 1)}"
        for found in alike.values()
    ]
    if len(texts) == 1:
        raise UserError(texts[0])
    values: dict[str, dict[str, None]] = {}
    for (_, problem), *_others in alike.values():
        if problem.option is not None:
            values.setdefault(problem.option, {})[problem.value] = None
    cure = " ".join(f"`{option}` {','.join(names)}" for option, names in values.items())
    ends = f"\nwhat may do: {cure}" if cure else ""
    raise UserError(
        f"{name or tables[0].name} cannot be used as it is:\n  " + "\n  ".join(texts) + ends
    )


def _in_others(files: int) -> str:
    return (
        "" if not files else f" (the same in {files} more file{'s' if files > 1 else ''})"
    )


def _rows(values: ColumnValues, chosen: NDArray[np.int64]) -> ColumnValues:
    return (
        replace(values, codes=values.codes[chosen])
        if isinstance(values, Words)
        else values[chosen]
    )


LONG_NAME = 200
ColumnName = Annotated[
    str, Meta(max_length=LONG_NAME, pattern=r"^[^\x00-\x1f\x7f]*\Z")
]  # it is shown elsewhere
"""Of a column or of a category."""

MOST_CATEGORIES = 1000
"""Of one column."""


@dataclass(frozen=True)
class LayoutColumn:
    """A column of a table.

    Args:
      categories: in order, of a category; None for numbers.
      fill: what a missing cell gets; None where none may be missing.
    """

    name: ColumnName
    categories: (
        Annotated[tuple[ColumnName, ...], Meta(max_length=MOST_CATEGORIES)] | None
    ) = None
    fill: float | ColumnName | None = None

    @property
    def features(self) -> int:
        return 1 if self.categories is None else len(self.categories)

    def encode(self, values: ColumnValues) -> Float64:
        """Features, [rows, features]; numbers that are all missing may stand for any column."""
        if self.categories is None:
            if not isinstance(values, Words):
                missing = np.isnan(values)
                return np.where(missing, float(self._filled(missing)), values)[:, None]
            if (values.codes >= 0).any():
                raise UserError(
                    f"{self.name} has words, such as {_first(values)!r}, and is a column of numbers"
                )
            return np.full((len(values), 1), float(self._filled(values.codes < 0)))
        codes = self._codes(values)
        encoded = np.zeros((len(codes), len(self.categories)))
        rows = np.flatnonzero(codes >= 0)
        encoded[rows, codes[rows]] = 1.0
        return encoded

    def unseen(self, values: ColumnValues) -> dict[str, int]:
        """How many rows have each category that is none of the layout's."""
        if self.categories is None or not isinstance(values, Words):
            return {}
        return {
            name: count
            for name, count in values.counts().items()
            if name not in self.categories
        }

    def _codes(self, values: ColumnValues) -> Int64:
        """The place of each row's category, -1 for one that is not known, [rows]."""
        assert self.categories is not None
        place = {name: number for number, name in enumerate(self.categories)}
        if not isinstance(values, Words):
            if not np.isnan(values).all():
                raise UserError(
                    f"{self.name} has numbers, and is a category: give it with `categorical`"
                )
            values = Words(np.full(len(values), -1, np.int32), ())
        missing = place.get(str(self._filled(values.codes < 0)), -1)
        return np.array(
            [*(place.get(name, -1) for name in values.names), missing], np.int64
        )[values.codes]

    def _filled(self, missing: Flags) -> float | str:
        """What missing cells get; anything where there are none."""
        if self.fill is None and missing.any():
            count = f"{missing.sum()} missing value{'s' if missing.sum() > 1 else ''}"
            raise UserError(
                f"{self.name} has {count}, and there is nothing to put there: train with `impute`"
            )
        return 0.0 if self.fill is None else self.fill


@dataclass(frozen=True)
class Layout:
    """The columns that features are made of.

    Args:
      columns: in the order of their features.
      target: the name of the column to predict.
      dropped: names of columns that are left out where they are there.
    """

    columns: tuple[LayoutColumn, ...]
    target: ColumnName | None = None
    dropped: tuple[ColumnName, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def features(self) -> int:
        return sum(column.features for column in self.columns)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of each feature: the column's, or `sex=male` of a category.

        >>> Layout((LayoutColumn("age"), LayoutColumn("sex", ("female", "male")))).feature_names
        ('age', 'sex=female', 'sex=male')
        """
        return tuple(
            column.name if category is None else f"{column.name}={category}"
            for column in self.columns
            for category in (
                column.categories if column.categories is not None else (None,)
            )
        )

    @property
    def options(self) -> TableOptions:
        """With which a table is read that this layout is for; `encode` says where no cell may be missing."""
        categorical = tuple(
            column.name for column in self.columns if column.categories is not None
        )
        return TableOptions(self.target, self.dropped, categorical, "mean")

    def options_for(self, given: TableOptions) -> TableOptions:
        """The same with what a person says besides, of a table that is another: more to drop, or another target."""
        own = self.options
        dropped = tuple(dict.fromkeys((*own.drop, *given.drop)))
        return replace(
            own, target=given.target or own.target, drop=dropped, classes=given.classes
        )

    def encode(self, table: RawTable) -> Float64:
        """The features of a table's rows, [rows, features]; its columns may be in any order.

        Raises:
          UserError: a column is missing or is not known, or has something else in it than it should.
        """
        self.require_names(table.columns, table.name)
        try:
            return np.concatenate(
                [column.encode(table.columns[column.name]) for column in self.columns],
                axis=1,
            )
        except UserError as error:
            raise UserError(f"{table.name}: {error.args[0]}") from None

    def unseen(self, table: RawTable) -> dict[str, dict[str, int]]:
        """By column, how many rows have each category that the layout does not have; it is 0 in all features."""
        found = {
            column.name: column.unseen(table.columns[column.name])
            for column in self.columns
        }
        return {name: counts for name, counts in found.items() if counts}

    def require_names(self, names: Collection[str], where: str) -> None:
        """Refuses columns that are not these, in any order."""
        missing = [name for name in self.names if name not in names]
        extra = [name for name in names if name not in self.names]
        wrong = [f"has no column {', '.join(missing)}"] if missing else []
        if extra:
            wrong.append(
                f"has {', '.join(extra)}, which {'are' if len(extra) > 1 else 'is'} not known: `drop`"
            )
        if wrong:
            raise UserError(
                f"{where} {' and '.join(wrong)}; the columns are {', '.join(self.names)}"
            )

    def to_json(self) -> Any:
        """As plain values, for a file."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Layout":
        """Raises a ValueError where these are none."""
        return msgspec.convert(values, cls)


def _first(values: Words) -> str:
    return next(iter(values.counts()))


def in_words(unseen: Mapping[str, Mapping[str, int]]) -> str:
    """Categories that a layout does not have, as `Layout.unseen` gives them.

    >>> in_words({"sex": {"x": 2, "u": 1}})
    'sex x (2 rows), sex u (1 row)'
    """
    return ", ".join(
        f"{column} {name} ({count} row{'s' if count > 1 else ''})"
        for column, counts in unseen.items()
        for name, count in counts.items()
    )
