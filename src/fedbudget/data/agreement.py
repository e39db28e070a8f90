"""How several tables agree on one layout without sharing their rows.

Each table publishes a `TableDescription`: the names of columns and categories, counts,
means and standard deviations. With `impute`, it adds a median or a most frequent number
per column. From these, `agree_on_layout` computes the mean and the standard deviation of
every feature over the rows of all tables, with missing cells filled. The result is exact.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from sys import float_info
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
    TextColumn,
)
from fedbudget.errors import UserError
from fedbudget.settings.option import Impute, NotNegative

Kind = Literal["number", "category", "unknown"]
"""The kind of a column; unknown if no row has a value."""

_Count = Annotated[int, Meta(ge=1, lt=2**40)]
_Rows = Annotated[int, Meta(ge=0, lt=2**40)]
_Finite = Annotated[float, Meta(ge=-float_info.max, le=float_info.max)]


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of each column, [columns]."""

    mean: Float64
    deviation: Float64

    def __eq__(self, other: object) -> bool:
        """Compare all columns: a node that returns checks that its task is unchanged."""
        if not isinstance(other, Moments):
            return NotImplemented
        return np.array_equal(self.mean, other.mean) and np.array_equal(
            self.deviation, other.deviation
        )

    @classmethod
    def of(cls, values: Float64) -> "Moments":
        """Compute the moments of samples [samples, columns]."""
        return cls(values.mean(axis=0), values.std(axis=0))

    @classmethod
    def combine(cls, parts: "Sequence[Moments]", sizes: Sequence[int]) -> "Moments":
        """Return the moments of the union of several parts.

        Args:
          parts: the moments of each part.
          sizes: the number of samples of each part.
        """
        share = np.array(sizes, np.float64)[:, None] / sum(sizes)
        means = np.array([part.mean for part in parts])
        deviations = np.array([part.deviation for part in parts])
        mean = (share * means).sum(axis=0)
        variance = (share * (deviations**2 + (means - mean) ** 2)).sum(axis=0)
        return cls(mean, np.sqrt(variance))


@dataclass(frozen=True)
class ColumnDescription:
    """What a table publishes about one column.

    Args:
      kind: of the column.
      present: number of values; 0 if they are too few to publish.
      mean, deviation: of the values of a numeric column.
      fill: this table's fill value of a numeric column, if it is not the mean.
      weight: number of rows that support the fill value: all values for a median, those
        equal to it for the most frequent number.
      counts: number of rows per category.
    """

    kind: Kind
    present: _Rows = 0
    mean: _Finite = 0.0
    deviation: NotNegative = 0.0
    fill: _Finite | None = None
    weight: _Rows = 0
    counts: Annotated[dict[ColumnName, _Count], Meta(max_length=MOST_CATEGORIES)] = field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls, values: ColumnValues, impute: Impute | None, fewest: int
    ) -> "ColumnDescription":
        """Describe a column; see `TableDescription.of`."""
        if isinstance(values, TextColumn):
            counts = values.counts()
            kind: Kind = "category" if counts else "unknown"
            return cls(kind, sum(counts.values()), counts=counts)
        known = values[~np.isnan(values)]
        if not len(known):
            return cls("unknown")
        if len(known) < fewest:
            return cls("number")

        fill = None
        weight = 0
        if impute == "median":
            fill = float(np.median(known))
            weight = len(known)
        elif impute == "most-frequent":
            distinct, frequency = np.unique(known, return_counts=True)
            fill = float(distinct[frequency.argmax()])
            weight = int(frequency.max())
        mean = float(known.mean())
        return cls("number", len(known), mean, float(known.std()), fill, weight)


@dataclass(frozen=True)
class TableDescription:
    """What a table publishes about itself.

    Args:
      columns: by name, in order.
      rows: number of rows.
      impute: how missing cells are filled, if they are.
      dropped, target: as in `Layout`.
      standardise: whether features will be standardised.
    """

    columns: dict[ColumnName, ColumnDescription]
    rows: _Count
    impute: Impute | None = None
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
        """Describe a table.

        Args:
          fewest: columns with fewer values publish no statistics.
        """
        columns = {
            name: ColumnDescription.of(values, impute, fewest)
            for name, values in table.columns.items()
        }
        return cls(columns, len(table), impute, table.dropped, table.target, standardise)

    def require_fit(self, layout: Layout) -> None:
        """Refuse a table that does not match a layout."""
        if self.target != layout.target:
            raise UserError(
                f"its target is {self.target}, but the others' is {layout.target}: `target`"
            )
        layout.require_names(self.columns, "it")
        for column in layout.columns:
            own = self.columns[column.name]
            kind = "number" if column.categories is None else "category"
            if own.kind not in ("unknown", kind):
                others = "numbers" if column.categories is None else "categories"
                raise UserError(
                    f"its column {column.name} is a {own.kind}, but elsewhere it has "
                    f"{others}: `categorical`"
                )
            if column.fill is None and own.present < self.rows:
                raise UserError(
                    f"its column {column.name} has missing values, but the first nodes did "
                    "not set `impute`, so there is no replacement for them"
                )


def agree_on_layout(
    tables: Sequence[TableDescription], names: Sequence[str]
) -> tuple[Layout, Moments]:
    """Return the common layout of all tables, and the moments of every feature.

    Args:
      tables: their descriptions; the first sets the order of columns.
      names: of the tables, for errors.

    Raises:
      UserError: column names or kinds differ.
    """
    first = tables[0]
    impute = _impute(tables, names)
    for table, name in zip(tables[1:], names[1:], strict=True):
        _require_same_names(first, names[0], table, name)

    rows = sum(table.rows for table in tables)
    columns = []
    moments = []
    for name in first.columns:
        summaries = [table.columns[name] for table in tables]
        merge = _category if _is_category(name, summaries, names) else _number
        column, own = merge(name, summaries, rows, impute)
        columns.append(column)
        moments.append(own)
    dropped = tuple(dict.fromkeys(name for table in tables for name in table.dropped))
    mean = np.concatenate([each.mean for each in moments])
    deviation = np.concatenate([each.deviation for each in moments])
    return Layout(tuple(columns), first.target, dropped), Moments(mean, deviation)


def _impute(tables: Sequence[TableDescription], names: Sequence[str]) -> Impute | None:
    chosen: dict[Impute, str] = {}
    for table, name in zip(tables, names, strict=True):
        if table.impute is not None:
            chosen.setdefault(table.impute, name)
    if len(chosen) > 1:
        how = " and ".join(f"{impute} at {name}" for impute, name in chosen.items())
        raise UserError(f"all must fill missing values in the same way: `impute` is {how}")
    return next(iter(chosen), None)


def _require_same_names(
    one: TableDescription, here: str, other: TableDescription, there: str
) -> None:
    if one.target != other.target:
        raise UserError(
            f"the target is {one.target} in {here} and {other.target} in {there}: "
            "name it with `target`"
        )
    missing = [name for name in one.columns if name not in other.columns]
    extra = [name for name in other.columns if name not in one.columns]
    wrong = [f"{there} has no column {', '.join(missing)}"] if missing else []
    if extra:
        wrong.append(f"{here} has no column {', '.join(extra)}")
    if wrong:
        raise UserError(
            "all tables need the same columns, in any order: "
            f"{', and '.join(wrong)}; `drop` leaves columns out"
        )


def _is_category(
    name: str, summaries: Sequence[ColumnDescription], tables: Sequence[str]
) -> bool:
    kinds = [each.kind for each in summaries]
    if "number" in kinds and "category" in kinds:
        numbers = tables[kinds.index("number")]
        texts = tables[kinds.index("category")]
        raise UserError(
            f"{name} has numbers in {numbers} and text in {texts}: if it is a category, "
            f"pass `categorical` {name} everywhere"
        )
    return "category" in kinds


def _category(
    name: str, summaries: Sequence[ColumnDescription], rows: int, impute: Impute | None
) -> tuple[LayoutColumn, Moments]:
    counts = Counter[str]()
    for each in summaries:
        counts.update(each.counts)
    if len(counts) > MOST_CATEGORIES:
        raise UserError(
            f"{name} has {len(counts)} categories in all tables together; "
            f"at most {MOST_CATEGORIES} are possible: `drop` it"
        )
    categories = tuple(sorted(counts, key=class_sort_key))
    fill = None
    if impute is not None:
        fill = max(categories, key=counts.__getitem__)
        counts[fill] += rows - counts.total()
    share = np.array([counts[category] for category in categories]) / rows
    moments = Moments(share, np.sqrt(share * (1 - share)))
    return LayoutColumn(name, categories, fill), moments


def _number(
    name: str, summaries: Sequence[ColumnDescription], rows: int, impute: Impute | None
) -> tuple[LayoutColumn, Moments]:
    known = [each for each in summaries if each.present]
    if not known:
        raise UserError(f"{name} has too few values in every table: `drop` it")
    sizes = [each.present for each in known]
    moments = Moments.combine(
        [Moments(np.array([each.mean]), np.array([each.deviation])) for each in known],
        sizes,
    )
    if impute is None:
        return LayoutColumn(name), moments

    fill = float(moments.mean[0]) if impute == "mean" else _typical(known, impute)
    present = sum(sizes)
    if rows > present:
        filled = Moments(np.array([fill]), np.zeros(1))
        moments = Moments.combine([moments, filled], [present, rows - present])
    return LayoutColumn(name, fill=fill), moments


def _typical(known: Sequence[ColumnDescription], impute: Impute) -> float:
    """Return the weighted median of medians, or the most frequent number of all tables."""
    weights: defaultdict[float, int] = defaultdict(int)
    for each in known:
        if each.fill is not None:
            weights[each.fill] += each.weight
    values = sorted(weights)
    if impute == "most-frequent":
        return max(values, key=weights.__getitem__)
    half = np.cumsum([weights[value] for value in values]) >= sum(weights.values()) / 2
    return values[int(half.argmax())]


def class_sort_key(name: str) -> tuple[int, float, str]:
    """Sort key of classes and categories: numbers by size, then texts."""
    try:
        return (0, float(name), name)
    except ValueError:
        return (1, 0.0, name)


def describe_uneven_classes(classes: Mapping[str, Collection[str]]) -> str | None:
    """Describe the classes that only some owners have; None if all have the same.

    Args:
      classes: by owner.

    >>> describe_uneven_classes({"north": ["ill", "well"], "south": ["ill", "Well"]})
    'classes that only some have: Well (south); well (north)'
    """
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for owner, own in classes.items():
        for name in own:
            owners[name].append(owner)
    uneven = [name for name in owners if len(owners[name]) < len(classes)]
    uneven.sort(key=class_sort_key)
    texts = [f"{name} ({_shortened(owners[name])})" for name in uneven]
    return f"classes that only some have: {_shortened(texts, '; ')}" if texts else None


def _shortened(names: Sequence[str], between: str = ", ", most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
