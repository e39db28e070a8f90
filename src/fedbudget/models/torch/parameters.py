"""A module's parameters as one flat vector w, and behind them its running statistics. Needs PyTorch.

All parameters that are trained lie in one flat tensor, and their gradients in another, of which the module's own
tensors are views: a local update is one operation, and w goes in and out by one copy. What is frozen stays in the
module, and is no part of w: an adapter on a large frozen module is all that is sent.

Running statistics are buffers that change while training, such as those of batch normalization. They are w's last
numbers, or are left out of w and made at each node: a layer then normalizes by the batch that it is given, as it does
while training. The number of batches that a layer has seen is one of them only where the layer averages by it. A
normalization layer whose parameters are frozen is frozen with its statistics.

Gradients of single samples of a PyTorch module, by torch.func, which is part of PyTorch. Needs PyTorch.

Each sample passes the module alone, as a batch of one, many at once (vmap): a gradient can depend on no other sample.
What is random within a module is drawn for each. Modules that torch.func does not know, and samples that are no rows of
arrays, are taken one after the other.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedbudget.arrays import Float32
from fedbudget.data.shards import Table
from fedbudget.errors import UserError, unknown
from fedbudget.models.base import Rows
from fedbudget.models.description import TensorDescription, digest, require_no_arguments
from fedbudget.models.per_sample import GradientRows
from fedbudget.models.torch.batches import BatchReader
from fedbudget.randomness import ALONE

MakeModule = Callable[[], nn.Module]

# as PyTorch's own layers call them
_RUNNING = "running_"
_COUNT = "num_batches_tracked"


class FlatModule:
    """A module with its parameters in one vector.

    Args:
      average: whether running statistics are in w; they are left out otherwise.
      buffers: the names of buffers that are running statistics, besides those called `running_...`.

    Attributes:
      parameters: all that are trained, [parameters].
      gradient: of them, [parameters].
      statistics: how many numbers of w are behind them.
      keeps_statistics: whether the module has any, in w or not.
    """

    def __init__(
        self, module: nn.Module, *, average: bool = True, buffers: Sequence[str] = ()
    ) -> None:
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise UserError(
                "a module by torch.jit.script cannot be trained here; give the module that it was made of"
            )
        self.module = module
        self._names = [
            label
            for label, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        self.parameters, self.gradient = _flatten(module)
        self._frozen = [part for part in module.modules() if _is_frozen(part, module)]
        labels = _statistics(module, self._frozen, buffers)
        self._labels, self.keeps_statistics = labels, bool(labels)
        self._statistics = labels if average else []
        self._normalize_by_batch = [] if average else _layers_with(module, labels)
        self.statistics = sum(
            module.get_buffer(label).numel() for label in self._statistics
        )
        others = {
            label: buffer.clone()
            for label, buffer in module.named_buffers()
            if label not in self._statistics
        }
        self._left_out = {
            label: others.pop(label)
            for label in list(others)
            if label in labels or _is_count(label)
        }
        self._constants = others

    def tensors(self) -> tuple[TensorDescription, ...]:
        """What w is made of."""
        known = {
            **dict(self.module.named_parameters()),
            **dict(self.module.named_buffers()),
        }
        return tuple(
            TensorDescription(name, tuple(known[name].shape))
            for name in (*self._names, *self._statistics)
        )

    def frozen(self) -> str:
        """A digest of parameters that are not trained and of statistics that do not run; nothing where all do."""
        still = [
            each.detach().cpu()
            for each in self.module.parameters()
            if not each.requires_grad
        ]
        still += [
            each.cpu()
            for label, each in self.module.named_buffers()
            if self._stands_still(label)
        ]
        return (
            digest(
                each.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                for each in still
            )
            if still
            else ""
        )

    def _stands_still(self, label: str) -> bool:
        return label.rpartition(".")[2].startswith(_RUNNING) and label not in self._labels

    def read(self) -> Float32:
        """A copy of w."""
        buffers = [
            self.module.get_buffer(label).to(torch.float32).reshape(-1)
            for label in self._statistics
        ]
        w: Float32 = torch.cat([self.parameters, *buffers]).cpu().numpy()
        return w

    def write(self, w: Float32) -> None:
        values = torch.from_numpy(
            np.require(w, np.float32, ("C", "W"))
        )  # a tensor promises to be writable
        with torch.no_grad():
            self.parameters.copy_(values[: self.parameters.numel()])
        self._write_statistics(self.module, values)

    def train(self, *, training: bool) -> None:
        """To training or to evaluation, but for layers that are frozen in evaluation."""
        self.module.train(training)
        for layer in self._frozen:
            layer.training = False
        for layer in self._normalize_by_batch:
            layer.training = True

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """What buffers change to within is forgotten."""
        before = {label: buffer.clone() for label, buffer in self.module.named_buffers()}
        try:
            yield
        finally:
            with torch.no_grad():
                for label, buffer in before.items():
                    self.module.get_buffer(label).copy_(buffer)

    def _write_statistics(self, module: nn.Module, w: Tensor) -> None:
        used = self.parameters.numel()
        with torch.no_grad():
            for label in self._statistics:
                buffer = module.get_buffer(label)
                values = w[used : used + buffer.numel()].to(buffer.device).view_as(buffer)
                used += buffer.numel()
                if label.endswith("running_var"):
                    values = values.clamp(
                        min=0
                    )  # which it may not be where messages have few bits
                buffer.copy_(values if buffer.is_floating_point() else values.round())

    def named(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters in w, [parameters] or [nodes, parameters], by their names."""
        known = dict(self.module.named_parameters())
        named = {}
        used = 0
        for label in self._names:
            size = known[label].numel()
            named[label] = w[..., used : used + size].reshape(
                (*w.shape[:-1], *known[label].shape)
            )
            used += size
        return named

    def from_named(self, named: dict[str, Tensor], nodes: int) -> Tensor:
        """The other way, [nodes, parameters]."""
        return torch.cat([named[label].reshape(nodes, -1) for label in self._names], dim=1)

    def copied(self, w: Float32) -> nn.Module:
        """A copy of the module with its parameters set to w, on the CPU and to be trained as this one is."""
        self.train(training=True)
        module = copy.deepcopy(self.module).cpu()
        for parameter in module.parameters():
            parameter.grad = None
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        values = torch.from_numpy(w.copy())
        with torch.no_grad():
            for label, own in {**self.named(values), **self._left_out}.items():
                state[label].copy_(own.view_as(state[label]))
        self._write_statistics(module, values)
        return module

    def measured(
        self, w: Float32, batches: Iterable[Callable[[nn.Module], object]]
    ) -> nn.Module:
        """As `copied`, with the running statistics of these batches, each counted alike.

        Args:
          batches: each passes one through a module.
        """
        module = self.copied(w).eval()
        layers: list[Any] = _layers_with(module, self._labels)
        layers = [layer for layer in layers if hasattr(layer, "reset_running_stats")]
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.training = True
            layer.momentum = None
        for batch in batches:
            batch(module)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        return module.eval()

    def refuse_changed_buffers(self, name: str) -> None:
        for label, before in self._constants.items():
            if not torch.equal(self.module.get_buffer(label), before):
                raise UserError(
                    f"{name}: buffer {label} changes while training, and is not known as a running statistic; "
                    f'name it to TorchModel, buffers=["{label}"]'
                )
        self._constants = {}  # once is enough


def made(make: MakeModule, seed: int) -> nn.Module:
    """The module that a function makes, with PyTorch seeded."""
    with ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if callable(make):
            require_no_arguments(make)
        module = make() if callable(make) else make
    if not isinstance(module, nn.Module):
        raise UserError(
            f"TorchModel needs an nn.Module or a function that makes one, not a {type(module).__name__}"
        )
    return module


def _flatten(module: nn.Module) -> tuple[Tensor, Tensor]:
    """One tensor of all trainable parameters, and one of their gradients; the module's own become views of them."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("the module has no parameters to train")
    if any(
        isinstance(parameter, nn.parameter.UninitializedParameter)
        for parameter in parameters
    ):
        raise UserError(
            "the module has lazy parameters without a size; pass a batch through it first"
        )
    odd = next(
        (parameter.dtype for parameter in parameters if parameter.dtype != torch.float32),
        None,
    )
    if odd is not None:
        raise UserError(
            f"parameters must be float32, not {str(odd).removeprefix('torch.')}; call module.float()"
        )
    w = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradient = torch.zeros_like(w)
    used = 0
    for parameter in parameters:
        part = slice(used, used + parameter.numel())
        parameter.data = w[part].view_as(parameter)
        parameter.grad = gradient[part].view_as(parameter)
        used += parameter.numel()
    return w, gradient


def _is_frozen(part: nn.Module, module: nn.Module) -> bool:
    """Whether it stays in evaluation: it was set to it while the module was not, or is all frozen and normalizes."""
    if module.training and not part.training:
        return True
    own = list(part.parameters(recurse=False))
    return (
        _has_statistics(part)
        and bool(own)
        and not any(parameter.requires_grad for parameter in own)
    )


def _is_count(label: str) -> bool:
    return label.rpartition(".")[2] == _COUNT


def _has_statistics(part: nn.Module) -> bool:
    return any(
        name.startswith(_RUNNING) and buffer is not None
        for name, buffer in part.named_buffers(recurse=False)
    )


def _statistics(
    module: nn.Module, frozen: Sequence[nn.Module], buffers: Sequence[str]
) -> list[str]:
    """The names of the buffers that are running statistics."""
    known = dict(module.named_buffers())
    for label in buffers:
        if label not in known:
            raise unknown(
                "buffer", label, known, f"the module has {', '.join(known) or 'none'}"
            )
        if known[label].dtype == torch.bool or known[label].is_complex():
            raise UserError(
                f"buffer {label} must be of numbers to be averaged, not {known[label].dtype}"
            )
    labels = []
    for prefix, part in module.named_modules():
        for name, _ in part.named_buffers(recurse=False):
            label = f"{prefix}.{name}" if prefix else name
            counts = name == _COUNT and getattr(part, "momentum", 0.0) is None
            if label in buffers or (
                (name.startswith(_RUNNING) or counts) and part not in frozen
            ):
                labels.append(label)
    return labels


def _layers_with(module: nn.Module, labels: Sequence[str]) -> list[nn.Module]:
    """The layers that these buffers belong to, without further ones inside."""
    return [
        module.get_submodule(prefix)
        for prefix in dict.fromkeys(label.rpartition(".")[0] for label in labels)
    ]


LossAt = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]
"""(parameters by name, x, y of a batch) to the mean loss."""


@dataclass
class PerSample:
    """How gradients of single samples are taken.

    Args:
      alone: a context in which the module is for ourselves.
      possible: whether torch.func knows the module, as far as was seen.
    """

    flat: FlatModule
    reader: BatchReader
    loss_at: LossAt
    alone: Callable[[], AbstractContextManager[None]]
    possible: bool = True

    def gradients(self, w: Float32, table: Table, rows: Rows) -> GradientRows | None:
        """Of these rows at w; None where they cannot be taken at once."""
        if not self.possible or table.store is not None:
            return None
        try:
            with self.alone():
                self.flat.write(w)
                x, y = self.reader.batch(table, rows)
                each = vmap(grad(self._loss), in_dims=(None, 0, 0), randomness="different")
                found = each(self.flat.named(self.flat.parameters), x, y)
                return GradientRows(self.flat.from_named(found, len(rows)).cpu().numpy())
        except (
            RuntimeError,
            NotImplementedError,
        ):  # of torch.func; if something else is wrong, it will be in turn too
            self.possible = False
            return None

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.loss_at(parameters, x[None], y[None])
