"""`TorchModel`: any PyTorch module as a model. Needs the extra `fedbudget[torch]`.

parameters.py stores the parameters as one flat vector. batches.py turns samples into
batches. A batch is a list of row numbers. Random operations in a module, such as dropout,
are seeded by the positions of the mini-batch in its shard. On one mini-batch, F_i is
therefore one function of w. The estimates compare F_i at different w, and a run repeats
bit for bit, in one process or with one shard per node.

Nodes are computed one after the other. Nodes with the same samples and the same w (Case 3)
are computed once. For many nodes and a small module without convolutions, torch.func
updates all nodes at once. Each way is the faster one in its case
(docs/research/performance.md), and both compute the same. Modules that torch.func cannot
batch, because they are random or use unknown operations, are computed one node after the
other. Modules with convolutions use the layers of faster_layers.py.

Gradients of single samples use torch.func too. Each sample passes the module as a batch of
one, so its gradient depends on no other sample. Random operations are drawn for each
sample.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd as _Convolution

from fedbudget.arrays import Float32, Float64
from fedbudget.data.files import Shard, from_shards
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError, unknown
from fedbudget.models.base import (
    BaseModel,
    Descent,
    LastLayer,
    Rows,
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
    all_in_parts,
    call,
    seed_of,
    seed_random,
)
from fedbudget.models.torch.checks import (
    FirstBatch,
    Loss,
    Metric,
    class_accuracy,
    default_loss,
    device_named,
    refuse_single_sample,
    shaped_like,
    sign_accuracy,
)
from fedbudget.models.torch.faster_layers import FasterLayers
from fedbudget.models.torch.parameters import FlatModule, create_module, inputs_of
from fedbudget.randomness import TORCH_RANDOM_LOCK

Statistics = Literal["average", "local"]
"""Treatment of running statistics."""

_SMALL = 50_000
"""Parameters of a module up to which nodes are updated all at once."""
_MANY = 10
"""Nodes from which on they are updated all at once."""
_ROWS = 1000
"""Samples per backward pass. A larger batch is split."""
_PREDICTED = 200
"""Samples per forward pass without a gradient, so that activations stay in the caches."""


class TorchModel(BaseModel):
    """Trains an `nn.Module`.

    Args:
      module: the module, with its initial parameters; or a function or class that creates
        it. With a function, the run's seed determines the initial parameters. If it has an
        argument `dropout` with the default 0, a run that overfits continues with dropout.
        The module is copied. Frozen parameters (`requires_grad=False`) are neither changed
        nor sent.
      loss: (output, y) to the mean loss over the batch. The default is cross-entropy for
        classes and squared error for real targets.
      metrics: functions (output, y) to a number, by name, for the test samples. One named
        `accuracy` replaces the fraction of correct classes.
      target: meaning of y: `classes` (numbers 0, 1, ...), `real`, `raw` (values of the data
        unchanged) or `binary` (±1). `auto` means classes if the data has integer targets,
        and real targets otherwise. `auto` keeps the numbers of classes; `classes`
        renumbers the classes that occur: 0, 1 for samples of the classes 3 and 7.
      class_weights: weight of each class in the cross-entropy. The default is 1 for all.
      collate: builds a mini-batch from a list of samples that are not rows of arrays:
        (inputs, y), or a mapping with `labels`. A tuple of inputs becomes the arguments of
        the module, a mapping its keyword arguments.
      workers: processes that read such samples; 0 for the main process.
      statistics: treatment of running statistics, such as those of batch normalization.
        `average` sends them with the parameters and averages them by samples. `local`
        keeps them at the nodes, and test samples are normalized by their own batch.
      buffers: names of further buffers that are running statistics, in addition to those
        called `running_...`.
      autocast: compute in bfloat16 if PyTorch considers an operation safe; parameters stay
        float32.
      name: name of the model in the run's record.
      device: device of PyTorch; `auto` uses a GPU if there is one.

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
        if isinstance(module, nn.Module):
            self._make = None
            own = copy.deepcopy(module)
        else:
            self._make = module
            own = create_module(module, 0)
        self.target: Target = target
        self.name = name or type(own).__name__.lower()
        self._device = device_named(device)

        if loss is not None and not callable(loss):
            raise UserError(
                "a loss is a function of (output, y), such as "
                f"torch.nn.functional.mse_loss, not {loss!r}"
            )
        if loss is not None and class_weights is not None:
            raise UserError(
                "class_weights apply to the default loss only; weight your own loss"
            )
        self._loss = loss or default_loss(target, class_weights, self._device)
        self._metrics = dict(metrics or {})

        if statistics not in get_args(Statistics):
            raise unknown("statistics", statistics, get_args(Statistics))
        if statistics == "local" and buffers:
            raise UserError(
                "buffers are averaged; with statistics local, only normalization layers "
                "keep their own"
            )
        average = statistics == "average"
        self._flatten = partial(FlatModule, average=average, buffers=buffers)
        self._flat = self._flatten(own.to(self._device))
        self._initial = self._flat.read()
        self._reader = BatchReader(target, self._device, collate=collate, workers=workers)
        self._autocast = autocast
        self._convolves = any(isinstance(part, _Convolution) for part in own.modules())

        # torch.func may turn out not to support the module. Both become False then.
        in_turn = self._convolves or self._flat.keeps_statistics or autocast
        self._batches_nodes = self.parameters <= _SMALL and not in_turn
        self._batches_samples = True
        self._predicted: tuple[Table, Float32, tuple[Tensor, Tensor]] | None = None
        self._with_dropout: dict[float, TorchModel] = {}

    @property
    def parameters(self) -> int:
        return len(self._initial)

    @property
    def statistics(self) -> int:
        return self._flat.statistics

    @property
    def local_statistics(self) -> bool:
        """Whether the module has running statistics that are not in w."""
        return self._flat.keeps_statistics and not self._flat.statistics

    @property
    def tensors(self) -> tuple[TensorDescription, ...]:
        return self._flat.tensors()

    @property
    def loss_description(self) -> str:
        if self._options["loss"] is not None:
            return describe_function(self._options["loss"])
        weights = self._options["class_weights"]
        if weights is None:
            return "the usual one"
        return f"the usual one with class weights {[*map(float, weights)]}"

    @property
    def frozen(self) -> str:
        return self._flat.frozen()

    def initial(self, seed: int) -> Float32:
        if self._make is None:
            return self._initial.copy()
        return self._flatten(create_module(self._make, seed)).read()

    def with_dropout(self, share: float) -> "TorchModel | None":
        make: Any = self._make
        if make is None:
            return None
        argument = signature(make).parameters.get("dropout")
        if argument is None or argument.default != 0:
            return None
        known = self._with_dropout.get(share)
        if known is None:
            known = TorchModel(partial(make, dropout=share), **self._options)
            self._with_dropout[share] = known
        return known

    def trained(self, w: Float32, shard: Shard | None = None) -> nn.Module:
        """Return a copy of the module with the parameters w, on the CPU, in evaluation
        mode.

        Args:
          w: [parameters].
          shard: samples of a node. With `statistics` local, the module then has the running
            statistics of these samples.
        """
        if shard is None:
            return self._flat.copy_with(w).eval()
        dataset = from_shards([shard], None)
        table = dataset.table(dataset.train, self.target)
        collate = self._options["collate"]
        reader = BatchReader(self.target, torch.device("cpu"), collate=collate, workers=0)
        batches = reader.batches(table, all_in_parts(table, _PREDICTED))
        with TORCH_RANDOM_LOCK, torch.random.fork_rng(devices=[]), torch.no_grad():
            return self._flat.with_statistics_of(w, (inputs for inputs, _ in batches))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module and the arguments of the constructor."""
        module = self._make or self._flat.copy_with(self._initial)
        return partial(TorchModel, **self._options), (module,)

    def require_fit(
        self, data: str, train: Table, batch: int | None, test: Table | None = None
    ) -> None:
        with self._exclusive(train=True), self._flat.restored_buffers():
            self._flat.write(self._initial)
            rows, (inputs, y) = self._reader.first(train, batch, _ROWS)
            what = f"{self.name} cannot train on {data}"
            first = FirstBatch(what, self._flat.module, inputs, y)
            seed_random(self._device, seed_of(rows))
            output = first.passed(self._output)
            if self._options["loss"] is None:
                tables = [train] if test is None else [train, test]
                first.require_score_of_each_class(output, tables)
            first.scored(self._mean_loss, output)

    def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        # The loss of whole shards is reported. The loss of a mini-batch is compared with
        # that of a local update, so the module must be in the same mode.
        with self._exclusive(train=indices.positions.shape[2] > 0), torch.no_grad():
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
        etas = np.full(len(shards), eta, np.float32)
        mini_batches = indices.positions.shape[2] > 0
        many = len(shards) >= _MANY and mini_batches and shards.table.store is None
        if self._batches_nodes and many:
            try:
                with self._exclusive(train=True):
                    return self._all_at_once(w, shards, indices, etas, best, shift)
            except RuntimeError:  # of torch.func; any other error occurs again below
                self._batches_nodes = False

        flat = self._flat
        trained = len(flat.gradient)
        unique, alike = first_alike(shards, indices, w, shift, eta=eta)
        counts = indices.updates_of[unique]
        out = np.empty((len(unique), self.parameters), np.float32)
        losses = np.empty(len(unique))
        gradients = np.zeros_like(out)
        best_losses = None
        pairs = zip(unique.tolist(), counts.tolist(), strict=True)
        updates = [(node, update) for node, count in pairs for update in range(count)]
        with self._exclusive(train=True):
            batches = self._reader.of_updates(shards, indices, updates, _ROWS)
            for index, node in enumerate(unique):
                flat.write(w[node % len(w)])
                along = None
                if shift is not None:
                    along = self._reader.tensor(shift[node, :trained])
                for update in range(counts[index]):
                    loss = self._backward(*next(batches))
                    if update == 0:
                        losses[index] = float(loss)
                        gradients[index, :trained] = flat.gradient.cpu().numpy()
                    direction = flat.gradient if along is None else flat.gradient + along
                    flat.parameters.add_(direction, alpha=-float(etas[node]))
                out[index] = flat.read()
            flat.refuse_changed_buffers(self.name)
            if best is not None:
                with torch.no_grad():
                    best_losses = self._evaluate(best[None], shards, indices)
        return Descent(out[alike], losses[alike], gradients[alike], best_losses)

    def _all_at_once(
        self,
        w: Float32,
        shards: Shards,
        indices: BatchIndices,
        eta: Float32,
        best: Float32 | None,
        shift: Float32 | None,
    ) -> Descent:
        shape = (len(shards), self.parameters)
        named = self._flat.named
        own = torch.from_numpy(np.broadcast_to(w, shape).copy()).to(self._device)
        along = None if shift is None else self._reader.tensor(shift)
        gradients_and_losses = vmap(grad_and_value(self._loss_at))
        losses = np.empty(0)
        gradients = np.empty(0, np.float32)
        best_losses = None
        for update in range(indices.updates):
            positions = indices.positions[indices.group, update]
            rows = shards.rows[shards.start[:, None] + positions]
            x, y = self._reader.batch(shards.table, rows.reshape(-1))
            x = x.view(*rows.shape, *x.shape[1:])
            y = y.view(rows.shape)
            by_name, loss = gradients_and_losses(named(own), x, y)
            gradient = self._flat.from_named(by_name, len(shards))
            if update == 0:
                losses = loss.double().cpu().numpy()
                gradients = gradient.cpu().numpy().copy()
                if best is not None:
                    at = named(torch.from_numpy(best.copy()).to(self._device))
                    with torch.no_grad():
                        each = vmap(self._loss_at, in_dims=(None, 0, 0))(at, x, y)
                    best_losses = each.double().cpu().numpy()
            steps = torch.from_numpy(np.where(update < indices.updates_of, eta, 0))
            direction = gradient if along is None else gradient + along
            own.addcmul_(steps.to(self._device)[:, None], direction, value=-1)
        return Descent(own.cpu().numpy(), losses, gradients, best_losses)

    def sample_gradients(self, w: Float32, table: Table, rows: Rows) -> GradientRows:
        """Return the gradients of single samples."""
        if self._batches_samples and table.store is None:
            try:
                with self._exclusive(train=True, plain=True):
                    self._flat.write(w)
                    x, y = self._reader.batch(table, rows)
                    in_dims = (None, 0, 0)
                    each = vmap(grad(self._sample_loss), in_dims, randomness="different")
                    by_name = each(self._flat.named(self._flat.parameters), x, y)
                    gradients = self._flat.from_named(by_name, len(rows))
                    return GradientRows(gradients.cpu().numpy())
            except RuntimeError:
                # vmap does not support every module. A real error occurs again below.
                self._batches_samples = False
        return gradients_in_turn(self, w, table, rows)

    def outputs(self, w: Float32, table: Table) -> Float32 | None:
        """Return the module's outputs if they are one number or one row per sample."""
        return self.outputs_and_targets(w, table)[0]

    def outputs_and_targets(
        self, w: Float32, table: Table
    ) -> tuple[Float32 | None, Targets]:
        try:
            output, y = self._predict(w, table)
        except (TypeError, RuntimeError):  # outputs are not tensors, or of different shapes
            return None, table.y
        samples = len(table)
        if output.ndim not in (1, 2) or len(output) != samples or y.numel() != samples:
            return None, table.y
        rows = output.reshape(samples, -1).float().cpu().numpy()
        return rows, y.reshape(-1).cpu().numpy()

    def last_layer(self, w: Float32, table: Table) -> LastLayer | None:
        own_loss = self._options["loss"] is not None
        if own_loss or self.target not in ("auto", "classes", "real"):
            return None
        with self._exclusive(train=False, plain=True), torch.no_grad():
            self._flat.write(w)
            first = replace(table, x=table.x[:1], y=table.y[:1])
            (one,) = self._reader.batches(first, all_in_parts(first, 1))
            layer = self._flat.last_linear(lambda: self._output(one[0]))
            if layer is None:
                return None
            batches = list(self._reader.batches(table, all_in_parts(table, _PREDICTED)))
            inputs = inputs_of(layer, [partial(self._output, each) for each, _ in batches])
        y = torch.cat([y for _, y in batches])
        classes = not y.is_floating_point()
        flat = inputs.ndim == 2 and len(inputs) == y.numel() == len(table)
        if not flat or not (classes or layer.out_features == 1):
            return None
        return LastLayer(
            inputs.float().cpu().numpy(),
            y.reshape(-1).float().cpu().numpy(),
            *self._flat.positions(layer),
            classes,
            tuple(map(float, self._options["class_weights"] or ())),
        )

    def accuracy(self, w: Float32, table: Table) -> float | None:
        metric = self._metrics.get("accuracy")
        real = self.target in ("real", "raw", "none")
        if metric is None and (real or (self.target == "auto" and not table.labels)):
            return None
        output, y = self._predict(w, table)
        if metric is None:
            metric = sign_accuracy if self.target == "binary" else class_accuracy
            if self.target == "auto" and (y.is_floating_point() or output.ndim != 2):
                return None
        return float(metric(output, y))

    def _evaluate(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
        losses = []
        at_once = _ROWS if self._flat.module.training else _PREDICTED
        unique, alike = first_alike(shards, indices, w)
        updates = [(node, 0) for node in unique.tolist()]
        batches = self._reader.of_updates(shards, indices, updates, at_once)
        for node, (positions, parts) in zip(unique, batches, strict=True):
            self._flat.write(w[node % len(w)])
            shares = [
                float(self._loss_of(part, batch)) * len(part) / len(positions)
                for part, batch in parts
            ]
            losses.append(sum(shares))
        return np.array(losses)[alike]

    def _backward(self, positions: Rows, parts: Iterator[tuple[Rows, Batch]]) -> Tensor:
        """Return the loss at the module's w, with its gradient in `self._flat.gradient`."""
        self._flat.gradient.zero_()
        total = torch.zeros((), device=self._device)
        for part, batch in parts:
            loss = self._loss_of(part, batch) * (len(part) / len(positions))
            if not loss.requires_grad:
                raise UserError(
                    f"{self.name}'s loss has no gradient: it is detached from the output "
                    "of the module"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _predict(self, w: Float32, table: Table) -> tuple[Tensor, Tensor]:
        """Return the outputs and targets of a whole table. The last result is cached."""
        cached = self._predicted
        if cached is not None and cached[0] is table and np.array_equal(cached[1], w):
            return cached[2]
        with self._exclusive(train=False), torch.no_grad():
            self._flat.write(w)
            batches = self._reader.batches(table, all_in_parts(table, _PREDICTED))
            pairs = [(self._output(inputs), y) for inputs, y in batches]
        output, y = (torch.cat(each) for each in zip(*pairs, strict=True))
        self._predicted = table, w.copy(), (output, shaped_like(output, y))
        return self._predicted[2]

    def _loss_of(self, positions: Rows, batch: Batch) -> Tensor:
        seed_random(self._device, seed_of(positions))
        inputs, y = batch
        return self._mean_loss(self._output(inputs), y)

    def _loss_at(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Loss of one node's batch as a function of the parameters, for torch.func."""
        return self._mean_loss(functional_call(self._flat.module, parameters, (x,)), y)

    def _sample_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self._loss_at(parameters, x[None], y[None])

    def _output(self, inputs: Any) -> Any:
        kind = self._device.type
        try:
            with torch.autocast(kind, torch.bfloat16) if self._autocast else nullcontext():
                output = call(self._flat.module, inputs)
        except ValueError as error:
            refuse_single_sample(self.name, error)
            raise
        return output.float() if self._autocast and isinstance(output, Tensor) else output

    def _mean_loss(self, output: Any, y: Tensor) -> Tensor:
        loss = self._loss(output, shaped_like(output, y))
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            kind = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"{self.name}'s loss must be a tensor of one number, the mean over the "
                f"batch, not {kind}"
            )
        return loss

    @contextmanager
    def _exclusive(self, *, train: bool, plain: bool = False) -> Iterator[None]:
        """Lock the module, and restore random numbers at the end.

        Args:
          train: training mode or evaluation mode.
          plain: PyTorch's own layers only.
        """
        devices = [self._device] if self._device.type == "cuda" else []
        faster = self._convolves and not self._autocast and not plain
        layers = FasterLayers() if faster else nullcontext()
        with TORCH_RANDOM_LOCK, torch.random.fork_rng(devices=devices), layers:
            self._flat.train(training=train)
            yield
