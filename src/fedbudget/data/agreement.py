"""Mean and deviation of columns, of several parts together without their rows.

What tables tell of their columns, and how all that they tell becomes one layout.

Nothing of a single row is told, but what is in the nature of it: the names of columns and of categories, and, where
missing cells are to get it, a median or a most frequent number. From this the mean and the deviation of every feature
over all rows of all tables are known exactly, with missing cells filled, although nobody has seen more than one table.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from fedbudget.arrays import Float64
from fedbudget.data.tables import (
    MOST_CATEGORIES,
    ColumnName,
    ColumnValues,
    Layout,
    LayoutColumn,
    RawTable,
    Words,
)
from fedbudget.errors import UserError
from fedbudget.settings.option import Impute


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of each column, [columns]; a deviation is 0 where a column never changes."""

    mean: Float64
    deviation: Float64

    def __eq__(self, other: object) -> bool:
        """Of all columns: a node that comes back asks whether the task is still the one it knows."""
        if not isinstance(other, Moments):
            return NotImplemented
        return np.array_equal(self.mean, other.mean) and np.array_equal(
            self.deviation, other.deviation
        )

    @classmethod
    def of(cls, values: Float64) -> "Moments":
        """Of samples, [samples, columns]."""
        return cls(values.mean(axis=0), values.std(axis=0))

    @classmethod
    def together(cls, parts: "Sequence[Moments]", sizes: Sequence[int]) -> "Moments":
        """Of all samples of several parts."""
        share = np.array(sizes, np.float64)[:, None] / sum(sizes)
        means = np.array([part.mean for part in parts])
        deviations = np.array([part.deviation for part in parts])
        mean = (share * means).sum(axis=0)
        return cls(
            mean, np.sqrt((share * (deviations**2 + (means - mean) ** 2)).sum(axis=0))
        )


Kind = Literal["number", "category", "unknown"]
"""Of a column; unknown where it has no value in any row."""

_Count = Annotated[int, Meta(ge=1, lt=2**40)]


@dataclass(frozen=True)
class TableDescription:
    """What a table tells of itself; the order of columns means nothing, but all lists have the same.

    Args:
      names: of columns.
      kinds: of columns.
      rows: how many there are.
      present: of columns, how many rows have a value; 0 where they are too few to tell of.
      numbers: of columns of numbers, mean and deviation of the values there are; zeros elsewhere.
      categories: of categories in their order, how many rows have each.
      impute: how missing cells are to be filled, if they are.
      fills: of columns of numbers, what they would be filled with here, where that is not the mean; NaN elsewhere.
      weights: of columns of numbers, how many rows a fill stands for: all that have a value, or those that have it.
      dropped, target: as of a `Layout`.
      standardise: whether features are to be standardised.
    """

    names: tuple[ColumnName, ...]
    kinds: tuple[Kind, ...]
    rows: Annotated[int, Meta(ge=1, lt=2**40)]
    present: Float64
    numbers: Moments
    categories: tuple[
        Annotated[dict[ColumnName, _Count], Meta(max_length=MOST_CATEGORIES)], ...
    ] = ()
    impute: Impute | None = None
    fills: Float64 | None = None
    weights: Float64 | None = None
    dropped: tuple[ColumnName, ...] = ()
    target: ColumnName | None = None
    standardise: bool = True

    @classmethod
    def of(
        cls,
        table: RawTable,
        impute: Impute | None,
        *,
        fewest: int = 1,
        standardise: bool = True,
    ) -> "TableDescription":
        """
        Args:
          fewest: values whose mean may be told; of a column with fewer nothing is.
        """
        kinds: list[Kind] = []
        typical = impute not in (None, "mean")
        figures: list[_Figures] = []
        for values in table.columns.values():
            kind, known = _figures(values, impute, fewest)
            kinds.append(kind)
            figures.append(known)
        present, mean, deviation, fill, weight = np.array(figures, np.float64).T
        return cls(
            tuple(table.columns),
            tuple(kinds),
            len(table),
            present,
            Moments(mean, deviation),
            tuple(
                filter(
                    None,
                    (
                        each.counts()
                        for each in table.columns.values()
                        if isinstance(each, Words)
                    ),
                )
            ),
            impute,
            fill if typical else None,
            weight if typical else None,
            table.dropped,
            table.target,
            standardise,
        )

    def require_fit(self, layout: Layout) -> None:
        """Refuses a table that a layout is not for."""
        if self.target != layout.target:
            raise UserError(
                f"its target is {self.target}, and that of the others {layout.target}: `target`"
            )
        layout.require_names(self.names, "it")
        for column in layout.columns:
            told = self.column(column.name)
            if told.kind not in (
                "unknown",
                "number" if column.categories is None else "category",
            ):
                others = "numbers" if column.categories is None else "categories"
                raise UserError(
                    f"its column {column.name} is a {told.kind}, and of {others} elsewhere: `categorical`"
                )
            if column.fill is None and told.present < self.rows:
                raise UserError(
                    f"its column {column.name} has missing values, and none of those that came before has said by "
                    "`impute` what to put there"
                )

    def column(self, name: str) -> "_Told":
        """What is told of one column."""
        place = self.names.index(name)
        kind = self.kinds[place]
        counts: Mapping[str, int] = {}
        if kind == "category":
            counts = self.categories[self.kinds[:place].count("category")]
        present = int(self.present[place]) if kind != "category" else sum(counts.values())
        mean = float(self.numbers.mean[place])
        deviation = float(self.numbers.deviation[place])
        if self.fills is None or self.weights is None:
            return _Told(kind, self.rows, present, mean, deviation, counts)
        fill = float(self.fills[place])
        weight = int(self.weights[place])
        return _Told(kind, self.rows, present, mean, deviation, counts, fill, weight)


@dataclass(frozen=True)
class _Told:
    kind: Kind
    rows: int
    present: int
    mean: float
    deviation: float
    counts: Mapping[str, int]
    fill: float = np.nan
    weight: int = 0


_Figures = tuple[int, float, float, float, int]
"""How many are present, mean, deviation, what would be filled in, and how many rows that stands for."""


def _figures(
    values: ColumnValues, impute: Impute | None, fewest: int
) -> tuple[Kind, _Figures]:
    nothing = (0, 0.0, 0.0, np.nan, 0)
    if isinstance(values, Words):
        return ("category" if values.counts() else "unknown"), nothing
    known = values[~np.isnan(values)]
    if not len(known):
        return "unknown", nothing
    if len(known) < fewest:
        return "number", nothing
    fill = np.nan
    weight = 0
    if impute == "median":
        fill = float(np.median(known))
        weight = len(known)
    elif impute == "most-frequent":
        distinct, counts = np.unique(known, return_counts=True)
        fill = float(distinct[counts.argmax()])
        weight = int(counts.max())
    return "number", (len(known), float(known.mean()), float(known.std()), fill, weight)


def agree_on_layout(
    tables: Sequence[TableDescription], names: Sequence[str]
) -> tuple[Layout, Moments]:
    """The layout for all tables, in the order of the first one's columns; and mean and deviation of every feature.

    Args:
      names: what to call the tables in errors.

    Raises:
      UserError: they have not the same columns, or a column is not of one kind.
    """
    first = tables[0]
    impute = _impute(tables, names)
    for table, name in zip(tables[1:], names[1:], strict=True):
        _require_same_names(first, names[0], table, name)
    columns = []
    moments = []
    for name in first.names:
        told = [table.column(name) for table in tables]
        kind = _kind(name, told, names)
        if kind == "category":
            column, known = _category(name, told, impute)
        else:
            column, known = _number(name, told, impute)
        columns.append(column)
        moments.append(known)
    dropped = tuple(dict.fromkeys(name for table in tables for name in table.dropped))
    together = Moments(
        *(
            np.concatenate(each)
            for each in zip(*((m.mean, m.deviation) for m in moments), strict=True)
        )
    )
    return Layout(tuple(columns), first.target, dropped), together


def _impute(tables: Sequence[TableDescription], names: Sequence[str]) -> Impute | None:
    chosen: dict[Impute, str] = {}
    for table, name in zip(tables, names, strict=True):
        if table.impute is not None:
            chosen.setdefault(table.impute, name)
    if len(chosen) > 1:
        how = " and ".join(f"{impute} at {name}" for impute, name in chosen.items())
        raise UserError(f"missing values are filled in one way by all: `impute` is {how}")
    return next(iter(chosen), None)


def _require_same_names(
    one: TableDescription, here: str, other: TableDescription, there: str
) -> None:
    missing = [name for name in one.names if name not in other.names]
    extra = [name for name in other.names if name not in one.names]
    if one.target != other.target:
        raise UserError(
            f"the target is {one.target} in {here} and {other.target} in {there}: name it with `target`"
        )
    wrong = [f"{there} has no column {', '.join(missing)}"] if missing else []
    if extra:
        wrong.append(f"{here} has no column {', '.join(extra)}")
    if wrong:
        raise UserError(
            f"all need the same columns, in any order: {', and '.join(wrong)}; `drop` leaves some out"
        )


def _kind(name: str, told: Sequence[_Told], names: Sequence[str]) -> Kind:
    """Of one column in all tables, of which some may have no value."""
    where = {
        each.kind: table
        for each, table in zip(reversed(told), reversed(names), strict=True)
    }
    if "number" in where and "category" in where:
        raise UserError(
            f"{name} has numbers in {where['number']} and words in {where['category']}: with `categorical` {name} "
            "everywhere it is a category, if it is one"
        )
    return "category" if "category" in where else "number"


def _category(
    name: str, told: Sequence[_Told], impute: Impute | None
) -> tuple[LayoutColumn, Moments]:
    counts: dict[str, int] = {}
    for each in told:
        for category, count in each.counts.items():
            counts[category] = counts.get(category, 0) + count
    if len(counts) > MOST_CATEGORIES:
        raise UserError(
            f"{name} has {len(counts)} categories in all, and {MOST_CATEGORIES} is the most: `drop` it"
        )
    categories = tuple(sorted(counts, key=in_order))
    fill = (
        max(categories, key=lambda category: counts[category])
        if impute is not None
        else None
    )
    rows = sum(each.rows for each in told)
    present = sum(each.present for each in told)
    share = (
        np.array(
            [
                counts[category] + (rows - present) * (category == fill)
                for category in categories
            ]
        )
        / rows
    )
    return LayoutColumn(name, categories, fill), Moments(
        share, np.sqrt(share * (1 - share))
    )


def _number(
    name: str, told: Sequence[_Told], impute: Impute | None
) -> tuple[LayoutColumn, Moments]:
    known = [each for each in told if each.present]
    if not known:
        raise UserError(
            f"{name} has too few values to say anything of them, in every table: `drop` it"
        )
    sizes = [each.present for each in known]
    moments = Moments.together(
        [Moments(np.array([m.mean]), np.array([m.deviation])) for m in known], sizes
    )
    rows = sum(each.rows for each in told)
    present = sum(sizes)
    if impute is None:
        return LayoutColumn(name), moments
    fill = float(moments.mean[0]) if impute == "mean" else _typical(known, impute)
    filled = Moments(np.array([fill]), np.zeros(1))
    if rows > present:
        moments = Moments.together([moments, filled], [present, rows - present])
    return LayoutColumn(name, fill=fill), moments


def _typical(known: Sequence[_Told], impute: Impute) -> float:
    """The weighted median of the tables' medians, or the most frequent of their most frequent numbers."""
    weights: dict[float, int] = {}
    for each in known:
        if each.weight:
            weights[each.fill] = weights.get(each.fill, 0) + each.weight
    values = sorted(weights)
    if impute == "most-frequent":
        return max(values, key=lambda value: weights[value])
    half = np.cumsum([weights[value] for value in values]) >= sum(weights.values()) / 2
    return values[int(half.argmax())]


def in_order(name: str) -> tuple[int, float, str]:
    """What classes and categories are sorted by: numbers by their size, before words."""
    try:
        return (0, float(name), name)
    except ValueError:
        return (1, 0.0, name)


def classes_of_some(classes: Mapping[str, Collection[str]]) -> str | None:
    """Which classes only some have, and who, in words; None where all have the same.

    Args:
      classes: by who has them.

    >>> classes_of_some({"north": ["ill", "well"], "south": ["ill", "Well"]})
    'classes that only some have: Well (south); well (north)'
    """
    owners: dict[str, list[str]] = {}
    for name, own in classes.items():
        for each in own:
            owners.setdefault(each, []).append(name)
    rare = sorted(
        (each for each, names in owners.items() if len(names) < len(classes)), key=in_order
    )
    some = [f"{each} ({_some(owners[each])})" for each in rare]
    return f"classes that only some have: {_some(some, '; ')}" if some else None


def _some(names: Sequence[str], between: str = ", ", most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
