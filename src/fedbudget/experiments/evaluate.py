"""A trained model applied to data, the run's own or new."""

from dataclasses import dataclass, replace
from pathlib import Path

from fedbudget import data, python_file
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import load_all
from fedbudget.errors import UserError
from fedbudget.launch.inputs import build_model
from fedbudget.launch.node_data import from_file
from fedbudget.models.base import loss_over
from fedbudget.runs.folder import Run, SavedModel


@dataclass(frozen=True)
class Evaluation:
    samples: int
    loss: float
    accuracy: float | None


def evaluate(run: Run, name: str, target: str | None = None, data_dir: str | None = None) -> Evaluation:
    """Loss and accuracy of a run's model on a dataset's test samples, or on all samples where it names none."""
    saved = run.model()
    dataset = _dataset(name, target or run.settings.target, data_dir or run.settings.data_dir, saved)
    model = build_model(replace(run.settings, model=saved.model, device="auto"), dataset)
    if model.parameters != len(saved.w):
        raise UserError(f"{name} does not fit the model of {run.path}: it would need {model.parameters} parameters, "
                        f"the model has {len(saved.w)}")  # fmt: skip
    table = dataset.table(dataset.train, model.target)
    return Evaluation(len(table), loss_over(model, saved.w, table), model.accuracy(saved.w, table))


def _dataset(name: str, target: str | None, data_dir: str | None, saved: SavedModel) -> Dataset:
    """The samples to evaluate on, as a dataset of which they are all."""
    if name in data.DATASETS:
        dataset = data.load(name, data_dir=data_dir)
        return dataset if dataset.test is None else replace(dataset, train=dataset.test)
    path = Path(name)
    if python_file.is_reference(name):
        dataset = from_file(path).dataset
        if saved.classes and dataset.train.labels is not None:
            dataset = dataset.with_classes(saved.classes)
    elif not path.exists():
        return data.load(name)  # says what is wrong
    else:
        dataset = load_all(path, target=target, classes=saved.classes)
    how = saved.standardization
    if how is None:
        return dataset
    if dataset.features != len(how.mean):
        raise UserError(f"{name} has {dataset.features} features, the model was trained on {len(how.mean)}")
    return replace(dataset, train=how.apply(dataset.train), standardization=how)
