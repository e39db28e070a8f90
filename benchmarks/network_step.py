"""A step of the paper's network on one thread: fedbudget, PyTorch and other variants.

A step computes loss and gradient of a mini-batch of 100 images. Processor time is used,
because other processes disturb it least.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contenders import Worker
from benchmarks.measure import take_turns
from benchmarks.workload import BATCH
from fedbudget.models.torch.faster_layers import FasterLayers
from fedbudget.models.torch.networks import cnn

_TURNS = 15
_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)

Around = Callable[[], AbstractContextManager[Any]]


def network_step() -> dict[str, float]:
    """Measure milliseconds of a step, and of an evaluation for keys that name it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        grey = _milliseconds(_contenders(_GREY) | _tried(_GREY))
        colour = _milliseconds(_contenders(_COLOUR))
        return {f"grey, {name}": best for name, best in grey.items()} | {
            f"colour, {name}": best for name, best in colour.items()
        }
    finally:
        torch.set_num_threads(threads)


def _milliseconds(contenders: dict[str, Worker]) -> dict[str, float]:
    for work in contenders.values():
        work()  # compiles kernels
    ready = {name: (lambda work=work: work) for name, work in contenders.items()}
    return {
        name: 1000 * best
        for name, best in take_turns(ready, turns=_TURNS, clock=time.thread_time).items()
    }


def _contenders(shape: tuple[int, int, int]) -> dict[str, Worker]:
    x, y = _images(shape)
    bare, before = cnn(shape, 10), _before(shape)
    return {
        "bare": _step(bare, x, y),
        "before": _step(before, x, y),
        "ours": _step(bare, x, y, FasterLayers),
        "evaluation, bare": _evaluation(bare, x),
        "evaluation, before": _evaluation(before, x),
        "evaluation, ours": _evaluation(bare, x, FasterLayers),
    }


def _tried(shape: tuple[int, int, int]) -> dict[str, Worker]:
    """Variants that are not used."""
    x, y = _images(shape)
    last: dict[str, Any] = {"memory_format": torch.channels_last}
    return {
        "before, channels last": _step(_before(shape).to(**last), x.contiguous(**last), y),
        "before, in parts of 25": _step(_before(shape), x, y, parts=4),
        "before, compiled": _step(torch.compile(_before(shape)), x, y),
        "bare, compiled": _step(torch.compile(cnn(shape, 10)), x, y),
        "bare, bfloat16": _step(
            cnn(shape, 10), x, y, partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        ),
    }


def _images(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    return torch.rand(BATCH, *shape), torch.randint(0, 10, (BATCH,))


def _step(
    module: Any, x: Tensor, y: Tensor, around: Around = nullcontext, parts: int = 1
) -> Worker:
    pieces = list(zip(x.chunk(parts), y.chunk(parts), strict=True))

    def work() -> None:
        module.zero_grad()
        for own_x, own_y in pieces:
            with around():
                loss = F.cross_entropy(module(own_x), own_y) / parts
            loss.backward()  # type: ignore[no-untyped-call]

    return work


def _evaluation(module: nn.Module, x: Tensor, around: Around = nullcontext) -> Worker:
    def work() -> None:
        with torch.no_grad(), around():
            module(x)

    return work


def _before(shape: tuple[int, int, int]) -> nn.Module:
    """The network with the earlier normalization, and with ReLU before pooling."""
    layers = [
        _Banded() if isinstance(layer, nn.LocalResponseNorm) else layer
        for layer in cnn(shape, 10).children()
    ]
    layers[1], layers[2] = layers[2], layers[1]
    return nn.Sequential(*layers)


class _Banded(nn.Module):
    """Local response normalization as a convolution with a band of ones."""

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = _Normalize.apply(x)  # type: ignore[no-untyped-call]
        return normalized


_CHANNEL = torch.arange(32)
_BAND = (((_CHANNEL[:, None] - _CHANNEL).abs() <= 4) * (0.001 / 9)).float()[
    :, :, None, None
]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = F.conv2d(x * x, _BAND).add_(1)
        root = total.rsqrt()
        factor = root.sqrt().mul_(root)
        ctx.save_for_backward(x, factor, total)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, factor, total = ctx.saved_tensors
        spread = F.conv2d((gradient * x).mul_(factor).div_(total), _BAND)
        return (gradient * factor).addcmul_(spread, x, value=-1.5)
