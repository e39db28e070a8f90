"""Runs that protect single samples: never more than the budget, by whichever limit they
end, also after a kill.
"""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from fedbudget.budget.step_size import FixedStep
from fedbudget.engines.engine import Pay, no_payment
from fedbudget.protocol.messages import Broadcast, Private, Report
from fedbudget.protocol.node_privacy import MOST_UPDATES
from fedbudget.protocol.privacy import multipliers
from fedbudget.protocol.sample_privacy import (
    CLIP,
    SampleAggregator,
    SampleProgress,
    first_clip,
    noise_multiplier,
    plan_updates,
)
from fedbudget.protocol.state import Phase
from fedbudget.resources.privacy import epsilon_of, rho_of
from support.private import DELTA, sample_aggregator
from support.private import run_to_end as run_rounds
from support.problems import costs


def answer(
    broadcast: Broadcast, samples: int, nodes: int = 5, octaves: float = 1.0
) -> Report:
    """Of nodes whose gradients are of so many octaves, and who move w by 1."""
    private, numbers = broadcast.private, np.arange(nodes)
    assert private is not None
    sizes, nothing = np.full(nodes, samples // nodes), np.zeros(nodes)
    report = (
        {"length": octaves * sizes}
        if private.measures
        else {"w": np.repeat(broadcast.w[None] + 1, nodes, axis=0)}
    )
    return Report(broadcast.round, numbers, sizes, nothing, nothing, **report)


def carry_out(
    run: SampleAggregator, samples: int, nodes: int = 5, pay: Pay = no_payment
) -> list[Broadcast]:
    return run_rounds(run, lambda sent: answer(sent, samples, nodes), pay)


def paid(rounds: list[Broadcast]) -> list[float]:
    return [each.private.rho for each in rounds if each.private is not None]


@pytest.mark.parametrize("seed", range(60))
def test_random_budgets_are_kept(seed: int) -> None:
    rng = np.random.default_rng([seed, 26])
    nodes, parameters, epsilon = (
        int(rng.integers(1, 50)),
        int(rng.integers(1, 500)),
        float(rng.uniform(0.2, 12)),
    )
    limits = {"time": float(rng.uniform(1, 20)), "privacy": epsilon}
    if rng.random() < 0.5:
        limits["bytes"] = float(rng.uniform(500, 5000))
    rounds = int(rng.integers(1, 30)) if rng.random() < 0.3 else None
    tau = int(rng.integers(1, 20)) if rng.random() < 0.3 else None
    payments: list[tuple[int, float]] = []
    run = sample_aggregator(limits, nodes, parameters, rounds=rounds, tau=tau)
    heard = carry_out(
        run,
        nodes * int(rng.integers(1, 2000)),
        nodes,
        lambda number, rho: payments.append((number, rho)),
    )
    assert payments == list(enumerate(paid(heard), 1))
    spent = run.ledger.budget.totals(run.ledger.spent)
    assert spent["privacy"] == pytest.approx(epsilon_of(sum(paid(heard)), DELTA), rel=1e-6)
    assert all(spent[name] <= limit * (1 + 1e-12) for name, limit in limits.items())
    assert all(1 <= each.tau <= MOST_UPDATES for each in heard)
    assert run.outcome is not None
    assert run.outcome.stopped_by in {*limits, "rounds"}


@pytest.mark.parametrize("seed", range(4))
def test_epsilon_is_the_librarys_for_every_update(seed: int) -> None:
    """Of whole shards every update of a round is a Gaussian mechanism on each sample:
    dp-accounting composes them.
    """
    rng = np.random.default_rng([seed, 27])
    run = sample_aggregator(
        {"time": float(rng.uniform(2, 15)), "privacy": float(rng.uniform(0.5, 8))}
    )
    heard = carry_out(run, int(rng.integers(50, 5000)))
    accountant = PLDAccountant()
    for each in heard:
        assert each.private is not None
        uses = 1 if each.private.measures else each.tau
        event = dp_accounting.GaussianDpEvent(noise_multiplier(each.private, uses))
        accountant.compose(event, uses)
    spent = run.ledger.budget.totals(run.ledger.spent)["privacy"]
    assert spent == pytest.approx(accountant.get_epsilon(DELTA), abs=1e-3)
    recorded = [
        sigma for each in heard for sigma in multipliers(each.private) if sigma < math.inf
    ]  # type: ignore[arg-type]
    rho = sum(1 / (2 * sigma**2) for sigma in recorded)
    assert epsilon_of(rho, DELTA) == pytest.approx(spent, abs=1e-6)
    assert accountant.get_epsilon(DELTA) <= run.ledger.budget.limits["privacy"]


@pytest.mark.parametrize(
    ("limits", "samples", "stopped_by"),
    [
        ({"time": 200.0, "privacy": 1.0}, 500, "privacy"),
        ({"time": 3.0, "privacy": 8.0}, 100_000, "time"),
        ({"time": 200.0, "bytes": 1500.0, "privacy": 8.0}, 100_000, "bytes"),
    ],
)
def test_the_limit_that_binds_ends_the_run(
    limits: dict[str, float], samples: int, stopped_by: str
) -> None:
    run = sample_aggregator(limits)
    carry_out(run, samples)
    assert run.outcome is not None
    assert run.outcome.stopped_by == stopped_by


def test_updates_cost_privacy_and_aggregations_none() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    heard = [run.start()]
    for _ in range(4):
        coming = run.receive(answer(heard[-1], 2000), run.ledger.costs)
        assert isinstance(coming, Broadcast)
        private = heard[-1].private
        assert private is not None
        charged = run.ledger.costs
        assert run.ledger.budget.privacy_part(charged.aggregation) == 0
        assert run.ledger.budget.privacy_part(charged.step) * max(
            1, heard[-1].tau
        ) == pytest.approx(private.rho)
        heard.append(coming)


def test_the_first_round_moves_nothing_and_gives_the_clip() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    first = run.start()
    assert first.private is not None
    assert first.private.measures
    second = run.receive(answer(first, 500, octaves=3.0), run.ledger.costs)
    assert isinstance(second, Broadcast)
    assert second.private == Private(CLIP * 8, second.private.rho, 500)  # type: ignore[union-attr]
    assert not second.w.any()
    assert second.eta * second.private.clip * 8 <= 1 + 1e-9


def test_a_node_that_lies_of_lengths_counts_for_no_more_than_its_samples() -> None:
    sizes, nothing = np.array([10, 30]), np.zeros(2)
    for lie, octaves in ((1e300, 8.0), (-math.inf, 0.0), (math.nan, 0.0)):
        report = Report(
            1, np.arange(2), sizes, nothing, nothing, length=np.array([lie, 30.0])
        )
        assert math.log2(first_clip(report) / CLIP) == pytest.approx(
            (octaves * 10 + 30) / 40
        )


def test_nodes_count_by_their_samples() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    second = run.receive(answer(run.start(), 500), run.ledger.costs)
    assert isinstance(second, Broadcast)
    w = np.stack([np.zeros(20), np.ones(20)]).astype(np.float32)
    sizes, nothing = np.array([30, 10]), np.zeros(2)
    run.receive(Report(2, np.arange(2), sizes, nothing, nothing, w=w), run.ledger.costs)
    assert run.state.w == pytest.approx(np.full(20, 0.25))


def test_tau_is_the_fewest_with_which_all_updates_fit() -> None:
    """Little privacy for many parameters wants few updates, and nodes agree after each."""
    few = carry_out(sample_aggregator({"time": 20.0, "privacy": 0.5}, parameters=400), 200)
    assert {each.tau for each in few} == {1}
    many = carry_out(
        sample_aggregator({"time": 20.0, "privacy": 8.0}, parameters=5), 100_000
    )
    assert max(each.tau for each in many) == MOST_UPDATES
    assert len(many) >= 12


def test_a_step_size_that_is_given_stays() -> None:
    heard = carry_out(
        sample_aggregator({"time": 5.0, "privacy": 4.0}, step=FixedStep(0.25)), 500
    )
    assert {each.eta for each in heard} == {0.25}


def test_a_round_that_does_not_come_together_is_paid_for() -> None:
    """Nodes were asked, and what they answered is known."""
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    second = run.receive(answer(run.start(), 500), run.ledger.costs)
    assert isinstance(second, Broadcast)
    before = run.ledger.budget.privacy_part(run.ledger.spent)
    run.give_up(costs([0.0, 0.0], [0.3, 0.0]), "time")
    assert second.private is not None
    charged = run.ledger.budget.privacy_part(run.ledger.spent) - before
    assert charged == pytest.approx(second.private.rho)


def test_what_was_paid_twice_leaves_less_for_the_rest() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    second = run.receive(answer(run.start(), 500), run.ledger.costs)
    assert isinstance(second, Broadcast)
    run.charge(
        costs([0.0, 0.0], [0.0, 0.999 * rho_of(4.0, DELTA) - sum(run.ledger.spent[1:])])
    )
    pending = run.pending
    assert pending is not None
    assert pending.private is not None
    assert pending.private.per_sample
    assert 0 < pending.private.rho < second.private.rho  # type: ignore[union-attr]
    run.receive(answer(pending, 500), run.ledger.costs)
    assert run.state.phase is Phase.DONE
    assert run.ledger.budget.totals(run.ledger.spent)["privacy"] <= 4


def test_rounds_that_are_given_share_the_privacy() -> None:
    """All of them are made, though the plan would have made fewer updates."""
    run = sample_aggregator({"time": 100.0, "privacy": 1.0}, rounds=9, tau=20)
    heard = carry_out(run, 200)
    assert [each.tau for each in heard] == [1] + 8 * [20]
    assert paid(heard)[1:] == pytest.approx(8 * [0.95 * rho_of(1.0, DELTA) / 8], rel=1e-3)
    assert run.outcome is not None
    assert run.outcome.stopped_by == "rounds"


def test_after_many_rounds_no_time_is_left_over() -> None:
    """Of the updates that are wanted 70 fit into 0.91 s, in two rounds of 35; one of 50
    would leave 0.31 s.
    """
    run = sample_aggregator({"time": 0.91, "privacy": 4.0})
    rule, progress = (
        run.method.private,
        SampleProgress(500, rounds=20, most_rounds=None, quality=25.0),
    )
    assert rule is not None
    plan = plan_updates(rule, run.method.spending, run.ledger, progress)
    assert plan is not None
    assert plan.decision.tau == 35
    assert plan.rho == pytest.approx(rho_of(4.0, DELTA) / 2, rel=1e-4)
