"""PyTorch's modules as models: against plain PyTorch, against the compiled models, and what is refused."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbudget
from fedbudget.arrays import Float32
from fedbudget.data.sampling import Picks, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.experiments.compare import compare
from fedbudget.models import LinearRegression, Softmax, TorchModel, loss_over, torch_model
from fedbudget.models.base import Descent
from fedbudget.runs.settings import Settings


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps this small are not worth sharing out among threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def table(samples: int = 60, features: int = 5, classes: int = 3, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (samples, features)).astype(np.float32)
    return Table(x, rng.integers(0, classes, samples).astype(np.float32))


def three_nodes(data: Table) -> Shards:
    return Shards.of(data, [np.arange(0, 10), np.arange(10, 35), np.arange(35, 60)])


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def random_w(model: TorchModel, seed: int) -> Float32:
    return np.random.default_rng(seed).normal(0, 0.5, model.parameters).astype(np.float32)


def flat(tensors: Sequence[Tensor]) -> Float32:
    found: Float32 = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()
    return found


def by_autograd(module: nn.Module, data: Table, rows: Any, loss: Any = F.cross_entropy) -> tuple[float, Float32]:
    """Loss and gradient of a module at its own parameters, as one would write it without fedbudget."""
    x, y = torch.from_numpy(data.scaled(rows)), torch.from_numpy(data.y[rows])
    value = loss(module(x), y.long() if loss is F.cross_entropy else y)
    gradients = torch.autograd.grad(value, [each for each in module.parameters() if each.requires_grad])
    return value.item(), flat(gradients)


class TestAgainstPlainPyTorch:
    @pytest.mark.parametrize("batch", [None, 6])
    def test_losses_and_gradients_before_the_first_update_are_autograds(self, batch: int | None) -> None:
        model, data = TorchModel(network()), table()
        shards = three_nodes(data)
        picks = Sampler(shards.size, batch, seed=2).round(3)
        w = np.stack([random_w(model, seed) for seed in range(3)])
        found = model.descend(w, shards, picks, 0.1, best=random_w(model, 9))
        assert found.best_losses is not None
        for node in range(3):
            rows = shards.rows_of(node)[picks.of(node, 0, int(shards.size[node]))]
            loss, gradient = by_autograd(model.trained(w[node]), data, rows)
            assert found.losses[node] == pytest.approx(loss, rel=1e-5)
            np.testing.assert_allclose(found.gradients[node], gradient, atol=1e-6)
            best, _ = by_autograd(model.trained(random_w(model, 9)), data, rows)
            assert found.best_losses[node] == pytest.approx(best, rel=1e-5)
        np.testing.assert_allclose(model.losses(w, shards, picks), found.losses, rtol=1e-6)

    @pytest.mark.parametrize("batch", [None, 6])
    def test_local_updates_are_steps_of_sgd(self, batch: int | None) -> None:
        model, data = TorchModel(network()), table()
        shards = three_nodes(data)
        picks = Sampler(shards.size, batch, seed=2).round(4)
        found = model.descend(random_w(model, 1)[None], shards, picks, 0.3)
        for node in range(3):
            module = model.trained(random_w(model, 1))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
            for update in range(4):
                rows = shards.rows_of(node)[picks.of(node, update, int(shards.size[node]))]
                optimizer.zero_grad()
                F.cross_entropy(
                    module(torch.from_numpy(data.x[rows])), torch.from_numpy(data.y[rows]).long()
                ).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            np.testing.assert_allclose(found.w[node], flat(list(module.parameters())), atol=1e-5)

    def test_a_shard_of_thousands_is_taken_in_pieces_with_the_same_loss_and_gradient(self) -> None:
        data = table(samples=2_501)
        seen: list[int] = []

        class Counting(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(len(x))
                return super().forward(x)

        model = TorchModel(Counting(5, 3))
        w, shards = random_w(model, 3), Shards.whole(data)
        found = model.descend(w[None], shards, Picks.whole(1), 0.1)
        assert seen == [1000, 1000, 501]
        loss, gradient = by_autograd(model.trained(w), data, np.arange(2_501))
        assert found.losses[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(found.gradients[0], gradient, atol=1e-6)
        assert loss_over(model, w, data) == pytest.approx(loss, rel=1e-5)

    def test_bytes_are_scaled_when_they_are_used(self) -> None:
        rng = np.random.default_rng(0)
        stored = rng.integers(0, 256, (30, 5)).astype(np.uint8)
        y = rng.integers(0, 3, 30).astype(np.float32)
        model = TorchModel(network())
        w = random_w(model, 0)
        as_bytes, as_numbers = Table(stored, y, 1 / 255), Table((stored / 255).astype(np.float32), y)
        assert loss_over(model, w, as_bytes) == pytest.approx(loss_over(model, w, as_numbers), rel=1e-6)
        assert loss_over(model, w, Table(stored, y)) != pytest.approx(loss_over(model, w, as_numbers), rel=0.1)
        assert stored.dtype == np.uint8  # and what was stored is as it was
        assert np.array_equal(stored, np.random.default_rng(0).integers(0, 256, (30, 5)))

    def test_numbers_are_scaled_in_a_copy(self) -> None:
        data = table()
        before = data.x.copy()
        model = TorchModel(network())
        loss_over(model, model.initial(0), Table(data.x, data.y, scale=0.5))
        assert np.array_equal(data.x, before)

    def test_w_and_data_may_be_read_only(self) -> None:
        data, model = table(), TorchModel(network())
        w = random_w(model, 0)
        expected = model.accuracy(w, data), loss_over(model, w, data)
        for array in (w, data.x, data.y):
            array.flags.writeable = False
        again = Table(data.x, data.y)
        assert (model.accuracy(w, again), loss_over(model, w, again)) == expected
        np.testing.assert_array_equal(flat(list(model.trained(w).parameters())), w)

    def test_more_tables_than_are_kept_are_not_mixed_up(self) -> None:
        model = TorchModel(network())
        w, tables = random_w(model, 0), [table(seed=seed) for seed in range(7)]
        losses = [loss_over(model, w, each) for each in tables]
        assert losses == [loss_over(model, w, each) for each in tables]
        assert losses == [loss_over(TorchModel(network()), w, each) for each in tables]
        assert len(set(losses)) == 7


class TestAgainstTheCompiledModels:
    @pytest.mark.parametrize("batch", [None, 6])
    def test_a_linear_module_with_cross_entropy_is_softmax_regression(self, batch: int | None) -> None:
        data = table()
        shards = three_nodes(data)
        picks = Sampler(shards.size, batch, seed=4).round(5)
        own, kernel = TorchModel(nn.Linear(5, 3)), Softmax(5, 3)
        assert own.parameters == kernel.parameters
        w = np.stack([random_w(own, seed) for seed in range(3)])
        found = own.descend(w, shards, picks, 0.2, best=w[0])
        expected = kernel.descend(_biases_inside(w), shards, picks, 0.2, best=_biases_inside(w[:1])[0])
        np.testing.assert_allclose(_biases_inside(found.w), expected.w, atol=1e-5)
        np.testing.assert_allclose(_biases_inside(found.gradients), expected.gradients, atol=1e-5)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
        assert found.best_losses is not None
        assert expected.best_losses is not None
        np.testing.assert_allclose(found.best_losses, expected.best_losses, rtol=1e-5)
        assert own.accuracy(w[1], data) == kernel.accuracy(_biases_inside(w)[1], data)

    @pytest.mark.parametrize("batch", [None, 6])
    def test_a_linear_module_with_half_the_squared_error_is_linear_regression(self, batch: int | None) -> None:
        rng = np.random.default_rng(1)
        data = Table(rng.normal(size=(60, 5)).astype(np.float32), rng.normal(size=60).astype(np.float32))
        shards = three_nodes(data)
        picks = Sampler(shards.size, batch, seed=4).round(5)
        own = TorchModel(nn.Linear(5, 1, bias=False), loss=lambda output, y: 0.5 * F.mse_loss(output, y), target="real")
        w = np.stack([random_w(own, seed) for seed in range(3)])
        found, expected = (model.descend(w, shards, picks, 0.1) for model in (own, LinearRegression(5)))
        np.testing.assert_allclose(found.w, expected.w, atol=1e-5)
        np.testing.assert_allclose(found.gradients, expected.gradients, atol=1e-5)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)

    def test_a_whole_run_is_the_same_run(self) -> None:
        """Adaptive τ, with its estimates: the same τ in each round, and the same w at the end."""
        start = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        for parameter in start.parameters():
            nn.init.zeros_(parameter)
        own, kernel = (
            fedbudget.train(model=model, dataset="digits", case=2, budget="time=3s", step_size=0.05)
            for model in (TorchModel(start), "softmax")
        )
        assert [record.tau for record in own.rounds] == [record.tau for record in kernel.rounds]
        assert own.loss == pytest.approx(kernel.loss, rel=1e-4)
        assert own.accuracy == kernel.accuracy


class TestManyNodes:
    """Many nodes of a small module are batched; that must not change anything."""

    NODES, BATCH, UPDATES = 12, 5, 4

    def both_ways(
        self, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, **options: Any
    ) -> tuple[Descent, Descent]:
        data = table(samples=120)
        shards = Shards.of(data, np.array_split(np.random.default_rng(1).permutation(120), self.NODES))
        found = []
        for small in (torch_model._SMALL, 0):
            monkeypatch.setattr(torch_model, "_SMALL", small)
            model = TorchModel(make, **options)
            w = np.stack([random_w(model, seed) for seed in range(self.NODES)])
            picks = Sampler(shards.size, self.BATCH, seed=3).round(self.UPDATES)
            found.append(model.descend(w, shards, picks, 0.1, random_w(model, 99)))
        return found[0], found[1]

    @staticmethod
    def assert_same(first: Descent, second: Descent) -> None:
        assert first.best_losses is not None
        assert second.best_losses is not None
        np.testing.assert_allclose(first.w, second.w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(first.gradients, second.gradients, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(first.losses, second.losses, rtol=1e-6)
        np.testing.assert_allclose(first.best_losses, second.best_losses, rtol=1e-6)

    def test_at_once_they_do_what_they_do_in_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.assert_same(*self.both_ways(network, monkeypatch))

    def test_with_a_real_target_and_a_column_of_outputs_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.assert_same(*self.both_ways(lambda: nn.Linear(5, 1), monkeypatch, target="raw"))

    def test_a_parameter_that_is_one_number_is_one_for_each_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Scaled(nn.Linear):
            def __init__(self) -> None:
                super().__init__(5, 3)
                self.scale = nn.Parameter(torch.tensor(2.0))

            def forward(self, x: Tensor) -> Tensor:
                return self.scale * super().forward(x)

        self.assert_same(*self.both_ways(Scaled, monkeypatch))

    def test_what_is_random_takes_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = self.both_ways(lambda: nn.Sequential(network(), nn.Dropout(0.5)), monkeypatch)
        assert first.w.tobytes() == second.w.tobytes()

    def test_a_loss_that_cannot_be_batched_takes_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(output, y) * (1.0 if y.max().item() >= 0 else 2.0)

        first, second = self.both_ways(network, monkeypatch, loss=loss)
        assert first.w.tobytes() == second.w.tobytes()

    def test_they_really_are_batched(self) -> None:
        """A module is called once for each update of all nodes, and once for w^f."""
        calls = []

        class Counting(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                calls.append(len(x))
                return super().forward(x)

        data = table(samples=120)
        shards = Shards.of(data, np.array_split(np.arange(120), self.NODES))
        model = TorchModel(Counting(5, 3))
        picks = Sampler(shards.size, self.BATCH, seed=3).round(self.UPDATES)
        model.descend(model.initial(0)[None], shards, picks, 0.1, model.initial(0))
        assert len(calls) == self.UPDATES + 1


class TestWhatAModuleSees:
    @pytest.mark.parametrize("shape", [(), (1, 2, 3), (6, 1)])
    def test_is_samples_of_the_shape_of_the_data(self, shape: tuple[int, ...]) -> None:
        seen: list[tuple[int, ...]] = []

        class Sees(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scores = nn.Linear(6, 2)

            def forward(self, x: Tensor) -> Tensor:
                seen.append(tuple(x.shape))
                scores: Tensor = self.scores(x.flatten(1))
                return scores

        x = np.arange(24, dtype=np.float32).reshape(4, 6) / 24
        model = TorchModel(Sees())
        data = Table(x, np.array([0, 1, 0, 1], np.float32), shape=shape)
        model.accuracy(model.initial(0), data)
        model.losses(model.initial(0)[None], Shards.whole(data), Picks.whole(1))
        assert seen == [(4, *(shape or (6,)))] * 2

    def test_rows_of_an_image_are_its_rows(self) -> None:
        image = np.arange(6, dtype=np.float32).reshape(1, 6)
        kept: list[Tensor] = []

        class Keeps(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                kept.append(x)
                return super().forward(x.flatten(1))

        model = TorchModel(Keeps(6, 2))
        model.accuracy(model.initial(0), Table(image, np.zeros(1, np.float32), shape=(1, 2, 3)))
        assert kept[0].tolist() == [[[[0, 1, 2], [3, 4, 5]]]]

    @pytest.mark.parametrize(
        ("target", "kind"), [("classes", torch.int64), ("real", torch.float32), ("raw", torch.float32)]
    )
    def test_targets_are_whole_numbers_for_classes_and_real_ones_otherwise(
        self, target: Any, kind: torch.dtype
    ) -> None:
        kinds: list[torch.dtype] = []

        def loss(output: Tensor, y: Tensor) -> Tensor:
            kinds.append(y.dtype)
            return output.mean()

        model = TorchModel(nn.Linear(5, 3), loss=loss, metrics={"loss": loss}, target=target)
        loss_over(model, model.initial(0), table())
        model.metrics(model.initial(0), table())
        assert kinds == [kind, kind]


class TestParameters:
    def test_frozen_ones_are_not_in_w_and_stay_as_they_are(self) -> None:
        module = network()
        assert isinstance(module, nn.Sequential)
        for parameter in module[0].parameters():
            parameter.requires_grad_(False)
        frozen = flat(list(module[0].parameters()))
        model, data = TorchModel(module), table()
        assert model.parameters == 7 * 3 + 3
        w = random_w(model, 0)
        found = model.descend(w[None], Shards.whole(data), Picks.whole(1, 3), 0.5)
        trained = model.trained(found.w[0])
        assert isinstance(trained, nn.Sequential)
        assert np.array_equal(flat(list(trained[0].parameters())), frozen)
        assert np.array_equal(flat(list(trained[2].parameters())), found.w[0])
        _, gradient = by_autograd(model.trained(w), data, np.arange(60))
        np.testing.assert_allclose(found.gradients[0], gradient, atol=1e-6)

    def test_tied_ones_are_in_w_once_with_the_gradient_of_both_places(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second, self.scores = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
                self.second.weight = self.first.weight

            def forward(self, x: Tensor) -> Tensor:
                scores: Tensor = self.scores(torch.tanh(self.second(torch.tanh(self.first(x)))))
                return scores

        model, data = TorchModel(Tied()), table()
        assert model.parameters == 25 + 5 + 5 + 18
        w = random_w(model, 0)
        found = model.descend(w[None], Shards.whole(data), Picks.whole(1, 2), 0.5)
        loss, gradient = by_autograd(model.trained(w), data, np.arange(60))
        assert found.losses[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(found.gradients[0], gradient, atol=1e-6)
        trained = model.trained(found.w[0])
        assert isinstance(trained, Tied)
        assert trained.first.weight is trained.second.weight

    def test_one_that_is_not_used_has_no_gradient(self) -> None:
        module = nn.Linear(5, 3)
        module.extra = nn.Parameter(torch.ones(4))
        model = TorchModel(module)
        found = model.descend(model.initial(0)[None], Shards.whole(table()), Picks.whole(1, 2), 0.5)
        assert found.gradients[0].tolist().count(0.0) == 4
        assert (found.w[0] == 1).sum() == 4

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (nn.Linear(5, 3).half(), r"parameters must be float32, not float16; call module\.float\(\)"),
            (nn.Linear(5, 3).double(), "parameters must be float32, not float64"),
            (nn.Linear(5, 3).requires_grad_(False), "the module has no parameters to train"),
            (nn.ReLU(), "the module has no parameters to train"),
            (lambda: "network", "needs an nn.Module or a function that makes one, not a str"),
            (3, "needs an nn.Module or a function that makes one, not a int"),
        ],
    )
    def test_what_cannot_be_trained_is_refused(self, module: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            TorchModel(module)

    @pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
    def test_lazy_ones_are_refused_until_they_have_a_size(self) -> None:
        lazy = nn.LazyLinear(3)
        with pytest.raises(UserError, match="lazy parameters without a size; pass a batch through it first"):
            TorchModel(lazy)
        lazy(torch.zeros(1, 5))
        assert TorchModel(lazy).parameters == 18


class Counts(nn.Linear):
    """A layer with a buffer that counts, if asked to, or stays as it is."""

    steps: Tensor

    def __init__(self, by: float) -> None:
        super().__init__(5, 3)
        self.by = by
        self.register_buffer("steps", torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += self.by
        return super().forward(x) * self.steps.sum()


class TestBuffers:
    @pytest.mark.parametrize(
        ("module", "where"),
        [
            (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), r"layer 1 \(BatchNorm1d\)"),
            (nn.BatchNorm1d(5), r"layer itself \(BatchNorm1d\)"),
            (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), r"layer itself \(InstanceNorm1d\)"),
        ],
    )
    def test_running_statistics_are_refused_with_the_reason_and_what_to_do(self, module: nn.Module, where: str) -> None:
        reason = rf"{where}.* keeps running statistics, which are no parameters .*; use GroupNorm or LayerNorm"
        with pytest.raises(UserError, match=reason) as error:
            TorchModel(module)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "norm", [nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.LayerNorm(4)], ids=str
    )
    def test_normalization_without_them_is_trained(self, norm: nn.Module) -> None:
        model, data = TorchModel(nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3))), table()
        w = random_w(model, 0)
        found = model.descend(w[None], Shards.whole(data), Picks.whole(1, 2), 0.1)
        _, gradient = by_autograd(model.trained(w).train(), data, np.arange(60))
        np.testing.assert_allclose(found.gradients[0], gradient, atol=1e-6)

    def test_one_that_stays_as_it_is_is_used(self) -> None:
        model, data = TorchModel(Counts(by=0.0)), table()
        w = random_w(model, 0)
        found = model.descend(w[None], Shards.whole(data), Picks.whole(1, 2), 0.1)
        loss, _ = by_autograd(model.trained(w), data, np.arange(60))
        assert found.losses[0] == pytest.approx(loss, rel=1e-5)
        assert model.parameters == 18

    def test_one_that_changes_is_refused_at_the_first_local_updates(self) -> None:
        model = TorchModel(Counts(by=1.0))
        with pytest.raises(UserError, match="counts: buffer steps changes while training, but only parameters are"):
            model.descend(model.initial(0)[None], Shards.whole(table()), Picks.whole(1), 0.1)

    def test_so_a_run_with_it_does_not_start(self) -> None:
        class Flat(Counts):
            def __init__(self) -> None:
                nn.Linear.__init__(self, 64, 10)
                self.by = 1.0
                self.register_buffer("steps", torch.ones(1))

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.flatten(1))

        with pytest.raises(UserError, match="buffer steps changes while training"):
            fedbudget.train(model=TorchModel(Flat()), dataset="digits", budget="time=2s")


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))


class TestRandomLayers:
    def setup_method(self) -> None:
        self.model = TorchModel(dropping)
        self.data = table(features=64, classes=10)
        self.shards = three_nodes(self.data)
        self.w = self.model.initial(0)[None]

    def test_one_mini_batch_gives_one_loss_at_one_w(self) -> None:
        picks = Sampler(self.shards.size, 6, seed=0).round(2)
        first, again = (self.model.losses(self.w, self.shards, picks) for _ in range(2))
        found = self.model.descend(self.w, self.shards, picks, 0.1, best=self.w[0])
        np.testing.assert_array_equal(first, again)
        np.testing.assert_allclose(found.losses, first, rtol=1e-6)
        assert found.best_losses is not None
        np.testing.assert_allclose(found.best_losses, first, rtol=1e-6)

    def test_nodes_with_the_same_mini_batch_have_the_same_gradient(self) -> None:
        rows = np.arange(60)
        shards = Shards.of(self.data, [rows, rows])
        found = self.model.descend(self.w, shards, Sampler(shards.size, 6, seed=0).round(3), 0.1)
        np.testing.assert_array_equal(found.w[0], found.w[1])

    def test_other_mini_batches_drop_other_units(self) -> None:
        """The same sample in 40 mini-batches that differ in their other one: without dropout all scores were equal."""
        scores: list[float] = []

        def loss(output: Tensor, y: Tensor) -> Tensor:
            scores.append(output[0, 0].item())
            return F.cross_entropy(output, y)

        model = TorchModel(dropping, loss=loss)
        for other in range(1, 41):
            model.losses(self.w, Shards.whole(self.data), _picked([0, other]))
        assert len(set(scores)) > 20

    def test_updates_are_in_training_mode_and_figures_over_all_data_are_not(self) -> None:
        modes: list[bool] = []

        class Tells(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                modes.append(self.training)
                return super().forward(x)

        model = TorchModel(Tells(64, 10), metrics={"mean": lambda output, _: output.mean()})
        w = model.initial(0)

        def modes_of(work: Callable[[], object]) -> set[bool]:
            modes.clear()
            work()
            return set(modes)

        whole, some = Picks.whole(3), Sampler(self.shards.size, 6, seed=0).round(1)
        assert modes_of(lambda: model.descend(w[None], self.shards, whole, 0.1, best=w)) == {True}
        assert modes_of(lambda: model.descend(w[None], self.shards, some, 0.1, best=w)) == {True}
        assert modes_of(lambda: model.losses(w[None], self.shards, some)) == {True}  # to compare with an update's
        assert modes_of(lambda: model.losses(w[None], self.shards, whole)) == {False}
        assert modes_of(lambda: loss_over(model, w, self.data)) == {False}
        assert modes_of(lambda: model.accuracy(w, self.data)) == {False}
        assert modes_of(lambda: model.metrics(w, self.data)) == {False}

    def test_loss_over_all_data_is_that_of_the_module_in_evaluation(self) -> None:
        loss, _ = by_autograd(self.model.trained(self.w[0]), self.data, np.arange(60))
        assert loss_over(self.model, self.w[0], self.data) == pytest.approx(loss, rel=1e-5)

    def test_a_run_repeats_to_the_bit_and_leaves_the_programs_random_numbers(self) -> None:
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        first = fedbudget.train(model=TorchModel(dropping), dataset="digits", case=2, budget="time=2s")
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(6)
        again = fedbudget.train(model=TorchModel(dropping), dataset="digits", case=2, budget="time=2s")
        np.testing.assert_array_equal(first.w, again.w)
        assert (first.loss, first.accuracy) == (again.loss, again.accuracy)
        used = fedbudget.train(model=self.model, dataset="digits", case=2, budget="time=2s")
        np.testing.assert_array_equal(first.w, used.w)  # nor does it matter what the model did before


class TestStart:
    def test_a_module_starts_from_its_own_parameters_whatever_the_seed(self) -> None:
        module = network()
        model = TorchModel(module)
        own = flat(list(module.parameters()))
        assert np.array_equal(model.initial(0), own)
        assert np.array_equal(model.initial(7), own)

    def test_a_function_starts_from_other_ones_for_each_seed(self) -> None:
        before = torch.random.get_rng_state()
        model = TorchModel(lambda: nn.Linear(5, 3))
        first, again, other = (model.initial(seed) for seed in (1, 1, 2))
        assert torch.equal(torch.random.get_rng_state(), before)
        assert np.array_equal(first, again)
        assert not np.isin(first, other).any()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            assert np.array_equal(first, flat(list(nn.Linear(5, 3).parameters())))

    def test_nobody_can_change_it(self) -> None:
        model = TorchModel(network())
        start = model.initial(0)
        model.initial(0)[:] = 7
        model.descend(start[None], Shards.whole(table()), Picks.whole(1, 3), 0.5)
        assert np.array_equal(model.initial(0), start)


class TestTrained:
    def test_a_module_that_was_given_is_not_changed(self) -> None:
        module = network()
        before, data = copy.deepcopy(module.state_dict()), table()
        model = TorchModel(module)
        model.descend(random_w(model, 0)[None], Shards.whole(data), Picks.whole(1, 3), 0.5)
        model.accuracy(random_w(model, 1), data)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())
        assert module.training

    def test_outputs_are_those_of_w_by_hand(self) -> None:
        model, data = TorchModel(network()), table()
        w = random_w(model, 4)
        first, hidden, second, last = np.split(w, [35, 42, 63])  # 5 x 7, 7, 7 x 3, 3
        expected = np.tanh(data.x @ first.reshape(7, 5).T + hidden) @ second.reshape(3, 7).T + last
        module = model.trained(w)
        with torch.no_grad():
            np.testing.assert_allclose(module(torch.from_numpy(data.x)).numpy(), expected, atol=1e-5)
        assert not module.training

    def test_it_belongs_to_who_asked_for_it(self) -> None:
        model, data = TorchModel(network()), table()
        w = random_w(model, 4)
        kept = w.copy()
        one, other = model.trained(w), model.trained(w)
        before = loss_over(model, w, data)
        for parameter in one.parameters():
            assert parameter.grad is None
            with torch.no_grad():
                parameter.fill_(3.0)
        assert np.array_equal(flat(list(other.parameters())), kept)
        assert np.array_equal(w, kept)
        assert loss_over(model, w, data) == before
        model.descend(w[None], Shards.whole(data), Picks.whole(1), 0.1)
        assert all((parameter == 3.0).all() for parameter in one.parameters())

    def test_it_can_be_trained_on_and_saved_as_any_module(self, tmp_path: Path) -> None:
        model, data = TorchModel(network()), table()
        module = model.trained(random_w(model, 4))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        before, _ = by_autograd(module, data, np.arange(60))
        F.cross_entropy(module(torch.from_numpy(data.x)), torch.from_numpy(data.y).long()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after, _ = by_autograd(module, data, np.arange(60))
        assert after < before
        torch.save(module.state_dict(), tmp_path / "state.pt")
        again = network(seed=9)
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert by_autograd(again, data, np.arange(60))[0] == pytest.approx(after)


class TestFigures:
    def test_accuracy_is_the_share_of_right_classes(self) -> None:
        x = np.eye(3, dtype=np.float32)[[0, 1, 2, 2]]  # the identity predicts 0, 1, 2, 2
        model = TorchModel(nn.Linear(3, 3, bias=False))
        right = model.accuracy(np.eye(3, dtype=np.float32).ravel(), Table(x, np.array([0, 1, 2, 0], np.float32)))
        assert right == 0.75

    @pytest.mark.parametrize("columns", [1, 0])
    def test_accuracy_of_plus_and_minus_one_is_the_share_of_right_signs(self, columns: int) -> None:
        module: nn.Module = nn.Linear(1, 1, bias=False)
        if columns == 0:
            module = nn.Sequential(module, nn.Flatten(0))
        model = TorchModel(module, loss=F.soft_margin_loss, target="binary")
        data = Table(np.array([[2], [-1], [3], [-4]], np.float32), np.array([1, 1, 1, -1], np.float32))
        w = np.ones(1, np.float32)
        assert model.accuracy(w, data) == 0.75
        margins = np.array([2, -1, 3, 4])
        assert loss_over(model, w, data) == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-6)

    def test_real_targets_have_no_accuracy_but_one_that_is_given(self) -> None:
        data = table()
        without = TorchModel(nn.Linear(5, 1), target="real")
        assert without.accuracy(without.initial(0), data) is None
        given = TorchModel(nn.Linear(5, 1), target="real", metrics={"accuracy": lambda output, y: 0.25})
        assert given.accuracy(given.initial(0), data) == 0.25

    def test_metrics_are_in_the_result_and_in_its_json(self) -> None:
        def errors(output: Tensor, y: Tensor) -> Tensor:
            return (output.argmax(dim=1) != y).sum()

        model = TorchModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), metrics={"errors": errors})
        result = fedbudget.train(model=model, dataset="digits", budget="time=1s")
        assert result.accuracy is not None
        assert result.metrics == {"errors": round(360 * (1 - result.accuracy))}  # of 360 test samples
        assert json.loads(json.dumps(result.to_json()))["metrics"] == dict(result.metrics)

    def test_accuracy_can_be_replaced(self) -> None:
        def of_zeros(output: Tensor, y: Tensor) -> Tensor:
            return (output[y == 0].argmax(dim=1) == 0).double().mean()

        make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
        own, usual = (
            fedbudget.train(model=TorchModel(make, metrics=metrics), dataset="digits", budget="time=1s")
            for metrics in ({"accuracy": of_zeros}, None)
        )
        np.testing.assert_array_equal(own.w, usual.w)
        module = TorchModel(make).trained(own.w)
        digits = fedbudget.data.load("digits")
        assert digits.test is not None
        assert digits.test.labels is not None
        x = torch.from_numpy(digits.test.x[digits.test.labels == 0] / np.float32(16))
        assert own.accuracy == pytest.approx((module(x).argmax(dim=1) == 0).double().mean().item())
        assert own.accuracy != usual.accuracy
        assert own.rounds[-1].accuracy == own.accuracy

    def test_a_column_of_outputs_is_compared_with_its_targets_one_by_one(self) -> None:
        """[n, 1] - [n] would be [n, n]: with y = x the error is 0 only when each output meets its own target."""
        x = np.arange(4, dtype=np.float32)[:, None]
        data = Table(x, x[:, 0].copy())
        error = {"error": lambda output, y: (output - y).abs().max()}
        model = TorchModel(nn.Linear(1, 1, bias=False), target="real", metrics=error)
        assert loss_over(model, np.ones(1, np.float32), data) == 0
        assert loss_over(model, np.full(1, 3, np.float32), data) == pytest.approx((0 + 4 + 16 + 36) / 4)
        assert model.metrics(np.ones(1, np.float32), data) == {"error": 0}

    @pytest.mark.parametrize(
        ("loss", "found"),
        [
            (lambda output, y: F.cross_entropy(output, y, reduction="none"), r"\(60,\)"),
            (lambda output, y: F.cross_entropy(output, y)[None], r"\(1,\)"),
            (lambda output, y: F.cross_entropy(output, y).item(), "float"),
        ],
    )
    def test_a_loss_that_is_not_one_number_is_refused(self, loss: Any, found: str) -> None:
        model = TorchModel(nn.Linear(5, 3), loss=loss)
        with pytest.raises(UserError, match=f"linear's loss must be a tensor of one number, .*, not {found}"):
            model.descend(model.initial(0)[None], Shards.whole(table()), Picks.whole(1), 0.1)

    @pytest.mark.parametrize("target", ["binary", "none"])
    def test_where_no_loss_is_usual_one_must_be_given(self, target: Any) -> None:
        with pytest.raises(UserError, match=f"TorchModel needs a loss for target '{target}'"):
            TorchModel(nn.Linear(5, 1), target=target)

    @pytest.mark.parametrize("device", ["abacus", "cuda:77", "meta"])
    def test_a_device_that_is_not_here_is_refused_in_one_line(self, device: str) -> None:
        with pytest.raises(UserError, match=f"device '{device}' cannot be used") as error:
            TorchModel(nn.Linear(5, 3), device=device)
        assert "\n" not in str(error.value)

    def test_it_is_named_after_its_module_or_as_one_likes(self) -> None:
        assert TorchModel(nn.Linear(5, 3)).name == "linear"
        assert TorchModel(network, name="mine").name == "mine"


class TestRuns:
    def test_a_small_network_learns_digits_from_nodes_with_one_or_two_of_them_each(self) -> None:
        model = TorchModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        result = fedbudget.train(model=model, dataset="digits", case=2, budget="time=15s", step_size=0.1)
        assert result.accuracy is not None
        assert result.accuracy > 0.8
        digits = fedbudget.data.load("digits")
        assert digits.test is not None
        assert digits.test.labels is not None
        predicted = model.trained(result.w)(torch.from_numpy(digits.test.x / np.float32(16))).argmax(dim=1).numpy()
        assert (predicted == digits.test.labels).mean() == pytest.approx(result.accuracy)

    def test_a_comparison_trains_the_network_of_the_catalogue(self) -> None:
        settings = Settings(model="cnn", dataset="digits", budget=("time=0.5s",), step_size=0.05, phi=5e-5)
        (found,) = compare(settings, cases=[2], taus=[5], seeds=[1])
        alone = fedbudget.train(
            model="cnn", dataset="digits", case=2, budget="time=0.5s", step_size=0.05, phi=5e-5, tau=5, seed=1
        )
        assert (found.fixed[0].loss, found.fixed[0].accuracy) == (alone.loss, alone.accuracy)
        assert found.adaptive.loss < 3.0


class TestWithoutPyTorch:
    INSTALL = "needs PyTorch; install it with: pip install 'fedbudget[torch]'"

    def test_the_network_is_refused_with_how_to_get_it_and_the_rest_works(self, tmp_path: Path) -> None:
        done = _python(
            """
            import sys
            from importlib.machinery import PathFinder

            class WithoutTorch(PathFinder):
                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    return None if name.partition(".")[0] == "torch" else PathFinder.find_spec(name, path, target)

            sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
            from fedbudget.cli.main import main
            from fedbudget.errors import UserError

            def code_of(*arguments):
                try:
                    main(["run", "--budget", "time=0.5s", "--json", *arguments])
                except SystemExit as end:
                    return end.code

            print(code_of("--model", "cnn", "--out", "cnn"))
            print(code_of("--out", "svm"))
            try:
                from fedbudget.models import TorchModel
            except UserError as error:
                print(error)
            """,
            tmp_path,
        )
        code, result, plain, refused = done.stdout.splitlines()
        assert (code, plain) == ("2", "0")
        assert done.stderr == f"fedbudget: --model cnn {self.INSTALL}\n"
        assert refused == f"TorchModel {self.INSTALL}"
        assert json.loads(result)["loss"] < 0.5
        assert not (tmp_path / "cnn").exists()

    @pytest.mark.parametrize(
        "code",
        [
            "import fedbudget, fedbudget.models, fedbudget.models.catalogue, fedbudget.training, fedbudget.cli.main",
            "import fedbudget; fedbudget.train(budget='time=0.5s')",
        ],
    )
    def test_nothing_imports_it_until_it_is_needed(self, tmp_path: Path, code: str) -> None:
        assert _python(f"{code}\nimport sys; print('torch' in sys.modules)", tmp_path).stdout == "False\n"


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    from textwrap import dedent

    return subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True, cwd=folder, timeout=120
    )


def _biases_inside(w: Float32) -> Float32:
    """From PyTorch's order, weights [3, 5] and then biases [3], to each class's weights and then its bias."""
    weights, biases = w[:, :15].reshape(-1, 3, 5), w[:, 15:, None]
    return np.ascontiguousarray(np.concatenate([weights, biases], axis=2).reshape(len(w), -1))


def _picked(positions: Sequence[int]) -> Picks:
    return Picks(np.array([[positions]], np.int32), np.zeros(1, np.int64))
