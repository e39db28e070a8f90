"""`TrainedModel`: what a run gives, and what `fedbudget.load` finds in its folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedbudget import python_file
from fedbudget.arrays import Float32, Float64
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError, explained
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.models.named_tensors import NamedTensors
from fedbudget.models.own import as_model, load_model
from fedbudget.runs.folder import MODEL
from fedbudget.runs.saved_model import SavedModel
from fedbudget.trained.inputs import table_of
from fedbudget.trained.meaning import Meaning, meaning_of

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
        with explained(f"{self.name} cannot predict"):
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
        options = {option: getattr(self.model, option) for option in getattr(self.model, "OPTIONS", ())}
        return SavedModel(self.w, self.name, self.samples, NamedTensors.of(self.model), options)


def load(run: str | os.PathLike[str], *, model: "str | OwnModel | None" = None, device: str = "auto") -> TrainedModel:
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

    return TrainedModel(saved.model, rebuild(path, saved, model, build, device=device), saved.w, saved.samples)


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
        raise UserError(f"{path} has {len(saved.w)} parameters, and {model.name} has {model.parameters}")
    return model
