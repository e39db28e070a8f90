"""Datasets: training and test samples with their metadata, independent of a model.

A dataset keeps class numbers and real targets if the data has both. The same data may
train a classifier, a regression or a clustering, and the Cases distribute samples by class
whatever the model is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from fedbudget.arrays import Float32, Float64, Int64, Samples
from fedbudget.data.columns import class_numbers
from fedbudget.data.partition import labels_by_clustering
from fedbudget.data.shards import SampleStore, Table
from fedbudget.data.tables import Layout, RawTable
from fedbudget.errors import UserError
from fedbudget.randomness import Stream, generator

ANY_KIND = "samples"
"""Storage of samples that are not rows of an array."""

_UNEVEN = 30.0  # ratio of standard deviations, or of mean to deviation, that is warned of


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

    def rows(self, chosen: Int64) -> "Part":
        """Return the chosen samples."""
        labels = None if self.labels is None else self.labels[chosen]
        values = None if self.values is None else self.values[chosen]
        return Part(np.ascontiguousarray(self.x[chosen]), labels, values)

    @classmethod
    def join(cls, parts: "Sequence[Part]") -> "Part":
        """Concatenate parts, which must have the same kinds of targets."""
        labels = [part.labels for part in parts if part.labels is not None]
        values = [part.values for part in parts if part.values is not None]
        return cls(
            np.concatenate([part.x for part in parts]),
            np.concatenate(labels) if labels else None,
            np.concatenate(values) if values else None,
        )


@dataclass(frozen=True)
class Standardization:
    """Statistics by which features and a real target are standardised."""

    mean: Float64
    deviation: Float64
    target_mean: float = 0.0
    target_deviation: float = 1.0

    @classmethod
    def of(cls, part: Part) -> "Standardization":
        """Compute the statistics of some samples."""
        values = np.zeros(1) if part.values is None else part.values
        x = part.x.astype(np.float64)
        return cls(
            x.mean(axis=0), _deviation(x), float(values.mean()), float(_deviation(values))
        )

    def apply(self, part: Part) -> Part:
        """Return the samples with standardised features."""
        return replace(part, x=((part.x - self.mean) / self.deviation).astype(np.float32))

    def targets(self, values: Float64) -> Float64:
        """Return standardised real targets."""
        return (values - self.target_mean) / self.target_deviation


@dataclass(frozen=True)
class Dataset:
    """Training and test samples.

    Args:
      name: for the user.
      train, test: the samples; test may be None.
      classes: the name of class number 0, 1, ...
      scale: factor of stored features, 1/255 for pixels.
      parity: binary classifiers separate even from odd class numbers (the paper's SVM on
        digits).
      shape: of one sample's features, such as (1, 28, 28); empty for a flat row.
      note: what is missing from the complete dataset, for the user.
      files: samples per file or site, if every node has its own.
      test_files: the same, of test samples; empty if they are not known.
      sites: names of these files or sites, if they are known.
      site_column: column whose values are the sites, if there is one.
      standardization: applied to the features, if any.
      integers: features are whole numbers, such as word indices.
      store: of samples that are not rows of an array; x contains their indices, [samples,
        1].
      layout: how the columns of tables became features.
      raw: the columns of the training samples, if they may be encoded again with another
        layout.
      remarks: facts about the data to print before the start; options are in backticks.
      warnings: the same, for problems that the user should solve.
      published: anyone can obtain the samples, so nothing about them is secret.
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
    test_files: tuple[int, ...] = ()
    sites: tuple[str, ...] = ()
    site_column: str | None = None
    standardization: Standardization | None = field(default=None, repr=False)
    integers: bool = False
    store: SampleStore | None = field(default=None, repr=False)
    layout: Layout | None = field(default=None, repr=False)
    raw: RawTable | None = field(default=None, repr=False)
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    published: bool = False

    @property
    def features(self) -> int:
        """The number of features."""
        return int(self.train.x.shape[1])

    @property
    def stored(self) -> str:
        """The data type of a feature; `samples` for samples that are not rows."""
        return str(self.train.x.dtype) if self.store is None else ANY_KIND

    @classmethod
    def without_samples(
        cls,
        name: str,
        shape: tuple[int, ...],
        stored: str,
        classes: tuple[str, ...],
        *,
        values: bool,
        **about: Any,
    ) -> "Dataset":
        """Return a dataset without samples.

        Args:
          shape: of one sample's features.
          stored: as the property of this name.
          values: whether there are real targets.
          about: further arguments of `Dataset`.
        """
        any_kind = stored == ANY_KIND
        dtype = np.dtype(np.int64 if any_kind else stored)
        part = Part(
            np.empty((0, prod(shape)), dtype),
            np.empty(0, np.int64) if classes else None,
            np.empty(0) if values else None,
        )
        return cls(
            name,
            part,
            classes=classes,
            shape=shape if len(shape) > 1 else (),
            store=SampleStore([]) if any_kind else None,
            **about,
        )

    def empty(self) -> "Dataset":
        """Return the metadata without samples."""
        none = self.train.rows(np.empty(0, np.int64))
        store = None if self.store is None else SampleStore([])
        bare = replace(self, train=none, test=None, store=store, raw=None)
        return replace(bare, note="", files=(), test_files=(), sites=(), remarks=())

    def partition_labels(self, seed: int) -> Int64:
        """Return the labels by which samples are distributed: classes, or else clusters."""
        if self.train.labels is not None:
            return self.train.labels
        if self.store is not None:
            return np.zeros(len(self.train), np.int64)  # one label for all
        features = self.train.x.astype(np.float32) * np.float32(self.scale)
        return labels_by_clustering(features, seed)

    def sample(self, train: int | None, test: int | None, seed: int) -> "Dataset":
        """Return a random subset; files and sites keep their own samples.

        Args:
          train, test: number of samples, None for all.
        """
        rng = generator(seed, Stream.SAMPLES)
        rows = _subset(self.train, train, rng, f"training samples of {self.name}")
        trained = self.train if rows is None else self.train.rows(rows)
        files = _counts(self.files, rows)
        tested = self.test
        test_files = self.test_files
        if tested is not None:
            rows = _subset(tested, test, rng, f"test samples of {self.name}")
            tested = tested if rows is None else tested.rows(rows)
            test_files = _counts(test_files, rows)
        return replace(self, train=trained, test=tested, files=files, test_files=test_files)

    def standardised(self, public: Standardization | None = None) -> "Dataset":
        """Return the dataset standardised by the statistics of its training samples.

        Args:
          public: scale that follows from no samples, to use instead.
        """
        how = public or Standardization.of(self.train)
        return replace(
            self,
            train=how.apply(self.train),
            test=None if self.test is None else how.apply(self.test),
            standardization=how,
            scale=1.0,
            integers=False,
        )

    def require_public(self, *, standardise: bool = False) -> None:
        """Refuse data of which a private run would publish exact statistics.

        Args:
          standardise: whether features will be standardised by their statistics.
        """
        if self.published or (self.layout is not None and self.layout.public):
            return
        if self.layout is not None:
            target = self.layout.target
            raise UserError(
                f"{self.name}: a private run on a table needs a public `schema` with "
                "ranges, categories and classes; otherwise it would publish exact means "
                "and categories of the rows. Draft one with: fedbudget data schema "
                f"TABLE.csv --target {target} > schema.toml, and review it"
            )
        if standardise or self.standardization is not None:
            raise UserError(
                f"{self.name}: `standardise` in a private run would publish exact means "
                "and deviations; scale the arrays by numbers known without the data, or "
                "pass a table with a `schema`"
            )

    def with_scale_warning(self) -> "Dataset":
        """Add a warning if unscaled features hinder gradient descent.

        Images and samples that are not arrays are not checked.
        """
        raw = self.standardization is None and self.store is None
        flat = not self.shape and self.scale == 1 and not self.integers
        warning = _scale_warning(self.train.x) if raw and flat else None
        return (
            self if warning is None else replace(self, warnings=(*self.warnings, warning))
        )

    def with_layout(self, layout: Layout) -> "Dataset":
        """Return the training samples encoded with another layout."""
        assert self.raw is not None
        train = replace(self.train, x=layout.encode(self.raw))
        return replace(self, train=train, test=None, layout=layout, standardization=None)

    def with_classes(self, classes: tuple[str, ...]) -> "Dataset":
        """Return the samples with class numbers of another list of classes.

        Args:
          classes: must contain all classes of this dataset.
        """
        numbers = class_numbers(self.name, classes, self.classes)

        def renumbered(part: Part) -> Part:
            assert part.labels is not None
            return replace(part, labels=numbers[part.labels])

        test = None if self.test is None else renumbered(self.test)
        return replace(self, classes=classes, train=renumbered(self.train), test=test)

    def table(self, part: Part, target: str) -> Table:
        """Return samples in the form that a model needs.

        Args:
          target: the form of targets: `binary`, `classes`, `real`, `raw` (as given),
            `none`, or `auto`: classes if there are any, otherwise real. With `auto`,
            classes whose names are whole numbers keep these numbers.
        """
        if target == "auto":
            target = "real" if part.labels is None and self.store is None else "classes"
            numeric = bool(self.classes) and all(map(str.isdecimal, self.classes))
            if part.labels is not None and numeric:
                numbers = np.array([int(name) for name in self.classes])
                part = replace(part, labels=numbers[part.labels])
        labels = target == "classes" or (target == "raw" and part.labels is not None)
        y = self._targets(part, target)
        return Table(part.x, y, self.scale, self.shape, self.integers, labels, self.store)

    def _targets(self, part: Part, target: str) -> Float32:
        labels = part.labels
        values = part.values
        unlabelled = target == "raw" and values is None and labels is None
        if self.store is not None or target == "none" or unlabelled:
            return np.zeros(len(part), np.float32)
        if target == "raw" and values is not None:
            return values.astype(np.float32)
        if target == "real":
            if values is None:
                raise UserError(
                    f"{self.name} has no real-valued target to predict; "
                    "use `model` svm, softmax or kmeans"
                )
            if self.standardization is not None:
                values = self.standardization.targets(values)
            return values.astype(np.float32)
        if labels is None:
            raise UserError(
                f"{self.name} has no classes to predict; use `model` linear or kmeans"
            )
        if target in ("classes", "raw"):
            return labels.astype(np.float32)
        if self.parity:
            return np.where(labels % 2 == 0, 1, -1).astype(np.float32)
        if len(self.classes) != 2:
            raise UserError(
                f"{self.name} has {len(self.classes)} classes; `model` svm needs two, "
                "softmax takes any"
            )
        return np.where(labels == 1, 1, -1).astype(np.float32)


def hold_out(size: int, share: float, seed: int = 0) -> tuple[Int64, Int64]:
    """Return the row numbers to train on and to test on, random but always the same.

    Args:
      size: number of rows.
      share: fraction to test on.
      seed: draws the rows.
    """
    if not 0 <= share < 1:
        raise UserError(f"`test_share` must be at least 0 and below 1, not {share:g}")
    order = np.random.default_rng(seed).permutation(size)
    tested = int(size * share)
    return np.sort(order[tested:]), np.sort(order[:tested])


def _counts(files: tuple[int, ...], rows: Int64 | None) -> tuple[int, ...]:
    """Return how many of the chosen rows each file has."""
    if not files or rows is None:
        return files
    before = np.searchsorted(rows, np.cumsum((0, *files)))
    return tuple(np.diff(before).tolist())


def _subset(
    part: Part, count: int | None, rng: np.random.Generator, what: str
) -> Int64 | None:
    """Return the rows of a random subset, in order; None for all."""
    if count is None:
        return None
    if not 1 <= count <= len(part):
        raise UserError(f"{count} {what} were requested; there are {len(part)}")
    return np.sort(rng.choice(len(part), count, replace=False))


def _deviation(values: Float64) -> Float64:
    """Return the standard deviation of each column, 1 for a constant column.

    Rounding can make the computed deviation of a constant column a tiny number.
    """
    return np.where(values.max(axis=0) > values.min(axis=0), values.std(axis=0), 1.0)


def _scale_warning(x: Samples) -> str | None:
    """Describe unsuitable scales of features [samples, features]; None if they are fine.

    The widest feature is compared with the 25 % quantile of the widths, because some pixels
    of an image hardly ever change.
    """
    if x.dtype.kind != "f" or len(x) < 2:
        return None
    mean = x.mean(axis=0, dtype=np.float64)
    deviation = x.std(axis=0, dtype=np.float64)
    changing = np.flatnonzero(deviation > 1e-12 * (1 + np.abs(mean)))
    if not len(changing):
        return None

    remedy = (
        "models learn little from such features; `standardise` scales all of them to "
        "mean 0 and standard deviation 1"
    )
    order = changing[np.argsort(deviation[changing])]
    narrow = order[len(order) // 4 if len(order) > 3 else 0]
    wide = order[-1]
    if deviation[wide] > _UNEVEN * deviation[narrow]:
        return (
            f"features are on very different scales (standard deviation "
            f"{deviation[wide]:.3g} for feature {wide}, "
            f"{deviation[narrow]:.3g} for feature {narrow}): {remedy}"
        )
    far = changing[(np.abs(mean[changing]) / deviation[changing]).argmax()]
    if abs(mean[far]) > _UNEVEN * deviation[far]:
        return (
            f"feature {far} is far from 0 (mean {mean[far]:.3g}, "
            f"standard deviation {deviation[far]:.3g}): {remedy}"
        )
    return None
