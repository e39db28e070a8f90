"""New samples as a model wants them: as they are outside, made into features, standardised and scaled as those that it
was trained on.

What a model's outputs mean to people: the name of a class, its probability, a number in its own unit, a cluster.

Said once, for predictions here and for those that an exported file makes elsewhere.

`TrainedModel`: what a run gives, and what `fedbudget.load` finds in its folder.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedbudget import python_file
from fedbudget.arrays import Float32, Float64, Samples
from fedbudget.data.columns import checked, class_name
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.read_tables import from_frame, is_frame, read_csv
from fedbudget.data.shards import SampleStore, MultiInputSamples, Table
from fedbudget.data.tables import Layout, RawTable, TableOptions, require_usable
from fedbudget.errors import UserError, as_user_error
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.models.description import NamedTensors
from fedbudget.models.own import FunctionModel, as_model, load_model
from fedbudget.runs.folder import MODEL
from fedbudget.runs.saved_model import SavedModel


def table_of(samples: Dataset, x: Any) -> Table:
    """New samples, without their targets.

    Args:
      samples: what the model was trained on; without any of them.
      x: see `TrainedModel.predict`.
    """
    layout = samples.layout
    if layout is not None and (is_frame(x) or isinstance(x, Mapping)):
        x = _without_targets(
            from_frame(
                x if is_frame(x) else _NamedColumns(x),
                "x",
                _options(layout),
                labelled=False,
            )
        )
    if layout is not None and isinstance(x, RawTable):
        x = layout.encode(x)
    elif isinstance(x, Mapping | tuple):
        x = MultiInputSamples(x, np.zeros(_length(x)))
    if samples.store is None or hasattr(x, "__array__"):
        return _from_array(samples, np.asarray(x))
    return Table(
        np.arange(len(x))[:, None],
        np.zeros(len(x), np.float32),
        labels=False,
        store=SampleStore([x]),
    )


def read_table(samples: Dataset, path: Path, drop: tuple[str, ...] = ()) -> RawTable:
    """The table of new samples in a file; its target, where it has one, is not looked at.

    Args:
      samples: what the model was trained on; without any of them.
      drop: columns that are left out.
    """
    if samples.layout is None:
        raise UserError(
            f"{path} has columns by name, and the model was trained on arrays: give a .npz with x"
        )
    return _without_targets(read_csv(path, _options(samples.layout, drop), labelled=False))


def _options(layout: Layout, drop: tuple[str, ...] = ()) -> TableOptions:
    return layout.options_for(TableOptions(drop=drop))


def _without_targets(table: RawTable) -> RawTable:
    """A table that can be used, whatever is in the column of its target."""
    problems = tuple(
        problem for problem in table.problems if problem.column != table.target
    )
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
        return _table(
            columns.x,
            Dataset("x", Part(columns.x), shape=columns.shape, integers=columns.integers),
        )
    if columns.x.shape[1] != samples.features:
        raise UserError(
            f"x has {columns.x.shape[1]} features, and the model was trained on {samples.features}"
        )
    part = Part(columns.x)
    if samples.standardization is not None:
        part = samples.standardization.apply(part)
    elif samples.train.x.dtype == np.uint8 and samples.scale != 1:
        _refuse_scaled(columns.x, samples.scale)
    return _table(part.x, samples)


def _table(x: Samples, like: Dataset) -> Table:
    return Table(
        x, np.zeros(len(x), np.float32), like.scale, like.shape, like.integers, labels=False
    )


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
        raise UserError(
            "x must be an array [samples, ...], or several of them as a tuple or by name"
        )
    return len(arrays[0])


Kind = Literal["scores", "sign", "number", "value", "cluster"]
"""A score for each class; one score, of the second class where it is not negative; a class's number; a real value, or
several; for each cluster how near it is."""


@dataclass(frozen=True)
class Meaning:
    """What outputs [samples, outputs] stand for.

    Args:
      classes: their names: of each score, or by number; nothing where there are no classes.
      mean, deviation: of a real target, which was standardised by them.
    """

    kind: Kind
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def labels(self) -> NDArray[Any]:
        """The classes as they are in data: whole numbers where all are, and otherwise texts."""
        if all(_is_whole(name) for name in self.classes):
            return np.array([int(name) for name in self.classes], np.int64)
        return np.array(self.classes)

    def predicted(self, outputs: Float32) -> NDArray[Any]:
        """A prediction for each sample, [samples]; several values are [samples, values]."""
        if self.kind == "value":
            values = outputs.astype(np.float64) * self.deviation + self.mean
            return values[:, 0] if values.shape[1] == 1 else values
        if self.kind == "sign":
            number = (outputs[:, 0] >= 0).astype(np.int64)
        else:
            number = (
                outputs[:, 0].astype(np.int64)
                if self.kind == "number"
                else outputs.argmax(axis=1)
            )
        return (
            number if self.kind == "cluster" else np.asarray(np.take(self.labels, number))
        )

    def probabilities(self, outputs: Float32, name: str) -> Float64:
        """Of each class, [samples, classes].

        Args:
          name: the model's, for errors.
        """
        if self.kind != "scores":
            why = (
                "its score says on which side a sample is"
                if self.kind == "sign"
                else "it gives no scores of classes"
            )
            raise UserError(
                f"{name} has no probabilities: {why}; softmax and mlp have, where there are classes"
            )
        powers = np.exp(outputs.astype(np.float64) - outputs.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def meaning_of(model: Model, samples: Dataset, outputs: int) -> Meaning:
    """What a model's outputs stand for.

    Args:
      samples: what it was trained on; without any of them.
      outputs: how many there are for each sample.
    """
    target = model.target
    classes = samples.classes
    how = samples.standardization
    if target == "auto":
        target, classes = _auto(samples, outputs)
    value = (
        Meaning("value")
        if how is None
        else Meaning("value", (), how.target_mean, how.target_deviation)
    )
    match target:
        case "none":
            return Meaning("value" if isinstance(model, FunctionModel) else "cluster")
        case "real":
            return value
        case "binary":
            return Meaning("sign", ("odd", "even") if samples.parity else classes)
        case "classes" if isinstance(model, FunctionModel):
            return Meaning("number", classes)
        case "classes":
            return Meaning("scores", _one_for_each(classes, outputs))
    choices_text = samples.train.values is None and bool(
        classes
    )  # of data as it is, when classes are no numbers
    return Meaning("number", classes) if choices_text else Meaning("value")


def _auto(
    samples: Dataset, outputs: int
) -> tuple[Literal["classes", "real"], tuple[str, ...]]:
    """Of a module that was trained on either; classes that are numbers have their own, whichever there are."""
    real = samples.train.labels is None if samples.store is None else outputs == 1
    named = samples.classes and not all(map(str.isdecimal, samples.classes))
    return "real" if real else "classes", samples.classes if named else tuple(
        map(str, range(outputs))
    )


def _one_for_each(classes: tuple[str, ...], outputs: int) -> tuple[str, ...]:
    """A name for each score, also for those of classes that no sample had."""
    return (
        *classes[:outputs],
        *(f"class {number}" for number in range(len(classes), outputs)),
    )


def _is_whole(name: str) -> bool:
    """Whether a class's name is that of a whole number."""
    try:
        return class_name(int(name)) == name
    except ValueError:
        return False


if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model with the parameters that a run has found.

    Samples are given to it as they are outside: it standardises and scales features as those that it was trained on.

    Args:
      name: what is trained is called.
      model: the loss, and what it gives for samples.
      w: its parameters, [parameters].
      samples: what it was trained on, without the samples.

    >>> import fedbudget
    >>> from sklearn.datasets import load_digits
    >>> found = fedbudget.train(dataset="digits", budget="time=2s").model
    >>> found.predict(load_digits().data[:5])
    array([0, 1, 2, 3, 4])
    """

    name: str
    model: Model = field(repr=False)
    w: Float32 = field(repr=False)
    samples: Dataset = field(repr=False)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The classes that it tells apart, in the order of `predict_proba`; nothing where it does not."""
        outputs = len(self.samples.classes)
        if self.model.target == "auto" and self.samples.store is None:
            outputs = self.outputs(np.zeros((2, self.samples.features))).shape[1]
        return self.meaning(outputs).classes

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of each feature, where it was trained on tables: the column's, or `sex=male` of a category."""
        return () if self.samples.layout is None else self.samples.layout.feature_names

    @property
    def tensors(self) -> dict[str, Float32]:
        """The parameters by their names, such as `weight` and `bias`."""
        return NamedTensors.of(self.model).split(self.w)

    def predict(self, x: Any) -> NDArray[Any]:
        """For each sample the class that it is of, the value in the target's own unit, or the cluster's number.

        Args:
          x: features [samples, ...], as they are outside. Of a model that was trained on tables, a DataFrame or
            columns by name, in any order, with or without the target. For a PyTorch model that takes several inputs, a
            tuple of arrays or arrays by name; for one that was trained on samples that are no arrays, a sequence of
            such samples, whose targets are not looked at.
        """
        outputs = self.outputs(x)
        return self.meaning(outputs.shape[1]).predicted(outputs)

    def predict_proba(self, x: Any) -> Float64:
        """How probable each class is, [samples, classes], in the order of `classes`: softmax of the model's scores.

        A model that gives no score for each class, such as `svm`, has no probabilities, and says so.
        """
        outputs = self.outputs(x)
        return self.meaning(outputs.shape[1]).probabilities(outputs, self.name)

    def outputs(self, x: Any) -> Float32:
        """What the model itself gives, [samples, outputs]: a score for each class, or one that is not negative for the
        second; a value in the unit that it was trained on; for each cluster, the higher the nearer.
        """
        table = table_of(self.samples, x)
        with as_user_error(f"{self.name} cannot predict"):
            outputs = self.model.outputs(self.w, table)
        if outputs is None:
            raise UserError(
                f"{self.name} does not say what it predicts: a FunctionModel needs predict=..., and a PyTorch module "
                "gives one row of numbers for each sample"
            )
        return outputs

    def meaning(self, outputs: int) -> Meaning:
        """What so many outputs for a sample stand for."""
        return meaning_of(self.model, self.samples, outputs)

    def saved(self) -> SavedModel:
        """To be kept in a file."""
        options = {
            option: getattr(self.model, option)
            for option in getattr(self.model, "OPTIONS", ())
        }
        return SavedModel(
            self.w, self.name, self.samples, NamedTensors.of(self.model), options
        )


def load(
    run: str | os.PathLike[str],
    *,
    model: "str | OwnModel | None" = None,
    device: str = "auto",
) -> TrainedModel:
    """The trained model of a run on disk.

    Args:
      run: its folder, or a `model.safetensors`.
      model: where it was given from Python, given again: a PyTorch module or its class, or any `Model`; or where it is,
        such as `net.py:Net`, if that is elsewhere now.
      device: where PyTorch computes.

    >>> load("runs/none")
    Traceback (most recent call last):
    fedbudget.errors.UserError: runs/none/model.safetensors does not exist: no run has ended there
    """
    path = Path(run) if Path(run).is_file() else Path(run) / MODEL
    if not path.is_file():
        raise UserError(f"{path} does not exist: no run has ended there")
    saved = SavedModel.load(path)
    if not saved.complete:
        raise UserError(
            f"{path} is of an earlier version, and does not say what samples are like; `fedbudget evaluate` still can "
            "apply it to whole datasets"
        )

    def build(name: str) -> Model:
        return catalogue.build(name, saved.samples, saved.options, device=device)

    return TrainedModel(
        saved.model,
        rebuild(path, saved, model, build, device=device),
        saved.w,
        saved.samples,
    )


def rebuild(
    path: Path,
    saved: SavedModel,
    given: "str | OwnModel | None",
    build: Callable[[str], Model],
    *,
    device: str = "auto",
) -> Model:
    """What was trained, without its parameters; refuses another that has other tensors.

    Args:
      path: where it was saved.
      given: as of `load`.
      build: makes one that goes by a name.
    """
    name = saved.model if given is None else given
    if not isinstance(name, str):
        model = as_model(name, device=device)
    elif python_file.is_reference(name):
        model = load_model(name, device=device)
    elif name in catalogue.MODELS:
        model = build(name)
    else:
        raise UserError(
            f"{path} has a model that was given from Python, {name}: give it again, as `model`; a file and a name in "
            "it will do, net.py:Net"
        )
    if saved.complete:
        saved.tensors.require_same(NamedTensors.of(model), f"in {path}", f"in {model.name}")
    elif model.parameters != len(saved.w):
        raise UserError(
            f"{path} has {len(saved.w)} parameters, and {model.name} has {model.parameters}"
        )
    return model
