"""From settings to a run whose simulated nodes are on a Ray cluster; all the rest is here."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedbudget import __version__
from fedbudget.arrays import Samples
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Shards
from fedbudget.engines import in_process, simulation
from fedbudget.engines.node_group import NodeGroup
from fedbudget.errors import UserError
from fedbudget.models.base import Model
from fedbudget.plan import (
    Plan,
    TrainingInputs,
    absence,
    aggregator_of,
    distribute,
    fleet_of,
    meters_of,
    with_batch_size,
    with_nodes,
)
from fedbudget.resources.counters import ResourceCounters
from fedbudget.resources.resource import Resource
from fedbudget.settings import FEDERATED, Settings


@contextmanager
def on_ray(
    settings: Settings,
    *,
    address: str | None = None,
    actors: int | None = None,
    dataset: Dataset | None = None,
    model: Model | None = None,
) -> Iterator[Plan]:
    """Places the nodes on a Ray cluster, and gives the plan of a run with them.

    Args:
      address: of the cluster; on this machine when not given.
      actors: how many processes share the nodes; one per core when not given.
      dataset, model: as of `prepare`.
    """
    if settings.method not in FEDERATED:
        raise UserError(f"{settings.method} descent is not made on Ray; use --method {' or '.join(FEDERATED)}")
    if actors is not None and actors < 1:
        raise UserError(f"actors must be at least 1, not {actors}")
    try:
        from fedbudget.engines.ray import NodesOnRay, cluster
    except ImportError:
        raise UserError("Ray is not installed; install it with: pip install 'fedbudget[ray]'") from None
    subject = TrainingInputs.of(settings, dataset, model)
    settings = with_nodes(subject.settings, subject.dataset)
    settings = with_batch_size(settings, _smallest(settings, subject.dataset))
    assert settings.nodes is not None
    meters, present = meters_of(settings), None
    if settings.participation < 1:
        present = in_process.attendance(settings.nodes, settings.participation, absence(settings))
    with (
        cluster(address) as cpus,
        closing(
            NodesOnRay(
                Definition(settings, subject.dataset, subject.model, meters.resources),
                nodes=settings.nodes,
                actors=min(settings.nodes, actors or max(1, int(cpus))),
                cpus=cpus,
                present=present,
            )
        ) as nodes,
    ):
        aggregator = aggregator_of(settings, meters, subject.model.initial(settings.seed), nodes.trial)
        yield Plan(
            settings=settings,
            budget=meters.budget,
            dataset=subject.dataset,
            model=subject.model,
            train=subject.train,
            test=subject.test,
            meters=meters,
            aggregator=aggregator,
            engine=partial(simulation.run, aggregator, nodes, meters),
            repeatable=subject.repeatable,
        )


def _smallest(settings: Settings, dataset: Dataset) -> int:
    """How many samples the node with the fewest has."""
    drawn = Partition.parse(str(settings.partition)).draws
    return drawn or min(len(rows) for rows in distribute(settings, dataset)[1])


@dataclass(frozen=True)
class Definition:
    """All that parties are made from; the samples are in memory that the processes of a machine share."""

    settings: Settings
    dataset: Dataset
    model: Model
    resources: tuple[Resource, ...]
    version: str = __version__

    def party(self, first: int, end: int) -> NodeGroup:
        if self.version != __version__:
            raise UserError(f"fedbudget {__version__} is on a machine of the cluster, and {self.version} here")
        settings, rows = distribute(self.settings, self.dataset)
        train = self.dataset.table(self.dataset.train, self.model.target)
        shards = Shards.of(replace(train, x=_as_writable(train.x)), rows[first:end])
        counters = ResourceCounters.of(self.resources)
        if settings.participation == 1:
            return NodeGroup([fleet_of(settings, self.model, shards, range(first, end))], counters)
        alone = [fleet_of(settings, self.model, shards.only([node - first]), [node]) for node in range(first, end)]
        return NodeGroup(alone, counters)


def _as_writable(array: Samples) -> Samples:
    """The same memory as an array that says it can be written to; nobody does.

    Memory that is shared is marked as only to be read, and for such arrays all kernels would be compiled anew.
    """
    return array if array.flags.writeable else np.asarray(_Writable(array))


class _Writable:
    def __init__(self, array: Samples) -> None:
        self._array = array  # whose memory it is
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
