"""A description of tables by site, before training, and what is suspicious in it.

- Each site summarises its own columns. Totals and findings are computed from these
  summaries alone, so that rows could stay at their sites.
- Reading does not stop at problems: they become findings.
- A mean is suspicious if it is three standard deviations of the other sites away from their
  mean, as with another unit.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from fedbudget.data import files, natural
from fedbudget.data.agreement import class_sort_key
from fedbudget.data.columns import category_name
from fedbudget.data.read_tables import (
    TABLES,
    by_site,
    from_frame,
    is_frame,
    is_table,
    read_consistently,
    read_file,
)
from fedbudget.data.tables import (
    ColumnValues,
    RawTable,
    TableOptions,
    TextColumn,
    missing_cells,
)
from fedbudget.errors import UserError, argument
from fedbudget.settings.option import choices_text

_FAR = 3.0  # standard deviations between the mean of a site and that of the others
_SPREAD = 10.0  # ratio of standard deviations
_ENOUGH = 10  # values of a site whose mean and deviation are compared
_MOST_CLASSES = 20
_SITES_SHOWN = 8
_CATEGORIES_SHOWN = 6
_NAMES_SHOWN = 4
_WIDTH = 80
_HEADING = f"{'column':<14} {'site':<11} {'rows':>6} empty {'mean':>8} {'sd':>8}  range"


@dataclass(frozen=True)
class ColumnSummary:
    """A column at one site, or at all sites together.

    Args:
      rows: number of rows.
      missing: rows without a value.
      mean, deviation, smallest, largest: of the numbers; None if there are none.
      counts: rows per category, for a column of categories.
    """

    rows: int
    missing: int
    mean: float | None = None
    deviation: float | None = None
    smallest: float | None = None
    largest: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: ColumnValues) -> "ColumnSummary":
        """Summarise the values of a site."""
        missing = int(missing_cells(values).sum())
        if isinstance(values, TextColumn):
            return cls(len(values), missing, counts=values.counts())
        known = values[np.isfinite(values)]
        if not len(known):
            return cls(len(values), missing)
        low = float(known.min())
        high = float(known.max())
        deviation = float(known.std()) if high > low else 0.0
        return cls(len(values), missing, float(known.mean()), deviation, low, high)

    @classmethod
    def total(cls, parts: "Sequence[ColumnSummary]") -> "ColumnSummary":
        """Return the summary of all sites together."""
        rows = sum(part.rows for part in parts)
        missing = sum(part.missing for part in parts)
        counts = Counter[str]()
        for part in parts:
            counts.update(part.counts)
        numeric = [part for part in parts if part.mean is not None]
        if not numeric:
            return cls(rows, missing, counts=dict(counts))
        sizes = np.array([part.present for part in numeric], np.float64)
        means = np.array([part.mean for part in numeric])
        deviations = np.array([part.deviation for part in numeric])
        mean = float((sizes * means).sum() / sizes.sum())
        squares = sizes * (deviations**2 + (means - mean) ** 2)
        low = min(part.smallest for part in numeric if part.smallest is not None)
        high = max(part.largest for part in numeric if part.largest is not None)
        deviation = math.sqrt(squares.sum() / sizes.sum()) if high > low else 0.0
        return cls(rows, missing, mean, deviation, low, high, dict(counts))

    @property
    def present(self) -> int:
        """The number of rows with a value."""
        return self.rows - self.missing

    def to_json(self) -> dict[str, Any]:
        """Return the figures; those that do not apply are left out."""
        return {
            name: value for name, value in vars(self).items() if value not in (None, {})
        }


@dataclass(frozen=True)
class Description:
    """The columns of tables by site; `print` shows them as a table of 80 columns.

    Args:
      name: of the data.
      target: name of the column to predict.
      sites: names of the sites.
      columns: by name, then by site; the target is the last.
      findings: what is suspicious, each a sentence.

    >>> table = {"age": [40.0, 50.0], "ill": ["no", "yes"]}
    >>> described = describe([table, table], names=["north", "south"])
    >>> described.columns["age"]["north"].mean, described.total("age").rows
    (45.0, 4)
    """

    name: str
    target: str
    sites: tuple[str, ...]
    columns: Mapping[str, Mapping[str, ColumnSummary]] = field(repr=False)
    findings: tuple[str, ...] = ()

    def total(self, column: str) -> ColumnSummary:
        """Return the summary of a column over all sites."""
        return ColumnSummary.total(list(self.columns[column].values()))

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows of each site."""
        return {site: own.rows for site, own in self.columns[self.target].items()}

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        columns = {
            name: {
                "total": self.total(name).to_json(),
                "sites": {site: own.to_json() for site, own in sites.items()},
            }
            for name, sites in self.columns.items()
        }
        return {
            "name": self.name,
            "target": self.target,
            "rows": self.rows,
            "columns": columns,
            "findings": list(self.findings),
        }

    def __str__(self) -> str:
        sites = "1 site" if len(self.sites) == 1 else f"{len(self.sites)} sites"
        features = (
            "1 column" if len(self.columns) == 2 else f"{len(self.columns) - 1} columns"
        )
        total = sum(self.rows.values())
        lines = [
            f"{self.name}: {total:,} rows at {sites}, {features}, target {self.target}"
        ]
        if len(self.sites) > _SITES_SHOWN:
            lines.append("of each column, the sites with the smallest and the largest mean")
        lines.append(_HEADING)
        for name in (self.target, *list(self.columns)[:-1]):
            lines += self._lines(name)
        if self.findings:
            many = len(self.findings)
            lines += ["", "1 finding:" if many == 1 else f"{many} findings:"]
            for finding in self.findings:
                lines += wrap(finding, _WIDTH, initial_indent="- ", subsequent_indent="  ")
        return "\n".join(lines)

    def _lines(self, column: str) -> list[str]:
        """Return a line for each site, or for the most different ones, and for all."""
        sites = self.columns[column]
        shown = list(sites)
        if len(shown) > _SITES_SHOWN:
            shown.sort(key=lambda site: sites[site].mean or 0.0)
            shown = [shown[0], shown[-1]]
        lines = [_line("", site, sites[site]) for site in shown if len(sites) > 1]
        return [_line(column, "all", self.total(column)), *lines]


def _line(column: str, site: str, own: ColumnSummary) -> str:
    missing = _percent(own.missing / own.rows) if own.missing else ""
    start = f"{_cut(column, 14):<14} {_cut(site, 11):<11} {own.rows:>6} {missing:>5}"
    if own.mean is not None and own.deviation is not None:
        ends = f"{_short(own.smallest)} to {_short(own.largest)}"
        line = f"{start} {_short(own.mean):>8} {_short(own.deviation):>8}  {ends}"
        return _cut(line, _WIDTH)
    names = sorted(own.counts, key=class_sort_key)
    if len(names) > _CATEGORIES_SHOWN:
        names.sort(key=lambda name: -own.counts[name])
    texts = [f"{name} {_percent(own.counts[name] / own.present)}" for name in names]
    return f"{start}  {_cut(', '.join(texts), _WIDTH - len(start) - 2)}".rstrip()


def _short(number: float | None) -> str:
    if number is None:
        return ""
    text = f"{number:.4g}"
    return text if len(text) <= 8 else f"{number:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def describe(
    data: Any,
    *,
    nodes: str | None = None,
    target: str | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    names: Sequence[str] = (),
    data_dir: str | Path | None = None,
) -> Description:
    """Describe tables by site before training, and find what is suspicious.

    Nothing is sent anywhere: the tables are read on this machine.

    Args:
      data: the path of a table or of a folder with one table per site; the name of a
        natural federation with tables; a DataFrame; or a list of DataFrames.
      nodes: column whose values are the sites.
      target: column to predict; the last column by default.
      drop: columns to leave out.
      categorical: columns with numbers that are categories.
      missing: further texts that mark a missing cell.
      names: of the sites, for a list of DataFrames.
      data_dir: the folder to search first for a named dataset.

    Returns:
      The description; `print` it, or use its figures.

    >>> described = describe("heart-disease")
    >>> described.rows
    {'cleveland': 303, 'hungarian': 294, 'switzerland': 123, 'va': 200}
    >>> print(described.findings[0])
    chol is empty at switzerland
    """
    options = TableOptions(
        target,
        tuple(drop),
        tuple(categorical),
        site=nodes,
        missing=tuple(missing),
    )
    return summarise(data, options, names=names, data_dir=data_dir)


def summarise(
    data: Any,
    options: TableOptions,
    *,
    names: Sequence[str] = (),
    data_dir: str | Path | None = None,
    spell: Callable[..., str] = argument,
) -> Description:
    """Describe tables; see `describe`.

    Args:
      spell: converts the options that findings name.
    """
    # With `impute`, missing cells are no problem of the table: they are counted here.
    options = replace(options, impute="mean")
    nodes = options.site
    if isinstance(data, str) and data in natural.FEDERATIONS:
        federation = natural.FEDERATIONS[data]
        if nodes not in (None, federation.site):
            raise UserError(f"{data} has the sites by:{federation.site}, not by:{nodes}")
        folder = None if data_dir is None else Path(data_dir)
        table = federation.table(data, folder)
        return _described(data, [table], federation.options, spell)

    readers: list[Callable[[TableOptions], RawTable]]
    if isinstance(data, str | Path):
        name = str(data)
        paths = _paths(Path(data))
        readers = [partial(read_file, path) for path in paths]
        names = [path.stem for path in paths]
    else:
        frames = [data] if is_frame(data) else list(data)
        name = "DataFrame" if is_frame(data) else "tables"
        names = names or [f"table {number}" for number in range(len(frames))]
        if len(names) != len(frames):
            raise UserError(f"{len(names)} names do not fit {len(frames)} tables")
        pairs = zip(frames, names, strict=True)
        readers = [partial(from_frame, frame, each) for frame, each in pairs]
    if not readers:
        raise UserError("there are no tables to describe")
    tables = read_consistently(readers, options)
    if nodes is None:
        pairs_named = zip(tables, names, strict=True)
        tables = [replace(table, name=each) for table, each in pairs_named]
    return _described(name, tables, options, spell)


def _paths(path: Path) -> list[Path]:
    paths = files.paths_of(path) if path.exists() else []
    if not paths or not is_table(paths[0]):
        use = choices_text(list(natural.FEDERATIONS))
        raise UserError(
            f"{path} is no table: describe takes a {choices_text(TABLES)}, a folder of "
            f"them, or {use}"
        )
    return paths


def _described(
    name: str,
    tables: Sequence[RawTable],
    options: TableOptions,
    spell: Callable[..., str],
) -> Description:
    alike: dict[tuple[str, str], list[str]] = {}
    for table in tables:
        for problem in table.problems:
            text = f"{table.name}: {UserError(problem.text).spelled(spell)}"
            alike.setdefault((problem.kind, problem.column), []).append(text)
    problems = [
        f"{text} (the same in {len(others)} more)" if others else text
        for text, *others in alike.values()
    ]
    refused = {
        problem.column
        for table in tables
        for problem in table.problems
        if problem.kind in ("date", "ID", "text")
    }
    first = tables[0]
    target = first.target or ""
    if options.site is not None:
        tables = by_site(name, tables, options.site)
    columns = [
        column
        for column in dict.fromkeys(title for table in tables for title in table.columns)
        if column not in refused
    ]
    summaries: dict[str, dict[str, ColumnSummary]] = {
        column: {
            table.name: ColumnSummary.of(table.columns[column])
            for table in tables
            if column in table.columns
        }
        for column in columns
    }
    summaries[target] = {table.name: _target(tables, table) for table in tables}
    sites = tuple(table.name for table in tables)
    findings = [
        finding
        for column, by_sites in summaries.items()
        for finding in _findings(column, by_sites, sites, is_target=column == target)
    ]
    return Description(name, target, sites, summaries, (*problems, *findings))


def _target(tables: Sequence[RawTable], table: RawTable) -> ColumnSummary:
    """Summarise the target: as classes if it has few different whole numbers."""
    everything = [each.targets for each in tables if each.targets is not None]
    assert table.targets is not None
    texts = any(isinstance(each, TextColumn) for each in everything)
    if texts or isinstance(table.targets, TextColumn):
        return ColumnSummary.of(table.targets)
    values = np.unique(np.concatenate([np.asarray(each) for each in everything]))
    values = values[np.isfinite(values)]
    if len(values) > _MOST_CLASSES or (values != np.round(values)).any():
        return ColumnSummary.of(table.targets)
    names = ["" if value != value else category_name(str(value)) for value in table.targets]
    return ColumnSummary.of(TextColumn.of(names))


def _findings(
    column: str,
    sites: Mapping[str, ColumnSummary],
    names: Sequence[str],
    *,
    is_target: bool,
) -> list[str]:
    """Return what is suspicious in a column."""
    total = ColumnSummary.total(list(sites.values()))
    found = []
    absent = [name for name in names if name not in sites]
    if absent:
        found.append(f"{column} is not in the table of {_names(absent)}")
    if not total.present:
        return [*found, f"{column} is empty at every site"]
    if total.smallest == total.largest and len(total.counts) < 2:
        return [*found, f"{column} has the same value in all rows: {_value(total)}"]
    empty = [name for name, own in sites.items() if not own.present]
    if empty:
        found.append(f"{column} is empty at {_names(empty)}")
    mostly = [name for name, own in sites.items() if own.present < own.missing]
    mostly = [name for name in mostly if name not in empty]
    if mostly:
        shares = [
            f"{name} ({sites[name].missing / sites[name].rows:.0%})" for name in mostly
        ]
        found.append(f"{column} is mostly missing at {_names(shares)}")

    fixed = [name for name, own in sites.items() if _fixed(own)]
    if fixed and 2 * len(fixed) <= len(sites):
        values = [f"{name} ({_value(sites[name])})" for name in fixed]
        found.append(f"{column} has the same value in all rows of {_names(values)}")

    kinds = {own.mean is None for own in sites.values() if own.present}
    if len(kinds) > 1:
        words = [name for name, own in sites.items() if own.counts]
        found.append(f"{column} has text at {_names(words)} and numbers elsewhere")
    elif total.mean is not None:
        found += _different(column, sites)
    elif len(sites) > 1:
        found += _only_at_one(column, sites, is_target=is_target)
    return found


def _fixed(own: ColumnSummary) -> bool:
    """Return whether a site has many equal numbers and no other."""
    return own.present >= _ENOUGH and own.mean is not None and own.deviation == 0


def _value(own: ColumnSummary) -> str:
    return _short(own.mean) if own.mean is not None else next(iter(own.counts))


def _different(column: str, sites: Mapping[str, ColumnSummary]) -> list[str]:
    """Return the sites whose numbers are far from those of the others."""
    found = []
    for name, own in sites.items():
        others = [each for other, each in sites.items() if other != name]
        rest = ColumnSummary.total(others) if others else own
        if min(own.present, rest.present) < _ENOUGH:
            continue
        assert own.mean is not None
        assert own.deviation is not None
        assert rest.mean is not None
        assert rest.deviation is not None
        where = f"{column} has the mean {_short(own.mean)} at {name}"
        rounding = 1e-9 * abs(rest.mean)
        if abs(own.mean - rest.mean) > _FAR * rest.deviation + rounding:
            found.append(
                f"{where} and {_short(rest.mean)} elsewhere (sd {_short(rest.deviation)}): "
                "is it another unit?"
            )
        elif own.deviation > _SPREAD * rest.deviation + rounding:
            found.append(
                f"{column} has the sd {_short(own.deviation)} at {name} and "
                f"{_short(rest.deviation)} elsewhere: is it another unit?"
            )
    return found


def _only_at_one(
    column: str, sites: Mapping[str, ColumnSummary], *, is_target: bool
) -> list[str]:
    """Return the categories that only one site has, and sites with a single class."""
    owners: dict[str, list[str]] = {}
    for name, own in sites.items():
        for category in own.counts:
            owners.setdefault(category, []).append(name)
    what = "class" if is_target else "category"
    found = []
    for name in sites:
        only = [category for category, own in owners.items() if own == [name]]
        if only:
            only.sort(key=class_sort_key)
            found.append(f"{column}: only {name} has the {what} {_names(only)}")
        counts = sites[name].counts
        if is_target and len(counts) == 1:
            found.append(f"{column}: all rows of {name} are {next(iter(counts))}")
    return found


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
