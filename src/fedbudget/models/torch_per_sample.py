"""Gradients of single samples of a PyTorch module, by torch.func, which is part of PyTorch. Needs PyTorch.

Each sample passes the module alone, as a batch of one, many at once (vmap): a gradient can depend on no other sample.
What is random within a module is drawn for each. Modules that torch.func does not know, and samples that are no rows of
arrays, are taken one after the other.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor
from torch.func import grad, vmap

from fedbudget.arrays import Float32
from fedbudget.data.shards import Table
from fedbudget.models.per_sample import GradientRows, Rows
from fedbudget.models.torch_data import BatchReader
from fedbudget.models.torch_parameters import FlatModule

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
        except (RuntimeError, NotImplementedError):  # of torch.func; if something else is wrong, it will be in turn too
            self.possible = False
            return None

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.loss_at(parameters, x[None], y[None])
