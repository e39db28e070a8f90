"""Networks: the smallest of all, for classes or a number, and two convolutional ones, for classes.

`mlp` has one hidden layer of 64, quick enough for any sweep. Weights are drawn as He et al. (2015) have it for ReLU,
from a normal distribution of variance 2/inputs; biases are 0.

`cnn` has the paper's nine layers, with z = 1568 for images of 28x28 pixels and 2048 for 32x32.

    5x5x32 convolution, 2x2 max-pool, local response normalization,
    5x5x32 convolution, local response normalization, 2x2 max-pool,
    z x 256 fully connected, 256 x 10 fully connected, softmax (which is in the loss)

`lenet` is the small one that NIID-Bench (Li et al., ICDE 2022) and others compare methods with: a tenth of the
parameters, and some tenth of the time. It starts as PyTorch's layers do.

    5x5x6 convolution, 2x2 max-pool, 5x5x16 convolution, 2x2 max-pool, 120 and 84 hidden, softmax (which is in the loss)

Of `cnn` the paper does not say how it starts. As in the tutorial that it follows, weights are drawn from a normal
distribution of deviation 0.1, cut off at two deviations, biases are 0.1, and ReLU follows every layer with weights but
the last.
"""

from torch import nn

_CHANNELS = 32
_HIDDEN = 256


def mlp(features: int, outputs: int) -> nn.Module:
    """The network for samples of so many features; it gives a score for each class, or one number."""
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, outputs)
    )
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    return network


def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network for images of a shape, (channels, height, width), of which both sides are at least 16."""
    channels, height, width = shape
    z = 16 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(z, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network for images of a shape, (channels, height, width)."""
    channels, height, width = shape
    z = _CHANNELS * -(-height // 4) * -(-width // 4)  # both sides halved twice, upwards
    network = nn.Sequential(
        nn.Conv2d(channels, _CHANNELS, 5, padding=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.ReLU(),  # of a quarter of the numbers: the largest of some is cut off at 0 before or after, all the same
        nn.LocalResponseNorm(9, alpha=0.001),
        nn.Conv2d(_CHANNELS, _CHANNELS, 5, padding=2),
        nn.ReLU(),
        nn.LocalResponseNorm(9, alpha=0.001),
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
