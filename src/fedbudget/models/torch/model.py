"""Any PyTorch module as a model. Needs the extra `fedbudget[torch]`; nothing else in fedbudget imports PyTorch.

Parameters become one flat vector in torch_parameters.py, and samples become batches in torch_data.py. A batch is a list
of row numbers. What is random within a module, such as dropout, is drawn from the mini-batch's places in its shard, so
that on one mini-batch F_i is one function of w: the estimates compare F_i at different w, and a run repeats to the bit,
in one process or with a shard at each node.

Nodes take turns, and where some hold the same samples and have the same w (Case 3), one does it for all of them. Many
nodes with a small module without convolutions make their updates all at once, with torch.func. Each was measured to be
the faster one there (docs/research/performance.md), and both compute the same. What cannot be batched, because it is random or
because torch.func does not know it, takes turns. Modules with convolutions have the layers of faster_layers.py.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd as _Convolution

from fedbudget.arrays import Float32, Float64
from fedbudget.data.files import Shard, from_shards
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError, unknown
from fedbudget.models.base import (
    BaseModel,
    Descent,
    Target,
    Targets,
    first_alike,

)
from fedbudget.models.description import TensorDescription, describe_function
from fedbudget.models.per_sample import GradientRows, gradients_in_turn
from fedbudget.models.torch.batches import (
    Batch,
    BatchReader,
    Collate,
    Rows,
    all_in_parts,
    call,
    seed_of,
    seed_random,
)
from fedbudget.models.torch.checks import (
    FirstBatch,
    Loss,
    Metric,
    beside,
    classes_right,
    default_loss,
    device_named,
    refuse_single_sample,
    signs_right,
)
from fedbudget.models.torch.faster_layers import FasterLayers
from fedbudget.models.torch.parameters import FlatModule, PerSample, made
from fedbudget.randomness import ALONE

Statistics = Literal["average", "local"]
"""What becomes of running statistics."""

# parameters up to which, and nodes from which on, nodes are batched
_SMALL = 50_000
_MANY = 10
_ROWS = 1000  # samples that a gradient is taken of at once, when a shard is larger
_PREDICTED = 200  # the same without a gradient: what layers give to each other then stays in the caches
_Optional = Float32 | None


class TorchModel(BaseModel):
    """Trains an `nn.Module`.

    Args:
      module: what is trained, starting from its own parameters; or a function that makes it, which is then called with
        PyTorch seeded by the run's seed, so that each seed starts from other parameters. The module is copied.
        Parameters that are frozen (`requires_grad=False`) stay as they are, and are not sent.
      loss: (output, y) to the mean loss over the batch; cross-entropy for classes and squared error for real targets
        when not given.
      metrics: functions (output, y) to a number, by name, for the test samples; one named `accuracy` takes the place of
        the share of right classes.
      target: what y holds: `classes` (numbers 0, 1, ...), `real`, `raw` (the data's own) or `binary` (±1); with `auto`
        it is classes where the data has whole numbers for targets, and otherwise real. `auto` keeps the numbers that
        classes have, where `classes` counts those that are there: 0, 1 for samples of the classes 3 and 7.
      class_weights: what a sample of each class counts in the cross-entropy; all the same when not given.
      collate: makes a mini-batch of a list of samples, where these are no rows of arrays: (inputs, y), or a mapping
        with `labels`. Several inputs are a tuple, for the module's arguments, or a mapping, for those by name.
      workers: processes that read such samples; 0 for this one.
      statistics: what becomes of running statistics, such as those of batch normalization: with `average` they are sent
        with the parameters, and averaged by samples; with `local` they stay at the nodes, and test samples are
        normalized by their own batch.
      buffers: names of further buffers that are running statistics, besides those called `running_...`.
      autocast: whether to compute in bfloat16 where PyTorch holds that safe; parameters stay float32.
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
        target: Target = "auto",
        class_weights: Sequence[float] | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        statistics: Statistics = "average",
        buffers: Sequence[str] = (),
        autocast: bool = False,
        name: str | None = None,
        device: str = "auto",
    ) -> None:
        self._options: dict[str, Any] = {
            "loss": loss,
            "metrics": metrics,
            "target": target,
            "class_weights": class_weights,
            "collate": collate,
            "workers": workers,
            "statistics": statistics,
            "buffers": buffers,
            "autocast": autocast,
            "name": name,
            "device": device,
        }
        self.target: Target = target
        self._make = None if isinstance(module, nn.Module) else module
        own = copy.deepcopy(module) if isinstance(module, nn.Module) else made(module, 0)
        self.name = name or type(own).__name__.lower()
        self._device = device_named(device)
        if loss is not None and not callable(loss):
            raise UserError(
                f"a loss is a function of (output, y), such as torch.nn.functional.mse_loss, not {loss!r}"
            )
        if loss is not None and class_weights is not None:
            raise UserError(
                "class_weights are of the cross-entropy; a loss of your own has its own"
            )
        self._loss = loss or default_loss(target, class_weights, self._device)
        self._metrics = dict(metrics or {})
        if statistics not in get_args(Statistics):
            raise unknown("statistics", statistics, get_args(Statistics))
        if statistics == "local" and buffers:
            raise UserError(
                "buffers are averaged; with statistics local, only normalization layers keep their own"
            )
        self._flatten = partial(
            FlatModule, average=statistics == "average", buffers=buffers
        )
        self._flat = self._flatten(own.to(self._device))
        self._own = self._flat.read()
        self._reader = BatchReader(target, self._device, collate=collate, workers=workers)
        self._autocast = autocast
        self._convolves = any(isinstance(part, _Convolution) for part in own.modules())
        alone = self._convolves or self._flat.keeps_statistics or autocast
        self._together = self.parameters <= _SMALL and not alone
        self._per_sample = PerSample(
            self._flat,
            self._reader,
            self._loss_at,
            partial(self._alone, train=True, plain=True),
        )
        self._predicted: tuple[Table, Float32, tuple[Tensor, Tensor]] | None = None

    @property
    def parameters(self) -> int:
        return len(self._own)

    @property
    def statistics(self) -> int:
        return self._flat.statistics

    @property
    def local_statistics(self) -> bool:
        """Whether it has running statistics that are not in w."""
        return self._flat.keeps_statistics and not self._flat.statistics

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        return self._flat.tensors()

    @property
    def loss_description(self) -> str:
        if self._options["loss"] is not None:
            return describe_function(self._options["loss"])
        weights = self._options["class_weights"]
        return (
            "the usual one"
            if weights is None
            else f"the usual one with class weights {[*map(float, weights)]}"
        )

    @property
    def frozen(self) -> str:
        return self._flat.frozen()

    def initial(self, seed: int) -> Float32:
        return (
            self._own.copy()
            if self._make is None
            else self._flatten(made(self._make, seed)).read()
        )

    def trained(self, w: Float32, shard: Shard | None = None) -> nn.Module:
        """A copy of the module with its parameters set to w, on the CPU and ready to predict.

        Args:
          shard: a node's samples, of which the module then has the running statistics, where these are `local`.
        """
        if shard is None:
            return self._flat.copied(w).eval()
        dataset = from_shards([shard], None)
        table = dataset.table(dataset.train, self.target)
        reader = BatchReader(
            self.target, torch.device("cpu"), collate=self._options["collate"], workers=0
        )
        passes = (
            partial(_pass, inputs)
            for inputs, _ in reader.batches(table, all_in_parts(table, _PREDICTED))
        )
        with ALONE, torch.random.fork_rng(devices=[]), torch.no_grad():
            return self._flat.measured(w, passes)

    def __reduce__(self) -> tuple[Any, ...]:
        """To other processes, as it was made."""
        return partial(TorchModel, **self._options), (
            self._make or self._flat.copied(self._own),
        )

    def require_fit(
        self, data: str, train: Table, batch: int | None, test: Table | None = None
    ) -> None:
        with self._alone(train=True), self._flat.buffers_kept():
            self._flat.write(self._own)
            rows, (inputs, y) = self._reader.first(train, batch, _ROWS)
            first = FirstBatch(
                f"{self.name} cannot train on {data}", self._flat.module, inputs, y
            )
            seed_random(self._device, seed_of(rows))
            output = first.passed(self._output)
            if self._options["loss"] is None:
                first.require_score_of_each_class(
                    output, [train] if test is None else [train, test]
                )
            first.scored(self._mean_loss, output)

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        # On whole shards this is the figure to report, and on a mini-batch one to compare with that of a local update.
        with self._alone(train=indices.positions.shape[2] > 0), torch.no_grad():
            return self._evaluate(w, shards, indices)

    def descend(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: float | Float32,
        best: Float32 | None = None,
        shift: Float32 | None = None,
    ) -> Descent:
        in_arrays = shards.table.store is None
        etas = np.full(len(shards), eta, np.float32)
        if (
            self._together
            and in_arrays
            and len(shards) >= _MANY
            and indices.positions.shape[2] > 0
        ):
            try:
                with self._alone(train=True):
                    return self._all_at_once(w, shards, indices, etas, best, shift)
            except RuntimeError:  # of torch.func; if something else is wrong, it will be when nodes take turns too
                self._together = False
        return self._in_turn(w, shards, indices, etas, best, shift)

    def _in_turn(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: Float32,
        best: _Optional,
        shift: _Optional,
    ) -> Descent:
        nodes = len(shards)
        flat = self._flat
        count = indices.updates_of
        out = np.empty((nodes, self.parameters), np.float32)
        losses = np.empty(nodes)
        gradients = np.empty_like(out)
        best_losses = None
        first = first_alike(shards, indices, w, shift, eta=eta)
        updates = [
            (node, update)
            for node in range(nodes)
            if first[node] == node
            for update in range(count[node])
        ]
        with self._alone(train=True):
            batches = self._reader.of_updates(shards, indices, updates, _ROWS)
            for node in range(nodes):
                if first[node] < node:
                    out[node], losses[node], gradients[node] = (
                        each[first[node]] for each in (out, losses, gradients)
                    )
                    continue
                flat.write(w[node % len(w)])
                step = float(eta[node])
                along = (
                    None
                    if shift is None
                    else self._reader.tensor(shift[node, : len(flat.gradient)])
                )
                for update in range(count[node]):
                    loss = self._backward(*next(batches))
                    if update == 0:
                        losses[node] = float(loss)
                        gradients[node] = 0
                        gradients[node, : len(flat.gradient)] = flat.gradient.cpu().numpy()
                    flat.parameters.add_(
                        flat.gradient if along is None else flat.gradient + along,
                        alpha=-step,
                    )
                out[node] = flat.read()
            flat.refuse_changed_buffers(self.name)
            if best is not None:
                with torch.no_grad():
                    best_losses = self._evaluate(best[None], shards, indices)
        return Descent(out, losses, gradients, best_losses)

    def _all_at_once(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: Float32,
        best: _Optional,
        shift: _Optional,
    ) -> Descent:
        shape = (len(shards), self.parameters)
        named = self._flat.named
        own = torch.from_numpy(np.broadcast_to(w, shape).copy()).to(self._device)
        along = None if shift is None else self._reader.tensor(shift)
        step = vmap(grad_and_value(self._loss_at))
        losses = np.empty(0)
        gradients = np.empty(0, np.float32)
        best_losses = None
        for update in range(indices.updates):
            rows = shards.rows[
                shards.start[:, None] + indices.positions[indices.group, update]
            ]
            x, y = self._reader.batch(shards.table, rows.reshape(-1))
            x, y = x.view(*rows.shape, *x.shape[1:]), y.view(rows.shape)
            found, loss = step(named(own), x, y)
            gradient = self._flat.from_named(found, len(shards))
            if update == 0:
                losses = loss.double().cpu().numpy()
                gradients = gradient.cpu().numpy().copy()
                if best is not None:
                    at = named(torch.from_numpy(best.copy()).to(self._device))
                    with torch.no_grad():
                        best_losses = (
                            vmap(self._loss_at, in_dims=(None, 0, 0))(at, x, y)
                            .double()
                            .cpu()
                            .numpy()
                        )
            steps = torch.from_numpy(np.where(update < indices.updates_of, eta, 0)).to(
                self._device
            )
            own.addcmul_(
                steps[:, None], gradient if along is None else gradient + along, value=-1
            )
        return Descent(own.cpu().numpy(), losses, gradients, best_losses)

    def _loss_at(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Of one node's batch, as a function of the parameters, as torch.func wants it."""
        return self._mean_loss(functional_call(self._flat.module, parameters, (x,)), y)

    def sample_gradients(self, w: Float32, table: Table, rows: Rows) -> GradientRows:
        """Of single samples."""
        return self._per_sample.gradients(w, table, rows) or gradients_in_turn(
            self, w, table, rows
        )

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        """The module's, where that is one number or one row of numbers for each sample."""
        return self.outputs_and_targets(w, table)[0]

    def outputs_and_targets(
        self, w: Float32, table: Table
    ) -> tuple[Float32 | None, Targets]:
        try:
            output, y = self._predict(w, table)
        except (
            TypeError,
            RuntimeError,
        ):  # outputs that are no tensors, or of different shapes
            return None, table.y
        if (
            output.ndim not in (1, 2)
            or len(output) != len(table)
            or y.numel() != len(table)
        ):
            return None, table.y
        return output.reshape(len(table), -1).float().cpu().numpy(), y.reshape(
            -1
        ).cpu().numpy()

    def accuracy(self, w: Float32, table: Table) -> float | None:
        measure = self._metrics.get("accuracy")
        if measure is None and (
            self.target in ("real", "raw", "none")
            or (self.target == "auto" and not table.labels)
        ):
            return None
        output, y = self._predict(w, table)
        if measure is None:
            measure = signs_right if self.target == "binary" else classes_right
            if self.target == "auto" and (y.is_floating_point() or output.ndim != 2):
                return None
        return float(measure(output, y))

    @property
    def own_metrics(self) -> tuple[str, ...]:
        return tuple(self._metrics)

    def metrics(self, w: Float32, table: Table) -> dict[str, float]:
        if not self._metrics:
            return {}
        output, y = self._predict(w, table)
        return {name: float(measure(output, y)) for name, measure in self._metrics.items()}

    def _evaluate(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        losses = np.empty(len(shards))
        at_once = _ROWS if self._flat.module.training else _PREDICTED
        first = first_alike(shards, indices, w)
        batches = self._reader.of_updates(
            shards,
            indices,
            [(node, 0) for node, other in enumerate(first) if node == other],
            at_once,
        )
        for node, other in enumerate(first):
            if other < node:
                losses[node] = losses[other]
                continue
            self._flat.write(w[node % len(w)])
            positions, parts = next(batches)
            losses[node] = sum(
                float(self._loss_of(part, batch)) * len(part) / len(positions)
                for part, batch in parts
            )
        return losses

    def _backward(self, positions: Rows, parts: Iterator[tuple[Rows, Batch]]) -> Tensor:
        """Loss at the module's w, with its gradient in `self._flat.gradient`."""
        self._flat.gradient.zero_()
        total = torch.zeros((), device=self._device)
        for part, batch in parts:
            loss = self._loss_of(part, batch) * (len(part) / len(positions))
            if not loss.requires_grad:
                raise UserError(
                    f"{self.name}'s loss has no gradient: it is detached from the module's output"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _loss_of(self, positions: Rows, batch: Batch) -> Tensor:
        seed_random(self._device, seed_of(positions))
        inputs, y = batch
        return self._mean_loss(self._output(inputs), y)

    def _output(self, inputs: Any) -> Any:
        try:
            with (
                torch.autocast(self._device.type, dtype=torch.bfloat16)
                if self._autocast
                else nullcontext()
            ):
                output = call(self._flat.module, inputs)
        except ValueError as error:
            refuse_single_sample(self.name, error)
            raise
        return output.float() if self._autocast and isinstance(output, Tensor) else output

    def _mean_loss(self, output: Any, y: Tensor) -> Tensor:
        loss = self._loss(output, beside(output, y))
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"{self.name}'s loss must be a tensor of one number, the mean over the batch, not {found}"
            )
        return loss

    def _predict(self, w: Float32, table: Table) -> tuple[Tensor, Tensor]:
        """The module's output for all samples of a table, and their targets; the last is remembered."""
        known = self._predicted
        if known is not None and known[0] is table and np.array_equal(known[1], w):
            return known[2]
        with self._alone(train=False), torch.no_grad():
            self._flat.write(w)
            found = [
                (self._output(inputs), y)
                for inputs, y in self._reader.batches(
                    table, all_in_parts(table, _PREDICTED)
                )
            ]
        output, y = (torch.cat(each) for each in zip(*found, strict=True))
        self._predicted = table, w.copy(), (output, beside(output, y))
        return self._predicted[2]

    @contextmanager
    def _alone(self, *, train: bool, plain: bool = False) -> Iterator[None]:
        """The module for ourselves, with PyTorch's `plain` layers or faster ones, and random numbers as they were."""
        devices = [self._device] if self._device.type == "cuda" else []
        layers = (
            FasterLayers()
            if self._convolves and not self._autocast and not plain
            else nullcontext()
        )
        with ALONE, torch.random.fork_rng(devices=devices), layers:
            self._flat.train(training=train)
            yield


def _pass(inputs: Any, module: nn.Module) -> None:
    call(module, inputs)
