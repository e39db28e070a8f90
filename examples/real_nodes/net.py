"""A small residual network with batch normalization, for 8 x 8 images.

Every machine needs a copy of this file; no code is sent.
"""

from torch import Tensor, nn


def layer(inputs: int, outputs: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def net() -> nn.Module:
    first = layer(1, 8), Residual(layer(8, 8), layer(8, 8)), nn.MaxPool2d(2)
    second = layer(8, 16), Residual(layer(16, 16), layer(16, 16))
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    return nn.Sequential(*first, *second, *head)
