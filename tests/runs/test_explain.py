"""Reasons for τ: an independent G from eq. (18) agrees with every choice of real runs."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget import data
from fedbudget.budget.control import Reason
from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.method import build_method
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.result import Result
from fedbudget.runs import explain as explain_module
from fedbudget.runs.explain import Explanation
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings

DIGITS = data.load("digits")
PHI, ETA, GAMMA, TAU_MAX = 0.04, 0.02, 4.0, 60


def reference_g(tau: int, record: RoundRecord, budget: dict[str, float]) -> float:
    """G(τ) of eq. (18) with h(τ) of eq. (11), from a record's estimates and costs."""
    assert record.rho is not None
    assert record.beta is not None
    assert record.delta is not None
    h = 0.0
    if record.beta and record.delta:
        h = (
            record.delta / record.beta * ((ETA * record.beta + 1) ** tau - 1)
            - ETA * record.delta * tau
        )
    c, b = record.expected_c or record.c, record.expected_b or record.b
    share = max(
        (c[name] * tau + b[name]) / ((limit - b[name] - c[name]) * tau)
        for name, limit in budget.items()
    )
    half = share / (2 * ETA * PHI)
    return half + math.sqrt(half**2 + record.rho * h / (ETA * PHI * tau)) + record.rho * h


def explain(run: Run, number: int) -> Explanation:
    return explain_module.explain(run, number, build_method(run.settings).controller)


def run_of(**options: object) -> tuple[Run, Result]:
    settings = {
        "method": "frugal",
        "partition": "case:2",
        "step_size": ETA,
        "phi": PHI,
        "gamma": GAMMA,
        "tau_max": TAU_MAX,
        **options,
    }
    plan = simulate(Settings(model="svm", **settings), Overrides(dataset=DIGITS))  # type: ignore[arg-type]
    result = execute(plan)
    records = [RoundRecord.from_json(record.to_json()) for record in result.rounds]
    return Run(Path("a-run"), plan.settings, records, summary=None), result


@pytest.mark.parametrize("case", [2, 4])
@pytest.mark.parametrize(
    "budget", [("time=15s",), ("time=15s", "bytes=200kB", "energy=400J")]
)
def test_tau_minimises_reference_g(case: int, budget: tuple[str, ...]) -> None:
    run, result = run_of(partition=f"case:{case}", budget=budget)
    chosen = 0
    for before, record in zip(run.rounds, run.rounds[1:], strict=False):
        if record.reason not in (Reason.MINIMUM, Reason.SEARCH_LIMIT):
            continue
        if before.rho is None:
            continue
        candidates = range(1, min(int(GAMMA * before.tau), TAU_MAX) + 1)
        values = [reference_g(tau, before, dict(result.budget)) for tau in candidates]
        explained = explain(run, record.round)
        assert explained.candidates.tolist() == list(candidates)
        assert explained.curve.tolist() == pytest.approx(values, rel=1e-6)
        assert explained.minimum == record.tau == candidates[int(np.argmin(values))]
        assert (record.reason == Reason.SEARCH_LIMIT) == (record.tau == candidates[-1])
        chosen += 1
    planned = sum(record.reason == Reason.SPREAD for record in run.rounds)
    assert planned <= 10
    assert chosen >= len(run.rounds) - 4 - planned


def run_shortened_by_budget() -> tuple[Run, Result, RoundRecord]:
    """Return a run whose last τ was shortened by the budget. Costs are random, so this does
    not happen with every seed.
    """
    for seed in range(50):
        run, result = run_of(budget=("time=6s",), seed=seed, validation=0.0)
        if run.rounds[-2].reason == Reason.BUDGET:
            return run, result, run.rounds[-2]
    raise AssertionError("the budget never cut a round short")


def test_every_reason_has_a_sentence() -> None:
    run, _, _ = run_shortened_by_budget()
    explained = [explain(run, record.round) for record in run.rounds]
    assert [each.record.reason for each in explained[:2]] == [Reason.START, Reason.START]
    assert explained[-1].record.reason == Reason.FINAL
    assert {Reason.MINIMUM, Reason.SEARCH_LIMIT, Reason.BUDGET} <= {
        each.record.reason for each in explained
    }
    for each in explained[:-1]:
        assert f"τ = {each.record.tau}" in each.sentence


def test_shortened_round_names_both_taus() -> None:
    run, result, last = run_shortened_by_budget()
    explained = explain(run, last.round)
    values = [
        reference_g(int(tau), run.rounds[last.round - 2], dict(result.budget))
        for tau in explained.candidates
    ]
    wanted = int(explained.candidates[np.argmin(values)])
    assert wanted > last.tau
    assert f"G(τ) is smallest at τ = {wanted}" in explained.sentence


def test_unlimited_growth_searches_every_tau() -> None:
    run, _ = run_of(gamma=math.inf, budget=("time=4s",))
    assert explain(run, 3).candidates.tolist() == list(range(1, TAU_MAX + 1))


def test_fixed_tau_has_no_curve() -> None:
    run, _ = run_of(tau=7, budget=("time=2s",))
    explained = explain(run, 2)
    assert (explained.record.tau, explained.record.reason) == (7, Reason.FIXED)
    assert len(explained.curve) == 0
    assert explained.minimum is None
    assert explained.sentence == "τ = 7 was fixed by the settings"


@pytest.mark.parametrize("number", [0, -1, 1000])
def test_missing_round_is_refused(number: int) -> None:
    run, _ = run_of(tau=7, budget=("time=2s",))
    with pytest.raises(
        UserError, match=rf"has no round {number}; it has rounds 1 to {len(run.rounds)}"
    ):
        explain(run, number)
    with pytest.raises(UserError, match=f"has no round {number}; it has none yet"):
        explain(replace(run, rounds=[]), number)


@pytest.mark.parametrize("reason", ["warm-up", "minimum of the regret", ""])
def test_custom_reason_is_kept(reason: str) -> None:
    """A custom controller has its own reasons. Later rounds are explained as usual."""
    run, _ = run_of(budget=("time=4s",))
    changed = replace(
        run,
        rounds=[*run.rounds[:3], replace(run.rounds[3], reason=reason), *run.rounds[4:]],
    )
    explained = explain(changed, 4)
    assert (explained.record.tau, explained.record.reason) == (run.rounds[3].tau, reason)
    assert (len(explained.curve), explained.minimum) == (0, None)
    assert explained.sentence == "the controller gave this reason itself"
    assert explain(changed, 5).curve.tolist() == explain(run, 5).curve.tolist() != []


def test_costs_explain_the_default_method() -> None:
    """The smallest cost, computed here from the formula, is at the chosen τ."""
    run, _ = run_of(method="accelerated", phi=None, gamma=10.0, step_size="auto")
    balanced = 0
    for before, record in zip(run.rounds, run.rounds[1:], strict=False):
        explanation = explain(run, record.round)
        if record.reason != Reason.BALANCE:
            continue
        c = (before.expected_c or before.c)["time"]
        b = (before.expected_b or before.b)["time"]
        value = {tau: (c * tau + b) * (1 / tau + 1 / 10) for tau in range(1, TAU_MAX + 1)}
        assert explanation.quantity == "budget per effective update"
        assert explanation.minimum == record.tau == min(value, key=value.__getitem__)
        ratios = explanation.curve / explanation.curve[0]
        assert ratios == pytest.approx([each / value[1] for each in value.values()])
        balanced += 1
    assert balanced > 10


def test_summary_covers_every_round() -> None:
    run, _ = run_of(method="accelerated", phi=None, gamma=10.0, step_size="auto")
    controller = build_method(run.settings).controller
    summary = explain_module.reasons(run, controller)
    assert sum(each.rounds for each in summary) == len(run.rounds)
    for each in summary:
        taus = [record.tau for record in run.rounds if record.reason == each.reason]
        assert (each.smallest, each.largest) == (min(taus), max(taus))
        assert run.rounds[each.last - 1].reason == each.reason
