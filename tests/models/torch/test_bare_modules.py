"""PyTorch modules passed to `train`: default loss, class weights, and the parameters that
are sent.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbudget
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models import TorchModel, loss_over
from support.networks import by_autograd, network, random_w, table

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 5)).astype(np.float32)


class Digits(nn.Module):
    """A two-layer network for digits. The first layer can be frozen."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32).requires_grad_(not frozen)
        self.scores = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(torch.relu(self.first(x.flatten(1))))
        return scores


class WithAdapter(nn.Module):
    """A frozen layer plus a low-rank update, as in LoRA."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layer(x) + self.up(self.down(x))
        return changed


class TestTrain:
    def test_module_and_class_match_torchmodel(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module = Digits()
        bare, wrapped = (
            fedbudget.train(
                model=model, dataset="digits", budget="time=1s", costs="simulated"
            )
            for model in (module, TorchModel(module))
        )
        assert bare.w.tobytes() == wrapped.w.tobytes()
        assert bare.accuracy == wrapped.accuracy
        by_factory, by_class = (
            fedbudget.train(
                model=model, dataset="digits", budget="time=1s", costs="simulated", seed=4
            )
            for model in (TorchModel(Digits), Digits)
        )
        assert by_factory.w.tobytes() == by_class.w.tobytes() != bare.w.tobytes()

    def test_integers_use_cross_entropy(self) -> None:
        classes = RNG.integers(0, 3, 120)
        result = fedbudget.train(
            model=network(),
            shards=[(X, classes)],
            test=(X, classes),
            budget="time=0.5s",
            costs="simulated",
            validation=0,
        )
        module = TorchModel(network()).trained(result.w)
        with torch.no_grad():
            expected = F.cross_entropy(
                module(torch.from_numpy(X)), torch.from_numpy(classes)
            ).item()
        assert result.loss == pytest.approx(expected, rel=1e-5)
        assert result.accuracy is not None

    def test_real_targets_use_squared_error(self) -> None:
        y = X[:, 0] - 0.5 * X[:, 1]
        module = nn.Sequential(nn.Linear(5, 1))
        result = fedbudget.train(
            model=module,
            shards=[(X, y)],
            test=(X, y),
            budget="time=2s",
            costs="simulated",
            validation=0,
        )
        with torch.no_grad():
            output = TorchModel(module).trained(result.w)(torch.from_numpy(X))[:, 0].numpy()
        assert result.loss == pytest.approx(np.square(output - y).mean(), rel=1e-4)
        assert result.loss < 0.05
        assert result.accuracy is None


class TestClassWeights:
    def test_samples_are_weighted_by_class(self) -> None:
        weights, data = (0.5, 1.0, 4.0), table()
        model = TorchModel(network(), class_weights=weights)
        w = random_w(model, 0)

        def by_hand(output: Tensor, y: Tensor) -> Tensor:
            each = F.cross_entropy(output, y.long(), reduction="none")
            return (torch.tensor(weights)[y.long()] * each).mean()

        loss, gradient = by_autograd(model.trained(w), data, np.arange(60), by_hand)
        result = model.descend(w[None], Shards.whole(data), BatchIndices.whole(1), 0.1)
        assert result.losses[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(result.gradients[0], gradient, atol=1e-6)

    def test_losses_of_parts_add_up(self) -> None:
        data = table()
        model = TorchModel(network(), class_weights=(0.5, 1.0, 4.0))
        halves = [
            Table(data.x[rows], data.y[rows]) for rows in (slice(0, 20), slice(20, 60))
        ]
        w = random_w(model, 0)
        first, second = (loss_over(model, w, half) for half in halves)
        assert (20 * first + 40 * second) / 60 == pytest.approx(
            loss_over(model, w, data), rel=1e-5
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"target": "real"}, "class_weights need classes, not target 'real'"),
            (
                {"loss": F.cross_entropy},
                "class_weights apply to the default loss only; weight your own loss",
            ),
        ],
    )
    def test_invalid_class_weights_are_rejected(self, options: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            TorchModel(network(), class_weights=(1.0, 2.0, 3.0), **options)


class TestFrozen:
    def test_frozen_parameters_are_not_sent(self) -> None:
        """Each round sends w to every node and back. Frozen parameters cost no bytes."""
        options: Any = {
            "dataset": "digits",
            "budget": "bytes=1GB",
            "costs": "simulated",
            "nodes": 3,
            "rounds": 4,
            "method": "paper",
            "tau": 2,
        }
        sent = {}
        for frozen in (False, True):
            result = fedbudget.train(model=Digits(frozen=frozen), step_size=0.1, **options)
            sent[frozen] = result.spent["bytes"]
        rounds = 4  # plus one broadcast of w for the final loss
        assert sent[False] - sent[True] == 3 * 4 * (64 * 32 + 32) * (2 * rounds + 1)

    def test_only_the_adapter_changes(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.Linear(64, 10)
            module = nn.Sequential(nn.Flatten(), WithAdapter(layer, rank=4))
        result = fedbudget.train(
            model=module, dataset="digits", case=1, budget="time=5s", costs="simulated"
        )
        assert len(result.w) == 4 * (64 + 10)
        assert result.accuracy is not None
        assert result.accuracy > 0.7
        trained = TorchModel(module).trained(result.w)[1]  # type: ignore[index]
        assert torch.equal(trained.layer.weight, layer.weight)

    def test_evaluation_mode_of_layers_is_kept(self) -> None:
        """A whole module in evaluation mode, as after loading, is trained."""
        module = nn.Sequential(
            nn.Linear(5, 40), nn.Dropout(0.9), nn.Linear(40, 3), nn.Dropout(0.0)
        )
        module[1].eval()
        model, data = TorchModel(module), table()
        w = random_w(model, 0)
        result = model.descend(w[None], Shards.whole(data), BatchIndices.whole(1), 0.1)
        loss, _ = by_autograd(model.trained(w), data, np.arange(60))
        assert result.losses[0] == pytest.approx(loss, rel=1e-5)
        whole = TorchModel(module.eval())
        assert whole.descend(
            w[None], Shards.whole(data), BatchIndices.whole(1), 0.1
        ).losses[0] != pytest.approx(loss)


@pytest.mark.parametrize("as_list", [False, True])
def test_classes_keep_their_numbers(as_list: bool) -> None:
    """Nodes hold two of the module's three classes, not the first one."""
    seen: set[int] = set()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        seen.update(y.tolist())
        return F.cross_entropy(output, y)

    x, y = np.eye(4, dtype=np.float32), np.array([1, 2, 1, 2])
    shard: Any = list(zip(x, y.tolist(), strict=True)) if as_list else (x, y)
    fedbudget.train(
        model=TorchModel(nn.Linear(4, 3), loss=loss),
        shards=[shard],
        rounds=2,
        budget="time=1s",
        costs="simulated",
    )
    assert seen == {1, 2}


def test_text_labels_are_encoded() -> None:
    x, y = np.eye(4, dtype=np.float32), np.array(["dry", "wet", "dry", "wet"])
    result = fedbudget.train(
        model=nn.Linear(4, 2),
        shards=[(x, y)],
        test=(x, y),
        budget="time=2s",
        costs="simulated",
    )
    assert result.accuracy == 1


def test_mapping_as_shard_is_rejected() -> None:
    shard: Any = {"x": np.eye(4), "y": np.arange(4)}
    message = r"shard 0 must be \(x, y\), or a sequence of samples .* not a dict"
    with pytest.raises(UserError, match=message):
        fedbudget.train(model=nn.Linear(4, 4), shards=[shard])


class TestRejected:
    def test_class_with_required_arguments(self) -> None:
        message = (
            "WithAdapter cannot be called without arguments: "
            "missing a required argument: 'layer'; pass"
        )
        with pytest.raises(UserError, match=message):
            TorchModel(WithAdapter)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=message):
            fedbudget.train(model=WithAdapter, dataset="digits", budget="time=1s")  # type: ignore[arg-type]

    def test_loss_given_by_name(self) -> None:
        with pytest.raises(UserError, match=r"a loss is a function of .*, not 'mse'"):
            TorchModel(nn.Linear(5, 1), loss="mse")  # type: ignore[arg-type]

    def test_loss_without_gradient(self) -> None:
        model = TorchModel(
            nn.Linear(5, 1),
            loss=lambda output, y: F.mse_loss(output, y).detach(),
            target="real",
        )
        with pytest.raises(UserError, match="linear's loss has no gradient"):
            fedbudget.train(
                model=model, shards=[(X, X[:, 0])], budget="time=1s", costs="simulated"
            )
