"""Public schemas of tables: a TOML file that says what columns mean, without any data.

    drop = ["patient", "visit"]

    [target]
    name = "outcome"
    classes = ["healthy", "relapse"]

    [columns]
    age = { range = [0, 120] }
    smoker = { categories = ["never", "former", "now"] }
    crp = { range = [0, 300], missing = 5 }

- A column has a range or categories. A target has classes or a range. The order of columns
  is the order of features.
- A missing number becomes the middle of its range, or `missing`. A missing category, and
  every category that is not listed, becomes `OTHER`.
- `draft` derives a schema from a table. Such a schema reveals values of that table until
  someone has reviewed it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget.data.columns import category_name
from fedbudget.data.files import classes_of, read_tables
from fedbudget.data.tables import (
    LONG_NAME,
    MOST_CATEGORIES,
    OTHER,
    ColumnValues,
    Layout,
    LayoutColumn,
    Range,
    RawTable,
    TableOptions,
    TableSchema,
    TextColumn,
    centre,
)
from fedbudget.errors import UserError
from fedbudget.settings.option import read_toml

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]+")

_DRAFTED = """\
# Schema drafted from {name}. Its ranges (rounded outwards), categories and classes are
# those of these {rows} rows, and a run publishes them. Review each line: write what is
# known without the data, such as 0 to 120 for an age, and remove categories that could
# identify a person. All nodes use the same file.
"""


def read_schema(path: Path) -> TableSchema:
    """Read a schema; refuse one that is incomplete, with the place of the mistake."""
    given = read_toml(path)
    _require_keys(given, ("drop", "target", "columns"), str(path))
    target = _mapping(given.get("target"), f"{path}: [target]")
    _require_keys(target, ("name", "classes", "range"), f"{path}: [target]")
    name = _name(target.get("name"), f"{path}: name of [target]")
    if ("classes" in target) == ("range" in target):
        raise UserError(f"{path}: [target] needs either classes or a range")
    classes: tuple[str, ...] = ()
    bounds = None
    if "classes" in target:
        classes = _names(target["classes"], f"{path}: classes of [target]")
        if len(classes) < 2:
            raise UserError(f"{path}: [target] needs at least two classes")
    else:
        bounds = _range(target["range"], f"{path}: range of [target]")

    described = _mapping(given.get("columns"), f"{path}: [columns]")
    columns = tuple(
        _column(column, about, f"{path}: column {column}")
        for column, about in described.items()
    )
    dropped = _names(given.get("drop", []), f"{path}: drop")
    twice = [each for each in (name, *dropped) if each in described]
    if name in dropped or twice:
        raise UserError(f"{path}: {(twice or [name])[0]} has two roles")
    return TableSchema(Layout(columns, name, dropped), classes, bounds)


def _column(name: str, about: Any, where: str) -> LayoutColumn:
    about = _mapping(about, where)
    _require_keys(about, ("range", "categories", "missing"), where)
    _name(name, where)
    if ("categories" in about) == ("range" in about):
        raise UserError(f"{where} needs either a range or categories")
    missing = about.get("missing")
    if "range" in about:
        range_ = _range(about["range"], f"{where}: range")
        fill = centre(range_)[0] if missing is None else _number(missing, where)
        if not range_[0] <= fill <= range_[1]:
            raise UserError(f"{where}: missing = {fill:g} is outside its range")
        return LayoutColumn(name, None, fill, range_)
    categories = _names(about["categories"], f"{where}: categories")
    if OTHER in categories or not 1 <= len(categories) < MOST_CATEGORIES:
        raise UserError(
            f"{where} needs 1 to {MOST_CATEGORIES - 1} categories other than {OTHER}, "
            "which is added"
        )
    kept = OTHER if missing is None else category_name(str(missing))
    if kept not in (*categories, OTHER):
        raise UserError(f"{where}: missing = {kept!r} is not one of its categories")
    return LayoutColumn(name, (*categories, OTHER), kept, None, OTHER)


def draft(
    tables: Sequence[RawTable], name: str, classes: Sequence[str] | None = None
) -> str:
    """Return the text of a schema with the ranges and categories of some tables.

    Args:
      tables: usable ones with the same columns; missing cells are allowed.
      name: of all tables together.
      classes: all classes; those of the tables by default.
    """
    first = tables[0]
    lines = [_DRAFTED.format(name=name, rows=sum(map(len, tables)))]
    dropped = dict.fromkeys(each for table in tables for each in table.dropped)
    lines += [f"drop = {_toml(list(dropped))}", "", "[target]"]
    lines.append(f"name = {_toml(first.target)}")
    targets = [table.targets for table in tables if table.targets is not None]
    classes = classes or classes_of(
        [table.samples(np.empty((len(table), 0))) for table in tables]
    )
    if classes:
        lines.append(f"classes = {_toml(classes)}")
    else:
        lines.append(f"range = {_toml(_rounded(first.target or '', targets))}")
    lines += ["", "[columns]"]
    for column in first.columns:
        parts = [table.columns[column] for table in tables]
        texts = {
            each for part in parts if isinstance(part, TextColumn) for each in part.names
        }
        if texts:
            about = f"categories = {_toml(sorted(texts - {OTHER}))}"
        else:
            about = f"range = {_toml(_rounded(column, parts))}"
        key = column if _BARE.fullmatch(column) else _toml(column)
        lines.append(f"{key} = {{ {about} }}")
    return "\n".join(lines) + "\n"


def draft_of(path: Path, options: TableOptions) -> str:
    """Return the text of a schema for a `.csv`, or for a folder of them."""
    paths = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not paths:
        raise UserError(f"{path} has no .csv file")
    return draft(read_tables(paths, options, path), path.name, options.classes)


def _rounded(name: str, parts: Sequence[ColumnValues]) -> list[float]:
    """Return the range of a column, rounded outwards to at most a digit of its width."""
    values = np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    values = values[~np.isnan(values)]
    if not len(values):
        raise UserError(f"{name} has no value in any row: `drop` it")
    low = float(values.min())
    high = float(values.max())
    width = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(width / 2))
    rounded = (math.floor(low / step) * step, math.ceil(high / step) * step)
    # Fractions of powers of ten are not exact: 3 * 0.1 is 0.30000000000000004.
    return [int(each) if each == int(each) else float(f"{each:.12g}") for each in rounded]


def _toml(value: Any) -> str:
    """Return a text, a number or a list as TOML, which is the same as JSON for these."""
    return json.dumps(value, ensure_ascii=False)


def _require_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise UserError(f"{where} has the unknown key {key}; known: {', '.join(known)}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise UserError(f"{where} is missing or empty")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > LONG_NAME:
        raise UserError(f"{where} must be a text of at most {LONG_NAME} characters")
    if not _PRINTABLE.fullmatch(value):
        raise UserError(f"{where} must not be empty or contain control characters")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UserError(f"{where} must be a list")
    if any(isinstance(each, bool | dict | list) for each in value):
        raise UserError(f"{where} must be a list of texts or numbers")
    names = tuple(_name(category_name(str(each)), where) for each in value)
    if len(set(names)) < len(names):
        raise UserError(f"{where} contains a duplicate")
    return names


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: {value!r} is not a number")
    if not math.isfinite(value):
        raise UserError(f"{where}: {value!r} is not finite")
    return float(value)


def _range(value: Any, where: str) -> Range:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"{where} must be [lowest, highest]")
    low, high = (_number(each, where) for each in value)
    if not low <= high:
        raise UserError(f"{where}: {low:g} is above {high:g}")
    return low, high
