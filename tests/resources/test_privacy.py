"""Privacy as a resource: ρ and ε, compared with Google's accountants."""

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.budget.budget import Budget
from fedbudget.errors import UserError
from fedbudget.resources.privacy import (
    default_delta,
    epsilon_of,
    replacement_epsilon,
    rho_of,
)

EPSILONS = st.floats(0.05, 30)
DELTAS = st.sampled_from([1e-9, 1e-7, 1e-5, 1e-3])


@settings(max_examples=30, deadline=None)
@given(EPSILONS, DELTAS)
def test_conversion_agrees_with_library(epsilon: float, delta: float) -> None:
    rho = rho_of(epsilon, delta)
    assert rho == pytest.approx(
        1 / (2 * dp_accounting.get_sigma_gaussian(epsilon, delta) ** 2), rel=1e-6
    )
    assert epsilon_of(rho, delta) == pytest.approx(epsilon, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 20), DELTAS)
def test_replacement_agrees_with_library(epsilon: float, delta: float) -> None:
    """Replacing a unit moves a sum by twice its sensitivity, as if σ were half as large."""
    sigma = dp_accounting.get_sigma_gaussian(epsilon, delta)
    exact = dp_accounting.get_epsilon_gaussian(sigma / 2, delta)
    assert replacement_epsilon(epsilon, delta) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("rows", "epsilon"), [(2, 2.15), (3, 3.41), (10, 14.4)])
def test_several_rows_of_a_person(rows: int, epsilon: float) -> None:
    """The figures of the guide: k rows move a sum by k times the sensitivity of one."""
    sigma = dp_accounting.get_sigma_gaussian(1.0, 1e-5)
    exact = dp_accounting.get_epsilon_gaussian(sigma / rows, 1e-5)
    assert exact == pytest.approx(epsilon, rel=3e-3)
    assert epsilon_of(rows**2 * rho_of(1.0, 1e-5), 1e-5) == pytest.approx(exact, rel=1e-6)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.floats(0.7, 60), min_size=1, max_size=8), DELTAS)
def test_composition_agrees_with_library(multipliers: list[float], delta: float) -> None:
    """Privacy loss distributions round up slightly; Rényi accounting is an upper bound."""
    tight = PLDAccountant()
    loose = RdpAccountant()
    for sigma in multipliers:
        tight.compose(dp_accounting.GaussianDpEvent(sigma))
        loose.compose(dp_accounting.GaussianDpEvent(sigma))
    ours = epsilon_of(sum(1 / (2 * sigma**2) for sigma in multipliers), delta)
    combined = sum(1 / sigma**2 for sigma in multipliers) ** -0.5
    exact = dp_accounting.get_epsilon_gaussian(combined, delta)
    assert ours == pytest.approx(exact, abs=1e-8)
    assert ours == pytest.approx(tight.get_epsilon(delta), abs=1e-4)
    assert ours <= loose.get_epsilon(delta) + 1e-9


@settings(max_examples=6, deadline=None)
@given(st.floats(0.3, 12), DELTAS, st.integers(1, 30))
def test_spent_budget_satisfies_library(epsilon: float, delta: float, rounds: int) -> None:
    rho = float(Budget({"privacy": epsilon}, delta).array[0])
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(math.sqrt(rounds / (2 * rho))), rounds)
    assert accountant.get_epsilon(delta) <= epsilon


@given(st.integers(1, 100_000))
def test_default_delta(nodes: int) -> None:
    assert 1e-2 / nodes**2 <= default_delta(nodes) * 1000
    assert default_delta(nodes) < 1 / nodes**2 or nodes == 1
    assert default_delta(nodes) <= 1e-5


def test_totals_are_epsilon() -> None:
    budget = Budget({"time": 15.0, "privacy": 4.0}, 1e-5)
    totals = budget.totals(budget.array / 2)
    assert totals["time"] == 7.5
    assert totals["privacy"] == pytest.approx(
        epsilon_of(rho_of(4.0, 1e-5) / 2, 1e-5), rel=1e-4
    )
    assert totals["privacy"] > 2  # half of ρ is more than half of ε


@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 101.0])
def test_epsilon_out_of_range(epsilon: float) -> None:
    with pytest.raises(UserError, match="positive"):
        _ = Budget({"privacy": epsilon}, 1e-5).array


def test_privacy_budget_needs_delta() -> None:
    with pytest.raises(UserError, match="privacy_delta"):
        _ = Budget({"privacy": 4.0}).array
