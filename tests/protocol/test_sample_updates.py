"""What nodes do where single samples are protected: how often one is used, how much noise,
and what leaves the node.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float64
from fedbudget.data.sampling import Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.engines.noise import SecretNodeNoise, SeededNodeNoise
from fedbudget.models.builtin import Softmax, SquaredSvm
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Broadcast, LocalError, Private, Report, Request
from fedbudget.protocol.sample_privacy import (
    clamped_octaves,
    most_uses,
    noise_multiplier,
    positions_of,
)

REQUEST = Request(private=True, per_sample=True)
FEATURES = 3


@dataclass
class NoNoise:
    """Zeros, and what was asked for."""

    asked: list[tuple[int, int, int, int]] = field(default_factory=list)
    inputs: list[bytes] = field(default_factory=list)
    value: float = 0.0

    def draw(
        self, round_: int, node: int, update: int, inputs: bytes, size: int
    ) -> Float64:
        self.asked.append((round_, node, update, size))
        self.inputs.append(inputs)
        return np.full(size, self.value)


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


def broadcast_of(
    tau: int, clip: float = 1.0, rho: float = 0.1, number: int = 1
) -> Broadcast:
    first = Broadcast.first(np.zeros(FEATURES, np.float32), 0.1, REQUEST)
    return replace(first, round=number, tau=tau, private=Private(clip, rho, 0))


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 50),
    taus=st.lists(st.integers(1, 30), max_size=4),
    seed=st.integers(0, 9),
)
@settings(deadline=None)
def test_a_sample_is_used_once_in_an_epoch(
    size: int, batch: int, taus: list[int], seed: int
) -> None:
    """An epoch begins with every round, wherever the one before has ended; none is in a
    mini-batch twice.
    """
    sampler = Sampler(np.array([size]), batch, seed)
    per_epoch = max(1, size // batch)
    for tau in taus:
        indices = sampler.round(tau, fresh=True, epoch=True)
        epochs = math.ceil(tau / per_epoch)
        assert (
            most_uses(indices, 0, size) <= epochs
        )  # fewer where some samples are left over in each
        assert most_uses(indices, 0, size) == epochs or size % batch
        for update in range(tau):
            chosen = positions_of(indices, 0, update, size)
            assert len(np.unique(chosen)) == len(chosen) == min(batch, size)


def test_whole_shards_are_used_in_every_update() -> None:
    assert most_uses(Sampler(np.array([7]), None, 0).round(5), 0, 7) == 5


@given(
    tau=st.integers(1, 12),
    rho=st.floats(1e-4, 10),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=30)
def test_no_sample_pays_more_than_the_round_says(
    tau: int, rho: float, sizes: list[int]
) -> None:
    """By the noise that is really added: each update moves w by η σ C/m where noise is 1
    and gradients are 0.
    """
    shards, noise, batch = shards_of(sizes), NoNoise(value=1.0), 4
    shards = replace(shards, table=Table(np.zeros_like(shards.table.x), shards.table.y))
    fleet = Fleet(
        SquaredSvm(FEATURES, regularization=0.0), shards, batch=batch, seed=0, noise=noise
    )
    report = fleet.answer(broadcast_of(tau, clip=2.0, rho=rho))
    assert report.w is not None
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
        assert sigma == pytest.approx(
            noise_multiplier(Private(2.0, rho, 0), uses), rel=1e-5
        )
    assert [(node, update) for _, node, update, _ in noise.asked] == [
        (node, update) for node in range(len(sizes)) for update in range(tau)
    ]


def test_updates_without_noise_and_clipping_are_gradient_descent() -> None:
    model, shards = SquaredSvm(FEATURES), shards_of([9, 4])
    private = Fleet(model, shards, batch=None, seed=0, noise=NoNoise()).answer(
        broadcast_of(3, clip=1e6)
    )
    plain = Fleet(model, shards, batch=None, seed=0).answer(
        replace(broadcast_of(3), request=Request(), private=None)
    )
    assert private.w == pytest.approx(plain.w, abs=1e-6)


def test_lengths_are_told_as_a_sum_with_noise() -> None:
    noise = NoNoise(value=0.5)
    shards = shards_of([6, 3])
    report = Fleet(SquaredSvm(FEATURES), shards, batch=None, seed=0, noise=noise).answer(
        broadcast_of(1, clip=0.0, rho=0.02)
    )
    lengths = np.linalg.norm(
        shards.table.x.astype(float), axis=1
    )  # at w = 0 the slope is 1
    exact = [np.log2(lengths[:6]).sum(), np.log2(lengths[6:]).sum()]
    assert report.length == pytest.approx(np.array(exact) + 0.5 * 8 * 5.0, abs=1e-5)
    assert report.w is None


def test_no_length_counts_for_more_than_eight_octaves() -> None:
    told = clamped_octaves(np.array([0.0, 2.0**-9, 1.0, 2.0**300, np.inf, np.nan]))
    assert told.tolist() == [-8.0, -8.0, 0.0, 8.0, 0.0, 0.0]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_nothing_else_leaves_a_node(clip: float) -> None:
    report = Fleet(
        SquaredSvm(FEATURES), shards_of([5]), batch=None, seed=0, noise=SeededNodeNoise(0)
    ).answer(broadcast_of(2, clip=clip))
    told = {name for name, value in vars(report).items() if value is not None}
    assert told == {
        "round",
        "nodes",
        "sizes",
        "losses",
        "best_losses",
        "w" if clip else "length",
    }
    assert not report.losses.any()
    assert not report.best_losses.any()
    report.require_answers(broadcast_of(2, clip=clip))


def test_without_noise_no_update_is_made() -> None:
    with pytest.raises(LocalError, match="need a source of noise"):
        Fleet(SquaredSvm(FEATURES), shards_of([5]), batch=None, seed=0).answer(
            broadcast_of(1)
        )


def answer_with(noise: SecretNodeNoise, broadcast: Broadcast, seed: int = 0) -> Report:
    return Fleet(
        SquaredSvm(FEATURES), shards_of([25]), batch=5, seed=seed, noise=noise
    ).answer(broadcast)


def test_an_answer_that_is_made_again_is_the_same() -> None:
    noise = SecretNodeNoise()
    one, two = (answer_with(noise, broadcast_of(3)) for _ in range(2))
    assert np.array_equal(one.w, two.w)  # type: ignore[arg-type]
    assert not np.allclose(answer_with(SecretNodeNoise(), broadcast_of(3)).w, one.w)  # type: ignore[arg-type]


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
def test_whatever_differs_has_other_noise(other: Broadcast) -> None:
    """Or the difference of two answers would tell of samples without any."""
    drawn = []
    for broadcast in (broadcast_of(3), other):
        noise = NoNoise()
        Fleet(SquaredSvm(FEATURES), shards_of([25]), batch=5, seed=0, noise=noise).answer(
            broadcast
        )
        drawn.append(
            {
                (*asked, inputs)
                for asked, inputs in zip(noise.asked, noise.inputs, strict=True)
            }
        )
    assert not drawn[0] & drawn[1]


def test_other_samples_have_other_noise() -> None:
    drawn = []
    for seed in (0, 1):  # of mini-batches
        noise = NoNoise()
        Fleet(
            SquaredSvm(FEATURES), shards_of([25]), batch=5, seed=seed, noise=noise
        ).answer(broadcast_of(1))
        drawn.append(noise.inputs[0])
    assert drawn[0] != drawn[1]


def test_secret_noise_is_gaussian() -> None:
    drawn = SecretNodeNoise().draw(1, 0, 0, b"", 100_001)
    assert len(drawn) == 100_001
    assert drawn.mean() == pytest.approx(0, abs=0.02)
    assert drawn.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(drawn) > 2).mean() == pytest.approx(0.0455, abs=0.005)


def test_a_node_alone_does_as_it_does_among_others() -> None:
    """The same bits, in one fleet or many."""
    shards, model = shards_of([9, 4, 17]), Softmax(FEATURES, 2)
    shards = replace(
        shards, table=Table(shards.table.x, (shards.table.y > 0).astype(np.float32))
    )
    first = Broadcast.first(np.zeros(model.parameters, np.float32), 0.1, REQUEST)
    broadcast = replace(first, tau=4, private=Private(1.0, 0.1, 0))
    together = Fleet(model, shards, batch=4, seed=3, noise=SeededNodeNoise(1)).answer(
        broadcast
    )
    for node in range(3):
        alone = Fleet(
            model,
            shards.only([node]),
            batch=4,
            seed=3,
            numbers=[node],
            noise=SeededNodeNoise(1),
        )
        assert np.array_equal(alone.answer(broadcast).w[0], together.w[node])  # type: ignore[index]
