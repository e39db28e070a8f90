"""Why a round had its τ: G once more, written plainly from eq. (18), agrees with every
choice of real runs.
"""

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


def plain_g(tau: int, known: RoundRecord, budget: dict[str, float]) -> float:
    """G(τ) of eq. (18) with h(τ) of eq. (11), from a record's estimates and costs."""
    assert known.rho is not None
    assert known.beta is not None
    assert known.delta is not None
    h = 0.0
    if known.beta and known.delta:
        h = (
            known.delta / known.beta * ((ETA * known.beta + 1) ** tau - 1)
            - ETA * known.delta * tau
        )
    c, b = known.expected_c or known.c, known.expected_b or known.b
    share = max(
        (c[name] * tau + b[name]) / ((limit - b[name] - c[name]) * tau)
        for name, limit in budget.items()
    )
    half = share / (2 * ETA * PHI)
    return half + math.sqrt(half**2 + known.rho * h / (ETA * PHI * tau)) + known.rho * h


def explain(run: Run, number: int) -> Explanation:
    return explain_module.explain(run, number, build_method(run.settings).controller)


def run_of(**options: object) -> tuple[Run, Result]:
    asked = {
        "method": "frugal",
        "partition": "case:2",
        "step_size": ETA,
        "phi": PHI,
        "gamma": GAMMA,
        "tau_max": TAU_MAX,
        **options,
    }
    plan = simulate(Settings(model="svm", **asked), Overrides(dataset=DIGITS))  # type: ignore[arg-type]
    result = execute(plan)
    records = [
        RoundRecord.from_json(record.to_json()) for record in result.rounds
    ]  # as they come from the disk
    return Run(Path("a-run"), plan.settings, records, summary=None), result


@pytest.mark.parametrize("case", [2, 4])
@pytest.mark.parametrize(
    "budget", [("time=15s",), ("time=15s", "bytes=200kB", "energy=400J")]
)
def test_the_smallest_plain_g_is_the_tau_of_every_adaptive_round(
    case: int, budget: tuple[str, ...]
) -> None:
    run, result = run_of(partition=f"case:{case}", budget=budget)
    chosen = 0
    for before, record in zip(run.rounds, run.rounds[1:], strict=False):
        if record.reason not in (Reason.MINIMUM, Reason.SEARCH_LIMIT):
            continue
        if before.rho is None:
            continue
        candidates = range(1, min(int(GAMMA * before.tau), TAU_MAX) + 1)
        values = [plain_g(tau, before, dict(result.budget)) for tau in candidates]
        explained = explain(run, record.round)
        assert explained.candidates.tolist() == list(candidates)
        assert explained.curve.tolist() == pytest.approx(values, rel=1e-6)
        assert explained.minimum == record.tau == candidates[int(np.argmin(values))]
        assert (record.reason == Reason.SEARCH_LIMIT) == (record.tau == candidates[-1])
        chosen += 1
    planned = sum(record.reason == Reason.SPREAD for record in run.rounds)
    assert planned <= 10
    assert chosen >= len(run.rounds) - 4 - planned


def run_that_the_budget_cut_short() -> tuple[Run, Result, RoundRecord]:
    """A run in which the last τ is what was left of the budget; costs are random, so some
    seeds have none.
    """
    for seed in range(50):
        run, result = run_of(budget=("time=6s",), seed=seed)
        if run.rounds[-2].reason == Reason.BUDGET:
            return run, result, run.rounds[-2]
    raise AssertionError("the budget never cut a round short")


def test_every_reason_of_a_run_has_a_sentence_with_its_tau() -> None:
    run, _, _ = run_that_the_budget_cut_short()
    explained = [explain(run, record.round) for record in run.rounds]
    assert [each.reason for each in explained[:2]] == [Reason.START, Reason.START]
    assert explained[-1].reason == Reason.FINAL
    assert {Reason.MINIMUM, Reason.SEARCH_LIMIT, Reason.BUDGET} <= {
        each.reason for each in explained
    }
    for each in explained[:-1]:
        assert f"τ = {each.tau}" in each.sentence


def test_where_the_budget_decided_the_tau_that_g_wanted_is_told_too() -> None:
    run, result, last = run_that_the_budget_cut_short()
    explained = explain(run, last.round)
    values = [
        plain_g(int(tau), run.rounds[last.round - 2], dict(result.budget))
        for tau in explained.candidates
    ]
    wanted = int(explained.candidates[np.argmin(values)])
    assert wanted > last.tau
    assert f"G(τ) is smallest at τ = {wanted}" in explained.sentence


def test_without_a_limit_to_growth_every_tau_up_to_the_largest_is_searched() -> None:
    run, _ = run_of(gamma=math.inf, budget=("time=4s",))
    assert explain(run, 3).candidates.tolist() == list(range(1, TAU_MAX + 1))


def test_a_fixed_tau_consults_no_curve() -> None:
    run, _ = run_of(tau=7, budget=("time=2s",))
    explained = explain(run, 2)
    assert (explained.tau, explained.reason, len(explained.curve), explained.minimum) == (
        7,
        Reason.FIXED,
        0,
        None,
    )
    assert explained.sentence == "τ = 7 was fixed by the settings"


@pytest.mark.parametrize("number", [0, -1, 1000])
def test_a_round_that_was_not_made_is_refused_with_those_that_were(number: int) -> None:
    run, _ = run_of(tau=7, budget=("time=2s",))
    with pytest.raises(
        UserError, match=rf"has no round {number}; it has rounds 1 to {len(run.rounds)}"
    ):
        explain(run, number)
    with pytest.raises(UserError, match=f"has no round {number}; it has none yet"):
        explain(replace(run, rounds=[]), number)


@pytest.mark.parametrize("reason", ["warm-up", "minimum of the regret", ""])
def test_an_unknown_reason_is_kept(reason: str) -> None:
    """A controller of a user's own has reasons of its own, which the rounds after it do not
    trip over either.
    """
    run, _ = run_of(budget=("time=4s",))
    own = replace(
        run,
        rounds=[*run.rounds[:3], replace(run.rounds[3], reason=reason), *run.rounds[4:]],
    )
    explained = explain(own, 4)
    assert (explained.tau, explained.reason) == (run.rounds[3].tau, reason)
    assert (len(explained.curve), explained.minimum) == (0, None)
    assert explained.sentence == "the controller gave this reason itself"
    assert explain(own, 5).curve.tolist() == explain(run, 5).curve.tolist() != []
