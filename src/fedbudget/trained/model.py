"""`TrainedModel`: the model of a run, with predictions for new samples.

- New samples are raw. `table_of` encodes, standardises and scales them like those of
  training.
- `Meaning` converts outputs to class names, probabilities, numbers in their original unit,
  or clusters. Predictions here and exported files use the same rules.
- `load` reads the model of a run from its folder.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from fedbudget import python_file
from fedbudget.arrays import Float32, Float64, Samples
from fedbudget.data.columns import check_arrays, class_name
from fedbudget.data.dataset import Dataset, Part, Standardization
from fedbudget.data.read_tables import from_frame, is_frame, read_file
from fedbudget.data.shards import MultiInputSamples, SampleStore, Table
from fedbudget.data.tables import Layout, RawTable, TableOptions, require_usable
from fedbudget.errors import UserError, as_user_error, printable, unknown
from fedbudget.models import catalogue
from fedbudget.models.base import KernelModel, Model
from fedbudget.models.description import NamedTensors
from fedbudget.models.own import FunctionModel, as_model, load_model
from fedbudget.resources.privacy import PrivacyGuarantee
from fedbudget.runs.folder import MODEL, PERSONAL
from fedbudget.runs.saved_model import SavedModel

if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel

Kind = Literal["scores", "sign", "number", "value", "cluster"]
"""Kind of the outputs: a score per class; one score, >= 0 for the second class; a class
number; one or several real values; a score per cluster, higher for nearer ones."""


_MOST_NAMED = 12  # sites that a message lists


@dataclass(frozen=True)
class Meaning:
    """Meaning of outputs [samples, outputs].

    Args:
      kind: kind of the outputs.
      classes: names of the classes, by score or by number; empty without classes.
      mean, deviation: standardisation of a real target.
    """

    kind: Kind
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def labels(self) -> NDArray[Any]:
        """The classes as the data has them: integers if all are, otherwise strings."""
        if all(_is_whole(name) for name in self.classes):
            return np.array([int(name) for name in self.classes], np.int64)
        return np.array(self.classes)

    def predicted(self, outputs: Float32) -> NDArray[Any]:
        """Return a prediction for each sample, [samples], or [samples, values]."""
        if self.kind == "value":
            values = outputs.astype(np.float64) * self.deviation + self.mean
            return values[:, 0] if values.shape[1] == 1 else values
        if self.kind == "sign":
            number = (outputs[:, 0] >= 0).astype(np.int64)
        elif self.kind == "number":
            number = outputs[:, 0].astype(np.int64)
        else:
            number = outputs.argmax(axis=1)
        return number if self.kind == "cluster" else np.take(self.labels, number)

    def probabilities(self, outputs: Float32, name: str) -> Float64:
        """Return the probability of each class, [samples, classes].

        Args:
          outputs: scores, [samples, classes].
          name: name of the model, for messages.
        """
        if self.kind != "scores":
            why = "it returns no scores of classes"
            if self.kind == "sign":
                why = "its score only separates two classes"
            raise UserError(
                f"{name} has no probabilities: {why}; use softmax or mlp for classes"
            )
        powers = np.exp(outputs.astype(np.float64) - outputs.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model with the parameters of a run.

    Pass raw samples. The model standardises and scales features as in training.

    Args:
      name: name of the model.
      model: the loss and the outputs.
      w: parameters, [parameters].
      samples: description of the training data, without the samples.
      privacy: guarantee of a private run; None for other runs.

    >>> import fedbudget
    >>> from sklearn.datasets import load_digits
    >>> model = fedbudget.train(dataset="digits", budget="time=2s").model
    >>> model.predict(load_digits().data[:5])
    array([0, 1, 2, 3, 4])
    """

    name: str
    model: Model = field(repr=False)
    w: Float32 = field(repr=False)
    samples: Dataset = field(repr=False)
    privacy: PrivacyGuarantee | None = field(default=None, repr=False)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of `predict_proba`; empty without classes."""
        outputs = len(self.samples.classes)
        if self.model.target == "auto" and self.samples.store is None:
            outputs = self.outputs(np.zeros((2, self.samples.features))).shape[1]
        return self.meaning(outputs).classes

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features of tables: the column, or `sex=male` for a category."""
        return () if self.samples.layout is None else self.samples.layout.feature_names

    @property
    def tensors(self) -> dict[str, Float32]:
        """Parameters by name, such as `weight` and `bias`."""
        return NamedTensors.of(self.model).split(self.w)

    def predict(self, x: Any, *, threshold: float | None = None) -> NDArray[Any]:
        """Predict the class, the value in its original unit, or the number of the cluster.

        Args:
          x: raw features [samples, ...]. For a model trained on tables: a DataFrame or
            columns by name, in any order, with or without the target. For a PyTorch model
            with several inputs: a tuple of arrays, or arrays by name. For a model trained
            on samples that are not arrays: a sequence of such samples; their targets are
            ignored.
          threshold: of two classes, predict the second from this probability on.

        Returns:
          One prediction per sample, [samples].
        """
        outputs = self.outputs(x)
        meaning = self.meaning(outputs.shape[1])
        if threshold is None:
            return meaning.predicted(outputs)
        if len(meaning.classes) != 2 or not 0 <= threshold <= 1:
            raise UserError(
                f"threshold {threshold:g} must be a probability of the second of two "
                f"classes; {self.name} has {len(meaning.classes)}"
            )
        chances = meaning.probabilities(outputs, self.name)[:, 1]
        return np.take(meaning.labels, (chances >= threshold).astype(np.int64))

    def predict_proba(self, x: Any) -> Float64:
        """Return the probability of each class: softmax of the model's scores.

        Models without a score per class, such as `svm`, raise a `UserError`.

        Args:
          x: raw features, as for `predict`.

        Returns:
          Probabilities in the order of `classes`, [samples, classes].
        """
        outputs = self.outputs(x)
        return self.meaning(outputs.shape[1]).probabilities(outputs, self.name)

    def outputs(self, x: Any) -> Float32:
        """Return the outputs of the model itself.

        These are one score per class, or one score that is >= 0 for the second class; a
        value in the unit of the training data; one score per cluster, higher for nearer
        clusters.

        Args:
          x: raw features, as for `predict`.

        Returns:
          The outputs, [samples, outputs].
        """
        table = table_of(self.samples, x)
        w: Any = self.w
        if isinstance(self.model, KernelModel):
            # In float32, the last bits of a row would depend on the number of rows.
            w = w.astype(np.float64)
        with as_user_error(f"{self.name} cannot predict"):
            outputs = self.model.outputs(w, table)
        if outputs is None:
            raise UserError(
                f"{self.name} has no predictions: pass predict=... to FunctionModel, and "
                "return one row of numbers per sample from a PyTorch module"
            )
        return np.asarray(outputs, np.float32)

    def meaning(self, outputs: int) -> Meaning:
        """Return the meaning of the outputs.

        Args:
          outputs: number of outputs per sample.
        """
        return meaning_of(self.model, self.samples, outputs)

    def corrected(self, w: Float32, shift: float) -> "TrainedModel":
        """Return a personal model. It has no privacy guarantee, as it follows from rows.

        Args:
          w: its parameters.
          shift: added to every output, of linear regression.
        """
        samples = self.samples
        if shift:
            none = Standardization(np.zeros(samples.features), np.ones(samples.features))
            how = samples.standardization or none
            mean = how.target_mean + shift * how.target_deviation
            samples = replace(samples, standardization=replace(how, target_mean=mean))
        return replace(self, w=w, samples=samples, privacy=None)

    def saved(self) -> SavedModel:
        """Return the content of the model's file."""
        names = getattr(self.model, "OPTIONS", ())
        options = {name: getattr(self.model, name) for name in names}
        tensors = NamedTensors.of(self.model)
        return SavedModel(self.w, self.name, self.samples, tensors, options, self.privacy)

    @property
    def privacy_metadata(self) -> dict[str, str]:
        """The guarantee as an entry for the metadata of a file; empty without one."""
        if self.privacy is None:
            return {}
        return {"privacy": json.dumps(self.privacy.to_json())}


def load(
    run: str | os.PathLike[str],
    *,
    model: "str | OwnModel | None" = None,
    site: str | None = None,
    device: str = "auto",
) -> TrainedModel:
    """Load the trained model of a run.

    Args:
      run: folder of the run, or a `model.safetensors`.
      site: name of a node whose personal model to load; None for the global model.
      model: a custom model: a PyTorch module or its class, or any `Model`; or its file and
        name, such as `net.py:Net`. The name in the run's folder is never imported.
      device: device of PyTorch.

    Returns:
      The model with its parameters.

    >>> load("a")
    Traceback (most recent call last):
    fedbudget.errors.UserError: a/model.safetensors does not exist: no run has ended there
    """
    path = model_path(Path(run), site)
    saved = SavedModel.load(path)

    def build(name: str) -> Model:
        return catalogue.build(name, saved.samples, saved.options, device=device)

    rebuilt = rebuild(path, saved, model, build, device=device)
    return TrainedModel(saved.model, rebuilt, saved.w, saved.samples, saved.privacy)


def model_path(run: Path, site: str | None = None) -> Path:
    """Return the file of a run's model, which exists.

    Args:
      run: folder of the run, or the file.
      site: name of a node whose personal model is needed.
    """
    path = run if run.is_file() else run / MODEL
    if not path.is_file():
        raise UserError(f"{path} does not exist: no run has ended there")
    if site is None:
        return path
    own = personal_path(path.parent, site)
    if own.is_file():
        return own
    known = sorted(unquote(each.stem) for each in own.parent.glob("*.safetensors"))
    if not known:
        raise UserError(
            f"{path.parent} has no personal models: run with `personal`; nodes on other "
            "machines keep theirs, see `save_model` of fedbudget join"
        )
    if len(known) <= _MOST_NAMED:
        raise UserError(f"unknown site {site!r}; {run} has models of {', '.join(known)}")
    first = ", ".join(known[:_MOST_NAMED])
    more = f"{run} has models of {first} and {len(known) - _MOST_NAMED} more"
    raise unknown("site", site, known, more)


def personal_path(folder: Path, site: str) -> Path:
    """Return the file of a node's personal model in the folder of a run."""
    return folder / PERSONAL / f"{quote(site, safe=' ')}.safetensors"


def rebuild(
    path: Path,
    saved: SavedModel,
    given: "str | OwnModel | None",
    build: Callable[[str], Model],
    *,
    device: str = "auto",
) -> Model:
    """Create the model of a file, without its parameters.

    Raises a `UserError` if the tensors differ.

    Args:
      path: the file, for messages.
      saved: its content.
      given: the model that the user passed, see `load`.
      build: creates a model that has a name.
      device: device of PyTorch.
    """
    name = saved.model if given is None else given
    if not isinstance(name, str):
        model = as_model(name, device=device)
    elif given is not None and python_file.is_reference(name):
        model = load_model(name, device=device)
    elif name in catalogue.MODELS:
        model = build(name)
    else:
        raise UserError(
            f"{path} has a custom model, {printable(name)}. Files do not choose code that "
            "runs here: pass it again, as `model`, or its file and name, such as net.py:Net"
        )
    own = NamedTensors.of(model)
    saved.tensors.require_same(own, f"in {path}", f"in {model.name}")
    return model


def table_of(samples: Dataset, x: Any) -> Table:
    """Convert new samples to a table without targets.

    Args:
      samples: description of the training data, without the samples.
      x: raw samples, see `TrainedModel.predict`.
    """
    layout = samples.layout
    if layout is not None and (is_frame(x) or isinstance(x, Mapping)):
        if isinstance(x, Mapping):
            _length(x)  # refuses single values
        x = _without_targets(from_frame(x, "x", _options(layout), labelled=False))
    if layout is not None and isinstance(x, RawTable):
        x = layout.encode(x)
    elif isinstance(x, Mapping | tuple):
        x = MultiInputSamples(x, np.zeros(_length(x)))
    if samples.store is None or hasattr(x, "__array__"):
        try:
            array = np.asarray(x)
        except ValueError:  # such as pairs of features and targets
            raise UserError(
                "x is not an array [samples, ...]: pass the features alone, without targets"
            ) from None
        return _from_array(samples, array)
    part = Part(np.arange(len(x))[:, None])
    return Dataset("x", part, store=SampleStore([x])).table(part, "none")


def read_table(samples: Dataset, path: Path, drop: tuple[str, ...] = ()) -> RawTable:
    """Read new samples from a file. A target column is ignored.

    Args:
      samples: description of the training data, without the samples.
      path: the file.
      drop: columns to ignore.
    """
    if samples.layout is None:
        raise UserError(
            f"{path} has named columns, but the model was trained on arrays: pass a .npz "
            "with x"
        )
    return _without_targets(read_file(path, _options(samples.layout, drop), labelled=False))


def meaning_of(model: Model, samples: Dataset, outputs: int) -> Meaning:
    """Return the meaning of a model's outputs.

    Args:
      model: the model.
      samples: description of the training data, without the samples.
      outputs: number of outputs per sample.
    """
    target = model.target
    classes = samples.classes
    standard = samples.standardization
    if target == "auto":  # a module that keeps class numbers
        if not classes or all(map(str.isdecimal, classes)):
            classes = tuple(map(str, range(outputs)))
        real = samples.train.labels is None if samples.store is None else outputs == 1
        target = "real" if real else "classes"
    match target:
        case "none":
            return Meaning("value" if isinstance(model, FunctionModel) else "cluster")
        case "real" if standard is not None:
            return Meaning("value", (), standard.target_mean, standard.target_deviation)
        case "binary":
            return Meaning("sign", ("odd", "even") if samples.parity else classes)
        case "classes" if isinstance(model, FunctionModel):
            return Meaning("number", classes)
        case "classes":
            # Classes without samples have no name.
            unnamed = (f"class {number}" for number in range(len(classes), outputs))
            return Meaning("scores", (*classes[:outputs], *unnamed))
        case "raw" if samples.train.values is None and classes:
            return Meaning("number", classes)
    return Meaning("value")


def _is_whole(name: str) -> bool:
    """Return whether the name of a class is an integer."""
    try:
        return class_name(int(name)) == name
    except ValueError:
        return False


def _options(layout: Layout, drop: tuple[str, ...] = ()) -> TableOptions:
    return layout.options_for(TableOptions(drop=drop))


def _without_targets(table: RawTable) -> RawTable:
    """Return the table without its target, and without problems of the target."""
    problems = tuple(each for each in table.problems if each.column != table.target)
    table = replace(table, targets=None, problems=problems)
    require_usable([table])
    return table


def _from_array(samples: Dataset, x: Any) -> Table:
    columns = check_arrays("x", x, None)
    part = Part(columns.x)
    if samples.store is not None:  # the shape of the training samples is unknown
        own = Dataset("x", part, shape=columns.shape, integers=columns.integers)
        return own.table(part, "none")
    if columns.x.shape[1] != samples.features:
        raise UserError(
            f"x has {columns.x.shape[1]} features, but the model was trained on "
            f"{samples.features}"
        )
    if samples.standardization is not None:
        part = samples.standardization.apply(part)
    elif samples.train.x.dtype == np.uint8 and samples.scale != 1:
        _refuse_scaled(columns.x, samples.scale)
    return samples.table(part, "none")


def _refuse_scaled(x: Samples, scale: float) -> None:
    """Raise a `UserError` for scaled pixels: the model would scale them again."""
    fractions = x[x != np.round(x)] if x.dtype.kind == "f" else x[:0]
    if fractions.size:
        raise UserError(
            "the model was trained on integers, such as pixels of 0 to "
            f"{round(1 / scale)}, and scales them itself; x has {fractions.flat[0]:g}"
        )


def _length(inputs: Mapping[str, Any] | tuple[Any, ...]) -> int:
    """Return the number of samples in several arrays."""
    arrays = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    if not arrays or not np.ndim(arrays[0]):
        raise UserError(
            "x must be an array [samples, ...], or several of them as a tuple or by name"
        )
    return len(arrays[0])
