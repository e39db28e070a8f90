"""A trained model applied to data, the run's own or new."""

from dataclasses import dataclass, replace
from pathlib import Path

from fedbudget import data, python_file
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import load_all
from fedbudget.data.read_tables import PLAIN
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError, explained
from fedbudget.launch.inputs import build_model
from fedbudget.launch.node_data import from_file
from fedbudget.models.base import Model
from fedbudget.models.tally import Tally
from fedbudget.runs.folder import Run
from fedbudget.runs.saved_model import SavedModel
from fedbudget.trained.model import rebuild


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
    run: Run, name: str, options: TableOptions = PLAIN, data_dir: str | None = None, *, model: str | None = None
) -> Evaluation:
    """Loss and metrics of a run's model on a dataset's test samples, or on all samples where it names none.

    Args:
      options: of a table, besides what the model knows of those that it was trained on.
      model: where it was given from Python or is elsewhere now, a file and a name in it.
    """
    saved = run.model()
    own = run.settings.table_options()
    options = replace(own, target=options.target or own.target, drop=(*(own.drop), *options.drop))
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
    with explained(f"{trained.name} cannot be evaluated on {name}"):
        tally = Tally.of(trained, saved.w, table, dataset.standardization)
        accuracy = trained.accuracy(saved.w, table)
    metrics = {name: value for name, value in tally.metrics().items() if name != "accuracy"}
    return Evaluation(len(table), tally.loss, accuracy, metrics, tally.to_beat())


def _dataset(name: str, options: TableOptions, data_dir: str | None, saved: SavedModel) -> Dataset:
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
        raise UserError(f"{name} has {dataset.features} features, the model was trained on {len(how.mean)}")
    return replace(dataset, train=how.apply(dataset.train), standardization=how)
