"""The method of a run: how τ, η and the rest are chosen, from settings and what was given from Python."""

from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.protocol.combine import WeightedMean
from fedbudget.protocol.method import Method
from fedbudget.protocol.update import Average
from fedbudget.settings import Settings


def build_method(settings: Settings, overrides: Overrides = NOTHING) -> Method:
    """The method that the settings name, with what was given in place of its parts."""
    return Method(
        overrides.controller or settings.controller(),
        overrides.step_size or settings.pacing(),
        overrides.update or Average(),
        overrides.combine or WeightedMean(),
        correct_drift=settings.corrects_drift,
        delta=settings.delta_from,
    )
