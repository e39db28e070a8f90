"""The meters of a run."""

from fedbudget.data.partition import Partition
from fedbudget.engines import centralized
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.privacy import run_budget
from fedbudget.meters.meters import Meters
from fedbudget.randomness import Stream, generator
from fedbudget.resources import RESOURCES
from fedbudget.resources.resource import Metering
from fedbudget.resources.speeds import Speeds
from fedbudget.resources.time import DGD, SGD, Profile, SimulatedTime
from fedbudget.settings import Settings


def build_meters(settings: Settings, *, network: bool = False) -> Meters:
    """The meters that the settings ask for.

    Args:
      network: whether nodes are on other machines.
    """
    declared = {name: getattr(settings, name) for resource in RESOURCES.values() for name in resource.settings}
    simulated = None
    if settings.costs != "measured":
        simulated = SimulatedTime(_profile(settings), generator(settings.seed, Stream.COSTS))
    return Meters.of(run_budget(settings), Metering(simulated, network, declared), speeds_of(settings))


def speeds_of(settings: Settings) -> Speeds | None:
    """Of nodes that make rounds together, where they differ."""
    if settings.speeds is None or settings.method == "asynchronous":
        return None
    assert settings.nodes is not None
    return drawn_speeds(settings, settings.nodes)


def drawn_speeds(settings: Settings, nodes: int) -> Speeds:
    """The speeds that settings have."""
    assert settings.speeds is not None
    return Speeds.of(settings.speeds, nodes, generator(settings.seed, Stream.SPEEDS))


def _profile(settings: Settings) -> Profile:
    """The simulated time of a local update and of an aggregation."""
    batch = batch_of(settings)
    if settings.method == "centralized":
        return centralized.profile(batch)
    case = Partition.parse(settings.partition or "case:1").case
    return (SGD if batch else DGD[case or 1]).times(settings.aggregation_factor)
