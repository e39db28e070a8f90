"""Small PyTorch networks and data for them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbudget.arrays import Float32
from fedbudget.data.shards import Shards, Table
from fedbudget.models import TorchModel


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
    vector: Float32 = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()
    return vector


def train_by_sgd(
    module: nn.Module, data: Table, batches: Iterable[Any], rate: float
) -> None:
    """Train with PyTorch's SGD, one step for each mini-batch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for rows in batches:
        optimizer.zero_grad()
        x, y = torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows]).long()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def by_autograd(
    module: nn.Module, data: Table, rows: Any, loss: Any = F.cross_entropy
) -> tuple[float, Float32]:
    """Loss and gradient of a module at its parameters, without fedbudget."""
    x, y = torch.from_numpy(data.scaled(rows)), torch.from_numpy(data.y[rows])
    value = loss(module(x), y.long() if loss is F.cross_entropy else y)
    gradients = torch.autograd.grad(
        value, [each for each in module.parameters() if each.requires_grad]
    )
    return value.item(), flat(gradients)
