"""Tables of named columns, raw: numbers, words and missing cells, before a `Layout` makes features of them.

Whatever is wrong with tables is found in one go (read_tables.py), and told in one error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Flags, Float64, Int64
from fedbudget.data.columns import Columns
from fedbudget.errors import UserError
from fedbudget.option import Impute


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
                raise UserError(f"`{option}` is for tables, and {name} is none: it has no columns with names")


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
        return {name: int(count) for name, count in zip(self.names, counts, strict=True) if count}

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
            return Columns(x, words=np.array(self.targets.names, np.str_)[self.targets.codes])
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
            alike.setdefault((problem.kind, problem.column), []).append((table.name, problem))
    if not alike:
        return
    texts = [f"{found[0][0]}: {found[0][1].text}{_in_others(len(found) - 1)}" for found in alike.values()]
    if len(texts) == 1:
        raise UserError(texts[0])
    values: dict[str, dict[str, None]] = {}
    for (_, problem), *_others in alike.values():
        if problem.option is not None:
            values.setdefault(problem.option, {})[problem.value] = None
    cure = " ".join(f"`{option}` {','.join(names)}" for option, names in values.items())
    ends = f"\nwhat may do: {cure}" if cure else ""
    raise UserError(f"{name or tables[0].name} cannot be used as it is:\n  " + "\n  ".join(texts) + ends)


def _in_others(files: int) -> str:
    return "" if not files else f" (the same in {files} more file{'s' if files > 1 else ''})"


def _rows(values: ColumnValues, chosen: NDArray[np.int64]) -> ColumnValues:
    return replace(values, codes=values.codes[chosen]) if isinstance(values, Words) else values[chosen]
