"""A trained model applied to data, the run's own or new.

Predictions of a trained model for the samples in a file, as a table.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import data, python_file
from fedbudget.data.columns import read_npz
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import load_all
from fedbudget.data.read_tables import PLAIN, delimiter_of
from fedbudget.data.tables import RawTable, TableOptions
from fedbudget.errors import UserError, as_user_error
from fedbudget.evaluation.metrics import Tally
from fedbudget.launch.inputs import build_model, from_file
from fedbudget.models.base import Model
from fedbudget.runs.folder import Run
from fedbudget.runs.saved_model import SavedModel
from fedbudget.trained.model import TrainedModel, read_table, rebuild


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on samples.

    Args:
      accuracy: None where it has no meaning.
      metrics: further ones by name, and the model's own.
      to_beat: what is reached without learning: the accuracy of the most frequent class, or the RMSE of the mean.
    """

    samples: int
    loss: float
    accuracy: float | None
    metrics: dict[str, float]
    to_beat: dict[str, float]


def evaluate(
    run: Run,
    name: str,
    options: TableOptions = PLAIN,
    data_dir: str | None = None,
    *,
    model: str | None = None,
) -> Evaluation:
    """Loss and metrics of a run's model on a dataset's test samples, or on all samples where it names none.

    Args:
      options: of a table, besides what the model knows of those that it was trained on.
      model: where it was given from Python or is elsewhere now, a file and a name in it.
    """
    saved = run.model()
    own = run.settings.table_options()
    options = replace(
        own, target=options.target or own.target, drop=(*(own.drop), *options.drop)
    )
    dataset = _dataset(name, options, data_dir or run.settings.data_dir, saved)

    def build(known: str) -> Model:
        fitting = build_model(replace(run.settings, model=known, device="auto"), dataset)
        if fitting.parameters != len(saved.w):
            raise UserError(
                f"{name} does not fit the model of {run.path}: it would need {fitting.parameters} parameters, the "
                f"model has {len(saved.w)}"
            )
        return fitting

    trained = rebuild(run.path, saved, model, build)
    table = dataset.table(dataset.train, trained.target)
    with as_user_error(f"{trained.name} cannot be evaluated on {name}"):
        tally = Tally.of(trained, saved.w, table, dataset.standardization)
        accuracy = trained.accuracy(saved.w, table)
    metrics = {name: value for name, value in tally.metrics().items() if name != "accuracy"}
    return Evaluation(len(table), tally.loss, accuracy, metrics, tally.to_beat())


def _dataset(
    name: str, options: TableOptions, data_dir: str | None, saved: SavedModel
) -> Dataset:
    """The samples to evaluate on, as a dataset of which they are all."""
    if name in data.DATASETS:
        dataset = data.load(name, data_dir=data_dir)
        return dataset if dataset.test is None else replace(dataset, train=dataset.test)
    path = Path(name)
    if python_file.is_reference(name):
        dataset = from_file(path, options).dataset
        if saved.layout is not None and dataset.raw is not None:
            dataset = dataset.with_layout(saved.layout)
        if saved.classes and dataset.train.labels is not None:
            dataset = dataset.with_classes(saved.classes)
    elif not path.exists():
        return data.load(name)  # says what is wrong
    else:
        dataset = load_all(path, options, classes=saved.classes, layout=saved.layout)
    how = saved.standardization
    if how is None:
        return dataset
    if dataset.features != len(how.mean):
        raise UserError(
            f"{name} has {dataset.features} features, the model was trained on {len(how.mean)}"
        )
    return replace(dataset, train=how.apply(dataset.train), standardization=how)


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
        x = next(
            each
            for each in (dataset.raw, dataset.store, dataset.train.x)
            if each is not None
        )
    elif path.suffix == ".csv":
        x = read_table(trained.samples, path, drop)
    elif path.suffix == ".npz" and path.is_file():
        x = read_npz(path)[0].x
    else:
        wrong = (
            "only .csv and .npz files can be read" if path.exists() else "it does not exist"
        )
        raise UserError(f"{path} cannot be predicted for: {wrong}")
    outputs = trained.outputs(x)
    meaning = trained.meaning(outputs.shape[1])
    found = meaning.predicted(outputs)
    columns = (
        {"prediction": found}
        if found.ndim == 1
        else {f"prediction_{n}": each for n, each in enumerate(found.T)}
    )
    if meaning.kind == "scores":
        probabilities = meaning.probabilities(outputs, trained.name)
        columns |= {
            f"probability_{name}": own
            for name, own in zip(meaning.classes, probabilities.T, strict=True)
        }
    texts = {name: _texts(values) for name, values in columns.items()}
    if path.suffix != ".csv":
        return Predictions(texts)
    return Predictions({**_other_columns(path, x), **texts}, _unseen(trained, x))


def _texts(values: np.ndarray[Any, Any]) -> list[str]:
    return [
        f"{value:.7g}" if values.dtype.kind == "f" else str(value)
        for value in values.tolist()
    ]


def _other_columns(path: Path, table: RawTable) -> dict[str, list[str]]:
    """The columns of a table's file that are no features, as they are there."""
    rows = set(table.lines.tolist())
    with path.open(newline="", encoding="utf-8-sig") as file:
        delimiter = delimiter_of(file.readline())
        file.seek(0)
        reader = csv.reader(file, delimiter=delimiter)
        header = [name.strip() for name in next(reader)]
        kept = [fields for fields in reader if reader.line_num in rows]
    others = {
        name: place
        for place, name in enumerate(header)
        if name and name not in table.columns
    }
    return {name: [fields[place] for fields in kept] for name, place in others.items()}


def _unseen(trained: TrainedModel, table: RawTable) -> tuple[str, ...]:
    assert trained.samples.layout is not None
    found = trained.samples.layout.unseen(table).items()
    return tuple(
        f"{column}: {name!r} was in no training sample, and counts as none of its categories ({rows} rows)"
        for column, counts in found
        for name, rows in counts.items()
    )
