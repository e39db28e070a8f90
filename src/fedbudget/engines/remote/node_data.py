"""What a node holds: samples that stay with it, and how they become a fleet once it knows what is trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Rows
from fedbudget.data.shards import Shards
from fedbudget.engines.remote.task import ANY_KIND, FEWEST, Moments, SamplesDescription, Task, require_model
from fedbudget.errors import UserError
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.models.description import ModelDescription, describe
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import PeerError


@dataclass(frozen=True)
class NodeData:
    """The samples of a device, or of a gateway with several nodes.

    Args:
      dataset: as read; its test samples are not used.
      rows: of the training samples, those of each node.
      standardise: whether features are to be standardised together with those of all other nodes.
    """

    dataset: Dataset
    rows: Rows
    standardise: bool = False

    def samples(self) -> SamplesDescription:
        """What is told of them."""
        dataset, part = self.dataset, self.dataset.train
        sizes = tuple(len(each) for each in self.rows)
        features = target = None
        if self.standardise:
            if sum(sizes) < FEWEST:
                raise UserError(
                    f"{dataset.name} has {sum(sizes)} samples; to be standardised it needs {FEWEST}, because the mean "
                    "of fewer would tell too much of each (a .npz is used as it is)"
                )
            held = np.concatenate([np.asarray(each) for each in self.rows])
            features = Moments.of(part.x[held].astype(np.float64))
            target = None if part.values is None else Moments.of(part.values[held][:, None])
        shape, values = dataset.shape or (dataset.features,), part.values is not None
        stored = str(part.x.dtype) if dataset.store is None else ANY_KIND
        likeness = shape, stored, dataset.scale, dataset.classes, values, dataset.parity
        return SamplesDescription(sizes, *likeness, features, target, dataset.integers)

    def fleet(
        self, task: Task, numbers: Sequence[int], *, device: str = "auto", own_model: Model | str | None = None
    ) -> Fleet:
        """The nodes, ready to train; refuses a task that is not the one this data, or the node's own model, is for."""
        try:
            require_model(describe_own(own_model), task.model)
        except PeerError as error:
            raise UserError(f"this node cannot take part: {error}") from None
        dataset = self.as_agreed(task.samples)
        model = own_model if own_model and not isinstance(own_model, str) else _named_model(task, dataset, device)
        shards = Shards.of(dataset.table(dataset.train, model.target), self.rows)
        return Fleet(model, shards, batch=task.batch, seed=task.seed, numbers=numbers)

    def as_agreed(self, agreed: SamplesDescription) -> Dataset:
        """The dataset with everyone's class numbers, and features standardised as everyone's; train samples only."""
        dataset, how = self.dataset, agreed.standardization
        if agreed.classes and agreed.classes != dataset.classes and dataset.train.labels is not None:
            dataset = dataset.with_classes(agreed.classes)
        elif dataset.classes and not agreed.classes:  # whole numbers here, and others elsewhere
            dataset = replace(dataset, classes=(), train=replace(dataset.train, labels=None), test=None)
        if self.standardise and how is not None:
            dataset = replace(dataset, train=how.apply(dataset.train), test=None, standardization=how)
        return dataset


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
