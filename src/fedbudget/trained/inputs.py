"""New samples as a model wants them: as they are outside, made into features, standardised and scaled as those that it
was trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget.arrays import Samples
from fedbudget.data.columns import checked
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.layout import Layout
from fedbudget.data.read_tables import from_frame, is_frame, read_csv
from fedbudget.data.samples import SampleStore, SeveralInputs
from fedbudget.data.shards import Table
from fedbudget.data.tables import RawTable, TableOptions, require_usable
from fedbudget.errors import UserError


def table_of(samples: Dataset, x: Any) -> Table:
    """New samples, without their targets.

    Args:
      samples: what the model was trained on; without any of them.
      x: see `TrainedModel.predict`.
    """
    layout = samples.layout
    if layout is not None and (is_frame(x) or isinstance(x, Mapping)):
        x = _without_targets(from_frame(x if is_frame(x) else _NamedColumns(x), "x", _options(layout), labelled=False))
    if layout is not None and isinstance(x, RawTable):
        x = layout.encode(x)
    elif isinstance(x, Mapping | tuple):
        x = SeveralInputs(x, np.zeros(_length(x)))
    if samples.store is None or hasattr(x, "__array__"):
        return _from_array(samples, np.asarray(x))
    return Table(np.arange(len(x))[:, None], np.zeros(len(x), np.float32), labels=False, store=SampleStore([x]))


def read_table(samples: Dataset, path: Path, drop: tuple[str, ...] = ()) -> RawTable:
    """The table of new samples in a file; its target, where it has one, is not looked at.

    Args:
      samples: what the model was trained on; without any of them.
      drop: columns that are left out.
    """
    if samples.layout is None:
        raise UserError(f"{path} has columns by name, and the model was trained on arrays: give a .npz with x")
    return _without_targets(read_csv(path, _options(samples.layout, drop), labelled=False))


def _options(layout: Layout, drop: tuple[str, ...] = ()) -> TableOptions:
    return layout.options_for(TableOptions(drop=drop))


def _without_targets(table: RawTable) -> RawTable:
    """A table that can be used, whatever is in the column of its target."""
    problems = tuple(problem for problem in table.problems if problem.column != table.target)
    table = replace(table, targets=None, problems=problems)
    require_usable([table])
    return table


@dataclass(frozen=True)
class _NamedColumns:
    """Columns by name, as a DataFrame has them."""

    values: Mapping[str, Any]

    @property
    def columns(self) -> list[str]:
        return list(self.values)

    def __len__(self) -> int:
        return _length(self.values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def _from_array(samples: Dataset, x: Any) -> Table:
    columns = checked("x", x, None)
    if samples.store is not None:  # of which nobody knows the shape
        return _table(columns.x, Dataset("x", Part(columns.x), shape=columns.shape, integers=columns.integers))
    if columns.x.shape[1] != samples.features:
        raise UserError(f"x has {columns.x.shape[1]} features, and the model was trained on {samples.features}")
    part = Part(columns.x)
    if samples.standardization is not None:
        part = samples.standardization.apply(part)
    elif samples.train.x.dtype == np.uint8 and samples.scale != 1:
        _refuse_scaled(columns.x, samples.scale)
    return _table(part.x, samples)


def _table(x: Samples, like: Dataset) -> Table:
    return Table(x, np.zeros(len(x), np.float32), like.scale, like.shape, like.integers, labels=False)


def _refuse_scaled(x: Samples, scale: float) -> None:
    """Refuses pixels that are no whole numbers any more: they would be scaled twice."""
    if x.dtype.kind == "f" and (x != np.round(x)).any():
        raise UserError(
            f"the model was trained on whole numbers, such as pixels of 0 to {round(1 / scale)}, which it scales "
            f"itself; x has {x[x != np.round(x)][0]:g}"
        )


def _length(inputs: Mapping[str, Any] | tuple[Any, ...]) -> int:
    """How many samples there are in several arrays."""
    arrays = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    if not arrays or not np.ndim(arrays[0]):
        raise UserError("x must be an array [samples, ...], or several of them as a tuple or by name")
    return len(arrays[0])
