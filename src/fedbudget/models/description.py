"""What a model is, told without its code: by this, two machines that each have the code know that it is the same.

What is told is what must be alike for parameters to be averaged: the tensors that w is made of, the loss, and what is
learned from. A loss that a person has written is known by its name and by a digest of how it is written, comments and
blanks aside. What a function takes from around it is not looked at, nor what a module does with its parameters.

w by names: how the flat vector is made of a model's tensors, such as weights and biases.
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

Text = Annotated[
    str, Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*\Z")
]  # it is shown where it was not written
_FROZEN = "what is frozen"


@dataclass(frozen=True)
class TensorDescription:
    """A part of w, such as a layer's weights.

    Args:
      type: of its numbers.
    """

    name: Text
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**40)], ...], Meta(max_length=16)]
    type: Text = "float32"

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape)) or 'a number'} of {self.type}"


@dataclass(frozen=True)
class ModelDescription:
    """A model of a person's own.

    Args:
      name: as it is called; another name is no difference.
      kind: such as `TorchModel`.
      tensors: what w is made of, in its order.
      loss: in words.
      target: what is learned from, as of a `Model`.
      frozen: a digest of the parameters that are not trained; nothing where all are.
    """

    name: Text
    kind: Text
    tensors: Annotated[tuple[TensorDescription, ...], Meta(max_length=20_000)]
    loss: Text
    target: Text
    frozen: Text = ""

    def difference(self, other: "ModelDescription", here: str, there: str) -> str | None:
        """The first difference to another model, in words; None where there is none.

        Args:
          here, there: where this one is, and the other.

        >>> one, two = (ModelDescription("net", "", (TensorDescription("a", (n, 2)),), "", "") for n in (3, 4))
        >>> one.difference(two, "at the node", "at the aggregator")
        'parameter a is 3 x 2 of float32 at the node, and 4 x 2 of float32 at the aggregator'
        """
        ours = self._facts()
        theirs = other._facts()
        for what in (*ours, *theirs):
            own = ours.get(what, "missing")
            others = theirs.get(what, "missing")
            if own == others:
                continue
            if what == _FROZEN and self.frozen and other.frozen:
                digests = f"{own} and {others}"
                return f"{what} has other numbers {here} than {there} ({digests}): they must be loaded, or made, the same"
            return f"{what} is {own} {here}, and {others} {there}"
        for own, others in zip(ours, theirs, strict=True):
            if own != others:
                return f"{own} comes {here} where {others} comes {there}"
        return None

    def _facts(self) -> dict[str, str]:
        return {
            "the kind of model": self.kind,
            **{f"parameter {each.name}": str(each) for each in self.tensors},
            "the loss": self.loss,
            "what is learned from": self.target,
            _FROZEN: self.frozen or "nothing",
        }

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {sum(prod(each.shape) for each in self.tensors)} parameters)"


def describe(model: Model) -> ModelDescription:
    """Of any model; one says more of itself by `tensors`, `loss_in_words` and `frozen`, each where it has it."""
    whole = (TensorDescription("w", (model.parameters,)),)
    kind = type(model).__name__
    return ModelDescription(
        model.name[:500],
        kind,
        tuple(getattr(model, "tensors", whole)),
        str(getattr(model, "loss_in_words", f"of {kind}"))[:500],
        model.target,
        str(getattr(model, "frozen", "")),
    )


def in_words(function: Callable[..., Any]) -> str:
    """A function, or an object that can be called, as far as two machines can compare it.

    >>> in_words(max), in_words(functools.partial(max, key=abs))
    ('max', 'max with key=abs')
    """
    if isinstance(function, functools.partial):
        given = [*map(_value_in_words, function.args), *_named(function.keywords.items())]
        return f"{in_words(function.func)} with {', '.join(given)}"
    if hasattr(function, "__name__"):
        return f"{function.__name__}{_written(function)}"
    kind = type(function)  # of an object, such as CrossEntropyLoss(label_smoothing=0.1)
    return (
        f"{kind.__name__}({', '.join(_named(_settings(function).items()))}){_written(kind)}"
    )


def digest(parts: Iterable[bytes]) -> str:
    """A short text that is another when any byte is."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return f"{checksum:08x}"


def _settings(function: Any) -> dict[str, Any]:
    """What an object holds that says how it computes, its tensors too where it is a module."""
    held = {**getattr(function, "__dict__", {}), **getattr(function, "_buffers", {})}
    return {
        name: held[name]
        for name in sorted(held)
        if not name.startswith("_") and name != "training"
    }


def _named(values: Iterable[tuple[str, Any]]) -> list[str]:
    return [
        f"{name}={_value_in_words(value)}" for name, value in values if value is not None
    ]


def _value_in_words(value: Any) -> str:
    if isinstance(value, str | int | float):
        return repr(value)
    if hasattr(value, "__array__"):
        return digest(
            [
                np.asarray(
                    value.detach().cpu() if hasattr(value, "detach") else value
                ).tobytes()
            ]
        )
    return in_words(value) if callable(value) else type(value).__name__


def _written(what: Any) -> str:
    """How a person's own is written, as a digest; nothing for what is installed, which is known by its name."""
    try:
        if "-packages" in inspect.getfile(what):
            return ""
        source = textwrap.dedent(inspect.getsource(what))
    except (OSError, TypeError):  # of no file
        return ""
    try:
        tree: ast.AST = ast.parse(source)
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        if inspect.isfunction(what) and what.__name__ == "<lambda>" and len(lambdas) == 1:
            tree = lambdas[0]  # and not the line that it is in
        source = ast.unparse(tree)
    except SyntaxError:  # a part of a line
        source = "".join(source.split())
    return f", written as {digest([source.encode()])}"


def require_no_arguments(make: Callable[..., Any]) -> None:
    """Refuses what makes a model only when it is told more."""
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        name = getattr(make, "__name__", "it")
        raise UserError(
            f"{name} cannot be made: {error}; give {name}(...), or a function that makes it"
        ) from None
    except ValueError:  # nothing is known of what it takes
        return


@dataclass(frozen=True)
class NamedTensors:
    """What w is made of. Each tensor has as many rows as the others, and w is the first row of each, the second of
    each, and so on; with one row, w is one tensor after the other.

    Args:
      shapes: of the tensors, by name, in their order.
      rows: of each.

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
        """Of any model; one that has no `tensors` is w alone."""
        return cls(
            {each.name: each.shape for each in describe(model).tensors},
            getattr(model, "rows", 1),
        )

    def split(self, w: Float32) -> dict[str, Float32]:
        """The tensors that are in w."""
        table = w.reshape(self.rows, -1)
        named = {}
        used = 0
        for name, shape in self.shapes.items():
            size = prod(shape) // self.rows
            named[name] = np.ascontiguousarray(table[:, used : used + size]).reshape(shape)
            used += size
        return named

    def join(self, tensors: Mapping[str, Float32]) -> Float32:
        """The w that these tensors are in."""
        parts = [np.reshape(tensors[name], (self.rows, -1)) for name in self.shapes]
        return np.concatenate(parts, axis=1, dtype=np.float32).reshape(-1)

    def require_same(self, other: "NamedTensors", here: str, there: str) -> None:
        """Refuses other tensors than these; says what is first another.

        Args:
          here, there: where these are, and the others.
        """
        for name in (*self.shapes, *other.shapes):
            ours, theirs = (each.shapes.get(name, "missing") for each in (self, other))
            if ours != theirs:
                raise UserError(
                    f"{name} is {_shape(ours)} {here}, and {_shape(theirs)} {there}"
                )


def _shape(shape: tuple[int, ...] | str) -> str:
    return shape if isinstance(shape, str) else " x ".join(map(str, shape)) or "a number"
