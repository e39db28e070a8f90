"""Whether features are on scales that gradient descent can learn from.

A dataset: samples with what is known of them, before a model says what it wants to learn.

Class numbers and real targets are both kept where the data has both, because the same data may train a classifier, a
regression or a clustering, and because the Cases distribute samples by class whatever the model is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Float32, Float64, Int64, Samples
from fedbudget.data.partition import labels_by_clustering
from fedbudget.data.shards import SampleStore, Table
from fedbudget.data.tables import Layout, RawTable
from fedbudget.errors import UserError
from fedbudget.randomness import Stream, generator

UNEVEN = 30.0
"""How many times as wide as most others a feature may be, or as far from 0 as it is wide."""


def scale_warning(x: Samples) -> str | None:
    """What is wrong with the scales of features, in words; None where nothing is.

    Of images some pixels hardly ever change; so a feature is compared with the quarter that change least.

    Args:
      x: [samples, features].
    """
    if x.dtype.kind != "f" or len(x) < 2:
        return None
    mean = x.mean(axis=0, dtype=np.float64)
    deviation = x.std(axis=0, dtype=np.float64)
    changing = np.flatnonzero(deviation > 1e-12 * (1 + np.abs(mean)))
    if not len(changing):
        return None
    cure = "little is learned from such; `standardise` brings all to mean 0 and deviation 1"
    order = changing[np.argsort(deviation[changing])]
    narrow = order[len(order) // 4 if len(order) > 3 else 0]
    wide = order[-1]
    if deviation[wide] > UNEVEN * deviation[narrow]:
        sizes = f"feature {wide} has a deviation of {deviation[wide]:.3g}, feature {narrow} of {deviation[narrow]:.3g}"
        return f"features are on very different scales ({sizes}): {cure}"
    far = changing[(np.abs(mean[changing]) / deviation[changing]).argmax()]
    if abs(mean[far]) > UNEVEN * deviation[far]:
        return f"feature {far} is far from 0 (mean {mean[far]:.3g}, deviation {deviation[far]:.3g}): {cure}"
    return None


@dataclass(frozen=True)
class Part:
    """The training or the test samples.

    Args:
      x: features as stored, [samples, features].
      labels: class numbers, [samples], or None.
      values: real targets, [samples], or None.
    """

    x: Samples
    labels: Int64 | None = None
    values: Float64 | None = None

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, chosen: NDArray[np.int64]) -> "Part":
        """Some of the samples."""
        labels = None if self.labels is None else self.labels[chosen]
        values = None if self.values is None else self.values[chosen]
        return Part(np.ascontiguousarray(self.x[chosen]), labels, values)

    @classmethod
    def join(cls, parts: "Sequence[Part]") -> "Part":
        """All samples of several parts, which must know the same of them."""
        labels = [part.labels for part in parts if part.labels is not None]
        values = [part.values for part in parts if part.values is not None]
        x = np.concatenate([part.x for part in parts])
        return cls(
            x,
            np.concatenate(labels) if labels else None,
            np.concatenate(values) if values else None,
        )


@dataclass(frozen=True)
class Standardization:
    """How features (and a real target) were brought to mean 0 and deviation 1, to do the same to other data."""

    mean: Float64
    deviation: Float64
    target_mean: float = 0.0
    target_deviation: float = 1.0

    @classmethod
    def of(cls, part: Part) -> "Standardization":
        values = np.zeros(1) if part.values is None else part.values
        x = part.x.astype(np.float64)
        return cls(
            x.mean(axis=0), _deviation(x), float(values.mean()), float(_deviation(values))
        )

    def apply(self, part: Part) -> Part:
        """The same samples with their features standardised."""
        return replace(part, x=((part.x - self.mean) / self.deviation).astype(np.float32))

    def targets(self, values: Float64) -> Float64:
        return (values - self.target_mean) / self.target_deviation


@dataclass(frozen=True)
class Dataset:
    """Samples to train on and to test on.

    Args:
      name: as a person would call it.
      train, test: the samples; test may be missing.
      classes: what class number 0, 1, ... stands for.
      scale: what a stored feature is multiplied with, 1/255 for pixels.
      parity: classifiers of two classes tell even from odd class numbers (the paper's SVM on digits).
      shape: of one sample's features, such as (1, 28, 28) for an image; nothing for a flat row.
      note: in which way this is less than the whole dataset, in words.
      files: samples per file, where every node has a file of its own.
      standardization: what was done to the features, if anything.
      integers: features are whole numbers, such as those of words.
      store: of samples that are no rows of an array; x has their places in it, [samples, 1].
      layout: how features were made of the columns of tables, where they were.
      raw: the columns that training samples were made of, where they may have to be made anew with another layout.
      remarks: what a person may want to know of the data before the start, in words; options are in backticks.
      warnings: the same, of what they should do something about.
    """

    name: str
    train: Part
    test: Part | None = None
    classes: tuple[str, ...] = ()
    scale: float = 1.0
    parity: bool = False
    shape: tuple[int, ...] = ()
    note: str = ""
    files: tuple[int, ...] = ()
    standardization: Standardization | None = field(default=None, repr=False)
    integers: bool = False
    store: SampleStore | None = field(default=None, repr=False)
    layout: Layout | None = field(default=None, repr=False)
    raw: RawTable | None = field(default=None, repr=False)
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def features(self) -> int:
        return int(self.train.x.shape[1])

    def empty(self) -> "Dataset":
        """What is known of the samples, without any of them."""
        none = self.train.rows(np.empty(0, np.int64))
        store = None if self.store is None else SampleStore([])
        return replace(
            self,
            train=none,
            test=None,
            note="",
            files=(),
            store=store,
            raw=None,
            remarks=(),
        )

    def partition_labels(self, seed: int) -> Int64:
        """What the Cases distribute the training samples by: their classes, or clusters where they have none."""
        if self.train.labels is not None:
            return self.train.labels
        if self.store is not None:
            return np.zeros(len(self.train), np.int64)  # all of one kind
        return labels_by_clustering(
            self.train.x.astype(np.float32) * np.float32(self.scale), seed
        )

    def sample(self, train: int | None, test: int | None, seed: int) -> "Dataset":
        """Only so many of the samples, others for each seed; None for all."""
        rng = generator(seed, Stream.SAMPLES)
        trained = _some(self.train, train, rng, f"{self.name}'s training samples")
        tested = (
            None
            if self.test is None
            else _some(self.test, test, rng, f"{self.name}'s test samples")
        )
        return replace(
            self, train=trained, test=tested, files=self.files if train is None else ()
        )

    def standardised(self) -> "Dataset":
        """The same samples, standardised by those to train on."""
        how = Standardization.of(self.train)
        test = None if self.test is None else how.apply(self.test)
        return replace(
            self,
            train=how.apply(self.train),
            test=test,
            standardization=how,
            scale=1.0,
            integers=False,
        )

    def checked_scales(self) -> "Dataset":
        """The same, with a warning where features that are used as they are are on scales that little is learned from.

        Images, and samples that are not arrays, are what they are.
        """
        usual = (
            self.standardization is None
            and self.store is None
            and not self.shape
            and self.scale == 1
        )
        warning = scale_warning(self.train.x) if usual and not self.integers else None
        return (
            self if warning is None else replace(self, warnings=(*self.warnings, warning))
        )

    def with_layout(self, layout: Layout) -> "Dataset":
        """The same training samples with features that another layout makes of their columns."""
        assert self.raw is not None
        train = replace(self.train, x=layout.encode(self.raw))
        return replace(self, train=train, test=None, layout=layout, standardization=None)

    def with_classes(self, classes: tuple[str, ...]) -> "Dataset":
        """The same training samples with the numbers of these classes, which are all of its own and maybe more."""
        assert self.train.labels is not None
        number = {name: index for index, name in enumerate(classes)}
        unknown = [name for name in self.classes if name not in number]
        if unknown:
            raise UserError(
                f"{self.name}: class {unknown[0]!r} is not one of {', '.join(classes)}"
            )
        own = np.array([number[name] for name in self.classes], np.int64)
        train = replace(self.train, labels=own[self.train.labels])
        return replace(self, classes=classes, train=train, test=None)

    def table(self, part: Part, target: str) -> Table:
        """Samples as a model wants them: with targets `binary`, `classes`, `real`, `raw` (as given) or `none`; with
        `auto`, classes where there are some, by their own numbers where these are 0 or more.
        """
        if target == "auto":
            target = "real" if part.labels is None and self.store is None else "classes"
            if (
                part.labels is not None
                and self.classes
                and all(map(str.isdecimal, self.classes))
            ):
                part = replace(
                    part, labels=np.array([int(name) for name in self.classes])[part.labels]
                )
        labels = target == "classes" or (target == "raw" and part.labels is not None)
        y = self._targets(part, target)
        return Table(part.x, y, self.scale, self.shape, self.integers, labels, self.store)

    def _targets(self, part: Part, target: str) -> Float32:
        if (
            self.store is not None
            or target == "none"
            or (target == "raw" and part.values is None and part.labels is None)
        ):
            return np.zeros(len(part), np.float32)
        if target == "raw" and part.values is not None:
            return part.values.astype(np.float32)
        if target == "real":
            if part.values is None:
                raise UserError(
                    f"{self.name} has no real-valued target to predict; use `model` svm, softmax or kmeans"
                )
            how = self.standardization
            return (part.values if how is None else how.targets(part.values)).astype(
                np.float32
            )
        if part.labels is None:
            raise UserError(
                f"{self.name} has no classes to predict; use `model` linear or kmeans"
            )
        if target in ("classes", "raw"):
            return part.labels.astype(np.float32)
        if self.parity:
            return np.where(part.labels % 2 == 0, 1, -1).astype(np.float32)
        if len(self.classes) != 2:
            raise UserError(
                f"{self.name} has {len(self.classes)} classes; `model` svm needs two, softmax takes any"
            )
        return np.where(part.labels == 1, 1, -1).astype(np.float32)


def _some(part: Part, count: int | None, rng: np.random.Generator, what: str) -> Part:
    if count is None:
        return part
    if not 1 <= count <= len(part):
        raise UserError(f"{count} of {what} were asked for; there are {len(part)}")
    return part.rows(np.sort(rng.choice(len(part), count, replace=False)))


def hold_out(
    size: int, share: float, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of so many rows those to train on and those to test on, chosen at random but always the same."""
    if not 0 <= share < 1:
        raise UserError(f"`test_share` must be at least 0 and below 1, not {share:g}")
    order = np.random.default_rng(seed).permutation(size)
    tested = int(size * share)
    return np.sort(order[tested:]), np.sort(order[:tested])


def _deviation(values: Float64) -> Float64:
    """Of each column; 1 where it never changes, whose computed deviation is 0 or, by rounding, next to it."""
    return np.where(values.max(axis=0) > values.min(axis=0), values.std(axis=0), 1.0)
