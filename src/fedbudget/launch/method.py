"""The method of a run: how τ, η and the rest are chosen, from settings and what was given from Python."""

from dataclasses import dataclass

from fedbudget.control import Controller
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.protocol.aggregator import Delta
from fedbudget.settings import Settings
from fedbudget.step_size import StepSize


@dataclass(frozen=True)
class Method:
    controller: Controller
    step_size: StepSize
    correct_drift: bool
    delta: Delta


def build_method(settings: Settings, overrides: Overrides = NOTHING) -> Method:
    return Method(
        overrides.controller or settings.controller(),
        overrides.step_size or settings.pacing(),
        settings.corrects_drift,
        settings.delta_from,
    )
