"""Metrics of a model on samples, computed from sums that can be added over nodes.

Rules:

- A tally contains no samples: counts and histograms of scores for classes, sums over
  samples for real targets.
- Counts are integers, and `math.fsum` adds sums with one rounding. The total has the same
  bits in any order of the tallies.
- Metrics are those of scikit-learn on all samples together. The area under the ROC curve
  (AUC) uses scores in `BINS` bins, and a pair of samples in one bin counts as half right.
  Its error is at most half the fraction of such pairs. Bins have equal
  width in z / (2 + |z|), where z is a score or the log-odds of a class. Only the order of
  scores matters, so probabilities near 0 and 1 have bins of their own.
- A model's own metrics are functions of all samples and do not add up. Over nodes they are
  means, weighted by samples.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int64
from fedbudget.data.dataset import Standardization
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.models.base import Model, Targets, loss_over
from fedbudget.models.own import FunctionModel

BINS = 1000
"""Bins of a histogram of scores."""

MOST_SCORED = 100
"""Most classes with histograms of scores, and so with an AUC. More would exceed many
models."""

SHARES = ("accuracy", "balanced_accuracy", "f1", "f1_binary", "auc")
"""Metrics of classes; 1 is the best. `f1` is the mean over classes, `f1_binary` is for the
second of two classes."""

ERRORS = ("rmse", "mae", "r2")
"""Metrics of real targets, in the unit of the target except R²."""

_MOST_CLASSES = 1000
"""Classes of a `FunctionModel`, at most. It predicts class numbers."""

_MOST_ERROR = 1e12
"""Largest squared error of a row that counts; a diverged model has larger ones."""

_MOST_BLOCKS = 200
"""Blocks of rows whose losses are measured, if there is no score of each row."""

_REAL = ("real", "raw", "auto")
"""Values of `Model.target` with which y can be a real number."""


@dataclass(frozen=True)
class ClassCounts:
    """Counts for samples with classes.

    Args:
      actual: samples of each class, [classes].
      predicted: predictions of each class, [classes].
      right: correct predictions of each class, [classes].
      scores: for each class, histograms of its score over samples of other classes and
        over its own samples, [classes, 2, bins]. With two classes, only the second has
        them. None if there are no scores.
    """

    actual: Int64
    predicted: Int64
    right: Int64
    scores: Int64 | None = None

    @classmethod
    def of(
        cls, actual: Int64, predicted: Int64, classes: int, scores: Float64 | None = None
    ) -> "ClassCounts":
        """Count predictions.

        Args:
          actual, predicted: class numbers, [samples]. Unknown predicted numbers count as
            wrong.
          classes: number of classes.
          scores: scores of each class, or of the second of two, [samples, classes].
        """
        known = predicted[(predicted >= 0) & (predicted < classes)]
        histograms = None
        if scores is not None and classes <= MOST_SCORED:
            numbers = [1] if scores.shape[1] == 1 else range(classes)
            columns = zip(numbers, scores.T, strict=True)
            histograms = np.stack(
                [_histograms(column, actual == number) for number, column in columns]
            )
        return cls(
            np.bincount(actual, minlength=classes),
            np.bincount(known, minlength=classes),
            np.bincount(actual[actual == predicted], minlength=classes),
            histograms,
        )

    @classmethod
    def total(cls, parts: "Sequence[ClassCounts]") -> "ClassCounts":
        """Add counts. Histograms remain if all parts have the same classes."""
        total = np.zeros((3, max(len(part.actual) for part in parts)), np.int64)
        for part in parts:
            counts = (part.actual, part.predicted, part.right)
            total[:, : len(part.actual)] += np.stack(counts)
        scores = [part.scores for part in parts if part.scores is not None]
        alike = len(scores) == len(parts) and len({each.shape for each in scores}) == 1
        histograms = np.sum(scores, axis=0) if alike else None
        return cls(total[0], total[1], total[2], histograms)

    def scaled(self, part: float) -> "ClassCounts":
        """Return a part of all counts, rounded; at least one sample stays."""
        counts = [
            None if each is None else np.rint(part * each).astype(np.int64)
            for each in (self.actual, self.predicted, self.right, self.scores)
        ]
        actual, predicted, right, scores = counts
        assert actual is not None
        assert predicted is not None
        assert right is not None
        actual[np.argmax(self.actual)] = max(1, actual.max())
        return ClassCounts(actual, predicted, right, scores)

    @property
    def accuracy(self) -> float:
        return int(self.right.sum()) / int(self.actual.sum())

    @property
    def majority(self) -> float:
        """Accuracy of a constant prediction of the most frequent class."""
        return int(self.actual.max()) / int(self.actual.sum())

    def metrics(self) -> dict[str, float]:
        """Compute the metrics of classes by name."""
        either = (self.actual + self.predicted) > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            recall = self.right / self.actual
            f1 = 2 * self.right / (self.actual + self.predicted)
        metrics = {
            "accuracy": self.accuracy,
            "balanced_accuracy": float(recall[self.actual > 0].mean()),
            "f1": float(f1[either].mean()),
        }
        if len(self.actual) == 2:
            metrics["f1_binary"] = float(f1[1]) if either[1] else 0.0
        pairs = self.complete_histograms
        if pairs:
            metrics["auc"] = float(np.mean([_area(*pair) for pair in pairs]))
        return metrics

    @property
    def complete_histograms(self) -> list[Float64]:
        """Histograms [2, bins] of the classes that some samples have and others do not."""
        if self.scores is None:
            return []
        complete = [pair for pair in self.scores if pair.any(axis=1).all()]
        return [pair.astype(np.float64) for pair in complete]


@dataclass(frozen=True)
class ErrorSums:
    """Sums for samples with real targets y, in their unit; e is the error of a prediction.

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
        """Sum over samples, [samples]."""
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
        """Add sums of parts with these numbers of samples."""
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
        """Compute the metrics of real targets by name."""
        metrics = {
            "rmse": math.sqrt(self.squared / samples),
            "mae": self.absolute / samples,
        }
        if self.spread:
            metrics["r2"] = 1 - self.squared / self.spread
        return metrics


@dataclass(frozen=True)
class RowScores:
    """A score of each row, whose mean is a metric.

    Args:
      metric: `accuracy` for classes, `rmse` for real targets (the root of the mean, in the
        unit of the model), and `loss` for anything else.
      values: 0 or 1, squared errors, or the mean loss, [rows].
      targets: targets that the scores are for, [rows].
    """

    metric: str
    values: Float64
    targets: Float64

    @classmethod
    def of(cls, model: Model, w: Float32, table: Table) -> "RowScores":
        """Score w on each row of a table.

        Args:
          model: the model.
          w: its parameters, [parameters].
          table: the samples.
        """
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            outputs, y = _outputs_and_targets(model, w, table)
        targets = np.asarray(y, np.float64)
        if outputs is not None:
            right = _right(model, table, outputs, y)
            if right is not None:
                return cls("accuracy", right.astype(np.float64), targets)
            if outputs.shape[1] == 1 and model.target in _REAL:
                errors = outputs[:, 0].astype(np.float64) - targets
                return cls(
                    "rmse", np.clip(np.nan_to_num(errors**2), 0, _MOST_ERROR), targets
                )
        blocks = np.array_split(np.arange(len(table)), min(len(table), _MOST_BLOCKS))
        losses = model.losses(
            w[None], Shards.of(table, blocks), BatchIndices.whole(len(blocks))
        )
        sizes = [len(block) for block in blocks]
        return cls("loss", np.repeat(np.nan_to_num(losses), sizes), targets)


def _right(model: Model, table: Table, outputs: Float32, y: Targets) -> Flags | None:
    """Return which predictions of a class are right; None if there are no classes."""
    if model.target == "binary" and outputs.shape[1] == 1:
        return np.asarray((outputs[:, 0] >= 0) == (y > 0), np.bool_)
    integers = model.target in ("classes", "raw") or np.issubdtype(y.dtype, np.integer)
    if model.target not in ("classes", "raw", "auto") or not (table.labels and integers):
        return None
    if isinstance(model, FunctionModel):
        return np.asarray(outputs[:, 0] == y, np.bool_) if outputs.shape[1] == 1 else None
    if outputs.shape[1] < 2 or model.target == "raw":
        return None
    return np.asarray(outputs.argmax(axis=1) == y, np.bool_)


@dataclass(frozen=True)
class Tally:
    """Sums of one w on some samples.

    Args:
      samples: number of samples.
      loss: mean loss.
      classes: counts, if targets are classes.
      errors: sums, if targets are real numbers.
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
        """Evaluate w on a table.

        Args:
          model: the model.
          w: its parameters, [parameters].
          table: the samples.
          units: standardisation of real targets, if they were standardised.
        """
        classes = None
        errors = None
        # A diverged w has infinite outputs.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            outputs, y = _outputs_and_targets(model, w, table)
            if outputs is not None:
                classes = _class_counts(model, table, outputs, y)
                real = outputs.shape[1] == 1 and model.target in _REAL
                if classes is None and real:
                    actual = _in_units(model, units, y)
                    predicted = _in_units(model, units, outputs[:, 0])
                    errors = ErrorSums.of(actual, predicted)
        loss = loss_over(model, w, table)
        return cls(len(table), loss, classes, errors, dict(model.metrics(w, table)))

    @classmethod
    def total(cls, parts: "Sequence[Tally]") -> "Tally":
        """Combine tallies of the same w."""
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

    def capped(self, most: int) -> "Tally":
        """Return the tally with the weight of at most `most` samples."""
        if self.samples <= most:
            return self
        part = most / self.samples
        classes = None if self.classes is None else self.classes.scaled(part)
        errors = self.errors
        if errors is not None:
            sums = {name: part * value for name, value in vars(errors).items()}
            errors = ErrorSums(**sums)
        return replace(self, samples=most, classes=classes, errors=errors)

    def metrics(self) -> dict[str, float]:
        """Compute all metrics by name.

        The model's own metrics replace others of the same name.
        """
        metrics = {} if self.classes is None else self.classes.metrics()
        if self.errors is not None:
            metrics |= self.errors.metrics(self.samples)
        metrics |= self.own
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def to_beat(self) -> dict[str, float]:
        """Return the metric of a constant prediction, as a baseline.

        The baseline is the accuracy of the most frequent class, or the RMSE of the mean.
        """
        if self.classes is not None:
            return {"accuracy": self.classes.majority}
        if self.errors is not None:
            return {"rmse": math.sqrt(self.errors.spread / self.samples)}
        return {}


def totals_without_one(parts: Sequence[Tally]) -> list[Tally]:
    """Combine all tallies but one, once for each of at least two tallies."""
    before: list[list[Tally]] = [[]]
    after: list[list[Tally]] = [[]]
    for part in parts[:-1]:
        before.append([Tally.total([*before[-1], part])])
    for part in reversed(parts[1:]):
        after.append([Tally.total([part, *after[-1]])])
    pairs = zip(before, reversed(after), strict=True)
    return [Tally.total([*first, *last]) for first, last in pairs]


def spread(parts: Sequence[Tally]) -> dict[str, float]:
    """Return the spread of the nodes' accuracies, or of their RMSE for real targets.

    Returns:
      The number of nodes, the worst value, the 10 % quantile and the median. Empty if the
      nodes have neither metric.
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
    worst, tenth, median = np.abs(np.quantile(values, [0.0, 0.1, 0.5])).tolist()
    return {"nodes": len(values), "worst": worst, "tenth": tenth, "median": median}


def metric_names(model: Model, *, classes: bool) -> tuple[str, ...]:
    """Return the metrics that a tally of this model may have.

    Args:
      model: the model.
      classes: whether the data has classes.
    """
    own = getattr(model, "own_metrics", ())
    either = model.target in ("auto", "raw")
    if model.target in ("binary", "classes") or (either and classes):
        return (*SHARES, *own)
    return (*ERRORS, *own) if model.target in _REAL else own


def _outputs_and_targets(
    model: Model, w: Float32, table: Table
) -> tuple[Float32 | None, Targets]:
    """Return outputs and targets.

    Models without their own targets use those of the table.
    """
    both = getattr(model, "outputs_and_targets", None)
    return (model.outputs(w, table), table.y) if both is None else both(w, table)


def _class_counts(
    model: Model, table: Table, outputs: Float32, y: Targets
) -> ClassCounts | None:
    """Count predictions; None if targets or outputs are not classes."""
    scores = outputs.astype(np.float64)
    if model.target == "binary" and outputs.shape[1] == 1:
        signs = (scores[:, 0] >= 0).astype(np.int64)
        known = None if isinstance(model, FunctionModel) else scores
        return ClassCounts.of((y > 0).astype(np.int64), signs, 2, known)
    integers = model.target in ("classes", "raw") or np.issubdtype(y.dtype, np.integer)
    if model.target not in ("classes", "raw", "auto") or not (table.labels and integers):
        return None
    actual = y.astype(np.int64)
    count = outputs.shape[1]
    if isinstance(model, FunctionModel):
        valid = (y == actual) & (actual >= 0) & (actual < _MOST_CLASSES)
        if not valid.all() or count != 1:
            return None
        numbers = np.isin(scores[:, 0], np.arange(_MOST_CLASSES))
        predicted = np.where(numbers, scores[:, 0], -1).astype(np.int64)
        largest = int(max(actual.max(), predicted.max(), 1))
        return ClassCounts.of(actual, predicted, largest + 1)
    if count < 2 or actual.min() < 0 or actual.max() >= count or model.target == "raw":
        return None
    log_odds = None if count > MOST_SCORED else _log_odds(scores)
    return ClassCounts.of(actual, scores.argmax(axis=1), count, log_odds)


def _log_odds(scores: Float64) -> Float64:
    """Return the log-odds of each class under softmax, or of the second of two classes.

    The result has shape [samples, classes].
    """
    if scores.shape[1] == 2:
        return scores[:, 1:] - scores[:, :1]
    row = np.arange(len(scores))
    top = scores.argmax(axis=1)
    below = scores - scores.max(axis=1, keepdims=True)
    parts = np.exp(below)
    rest = parts.sum(axis=1, keepdims=True) - parts
    parts[row, top] = 0.0
    rest[row, top] = parts.sum(axis=1)  # a difference of large numbers would lose digits
    return np.asarray(below - np.log(rest), np.float64)


def _histograms(scores: Float64, own: Flags) -> Int64:
    """Return histograms of the scores of other samples and of its own, [2, bins]."""
    limited = np.nan_to_num(np.clip(scores, -1e9, 1e9))
    position = 0.5 + 0.5 * limited / (2 + np.abs(limited))
    bins = np.minimum((BINS * position).astype(np.int64), BINS - 1)
    return np.stack([np.bincount(bins[chosen], minlength=BINS) for chosen in (~own, own)])


def _area(others: Float64, own: Float64) -> float:
    """Return the fraction of pairs with a higher score of its own; 0.5 within a bin."""
    below = np.cumsum(others) - 0.5 * others
    return float(own @ below / (own.sum() * others.sum()))


def _in_units(model: Model, units: Standardization | None, values: Targets) -> Float64:
    real = np.asarray(values, np.float64)
    if units is None or model.target == "raw":
        return real
    return units.target_mean + units.target_deviation * real


def _sum(values: Iterable[float]) -> float:
    """Add with one rounding; NaN if a value is not finite."""
    parts = list(values)
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan
