"""Networks for classes: the smallest of all, and the paper's convolutional one.

`mlp` has one hidden layer of 64, quick enough for any sweep. Weights are drawn as He et al. (2015) have it for ReLU,
from a normal distribution of variance 2/inputs; biases are 0.

`cnn` has the paper's nine layers, with z = 1568 for images of 28x28 pixels and 2048 for 32x32.

    5x5x32 convolution, 2x2 max-pool, local response normalization,
    5x5x32 convolution, local response normalization, 2x2 max-pool,
    z x 256 fully connected, 256 x 10 fully connected, softmax (which is in the loss)

The paper does not say how it starts. As in the tutorial that it follows, weights are drawn from a normal distribution
of deviation 0.1, cut off at two deviations, biases are 0.1, and ReLU follows every layer with weights but the last.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CHANNELS, _HIDDEN = 32, 256


def mlp(features: int, classes: int) -> nn.Module:
    """The network for samples of so many features."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, classes))
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    return network


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network for images of a shape, (channels, height, width)."""
    channels, height, width = shape
    z = _CHANNELS * -(-height // 4) * -(-width // 4)  # both sides halved twice, upwards
    network = nn.Sequential(
        nn.Conv2d(channels, _CHANNELS, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        LocalResponseNorm(_CHANNELS),
        nn.Conv2d(_CHANNELS, _CHANNELS, 5, padding=2),
        nn.ReLU(),
        LocalResponseNorm(_CHANNELS),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(z, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, classes),
    )
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            nn.init.trunc_normal_(parameter, std=0.1, a=-0.2, b=0.2)
        else:
            nn.init.constant_(parameter, 0.1)
    return network


class LocalResponseNorm(nn.Module):
    """x / (1 + α Σ x²)^¾ over the nine nearest channels, α = 0.001 / 9.

    The same as PyTorch's own, which pools over three dimensions for it. As a convolution with a band of ones, with its
    derivative written out, it takes a tenth of the time on a CPU, and the whole network a third.
    """

    band: Tensor

    def __init__(self, channels: int, size: int = 9, alpha: float = 0.001) -> None:
        super().__init__()
        channel = torch.arange(channels)
        near = (channel[:, None] - channel[None, :]).abs() <= size // 2
        self.register_buffer("band", (near * (alpha / size)).to(torch.float32)[:, :, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = _Normalize.apply(x, self.band)  # type: ignore[no-untyped-call]
        return normalized


class _Normalize(torch.autograd.Function):
    """y_i = x_i s_i^-¾ with s = 1 + B x², and so dL/dx_j = g_j s_j^-¾ - 1.5 x_j Σ_i B_ij g_i x_i s_i^-7/4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, band: Tensor) -> Tensor:
        total = F.conv2d(x * x, band).add_(1)
        root = total.rsqrt()
        factor = root.sqrt().mul_(root)
        ctx.save_for_backward(x, band, factor, total)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        x, band, factor, total = ctx.saved_tensors
        spread = F.conv2d((gradient * x).mul_(factor).div_(total), band)
        return (gradient * factor).addcmul_(spread, x, value=-1.5), None
