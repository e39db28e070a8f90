"""What a model's outputs mean to people: the name of a class, its probability, a number in its own unit, a cluster.

Said once, for predictions here and for those that an exported file makes elsewhere.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64
from fedbudget.data.columns import class_name
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError
from fedbudget.models.base import Model
from fedbudget.models.function import FunctionModel

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
            number = outputs[:, 0].astype(np.int64) if self.kind == "number" else outputs.argmax(axis=1)
        return number if self.kind == "cluster" else np.asarray(np.take(self.labels, number))

    def probabilities(self, outputs: Float32, name: str) -> Float64:
        """Of each class, [samples, classes].

        Args:
          name: the model's, for errors.
        """
        if self.kind != "scores":
            why = "its score says on which side a sample is" if self.kind == "sign" else "it gives no scores of classes"
            raise UserError(f"{name} has no probabilities: {why}; softmax and mlp have, where there are classes")
        powers = np.exp(outputs.astype(np.float64) - outputs.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def meaning_of(model: Model, samples: Dataset, outputs: int) -> Meaning:
    """What a model's outputs stand for.

    Args:
      samples: what it was trained on; without any of them.
      outputs: how many there are for each sample.
    """
    target, classes, how = model.target, samples.classes, samples.standardization
    if target == "auto":
        target, classes = _auto(samples, outputs)
    value = Meaning("value") if how is None else Meaning("value", (), how.target_mean, how.target_deviation)
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
    in_words = samples.train.values is None and bool(classes)  # of data as it is, when classes are no numbers
    return Meaning("number", classes) if in_words else Meaning("value")


def _auto(samples: Dataset, outputs: int) -> tuple[Literal["classes", "real"], tuple[str, ...]]:
    """Of a module that was trained on either; classes that are numbers have their own, whichever there are."""
    real = samples.train.labels is None if samples.store is None else outputs == 1
    named = samples.classes and not all(map(str.isdecimal, samples.classes))
    return "real" if real else "classes", samples.classes if named else tuple(map(str, range(outputs)))


def _one_for_each(classes: tuple[str, ...], outputs: int) -> tuple[str, ...]:
    """A name for each score, also for those of classes that no sample had."""
    return (*classes[:outputs], *(f"class {number}" for number in range(len(classes), outputs)))


def _is_whole(name: str) -> bool:
    """Whether a class's name is that of a whole number."""
    try:
        return class_name(int(name)) == name
    except ValueError:
        return False
