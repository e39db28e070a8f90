"""PyTorch models: overhead of fedbudget, and batched nodes.

The paper's network runs in fedbudget and in a bare loop. Nodes run one after the other
and batched.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from benchmarks.contenders import Worker
from benchmarks.measure import take_turns
from benchmarks.workload import BATCH, ETA
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.sampling import Sampler
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.models.torch.networks import cnn
from fedbudget.settings.settings import Settings

_TAU, _SAMPLES = 10, 5_000


def network_speed() -> dict[str, float]:
    """Measure a local update of the paper's network against a bare loop.

    Ratios are for the model alone, and for a whole run, which also evaluates the loss
    of w^f once per round.
    """
    # Many short turns: a busy machine disturbs some, and the best of each counts.
    alone = take_turns({"ours": lambda: _updates(1), "bare": lambda: _bare(1)}, turns=40)
    whole = take_turns({"ours": lambda: _run(5), "bare": lambda: _bare(5)}, turns=10)
    return {
        "bare_milliseconds_per_step": 1000 * alone["bare"] / _TAU,
        "updates_over_bare": alone["ours"] / alone["bare"],
        "run_over_bare": whole["ours"] / whole["bare"],
    }


def batching() -> dict[str, float]:
    """Measure a batched step of all nodes (torch.func) over sequential steps."""
    convolutional = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    small = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return {
        "batched_over_in_turn_convolutional_5_nodes": _batched_over_in_turn(
            convolutional, (1, 28, 28), 5, 2
        ),
        "batched_over_in_turn_small_5_nodes": _batched_over_in_turn(small, (64,), 5, 50),
        "batched_over_in_turn_small_50_nodes": _batched_over_in_turn(small, (64,), 50, 20),
    }


def _run(rounds: int) -> Worker:
    """Prepare a run of one node through the public API, with simulated costs."""
    plan = _plan(rounds)
    return lambda: plan.engine.run(observe=lambda round_, w: None)


def _updates(rounds: int) -> Worker:
    """Prepare only the local updates of these rounds."""
    plan = _plan(rounds)
    model, shards, w = plan.model, plan.shards, plan.model.initial(0)[None]
    sampler = Sampler(shards.size, BATCH, 0)
    drawn = [sampler.round(_TAU) for _ in range(rounds)]

    def work() -> None:
        for indices in drawn:
            model.descend(w, shards, indices, ETA)

    return work


def _plan(rounds: int) -> SimulatedRun:
    settings = Settings(
        model="cnn",
        nodes=1,
        tau=_TAU,
        batch_size=BATCH,
        step_size=ETA,
        budget=("time=1000h",),
        rounds=rounds,
        device="cpu",
    )
    return simulate(settings, Overrides(dataset=_images()))


def _bare(rounds: int) -> Worker:
    """Prepare a plain PyTorch loop for one node, with the same work."""
    part = _images().train
    x, y = torch.from_numpy(part.x).view(-1, 1, 28, 28), torch.from_numpy(part.labels)
    rng = np.random.default_rng(0)
    mini_batches = _mini_batches(np.arange(len(x)), rng)
    module = cnn((1, 28, 28), 10)
    optimizer = torch.optim.SGD(module.parameters(), lr=ETA)

    def work() -> None:
        for _ in range(rounds * _TAU):
            rows = next(mini_batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x[rows].float() / 255), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return work


def _mini_batches(
    shard: "np.ndarray[Any, Any]", rng: np.random.Generator
) -> Iterator[Tensor]:
    while True:
        order = torch.from_numpy(rng.permutation(shard))
        yield from order[: len(order) // BATCH * BATCH].view(-1, BATCH)


@cache
def _images() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (_SAMPLES, 784), dtype=np.uint8)
    classes = tuple("0123456789")
    return Dataset(
        "images",
        Part(x, rng.integers(0, 10, _SAMPLES)),
        classes=classes,
        scale=1 / 255,
        shape=(1, 28, 28),
    )


def _batched_over_in_turn(
    module: nn.Module, shape: tuple[int, ...], nodes: int, steps: int
) -> float:
    x, y = torch.rand(nodes, BATCH, *shape), torch.randint(0, 10, (nodes, BATCH))
    own = {
        name: parameter.detach().clone() for name, parameter in module.named_parameters()
    }
    stacked = {
        name: tensor.expand(nodes, *tensor.shape).clone() for name, tensor in own.items()
    }

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, parameters, (x,)), y)

    gradients: Callable[..., dict[str, Tensor]] = vmap(grad(loss))
    optimizer = torch.optim.SGD(module.parameters(), lr=ETA)

    def batched() -> None:
        for _ in range(steps):
            for name, gradient in gradients(stacked, x, y).items():
                stacked[name] -= ETA * gradient

    def in_turn() -> None:
        for _ in range(steps):
            for node in range(nodes):
                optimizer.zero_grad()
                F.cross_entropy(module(x[node]), y[node]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    best = take_turns({"batched": lambda: batched, "in turn": lambda: in_turn}, turns=4)
    return best["batched"] / best["in turn"]
