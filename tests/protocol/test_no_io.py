"""The protocol does no I/O, not even through injected objects."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.budget.budget import Budget, Costs
from fedbudget.budget.control import AdaptiveTau, FixedTau
from fedbudget.budget.spending import CarefulSpending, PrivateSpending
from fedbudget.budget.step_size import AutoStep
from fedbudget.data.shards import Shards
from fedbudget.engines.noise import SecretNodeNoise, SecretNoise
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.combine import ClippedMean
from fedbudget.protocol.features.feature import Feature
from fedbudget.protocol.features.node_privacy import NodePrivacy, PrivateAggregator
from fedbudget.protocol.features.sample_privacy import SampleAggregator, SamplePrivacy
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.protocol.state import Outcome
from fedbudget.protocol.update import Accelerate
from support.problems import problem

NODES = 4
CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "process_time")


@contextmanager
def no_io() -> Iterator[None]:
    """Fail on every file, socket, thread and clock."""

    def refuse(name: str) -> Callable[..., NoReturn]:
        def call(*args: Any, **options: Any) -> NoReturn:
            raise AssertionError(f"the protocol called {name}")

        return call

    targets: list[tuple[Any, str]] = [
        ("builtins", "open"),
        ("io", "open"),
        (os, "open"),
        (os, "write"),
        (os, "fsync"),
        (socket, "socket"),
        (threading.Thread, "start"),
        *((time, name) for name in (*CLOCKS, "sleep")),
    ]
    patches = [
        patch(f"{where}.{name}", refuse(name))
        if isinstance(where, str)
        else patch.object(where, name, refuse(name))
        for where, name in targets
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


@dataclass(frozen=True)
class Case:
    """A kind of run: its aggregator, method, limits, and the noise of its nodes."""

    kind: type[Aggregator]
    method: Method
    limits: dict[str, float]
    noise: SecretNodeNoise | None = None


def private(feature: Feature) -> Method:
    rule = PrivateRule(NODES, SecretNoise(), feature)
    return Method(FixedTau(1), AutoStep(), spending=PrivateSpending(50), private=rule)


PLAIN = Method(
    AdaptiveTau(tau_max=8),
    AutoStep(),
    update=Accelerate(),
    combine=ClippedMean(),
    correct_drift=True,
    delta="parameters",
    spending=CarefulSpending(tau_max=8),
)
CASES = {
    "plain": Case(Aggregator, PLAIN, {"time": 3.0}),
    "nodes": Case(
        PrivateAggregator,
        private(NodePrivacy(own_steps=True)),
        {"time": 3.0, "privacy": 4.0},
    ),
    "samples": Case(
        SampleAggregator,
        private(SamplePrivacy()),
        {"time": 3.0, "privacy": 4.0},
        SecretNodeNoise(),
    ),
}


def run_all(case: Case, fleet: Fleet, w: Float32) -> tuple[Outcome, list[Any]]:
    """Run all rounds; return the outcome and the payments that an engine would record."""
    each = np.array([float(name == "time") for name in case.limits])
    costs = Costs(0.01 * each, 0.1 * each)
    budget = Budget(case.limits, 1e-5 if "privacy" in case.limits else None)
    run = case.kind(w, method=case.method, budget=budget, expected=costs)
    message: Broadcast | Outcome = run.start()
    payments = [run.payment]
    while isinstance(message, Broadcast):
        message = run.receive(fleet.answer(message), costs)
        payments.append(run.payment)
    return message, payments


@pytest.mark.parametrize("name", CASES)
def test_rounds_do_no_io(name: str) -> None:
    case = CASES[name]
    data = problem("softmax", 3)
    shards = Shards.of(data.table, np.array_split(np.arange(len(data.y)), NODES))
    fleets = [
        Fleet(
            data.model,
            shards,
            batch=None,
            seed=9,
            features=case.method.features,
            noise=case.noise,
        )
        for _ in range(2)
    ]
    w = data.start(0)
    run_all(case, fleets[0], w)  # compiles kernels, which reads files
    with no_io():
        outcome, payments = run_all(case, fleets[1], w)
    assert np.isfinite(outcome.w).all()
    paid = sum(payment.rho for payment in payments if payment is not None)
    budget = outcome.ledger.budget
    assert paid == pytest.approx(budget.privacy_part(outcome.ledger.spent))
    assert (paid > 0) == ("privacy" in case.limits)


def test_the_guard_refuses_a_file() -> None:
    with no_io(), pytest.raises(AssertionError, match="called open"):
        open(os.devnull)  # noqa: PTH123, SIM115
