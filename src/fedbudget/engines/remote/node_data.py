"""The samples of a node: their description, and the fleet that trains on them.

Samples never leave the node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Rows
from fedbudget.data.shards import Shards, Table
from fedbudget.data.tables import describe_unseen
from fedbudget.engines.noise import SecretNodeNoise
from fedbudget.engines.privacy_ledger import fingerprint
from fedbudget.engines.remote.task import (
    FEWEST,
    SamplesDescription,
    Task,
    require_model,
    require_same_schema,
)
from fedbudget.errors import UserError
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.models.description import ModelDescription, describe
from fedbudget.protocol.features.sample_privacy import SamplePrivacy
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import PeerError
from fedbudget.settings.option import Impute

_MOST_FILLED = 2**16
"""Maximum mini-batch beyond the shard's size: bounds the memory that a task can demand."""


@dataclass(frozen=True)
class NodeData:
    """The samples of a device, or of a gateway with several nodes.

    Args:
      dataset: as read; its test samples are not used.
      rows: indices of each node's training samples.
      standardise: whether to standardise features together with all other nodes.
      impute: how to fill missing cells of a table.
      test: samples held back for evaluation, as the training samples of a dataset.
    """

    dataset: Dataset
    rows: Rows
    standardise: bool = False
    impute: Impute | None = None
    test: Dataset | None = None

    def __post_init__(self) -> None:
        if self.test is not None and len(self.test.train) < FEWEST:
            raise UserError(
                f"{len(self.test.train)} samples of {self.test.name} are too few to test "
                f"on: results on fewer than {FEWEST} would reveal too much of each; hold "
                "back more, or none"
            )

    def require_public(self) -> None:
        """Refuse samples whose description would contain statistics of them."""
        self.dataset.require_public(standardise=self.standardise)
        if self.test is not None:
            self.test.require_public(standardise=self.standardise)

    @property
    def fingerprint(self) -> str:
        """Digest of all samples of these nodes, held back or not."""
        dataset = self.dataset
        held = np.concatenate([np.asarray(each) for each in self.rows])
        parts = [(dataset, dataset.train.rows(held))]
        if self.test is not None:
            parts.append((self.test, self.test.train))
        return fingerprint(parts)

    def samples(self) -> SamplesDescription:
        """Description of the samples, for the aggregator."""
        dataset = self.dataset
        if self._public:
            tested = 0 if self.test is None else len(self.test.train)
            return replace(
                public_description(dataset),
                sizes=tuple(map(len, self.rows)),
                test_samples=tested,
            )
        part = dataset.train
        sizes = tuple(len(each) for each in self.rows)
        if (self.standardise or dataset.raw is not None) and sum(sizes) < FEWEST:
            raise UserError(
                f"{dataset.name} has {sum(sizes)} samples; standardisation needs {FEWEST}, "
                "because the mean of fewer would reveal too much of each (a .npz is not "
                "standardised)"
            )
        held = np.arange(0)
        if self.rows:
            held = np.concatenate([np.asarray(each) for each in self.rows])
        features = None
        table = None
        shape = dataset.shape or (dataset.features,)
        if dataset.raw is not None:
            table = TableDescription.of(
                dataset.raw.rows(held),
                self.impute,
                fewest=FEWEST,
                standardise=self.standardise,
            )
            shape = (len(table.columns),)
        elif self.standardise:
            features = Moments.of(part.x[held].astype(np.float64))
        target = None
        if self.standardise and part.values is not None:
            target = Moments.of(part.values[held][:, None])
        return SamplesDescription(
            sizes,
            shape,
            stored=dataset.stored,
            scale=dataset.scale,
            classes=dataset.classes,
            values=part.values is not None,
            parity=dataset.parity,
            features=features,
            target=target,
            integers=dataset.integers,
            table=table,
            test_samples=0 if self.test is None else len(self.test.train),
        )

    @property
    def _public(self) -> bool:
        """Whether a schema describes the samples."""
        layout = self.dataset.layout
        return layout is not None and layout.public

    def fleet(
        self,
        task: Task,
        numbers: Sequence[int],
        *,
        device: str = "auto",
        own_model: Model | str | None = None,
        batch_secret: int | None = None,
    ) -> Fleet:
        """Build the fleet of these nodes.

        Args:
          numbers: of the nodes in the run.
          device: of PyTorch.
          own_model: the node's own model, or the only name that it accepts.
          batch_secret: hides the positions of mini-batches from the aggregator.

        Raises:
          UserError: if the task does not fit the data or the node's own model.
        """
        try:
            require_model(describe_own(own_model), task.model)
        except PeerError as error:
            raise UserError(f"this node cannot take part: {error}") from None
        dataset = self.aligned(task.samples)
        if own_model is None or isinstance(own_model, str):
            model = _named_model(task, dataset, device)
        else:
            model = own_model
        shards = Shards.of(dataset.table(dataset.train, model.target), self.rows)
        largest = int(shards.size.max())
        if task.batch is not None and task.batch > max(_MOST_FILLED, largest):
            raise UserError(
                f"the aggregator requests mini-batches of {task.batch} samples, and this "
                f"node has {largest}"
            )
        per_sample = any(isinstance(each, SamplePrivacy) for each in task.built_features)
        return Fleet(
            model,
            shards,
            batch=task.batch,
            seed=task.seed,
            batch_secret=batch_secret,
            features=task.built_features,
            numbers=numbers,
            noise=SecretNodeNoise() if per_sample else None,
        )

    def unseen(self, agreed: SamplesDescription) -> str:
        """Text about categories of this table that the layout lacks; empty if none."""
        if agreed.layout is None or self.dataset.raw is None:
            return ""
        return describe_unseen(agreed.layout.unseen(self.dataset.raw))

    def test_table(self, agreed: SamplesDescription, model: Model) -> Table | None:
        """The held-back samples, as the model expects them."""
        return None if self.test is None else evaluation_table(self.test, agreed, model)

    def aligned(self, agreed: SamplesDescription) -> Dataset:
        """The training samples with the agreed class numbers and standardisation."""
        dataset = self.dataset
        if self._public:
            try:
                require_same_schema(agreed, public_description(dataset))
            except PeerError as error:
                raise UserError(f"{dataset.name}: {error}") from None
            return dataset
        labelled = dataset.train.labels is not None
        unknown = _unknown_class(dataset, agreed)
        if unknown is not None and labelled:
            raise UserError(
                f"this node has class {unknown!r}, which the aggregator does not know"
            )
        if agreed.layout is not None and dataset.raw is not None:
            dataset = dataset.with_layout(agreed.layout)
        if agreed.classes and agreed.classes != dataset.classes and labelled:
            dataset = dataset.with_classes(agreed.classes)
        elif dataset.classes and not agreed.classes:  # whole numbers here, real elsewhere
            train = replace(dataset.train, labels=None)
            dataset = replace(dataset, classes=(), train=train, test=None)
        standardization = agreed.standardization
        if self.standardise and standardization is not None:
            dataset = replace(
                dataset,
                train=standardization.apply(dataset.train),
                test=None,
                standardization=standardization,
                scale=1.0,
            )
        return dataset


def public_description(dataset: Dataset) -> SamplesDescription:
    """Description of samples by their schema, without anything that follows from them.

    Args:
      dataset: read with a schema.
    """
    scale = dataset.standardization
    features = None
    target = None
    if scale is not None:
        features = Moments(scale.mean, scale.deviation)
        if not dataset.classes:
            target = Moments(
                np.array([scale.target_mean]), np.array([scale.target_deviation])
            )
    return SamplesDescription(
        (),
        (dataset.features,),
        stored=dataset.stored,
        classes=dataset.classes,
        values=not dataset.classes,
        features=features,
        target=target,
        layout=dataset.layout,
    )


def evaluation_table(test: Dataset, agreed: SamplesDescription, model: Model) -> Table:
    """Test samples for a model, with the agreed class numbers and standardisation."""
    samples = test.train if test.test is None else test.test
    unknown = _unknown_class(test, agreed)
    if unknown is not None:
        raise UserError(
            f"{test.name}, to test on, has class {unknown!r}, which no node has"
        )
    features = prod(agreed.shape)
    if test.features != features and (agreed.layout is None or test.raw is None):
        raise UserError(
            f"{test.name}, to test on, has {test.features} features, and nodes' data "
            f"{features}"
        )
    only = replace(test, train=samples, test=None)
    dataset = NodeData(only, [], standardise=True).aligned(agreed)
    return dataset.table(dataset.train, model.target)


def describe_own(model: Model | str | None) -> ModelDescription | str | None:
    """Description of a node's own model; a name stays a name."""
    return model if model is None or isinstance(model, str) else describe(model)


def _unknown_class(dataset: Dataset, agreed: SamplesDescription) -> str | None:
    """The first class of a dataset that is not agreed on, if any."""
    if not agreed.classes:
        return None
    return next((name for name in dataset.classes if name not in agreed.classes), None)


def _named_model(task: Task, dataset: Dataset, device: str) -> Model:
    model = catalogue.build(str(task.model), dataset, task.model_options, device=device)
    if model.parameters != task.parameters:
        raise UserError(
            f"the model {task.model} has {model.parameters} parameters with "
            f"{dataset.name}, and {task.parameters} at the aggregator; install the same "
            "version of fedbudget on both"
        )
    return model
