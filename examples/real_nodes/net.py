"""A small residual network with batch normalization, for images of 8 x 8. All machines have it; it is not sent."""

from torch import Tensor, nn


def layer(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(layer(width, width), layer(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


def net() -> nn.Module:
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    return nn.Sequential(layer(1, 8), Residual(8), nn.MaxPool2d(2), layer(8, 16), Residual(16), *ends)
