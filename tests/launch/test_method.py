"""The method that settings name, and what a person gives in place of its parts."""

import pytest

from fedbudget.control import AdaptiveTau, FixedTau
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import Overrides
from fedbudget.protocol.method import Method
from fedbudget.protocol.update import ServerMomentum
from fedbudget.settings import Settings
from fedbudget.step_size import AutoStep, FixedStep


@pytest.mark.parametrize(
    ("settings", "step_size"),
    [
        (Settings(), AutoStep()),
        (Settings(method="paper"), FixedStep(0.01)),
        (Settings(method="asynchronous"), FixedStep(0.01)),
        (Settings(method="paper", step_size="auto"), AutoStep()),
        (Settings(step_size=0.3), FixedStep(0.3)),
    ],
)
def test_step_size_as_asked_or_as_the_method_has_it(settings: Settings, step_size: object) -> None:
    assert build_method(settings).step_size == step_size


def parts(method: Method) -> tuple[object, ...]:
    return method.correct_drift, method.delta, method.controller


def test_each_part_of_a_method_alone() -> None:
    assert parts(build_method(Settings(method="paper"))) == (False, "gradient", AdaptiveTau(0.025))
    assert parts(build_method(Settings())) == (True, "parameters", AdaptiveTau(0.0025, leap=True))
    mixed = Settings(method="paper", drift_correction=True)
    assert parts(build_method(mixed)) == (True, "gradient", AdaptiveTau(0.0025))
    mixed = Settings(method="frugal", drift_correction=False, delta="gradient")
    assert parts(build_method(mixed)) == (False, "gradient", AdaptiveTau(0.025))


def test_controller_as_asked() -> None:
    asked = Settings(method="paper", phi=0.1, gamma=3.0, tau_max=9)
    assert build_method(asked).controller == AdaptiveTau(0.1, 3.0, 9)
    assert build_method(Settings(tau=12)).controller == FixedTau(12)


def test_own_parts_take_the_place_of_the_methods() -> None:
    own = Overrides(controller=FixedTau(3), step_size=FixedStep(0.7))
    assert parts(build_method(Settings(), own)) == (True, "parameters", FixedTau(3))
    assert build_method(Settings(), own).step_size == FixedStep(0.7)


def test_own_update_rule_turns_drift_correction_off() -> None:
    """It holds for plain averages only; whoever asks for both is told so."""
    own = Overrides(update=ServerMomentum(0.5))
    assert not build_method(Settings(), own).correct_drift
    with pytest.raises(ValueError, match="drift is corrected only where w becomes the weighted mean"):
        build_method(Settings(drift_correction=True), own)
