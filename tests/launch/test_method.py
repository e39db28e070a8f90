"""The method of settings, and custom parts in place of its own."""

from typing import Any

import pytest

import fedbudget
from fedbudget.budget.control import AdaptiveTau, BalancedTau, FixedTau
from fedbudget.budget.step_size import AutoStep, FallingStep, FixedStep, SearchedStep
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import Overrides
from fedbudget.protocol.features.estimates import EstimateSlopes
from fedbudget.protocol.method import Method
from fedbudget.protocol.update import (
    Accelerate,
    Average,
    FedAdam,
    FedYogi,
    KMeansSplit,
    ServerMomentum,
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
def test_step_size_of_settings(settings: Settings, step_size: object) -> None:
    assert build_method(settings).step_size == step_size


def parts(method: Method) -> tuple[object, ...]:
    return method.correct_drift, method.delta, method.controller


def test_parts_of_each_method() -> None:
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


def test_controller_of_settings() -> None:
    settings = Settings(method="paper", phi=0.1, gamma=3.0, tau_max=9)
    assert build_method(settings).controller == AdaptiveTau(0.1, 3.0, 9)
    assert build_method(Settings(tau=12)).controller == FixedTau(12)


def test_custom_parts_replace_defaults() -> None:
    custom = Overrides(controller=FixedTau(3), step_size=FixedStep(0.7))
    assert parts(build_method(Settings(), custom)) == (True, "parameters", FixedTau(3))
    assert build_method(Settings(), custom).step_size == FixedStep(0.7)


def test_custom_update_disables_drift_correction() -> None:
    """Drift correction adds a vector to every broadcast; you can still request both."""
    custom = Overrides(update=ServerMomentum(0.5))
    assert not build_method(Settings(), custom).correct_drift
    assert build_method(Settings(drift_correction=True), custom).correct_drift


def takes_one_step(method: Method) -> bool:
    return any(
        isinstance(feature, EstimateSlopes) and feature.one_step
        for feature in method.features
    )


def test_accelerated_method() -> None:
    method = build_method(Settings(method="accelerated", tau_max=50))
    assert (method.controller, method.step_size) == (BalancedTau(50), SearchedStep())
    assert (method.update, method.correct_drift, method.partly) == (
        Accelerate(),
        True,
        True,
    )
    assert takes_one_step(method)
    fixed = build_method(
        Settings(method="accelerated", tau=7, step_size=0.1, update="average")
    )
    assert (fixed.controller, fixed.step_size, fixed.update) == (
        FixedTau(7),
        FixedStep(0.1),
        Average(),
    )
    assert not takes_one_step(fixed)


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
def test_update_rule_by_name(settings: Settings, rule: object) -> None:
    method = build_method(settings)
    assert method.update == rule
    assert method.correct_drift == isinstance(rule, (Average, Accelerate, KMeansSplit))


def test_rule_name_equals_rule_object() -> None:
    common: dict[str, Any] = {"case": 2, "budget": "time=1s", "tau": 5, "step_size": 0.1}
    by_name = fedbudget.train(update="fedadam", server_step_size=0.05, **common)
    by_object = fedbudget.train(update=FedAdam(step_size=0.05), **common)
    assert by_name.w.tobytes() == by_object.w.tobytes()
    assert by_name.loss != fedbudget.train(**common).loss
