"""How the columns of a table become features: the same for every table, whatever the order of its columns.

A column is found by its name. Numbers are a feature each; a category is as many as it has categories, of which the one
that a row has is 1 and the others are 0. A missing cell gets the column's value for that, where there is one. A
category that nobody had when the layout was made is 0 in all of these features.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fedbudget.arrays import Flags, Float64, Int64
from fedbudget.data.tables import ColumnValues, RawTable, TableOptions, Words
from fedbudget.errors import UserError

LONG_NAME = 200
ColumnName = Annotated[str, Meta(max_length=LONG_NAME, pattern=r"^[^\x00-\x1f\x7f]*\Z")]  # it is shown elsewhere
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
    categories: Annotated[tuple[ColumnName, ...], Meta(max_length=MOST_CATEGORIES)] | None = None
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
                raise UserError(f"{self.name} has words, such as {_first(values)!r}, and is a column of numbers")
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
        return {name: count for name, count in values.counts().items() if name not in self.categories}

    def _codes(self, values: ColumnValues) -> Int64:
        """The place of each row's category, -1 for one that is not known, [rows]."""
        assert self.categories is not None
        place = {name: number for number, name in enumerate(self.categories)}
        if not isinstance(values, Words):
            if not np.isnan(values).all():
                raise UserError(f"{self.name} has numbers, and is a category: give it with `categorical`")
            values = Words(np.full(len(values), -1, np.int32), ())
        missing = place.get(str(self._filled(values.codes < 0)), -1)
        return np.array([*(place.get(name, -1) for name in values.names), missing], np.int64)[values.codes]

    def _filled(self, missing: Flags) -> float | str:
        """What missing cells get; anything where there are none."""
        if self.fill is None and missing.any():
            count = f"{missing.sum()} missing value{'s' if missing.sum() > 1 else ''}"
            raise UserError(f"{self.name} has {count}, and there is nothing to put there: train with `impute`")
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
            for category in (column.categories if column.categories is not None else (None,))
        )

    @property
    def options(self) -> TableOptions:
        """With which a table is read that this layout is for; `encode` says where no cell may be missing."""
        categorical = tuple(column.name for column in self.columns if column.categories is not None)
        return TableOptions(self.target, self.dropped, categorical, "mean")

    def options_for(self, given: TableOptions) -> TableOptions:
        """The same with what a person says besides, of a table that is another: more to drop, or another target."""
        own = self.options
        dropped = tuple(dict.fromkeys((*own.drop, *given.drop)))
        return replace(own, target=given.target or own.target, drop=dropped, classes=given.classes)

    def encode(self, table: RawTable) -> Float64:
        """The features of a table's rows, [rows, features]; its columns may be in any order.

        Raises:
          UserError: a column is missing or is not known, or has something else in it than it should.
        """
        self.require_names(table.columns, table.name)
        try:
            return np.concatenate([column.encode(table.columns[column.name]) for column in self.columns], axis=1)
        except UserError as error:
            raise UserError(f"{table.name}: {error.args[0]}") from None

    def unseen(self, table: RawTable) -> dict[str, dict[str, int]]:
        """By column, how many rows have each category that the layout does not have; it is 0 in all features."""
        found = {column.name: column.unseen(table.columns[column.name]) for column in self.columns}
        return {name: counts for name, counts in found.items() if counts}

    def require_names(self, names: Collection[str], where: str) -> None:
        """Refuses columns that are not these, in any order."""
        missing = [name for name in self.names if name not in names]
        extra = [name for name in names if name not in self.names]
        wrong = [f"has no column {', '.join(missing)}"] if missing else []
        if extra:
            wrong.append(f"has {', '.join(extra)}, which {'are' if len(extra) > 1 else 'is'} not known: `drop`")
        if wrong:
            raise UserError(f"{where} {' and '.join(wrong)}; the columns are {', '.join(self.names)}")

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
