"""A model of a person's own, however it is given: as a `Model`, as a PyTorch module, or as what makes one of these."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedbudget import python_file
from fedbudget.errors import UserError, explained
from fedbudget.models.base import Model
from fedbudget.models.description import require_no_arguments
from fedbudget.models.torch_random import ALONE

if TYPE_CHECKING:
    from torch import nn

    OwnModel = Model | nn.Module | Callable[[], Model | nn.Module]
    """What can be given for a model of one's own."""


def as_model(given: Any, *, device: str = "auto") -> Model:
    """The model that is meant.

    Args:
      given: a `Model` as it is; a module, or what makes one, as a `TorchModel` with its usual loss; or what makes a
        `Model` when it is called.
      device: where PyTorch computes, where that is not said by what is given.
    """
    if _is_model(given):
        return _complete(given)
    if _is_module(given):
        return _torch_model(given, device)
    if callable(given):
        require_no_arguments(given)
        with ALONE:  # a function may seed PyTorch
            made = given()
        if _is_model(made):
            return _complete(made)
        if _is_module(made):
            return _torch_model(given, device)
        given = made
    raise UserError(f"`model` must be a name, a PyTorch module or a model, not a {type(given).__name__}")


def load_model(reference: str, *, device: str = "auto") -> Model:
    """The model that a name in a Python file stands for, `net.py:Net`."""
    given = python_file.load(reference)
    with explained(f"{reference} cannot be made"):
        try:
            return as_model(given, device=device)
        except UserError as error:
            raise UserError(f"{reference}: {error}") from None


def _is_model(given: Any) -> bool:
    return not isinstance(given, type) and all(hasattr(given, name) for name in ("descend", "losses", "parameters"))


def _complete(given: Any) -> Model:
    """The model, if it has all that a `Model` has."""
    missing = [name for name in vars(Model) if not name.startswith("_") and not hasattr(given, name)]
    if missing:
        kind = type(given).__name__
        raise UserError(f"`model` {kind} has no {', '.join(missing)}; see fedbudget.models.Model for what they are")
    return given  # type: ignore[no-any-return]


def _is_module(given: Any) -> bool:
    """A module, or a class of modules; where PyTorch is not loaded yet, nothing is."""
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", None)
    return module is not None and (isinstance(given, module) or (isinstance(given, type) and issubclass(given, module)))


def _torch_model(given: Any, device: str) -> Model:
    from fedbudget.models.torch_model import TorchModel

    return TorchModel(given, device=device)
