"""PyTorch modules: input shapes, parameters, buffers and random layers; rejected
modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbudget
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models import TorchModel, loss_over
from support.networks import by_autograd, flat, network, random_w, table, three_nodes


class TestInputs:
    @pytest.mark.parametrize("shape", [(), (1, 2, 3), (6, 1)])
    def test_sample_shape_is_kept(self, shape: tuple[int, ...]) -> None:
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
        model.losses(model.initial(0)[None], Shards.whole(data), BatchIndices.whole(1))
        assert seen == [(4, *(shape or (6,)))] * 2

    def test_image_rows_are_kept(self) -> None:
        image = np.arange(6, dtype=np.float32).reshape(1, 6)
        kept: list[Tensor] = []

        class Keeps(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                kept.append(x)
                return super().forward(x.flatten(1))

        model = TorchModel(Keeps(6, 2))
        model.accuracy(
            model.initial(0), Table(image, np.zeros(1, np.float32), shape=(1, 2, 3))
        )
        assert kept[0].tolist() == [[[[0, 1, 2], [3, 4, 5]]]]

    @pytest.mark.parametrize(
        ("target", "kind"),
        [("classes", torch.int64), ("real", torch.float32), ("raw", torch.float32)],
    )
    def test_target_dtype(self, target: Any, kind: torch.dtype) -> None:
        kinds: list[torch.dtype] = []

        def loss(output: Tensor, y: Tensor) -> Tensor:
            kinds.append(y.dtype)
            return output.mean()

        model = TorchModel(
            nn.Linear(5, 3), loss=loss, metrics={"loss": loss}, target=target
        )
        loss_over(model, model.initial(0), table())
        model.metrics(model.initial(0), table())
        assert kinds == [kind, kind]


class TestParameters:
    def test_frozen_parameters_stay_unchanged(self) -> None:
        """They are not part of w."""
        module = network()
        assert isinstance(module, nn.Sequential)
        for parameter in module[0].parameters():
            parameter.requires_grad_(False)
        frozen = flat(list(module[0].parameters()))
        model, data = TorchModel(module), table()
        assert model.parameters == 7 * 3 + 3
        w = random_w(model, 0)
        result = model.descend(w[None], Shards.whole(data), BatchIndices.whole(1, 3), 0.5)
        trained = model.trained(result.w[0])
        assert isinstance(trained, nn.Sequential)
        assert np.array_equal(flat(list(trained[0].parameters())), frozen)
        assert np.array_equal(flat(list(trained[2].parameters())), result.w[0])
        _, gradient = by_autograd(model.trained(w), data, np.arange(60))
        np.testing.assert_allclose(result.gradients[0], gradient, atol=1e-6)

    def test_tied_parameters_appear_once(self) -> None:
        """The gradient is the sum over both uses."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(5, 5)
                self.second = nn.Linear(5, 5)
                self.scores = nn.Linear(5, 3)
                self.second.weight = self.first.weight

            def forward(self, x: Tensor) -> Tensor:
                scores: Tensor = self.scores(
                    torch.tanh(self.second(torch.tanh(self.first(x))))
                )
                return scores

        model, data = TorchModel(Tied()), table()
        assert model.parameters == 25 + 5 + 5 + 18
        w = random_w(model, 0)
        result = model.descend(w[None], Shards.whole(data), BatchIndices.whole(1, 2), 0.5)
        loss, gradient = by_autograd(model.trained(w), data, np.arange(60))
        assert result.losses[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(result.gradients[0], gradient, atol=1e-6)
        trained = model.trained(result.w[0])
        assert isinstance(trained, Tied)
        assert trained.first.weight is trained.second.weight

    def test_unused_parameter_has_no_gradient(self) -> None:
        module = nn.Linear(5, 3)
        module.extra = nn.Parameter(torch.ones(4))
        model = TorchModel(module)
        result = model.descend(
            model.initial(0)[None], Shards.whole(table()), BatchIndices.whole(1, 2), 0.5
        )
        assert result.gradients[0].tolist().count(0.0) == 4
        assert (result.w[0] == 1).sum() == 4

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (
                nn.Linear(5, 3).half(),
                r"parameters must be float32, not float16; call module\.float\(\)",
            ),
            (nn.Linear(5, 3).double(), "parameters must be float32, not float64"),
            (
                nn.Linear(5, 3).requires_grad_(False),
                "the module has no parameters to train",
            ),
            (nn.ReLU(), "the module has no parameters to train"),
            (
                lambda: "network",
                "needs an nn.Module or a function that returns one, not a str",
            ),
            (3, "needs an nn.Module or a function that returns one, not a int"),
        ],
    )
    def test_untrainable_modules_are_rejected(self, module: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            TorchModel(module)

    @pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
    def test_lazy_modules_need_a_size(self) -> None:
        lazy = nn.LazyLinear(3)
        message = "lazy parameters without a size; pass a batch through it first"
        with pytest.raises(UserError, match=message):
            TorchModel(lazy)
        lazy(torch.zeros(1, 5))
        assert TorchModel(lazy).parameters == 18


class Counts(nn.Linear):
    """A layer with a buffer that grows by `by` at each training step."""

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
        "norm",
        [nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.LayerNorm(4)],
        ids=str,
    )
    def test_normalization_without_buffers(self, norm: nn.Module) -> None:
        model, data = (
            TorchModel(nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3))),
            table(),
        )
        w = random_w(model, 0)
        result = model.descend(w[None], Shards.whole(data), BatchIndices.whole(1, 2), 0.1)
        _, gradient = by_autograd(model.trained(w).train(), data, np.arange(60))
        np.testing.assert_allclose(result.gradients[0], gradient, atol=1e-6)

    def test_constant_buffer_is_used(self) -> None:
        model, data = TorchModel(Counts(by=0.0)), table()
        w = random_w(model, 0)
        result = model.descend(w[None], Shards.whole(data), BatchIndices.whole(1, 2), 0.1)
        loss, _ = by_autograd(model.trained(w), data, np.arange(60))
        assert result.losses[0] == pytest.approx(loss, rel=1e-5)
        assert model.parameters == 18

    def test_changing_buffer_is_rejected(self) -> None:
        model = TorchModel(Counts(by=1.0))
        message = r"counts: buffer steps changes .*, buffers=\[\"steps\"\]"
        with pytest.raises(UserError, match=message):
            model.descend(
                model.initial(0)[None], Shards.whole(table()), BatchIndices.whole(1), 0.1
            )


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)
    )


class TestRandomLayers:
    def setup_method(self) -> None:
        self.model = TorchModel(dropping)
        self.data = table(features=64, classes=10)
        self.shards = three_nodes(self.data)
        self.w = self.model.initial(0)[None]

    def test_loss_is_deterministic_per_batch(self) -> None:
        indices = Sampler(self.shards.size, 6, seed=0).round(2)
        first, again = (self.model.losses(self.w, self.shards, indices) for _ in range(2))
        result = self.model.descend(self.w, self.shards, indices, 0.1, best=self.w[0])
        np.testing.assert_array_equal(first, again)
        np.testing.assert_allclose(result.losses, first, rtol=1e-6)
        assert result.best_losses is not None
        np.testing.assert_allclose(result.best_losses, first, rtol=1e-6)

    def test_same_batch_same_gradient(self) -> None:
        rows = np.arange(60)
        shards = Shards.of(self.data, [rows, rows])
        result = self.model.descend(
            self.w, shards, Sampler(shards.size, 6, seed=0).round(3), 0.1
        )
        np.testing.assert_array_equal(result.w[0], result.w[1])

    def test_separate_shard_has_same_updates(self) -> None:
        """As on a node that holds no other data."""
        indices = Sampler(self.shards.size, 6, seed=0).round(3)
        among = self.model.descend(self.w, self.shards, indices, 0.1)
        for node, rows in enumerate(map(self.shards.rows_of, range(len(self.shards)))):
            own = Shards.whole(replace(self.data, x=self.data.x[rows], y=self.data.y[rows]))
            alone = self.model.descend(
                self.w, own, Sampler(own.size, 6, seed=0).round(3), 0.1
            )
            np.testing.assert_array_equal(alone.w[0], among.w[node])

    def test_other_batches_drop_other_units(self) -> None:
        """One sample in 40 mini-batches that differ in the other sample; without dropout
        all scores would be equal.
        """
        scores: list[float] = []

        def loss(output: Tensor, y: Tensor) -> Tensor:
            scores.append(output[0, 0].item())
            return F.cross_entropy(output, y)

        model = TorchModel(dropping, loss=loss)
        for other in range(1, 41):
            model.losses(self.w, Shards.whole(self.data), _picked([0, other]))
        assert len(set(scores)) > 20

    def test_training_mode_only_for_updates(self) -> None:
        """Losses of mini-batches use training mode too, to compare with those of an
        update.
        """
        modes: list[bool] = []

        class RecordsMode(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                modes.append(self.training)
                return super().forward(x)

        model = TorchModel(
            RecordsMode(64, 10), metrics={"mean": lambda output, _: output.mean()}
        )
        w = model.initial(0)

        def modes_of(work: Callable[[], object]) -> set[bool]:
            modes.clear()
            work()
            return set(modes)

        whole = BatchIndices.whole(3)
        some = Sampler(self.shards.size, 6, seed=0).round(1)
        for indices in (whole, some):
            modes.clear()
            model.descend(w[None], self.shards, indices, 0.1, best=w)
            assert set(modes) == {True}
        assert modes_of(lambda: model.losses(w[None], self.shards, some)) == {True}
        assert modes_of(lambda: model.losses(w[None], self.shards, whole)) == {False}
        assert modes_of(lambda: loss_over(model, w, self.data)) == {False}
        assert modes_of(lambda: model.accuracy(w, self.data)) == {False}
        assert modes_of(lambda: model.metrics(0 * w, self.data)) == {False}

    def test_run_repeats_bit_for_bit(self) -> None:
        """The run leaves the program's random state unchanged, and does not depend on
        earlier use of the model.
        """
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        first = fedbudget.train(
            model=TorchModel(dropping),
            dataset="digits",
            case=2,
            budget="time=2s",
            costs="simulated",
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(6)
        again = fedbudget.train(
            model=TorchModel(dropping),
            dataset="digits",
            case=2,
            budget="time=2s",
            costs="simulated",
        )
        np.testing.assert_array_equal(first.w, again.w)
        assert (first.loss, first.accuracy) == (again.loss, again.accuracy)
        used = fedbudget.train(
            model=self.model, dataset="digits", case=2, budget="time=2s", costs="simulated"
        )
        np.testing.assert_array_equal(first.w, used.w)


def _picked(positions: Sequence[int]) -> BatchIndices:
    return BatchIndices(np.array([[positions]], np.int32), np.zeros(1, np.int64))


@pytest.mark.filterwarnings("ignore")  # PyTorch deprecates scripted modules
def test_scripted_modules_are_rejected() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 3)))
    for module in (scripted, nn.Sequential(nn.Linear(5, 4), scripted)):
        with pytest.raises(UserError, match=r"torch\.jit\.script"):
            TorchModel(module)
