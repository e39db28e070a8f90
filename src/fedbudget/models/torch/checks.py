"""Checks of a PyTorch module against its samples, and its default loss and device.

`FirstBatch` passes one batch through the module before training. An error of PyTorch
becomes one line with the shape of the batch, the failing layer and a hint. Classes are
checked in all samples: a rare class would stop a run in the middle.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbudget.data.shards import Table
from fedbudget.errors import UserError, printable
from fedbudget.models.base import Target

Loss = Callable[[Any, Tensor], Tensor]
"""(output, y) to the mean loss over the batch."""

Metric = Callable[[Tensor, Tensor], Any]
"""(output, y) of all samples to a number."""

_IGNORED = -100
"""Class that the cross-entropy of PyTorch skips."""
_LONGEST = 300
"""Characters of a message of PyTorch, at most."""
_UNRELATED = (UserError, MemoryError, torch.cuda.OutOfMemoryError)
"""Errors that have nothing to do with shapes."""


@dataclass(frozen=True)
class FirstBatch:
    """A trial batch.

    Args:
      what: start of the message of an error, such as "linear cannot train on digits".
      module: the module to check.
      inputs, y: the batch.
    """

    what: str
    module: nn.Module
    inputs: Any
    y: Tensor

    def passed(self, call: Callable[[Any], Any]) -> Any:
        """Return the module's output."""
        try:
            return call(self.inputs)
        except _UNRELATED:
            raise
        except Exception as error:
            layer, named = _failing_layer(self.module, error)
            raise UserError(
                f"{self.what}: given a batch of samples {_shapes(self.inputs)}, {named} "
                f"raised {_in_a_line(error)}; {self._hint(layer)}"
            ) from error

    def require_score_of_each_class(self, output: Any, tables: Sequence[Table]) -> None:
        """Raise a `UserError` if the tables have a class without a score."""
        if self.y.is_floating_point() or not isinstance(output, Tensor):
            return
        if output.ndim < 2 or output.shape[1] < 2:
            return  # the loss reports that there are no scores
        scores = output.shape[1]
        targets = [table.y for table in tables if table.store is None]
        classes = np.concatenate([np.empty(0, np.float32), *targets])
        outside = ((classes < 0) | (classes >= scores)) & (classes != _IGNORED)
        without = classes[outside]
        if len(without):
            odd = int(without.min() if without.min() < 0 else without.max())
            hint = f"give it {odd + 1} outputs" if odd > 0 else "count classes from 0"
            raise UserError(
                f"{self._returned(output)}, scores of {scores} classes, but there are "
                f"samples of class {odd}; {hint}, or pass a loss"
            )

    def scored(self, loss: Callable[[Any, Tensor], Tensor], output: Any) -> None:
        """Raise a `UserError` if the loss does not accept the output."""
        try:
            loss(output, self.y)
        except _UNRELATED:
            raise
        except Exception as error:
            raise UserError(
                f"{self._returned(output)}, targets are {_shapes(self.y)}, and the loss "
                f"raised {_in_a_line(error)}; return one row of outputs per sample from "
                "the module, or pass a loss for its outputs"
            ) from error

    def _returned(self, output: Any) -> str:
        return (
            f"{self.what}: for a batch of samples {_shapes(self.inputs)} the module "
            f"returns {_shapes(output)}"
        )

    def _hint(self, layer: nn.Module) -> str:
        if not isinstance(self.inputs, Tensor) or self.inputs.ndim <= 2:
            return "the module must accept such a batch"
        sample = list(self.inputs.shape[1:])
        hint = f"the module must accept samples {sample} of {prod(sample)} numbers each"
        flat = any(isinstance(part, nn.Flatten) for part in self.module.modules())
        if isinstance(layer, nn.Linear) and not flat:
            hint += "; nn.Flatten() turns them into rows"
        return hint


def refuse_single_sample(name: str, error: ValueError) -> None:
    """Raise a `UserError` with a hint if the error is about a batch of one sample."""
    if "more than 1 value per channel" in str(error):
        raise UserError(
            f"{name} normalizes by mini-batches; one sample is too few: use a larger "
            "`batch_size`, and no node with a single sample"
        ) from None


def device_named(name: str) -> torch.device:
    """Return a device of PyTorch; a GPU for `auto` if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}"
        ) from None
    return device


def default_loss(
    target: Target, class_weights: Sequence[float] | None, device: torch.device
) -> Loss:
    """Return cross-entropy for integer y and squared error for real y, as sample means.

    Args:
      target: meaning of y.
      class_weights: weight of each class; None for 1.
      device: device of the weights.
    """
    if target not in ("auto", "classes", "real", "raw"):
        raise UserError(f"TorchModel needs a loss for target {target!r}")
    if class_weights is not None and target not in ("auto", "classes"):
        raise UserError(f"class_weights need classes, not target {target!r}")
    weights = None
    if class_weights is not None:
        weights = torch.tensor(class_weights, dtype=torch.float32, device=device)

    def loss(output: Any, y: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise UserError(
                f"the module returns a {type(output).__name__}; pass a loss that accepts it"
            )
        shape = tuple(output.shape)
        if y.is_floating_point():
            # PyTorch would broadcast other shapes, and compare outputs with wrong targets.
            if output.shape != y.shape:
                raise UserError(
                    f"the module returns {shape}, but targets are {tuple(y.shape)}: return "
                    "one output per target, or pass a loss"
                )
            return F.mse_loss(output, y)
        if output.ndim < 2 or output.shape[1] < 2:
            raise UserError(
                f"the module returns {shape}, which are not scores of classes; pass a loss"
            )
        try:
            if weights is None:
                return F.cross_entropy(output, y)
            # The divisor is the number of samples and not the sum of their weights, so that
            # losses of nodes and parts add up.
            return F.cross_entropy(output, y, weights, reduction="sum") / y.numel()
        except IndexError as error:
            raise UserError(
                f"the module returns scores of {output.shape[1]} classes: "
                f"{str(error).rstrip('.')}; return one output per class, or pass a loss"
            ) from None

    return loss


def shaped_like(output: Any, y: Tensor) -> Tensor:
    """Return real targets [samples] in the shape of an output [samples, 1].

    Subtracting the original shapes would broadcast to a square.
    """
    column = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == 1
    return y.view_as(output) if column and y.ndim == 1 and y.is_floating_point() else y


def class_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Return the fraction of samples whose highest score is that of their class."""
    return (output.argmax(dim=1) == y).double().mean()


def sign_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Return the fraction of samples whose output has the sign of y."""
    return (torch.where(output >= 0, 1.0, -1.0) == y).double().mean()


def _shapes(value: Any) -> str:
    """Return the shape of a tensor, or of several, as text."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        shape = f"{list(value.shape)}"
        return shape if kind == "float32" else f"{shape} of {kind}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shapes(each)}" for name, each in value.items())
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shapes, value))})"
    return f"a {type(value).__name__}"


def _failing_layer(module: nn.Module, error: Exception) -> tuple[nn.Module, str]:
    """Return the innermost layer that raised an error, and a text that names it.

    Messages of PyTorch do not name the layer of a deep module.
    """
    names = {id(part): name for name, part in module.named_modules() if name}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in reversed(frames)]
    layer = next((owner for owner in owners if id(owner) in names), None)
    if layer is None:
        return module, "it"
    shown = repr(layer)
    named = type(layer).__name__ if len(shown.splitlines()) > 1 else shown
    return layer, f"its layer {names[id(layer)]}, {named},"


def _in_a_line(error: Exception) -> str:
    """Return an error as one line.

    Backticks are replaced: in our messages they mark options.
    """
    text = printable(" ".join(str(error).replace("`", "'").split()), _LONGEST)
    return f"{type(error).__name__}: {text.rstrip('.')}"
