"""What a PyTorch module is scored by where its user says nothing, and where it computes. Needs PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbudget.errors import UserError
from fedbudget.models.base import Target

Loss = Callable[[Any, Tensor], Tensor]
"""(output, y) to the mean loss over the batch."""

Metric = Callable[[Tensor, Tensor], Any]
"""(output, y) of all samples to a number."""


def device_named(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def default_loss(target: Target, class_weights: Sequence[float] | None, device: torch.device) -> Loss:
    """Cross-entropy for y of whole numbers, squared error for y of real ones; both means over the samples."""
    if target not in ("auto", "classes", "real", "raw"):
        raise UserError(f"TorchModel needs a loss for target {target!r}")
    if class_weights is not None and target not in ("auto", "classes"):
        raise UserError(f"class_weights go with classes, not with target {target!r}")
    weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32, device=device)

    def loss(output: Any, y: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise UserError(
                f"the module gives a {type(output).__name__}, of which a loss of your own must make a number"
            )
        if y.is_floating_point():
            if output.shape != y.shape:  # PyTorch would repeat one beside the other, and the loss be of other pairs
                raise UserError(
                    f"the module gives {tuple(output.shape)}, and targets are {tuple(y.shape)}: give it an output for "
                    "each target, or give a loss too"
                )
            return F.mse_loss(output, y)
        if output.ndim < 2 or output.shape[1] < 2:
            raise UserError(f"the module gives {tuple(output.shape)}, which are no scores of classes; give a loss too")
        try:
            if weights is None:
                return F.cross_entropy(output, y)
            # Divided by the number of samples and not by their weights, so that losses of nodes and of parts add up.
            return F.cross_entropy(output, y, weights, reduction="sum") / y.numel()
        except IndexError as error:
            scores, found = output.shape[1], str(error).rstrip(".")
            raise UserError(
                f"the module gives scores of {scores} classes: {found}; give it an output for each class, or a loss too"
            ) from None

    return loss


def beside(output: Any, y: Tensor) -> Tensor:
    """Targets [samples] in the shape of an output [samples, 1]: subtracted, the two would make a square."""
    column = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == 1
    return y.view_as(output) if column and y.ndim == 1 and y.is_floating_point() else y


def classes_right(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(dim=1) == y).double().mean()


def signs_right(output: Tensor, y: Tensor) -> Tensor:
    return (torch.where(output >= 0, 1.0, -1.0) == y).double().mean()
