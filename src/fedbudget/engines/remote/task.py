"""What is trained on, as nodes tell it and as all agree on it. No sample is in it.

Every node describes its samples when it joins. Before the first round the aggregator puts the descriptions together:
the features must be alike, classes are those of all nodes, and where features are to be standardised it is with the
mean and the deviation over all nodes' samples. Tables have columns with names, and a layout for all is agreed on. A
node that joins later must fit what was agreed on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from sys import float_info
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedbudget.data.agreement import Moments, TableDescription, agree_on_layout, in_order
from fedbudget.data.columns import category_name
from fedbudget.data.dataset import Dataset, Part, Standardization
from fedbudget.data.shards import SampleStore
from fedbudget.data.tables import Layout
from fedbudget.errors import UserError, flag
from fedbudget.models.base import ModelOptions
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.compression import Compression
from fedbudget.protocol.messages import PeerError, Request

FEWEST = 10
"""The fewest samples whose mean may be told: those of fewer would tell too much of each."""

MOST_NODES = 5_000
"""Of one fleet: their numbers fit in a report's first message, beside a part of its vectors."""
MOST_UPDATES = 10**9
ANY_KIND = "samples"
"""How samples are stored that are no rows of an array: only whoever reads them knows what they are."""

LONG_NAME = 200
Name = Annotated[str, Meta(max_length=LONG_NAME)]

MOST_READINGS = 64


@dataclass(frozen=True)
class SamplesDescription:
    """What samples are like.

    Args:
      sizes: how many each node of a fleet has.
      shape: of one sample's features.
      stored: the type of a feature, as stored; `samples` where they are of any kind, and read one by one.
      scale, classes, parity: as of a `Dataset`.
      values: whether there is a target that is a number.
      integers: as of a `Dataset`.
      features, target: where features are to be standardised, and the target with them.
      table: what a node tells of a table's columns; then `shape` is how many there are, and `features` is not told.
      layout: how features are made of columns, as all have agreed.
      test_samples: how many are held back to evaluate on.
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

    def empty(self) -> Dataset:
        """A dataset of such samples that has none: what a model is built from."""
        any_kind = self.stored == ANY_KIND
        x = np.empty((0, prod(self.shape)), np.int64 if any_kind else np.dtype(self.stored))
        part = Part(
            x,
            np.empty(0, np.int64) if self.classes else None,
            np.empty(0) if self.values else None,
        )
        return Dataset(
            "nodes' data",
            part,
            classes=self.classes,
            scale=self.scale,
            parity=self.parity,
            shape=self.shape if len(self.shape) > 1 else (),
            standardization=self.standardization,
            integers=self.integers,
            store=SampleStore([]) if any_kind else None,
            layout=self.layout,
        )


@dataclass(frozen=True)
class Task:
    """What a node must know to take part.

    Args:
      model: its name, or what it is like where nodes have it themselves.
      parameters: the length of w.
      batch: samples in a mini-batch; None for whole shards.
      seed: of mini-batches.
      model_options: of the model, by name.
      compress: how vectors are sent.
      tau_max: the most local updates in a round.
      samples: as agreed on; without sizes.
      request: what nodes are asked for in every round.
      readings: names of resources that they read the counters of, besides time.
    """

    model: Name | ModelDescription
    parameters: Annotated[int, Meta(ge=1, le=2**34)]
    batch: Annotated[int, Meta(ge=1, lt=2**32)] | None
    seed: Annotated[int, Meta(ge=0)]
    model_options: Annotated[ModelOptions, Meta(max_length=100)]
    compress: Compression
    tau_max: Annotated[int, Meta(ge=1, le=MOST_UPDATES)]
    samples: SamplesDescription
    request: Request
    readings: Annotated[tuple[Name, ...], Meta(max_length=MOST_READINGS)] = ()

    @property
    def title(self) -> str:
        """What is trained, for people."""
        return (
            f"{self.model} ({self.parameters} parameters)"
            if isinstance(self.model, str)
            else str(self.model)
        )

    def admit(self, theirs: SamplesDescription) -> None:
        """Refuses samples that do not fit."""
        _alike([self.samples, theirs])
        if self.samples.classes:
            require_classes(theirs, self.samples.classes)
        if self.samples.layout is not None and theirs.table is not None:
            try:
                theirs.table.require_fit(self.samples.layout)
            except UserError as error:
                raise PeerError(error.spelled(flag)) from None


def require_classes(theirs: SamplesDescription, classes: Sequence[str]) -> None:
    """Refuses samples of other classes than these."""
    new = [name for name in theirs.classes if name not in classes]
    if new:
        raise PeerError(f"its class {new[0]!r} is not one of {', '.join(classes)}")


def require_model(
    theirs: str | ModelDescription | None, model: str | ModelDescription
) -> None:
    """Refuses a node that has another model than the one that is trained.

    Args:
      theirs: what the node has: what its own is like, or the only name that it takes; None for any name.
      model: what is trained, as of a `Task`.
    """
    if isinstance(model, str) or not isinstance(theirs, ModelDescription):
        if theirs != model and not (theirs is None and isinstance(model, str)):
            raise PeerError(
                f"it trains {theirs or 'what has a name'}, and the aggregator {model}; give both the same"
            )
    elif difference := theirs.difference(model, "at the node", "at the aggregator"):
        raise PeerError(f"its model is not the aggregator's: {difference}")


def rounds_ahead(parameters: int) -> int:
    """How many rounds an aggregator may be ahead of its disk; nodes remember as many, so fewer where that is much."""
    return 4 if parameters <= 250_000 else 0


def agree(
    samples: Sequence[SamplesDescription],
    names: Sequence[str] = (),
    classes: Sequence[str] | None = None,
) -> SamplesDescription:
    """What all nodes' samples are like together; raises `UserError` where they do not go together.

    Args:
      names: of the nodes, for errors.
      classes: all that there are; those of all nodes when not given.
    """
    try:
        first = _alike(samples, here="at one", there="at another")
        tables = [each.table for each in samples if each.table is not None]
        layout, features = _agree_on_features(
            samples, tables, names or [f"node {n}" for n in range(len(samples))]
        )
    except (PeerError, UserError) as error:
        text = error.args[0] if error.args else str(error)
        raise UserError(f"the nodes' data do not go together: {text}") from None
    agreed: tuple[str, ...] = ()
    if all(each.classes for each in samples):
        agreed = tuple(
            sorted({name for each in samples for name in each.classes}, key=in_order)
        )
    if classes is not None:
        agreed = tuple(map(category_name, classes))
    target = [each.target for each in samples if each.target is not None]
    return replace(
        first,
        sizes=(),
        shape=first.shape if layout is None else (layout.features,),
        classes=agreed,
        features=features,
        target=Moments.together(target, [sum(each.sizes) for each in samples])
        if target
        else None,
        table=None,
        layout=layout,
        test_samples=sum(each.test_samples for each in samples),
    )


def _agree_on_features(
    samples: Sequence[SamplesDescription],
    tables: Sequence[TableDescription],
    names: Sequence[str],
) -> tuple[Layout | None, Moments | None]:
    """How features are made of tables' columns, and mean and deviation of each where they are to be standardised."""
    if tables:
        layout, moments = agree_on_layout(tables, names)
        return layout, moments if tables[0].standardise else None
    features = [each.features for each in samples if each.features is not None]
    return None, Moments.together(
        features, [sum(each.sizes) for each in samples]
    ) if features else None


def _alike(
    samples: Sequence[SamplesDescription], here: str = "here", there: str = "elsewhere"
) -> SamplesDescription:
    """The first, when all others are like it in what cannot be put together."""
    first = samples[0]
    for other in samples[1:]:
        tables = [
            each.table is not None or each.layout is not None for each in (first, other)
        ]
        if tables[0] != tables[1]:
            raise PeerError(
                f"{_kind_of(tables[1])} {here}, and {_kind_of(tables[0])} {there}"
            )
        if all(tables):
            if _standardised(first) != _standardised(other):
                where = here if _standardised(other) else there
                raise PeerError(f"columns are standardised {where}, and not by the others")
            if first.values != other.values:
                raise PeerError(
                    f"targets that are numbers: {other.values} {here}, {first.values} {there}"
                )
            continue
        for name, words in (
            ("shape", "features of shape"),
            ("stored", "features stored as"),
            ("scale", "features scaled by"),
            ("values", "targets that are numbers:"),
            ("integers", "features that are whole numbers:"),
            ("parity", "classes told apart as even and odd:"),
        ):
            ours = getattr(first, name)
            theirs = getattr(other, name)
            if ours != theirs:
                raise PeerError(f"{words} {theirs} {here}, {ours} {there}")
        if (first.features is None) != (other.features is None):
            raise PeerError(
                f"features to be standardised (of a .csv) {here}, and as they are {there}"
            )
    return first


def _standardised(samples: SamplesDescription) -> bool:
    return (
        samples.features is not None if samples.table is None else samples.table.standardise
    )


def _kind_of(table: bool) -> str:
    return "columns with names (of a .csv or a DataFrame)" if table else "arrays"
