"""Any PyTorch module as a model. Needs the extra `fedbudget[torch]`; nothing else in fedbudget imports PyTorch.

All trainable parameters lie in one flat tensor, and their gradients in another, of which the module's own tensors are
views: a local update is one operation, and w goes in and out by one copy.

A batch is a list of row numbers; samples stay bytes, where they are bytes, until they are used. What is random within a
module, such as dropout, is drawn from the mini-batch itself, so that on one mini-batch F_i is one function of w: the
estimates compare F_i at different w, and a run repeats to the bit.

Nodes take turns, and where some hold the same samples and have the same w (Case 3), one does it for all of them. Many
nodes with a small module without convolutions make their updates all at once, with torch.func. Each was measured to be
the faster one there (docs/performance.md), and both compute the same. What cannot be batched, because it is random or
because torch.func does not know it, takes turns. Modules with convolutions have the layers of faster_layers.py.
"""

import copy
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd as _Convolution

from fedbudget.arrays import Float32, Float64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models.base import BaseModel, Descent, Target, batch_rows, first_alike
from fedbudget.models.description import TensorDescription, digest, in_words
from fedbudget.models.faster_layers import FasterLayers

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output, y) to the mean loss over the batch."""

Metric = Callable[[Tensor, Tensor], Any]
"""(output, y) of all samples to a number."""

_SMALL, _MANY = 50_000, 10  # parameters up to which, and nodes from which on, nodes are batched
_ROWS = 1000  # samples that a gradient is taken of at once, when a shard is larger
_PREDICTED = 200  # the same without a gradient: what layers give to each other then stays in the caches
_TABLES = 4  # tables kept as tensors


class TorchModel(BaseModel):
    """Trains an `nn.Module`.

    Args:
      module: what is trained, starting from its own parameters; or a function that makes it, which is then called with
        PyTorch seeded by the run's seed, so that each seed starts from other parameters. The module is copied.
      loss: (output, y) to the mean loss over the batch; cross-entropy for classes and squared error for real targets
        when not given.
      metrics: functions (output, y) to a number, by name, for the test samples; one named `accuracy` takes the place of
        the share of right classes.
      target: what y holds: `classes` (numbers 0, 1, ...), `real`, `raw` (the data's own) or `binary` (±1).
      name: what the model is called in a run's record.
      device: `auto` takes a GPU when there is one.

    >>> from torch import nn
    >>> model = TorchModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    >>> model.parameters
    650
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        *,
        loss: Loss | None = None,
        metrics: Mapping[str, Metric] | None = None,
        target: Target = "classes",
        name: str | None = None,
        device: str = "auto",
    ) -> None:
        self.target: Target = target
        self._make = None if isinstance(module, nn.Module) else module
        made = copy.deepcopy(module) if isinstance(module, nn.Module) else _made(module, 0)
        self.name = name or type(made).__name__.lower()
        self._loss = loss or _default_loss(target)
        self._metrics = dict(metrics or {})
        self._device = _device(device)
        self._module = made.to(self._device)
        self._names = [label for label, parameter in made.named_parameters() if parameter.requires_grad]
        self._w, self._gradient = _flatten(self._module)
        self._own = self._w.cpu().numpy().copy()
        self._still = _constants(self._module)
        self._tables: dict[int, tuple[Table, Tensor, Tensor]] = {}
        self._lock = threading.Lock()
        self._convolves = any(isinstance(part, _Convolution) for part in made.modules())
        self._together = self.parameters <= _SMALL and not self._convolves

    @property
    def parameters(self) -> int:
        return int(self._w.numel())

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        known = dict(self._module.named_parameters())
        return tuple(TensorDescription(label, tuple(known[label].shape)) for label in self._names)

    @property
    def loss_in_words(self) -> str:
        return in_words(self._loss)

    @property
    def frozen(self) -> str:
        still = [each.detach().cpu() for each in self._module.parameters() if not each.requires_grad]
        return digest(each.contiguous().view(torch.uint8).numpy().tobytes() for each in still) if still else ""

    def initial(self, seed: int) -> Float32:
        if self._make is None:
            return self._own.copy()
        flat, _ = _flatten(_made(self._make, seed))
        return flat.numpy().copy()

    def trained(self, w: Float32) -> nn.Module:
        """A copy of the module with its parameters set to w, on the CPU and ready to predict."""
        module = copy.deepcopy(self._module).cpu().eval()
        for parameter in module.parameters():
            parameter.grad = None
        state = dict(module.named_parameters())
        with torch.no_grad():
            for label, values in self._named(torch.from_numpy(w.copy())).items():
                state[label].copy_(values.view_as(state[label]))
        return module

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        # On whole shards this is the figure to report, and on a mini-batch one to compare with that of a local update.
        with self._alone(train=indices.positions.shape[2] > 0), torch.no_grad():
            return self._evaluate(w, shards, indices)

    def descend(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: float,
        best: Float32 | None = None,
        shift: Float32 | None = None,
    ) -> Descent:
        if self._together and len(shards) >= _MANY and indices.positions.shape[2] > 0:
            try:
                with self._alone(train=True):
                    return self._all_at_once(w, shards, indices, eta, best, shift)
            except RuntimeError:  # of torch.func; if something else is wrong, it will be when nodes take turns too
                self._together = False
        return self._in_turn(w, shards, indices, eta, best, shift)

    def _in_turn(
        self, w: Float32, shards: Shards, indices: BatchIndices, eta: float, best: Float32 | None, shift: Float32 | None
    ) -> Descent:
        nodes = len(shards)
        out = np.empty((nodes, self.parameters), np.float32)
        losses, gradients = np.empty(nodes), np.empty_like(out)
        best_losses, first = None, first_alike(shards, indices, w, shift)
        with self._alone(train=True):
            for node in range(nodes):
                if first[node] < node:
                    out[node], losses[node], gradients[node] = (each[first[node]] for each in (out, losses, gradients))
                    continue
                self._set(w[node % len(w)])
                along = None if shift is None else self._tensor(shift[node])
                for update in range(indices.updates):
                    loss = self._backward(shards, indices, node, update)
                    if update == 0:
                        losses[node], gradients[node] = float(loss), self._gradient.cpu().numpy()
                    self._w.add_(self._gradient if along is None else self._gradient + along, alpha=-eta)
                out[node] = self._w.cpu().numpy()
            self._refuse_changed_buffers()
            if best is not None:
                with torch.no_grad():
                    best_losses = self._evaluate(best[None], shards, indices)
        return Descent(out, losses, gradients, best_losses)

    def _all_at_once(
        self, w: Float32, shards: Shards, indices: BatchIndices, eta: float, best: Float32 | None, shift: Float32 | None
    ) -> Descent:
        shape = (len(shards), self.parameters)
        own = torch.from_numpy(np.broadcast_to(w, shape).copy()).to(self._device)
        along = None if shift is None else self._tensor(shift)
        step = vmap(grad_and_value(self._loss_at))
        losses, gradients, best_losses = np.empty(0), np.empty(0, np.float32), None
        for update in range(indices.updates):
            rows = shards.rows[shards.start[:, None] + indices.positions[indices.group, update]]
            x, y = self._batch(shards.table, rows.reshape(-1))
            x, y = x.view(*rows.shape, *x.shape[1:]), y.view(rows.shape)
            found, loss = step(self._named(own), x, y)
            gradient = torch.cat([found[label].reshape(len(shards), -1) for label in self._names], dim=1)
            if update == 0:
                losses, gradients = loss.double().cpu().numpy(), gradient.cpu().numpy().copy()
                if best is not None:
                    at = self._named(torch.from_numpy(best.copy()).to(self._device))
                    with torch.no_grad():
                        best_losses = vmap(self._loss_at, in_dims=(None, 0, 0))(at, x, y).double().cpu().numpy()
            own.add_(gradient if along is None else gradient + along, alpha=-eta)
        return Descent(own.cpu().numpy(), losses, gradients, best_losses)

    def _loss_at(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Of one node's batch, as a function of the parameters, as torch.func wants it."""
        return self._mean_loss(functional_call(self._module, parameters, (x,)), y)

    def _named(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters in w, [parameters] or [nodes, parameters], by their names."""
        known, named, used = dict(self._module.named_parameters()), {}, 0
        for label in self._names:
            size = known[label].numel()
            named[label] = w[..., used : used + size].reshape((*w.shape[:-1], *known[label].shape))
            used += size
        return named

    def accuracy(self, w: Float32, table: Table) -> float | None:
        measure = self._metrics.get("accuracy") or _ACCURACIES.get(self.target)
        if measure is None:
            return None
        return float(measure(*self._predict(w, table)))

    def metrics(self, w: Float32, table: Table) -> dict[str, float]:
        if not self._metrics:
            return {}
        output, y = self._predict(w, table)
        return {name: float(measure(output, y)) for name, measure in self._metrics.items()}

    def _evaluate(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        losses, at_once = np.empty(len(shards)), _ROWS if self._module.training else _PREDICTED
        for node, first in enumerate(first_alike(shards, indices, w)):
            if first < node:
                losses[node] = losses[first]
                continue
            self._set(w[node % len(w)])
            rows = batch_rows(shards, indices, node, 0)
            losses[node] = sum(
                float(self._loss_of(shards.table, part)) * len(part) / len(rows) for part in _parts(rows, at_once)
            )
        return losses

    def _backward(self, shards: Shards, indices: BatchIndices, node: int, update: int) -> Tensor:
        """Loss at the module's w, with its gradient in `self._gradient`."""
        rows = batch_rows(shards, indices, node, update)
        self._gradient.zero_()
        total = torch.zeros((), device=self._device)
        for part in _parts(rows, _ROWS):
            loss = self._loss_of(shards.table, part) * (len(part) / len(rows))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _loss_of(self, table: Table, rows: NDArray[np.int32]) -> Tensor:
        self._seed(zlib.crc32(rows.tobytes()))
        x, y = self._batch(table, rows)
        return self._mean_loss(self._module(x), y)

    def _mean_loss(self, output: Tensor, y: Tensor) -> Tensor:
        loss = self._loss(output, _beside(output, y))
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"{self.name}'s loss must be a tensor of one number, the mean over the batch, not {found}")
        return loss

    def _predict(self, w: Float32, table: Table) -> tuple[Tensor, Tensor]:
        """The module's output for all samples of a table, and their targets."""
        rows = np.arange(len(table), dtype=np.int32)
        with self._alone(train=False), torch.no_grad():
            self._set(w)
            output = torch.cat([self._module(self._batch(table, part)[0]) for part in _parts(rows, _PREDICTED)])
            y = self._batch(table, rows[:0])[1].new_tensor(table.y)
            return output, _beside(output, y)

    def _batch(self, table: Table, rows: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        if id(table) not in self._tables:
            while len(self._tables) >= _TABLES:
                del self._tables[next(iter(self._tables))]
            kind = torch.int64 if self.target == "classes" else torch.float32
            self._tables[id(table)] = table, self._tensor(table.x), self._tensor(table.y).to(kind)
        _, every_x, every_y = self._tables[id(table)]
        index = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        x = every_x[index].to(torch.float32)
        if table.scale != 1:
            x *= table.scale
        return x.view(len(rows), *table.shape) if table.shape else x, every_y[index]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        """On a CPU the very same memory, where it may be written to; a tensor promises that."""
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)

    def _set(self, w: Float32) -> None:
        with torch.no_grad():
            self._w.copy_(torch.from_numpy(np.require(w, np.float32, ("C", "W"))))  # a tensor promises to be writable

    @contextmanager
    def _alone(self, *, train: bool) -> Iterator[None]:
        """The module for ourselves, and the program's random numbers as they were."""
        devices = [self._device] if self._device.type == "cuda" else []
        layers = FasterLayers() if self._convolves else nullcontext()
        with self._lock, torch.random.fork_rng(devices=devices), layers:
            self._module.train(train)
            yield

    def _seed(self, seed: int) -> None:
        # Seeding everything keeps a printed stack for every kind of device that is not here: slower than a small step.
        if self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _refuse_changed_buffers(self) -> None:
        for label, before in self._still.items():
            if not torch.equal(self._module.get_buffer(label), before):
                raise UserError(f"{self.name}: buffer {label} changes while training, but only parameters are averaged")
        self._still = {}  # once is enough


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make() if callable(make) else make
    if not isinstance(module, nn.Module):
        raise UserError(f"TorchModel needs an nn.Module or a function that makes one, not a {type(module).__name__}")
    return module


def _flatten(module: nn.Module) -> tuple[Tensor, Tensor]:
    """One tensor of all trainable parameters, and one of their gradients; the module's own become views of them."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("the module has no parameters to train")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        raise UserError("the module has lazy parameters without a size; pass a batch through it first")
    odd = next((parameter.dtype for parameter in parameters if parameter.dtype != torch.float32), None)
    if odd is not None:
        raise UserError(f"parameters must be float32, not {str(odd).removeprefix('torch.')}; call module.float()")
    w = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradient, used = torch.zeros_like(w), 0
    for parameter in parameters:
        part = slice(used, used + parameter.numel())
        parameter.data = w[part].view_as(parameter)
        parameter.grad = gradient[part].view_as(parameter)
        used += parameter.numel()
    return w, gradient


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """The module's buffers, which must stay as they are; those known not to are refused at once."""
    for label, part in module.named_modules():
        if getattr(part, "running_mean", None) is not None:
            raise UserError(
                f"layer {label or 'itself'} ({type(part).__name__}) keeps running statistics, which are no parameters "
                "and would differ from node to node; use GroupNorm or LayerNorm, or track_running_stats=False"
            )
    return {label: buffer.clone() for label, buffer in module.named_buffers()}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _default_loss(target: Target) -> Loss:
    if target == "classes":
        return F.cross_entropy
    if target in ("real", "raw"):
        return F.mse_loss
    raise UserError(f"TorchModel needs a loss for target {target!r}")


def _beside(output: Tensor, y: Tensor) -> Tensor:
    """Targets [samples] in the shape of an output [samples, 1]: subtracted, the two would make a square."""
    return y.view_as(output) if output.ndim == 2 and output.shape[1] == 1 and y.is_floating_point() else y


def _parts(rows: NDArray[np.int32], size: int) -> Iterator[NDArray[np.int32]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


_ACCURACIES: Mapping[str, Metric] = {
    "classes": lambda output, y: (output.argmax(dim=1) == y).double().mean(),
    "binary": lambda output, y: (torch.where(output > 0, 1.0, -1.0) == y).double().mean(),
}
