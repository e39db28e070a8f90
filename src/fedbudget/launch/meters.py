"""The meters of a run."""

from collections.abc import Callable

from fedbudget.budget import Budget
from fedbudget.data.partition import Partition
from fedbudget.engines import centralized
from fedbudget.launch.inputs import batch_of
from fedbudget.meters import measured_meters, simulated, simulated_meters
from fedbudget.meters.declared import Energy, Money
from fedbudget.meters.meter import Meters
from fedbudget.randomness import Stream, generator
from fedbudget.settings import Settings


def build_meters(settings: Settings, measured: Callable[[Budget, Energy, Money], Meters] = measured_meters) -> Meters:
    """The meters that the settings ask for.

    Args:
      measured: makes those that measure.
    """
    energy = Energy(settings.watts, settings.joules_per_byte)
    money = Money(settings.price_per_hour, settings.price_per_gigabyte)
    if settings.costs == "measured":
        return measured(settings.limits(), energy, money)
    rng = generator(settings.seed, Stream.COSTS)
    return simulated_meters(settings.limits(), energy, money, _profile(settings), rng)


def _profile(settings: Settings) -> simulated.Profile:
    """The simulated time of a local update and of an aggregation."""
    batch = batch_of(settings)
    if settings.method == "centralized":
        return centralized.profile(batch)
    case = Partition.parse(settings.partition or "case:1").case
    return (simulated.SGD if batch else simulated.DGD[case or 1]).times(settings.aggregation_factor)
