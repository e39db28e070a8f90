"""What a w is worth on samples, as sums: those of several nodes add up, and all metrics follow from them.

Rules here:
- No sample is in a tally: of classes there are counts and histograms of scores, of real targets sums over samples.
- Counts are whole numbers, and sums are added by `math.fsum`, which rounds once: tallies give the same total to the bit
  in whatever order they come.
- Metrics are those of scikit-learn on all samples together. The area under the ROC curve (AUC) is that of scores in
  `BINS` bins, where two samples in one bin count as half right: it is off by half the share of such pairs at most
  (`auc_resolution`). Bins are of equal width in z / (2 + |z|), z a score or the log-odds of a class: order is all that
  counts, and so there are bins for probabilities next to 0 and 1 too.
- A model's own metrics are functions of many samples, and nobody knows how they add up: over nodes they are means,
  weighted by samples.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.data.dataset import Standardization
from fedbudget.data.shards import Table
from fedbudget.models.base import Model, Targets, loss_over
from fedbudget.models.own import FunctionModel

BINS = 1000
MOST_SCORED = 100
"""Classes, above which there are no histograms of scores, and so no AUC: they would be larger than many models."""

SHARES = ("accuracy", "balanced_accuracy", "f1", "f1_binary", "auc")
"""Metrics of classes: 1 is the best. `f1` is the mean over classes, `f1_binary` that of the second of two classes."""

ERRORS = ("rmse", "mae", "r2")
"""Metrics of real targets, in the target's own units but for R²."""

_MOST_CLASSES = 1000  # that may be counted by a number which a function gives


@dataclass(frozen=True)
class ClassCounts:
    """Of samples whose targets are classes.

    Args:
      actual, predicted, right: how many samples are of each class, are taken for one, and are rightly so, [classes].
      scores: for each class, how many samples of others and of it have a score in each bin, [classes, 2, bins]; of two
        classes only for the second. None where there are no scores.
    """

    actual: Int64
    predicted: Int64
    right: Int64
    scores: Int64 | None = None

    @classmethod
    def of(
        cls, actual: Int64, predicted: Int64, classes: int, scores: Float64 | None = None
    ) -> "ClassCounts":
        """
        Args:
          actual, predicted: class numbers, [samples]; one that is no class's counts as wrong.
          scores: of each class, or of the second of two, [samples, classes].
        """
        known = predicted[(predicted >= 0) & (predicted < classes)]
        counts = [
            np.bincount(each, minlength=classes)
            for each in (actual, known, actual[actual == predicted])
        ]
        histograms = None
        if scores is not None and classes <= MOST_SCORED:
            numbers = [1] if scores.shape[1] == 1 else range(classes)
            columns = zip(numbers, scores.T, strict=True)
            histograms = np.stack(
                [_histograms(column, actual == number) for number, column in columns]
            )
        return cls(counts[0], counts[1], counts[2], histograms)

    @classmethod
    def total(cls, parts: "Sequence[ClassCounts]") -> "ClassCounts":
        classes = max(len(part.actual) for part in parts)

        def add(name: str) -> Int64:
            rows: list[Int64] = [getattr(part, name) for part in parts]
            return np.asarray(
                sum(np.pad(row, (0, classes - len(row))) for row in rows), np.int64
            )

        scores = [part.scores for part in parts if part.scores is not None]
        alike = len(scores) == len(parts) and len({each.shape for each in scores}) == 1
        return cls(
            add("actual"),
            add("predicted"),
            add("right"),
            np.sum(scores, axis=0) if alike else None,
        )

    @property
    def accuracy(self) -> float:
        return int(self.right.sum()) / int(self.actual.sum())

    @property
    def majority(self) -> float:
        """The accuracy of whoever takes every sample for one of the most frequent class."""
        return int(self.actual.max()) / int(self.actual.sum())

    @property
    def auc_resolution(self) -> float:
        """By how much the AUC may be off, because scores are in bins."""
        shared = [
            np.dot(*_float(pair)) / np.prod(_float(pair).sum(axis=1)) for pair in self._both
        ]
        return 0.5 * float(np.mean(shared)) if shared else 0.0

    def metrics(self) -> dict[str, float]:
        there = self.actual > 0
        either = (self.actual + self.predicted) > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            recall = self.right / self.actual
            f1 = 2 * self.right / (self.actual + self.predicted)
        found = {
            "accuracy": self.accuracy,
            "balanced_accuracy": float(recall[there].mean()),
        }
        found["f1"] = float(f1[either].mean())
        if len(self.actual) == 2:
            found["f1_binary"] = float(f1[1]) if either[1] else 0.0
        if self._both:
            found["auc"] = float(np.mean([_area(*_float(pair)) for pair in self._both]))
        return found

    @property
    def _both(self) -> list[Int64]:
        """The histograms of classes that there are samples of, and of others; [2, bins] each."""
        return (
            []
            if self.scores is None
            else [pair for pair in self.scores if pair.any(axis=1).all()]
        )


@dataclass(frozen=True)
class ErrorSums:
    """Of samples with real targets y, in their own units; e is the error of a prediction.

    Args:
      targets: Σ y.
      spread: Σ (y - mean)².
      absolute, squared: Σ |e| and Σ e².
    """

    targets: float
    spread: float
    absolute: float
    squared: float

    @classmethod
    def of(cls, y: Float64, predicted: Float64) -> "ErrorSums":
        errors = predicted - y
        spread = float(np.square(y - y.mean()).sum())
        return cls(
            math.fsum(y),
            spread,
            float(np.abs(errors).sum()),
            float(np.square(errors).sum()),
        )

    @classmethod
    def total(cls, parts: "Sequence[ErrorSums]", samples: Sequence[int]) -> "ErrorSums":
        targets = math.fsum(part.targets for part in parts)
        mean = targets / sum(samples)
        between = [
            count * (part.targets / count - mean) ** 2
            for part, count in zip(parts, samples, strict=True)
        ]
        return cls(
            targets,
            math.fsum([*(part.spread for part in parts), *between]),
            _sum(part.absolute for part in parts),
            _sum(part.squared for part in parts),
        )

    def metrics(self, samples: int) -> dict[str, float]:
        found = {"rmse": math.sqrt(self.squared / samples), "mae": self.absolute / samples}
        return found if not self.spread else {**found, "r2": 1 - self.squared / self.spread}


@dataclass(frozen=True)
class Tally:
    """What a w is worth on some samples.

    Args:
      samples: how many.
      loss: their mean.
      classes, errors: where targets are classes, and where they are real numbers.
      own: the model's own metrics.
    """

    samples: int
    loss: float
    classes: ClassCounts | None = None
    errors: ErrorSums | None = None
    own: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Model, w: Float32, table: Table, units: Standardization | None = None
    ) -> "Tally":
        """
        Args:
          units: how real targets were standardised, if they were.
        """
        samples = len(table)
        errors = None
        with np.errstate(
            over="ignore", invalid="ignore", divide="ignore"
        ):  # of a w that has diverged
            outputs, y = _outputs_and_targets(model, w, table)
            classes = None if outputs is None else _class_counts(model, table, outputs, y)
            if (
                outputs is not None
                and classes is None
                and outputs.shape[1] == 1
                and model.target in _REAL
            ):
                errors = ErrorSums.of(
                    *(_in_units(model, units, values) for values in (y, outputs[:, 0]))
                )
        return cls(
            samples,
            loss_over(model, w, table),
            classes,
            errors,
            dict(model.metrics(w, table)),
        )

    @classmethod
    def total(cls, parts: "Sequence[Tally]") -> "Tally":
        """Of all samples of several tallies of one w."""
        if len(parts) == 1:
            return parts[0]
        samples = [part.samples for part in parts]

        def mean(values: Iterable[float]) -> float:
            return _sum(map(operator.mul, samples, values)) / sum(samples)

        classes = [part.classes for part in parts if part.classes is not None]
        errors = [part.errors for part in parts if part.errors is not None]
        names = [name for name in parts[0].own if all(name in part.own for part in parts)]
        return cls(
            sum(samples),
            mean(part.loss for part in parts),
            ClassCounts.total(classes) if len(classes) == len(parts) else None,
            ErrorSums.total(errors, samples) if len(errors) == len(parts) else None,
            {name: mean(part.own[name] for part in parts) for name in names},
        )

    def metrics(self) -> dict[str, float]:
        """By name, those of classes or of real targets first; one of the model's own takes the place of another."""
        found = {} if self.classes is None else self.classes.metrics()
        found |= {} if self.errors is None else self.errors.metrics(self.samples)
        found |= self.own
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def to_beat(self) -> dict[str, float]:
        """What is reached without learning anything of the features: the accuracy of whoever always says the most
        frequent class, or the RMSE of whoever always says the mean.
        """
        if self.classes is not None:
            return {"accuracy": self.classes.majority}
        return (
            {}
            if self.errors is None
            else {"rmse": math.sqrt(self.errors.spread / self.samples)}
        )


def spread(parts: Sequence[Tally]) -> dict[str, float]:
    """How far nodes are apart in accuracy, or in RMSE where targets are real: the worst of them, the one that a tenth
    of nodes are worse than, and the one in the middle, with how many they are; nothing of what has neither.
    """
    accuracies = [part.classes.accuracy for part in parts if part.classes is not None]
    errors = [
        part.errors.metrics(part.samples)["rmse"]
        for part in parts
        if part.errors is not None
    ]
    values = [*accuracies, *(-error for error in errors)]
    if not values or not np.isfinite(values).all():
        return {}
    found = np.abs(np.quantile(values, [0.0, 0.1, 0.5])).tolist()
    return {
        "nodes": len(values),
        **dict(zip(("worst", "tenth", "median"), found, strict=True)),
    }


_REAL = ("real", "raw", "auto")


def metric_names(model: Model, *, classes: bool) -> tuple[str, ...]:
    """What the metrics of a tally may be, before there is one."""
    own = getattr(model, "own_metrics", ())
    if model.target in ("binary", "classes") or (
        model.target in ("auto", "raw") and classes
    ):
        return (*SHARES, *own)
    return (*(ERRORS if model.target in _REAL else ()), *own)


def _outputs_and_targets(
    model: Model, w: Float32, table: Table
) -> tuple[Float32 | None, Targets]:
    """A model that is all of a person's own need not tell targets: they are the table's."""
    both = getattr(model, "outputs_and_targets", None)
    return (model.outputs(w, table), table.y) if both is None else both(w, table)


def _class_counts(
    model: Model, table: Table, outputs: Float32, y: Targets
) -> ClassCounts | None:
    """None where targets are no classes, or nobody knows which class an output means."""
    scores = outputs.astype(np.float64)
    if model.target == "binary" and outputs.shape[1] == 1:
        known = None if isinstance(model, FunctionModel) else scores
        return ClassCounts.of(
            (y > 0).astype(np.int64), (scores[:, 0] >= 0).astype(np.int64), 2, known
        )
    classes = table.labels and (
        model.target in ("classes", "raw") or np.issubdtype(y.dtype, np.integer)
    )
    if model.target not in ("classes", "raw", "auto") or not classes:
        return None
    actual = y.astype(np.int64)
    if isinstance(model, FunctionModel):
        if (
            not ((y == actual) & (actual >= 0) & (actual < _MOST_CLASSES)).all()
            or outputs.shape[1] != 1
        ):
            return None
        predicted = np.where(
            np.isin(scores[:, 0], np.arange(_MOST_CLASSES)), scores[:, 0], -1
        ).astype(np.int64)
        return ClassCounts.of(
            actual, predicted, 1 + int(max(actual.max(), predicted.max(), 1))
        )
    count = outputs.shape[1]
    if count < 2 or actual.min() < 0 or actual.max() >= count or model.target == "raw":
        return None
    return ClassCounts.of(
        actual,
        scores.argmax(axis=1),
        count,
        None if count > MOST_SCORED else _log_odds(scores),
    )


def _log_odds(scores: Float64) -> Float64:
    """Of each class where softmax makes probabilities of scores, or of the second of two; [samples, classes]."""
    if scores.shape[1] == 2:
        return scores[:, 1:] - scores[:, :1]
    row = np.arange(len(scores))
    top = scores.argmax(axis=1)
    below = scores - scores.max(axis=1, keepdims=True)
    parts = np.exp(below)
    rest = parts.sum(axis=1, keepdims=True) - parts
    parts[row, top] = 0.0
    rest[row, top] = parts.sum(axis=1)  # not as a small difference of large numbers
    return np.asarray(below - np.log(rest), np.float64)


def _histograms(scores: Float64, own: Flags) -> Int64:
    """How many scores of others, and of its own, are in each bin, [2, bins]."""
    limited = np.nan_to_num(np.clip(scores, -1e9, 1e9))
    places = np.minimum(
        (BINS * (0.5 + 0.5 * limited / (2 + np.abs(limited)))).astype(np.int64), BINS - 1
    )
    return np.stack([np.bincount(places[chosen], minlength=BINS) for chosen in (~own, own)])


def _area(others: Float64, own: Float64) -> float:
    """The share of pairs in which the score of its own is the higher one; half of those in one bin."""
    below = np.cumsum(others) - 0.5 * others
    return float(own @ below / (own.sum() * others.sum()))


def _in_units(model: Model, units: Standardization | None, values: Targets) -> Float64:
    real = np.asarray(values, np.float64)
    return (
        real
        if units is None or model.target == "raw"
        else units.target_mean + units.target_deviation * real
    )


def _float(counts: Int64) -> Float64:
    return counts.astype(np.float64)


def _sum(values: Iterable[float]) -> float:
    """Rounded once; nan where a part is no number."""
    parts = list(values)
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan
