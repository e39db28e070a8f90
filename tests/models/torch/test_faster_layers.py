"""Faster layers: PyTorch's results, bit for bit or up to rounding; other layers
unchanged.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbudget.models.torch.faster_layers import FasterLayers


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_and_faster(
    layer: Callable[[Tensor], Tensor], x: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Output and gradient of a layer by PyTorch and by the faster version."""
    result = []
    for way in (nullcontext(), FasterLayers()):
        with way:
            own = x.detach().clone().requires_grad_()
            y = layer(own)
            y.backward(images(*y.shape, seed=1))  # type: ignore[no-untyped-call]
            assert own.grad is not None
            result.append((y.detach(), own.grad))
    return result


def assert_same_bits(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    reference, faster = reference_and_faster(layer, x)
    assert all(map(torch.equal, reference, faster))


class TestPooling:
    @pytest.mark.parametrize("shape", [(1, 1, 2, 2), (3, 5, 8, 6), (2, 1, 28, 28)])
    @pytest.mark.parametrize("steps", [1, 1000])  # with 1, many pixels are equal
    @pytest.mark.parametrize(
        "layer", [nn.MaxPool2d(2), nn.MaxPool2d((2, 2), (2,), padding=0, ceil_mode=True)]
    )
    def test_same_bits(self, shape: tuple[int, ...], steps: int, layer: nn.Module) -> None:
        assert_same_bits(layer, (images(*shape) * steps).round() / steps)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.MaxPool2d(3),
            nn.MaxPool2d(2, stride=1),
            nn.MaxPool2d(2, padding=1),
            nn.MaxPool2d(2, dilation=2),
            nn.MaxPool2d(2),  # an odd number of rows and columns
            nn.MaxPool2d(2, ceil_mode=True),
            lambda x: nn.MaxPool2d(2, return_indices=True)(x)[0],
            lambda x: F.max_pool2d(x.double(), 2).float(),
            lambda x: F.max_pool2d(x[0], 2),
        ],
    )
    def test_other_pooling_is_unchanged(self, layer: Callable[[Tensor], Tensor]) -> None:
        assert_same_bits(layer, images(2, 3, 7, 9))

    def test_output_may_change_in_place(self) -> None:
        assert_same_bits(lambda x: F.max_pool2d(x, 2).relu_(), images(2, 3, 8, 8))

    def test_channels_last_memory(self) -> None:
        x = images(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        assert_same_bits(nn.MaxPool2d(2), x)

    def test_relu_before_or_after_pooling(self) -> None:
        """The paper's network applies ReLU after pooling, to a quarter of the values."""
        x = images(3, 4, 8, 8).mul(2).round()
        before = reference_and_faster(lambda x: F.max_pool2d(x.relu(), 2), x)[0]
        after = reference_and_faster(lambda x: F.max_pool2d(x, 2).relu(), x)[1]
        assert all(map(torch.equal, before, after))


class TestNormalization:
    @pytest.mark.parametrize("channels", [1, 3, 9, 32])
    @pytest.mark.parametrize("window", [1, 4, 5, 9])
    # With large values the squares matter.
    @pytest.mark.parametrize(("size", "k"), [(1.0, 1.0), (30.0, 2.0)])
    def test_value_and_gradient(
        self, channels: int, window: int, size: float, k: float
    ) -> None:
        layer = nn.LocalResponseNorm(window, alpha=0.01, k=k)
        x = size * images(2, channels, 5, 4)
        expected, expected_gradient = reference_and_faster(lambda x: layer(x.double()), x)[
            0
        ]
        y, gradient = reference_and_faster(layer, x)[1]
        assert torch.allclose(y, expected.float(), rtol=2e-6, atol=1e-6)
        assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
        assert size == 1 or not torch.allclose(y, x, rtol=0.01)

    def test_three_channels_by_hand(self) -> None:
        x = torch.tensor([3.0, 0.0, -30.0]).view(1, 3, 1, 1)
        factor = (1 + 0.001 / 9 * (3**2 + 30**2)) ** -0.75
        with FasterLayers():
            result = nn.LocalResponseNorm(9, alpha=0.001)(x).flatten().tolist()
        assert result == pytest.approx([3 * factor, 0, -30 * factor], rel=1e-6)

    def test_other_exponent_is_unchanged(self) -> None:
        assert_same_bits(nn.LocalResponseNorm(5, beta=0.5), images(2, 7, 3, 3))

    def test_input_is_not_changed(self) -> None:
        x = images(1, 4, 2, 2)
        before = x.clone()
        reference_and_faster(nn.LocalResponseNorm(9), x)
        assert torch.equal(x, before)


class TestFirstConvolution:
    @pytest.mark.parametrize(
        ("kernel", "padding"), [(5, 2), (3, 0), ((1, 4), (0, 3)), (2, 1)]
    )
    @pytest.mark.parametrize("bias", [True, False])
    def test_gradients_match_pytorch(self, kernel: int, padding: int, bias: bool) -> None:
        layer, x = nn.Conv2d(1, 6, kernel, padding=padding, bias=bias), images(4, 1, 7, 9)
        exact = nn.Conv2d(1, 6, kernel, padding=padding, bias=bias).double()
        exact.load_state_dict(layer.state_dict())
        with FasterLayers():
            y = layer(x)
            y.square().sum().backward()
        exact(x.double()).square().sum().backward()
        assert torch.equal(y, layer(x))
        for own, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
            assert own.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(own.grad.double(), theirs.grad, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.Conv2d(1, 4, 3),  # not the first layer: its input has a gradient
            nn.Conv2d(1, 4, 3, padding="same"),
            nn.Conv2d(1, 4, 3, stride=2),
            nn.Conv2d(1, 4, 3, dilation=2),
            nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        ],
    )
    def test_other_convolutions_are_unchanged(self, layer: nn.Module) -> None:
        assert_same_bits(layer, images(2, 1, 9, 8))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.LocalResponseNorm(3)]
)
def test_faster_layers_are_used(layer: nn.Module) -> None:
    """The other tests would pass if the faster versions were never used."""
    x = images(2, 1, 6, 6).requires_grad_(not isinstance(layer, nn.Conv2d))
    with FasterLayers():
        faster = layer(x).grad_fn
    assert type(faster).__module__ != type(layer(x).grad_fn).__module__
