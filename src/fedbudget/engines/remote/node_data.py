"""What a node holds: samples that stay with it, and how they become a fleet once it knows what is trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Rows
from fedbudget.data.shards import Shards, Table
from fedbudget.data.tables import in_words
from fedbudget.engines.noise import SecretNodeNoise
from fedbudget.engines.remote.task import (
    ANY_KIND,
    FEWEST,
    SamplesDescription,
    Task,
    require_model,
)
from fedbudget.errors import UserError
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.models.description import ModelDescription, describe
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import PeerError
from fedbudget.settings.option import Impute

_MOST_FILLED = 2**16
"""Samples in a mini-batch, at most, where it is larger than the shard: what an aggregator may ask memory for."""


@dataclass(frozen=True)
class NodeData:
    """The samples of a device, or of a gateway with several nodes.

    Args:
      dataset: as read; its test samples are not used.
      rows: of the training samples, those of each node.
      standardise: whether features are to be standardised together with those of all other nodes.
      impute: of a table, what missing cells are to get.
      test: samples that are held back to evaluate on, as a dataset of which they are all.
    """

    dataset: Dataset
    rows: Rows
    standardise: bool = False
    impute: Impute | None = None
    test: Dataset | None = None

    def __post_init__(self) -> None:
        if self.test is not None and len(self.test.train) < FEWEST:
            raise UserError(
                f"{len(self.test.train)} samples of {self.test.name} are too few to test on: what is told of fewer "
                f"than {FEWEST} would tell too much of each; hold back more, or none"
            )

    def samples(self) -> SamplesDescription:
        """What is told of them."""
        dataset = self.dataset
        part = self.dataset.train
        sizes = tuple(len(each) for each in self.rows)
        features = target = table = None
        shape = dataset.shape or (dataset.features,)
        if (self.standardise or dataset.raw is not None) and sum(sizes) < FEWEST:
            raise UserError(
                f"{dataset.name} has {sum(sizes)} samples; to be standardised it needs {FEWEST}, because the mean "
                "of fewer would tell too much of each (a .npz is used as it is)"
            )
        held = (
            np.concatenate([np.asarray(each) for each in self.rows])
            if self.rows
            else np.arange(0)
        )
        if dataset.raw is not None:
            own = dataset.raw.rows(held)
            table = TableDescription.of(
                own, self.impute, fewest=FEWEST, standardise=self.standardise
            )
            shape = (len(table.names),)
        elif self.standardise:
            features = Moments.of(part.x[held].astype(np.float64))
        if self.standardise and part.values is not None:
            target = Moments.of(part.values[held][:, None])
        values = part.values is not None
        stored = str(part.x.dtype) if dataset.store is None else ANY_KIND
        likeness = shape, stored, dataset.scale, dataset.classes, values, dataset.parity
        tested = 0 if self.test is None else len(self.test.train)
        return SamplesDescription(
            sizes, *likeness, features, target, dataset.integers, table, test_samples=tested
        )

    def fleet(
        self,
        task: Task,
        numbers: Sequence[int],
        *,
        device: str = "auto",
        own_model: Model | str | None = None,
    ) -> Fleet:
        """The nodes, ready to train; refuses a task that is not the one this data, or the node's own model, is for."""
        try:
            require_model(describe_own(own_model), task.model)
        except PeerError as error:
            raise UserError(f"this node cannot take part: {error}") from None
        dataset = self.as_agreed(task.samples)
        model = (
            own_model
            if own_model and not isinstance(own_model, str)
            else _named_model(task, dataset, device)
        )
        shards = Shards.of(dataset.table(dataset.train, model.target), self.rows)
        if task.batch is not None and task.batch > max(
            _MOST_FILLED, int(shards.size.max())
        ):
            raise UserError(
                f"mini-batches of {task.batch} samples are asked for, and this node has {shards.size.max()}"
            )
        noise = SecretNodeNoise() if task.request.per_sample else None
        return Fleet(
            model, shards, batch=task.batch, seed=task.seed, numbers=numbers, noise=noise
        )

    def unseen(self, agreed: SamplesDescription) -> str:
        """In words, the categories of a table that were agreed on without; nothing where there are none."""
        if agreed.layout is None or self.dataset.raw is None:
            return ""
        return in_words(agreed.layout.unseen(self.dataset.raw))

    def test_table(self, agreed: SamplesDescription, model: Model) -> Table | None:
        """What is held back, as the model wants it."""
        return None if self.test is None else table_to_test_on(self.test, agreed, model)

    def as_agreed(self, agreed: SamplesDescription) -> Dataset:
        """The dataset with everyone's class numbers, and features standardised as everyone's; train samples only."""
        dataset = self.dataset
        how = agreed.standardization
        unknown = [
            name
            for name in dataset.classes
            if agreed.classes and name not in agreed.classes
        ]
        if unknown and dataset.train.labels is not None:
            raise UserError(
                f"this node has class {unknown[0]!r}, which the aggregator does not know"
            )
        if agreed.layout is not None and dataset.raw is not None:
            dataset = dataset.with_layout(agreed.layout)
        if (
            agreed.classes
            and agreed.classes != dataset.classes
            and dataset.train.labels is not None
        ):
            dataset = dataset.with_classes(agreed.classes)
        elif (
            dataset.classes and not agreed.classes
        ):  # whole numbers here, and others elsewhere
            dataset = replace(
                dataset, classes=(), train=replace(dataset.train, labels=None), test=None
            )
        if self.standardise and how is not None:
            dataset = replace(
                dataset,
                train=how.apply(dataset.train),
                test=None,
                standardization=how,
                scale=1.0,
            )
        return dataset


def table_to_test_on(test: Dataset, agreed: SamplesDescription, model: Model) -> Table:
    """Test samples as the model wants them, with everyone's class numbers and standardised as everyone's."""
    samples = test.train if test.test is None else test.test
    unknown = [
        name for name in test.classes if agreed.classes and name not in agreed.classes
    ]
    if unknown:
        raise UserError(
            f"{test.name}, to test on, has class {unknown[0]!r}, which no node has"
        )
    if test.features != prod(agreed.shape) and (agreed.layout is None or test.raw is None):
        raise UserError(
            f"{test.name}, to test on, has {test.features} features, and nodes' data {prod(agreed.shape)}"
        )
    dataset = NodeData(
        replace(test, train=samples, test=None), [], standardise=True
    ).as_agreed(agreed)
    return dataset.table(dataset.train, model.target)


def describe_own(model: Model | str | None) -> ModelDescription | str | None:
    """What is told of a node's own model; a name is told as it is."""
    return model if model is None or isinstance(model, str) else describe(model)


def _named_model(task: Task, dataset: Dataset, device: str) -> Model:
    model = catalogue.build(str(task.model), dataset, task.model_options, device=device)
    if model.parameters != task.parameters:
        raise UserError(
            f"--model {task.model} has {model.parameters} parameters with {dataset.name}, and {task.parameters} at "
            "the aggregator; do both have the same version of fedbudget?"
        )
    return model
