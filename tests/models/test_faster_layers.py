"""Layers computed faster: PyTorch's own results, to the bit or but for rounding, and
nothing else is touched.
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


def both_ways(layer: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Output and gradient of a layer by PyTorch, and faster."""
    found = []
    for way in (nullcontext(), FasterLayers()):
        with way:
            own = x.detach().clone().requires_grad_()
            y = layer(own)
            y.backward(images(*y.shape, seed=1))  # type: ignore[no-untyped-call]
            assert own.grad is not None
            found.append((y.detach(), own.grad))
    return found


class TestPooling:
    @pytest.mark.parametrize("shape", [(1, 1, 2, 2), (3, 5, 8, 6), (2, 1, 28, 28)])
    @pytest.mark.parametrize(
        "steps", [1, 1000]
    )  # with large steps many pixels are equally large
    @pytest.mark.parametrize(
        "layer", [nn.MaxPool2d(2), nn.MaxPool2d((2, 2), (2,), padding=0, ceil_mode=True)]
    )
    def test_gives_the_same_bits(
        self, shape: tuple[int, ...], steps: int, layer: nn.Module
    ) -> None:
        (y, gradient), (faster, faster_gradient) = both_ways(
            layer, (images(*shape) * steps).round() / steps
        )
        assert torch.equal(y, faster)
        assert torch.equal(gradient, faster_gradient)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.MaxPool2d(3),
            nn.MaxPool2d(2, stride=1),
            nn.MaxPool2d(2, padding=1),
            nn.MaxPool2d(2, dilation=2),
            nn.MaxPool2d(2),  # of seven rows and nine columns
            nn.MaxPool2d(2, ceil_mode=True),
            lambda x: nn.MaxPool2d(2, return_indices=True)(x)[0],
            lambda x: F.max_pool2d(x.double(), 2).float(),
            lambda x: F.max_pool2d(x[0], 2),
        ],
    )
    def test_of_another_kind_is_pytorchs(self, layer: Callable[[Tensor], Tensor]) -> None:
        (y, gradient), (faster, faster_gradient) = both_ways(layer, images(2, 3, 7, 9))
        assert torch.equal(y, faster)
        assert torch.equal(gradient, faster_gradient)

    def test_what_follows_may_change_it_in_place(self) -> None:
        (y, gradient), (faster, faster_gradient) = both_ways(
            lambda x: F.max_pool2d(x, 2).relu_(), images(2, 3, 8, 8)
        )
        assert torch.equal(y, faster)
        assert torch.equal(gradient, faster_gradient)

    def test_pixels_may_lie_in_any_order(self) -> None:
        x = images(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        (y, gradient), (faster, faster_gradient) = both_ways(nn.MaxPool2d(2), x)
        assert torch.equal(y, faster)
        assert torch.equal(gradient, faster_gradient)

    def test_cut_off_at_zero_before_or_after_is_the_same(self) -> None:
        """The paper's network has it after, where there is a quarter to cut off."""
        x = images(3, 4, 8, 8).mul(2).round()
        before = both_ways(lambda x: F.max_pool2d(x.relu(), 2), x)[0]
        after = both_ways(lambda x: F.max_pool2d(x, 2).relu(), x)[1]
        assert all(map(torch.equal, before, after))


class TestNormalization:
    @pytest.mark.parametrize("channels", [1, 3, 9, 32])
    @pytest.mark.parametrize("window", [1, 4, 5, 9])
    @pytest.mark.parametrize(
        ("size", "k"), [(1.0, 1.0), (30.0, 2.0)]
    )  # with large values the squares matter
    def test_is_pytorchs_in_value_and_gradient(
        self, channels: int, window: int, size: float, k: float
    ) -> None:
        layer = nn.LocalResponseNorm(window, alpha=0.01, k=k)
        x = size * images(2, channels, 5, 4)
        expected, expected_gradient = both_ways(lambda x: layer(x.double()), x)[0]
        y, gradient = both_ways(layer, x)[1]
        assert torch.allclose(y, expected.float(), rtol=2e-6, atol=1e-6)
        assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
        assert size == 1 or not torch.allclose(y, x, rtol=0.01)

    def test_by_hand_of_three_channels(self) -> None:
        x = torch.tensor([3.0, 0.0, -30.0]).view(1, 3, 1, 1)
        factor = (1 + 0.001 / 9 * (3**2 + 30**2)) ** -0.75
        with FasterLayers():
            found = nn.LocalResponseNorm(9, alpha=0.001)(x).flatten().tolist()
        assert found == pytest.approx([3 * factor, 0, -30 * factor], rel=1e-6)

    def test_with_another_exponent_is_pytorchs(self) -> None:
        (y, gradient), (faster, faster_gradient) = both_ways(
            nn.LocalResponseNorm(5, beta=0.5), images(2, 7, 3, 3)
        )
        assert torch.equal(y, faster)
        assert torch.equal(gradient, faster_gradient)

    def test_leaves_its_input_as_it_was(self) -> None:
        x = images(1, 4, 2, 2)
        before = x.clone()
        both_ways(nn.LocalResponseNorm(9), x)
        assert torch.equal(x, before)


class TestFirstConvolution:
    @pytest.mark.parametrize(
        ("kernel", "padding"), [(5, 2), (3, 0), ((1, 4), (0, 3)), (2, 1)]
    )
    @pytest.mark.parametrize("bias", [True, False])
    def test_has_pytorchs_gradients(self, kernel: int, padding: int, bias: bool) -> None:
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
            nn.Conv2d(1, 4, 3),  # within a network, where its input has a gradient too
            nn.Conv2d(1, 4, 3, padding="same"),
            nn.Conv2d(1, 4, 3, stride=2),
            nn.Conv2d(1, 4, 3, dilation=2),
            nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        ],
    )
    def test_of_another_kind_is_pytorchs(self, layer: nn.Module) -> None:
        (y, gradient), (faster, faster_gradient) = both_ways(layer, images(2, 1, 9, 8))
        assert torch.equal(y, faster)
        assert torch.equal(gradient, faster_gradient)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.LocalResponseNorm(3)]
)
def test_within_the_context_alone_another_function_computes_it(layer: nn.Module) -> None:
    """Nothing above would notice if the faster ones were never used."""
    x = images(2, 1, 6, 6).requires_grad_(not isinstance(layer, nn.Conv2d))
    with FasterLayers():
        faster = layer(x).grad_fn
    assert type(faster).__module__ != type(layer(x).grad_fn).__module__
