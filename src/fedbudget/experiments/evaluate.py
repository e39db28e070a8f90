"""A trained model applied to data: its metrics, or its predictions as a table."""

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
from fedbudget.data.files import ENDINGS, load_all
from fedbudget.data.read_tables import (
    PLAIN,
    TEXT_FILES,
    delimiter_of,
    encoding_of,
    is_table,
    read_arrow,
)
from fedbudget.data.tables import RawTable, TableOptions
from fedbudget.errors import UserError, as_user_error, printable
from fedbudget.evaluation.metrics import Tally
from fedbudget.launch.inputs import build_model, from_file
from fedbudget.models.base import Model
from fedbudget.runs.folder import Run
from fedbudget.runs.saved_model import SavedModel
from fedbudget.settings.option import choices_text
from fedbudget.trained.model import TrainedModel, model_path, read_table, rebuild

_LONGEST_CELL = 10_000  # characters


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a model on samples.

    Args:
      samples: the number of samples.
      loss: the mean loss.
      accuracy: None if the model has none.
      metrics: other metrics by name, including those that the model defines.
      to_beat: the metric of a trivial model: the accuracy of always predicting the most
        frequent class, or the RMSE of predicting the mean.
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
    site: str | None = None,
) -> Evaluation:
    """Evaluate a run's model on the test samples of a dataset; on all if it has none.

    Args:
      run: the run of the model.
      name: a dataset or a file.
      options: of a table, in addition to those of the run.
      data_dir: the folder of datasets, if not that of the run.
      model: FILE.py:NAME of a model that was passed from Python or has moved.
      site: name of a node whose personal model to evaluate.

    Returns:
      The metrics.
    """
    saved = run.model() if site is None else SavedModel.load(model_path(run.path, site))
    # The model has the layout of its schema, whose file may have changed.
    own = replace(run.settings, schema=None).table_options()
    target = options.target or own.target
    options = replace(own, target=target, drop=own.drop + options.drop, site=None)
    dataset = _dataset(name, options, data_dir or run.settings.data_dir, saved)

    def build(known: str) -> Model:
        fitting = build_model(replace(run.settings, model=known, device="auto"), dataset)
        if fitting.parameters != len(saved.w):
            raise UserError(
                f"{name} does not fit the model of {run.path}: it would need "
                f"{fitting.parameters} parameters, the model has {len(saved.w)}"
            )
        return fitting

    trained = rebuild(run.path, saved, model, build)
    table = dataset.table(dataset.train, trained.target)
    with as_user_error(f"{trained.name} cannot be evaluated on {name}"):
        tally = Tally.of(trained, saved.w, table, dataset.standardization)
        accuracy = trained.accuracy(saved.w, table)
    metrics = tally.metrics()
    metrics.pop("accuracy", None)
    return Evaluation(len(table), tally.loss, accuracy, metrics, tally.to_beat())


def _dataset(
    name: str, options: TableOptions, data_dir: str | None, saved: SavedModel
) -> Dataset:
    """Return the samples to evaluate on, as the training samples of a dataset."""
    if name in data.DATASETS:
        dataset = data.load(name, data_dir=data_dir)
        if set(dataset.classes) <= set(saved.classes):  # other classes: see `evaluate`
            dataset = _with_classes(dataset, saved)
        return dataset if dataset.test is None else replace(dataset, train=dataset.test)
    path = Path(name)
    if python_file.is_reference(name):
        dataset = from_file(path, options).dataset
        if saved.layout is not None and dataset.raw is not None:
            dataset = dataset.with_layout(saved.layout)
        dataset = _with_classes(dataset, saved)
    elif not path.exists():
        return data.load(name)  # raises the right error
    else:
        dataset = load_all(path, options, classes=saved.classes, layout=saved.layout)
    how = saved.standardization
    if how is None:
        return dataset
    if dataset.features != len(how.mean):
        raise UserError(
            f"{name} has {dataset.features} features, the model was trained on "
            f"{len(how.mean)}"
        )
    return replace(dataset, train=how.apply(dataset.train), standardization=how)


def _with_classes(dataset: Dataset, saved: SavedModel) -> Dataset:
    """Return the samples with the model's class numbers; nodes sort them by name."""
    if not saved.classes or dataset.train.labels is None:
        return dataset
    return dataset.with_classes(saved.classes)


@dataclass(frozen=True)
class Predictions:
    """A row for each sample, in their order.

    Args:
      columns: texts by name: the columns of a table that are not features, such as an ID;
        then `prediction`, and `probability_NAME` of each class if the model has
        probabilities.
      remarks: hints for the user about the samples.
    """

    columns: Mapping[str, Sequence[str]]
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.columns["prediction"])

    def to_csv(self) -> str:
        """Return the table as CSV. Cells start no formula in a spreadsheet."""
        text = io.StringIO()
        rows = zip(*self.columns.values(), strict=True)
        cells = [[_cell(each) for each in row] for row in [list(self.columns), *rows]]
        csv.writer(text, lineterminator="\n").writerows(cells)
        return text.getvalue()


def predict(trained: TrainedModel, path: Path, drop: tuple[str, ...] = ()) -> Predictions:
    """Predict for all samples of a file. Targets, if any, are ignored.

    Args:
      trained: the model.
      path: a table, a `.npz` with an array x, or FILE.py:NAME.
      drop: columns of a table to ignore.

    Returns:
      The predictions.
    """
    x: Any
    if python_file.is_reference(str(path)):
        dataset = from_file(path).dataset
        sources = (dataset.raw, dataset.store, dataset.train.x)
        x = next(each for each in sources if each is not None)
    elif is_table(path):
        x = read_table(trained.samples, path, drop)
    elif path.suffix == ".npz" and path.is_file():
        x = read_npz(path)[0].x
    else:
        wrong = "it does not exist"
        if path.exists():
            wrong = f"only {choices_text(ENDINGS)} files can be read"
        raise UserError(f"cannot predict for {path}: {wrong}")

    outputs = trained.outputs(x)
    meaning = trained.meaning(outputs.shape[1])
    predicted = meaning.predicted(outputs)
    if predicted.ndim == 1:
        columns = {"prediction": predicted}
    else:
        columns = {f"prediction_{n}": each for n, each in enumerate(predicted.T)}
    if meaning.kind == "scores":
        probabilities = meaning.probabilities(outputs, trained.name)
        for name, each in zip(meaning.classes, probabilities.T, strict=True):
            columns[f"probability_{name}"] = each
    texts = {name: _texts(values) for name, values in columns.items()}
    if not is_table(path):
        return Predictions(texts)
    return Predictions({**_other_columns(path, x), **texts}, _unseen(trained, x))


def _cell(text: str) -> str:
    """Return a text without control characters, and with ' before a formula."""
    text = printable(text, _LONGEST_CELL)
    if not text.startswith(("=", "+", "-", "@")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _texts(values: np.ndarray[Any, Any]) -> list[str]:
    form = ".7g" if values.dtype.kind == "f" else ""
    return [f"{value:{form}}" for value in values.tolist()]


def _other_columns(path: Path, table: RawTable) -> dict[str, list[str]]:
    """Return the columns of a table's file that are not features, unchanged."""
    if path.suffix.lower() not in TEXT_FILES:
        columns = read_arrow(path)
        others = [name for name in columns if name not in table.columns]
        return {name: [*map(str, columns[name].tolist())] for name in others}
    rows = set(table.lines.tolist())
    with path.open(newline="", encoding=encoding_of(path)) as file:
        delimiter = delimiter_of(file.readline())
        file.seek(0)
        reader = csv.reader(file, delimiter=delimiter)
        header = [name.strip() for name in next(reader)]
        kept = [fields for fields in reader if reader.line_num in rows]
    return {
        name: [fields[index] for fields in kept]
        for index, name in enumerate(header)
        if name and name not in table.columns
    }


def _unseen(trained: TrainedModel, table: RawTable) -> tuple[str, ...]:
    assert trained.samples.layout is not None
    return tuple(
        f"{column}: {name!r} was in no training sample, and counts as none of its "
        f"categories ({rows} rows)"
        for column, counts in trained.samples.layout.unseen(table).items()
        for name, rows in counts.items()
    )
