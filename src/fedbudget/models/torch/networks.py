"""Small networks: `mlp` for classes or a number, `cnn` and `lenet` for images with classes.

`mlp` has one hidden layer of 64, fast enough for any sweep. Weights are normal with
variance 2/inputs (He et al., 2015, for ReLU); biases are 0.

`cnn` has the nine layers of the paper, with z = 1568 for 28x28 pixels and 2048 for 32x32:

    5x5x32 convolution, 2x2 max-pool, local response normalization,
    5x5x32 convolution, local response normalization, 2x2 max-pool,
    z x 256 fully connected, 256 x 10 fully connected, softmax (in the loss)

The paper does not specify its initial parameters. As in the tutorial that the paper
follows, weights are normal with standard deviation 0.1, truncated at two deviations, and
biases are 0.1. ReLU follows every layer with weights except the last.

`lenet` is the small network of NIID-Bench (Li et al., ICDE 2022) and other comparisons. It
has a tenth of the parameters and takes about a tenth of the time. It starts with PyTorch's
defaults.

    5x5x6 convolution, 2x2 max-pool, 5x5x16 convolution, 2x2 max-pool,
    120 hidden, 84 hidden, softmax (in the loss)

With `dropout`, a share of the values of each hidden, fully connected layer is set to 0 in
training. The parameters are the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

_CHANNELS = 32
_HIDDEN = 256


def mlp(features: int, outputs: int, dropout: float = 0.0) -> nn.Module:
    """Create the network; it returns a score for each class, or one number."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, 64),
        _hidden(dropout),
        nn.Linear(64, outputs),
    )
    return _started(network, partial(nn.init.kaiming_normal_, nonlinearity="relu"), 0.0)


def lenet(shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Module:
    """Create the network for images (channels, height, width) of at least 16x16 pixels."""
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
        _hidden(dropout),
        nn.Linear(120, 84),
        _hidden(dropout),
        nn.Linear(84, classes),
    )


def cnn(shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Module:
    """Create the network for images (channels, height, width)."""
    channels, height, width = shape
    z = (
        _CHANNELS * -(-height // 4) * -(-width // 4)
    )  # both sides are halved twice, rounded up
    network = nn.Sequential(
        nn.Conv2d(channels, _CHANNELS, 5, padding=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.ReLU(),  # after the pool: the same result from a quarter of the numbers
        nn.LocalResponseNorm(9, alpha=0.001),
        nn.Conv2d(_CHANNELS, _CHANNELS, 5, padding=2),
        nn.ReLU(),
        nn.LocalResponseNorm(9, alpha=0.001),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(z, _HIDDEN),
        _hidden(dropout),
        nn.Linear(_HIDDEN, classes),
    )
    return _started(network, partial(nn.init.trunc_normal_, std=0.1, a=-0.2, b=0.2), 0.1)


def _hidden(dropout: float) -> nn.Module:
    """Create the function after a hidden layer."""
    if not dropout:
        return nn.ReLU()
    return nn.Sequential(nn.ReLU(), nn.Dropout(dropout))


def _started(network: nn.Module, draw: Callable[[Tensor], Any], bias: float) -> nn.Module:
    """Draw the weights, and set all biases to one value."""
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            draw(parameter)
        else:
            nn.init.constant_(parameter, bias)
    return network
