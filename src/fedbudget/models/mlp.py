"""A network with one hidden layer of 64, for classes: the smallest of neural networks, quick enough for any sweep.

Weights are drawn as He et al. (2015) have it for ReLU, from a normal distribution of variance 2/inputs; biases are 0.
"""

from torch import nn

_HIDDEN = 64


def mlp(features: int, classes: int) -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, classes))
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    return network
