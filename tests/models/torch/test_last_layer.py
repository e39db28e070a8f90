"""The last layer of a network, which personal models correct."""

import numpy as np
import pytest
import torch
from torch import nn

from fedbudget.data.shards import Shards, Table
from fedbudget.models.torch.model import TorchModel
from fedbudget.protocol.personal import Sites

ROWS = 30


def table(*, labels: bool = True, features: int = 6) -> Table:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, features)).astype(np.float32)
    y = rng.integers(0, 3, ROWS) if labels else rng.standard_normal(ROWS)
    return Table(x, y.astype(np.float32), labels=labels)


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


def test_layer_gives_the_outputs() -> None:
    """The outputs of the network are linear in what enters the layer."""
    model = TorchModel(network())
    w = model.initial(0)
    rows = table()
    layer = model.last_layer(w, rows)
    assert layer is not None
    assert layer.inputs.shape == (ROWS, 5)
    assert layer.classes
    outputs = layer.inputs @ w[layer.weights].T + w[layer.biases]
    expected = model.outputs(w, rows)
    assert expected is not None
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    np.testing.assert_array_equal(layer.targets, rows.y)


class Twice(nn.Module):
    """A network that uses its last layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = self.layer(torch.tanh(self.layer(x)))
        return passed


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.LogSigmoid()),
        nn.Sequential(nn.Linear(6, 3, bias=False)),
        nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3).requires_grad_(False)),
        Twice(),
    ],
    ids=["activation", "no bias", "frozen", "used twice"],
)
def test_other_ends_have_no_last_layer(module: nn.Module) -> None:
    model = TorchModel(module)
    assert model.last_layer(model.initial(0), table()) is None


def test_own_loss_has_no_last_layer() -> None:
    model = TorchModel(network(1), loss=nn.functional.l1_loss, target="real")
    assert model.last_layer(model.initial(0), table(labels=False)) is None


@pytest.mark.parametrize("labels", [True, False])
def test_only_the_last_layer_is_corrected(*, labels: bool) -> None:
    """Unless the network that was trained alone is chosen."""
    model = TorchModel(network(3 if labels else 1), target="classes" if labels else "real")
    w = model.initial(0)
    rows = table(labels=labels)
    trained = Shards.of(rows, [np.arange(ROWS - 10)])
    votes = np.zeros(10)
    votes[3] = 1.0  # a correction
    (found,) = Sites(model, Shards.whole(rows), trained, w, 1).personal(votes.tolist())
    changed = found.w != w
    last = 3 * 6 if labels else 6  # weights and biases of the last layer
    assert not changed[:-last].any()
    assert changed[-last:].any()
