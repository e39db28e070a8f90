"""The method that settings name, and what a person gives in place of its parts."""

from typing import Any

import pytest

import fedbudget
from fedbudget.budget.control import AdaptiveTau, BalancedTau, FixedTau
from fedbudget.budget.step_size import AutoStep, FallingStep, FixedStep, SearchedStep
from fedbudget.errors import UserError
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import Overrides
from fedbudget.protocol.method import Method
from fedbudget.protocol.update import (
    Accelerate,
    Average,
    FedAdam,
    FedYogi,
    ServerMomentum,
    KMeansSplit,
)
from fedbudget.settings.settings import Settings


@pytest.mark.parametrize(
    ("settings", "step_size"),
    [
        (Settings(), SearchedStep()),
        (Settings(method="frugal"), AutoStep()),
        (Settings(method="paper"), FixedStep(0.01)),
        (Settings(method="asynchronous"), FixedStep(0.01)),
        (Settings(method="paper", step_size="auto"), AutoStep()),
        (Settings(step_size=0.3), FixedStep(0.3)),
        (Settings(step_size=0.3, step_fall=0.0), FixedStep(0.3)),
        (Settings(step_size=0.3, step_fall=0.2), FallingStep(0.3, fall=0.2)),
        (Settings(method="paper", step_fall=0.2), FallingStep(0.01, fall=0.2)),
    ],
)
def test_step_size_as_asked_or_as_the_method_has_it(
    settings: Settings, step_size: object
) -> None:
    assert build_method(settings).step_size == step_size


def parts(method: Method) -> tuple[object, ...]:
    return method.correct_drift, method.delta, method.controller


def test_each_part_of_a_method_alone() -> None:
    assert parts(build_method(Settings(method="paper"))) == (
        False,
        "gradient",
        AdaptiveTau(0.025),
    )
    assert parts(build_method(Settings())) == (True, "parameters", BalancedTau())
    assert parts(build_method(Settings(method="frugal"))) == (
        True,
        "parameters",
        AdaptiveTau(0.0025, leap=True),
    )
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
    """It takes a vector more in every broadcast; whoever asks for both gets both."""
    own = Overrides(update=ServerMomentum(0.5))
    assert not build_method(Settings(), own).correct_drift
    assert build_method(Settings(drift_correction=True), own).correct_drift


def test_the_accelerated_method() -> None:
    method = build_method(Settings(method="accelerated", tau_max=50))
    assert (method.controller, method.step_size) == (BalancedTau(50), SearchedStep())
    assert (method.update, method.correct_drift, method.partly) == (
        Accelerate(),
        True,
        True,
    )
    assert method.request.one_step
    fixed = build_method(
        Settings(method="accelerated", tau=7, step_size=0.1, update="average")
    )
    assert (fixed.controller, fixed.step_size, fixed.update) == (
        FixedTau(7),
        FixedStep(0.1),
        Average(),
    )
    assert not fixed.request.one_step


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (Settings(), Accelerate()),
        (Settings(model="kmeans", clusters=7), KMeansSplit(7)),
        (Settings(model="kmeans", update="average"), Average()),
        (Settings(model="kmeans", method="frugal"), Average()),
        (Settings(method="frugal"), Average()),
        (Settings(update="average"), Average()),
        (Settings(update="fedavgm"), ServerMomentum(0.9, step_size=1.0)),
        (
            Settings(update="fedavgm", server_momentum=0.5, server_step_size=0.3),
            ServerMomentum(0.5, step_size=0.3),
        ),
        (
            Settings(update="fedadam"),
            FedAdam(step_size=0.1, momentum=0.9, beta2=0.99, epsilon=1e-3),
        ),
        (
            Settings(update="fedyogi", server_beta2=0.9, server_epsilon=0.1),
            FedYogi(beta2=0.9, epsilon=0.1),
        ),
    ],
)
def test_update_rule_as_named(settings: Settings, rule: object) -> None:
    method = build_method(settings)
    assert method.update == rule
    assert method.correct_drift == isinstance(rule, (Average, Accelerate, KMeansSplit))


def test_options_that_a_rule_does_not_have_are_refused() -> None:
    for wrong in (
        Settings(method="frugal", server_momentum=0.5),
        Settings(update="average", server_momentum=0.5),
    ):
        with pytest.raises(
            UserError, match="server_momentum has no effect with update average"
        ):
            build_method(wrong)
    with pytest.raises(UserError, match="server_beta2 has no effect with update fedavgm"):
        build_method(Settings(update="fedavgm", server_beta2=0.5))


def test_an_automatic_step_size_falls_by_itself() -> None:
    with pytest.raises(UserError, match="step_fall needs a step_size that is a number"):
        build_method(Settings(step_fall=0.2))


def test_a_rule_by_its_name_is_the_same_run_as_the_object() -> None:
    common: dict[str, Any] = {"case": 2, "budget": "time=1s", "tau": 5, "step_size": 0.1}
    named = fedbudget.train(update="fedadam", server_step_size=0.05, **common)
    made = fedbudget.train(update=FedAdam(step_size=0.05), **common)
    assert named.w.tobytes() == made.w.tobytes()
    assert named.loss != fedbudget.train(**common).loss
