"""`--method paper` against a second implementation of Algorithms 2 and 3: same τ in every
round.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Literal, cast

import numpy as np
import pytest

from fedbudget import Result, data
from fedbudget.data.dataset import Dataset, Part
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import BatchSize, Tau
from support.paper_replay import (
    DGD_SECONDS,
    SGD_SECONDS,
    Inputs,
    Replay,
    loss_everywhere,
    replay,
)

CASES = (1, 2, 3, 4)
BATCHES: tuple[BatchSize, ...] = ("full", 40)
BUDGETS = (
    ("time=8s",),
    ("time=20s",),
    ("bytes=80kB",),
    ("energy=150J", "time=10s"),
    ("time=10s", "bytes=150kB"),
)


@cache
def regression() -> Dataset:
    """Samples of a linear model with noise, in six groups."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 6, 600)
    x = (rng.normal(size=(600, 8)) + 0.5 * rng.normal(size=(6, 8))[labels]).astype(
        np.float32
    )
    values = x @ rng.normal(size=8) + 0.3 * rng.normal(size=600) + 0.5 * labels
    return Dataset(
        "regression", Part(x, labels, values), classes=tuple("abcdef")
    ).standardised()


def require_same(
    model: Literal["svm", "linear"] = "svm",
    case: int = 1,
    batch: BatchSize = 40,
    budget: tuple[str, ...] = BUDGETS[0],
    **options: Any,
) -> tuple[Result, Replay]:
    """Run and replay; assert equal decisions, costs and results."""
    settings = Settings(
        **{
            "model": model,
            "partition": f"case:{case}",
            "batch_size": batch,
            "budget": budget,
            "method": "paper",
            "evaluations": 1,
            "train_samples": 600,
            "joules_per_byte": 0.0,
            **options,
        }
    )
    prepared = simulate(
        settings,
        Overrides(dataset=regression() if model == "linear" else data.load("digits")),
    )
    result = execute(prepared)
    inputs = inputs_of(prepared, result, case)
    replayed = replay(inputs, [record.tau for record in result.rounds])
    assert [record.tau for record in result.rounds] == replayed.taus
    assert len(replayed.ties) <= 1
    for record, round_ in zip(result.rounds, replayed.rounds, strict=True):
        for name in ("spent", "c", "b"):
            assert list(getattr(record, name).values()) == pytest.approx(
                getattr(round_, name), rel=1e-9
            ), name
        assert (record.loss, record.best_loss) == pytest.approx(
            (round_.loss, round_.best_loss), rel=1e-5
        )
        if round_.estimates is not None:
            assert (record.rho, record.beta, record.delta) == pytest.approx(
                round_.estimates, rel=1e-3, abs=1e-9
            )
    whole = prepared.shards.table
    samples = (
        whole.scaled(np.arange(len(whole))).astype(np.float64),
        whole.y.astype(np.float64),
    )
    assert result.loss == pytest.approx(
        loss_everywhere(inputs, replayed.w, samples), rel=1e-5
    )
    return result, replayed


def inputs_of(prepared: SimulatedRun, result: Result, case: int) -> Inputs:
    """Inputs of the algorithms in a run."""
    settings, shards = prepared.settings, prepared.shards
    table, nodes = shards.table, range(len(shards))
    rows = [shards.rows_of(node) for node in nodes]
    inputs = Inputs(
        model=cast(Literal["svm", "linear"], settings.model),
        nodes=[
            (table.scaled(own).astype(np.float64), table.y[own].astype(np.float64))
            for own in rows
        ],
        budget=dict(result.budget),
        seconds=DGD_SECONDS[case] if settings.batch_size == "full" else SGD_SECONDS,
        aggregation_factor=settings.aggregation_factor,
        seed=settings.seed,
        batch=settings.batch_size if isinstance(settings.batch_size, int) else None,
        tau=settings.tau if isinstance(settings.tau, int) else None,
        gamma=settings.gamma,
        tau_max=settings.tau_max,
        joules_per_second=settings.watts * len(shards),
        joules_per_byte=settings.joules_per_byte,
    )
    if "bytes" in result.budget:
        inputs = replace(inputs, wire_bytes=[record.b["bytes"] for record in result.rounds])
    if settings.phi is not None:
        inputs = replace(inputs, phi=settings.phi)
    return (
        replace(inputs, eta=settings.step_size)
        if isinstance(settings.step_size, float)
        else inputs
    )


@pytest.mark.parametrize(("case", "batch"), list(product(CASES, BATCHES)))
def test_adaptive(case: int, batch: BatchSize) -> None:
    """With two resources. At least four different τ occur, so the decisions matter."""
    result, _ = require_same(case=case, batch=batch, budget=BUDGETS[4])
    assert len({record.tau for record in result.rounds}) >= 4


def test_one_resource() -> None:
    require_same(case=2, budget=BUDGETS[0], seed=1)


def test_other_parameters() -> None:
    """η, φ, γ and τ_max act as in the paper, and `aggregation_factor` scales b."""
    options: dict[str, Any] = {
        "step_size": 0.03,
        "phi": 0.1,
        "gamma": 2.5,
        "tau_max": 9,
        "aggregation_factor": 0.3,
    }
    result, _ = require_same("linear", case=4, budget=("time=4s",), **options)
    assert max(record.tau for record in result.rounds) <= 9


@pytest.mark.parametrize("tau", [1, 7])
def test_fixed(tau: Tau) -> None:
    """A baseline reuses no mini-batch and estimates nothing."""
    result, _ = require_same(case=2, tau=tau)
    assert all(record.rho is None for record in result.rounds)


def test_short_budgets() -> None:
    """A few rounds only, so most decisions are those of the stop rule."""
    rounds = set()
    for seed, seconds in product(range(3), (0.7, 1.1, 1.6, 2.5)):
        for tau in ("adaptive", 1):
            result, _ = require_same(
                case=2,
                budget=(f"time={seconds}s",),
                seed=seed,
                tau=tau,
                train_samples=200,
                batch=9,
            )
            rounds.add(len(result.rounds))
    assert {3, 4, 5} < rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "case", "batch"), list(product(("svm", "linear"), CASES, BATCHES))
)
def test_many_settings(
    model: Literal["svm", "linear"], case: int, batch: BatchSize
) -> None:
    """All budgets with three seeds; fixed τ with one resource and with two."""
    for budget, seed in product(BUDGETS, range(3)):
        require_same(model, case, batch, budget, seed=seed)
    for budget, tau in product((BUDGETS[0], BUDGETS[4]), (1, 7, 50)):
        require_same(model, case, batch, budget, tau=tau)
