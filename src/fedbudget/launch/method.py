"""The method of a run: how τ, η and the rest are chosen, from settings and what was given from Python."""

from fedbudget.control import AdaptiveTau, Controller, FixedTau
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.protocol.combine import WeightedMean
from fedbudget.protocol.method import Delta, Method
from fedbudget.protocol.update import Average
from fedbudget.settings import Settings
from fedbudget.step_size import AutoStep, FixedStep, StepSize


def build_method(settings: Settings, overrides: Overrides = NOTHING) -> Method:
    """The method that the settings name, with what was given in place of its parts."""
    frugal = settings.method == "frugal"
    correct_drift = settings.drift_correction
    if correct_drift is None:  # which holds where w becomes the plain average
        correct_drift = frugal and overrides.update is None and overrides.combine is None
    delta: Delta = settings.delta or ("parameters" if frugal else "gradient")
    return Method(
        overrides.controller or _controller(settings, correct_drift, delta),
        overrides.step_size or _step_size(settings),
        overrides.update or Average(),
        overrides.combine or WeightedMean(),
        correct_drift=correct_drift,
        delta=delta,
    )


def _controller(settings: Settings, correct_drift: bool, delta: Delta) -> Controller:
    if settings.tau != "adaptive":
        return FixedTau(settings.tau)
    phi = settings.phi
    if phi is None:
        phi = 0.0025 if correct_drift else 5e-5 if settings.model == "cnn" else 0.025
    return AdaptiveTau(phi, settings.gamma, settings.tau_max, leap=delta == "parameters")


def _step_size(settings: Settings) -> StepSize:
    eta = settings.step_size or ("auto" if settings.method == "frugal" else 0.01)
    return AutoStep() if eta == "auto" else FixedStep(eta)
