"""w by names: how the flat vector is made of a model's tensors, such as weights and biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.models.base import Model
from fedbudget.models.description import describe


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
        return cls({each.name: each.shape for each in describe(model).tensors}, getattr(model, "rows", 1))

    def split(self, w: Float32) -> dict[str, Float32]:
        """The tensors that are in w."""
        table, named, used = w.reshape(self.rows, -1), {}, 0
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
                raise UserError(f"{name} is {_shape(ours)} {here}, and {_shape(theirs)} {there}")


def _shape(shape: tuple[int, ...] | str) -> str:
    return shape if isinstance(shape, str) else " x ".join(map(str, shape)) or "a number"
