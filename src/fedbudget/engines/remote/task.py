"""The task of a run over a network, and the description of samples. No sample is in either.

Every node describes its samples when it joins. Before the first round the aggregator merges
the descriptions. Features must match; classes are those of all nodes; standardised features
use the mean and deviation over all nodes' samples. For tables, the nodes' named columns
become one layout. A node that joins later must fit the agreed description.

With a public schema, a description contains the schema and the numbers of samples, and
nothing else. All nodes of a run then have the same schema, or none has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from sys import float_info
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedbudget.data.agreement import (
    Moments,
    TableDescription,
    agree_on_layout,
    class_sort_key,
)
from fedbudget.data.columns import category_name
from fedbudget.data.dataset import Dataset, Standardization
from fedbudget.data.tables import Layout
from fedbudget.errors import UserError, flag
from fedbudget.models.base import ModelOptions
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.features.compression import Compression
from fedbudget.protocol.features.feature import Feature, FeatureSettings
from fedbudget.protocol.messages import PeerError
from fedbudget.secure.graph import MOST_NODES

FEWEST = 10
"""Minimum number of samples in a published mean: fewer would reveal too much of each."""

MOST_UPDATES = 10**9
MOST_READINGS = 64

LONG_NAME = 200
Name = Annotated[str, Meta(max_length=LONG_NAME)]

_COMPARED = {
    "shape": "features of shape",
    "stored": "features stored as",
    "scale": "features scaled by",
    "values": "targets that are numbers:",
    "integers": "features that are whole numbers:",
    "parity": "classes that are even or odd:",
}


@dataclass(frozen=True)
class SamplesDescription:
    """Description of samples.

    Args:
      sizes: number of samples of each node of a fleet.
      shape: of one sample's features.
      stored: data type of a feature; `samples` for objects that are read one by one.
      scale, classes, parity, integers: as in `Dataset`.
      values: whether the target is a number.
      features, target: moments for standardisation; None if not standardised.
      table: description of a node's table columns. `shape` is then the number of columns,
        and `features` is None.
      layout: the agreed mapping from columns to features, or that of a public schema.
      test_samples: number of samples held back for evaluation.
    """

    sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, lt=2**40)], ...], Meta(max_length=MOST_NODES)
    ]
    shape: tuple[int, ...]
    stored: Annotated[str, Meta(pattern=r"^(uint8|float32|float64|samples)\Z")] = "float32"
    scale: Annotated[float, Meta(ge=1e-30, le=float_info.max)] = 1.0
    classes: Annotated[tuple[Name, ...], Meta(max_length=100_000)] = ()
    values: bool = False
    parity: bool = False
    features: Moments | None = None
    target: Moments | None = None
    integers: bool = False
    table: TableDescription | None = None
    layout: Layout | None = None
    test_samples: Annotated[int, Meta(ge=0, lt=2**40)] = 0

    @property
    def standardization(self) -> Standardization | None:
        if self.features is None:
            return None
        deviation = np.where(self.features.deviation > 0, self.features.deviation, 1.0)
        if self.target is None:
            return Standardization(self.features.mean, deviation)
        spread = float(self.target.deviation[0]) or 1.0
        return Standardization(
            self.features.mean, deviation, float(self.target.mean[0]), spread
        )

    @property
    def public(self) -> bool:
        """Whether a schema describes the samples."""
        return self.layout is not None and self.layout.public

    @property
    def standardised(self) -> bool:
        """Whether the features are to be standardised."""
        if self.table is not None:
            return self.table.standardise
        return self.features is not None

    def empty(self) -> Dataset:
        """A dataset of such samples without any sample, to build a model from."""
        return Dataset.without_samples(
            "nodes' data",
            self.shape,
            self.stored,
            self.classes,
            values=self.values,
            scale=self.scale,
            parity=self.parity,
            standardization=self.standardization,
            integers=self.integers,
            layout=self.layout,
        )


@dataclass(frozen=True)
class Task:
    """Everything that a node must know to take part.

    Args:
      model: its name, or its description if nodes have the model themselves.
      parameters: the length of w.
      batch: samples in a mini-batch; None for whole shards.
      seed: random seed of mini-batches.
      model_options: of the model, by name.
      compress: compression of vectors.
      tau_max: maximum number of local updates in a round.
      samples: the agreed description, without sizes.
      features: features of the run.
      readings: names of resources whose counters nodes read, in addition to time.
      most_counted: under secure aggregation, the largest number of samples of a member
        that counts. It is fixed for the whole run.
    """

    model: Name | ModelDescription
    parameters: Annotated[int, Meta(ge=1, le=2**34)]
    batch: Annotated[int, Meta(ge=1, lt=2**32)] | None
    seed: Annotated[int, Meta(ge=0)]
    model_options: Annotated[ModelOptions, Meta(max_length=100)]
    compress: Compression
    tau_max: Annotated[int, Meta(ge=1, le=MOST_UPDATES)]
    samples: SamplesDescription
    features: tuple[FeatureSettings, ...]
    readings: Annotated[tuple[Name, ...], Meta(max_length=MOST_READINGS)] = ()
    most_counted: Annotated[int, Meta(ge=1, lt=2**40)] | None = None

    @cached_property
    def built_features(self) -> tuple[Feature, ...]:
        """The features; raises `PeerError` for one that this process does not know."""
        built = tuple(settings.build() for settings in self.features)
        names = [feature.name for feature in built]
        if len(set(names)) < len(names):
            raise PeerError(f"two features have the same name: {', '.join(names)}")
        return built

    @property
    def title(self) -> str:
        """The model, for log lines."""
        if isinstance(self.model, str):
            return f"{self.model} ({self.parameters} parameters)"
        return str(self.model)

    def admit(self, theirs: SamplesDescription) -> None:
        """Check that a node's samples fit; raise `PeerError` otherwise."""
        _require_alike([self.samples, theirs], "here", "elsewhere")
        if self.samples.classes:
            require_classes(theirs, self.samples.classes)
        if self.samples.layout is not None and theirs.table is not None:
            try:
                theirs.table.require_fit(self.samples.layout)
            except UserError as error:
                raise PeerError(error.spelled(flag)) from None


def require_classes(theirs: SamplesDescription, classes: Sequence[str]) -> None:
    """Raise `PeerError` if samples have a class that is not in `classes`."""
    new = [name for name in theirs.classes if name not in classes]
    if new:
        raise PeerError(f"its class {new[0]!r} is not one of {', '.join(classes)}")


def require_same_schema(theirs: SamplesDescription, ours: SamplesDescription) -> None:
    """Raise `PeerError` unless both have the same public schema and scale."""
    for name in ("layout", "classes", "features", "target", "stored", "values"):
        if getattr(theirs, name) != getattr(ours, name):
            raise PeerError(
                "another schema or scale: use the same file everywhere, and standardise "
                "at all nodes or at none"
            )


@dataclass(frozen=True)
class DataTerms:
    """What data must fulfil before there is a task.

    Args:
      classes: all allowed classes; None for any.
      private: whether the run is private.
      schema: description by the schema of the run, if it has one.
    """

    classes: Sequence[str] | None = None
    private: bool = False
    schema: SamplesDescription | None = None

    def require(self, theirs: SamplesDescription) -> None:
        """Raise `PeerError` if samples do not fulfil the terms."""
        if self.classes is not None:
            require_classes(theirs, self.classes)
        if self.schema is not None:
            require_same_schema(theirs, self.schema)
        exact = theirs.table is not None or theirs.features is not None
        if self.private and exact and not theirs.public:
            raise PeerError(
                "a private run accepts no means, deviations and categories of data: join "
                "with a public schema, which fedbudget data schema drafts, or use "
                "arrays that are not standardised"
            )


def require_model(
    theirs: str | ModelDescription | None, model: str | ModelDescription
) -> None:
    """Raise `PeerError` if a node has another model than the run.

    Args:
      theirs: description of the node's own model, or the only name that it accepts; None
        for any name.
      model: of the run, as in `Task`.
    """
    if isinstance(model, str) or not isinstance(theirs, ModelDescription):
        if theirs != model and not (theirs is None and isinstance(model, str)):
            raise PeerError(
                f"it trains {theirs or 'a named model'}, and the aggregator {model}; use "
                "the same model on both"
            )
    elif difference := theirs.difference(model, "at the node", "at the aggregator"):
        raise PeerError(f"its model is not the aggregator's: {difference}")


def rounds_ahead(parameters: int) -> int:
    """Rounds that an aggregator may be ahead of its disk; 0 for large models.

    Nodes keep the state of these rounds in memory.
    """
    return 4 if parameters <= 250_000 else 0


def agree(
    samples: Sequence[SamplesDescription],
    names: Sequence[str] = (),
    classes: Sequence[str] | None = None,
) -> SamplesDescription:
    """Merge the descriptions of all nodes' samples.

    Args:
      names: of the nodes, for error messages.
      classes: all classes; None for those of all nodes.

    Raises:
      UserError: if the descriptions do not match.
    """
    first = samples[0]
    rows = [sum(each.sizes) for each in samples]
    try:
        _require_alike(samples, "at one", "at another")
        layout, features = _agree_on_features(
            samples, rows, names or [f"node {number}" for number in range(len(samples))]
        )
    except (PeerError, UserError) as error:
        text = error.args[0] if error.args else str(error)
        raise UserError(f"the nodes' data do not match: {text}") from None
    agreed: tuple[str, ...] = ()
    if classes is not None:
        agreed = tuple(map(category_name, classes))
    elif all(each.classes for each in samples):
        everyone = {name for each in samples for name in each.classes}
        agreed = tuple(sorted(everyone, key=class_sort_key))
    targets = [each.target for each in samples if each.target is not None]
    target = Moments.combine(targets, rows) if targets else None
    return replace(
        first,
        sizes=(),
        shape=first.shape if layout is None else (layout.features,),
        classes=agreed,
        features=features,
        target=first.target if first.public else target,
        table=None,
        layout=layout,
        test_samples=sum(each.test_samples for each in samples),
    )


def _agree_on_features(
    samples: Sequence[SamplesDescription], rows: Sequence[int], names: Sequence[str]
) -> tuple[Layout | None, Moments | None]:
    """Layout of the tables' columns, and the moments of features to be standardised."""
    if samples[0].public:
        return samples[0].layout, samples[0].features
    tables = [each.table for each in samples if each.table is not None]
    if tables:
        layout, moments = agree_on_layout(tables, names)
        return layout, moments if tables[0].standardise else None
    features = [each.features for each in samples if each.features is not None]
    return None, Moments.combine(features, rows) if features else None


def _require_alike(samples: Sequence[SamplesDescription], here: str, there: str) -> None:
    """Raise `PeerError` if descriptions differ from the first in what cannot be merged.

    Args:
      here, there: words for the place of the other and of the first description.
    """
    first = samples[0]
    for other in samples[1:]:
        if first.public != other.public:
            place = here if other.public else there
            raise PeerError(f"a schema {place}, and none for the others")
        if first.public:
            require_same_schema(other, first)
            continue
        if _is_table(first) != _is_table(other):
            raise PeerError(f"{_form(other)} {here}, and {_form(first)} {there}")
        names = ["values"] if _is_table(first) else list(_COMPARED)
        for name in names:
            ours = getattr(first, name)
            theirs = getattr(other, name)
            if ours != theirs:
                raise PeerError(f"{_COMPARED[name]} {theirs} {here}, {ours} {there}")
        if first.standardised != other.standardised:
            place = here if other.standardised else there
            raise PeerError(
                f"features are standardised {place}, and not by the others: standardise "
                "at all nodes or at none (a .csv is standardised, a .npz is not)"
            )


def _is_table(samples: SamplesDescription) -> bool:
    return samples.table is not None or samples.layout is not None


def _form(samples: SamplesDescription) -> str:
    if _is_table(samples):
        return "columns with names (of a .csv or a DataFrame)"
    return "arrays"
