"""Faster layers for PyTorch on a CPU: 2x2 max-pooling, local response normalization, and
the first convolution of grey images.

`FasterLayers` is a context. Within it, the layers of any module are computed this way.
PyTorch computes everything else, everything on a GPU, and, without numba, pooling and
normalization. The loops are in layer_kernels.py. docs/research/performance.md has the
measurements.

Pooling returns the same bits as PyTorch. The other two layers differ by rounding: they add
in another order, which depends only on the shapes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedbudget.models.compiling import has_numba, import_kernels


class FasterLayers(TorchFunctionMode):
    """A context that replaces the slow layers."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        faster = _FASTER.get(func)
        named = kwargs or {}
        result = None if faster is None else faster(*args, **named)
        return func(*args, **named) if result is None else result


def _pool(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Return the max-pool of 2x2 pixels without a rest; None for any other pooling."""
    size = _pair(kernel_size)
    step = _pair(stride or kernel_size)
    if (size, step, _pair(padding), _pair(dilation)) != ((2, 2), (2, 2), (0, 0), (1, 1)):
        return None
    if return_indices or not _is_known(x) or x.shape[2] % 2 or x.shape[3] % 2:
        return None
    return _apply(_Pool, x)


def _normalize(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor | None:
    """Return the local response normalization with β = 0.75; None for any other β."""
    return _apply(_Normalize, x, size, alpha, k) if beta == 0.75 and _is_known(x) else None


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return the convolution of one channel with stride 1; None for any other.

    The input must not need a gradient.
    """
    if not _is_known(x) or x.shape[1] != 1 or x.requires_grad or not weight.requires_grad:
        return None
    if isinstance(padding, str) or _pair(stride) != (1, 1) or _pair(dilation) != (1, 1):
        return None
    return _apply(_Convolve, x, weight, bias, _pair(padding))


_FASTER: dict[Any, Callable[..., Tensor | None]] = {F.conv2d: _convolve}
if has_numba():
    _FASTER |= {F.max_pool2d: _pool, F.local_response_norm: _normalize}


def _kernels() -> Any:
    return import_kernels("fedbudget.models.torch.layer_kernels")


def _is_known(x: Tensor) -> bool:
    return (
        x.ndim == 4
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
    )


def _pair(size: Any) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size) * (2 // len(size))


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    result: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


class _Pool(torch.autograd.Function):
    """Max-pooling that does not store the index of the largest pixel.

    Finding only the largest value takes a tenth of the time of PyTorch. The backward pass
    finds the index in x: the result may have been changed in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        rows = torch.maximum(x[:, :, 0::2], x[:, :, 1::2])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.zeros(x.shape)
        planes = [_array(each).reshape(-1, *each.shape[2:]) for each in (x, gradient, out)]
        _kernels().to_largest(*planes)
        return out


class _Normalize(torch.autograd.Function):
    """x / (k + α/n Σ x²)^¾ over the n nearest channels.

    PyTorch uses a 3-D pooling for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, alpha: float, k: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.window = size // 2, (size - 1) // 2, np.float32(alpha / size), np.float32(k)
        out = torch.empty(x.shape)
        _kernels().normalize(_array(x.flatten(2)), *ctx.window, _array(out.flatten(2)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        out = torch.empty(x.shape)
        arrays = _array(x.flatten(2)), _array(gradient.flatten(2))
        _kernels().normalize_backward(*arrays, *ctx.window, _array(out.flatten(2)))
        return out, None, None, None


class _Convolve(torch.autograd.Function):
    """PyTorch's convolution with a batched matrix product for the weights' gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.padding = padding
        ctx.shape = weight.shape
        ctx.has_bias = bias is not None
        return F.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        down, along = ctx.padding
        _, _, height, width = ctx.shape
        padded = F.pad(x[:, 0], (along, along, down, down))
        windows = padded.unfold(1, height, 1).unfold(2, width, 1)
        pixels = windows.permute(0, 3, 4, 1, 2).reshape(len(x), height * width, -1)
        weights = torch.bmm(gradient.flatten(2), pixels.transpose(1, 2)).sum(dim=0)
        bias = gradient.sum(dim=(0, 2, 3)) if ctx.has_bias else None
        return None, weights.view(ctx.shape), bias, None


def _array(x: Tensor) -> NDArray[np.float32]:
    """Return a contiguous array that shares the memory of the tensor if possible."""
    array: NDArray[np.float32] = x.detach().contiguous().numpy()
    return array
