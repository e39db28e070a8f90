"""Parameters of a PyTorch module as one flat vector w, followed by its running statistics.

All trained parameters are in one flat tensor, and their gradients in another one. The
tensors of the module are views of these. A local update is one operation, and reading or
writing w is one copy. Frozen parameters stay in the module and are not in w: for an
adapter on a large frozen module, only the adapter is sent.

Running statistics are buffers that change during training, such as those of batch
normalization. Either they are the last numbers of w, or they are not in w and each node
has its own; a layer then always normalizes by the current batch. The number of batches
that a layer has seen belongs to them only if the layer averages by it. A normalization
layer with frozen parameters has frozen statistics.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbudget.arrays import Float32, Int64
from fedbudget.errors import UserError, unknown
from fedbudget.models.description import TensorDescription, digest, require_no_arguments
from fedbudget.models.torch.batches import call
from fedbudget.randomness import TORCH_RANDOM_LOCK

# Names that the layers of PyTorch use.
_RUNNING = "running_"
_COUNT = "num_batches_tracked"


class FlatModule:
    """A module with its parameters in one vector.

    Args:
      average: put running statistics into w.
      buffers: names of buffers that are running statistics, in addition to those called
        `running_...`.

    Attributes:
      parameters: all trained parameters, [parameters].
      gradient: their gradient, [parameters].
      statistics: number of running statistics in w.
      keeps_statistics: whether the module has running statistics, in w or not.
    """

    def __init__(
        self, module: nn.Module, *, average: bool = True, buffers: Sequence[str] = ()
    ) -> None:
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise UserError(
                "a module of torch.jit.script cannot be trained; pass the original module"
            )
        self.module = module
        self._names = [
            name for name, each in module.named_parameters() if each.requires_grad
        ]
        self.parameters, self.gradient = _flatten(module)
        self._frozen = [part for part in module.modules() if _is_frozen(part, module)]
        self._running = _running_statistics(module, self._frozen, buffers)
        self.keeps_statistics = bool(self._running)
        self._statistics = self._running if average else []
        self._normalize_by_batch = [] if average else _layers_with(module, self._running)
        self.statistics = sum(module.get_buffer(name).numel() for name in self._statistics)

        self._left_out: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        for name, buffer in module.named_buffers():
            if name in self._statistics:
                continue
            changes = name in self._running or _last(name) == _COUNT
            (self._left_out if changes else self._constants)[name] = buffer.clone()

    def tensors(self) -> tuple[TensorDescription, ...]:
        """Return the tensors of w, in order."""
        state = _state(self.module)
        return tuple(
            TensorDescription(name, tuple(state[name].shape))
            for name in (*self._names, *self._statistics)
        )

    def last_linear(self, output: Callable[[], Any]) -> nn.Linear | None:
        """Return the trained layer whose output is that of the module, if it is linear.

        Args:
          output: passes a sample through the module.
        """
        given: list[tuple[nn.Linear, Tensor]] = []
        hooks = [
            each.register_forward_hook(lambda layer, _, out: given.append((layer, out)))
            for each in self.module.modules()
            if type(each) is nn.Linear
        ]
        try:
            result = output()
        finally:
            for hook in hooks:
                hook.remove()
        if not given or not isinstance(result, Tensor):
            return None
        layer, last = given[-1]
        once = sum(each is layer for each, _ in given) == 1
        same = last.data_ptr() == result.data_ptr() and last.numel() == result.numel()
        own = {id(self.module.get_parameter(name)) for name in self._names}
        trained = id(layer.weight) in own and id(layer.bias) in own
        return layer if once and same and trained else None

    def positions(self, layer: nn.Linear) -> tuple[Int64, Int64]:
        """Return the positions in w of a layer's weight and bias, in their shapes."""
        start = 0
        found: dict[int, Int64] = {}
        for name in self._names:
            each = self.module.get_parameter(name)
            numbers = np.arange(start, start + each.numel())
            found[id(each)] = numbers.reshape(tuple(each.shape))
            start += each.numel()
        return found[id(layer.weight)], found[id(layer.bias)]

    def frozen(self) -> str:
        """Return a digest of frozen parameters and statistics; empty if there are none."""
        still = [
            each.detach() for each in self.module.parameters() if not each.requires_grad
        ]
        still += [
            buffer
            for name, buffer in self.module.named_buffers()
            if _last(name).startswith(_RUNNING) and name not in self._running
        ]
        if not still:
            return ""
        flat = (each.cpu().reshape(-1).contiguous() for each in still)
        return digest(each.view(torch.uint8).numpy().tobytes() for each in flat)

    def read(self) -> Float32:
        """Return a copy of w."""
        buffers = [
            self.module.get_buffer(name).to(torch.float32).reshape(-1)
            for name in self._statistics
        ]
        w: Float32 = torch.cat([self.parameters, *buffers]).cpu().numpy()
        return w

    def write(self, w: Float32) -> None:
        """Set the parameters and running statistics to w."""
        values = torch.from_numpy(np.require(w, np.float32, ("C", "W")))
        with torch.no_grad():
            self.parameters.copy_(values[: self.parameters.numel()])
        self._write_statistics(self.module, values)

    def _write_statistics(self, module: nn.Module, w: Tensor) -> None:
        buffers = [module.get_buffer(name) for name in self._statistics]
        parts = _split(w[self.parameters.numel() :], buffers)
        with torch.no_grad():
            for name, buffer, values in zip(self._statistics, buffers, parts, strict=True):
                if name.endswith("running_var"):
                    values = values.clamp(min=0)  # compressed messages may make it negative
                buffer.copy_(values if buffer.is_floating_point() else values.round())

    def train(self, *, training: bool) -> None:
        """Set training or evaluation mode. Frozen layers stay in evaluation mode."""
        self.module.train(training)
        for layer in self._frozen:
            layer.training = False
        for layer in self._normalize_by_batch:
            layer.training = True

    @contextmanager
    def restored_buffers(self) -> Iterator[None]:
        """Restore all buffers at the end."""
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in before.items():
                    self.module.get_buffer(name).copy_(buffer)

    def named(self, w: Tensor) -> dict[str, Tensor]:
        """Return the parameters in w, [parameters] or [nodes, parameters], by name."""
        like = [self.module.get_parameter(name) for name in self._names]
        parts = _split(w[..., : self.parameters.numel()], like)
        return dict(zip(self._names, parts, strict=True))

    def from_named(self, named: dict[str, Tensor], nodes: int) -> Tensor:
        """Return w, [nodes, parameters], from parameters by name."""
        return torch.cat([named[name].reshape(nodes, -1) for name in self._names], dim=1)

    def copy_with(self, w: Float32) -> nn.Module:
        """Return a copy of the module with parameters w, on the CPU, in training mode."""
        self.train(training=True)
        module = copy.deepcopy(self.module).cpu()
        for parameter in module.parameters():
            parameter.grad = None
        state = _state(module)
        values = torch.from_numpy(w.copy())
        with torch.no_grad():
            for name, own in {**self.named(values), **self._left_out}.items():
                state[name].copy_(own.view_as(state[name]))
        self._write_statistics(module, values)
        return module

    def with_statistics_of(self, w: Float32, batches: Iterable[Any]) -> nn.Module:
        """Return a copy of the module with the mean running statistics of some batches.

        Args:
          w: parameters of the copy.
          batches: inputs of the module.
        """
        module = self.copy_with(w).eval()
        layers: list[Any] = _layers_with(module, self._running)
        layers = [layer for layer in layers if hasattr(layer, "reset_running_stats")]
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.training = True
            layer.momentum = None
        for inputs in batches:
            call(module, inputs)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        return module.eval()

    def refuse_changed_buffers(self, name: str) -> None:
        """Raise a `UserError` if training changed a buffer that is not in w.

        Only the first call checks.

        Args:
          name: name of the model, for the message.
        """
        for label, before in self._constants.items():
            if not torch.equal(self.module.get_buffer(label), before):
                raise UserError(
                    f"{name}: buffer {label} changes while training, but is not a running "
                    f'statistic; name it to TorchModel, buffers=["{label}"]'
                )
        self._constants = {}


def create_module(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call a function that creates a module, with PyTorch seeded.

    Args:
      make: the function; another object raises a `UserError`.
      seed: determines the initial parameters.
    """
    module: Any = make
    with TORCH_RANDOM_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if callable(make):
            require_no_arguments(make)
            module = make()
    if not isinstance(module, nn.Module):
        raise UserError(
            "TorchModel needs an nn.Module or a function that returns one, not a "
            f"{type(module).__name__}"
        )
    return module


def inputs_of(layer: nn.Linear, outputs: Sequence[Callable[[], Any]]) -> Tensor:
    """Return what enters a layer, [samples, features].

    Args:
      layer: the layer.
      outputs: each passes a batch through the module.
    """
    entered: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    try:
        for output in outputs:
            output()
    finally:
        hook.remove()
    return torch.cat(entered)


def _flatten(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Move all trained parameters to one tensor, and their gradients to another one."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        raise UserError("the module has no parameters to train")
    for parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UserError(
                "the module has lazy parameters without a size; pass a batch through it "
                "first"
            )
        if parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"parameters must be float32, not {kind}; call module.float()")
    w = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradient = torch.zeros_like(w)
    for parameter, part in zip(parameters, _split(w, parameters), strict=True):
        parameter.data = part
    for parameter, part in zip(parameters, _split(gradient, parameters), strict=True):
        parameter.grad = part
    return w, gradient


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor [..., numbers] in the shapes of other tensors."""
    parts = torch.split(flat, [each.numel() for each in like], dim=-1)
    return [
        part.view((*flat.shape[:-1], *each.shape))
        for part, each in zip(parts, like, strict=True)
    ]


def _is_frozen(part: nn.Module, module: nn.Module) -> bool:
    """Return whether a layer stays in evaluation mode.

    Either it was in evaluation mode while the module was not, or it is a normalization
    layer with frozen parameters.
    """
    if module.training and not part.training:
        return True
    normalizes = any(
        name.startswith(_RUNNING) for name, _ in part.named_buffers(recurse=False)
    )
    own = list(part.parameters(recurse=False))
    return normalizes and bool(own) and not any(each.requires_grad for each in own)


def _running_statistics(
    module: nn.Module, frozen: Sequence[nn.Module], buffers: Sequence[str]
) -> list[str]:
    """Return the names of the buffers that are running statistics."""
    known = dict(module.named_buffers())
    for name in buffers:
        if name not in known:
            known_names = f"the module has {', '.join(known) or 'none'}"
            raise unknown("buffer", name, known, known_names)
        if known[name].dtype == torch.bool or known[name].is_complex():
            raise UserError(
                f"buffer {name} must have real numbers to be averaged, not "
                f"{known[name].dtype}"
            )
    names = []
    for prefix, part in module.named_modules():
        for name, _ in part.named_buffers(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            counts = name == _COUNT and getattr(part, "momentum", 0.0) is None
            runs = (name.startswith(_RUNNING) or counts) and part not in frozen
            if full in buffers or runs:
                names.append(full)
    return names


def _layers_with(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the layers that own these buffers."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return [module.get_submodule(owner) for owner in owners]


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _last(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]
