"""What is trained where nodes bring their own data: settings and the nodes' descriptions become a task for all.

Every engine whose nodes are elsewhere comes through here.
"""

from dataclasses import replace
from math import prod

from fedbudget.data.dataset import Dataset
from fedbudget.data.shards import Table
from fedbudget.engines.grpc.codec import KINDS
from fedbudget.engines.remote.compression import Kind
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.task import Request, Samples, Task, agree
from fedbudget.errors import UserError
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.plan import DEFAULT_BATCH
from fedbudget.protocol.messages import PeerError
from fedbudget.settings import Settings

NODES = "nodes"
"""The dataset of a run whose data nobody has seen as a whole."""


def agreed(settings: Settings, described: list[Samples]) -> tuple[Settings, Task, Model]:
    """What is trained, from what the nodes have."""
    samples = agree(described)
    smallest = min(size for each in described for size in each.sizes)
    if settings.batch_size is None:
        settings = replace(settings, batch_size=min(DEFAULT_BATCH, smallest))
    model = model_of(settings, samples)
    controller, pacing = settings.controller(), settings.pacing()
    task = Task(
        settings.model,
        model.parameters,
        settings.batch_size if isinstance(settings.batch_size, int) else None,
        settings.seed,
        settings.clusters,
        kind_of(settings),
        settings.tau if isinstance(settings.tau, int) else settings.tau_max,
        samples,
        Request(
            estimate=controller.estimates or pacing.adapts,
            gradient=settings.delta_from == "gradient",
            curvature=pacing.adapts,
            drift=settings.corrects_drift,
            readings=tuple(settings.limits().limits),
        ),
    )
    for each in described:
        try:
            task.admit(each)
        except PeerError as error:
            raise UserError(f"a node's data do not fit: {error}") from None
    return settings, task, model


def model_of(settings: Settings, samples: Samples) -> Model:
    dataset = samples.empty()
    model = catalogue.build(settings.model, dataset, clusters=settings.clusters, device=settings.device)
    dataset.table(dataset.train, model.target)  # refuses a target that the data have not
    return model


def kind_of(settings: Settings) -> Kind:
    return next(kind for kind in KINDS if kind == (settings.compress or "none"))


def table_to_test_on(test: Dataset, agreed: Samples, model: Model) -> Table:
    """Test samples as the model wants them, with everyone's class numbers and standardised as everyone's."""
    samples = test.train if test.test is None else test.test
    unknown = [name for name in test.classes if agreed.classes and name not in agreed.classes]
    if unknown:
        raise UserError(f"{test.name}, to test on, has class {unknown[0]!r}, which no node has")
    if test.features != prod(agreed.shape):
        raise UserError(f"{test.name}, to test on, has {test.features} features, and nodes' data {prod(agreed.shape)}")
    held = NodeData(replace(test, train=samples, test=None), [], standardise=True)
    dataset = held.as_agreed(agreed)
    return dataset.table(dataset.train, model.target)
