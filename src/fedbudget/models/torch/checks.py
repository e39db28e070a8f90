"""Whether a PyTorch module goes with samples and their targets, seen on one batch of them. Needs PyTorch.

It is asked before anything is trained: what PyTorch says of a wrong shape is then an error in one line, which has what
the module was given, in which of its layers that went wrong, and what to do. Classes are looked at of all samples, not
of the batch alone: a rare one would end a run in the middle.

What a PyTorch module is scored by where its user says nothing, and where it computes. Needs PyTorch.
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

_IGNORED = -100  # a class that PyTorch's cross-entropy leaves out
_LONGEST = 300  # characters of what PyTorch says
_OTHERS = (UserError, MemoryError, torch.cuda.OutOfMemoryError)  # which are not of shapes


@dataclass(frozen=True)
class FirstBatch:
    """A batch on trial.

    Args:
      what: cannot be done where it does not fit, such as "linear cannot train on digits".
      inputs, y: as of a batch.
    """

    what: str
    module: nn.Module
    inputs: Any
    y: Tensor

    def passed(self, call: Callable[[Any], Any]) -> Any:
        """What the module gives for it."""
        try:
            return call(self.inputs)
        except _OTHERS:
            raise
        except Exception as error:
            layer, named = _raiser(self.module, error)
            raise UserError(
                f"{self.what}: given a batch of samples {_shapes(self.inputs)}, {named} raised {_in_a_line(error)}; "
                f"{self._todo(layer)}"
            ) from error

    def require_score_of_each_class(self, output: Any, tables: Sequence[Table]) -> None:
        """Refuses classes in these tables that the usual loss finds no score of."""
        if (
            self.y.is_floating_point()
            or not isinstance(output, Tensor)
            or output.ndim < 2
            or output.shape[1] < 2
        ):
            return  # no scores are needed; or none are there, which the loss says
        scores = output.shape[1]
        classes = np.concatenate(
            [table.y for table in tables if table.store is None]
            or [np.empty(0, np.float32)]
        )
        without = classes[((classes < 0) | (classes >= scores)) & (classes != _IGNORED)]
        if len(without):
            odd = int(without.min() if without.min() < 0 else without.max())
            todo = f"give it {odd + 1} outputs" if odd > 0 else "count classes from 0"
            raise UserError(
                f"{self._given(output)}, scores of {scores} classes, and there are samples of class {odd}; {todo}, or "
                "give a loss too"
            )

    def scored(self, loss: Callable[[Any, Tensor], Tensor], output: Any) -> None:
        """Refuses an output of which the loss makes nothing."""
        try:
            loss(output, self.y)
        except _OTHERS:
            raise
        except Exception as error:
            raise UserError(
                f"{self._given(output)}, targets are {_shapes(self.y)}, and the loss raised {_in_a_line(error)}; make "
                "the module give a row of outputs for each sample, or give a loss that takes what it gives"
            ) from error

    def _given(self, output: Any) -> str:
        return f"{self.what}: for a batch of samples {_shapes(self.inputs)} the module gives {_shapes(output)}"

    def _todo(self, layer: nn.Module) -> str:
        if not isinstance(self.inputs, Tensor) or self.inputs.ndim <= 2:
            return "make the module take such a batch"
        sample = list(self.inputs.shape[1:])
        todo = f"make the module take samples {sample}, of {prod(sample)} numbers each"
        flat = any(isinstance(part, nn.Flatten) for part in self.module.modules())
        return (
            f"{todo}; nn.Flatten() makes rows of these"
            if isinstance(layer, nn.Linear) and not flat
            else todo
        )


def refuse_single_sample(name: str, error: ValueError) -> None:
    """Says what to do about a batch of one, where that is what is wrong."""
    if "more than 1 value per channel" in str(error):
        raise UserError(
            f"{name} normalizes by mini-batches; one sample is too few: use a larger `batch_size`, "
            "and no node with a single sample"
        ) from None


def _shapes(value: Any) -> str:
    """Of a tensor, or of several."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return (
            f"{list(value.shape)}"
            if kind == "float32"
            else f"{list(value.shape)} of {kind}"
        )
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shapes(each)}" for name, each in value.items())
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shapes, value))})"
    return f"a {type(value).__name__}"


def _raiser(module: nn.Module, error: Exception) -> tuple[nn.Module, str]:
    """The innermost layer that was being computed, and in words: PyTorch's own do not lead to it in a deep module."""
    names = {id(part): name for name, part in module.named_modules() if name}
    owners = [
        frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    layer = next((owner for owner in reversed(owners) if id(owner) in names), None)
    if layer is None:
        return module, "it"
    shown = repr(layer)
    named = type(layer).__name__ if len(shown.splitlines()) > 1 else shown
    return layer, f"its layer {names[id(layer)]}, {named},"


def _in_a_line(error: Exception) -> str:
    """Without backticks, in which the names of options would be here."""
    text = printable(" ".join(str(error).replace("`", "'").split()), _LONGEST)
    return f"{type(error).__name__}: {text.rstrip('.')}"


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
        raise UserError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}"
        ) from None
    return device


def default_loss(
    target: Target, class_weights: Sequence[float] | None, device: torch.device
) -> Loss:
    """Cross-entropy for y of whole numbers, squared error for y of real ones; both means over the samples."""
    if target not in ("auto", "classes", "real", "raw"):
        raise UserError(f"TorchModel needs a loss for target {target!r}")
    if class_weights is not None and target not in ("auto", "classes"):
        raise UserError(f"class_weights go with classes, not with target {target!r}")
    weights = (
        None
        if class_weights is None
        else torch.tensor(class_weights, dtype=torch.float32, device=device)
    )

    def loss(output: Any, y: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise UserError(
                f"the module gives a {type(output).__name__}, of which a loss of your own must make a number"
            )
        if y.is_floating_point():
            if (
                output.shape != y.shape
            ):  # PyTorch would repeat one beside the other, and the loss be of other pairs
                raise UserError(
                    f"the module gives {tuple(output.shape)}, and targets are {tuple(y.shape)}: give it an output for "
                    "each target, or give a loss too"
                )
            return F.mse_loss(output, y)
        if output.ndim < 2 or output.shape[1] < 2:
            raise UserError(
                f"the module gives {tuple(output.shape)}, which are no scores of classes; give a loss too"
            )
        try:
            if weights is None:
                return F.cross_entropy(output, y)
            # Divided by the number of samples and not by their weights, so that losses of nodes and of parts add up.
            return F.cross_entropy(output, y, weights, reduction="sum") / y.numel()
        except IndexError as error:
            scores = output.shape[1]
            found = str(error).rstrip(".")
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
