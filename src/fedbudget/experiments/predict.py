"""Predictions of a trained model for the samples in a file, as a table."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import python_file
from fedbudget.data.columns import read_npz
from fedbudget.data.read_tables import delimiter_of
from fedbudget.data.tables import RawTable
from fedbudget.errors import UserError
from fedbudget.launch.node_data import from_file
from fedbudget.trained.inputs import read_table
from fedbudget.trained.model import TrainedModel


@dataclass(frozen=True)
class Predictions:
    """A row for each sample, in their order.

    Args:
      columns: texts by name: of a table those that are no features, such as an ID; then `prediction`, and with classes
        `probability_NAME` of each, where the model has probabilities.
      remarks: what a person should know of the samples, in words.
    """

    columns: Mapping[str, Sequence[str]]
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.columns["prediction"])

    def to_csv(self) -> str:
        text = io.StringIO()
        rows = zip(*self.columns.values(), strict=True)
        csv.writer(text, lineterminator="\n").writerows([list(self.columns), *rows])
        return text.getvalue()


def predict(trained: TrainedModel, path: Path, drop: tuple[str, ...] = ()) -> Predictions:
    """What the model predicts for all samples of a `.csv`, of a `.npz` with an array x, or of what a name in a Python
    file stands for; their targets, if any, are not looked at.

    Args:
      drop: columns of a `.csv` that are left out.
    """
    x: Any
    if python_file.is_reference(str(path)):
        dataset = from_file(path).dataset
        x = next(each for each in (dataset.raw, dataset.store, dataset.train.x) if each is not None)
    elif path.suffix == ".csv":
        x = read_table(trained.samples, path, drop)
    elif path.suffix == ".npz" and path.is_file():
        x = read_npz(path)[0].x
    else:
        wrong = "only .csv and .npz files can be read" if path.exists() else "it does not exist"
        raise UserError(f"{path} cannot be predicted for: {wrong}")
    outputs = trained.outputs(x)
    meaning = trained.meaning(outputs.shape[1])
    found = meaning.predicted(outputs)
    columns = {"prediction": found} if found.ndim == 1 else {f"prediction_{n}": each for n, each in enumerate(found.T)}
    if meaning.kind == "scores":
        probabilities = meaning.probabilities(outputs, trained.name)
        columns |= {f"probability_{name}": own for name, own in zip(meaning.classes, probabilities.T, strict=True)}
    texts = {name: _texts(values) for name, values in columns.items()}
    if path.suffix != ".csv":
        return Predictions(texts)
    return Predictions({**_other_columns(path, x), **texts}, _unseen(trained, x))


def _texts(values: np.ndarray[Any, Any]) -> list[str]:
    return [f"{value:.7g}" if values.dtype.kind == "f" else str(value) for value in values.tolist()]


def _other_columns(path: Path, table: RawTable) -> dict[str, list[str]]:
    """The columns of a table's file that are no features, as they are there."""
    rows = set(table.lines.tolist())
    with path.open(newline="", encoding="utf-8-sig") as file:
        delimiter = delimiter_of(file.readline())
        file.seek(0)
        reader = csv.reader(file, delimiter=delimiter)
        header = [name.strip() for name in next(reader)]
        kept = [fields for fields in reader if reader.line_num in rows]
    others = {name: place for place, name in enumerate(header) if name and name not in table.columns}
    return {name: [fields[place] for fields in kept] for name, place in others.items()}


def _unseen(trained: TrainedModel, table: RawTable) -> tuple[str, ...]:
    assert trained.samples.layout is not None
    found = trained.samples.layout.unseen(table).items()
    return tuple(
        f"{column}: {name!r} was in no training sample, and counts as none of its categories ({rows} rows)"
        for column, counts in found
        for name, rows in counts.items()
    )
