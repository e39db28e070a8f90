"""Local updates of a PyTorch module: equal to plain PyTorch and to the compiled models, for
few nodes and for many.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbudget
from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.models import LinearRegression, Softmax, TorchModel, loss_over
from fedbudget.models.base import Descent, batch_rows
from fedbudget.models.torch import model as torch_model
from support.networks import (
    by_autograd,
    flat,
    network,
    random_w,
    table,
    three_nodes,
    train_by_sgd,
)


class TestAgainstPlainPyTorch:
    @pytest.mark.parametrize("batch", [None, 6])
    def test_first_losses_and_gradients(self, batch: int | None) -> None:
        model, data = TorchModel(network()), table()
        shards = three_nodes(data)
        indices = Sampler(shards.size, batch, seed=2).round(3)
        w = np.stack([random_w(model, seed) for seed in range(3)])
        result = model.descend(w, shards, indices, 0.1, best=random_w(model, 9))
        assert result.best_losses is not None
        for node in range(3):
            rows = shards.rows_of(node)[indices.of(node, 0, int(shards.size[node]))]
            loss, gradient = by_autograd(model.trained(w[node]), data, rows)
            assert result.losses[node] == pytest.approx(loss, rel=1e-5)
            np.testing.assert_allclose(result.gradients[node], gradient, atol=1e-6)
            best, _ = by_autograd(model.trained(random_w(model, 9)), data, rows)
            assert result.best_losses[node] == pytest.approx(best, rel=1e-5)
        np.testing.assert_allclose(
            model.losses(w, shards, indices), result.losses, rtol=1e-6
        )

    @pytest.mark.parametrize("batch", [None, 6])
    def test_local_updates_match_sgd(self, batch: int | None) -> None:
        model, data = TorchModel(network()), table()
        shards = three_nodes(data)
        indices = Sampler(shards.size, batch, seed=2).round(4)
        result = model.descend(random_w(model, 1)[None], shards, indices, 0.3)
        for node in range(3):
            module = model.trained(random_w(model, 1))
            train_by_sgd(
                module,
                data,
                (batch_rows(shards, indices, node, update) for update in range(4)),
                0.3,
            )
            np.testing.assert_allclose(
                result.w[node], flat(list(module.parameters())), atol=1e-5
            )

    def test_large_shard_is_split(self) -> None:
        """Splitting keeps the loss and the gradient."""
        data = table(samples=2_501)
        seen: list[int] = []

        class Counting(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(len(x))
                return super().forward(x)

        model = TorchModel(Counting(5, 3))
        w, shards = random_w(model, 3), Shards.whole(data)
        result = model.descend(w[None], shards, BatchIndices.whole(1), 0.1)
        assert seen == [1000, 1000, 501]
        loss, gradient = by_autograd(model.trained(w), data, np.arange(2_501))
        assert result.losses[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(result.gradients[0], gradient, atol=1e-6)
        seen.clear()
        assert loss_over(model, w, data) == pytest.approx(loss, rel=1e-5)
        assert seen == [200] * 12 + [101]

    def test_bytes_are_scaled_on_use(self) -> None:
        rng = np.random.default_rng(0)
        stored = rng.integers(0, 256, (30, 5)).astype(np.uint8)
        y = rng.integers(0, 3, 30).astype(np.float32)
        model = TorchModel(network())
        w = random_w(model, 0)
        as_bytes = Table(stored, y, 1 / 255)
        as_numbers = Table((stored / 255).astype(np.float32), y)
        assert loss_over(model, w, as_bytes) == pytest.approx(
            loss_over(model, w, as_numbers), rel=1e-6
        )
        assert loss_over(model, w, Table(stored, y)) != pytest.approx(
            loss_over(model, w, as_numbers), rel=0.1
        )
        assert np.array_equal(stored, np.random.default_rng(0).integers(0, 256, (30, 5)))

    def test_scaling_copies_the_data(self) -> None:
        data = table()
        before = data.x.copy()
        model = TorchModel(network())
        loss_over(model, model.initial(0), Table(data.x, data.y, scale=0.5))
        assert np.array_equal(data.x, before)

    def test_read_only_arrays_are_accepted(self) -> None:
        data, model = table(), TorchModel(network())
        w = random_w(model, 0)
        expected = model.accuracy(w, data), loss_over(model, w, data)
        for array in (w, data.x, data.y):
            array.flags.writeable = False
        again = Table(data.x, data.y)
        assert (model.accuracy(w, again), loss_over(model, w, again)) == expected
        np.testing.assert_array_equal(flat(list(model.trained(w).parameters())), w)

    def test_table_cache_overflow(self) -> None:
        model = TorchModel(network())
        w, tables = random_w(model, 0), [table(seed=seed) for seed in range(7)]
        losses = [loss_over(model, w, each) for each in tables]
        assert losses == [loss_over(model, w, each) for each in tables]
        assert losses == [loss_over(TorchModel(network()), w, each) for each in tables]
        assert len(set(losses)) == 7


class TestAgainstCompiledModels:
    @pytest.mark.parametrize("batch", [None, 6])
    def test_linear_module_matches_softmax(self, batch: int | None) -> None:
        data = table()
        shards = three_nodes(data)
        indices = Sampler(shards.size, batch, seed=4).round(5)
        own, kernel = TorchModel(nn.Linear(5, 3)), Softmax(5, 3)
        assert own.parameters == kernel.parameters
        w = np.stack([random_w(own, seed) for seed in range(3)])
        shift = np.stack([random_w(own, seed) for seed in range(30, 30 + len(shards))])
        result = own.descend(w, shards, indices, 0.2, w[0], shift)
        expected = kernel.descend(
            _biases_inside(w),
            shards,
            indices,
            0.2,
            _biases_inside(w[:1])[0],
            _biases_inside(shift),
        )
        np.testing.assert_allclose(_biases_inside(result.w), expected.w, atol=1e-5)
        np.testing.assert_allclose(
            _biases_inside(result.gradients), expected.gradients, atol=1e-5
        )
        np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-5)
        assert result.best_losses is not None
        assert expected.best_losses is not None
        np.testing.assert_allclose(result.best_losses, expected.best_losses, rtol=1e-5)
        assert own.accuracy(w[1], data) == kernel.accuracy(_biases_inside(w)[1], data)

    @pytest.mark.parametrize("batch", [None, 6])
    def test_linear_module_matches_linear_regression(self, batch: int | None) -> None:
        """With half the squared error as loss."""
        rng = np.random.default_rng(1)
        data = Table(
            rng.normal(size=(60, 5)).astype(np.float32),
            rng.normal(size=60).astype(np.float32),
        )
        shards = three_nodes(data)
        indices = Sampler(shards.size, batch, seed=4).round(5)
        own = TorchModel(
            nn.Linear(5, 1, bias=False),
            loss=lambda output, y: 0.5 * F.mse_loss(output, y),
            target="real",
        )
        w = np.stack([random_w(own, seed) for seed in range(3)])
        result, expected = (
            model.descend(w, shards, indices, 0.1) for model in (own, LinearRegression(5))
        )
        np.testing.assert_allclose(result.w, expected.w, atol=1e-5)
        np.testing.assert_allclose(result.gradients, expected.gradients, atol=1e-5)
        np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-5)

    def test_whole_run_matches(self) -> None:
        """With adaptive τ and its estimates: the same τ in each round, and the same final
        loss.
        """
        start = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        for parameter in start.parameters():
            nn.init.zeros_(parameter)
        own, kernel = (
            fedbudget.train(
                model=model,
                dataset="digits",
                case=2,
                budget="time=3s",
                costs="simulated",
                step_size=0.05,
            )
            for model in (TorchModel(start), "softmax")
        )
        assert [record.tau for record in own.rounds] == [
            record.tau for record in kernel.rounds
        ]
        assert own.loss == pytest.approx(kernel.loss, rel=1e-4)
        assert own.accuracy == kernel.accuracy


class TestManyNodes:
    """Many nodes of a small module are batched. Batching must not change any result."""

    NODES, BATCH, UPDATES = 12, 5, 4

    def batched_and_sequential(
        self,
        make: Callable[[], nn.Module],
        monkeypatch: pytest.MonkeyPatch,
        *,
        per_node_steps: bool = False,
        **options: Any,
    ) -> tuple[Descent, Descent]:
        eta = (
            np.linspace(0.02, 0.2, self.NODES).astype(np.float32) if per_node_steps else 0.1
        )
        counts = 1 + np.arange(self.NODES) % self.UPDATES if per_node_steps else None
        data = table(samples=120)
        shards = Shards.of(
            data, np.array_split(np.random.default_rng(1).permutation(120), self.NODES)
        )
        result = []
        for small in (torch_model._SMALL, 0):
            monkeypatch.setattr(torch_model, "_SMALL", small)
            model = TorchModel(make, **options)
            w = np.stack([random_w(model, seed) for seed in range(self.NODES)])
            indices = Sampler(shards.size, self.BATCH, seed=3).round(self.UPDATES)
            indices = replace(indices, counts=counts)
            result.append(
                model.descend(w, shards, indices, eta, random_w(model, 99), w[::-1].copy())
            )
        return result[0], result[1]

    @staticmethod
    def assert_same(first: Descent, second: Descent) -> None:
        assert first.best_losses is not None
        assert second.best_losses is not None
        np.testing.assert_allclose(first.w, second.w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(first.gradients, second.gradients, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(first.losses, second.losses, rtol=1e-6)
        np.testing.assert_allclose(first.best_losses, second.best_losses, rtol=1e-6)

    def test_batched_matches_sequential(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.assert_same(*self.batched_and_sequential(network, monkeypatch))

    def test_per_node_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        batched, sequential = self.batched_and_sequential(
            network, monkeypatch, per_node_steps=True
        )
        self.assert_same(batched, sequential)
        same_steps = self.batched_and_sequential(network, monkeypatch)[1]
        assert not np.isclose(sequential.w, same_steps.w).all(axis=1).any()

    def test_real_target_with_output_column(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.assert_same(
            *self.batched_and_sequential(lambda: nn.Linear(5, 1), monkeypatch, target="raw")
        )

    def test_scalar_parameter_per_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Scaled(nn.Linear):
            def __init__(self) -> None:
                super().__init__(5, 3)
                self.scale = nn.Parameter(torch.tensor(2.0))

            def forward(self, x: Tensor) -> Tensor:
                return self.scale * super().forward(x)

        self.assert_same(*self.batched_and_sequential(Scaled, monkeypatch))

    def test_random_layers_run_sequentially(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = self.batched_and_sequential(
            lambda: nn.Sequential(network(), nn.Dropout(0.5)), monkeypatch
        )
        assert first.w.tobytes() == second.w.tobytes()

    def test_unbatchable_loss_runs_sequentially(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(output, y) * (1.0 if y.max().item() >= 0 else 2.0)

        first, second = self.batched_and_sequential(network, monkeypatch, loss=loss)
        assert first.w.tobytes() == second.w.tobytes()

    def test_nodes_are_batched(self) -> None:
        """The module is called once per update of all nodes, and once for w^f."""
        calls = []

        class Counting(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                calls.append(len(x))
                return super().forward(x)

        data = table(samples=120)
        shards = Shards.of(data, np.array_split(np.arange(120), self.NODES))
        model = TorchModel(Counting(5, 3))
        indices = Sampler(shards.size, self.BATCH, seed=3).round(self.UPDATES)
        model.descend(model.initial(0)[None], shards, indices, 0.1, model.initial(0))
        assert len(calls) == self.UPDATES + 1


def _biases_inside(w: Float32) -> Float32:
    """Reorder PyTorch's weights [3, 5] and biases [3] to weights and bias per class."""
    weights, biases = w[:, :15].reshape(-1, 3, 5), w[:, 15:, None]
    return np.ascontiguousarray(
        np.concatenate([weights, biases], axis=2).reshape(len(w), -1)
    )


class TestIdenticalShards:
    """Nodes with the same samples, as in Case 3."""

    ROWS = np.arange(5, 35), np.arange(20, 50)

    def results(
        self, shard_ids: list[int], w: Float32, shift: Float32 | None
    ) -> tuple[list[Any], int]:
        """Results of nodes that hold these shards, and the number of forward passes."""
        passes = 0

        class Counting(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                nonlocal passes
                passes += 1
                return super().forward(x)

        model = TorchModel(Counting(5, 3))
        shards = Shards.of(table(), [self.ROWS[shard] for shard in shard_ids])
        indices = Sampler(shards.size, 6, seed=2).round(4)
        result = model.descend(
            w, shards, indices, 0.3, best=random_w(model, 9), shift=shift
        )
        return [result.w, result.losses, result.gradients, result.best_losses], passes

    @pytest.mark.parametrize(
        ("w", "shifted", "passes"),
        [
            ([0], False, 2 * 5),  # four updates, and the loss at w^f
            ([0, 1, 0, 0, 1], False, 4 * 4 + 2),
            ([0], True, 5 * 4 + 2),
        ],
    )
    def test_identical_nodes_compute_once(
        self, w: list[int], shifted: bool, passes: int
    ) -> None:
        """Nodes that share samples and w share one computation."""
        shard_ids = [0, 1, 0, 1, 0]
        vectors = np.random.default_rng(0).normal(0, 0.5, (5, 18)).astype(np.float32)
        shift = vectors if shifted else None
        result, together = self.results(shard_ids, vectors[w], shift)
        alone = [
            self.results(
                [shard],
                vectors[w][[node % len(w)]],
                None if shift is None else shift[[node]],
            )[0]
            for node, shard in enumerate(shard_ids)
        ]
        for number, all_nodes in enumerate(result):
            assert np.array_equal(
                all_nodes, np.concatenate([each[number] for each in alone])
            )
        assert together == passes
