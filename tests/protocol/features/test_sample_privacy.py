"""Runs that protect single samples: sample use, noise, releases, and the privacy budget."""

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.budget.step_size import FixedStep
from fedbudget.data.sampling import Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.engine import Pay, no_payment
from fedbudget.engines.noise import SecretNodeNoise, SeededNodeNoise
from fedbudget.models.base import Model
from fedbudget.models.builtin import LinearRegression, Softmax, SquaredSvm
from fedbudget.protocol.features.feature import NodeNoise, report_layout
from fedbudget.protocol.features.node_privacy import (
    MOST_UPDATES,
    PrivacyState,
    multipliers,
)
from fedbudget.protocol.features.sample_privacy import (
    CLIP,
    SampleAggregator,
    SamplePrivacy,
    SampleProgress,
    clamped_octaves,
    clip_of,
    most_uses,
    noise_multiplier,
    plan_updates,
    positions_of,
)
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import (
    Broadcast,
    LocalError,
    Private,
    Report,
    SampleNormReport,
    SampleNormRound,
    SampleReport,
    SampleRound,
    TrainRound,
)
from fedbudget.protocol.state import Outcome, Phase
from fedbudget.resources.privacy import epsilon_of, rho_of
from support.private import DELTA, run_to_end, sample_aggregator
from support.problems import costs

FEATURES = 3


@dataclass
class NoNoise:
    """Constant noise that records all requests."""

    asked: list[tuple[int, int, int, int]] = field(default_factory=list)
    inputs: list[bytes] = field(default_factory=list)
    value: float = 0.0

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        self.asked.append((round_, node, update, size))
        self.inputs.append(inputs)
        return np.full(size, self.value)

    def draw_integers(
        self, round_: int, node: int, update: int, inputs: bytes, size: int, bits: int
    ) -> Int64:
        drawn = self.draw(round_, node, update, inputs, size)
        return np.rint(drawn * 2.0**bits).astype(np.int64)


def shards_of(sizes: list[int], seed: int = 0) -> Shards:
    rng, total = np.random.default_rng(seed), sum(sizes)
    table = Table(
        rng.standard_normal((total, FEATURES)).astype(np.float32),
        rng.choice([-1.0, 1.0], total).astype("f4"),
    )
    ends = np.cumsum(sizes)
    return Shards.of(
        table, [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    )


W = np.zeros(FEATURES, np.float32)
MEASURING = SampleNormRound(round=1, w=W, rho=0.02)


def broadcast_of(
    tau: int, clip: float = 1.0, rho: float = 0.1, number: int = 1
) -> SampleRound:
    return SampleRound(round=number, w=W, tau=tau, eta=0.1, clip=clip, rho=rho)


def private_fleet(
    model: Model,
    shards: Shards,
    batch: int | None = None,
    noise: NodeNoise | None = None,
    *,
    seed: int = 0,
    numbers: list[int] | None = None,
) -> Fleet:
    return Fleet(
        model,
        shards,
        batch=batch,
        seed=seed,
        features=[SamplePrivacy()],
        numbers=numbers,
        noise=noise,
    )


def svm_fleet(
    sizes: list[int], batch: int | None, noise: NodeNoise | None, seed: int = 0
) -> Fleet:
    return private_fleet(SquaredSvm(FEATURES), shards_of(sizes), batch, noise, seed=seed)


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 50),
    taus=st.lists(st.integers(1, 30), max_size=4),
    seed=st.integers(0, 9),
)
@settings(deadline=None)
def test_sample_is_used_once_per_epoch(
    size: int, batch: int, taus: list[int], seed: int
) -> None:
    """Every round starts an epoch; a mini-batch contains no sample twice."""
    sampler = Sampler(np.array([size]), batch, seed)
    per_epoch = max(1, size // batch)
    for tau in taus:
        indices = sampler.round(tau, fresh=True, epoch=True)
        epochs = math.ceil(tau / per_epoch)
        assert (
            most_uses(indices, 0, size) <= epochs
        )  # fewer if some samples are left over in each
        assert most_uses(indices, 0, size) == epochs or size % batch
        for update in range(tau):
            chosen = positions_of(indices, 0, update, size)
            assert len(np.unique(chosen)) == len(chosen) == min(batch, size)


def test_whole_shard_in_every_update() -> None:
    assert most_uses(Sampler(np.array([7]), None, 0).round(5), 0, 7) == 5


@given(
    tau=st.integers(1, 12),
    rho=st.floats(1e-4, 10),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=30)
def test_sample_loss_is_at_most_rho(tau: int, rho: float, sizes: list[int]) -> None:
    """From the noise that is really added: with noise 1 and gradients 0, each update moves
    w by η σ C/m.
    """
    shards, noise, batch = shards_of(sizes), NoNoise(value=1.0), 4
    shards = replace(shards, table=Table(np.zeros_like(shards.table.x), shards.table.y))
    fleet = private_fleet(SquaredSvm(FEATURES, regularization=0.0), shards, batch, noise)
    report = fleet.answer(broadcast_of(tau, clip=2.0, rho=rho))
    assert isinstance(report, SampleReport)
    indices = Sampler(np.array(sizes), batch, 0).round(tau, fresh=True, epoch=True)
    for node, size in enumerate(sizes):
        every = [
            sample
            for update in range(tau)
            for sample in set(indices.of(node, update, size).tolist())
        ]
        uses = max(every.count(sample) for sample in every)
        sigma = -report.w[node, 0].item() * min(batch, size) / (tau * 0.1 * 2.0)
        assert uses / (2 * sigma**2) <= rho * (1 + 1e-5)
        assert sigma == pytest.approx(noise_multiplier(rho, uses), rel=1e-5)
    assert [(node, update) for _, node, update, _ in noise.asked] == [
        (node, update) for node in range(len(sizes)) for update in range(tau)
    ]


def test_no_noise_is_gradient_descent() -> None:
    private = svm_fleet([9, 4], None, NoNoise()).answer(broadcast_of(3, clip=1e6))
    plain = Fleet(SquaredSvm(FEATURES), shards_of([9, 4]), batch=None, seed=0).answer(
        TrainRound(
            round=1, w=W, report=report_layout((), True), tau=3, eta=0.1, effective=3
        )
    )
    assert private.vectors["w"] == pytest.approx(plain.vectors["w"], abs=1e-6)


def test_lengths_are_a_noisy_sum() -> None:
    noise = NoNoise(value=0.5)
    shards = shards_of([6, 3])
    report = svm_fleet([6, 3], None, noise).answer(MEASURING)
    assert isinstance(report, SampleNormReport)
    lengths = np.linalg.norm(
        shards.table.x.astype(float), axis=1
    )  # at w = 0 the slope is 1
    exact = [np.log2(lengths[:6]).sum(), np.log2(lengths[6:]).sum()]
    assert report.octaves == pytest.approx(np.array(exact) + 0.5 * 8 * 5.0, abs=2e-4)


@pytest.mark.parametrize("rho", [1e-4, 0.02, 3.0])
def test_reported_norms_lie_on_grid(rho: float) -> None:
    """The grid follows from ρ alone, so the lowest bits reveal nothing of the samples."""
    step = 8 * noise_multiplier(rho, 1) / 2**20
    request = replace(MEASURING, rho=rho)
    for size in range(1, 9):
        report = svm_fleet([size], None, SecretNodeNoise()).answer(request)
        steps = report.numbers["octaves"][0] / step
        assert steps == pytest.approx(round(steps), abs=1e-9 * abs(steps) + 1e-9)
        assert round(steps) * step == report.numbers["octaves"][0]


@pytest.mark.parametrize("rho", [1e-4, 0.02, 3.0])
@pytest.mark.parametrize("length", [1e-9, 1e9])
def test_sample_shifts_norms_by_sensitivity(rho: float, length: float) -> None:
    """The most extreme sample costs ρ and no more, although octaves are rounded."""
    shards = shards_of([1])
    shards = replace(
        shards, table=replace(shards.table, x=np.full((1, FEATURES), length, "f4"))
    )
    fleet = private_fleet(SquaredSvm(FEATURES), shards, None, NoNoise())
    moved = fleet.answer(replace(MEASURING, rho=rho)).numbers["octaves"][0]
    sigma = noise_multiplier(rho, 1) * 8
    assert moved**2 / (2 * sigma**2) == pytest.approx(rho, rel=2e-4)
    assert moved**2 / (2 * sigma**2) <= rho * (1 + 1e-12)


def test_lengths_are_clamped_to_octaves() -> None:
    values = clamped_octaves(np.array([0.0, 2.0**-9, 1.0, 2.0**300, np.inf, np.nan]))
    assert values.tolist() == [-8.0, -8.0, 0.0, 8.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("broadcast", "names"), [(broadcast_of(2), ["w"]), (MEASURING, ["octaves"])]
)
def test_nothing_else_leaves_a_node(broadcast: Broadcast, names: list[str]) -> None:
    report = svm_fleet([5], None, SeededNodeNoise(0)).answer(broadcast)
    assert [*report.numbers, *report.vectors] == names
    report.require_answers(broadcast)


def test_fleet_keeps_no_private_values() -> None:
    """A checkpoint of a node has neither its w_i nor its losses."""
    fleet = svm_fleet([5], None, SeededNodeNoise(0))
    fleet.answer(broadcast_of(2))
    memory = fleet.memory()
    assert memory.w is memory.losses is memory.best_known is None


def test_missing_noise_is_refused() -> None:
    with pytest.raises(LocalError, match="need a source of noise"):
        svm_fleet([5], None, None).answer(broadcast_of(1))


def test_repeated_answer_is_the_same() -> None:
    """Fresh noise on the same answer would spend privacy twice."""
    noise = SecretNodeNoise()
    one, two, other = (
        svm_fleet([25], 5, source).answer(broadcast_of(3)).vectors["w"]
        for source in (noise, noise, SecretNodeNoise())
    )
    assert np.array_equal(one, two)
    assert not np.allclose(other, one)


@pytest.mark.parametrize(
    "other",
    [
        replace(broadcast_of(3), eta=0.2),
        replace(broadcast_of(3), w=np.full(FEATURES, 0.1, np.float32)),
        broadcast_of(3, clip=1.1),
        broadcast_of(3, rho=0.11),
        broadcast_of(3, number=2),
        broadcast_of(4),
    ],
    ids=["eta", "w", "clip", "rho", "round", "tau"],
)
def test_different_broadcasts_draw_different_noise(other: Broadcast) -> None:
    """Otherwise the difference of two answers would reveal samples without noise."""
    drawn = []
    for broadcast in (broadcast_of(3), other):
        noise = NoNoise()
        svm_fleet([25], 5, noise).answer(broadcast)
        drawn.append(
            {
                (*asked, inputs)
                for asked, inputs in zip(noise.asked, noise.inputs, strict=True)
            }
        )
    assert not drawn[0] & drawn[1]


def test_different_samples_draw_different_noise() -> None:
    drawn = []
    for seed in (0, 1):  # seed of the mini-batches
        noise = NoNoise()
        svm_fleet([25], 5, noise, seed).answer(broadcast_of(1))
        drawn.append(noise.inputs[0])
    assert drawn[0] != drawn[1]


def test_secret_noise_is_gaussian() -> None:
    drawn = SecretNodeNoise().draw(1, 0, 0, b"", 100_001)
    assert len(drawn) == 100_001
    assert drawn.mean() == pytest.approx(0, abs=0.02)
    assert drawn.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(drawn) > 2).mean() == pytest.approx(0.0455, abs=0.005)


def test_fleet_matches_single_nodes() -> None:
    shards, model = shards_of([9, 4, 17]), Softmax(FEATURES, 2)
    shards = replace(
        shards, table=Table(shards.table.x, (shards.table.y > 0).astype(np.float32))
    )
    broadcast = replace(broadcast_of(4), w=np.zeros(model.parameters, np.float32))
    noise = SeededNodeNoise(1)
    together = private_fleet(model, shards, 4, noise, seed=3).answer(broadcast)
    for node in range(3):
        alone = private_fleet(
            model, shards.only([node]), 4, noise, seed=3, numbers=[node]
        ).answer(broadcast)
        assert np.array_equal(alone.vectors["w"][0], together.vectors["w"][node])


def answer(
    broadcast: Broadcast, samples: int, nodes: int = 5, octaves: float = 1.0
) -> Report:
    """Reports of nodes with this gradient length in octaves; they move w by 1."""
    sizes = np.full(nodes, samples // nodes)
    if isinstance(broadcast, SampleNormRound):
        return norm_report(sizes, octaves * sizes)
    w = np.repeat(broadcast.w[None] + 1, nodes, axis=0)
    return sample_report(broadcast.round, sizes, w)


def norm_report(sizes: Int64, octaves: Float64) -> SampleNormReport:
    nodes = np.arange(len(sizes))
    numbers = {"octaves": octaves}
    return SampleNormReport(round=1, nodes=nodes, sizes=sizes, numbers=numbers)


def sample_report(number: int, sizes: Int64, w: Float32) -> SampleReport:
    nodes = np.arange(len(sizes))
    return SampleReport(round=number, nodes=nodes, sizes=sizes, vectors={"w": w})


def run_samples(
    run: SampleAggregator, samples: int, nodes: int = 5, pay: Pay = no_payment
) -> list[Broadcast]:
    return run_to_end(run, lambda sent: answer(sent, samples, nodes), pay)


def paid(rounds: list[Broadcast]) -> list[float]:
    return [each.rho for each in rounds if isinstance(each, Private)]


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
    broadcasts = run_samples(
        run,
        nodes * int(rng.integers(1, 2000)),
        nodes,
        lambda number, rho: payments.append((number, rho)),
    )
    assert payments == list(enumerate(paid(broadcasts), 1))
    spent = run.ledger.budget.totals(run.ledger.spent)
    assert spent["privacy"] == pytest.approx(
        epsilon_of(sum(paid(broadcasts)), DELTA), rel=1e-6
    )
    assert all(spent[name] <= limit * (1 + 1e-12) for name, limit in limits.items())
    assert all(1 <= each.steps <= MOST_UPDATES for each in broadcasts)
    assert run.outcome is not None
    assert run.outcome.stopped_by in {*limits, "rounds"}


@pytest.mark.parametrize("seed", range(4))
def test_epsilon_matches_dp_accounting(seed: int) -> None:
    """On whole shards every update is a Gaussian mechanism on each sample; dp-accounting
    composes them.
    """
    rng = np.random.default_rng([seed, 27])
    run = sample_aggregator(
        {"time": float(rng.uniform(2, 15)), "privacy": float(rng.uniform(0.5, 8))}
    )
    broadcasts = run_samples(run, int(rng.integers(50, 5000)))
    accountant = PLDAccountant()
    for each in broadcasts:
        assert isinstance(each, Private)
        uses = each.steps
        event = dp_accounting.GaussianDpEvent(noise_multiplier(each.rho, uses))
        accountant.compose(event, uses)
    spent = run.ledger.budget.totals(run.ledger.spent)["privacy"]
    assert spent == pytest.approx(accountant.get_epsilon(DELTA), abs=1e-3)
    recorded = [
        sigma for each in broadcasts for sigma in multipliers(each) if sigma < math.inf
    ]
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
def test_binding_limit_ends_the_run(
    limits: dict[str, float], samples: int, stopped_by: str
) -> None:
    run = sample_aggregator(limits)
    run_samples(run, samples)
    assert run.outcome is not None
    assert run.outcome.stopped_by == stopped_by


def test_only_updates_cost_privacy() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    broadcasts = [run.start()]
    for _ in range(4):
        coming = run.receive(answer(broadcasts[-1], 2000), run.ledger.costs)
        assert isinstance(coming, Broadcast)
        budget, charged = run.ledger.budget, run.ledger.costs
        assert budget.privacy_part(charged.aggregation) == 0
        spent = budget.privacy_part(charged.step) * broadcasts[-1].steps
        assert [spent] == pytest.approx(paid(broadcasts[-1:]))
        broadcasts.append(coming)


def test_first_round_sets_the_clip() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    first = run.start()
    assert isinstance(first, SampleNormRound)
    second = run.receive(answer(first, 500, octaves=3.0), run.ledger.costs)
    assert isinstance(second, SampleRound)
    assert second.clip == CLIP * 8
    state = run.state.states["private"]
    assert state == PrivacyState(second.clip, second.rho, samples=500)
    assert not second.w.any()
    assert second.eta * second.clip * 8 <= 1 + 1e-9


def test_false_lengths_have_bounded_weight() -> None:
    """A node counts for no more than its samples."""
    for reported, octaves in ((1e300, 8.0), (-math.inf, 0.0), (math.nan, 0.0)):
        report = norm_report(np.array([10, 30]), np.array([reported, 30.0]))
        assert math.log2(clip_of(report.octaves, report.sizes) / CLIP) == pytest.approx(
            (octaves * 10 + 30) / 40
        )


def test_nodes_are_weighted_by_samples() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    second = run.receive(answer(run.start(), 500), run.ledger.costs)
    assert isinstance(second, Broadcast)
    w = np.stack([np.zeros(20), np.ones(20)]).astype(np.float32)
    run.receive(sample_report(2, np.array([30, 10]), w), run.ledger.costs)
    assert run.state.w == pytest.approx(np.full(20, 0.25))


def test_unusable_reports_leave_w() -> None:
    """Far too much noise for few samples: no w_i is within range."""
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    second = run.receive(answer(run.start(), 500), run.ledger.costs)
    assert isinstance(second, Broadcast)
    w = np.full((2, 20), 1e16, np.float32)
    run.receive(sample_report(2, np.array([30, 10]), w), run.ledger.costs)
    assert run.state.w.tolist() == second.w.tolist()


def test_tau_is_the_smallest_that_fits() -> None:
    """Little privacy and many parameters need few updates per aggregation."""
    few = run_samples(
        sample_aggregator({"time": 20.0, "privacy": 0.5}, parameters=400), 200
    )
    assert {each.steps for each in few} == {1}
    many = run_samples(
        sample_aggregator({"time": 20.0, "privacy": 8.0}, parameters=5), 100_000
    )
    assert max(each.steps for each in many) == MOST_UPDATES
    assert len(many) >= 12


def test_given_step_size_stays() -> None:
    broadcasts = run_samples(
        sample_aggregator({"time": 5.0, "privacy": 4.0}, step=FixedStep(0.25)), 500
    )
    trained = [each for each in broadcasts if isinstance(each, SampleRound)]
    assert len(trained) == len(broadcasts) - 1
    assert {each.eta for each in trained} == {0.25}


def test_abandoned_round_is_charged() -> None:
    """Nodes received the request, so their answers may be known."""
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    second = run.receive(answer(run.start(), 500), run.ledger.costs)
    assert isinstance(second, SampleRound)
    before = run.ledger.budget.privacy_part(run.ledger.spent)
    run.give_up(costs([0.0, 0.0], [0.3, 0.0]), "time")
    charged = run.ledger.budget.privacy_part(run.ledger.spent) - before
    assert charged == pytest.approx(second.rho)


def test_extra_payments_leave_less() -> None:
    run = sample_aggregator({"time": 20.0, "privacy": 4.0})
    second = run.receive(answer(run.start(), 500), run.ledger.costs)
    assert isinstance(second, SampleRound)
    run.charge(
        costs([0.0, 0.0], [0.0, 0.999 * rho_of(4.0, DELTA) - sum(run.ledger.spent[1:])])
    )
    pending = run.pending
    assert isinstance(pending, SampleRound)
    assert 0 < pending.rho < second.rho
    run.receive(answer(pending, 500), run.ledger.costs)
    assert run.state.phase is Phase.DONE
    assert run.ledger.budget.totals(run.ledger.spent)["privacy"] <= 4


def test_given_rounds_share_privacy() -> None:
    """All rounds run, although the plan would make fewer updates."""
    run = sample_aggregator({"time": 100.0, "privacy": 1.0}, rounds=9, tau=20)
    broadcasts = run_samples(run, 200)
    assert [each.steps for each in broadcasts] == [1] + 8 * [20]
    assert paid(broadcasts)[1:] == pytest.approx(
        8 * [0.95 * rho_of(1.0, DELTA) / 8], rel=1e-3
    )
    assert run.outcome is not None
    assert run.outcome.stopped_by == "rounds"


def test_late_plan_uses_all_time() -> None:
    """70 of the planned updates fit into 0.91 s, in two rounds of 35; one round of 50 would
    leave 0.31 s.
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


EPSILON, RUNS = 2.0, 1000

TARGET = np.array([3.0, -40.0, 200.0], np.float32)  # a sample far from all others


def table(*, present: bool) -> Table:
    """The target sample, and others that reveal nothing (known to the attacker)."""
    x = np.full((6, 3), np.nan, np.float32)
    if present:
        x[2] = TARGET
    return Table(x, np.full(6, 50.0, np.float32))


def evidence(*, present: bool) -> float:
    """The likelihood-ratio statistic: projection on the gradient, weighted by the noise of
    each release.
    """
    run = sample_aggregator({"time": 2.0, "privacy": EPSILON}, nodes=1, parameters=3, tau=1)
    shards = Shards.whole(table(present=present))
    fleet = private_fleet(LinearRegression(3), shards, None, SecretNodeNoise())
    message: Broadcast | Outcome = run.start()
    found = 0.0
    while isinstance(message, Broadcast):
        report = fleet.answer(message)
        assert isinstance(message, Private)
        sigma = math.sqrt(1 / (2 * message.rho))
        if isinstance(message, SampleRound):
            moved = (message.w - report.vectors["w"][0]).astype(np.float64)
            noisy = moved / message.eta * 6
            found += float(noisy @ direction(message.w)) / message.clip / sigma**2
        else:  # its length exceeds eight octaves
            found += report.numbers["octaves"][0] / 8 / sigma**2
        message = run.receive(report, run.ledger.costs)
    return found


def direction(w: Float32) -> np.ndarray:
    """Unit vector of the target's gradient at w."""
    gradient = (TARGET.astype(np.float64) @ w - 50.0) * TARGET.astype(np.float64)
    return np.asarray(gradient / np.linalg.norm(gradient))


@pytest.mark.slow
def test_membership_attack_matches_epsilon() -> None:
    """The best attack is as good as ε promises, and no better."""
    with_it, without = (
        np.array([evidence(present=present) for _ in range(RUNS)])
        for present in (True, False)
    )
    promised = math.sqrt(2 * rho_of(EPSILON, DELTA))
    spread = math.sqrt((with_it.var() + without.var()) / 2)
    assert (with_it.mean() - without.mean()) / spread == pytest.approx(
        promised, abs=4 * math.sqrt(2 / RUNS)
    )
    for threshold in np.quantile(without, [0.5, 0.8, 0.9, 0.95, 0.98]):
        false, right = (
            float((without > threshold).mean()),
            float((with_it > threshold).mean()),
        )
        chance = 3 * math.sqrt(0.25 / RUNS)
        exact = NormalDist().cdf(NormalDist().inv_cdf(false) + promised)
        assert right <= exact + chance
        assert right <= math.exp(EPSILON) * false + DELTA + chance
