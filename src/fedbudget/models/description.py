"""Description of a model without its code, to compare models on two machines.

Averaging parameters requires the same tensors in w, the same loss and the same kind of
targets. A custom loss is compared by its name and a digest of its source, without comments
and whitespace. Variables that a function takes from its surroundings are not compared, nor
is the code of a module.

`NamedTensors` maps the flat w to tensors by name, such as weights and biases.
"""

import ast
import functools
import inspect
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.models.base import Model

# Another machine prints these texts, so they must be short and without control characters.
Text = Annotated[str, Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
_FROZEN = "the frozen part"


@dataclass(frozen=True)
class TensorDescription:
    """A part of w, such as the weights of a layer.

    Args:
      type: of its numbers.
    """

    name: Text
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**40)], ...], Meta(max_length=16)]
    type: Text = "float32"

    def __str__(self) -> str:
        return f"{_shape_text(self.shape)} of {self.type}"


@dataclass(frozen=True)
class ModelDescription:
    """A custom model.

    Args:
      name: for messages; models with different names can be the same.
      kind: class of the model, such as `TorchModel`.
      tensors: the tensors of w, in order.
      loss: the loss as text.
      target: meaning of y, see `Model`.
      frozen: digest of the parameters that are not trained; empty if all are trained.
    """

    name: Text
    kind: Text
    tensors: Annotated[tuple[TensorDescription, ...], Meta(max_length=20_000)]
    loss: Text
    target: Text
    frozen: Text = ""

    def difference(self, other: "ModelDescription", here: str, there: str) -> str | None:
        """Return the first difference to another model as text; None if there is none.

        Args:
          here, there: locations of this model and of the other one, for the text.

        >>> def net(size):
        ...     tensors = (TensorDescription("a", (size,)),)
        ...     return ModelDescription("net", "", tensors, "", "")
        >>> net(3).difference(net(4), "at the node", "at the aggregator")
        'parameter a is 3 of float32 at the node, and 4 of float32 at the aggregator'
        """
        ours = self._facts()
        theirs = other._facts()
        for what in (*ours, *theirs):
            one = ours.get(what, "missing")
            two = theirs.get(what, "missing")
            if one == two:
                continue
            if what == _FROZEN and self.frozen and other.frozen:
                return (
                    f"{what} has other values {here} than {there} (digests {one} and "
                    f"{two}): load or create the same values on both machines"
                )
            return f"{what} is {one} {here}, and {two} {there}"
        for one, two in zip(ours, theirs, strict=True):
            if one != two:
                return f"the order differs: {one} {here} is in the place of {two} {there}"
        return None

    def _facts(self) -> dict[str, str]:
        return {
            "the kind of model": self.kind,
            **{f"parameter {each.name}": str(each) for each in self.tensors},
            "the loss": self.loss,
            "the kind of target": self.target,
            _FROZEN: self.frozen or "empty",
        }

    def __str__(self) -> str:
        parameters = sum(prod(each.shape) for each in self.tensors)
        return f"{self.name} ({self.kind}, {parameters} parameters)"


def describe(model: Model) -> ModelDescription:
    """Describe any model.

    A model adds details with the attributes `tensors`, `loss_description` and `frozen`.
    """
    whole = (TensorDescription("w", (model.parameters,)),)
    kind = type(model).__name__
    return ModelDescription(
        model.name[:500],
        kind,
        tuple(getattr(model, "tensors", whole)),
        str(getattr(model, "loss_description", f"of {kind}"))[:500],
        model.target,
        str(getattr(model, "frozen", "")),
    )


def describe_function(function: Callable[..., Any]) -> str:
    """Describe a function or a callable object, so that two machines can compare it.

    >>> describe_function(max), describe_function(functools.partial(max, key=abs))
    ('max', 'max with key=abs')
    """
    if isinstance(function, functools.partial):
        given = [*map(_value_text, function.args), *_named(function.keywords)]
        return f"{describe_function(function.func)} with {', '.join(given)}"
    if hasattr(function, "__name__"):
        return f"{function.__name__}{_source_digest(function)}"

    # An object, such as CrossEntropyLoss(label_smoothing=0.1). Buffers are those of a
    # module.
    kind = type(function)
    state = {**getattr(function, "__dict__", {}), **getattr(function, "_buffers", {})}
    public = {
        name: state[name]
        for name in sorted(state)
        if not name.startswith("_") and name != "training"
    }
    return f"{kind.__name__}({', '.join(_named(public))}){_source_digest(kind)}"


def digest(parts: Iterable[bytes]) -> str:
    """Return a checksum of some bytes as text."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return f"{checksum:08x}"


def _named(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={_value_text(value)}"
        for name, value in values.items()
        if value is not None
    ]


def _value_text(value: Any) -> str:
    if isinstance(value, str | int | float):
        return repr(value)
    if hasattr(value, "detach"):  # a tensor of PyTorch
        value = value.detach().cpu()
    if hasattr(value, "__array__"):
        return digest([np.asarray(value).tobytes()])
    return describe_function(value) if callable(value) else type(value).__name__


def _source_digest(code: Any) -> str:
    """Return a digest of the source of custom code; empty for installed packages."""
    try:
        if "-packages" in inspect.getfile(code):
            return ""
        source = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):  # there is no file
        return ""
    try:
        tree: ast.AST = ast.parse(source)
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        if inspect.isfunction(code) and code.__name__ == "<lambda>" and len(lambdas) == 1:
            tree = lambdas[0]  # without the rest of the line
        source = ast.unparse(tree)
    except SyntaxError:  # the source is a part of a line
        source = "".join(source.split())
    return f", written as {digest([source.encode()])}"


def require_no_arguments(make: Callable[..., Any]) -> None:
    """Raise a `UserError` if a function that creates a model needs arguments."""
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        name = getattr(make, "__name__", "the function")
        raise UserError(
            f"{name} cannot be called without arguments: {error}; pass {name}(...), or a "
            "function that returns it"
        ) from None
    except ValueError:  # the signature is unknown
        return


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of w by name.

    All tensors have the same number of rows. w contains the first row of each tensor, then
    the second row of each, and so on. With one row, w is one tensor after the other.

    Args:
      shapes: shapes of the tensors by name, in order.
      rows: rows of each tensor.

    >>> named = NamedTensors({"weight": (2, 3), "bias": (2,)}, rows=2)
    >>> parts = named.split(np.arange(8, dtype=np.float32))
    >>> parts["weight"].tolist(), parts["bias"].tolist()
    ([[0.0, 1.0, 2.0], [4.0, 5.0, 6.0]], [3.0, 7.0])
    >>> named.join(parts).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """

    shapes: Mapping[str, tuple[int, ...]]
    rows: int = 1

    @classmethod
    def of(cls, model: Model) -> "NamedTensors":
        """Return the tensors of a model; one tensor `w` if the model does not name any."""
        return cls(
            {each.name: each.shape for each in describe(model).tensors},
            getattr(model, "rows", 1),
        )

    def split(self, w: Float32) -> dict[str, Float32]:
        """Return the tensors in w."""
        table = w.reshape(self.rows, -1)
        named = {}
        used = 0
        for name, shape in self.shapes.items():
            size = prod(shape) // self.rows
            named[name] = np.ascontiguousarray(table[:, used : used + size]).reshape(shape)
            used += size
        return named

    def join(self, tensors: Mapping[str, Float32]) -> Float32:
        """Return the w of some tensors."""
        parts = [np.reshape(tensors[name], (self.rows, -1)) for name in self.shapes]
        return np.concatenate(parts, axis=1, dtype=np.float32).reshape(-1)

    def require_same(self, other: "NamedTensors", here: str, there: str) -> None:
        """Raise a `UserError` with the first difference to other tensors.

        Args:
          here, there: locations of these tensors and of the other ones, for the message.
        """
        for name in (*self.shapes, *other.shapes):
            ours = self.shapes.get(name)
            theirs = other.shapes.get(name)
            if ours != theirs:
                raise UserError(
                    f"{name} is {_shape_text(ours)} {here}, "
                    f"and {_shape_text(theirs)} {there}"
                )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "missing"
    return " x ".join(map(str, shape)) or "a number"
