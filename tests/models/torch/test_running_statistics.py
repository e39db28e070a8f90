"""Running statistics of normalization layers: averaged with w, or kept local at the
nodes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedbudget
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.errors import UserError
from fedbudget.models import TorchModel, loss_over
from fedbudget.models.base import batch_rows
from support.networks import by_autograd, flat, random_w, table, three_nodes, train_by_sgd


def normalized(momentum: float | None = 0.1, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(4, momentum=momentum)
        return nn.Sequential(nn.Linear(5, 4), norm, nn.ReLU(), nn.Linear(4, 3))


PARAMETERS = 5 * 4 + 4 + 4 + 4 + 4 * 3 + 3


class TestAveraged:
    def test_statistics_are_last_in_w(self) -> None:
        model = TorchModel(normalized())
        assert (model.parameters, model.statistics) == (PARAMETERS + 8, 8)
        assert model.initial(0)[-8:].tolist() == [0] * 4 + [1] * 4  # means and variances

    def test_local_updates_match_sgd(self) -> None:
        """The statistics are those that the layer computes itself."""
        model, data = TorchModel(normalized()), table()
        shards = three_nodes(data)
        indices = Sampler(shards.size, 6, seed=2).round(4)
        w, shift = model.initial(0), np.zeros((3, model.parameters), np.float32)
        result = model.descend(w[None], shards, indices, 0.3, best=w, shift=shift)
        for node in range(3):
            module = model.trained(w).train()
            train_by_sgd(
                module,
                data,
                (batch_rows(shards, indices, node, update) for update in range(4)),
                0.3,
            )
            layer = module.get_submodule("1")
            expected = flat([*module.parameters(), layer.running_mean, layer.running_var])  # type: ignore[list-item]
            np.testing.assert_allclose(result.w[node], expected, atol=1e-5)
        assert not result.gradients[:, -8:].any()
        assert result.gradients[:, :-8].any()

    def test_nodes_do_not_share_statistics(self) -> None:
        model, data = TorchModel(normalized()), table()
        shards = three_nodes(data)
        indices = Sampler(shards.size, 6, seed=2).round(2)
        together = model.descend(model.initial(0)[None], shards, indices, 0.3).w
        for node in range(3):
            indices = Sampler(shards.size[[node]], 6, seed=2).round(2)
            alone = model.descend(
                model.initial(0)[None], shards.only([node]), indices, 0.3
            ).w
            assert together[node].tobytes() == alone.tobytes()

    def test_predictions_use_statistics_in_w(self) -> None:
        model, data = TorchModel(normalized()), table()
        w = np.abs(random_w(model, 3))
        loss, _ = by_autograd(model.trained(w), data, np.arange(60))
        assert loss_over(model, w, data) == pytest.approx(loss, rel=1e-5)
        other = w.copy()
        other[-8:] *= 3
        assert loss_over(model, other, data) != pytest.approx(loss, rel=1e-3)
        layer: Any = model.trained(other).get_submodule("1")
        statistics = flat([layer.running_mean, layer.running_var])
        assert statistics.tobytes() == other[-8:].tobytes()

    def test_negative_variance_is_tolerated(self) -> None:
        """Compression to few bits can make a variance negative."""
        model, data = TorchModel(normalized()), table()
        w = model.initial(0)
        w[-4:] = -0.01
        assert np.isfinite(loss_over(model, w, data))

    def test_batch_count_is_in_w(self) -> None:
        """Two rounds of two updates are four batches with a weight of one fourth each."""
        model, data = TorchModel(normalized(momentum=None)), table()
        assert model.statistics == 9
        shards, w = Shards.whole(data), model.initial(0)
        sampler = Sampler(shards.size, 6, seed=2)
        inputs = []
        for _ in range(2):
            indices = sampler.round(2, fresh=True)
            inputs += [data.x[indices.of(0, update, 60)] for update in range(2)]
            w = model.descend(w[None], shards, indices, 0.0).w[0]
        assert w[-1] == 4
        with torch.no_grad():
            hidden = [
                model.trained(w).get_submodule("0")(torch.from_numpy(x)) for x in inputs
            ]
        np.testing.assert_allclose(
            w[-9:-5],
            torch.stack([each.mean(dim=0) for each in hidden]).mean(dim=0),
            atol=1e-5,
        )

    def test_frozen_layer_keeps_its_statistics(self) -> None:
        module = normalized()
        module[:2].requires_grad_(False)
        module[1].running_mean = torch.ones(4)
        model, data = TorchModel(module), table()
        assert (model.parameters, model.statistics) == (4 * 3 + 3, 0)
        result = model.descend(
            model.initial(0)[None], Shards.whole(data), BatchIndices.whole(1, 3), 0.1
        )
        layer: Any = model.trained(result.w[0]).get_submodule("1")
        assert layer.running_mean.tolist() == [1] * 4
        loss, _ = by_autograd(model.trained(model.initial(0)), data, np.arange(60))
        # The layer normalizes by its own statistics, not by those of the batch.
        assert result.losses[0] == pytest.approx(loss, rel=1e-5)

    def test_batch_of_one_is_rejected(self) -> None:
        """A single sample left over from a large shard is accepted."""
        model = TorchModel(normalized())
        message = "normalizes by mini-batches; one sample is too few: use a larger"
        with pytest.raises(UserError, match=message):
            fedbudget.train(
                model=model,
                shards=[(table().x, table().y)],
                batch_size=1,
                budget="time=1s",
                costs="simulated",
            )
        many = table(samples=1001)
        assert np.isfinite(
            model.descend(
                model.initial(0)[None], Shards.whole(many), BatchIndices.whole(1), 0.1
            ).losses
        ).all()


class LargestInput(nn.Linear):
    """A layer that stores the largest input and divides by it."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("largest", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return super().forward(x / self.largest)


class TestCustomBuffers:
    def test_named_buffer_is_sent(self) -> None:
        model, data = TorchModel(LargestInput(), buffers=["largest"]), table()
        assert model.statistics == 1
        result = model.descend(
            model.initial(0)[None], three_nodes(data), BatchIndices.whole(3), 0.1
        )
        expected = [
            np.abs(data.x[rows]).max()
            for rows in (slice(0, 10), slice(10, 35), slice(35, 60))
        ]
        np.testing.assert_allclose(result.w[:, -1], expected)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"buffers": ["larges"]}, "unknown buffer 'larges'; did you mean largest?"),
            (
                {"statistics": "mean"},
                "unknown statistics 'mean'; use one of average, local",
            ),
            (
                {"statistics": "local", "buffers": ["largest"]},
                "buffers are averaged; with statistics local, only",
            ),
        ],
    )
    def test_invalid_options_are_rejected(self, options: Any, message: str) -> None:
        with pytest.raises(UserError, match=message.replace("?", r"\?")):
            TorchModel(LargestInput(), **options)


class TestLocal:
    def test_batches_normalize_themselves(self) -> None:
        """No statistics are part of w."""
        model, data = TorchModel(normalized(), statistics="local"), table()
        assert (model.parameters, model.statistics) == (PARAMETERS, 0)
        w = random_w(model, 0)
        loss, gradient = by_autograd(model.trained(w).train(), data, np.arange(60))
        result = model.descend(w[None], Shards.whole(data), BatchIndices.whole(1), 0.1)
        np.testing.assert_allclose(result.gradients[0], gradient, atol=1e-6)
        assert loss_over(model, w, data) == pytest.approx(loss, rel=1e-5)

    def test_node_module_uses_own_statistics(self) -> None:
        model, data = TorchModel(normalized(), statistics="local"), table()
        w = random_w(model, 0)
        module = model.trained(w, shard=(data.x, data.y))
        layer: Any = module.get_submodule("1")
        hidden = data.x @ w[:20].reshape(4, 5).T + w[20:24]
        np.testing.assert_allclose(layer.running_mean, hidden.mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(layer.running_var, hidden.var(axis=0, ddof=1), rtol=1e-4)
        assert not module.training
        assert layer.momentum == 0.1
        untouched: Any = model.trained(w).get_submodule("1")
        assert untouched.running_mean.tolist() == [0] * 4


def digits() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 10),
        nn.BatchNorm1d(10),
    )


class TestRuns:
    @pytest.mark.parametrize("statistics", ["average", "local"])
    def test_batch_normalization_network_learns(self, statistics: Any) -> None:
        model = TorchModel(digits, statistics=statistics)
        result = fedbudget.train(
            model=model,
            dataset="digits",
            partition="dirichlet:0.5",
            nodes=4,
            method="accelerated",
            budget="time=2s",
            costs="simulated",
        )
        assert result.accuracy is not None
        assert result.accuracy > 0.7
        assert len(result.w) == model.parameters

    def test_asynchronous_method_rejects_statistics(self) -> None:
        message = r"sends only gradients, but \w+ has running statistics: use group"
        with pytest.raises(UserError, match=message):
            fedbudget.train(
                model=digits(),
                dataset="digits",
                method="asynchronous",
                budget="time=1s",
                costs="simulated",
            )

    def test_case_3_matches_one_node(self) -> None:
        """In Case 3 all nodes have equal statistics, so a single node computes the same
        run.
        """
        options: Any = {
            "dataset": "digits",
            "method": "paper",
            "tau": 3,
            "step_size": 0.05,
            "budget": "time=1s",
            "costs": "simulated",
        }
        one, many = (
            fedbudget.train(
                model=TorchModel(digits), case=3, nodes=nodes, rounds=5, **options
            )
            for nodes in (1, 4)
        )
        np.testing.assert_allclose(one.w, many.w, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "frugal"},
        {"method": "paper"},
        {"update": "fedadam"},
        {"participation": 0.6},
        {"method": "frugal", "delta": "gradient", "batch_size": 10},
    ],
    ids=str,
)
def test_statistics_do_not_change_decisions(options: Any) -> None:
    """Training does not read running statistics. With or without them in w, a run has the
    same parameters, τ, η, ρ, β and δ up to rounding: norms are summed in another order.
    """
    results, data = {}, table(samples=200)
    shards = [(data.x[node::4] + node, data.y[node::4]) for node in range(4)]
    for statistics in ("average", "local"):
        model = TorchModel(normalized(), statistics=statistics)
        result = fedbudget.train(
            model=model,
            shards=shards,
            budget="time=1h",
            costs="simulated",
            rounds=10,
            validation=0,  # it reads the statistics
            **options,
        )
        decided = [
            (each.tau, each.eta, each.rho, each.beta, each.delta)
            for each in result.rounds[1:]
        ]
        results[statistics] = (
            np.array(decided, np.float64),
            result.w[: model.parameters - model.statistics],
        )
    np.testing.assert_allclose(results["average"][0], results["local"][0], rtol=1e-4)
    np.testing.assert_allclose(
        results["average"][1], results["local"][1], rtol=1e-4, atol=1e-5
    )


def test_statistics_are_weighted_by_samples() -> None:
    data = table()
    shards = [(data.x[:10], data.y[:10]), (data.x[10:], data.y[10:])]
    model, w = TorchModel(normalized(momentum=1.0)), TorchModel(normalized()).initial(0)
    result = fedbudget.train(
        model=model,
        shards=shards,
        method="paper",
        tau=1,
        step_size=1e-9,
        rounds=1,
        batch_size="full",
        budget="time=1h",
        costs="simulated",
    )
    hidden = [
        model.trained(w).get_submodule("0")(torch.from_numpy(x)).detach().numpy()
        for x, _ in shards
    ]
    expected = (10 * hidden[0].mean(axis=0) + 50 * hidden[1].mean(axis=0)) / 60
    np.testing.assert_allclose(result.w[-8:-4], expected, atol=1e-5)


def test_resumed_run_keeps_statistics(tmp_path: Path) -> None:
    """A run resumed from a checkpoint, with server momentum, equals an uninterrupted
    run.
    """
    data = table(samples=80)
    options: Any = {
        "model": normalized(),
        "shards": [(data.x[:50], data.y[:50]), (data.x[50:], data.y[50:])],
    }
    fixed: Any = {
        "tau": 2,
        "step_size": 0.05,
        "update": "fedavgm",
        "batch_size": 10,
        "budget": "time=1h",
        "costs": "simulated",
    }
    fedbudget.train(**options, **fixed, rounds=3, out=tmp_path / "run")
    longer = fedbudget.train(**options, resume=tmp_path / "run", rounds=7)
    whole = fedbudget.train(**options, **fixed, rounds=7)
    assert longer.w.tobytes() == whole.w.tobytes()
