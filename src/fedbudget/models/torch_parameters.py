"""A module's parameters as one flat vector w. Needs PyTorch.

All parameters that are trained lie in one flat tensor, and their gradients in another, of which the module's own
tensors are views: a local update is one operation, and w goes in and out by one copy. What is frozen stays in the
module, and is no part of w: an adapter on a large frozen module is all that is sent.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fedbudget.arrays import Float32
from fedbudget.errors import UserError

MakeModule = Callable[[], nn.Module]


class FlatModule:
    """A module with its parameters in one vector.

    Attributes:
      w: all parameters that are trained, [parameters].
      gradient: of them, [parameters].
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._names = [label for label, parameter in module.named_parameters() if parameter.requires_grad]
        self.w, self.gradient = _flatten(module)
        self._frozen = _layers_in_evaluation(module)
        self._constants = _constants(module)

    @property
    def parameters(self) -> int:
        return int(self.w.numel())

    def read(self) -> Float32:
        """A copy of w."""
        w: Float32 = self.w.cpu().numpy().copy()
        return w

    def write(self, w: Float32) -> None:
        with torch.no_grad():
            self.w.copy_(torch.from_numpy(np.require(w, np.float32, ("C", "W"))))  # a tensor promises to be writable

    def train(self, *, training: bool) -> None:
        """To training or to evaluation, but for layers that were set to evaluation by themselves: these stay so."""
        self.module.train(training)
        for layer in self._frozen:
            layer.training = False

    def named(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters in w, [parameters] or [nodes, parameters], by their names."""
        known, named, used = dict(self.module.named_parameters()), {}, 0
        for label in self._names:
            size = known[label].numel()
            named[label] = w[..., used : used + size].reshape((*w.shape[:-1], *known[label].shape))
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
        state = dict(module.named_parameters())
        with torch.no_grad():
            for label, values in self.named(torch.from_numpy(w.copy())).items():
                state[label].copy_(values.view_as(state[label]))
        return module

    def refuse_changed_buffers(self, name: str) -> None:
        for label, before in self._constants.items():
            if not torch.equal(self.module.get_buffer(label), before):
                raise UserError(f"{name}: buffer {label} changes while training, but only parameters are averaged")
        self._constants = {}  # once is enough


def made(make: MakeModule, seed: int) -> nn.Module:
    """The module that a function makes, with PyTorch seeded."""
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


def _layers_in_evaluation(module: nn.Module) -> list[nn.Module]:
    """Parts that someone has set to evaluation while the module itself is in training."""
    return [part for part in module.modules() if module.training and not part.training]


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """The module's buffers, which must stay as they are; those known not to are refused at once."""
    for label, part in module.named_modules():
        if getattr(part, "running_mean", None) is not None:
            raise UserError(
                f"layer {label or 'itself'} ({type(part).__name__}) keeps running statistics, which are no parameters "
                "and would differ from node to node; use GroupNorm or LayerNorm, or track_running_stats=False"
            )
    return {label: buffer.clone() for label, buffer in module.named_buffers()}
