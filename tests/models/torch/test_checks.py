"""Modules that do not fit the data: one clear line before the first round, and no effect on
other runs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedbudget
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.partition import Rows
from fedbudget.data.shards import Table
from fedbudget.engines.remote.messages import Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.task import Task, agree
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.models import TorchModel
from fedbudget.models.base import require_fit
from fedbudget.models.builtin import Softmax
from fedbudget.models.description import describe
from support.networks import network, table

IMAGES = r"samples \[100, 1, 8, 8\]"


class Deep(nn.Module):
    """Nested layers with one of the wrong size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 30), nn.Sequential(nn.Tanh(), nn.Linear(20, 10))
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


class ChangedOutput(nn.Module):
    """Applies a function to its ten scores."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scores, self.change = nn.Linear(64, 10), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.scores(x.flatten(1)))


def flattened(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


MISFITS = [
    (
        nn.Linear(10, 3),
        rf"linear cannot train on digits: given a batch of {IMAGES}, it raised "
        rf"RuntimeError: mat1 and mat2 shapes "
        r"cannot be multiplied \(800x8 and 10x3\); the module must accept samples \[1, 8, "
        r"8\] of 64 numbers each; "
        r"nn.Flatten\(\) turns them into rows",
    ),
    (
        flattened(nn.Linear(10, 3)),
        rf"given a batch of {IMAGES}, its layer 1, Linear\(in_features=10, .*\), raised "
        rf"RuntimeError: .* numbers each$",
    ),
    (
        Deep(),
        r"its layer body\.2\.1, Linear\(in_features=20, out_features=10, bias=True\), "
        r"raised RuntimeError",
    ),
    (
        nn.Conv2d(3, 4, 3),
        r"raised RuntimeError: .*3 channels.*; the module must accept samples \[1, 8, 8\]",
    ),
    (
        nn.Bilinear(64, 64, 10),
        r"it raised TypeError: .*missing 1 required positional argument: 'input2'",
    ),
    (
        flattened(nn.Linear(64, 3)),
        rf"for a batch of {IMAGES} the module returns \[100, 3\], scores of 3 classes, "
        rf"but there are samples of class 9; "
        "give it 10 outputs, or pass a loss",
    ),
    (
        ChangedOutput(lambda scores: scores[:5]),
        rf"for a batch of {IMAGES} the module returns \[5, 10\], targets are \[100\] of "
        rf"int64, and the loss raised "
        r"ValueError: Expected input batch_size \(5\) to match target batch_size \(100\); "
        r"return one row",
    ),
    (
        ChangedOutput(lambda scores: scores[0]),
        r"the module returns \(10,\), which are not scores of classes; pass a loss",
    ),
    (
        flattened(nn.Linear(64, 1)),
        r"returns \(\d+, 1\), which are not scores of classes; pass a loss",
    ),
    (flattened(nn.GRU(64, 10)), "returns a tuple; pass a loss that accepts it"),
]


class TestTrain:
    @pytest.mark.parametrize(("module", "message"), MISFITS)
    @pytest.mark.parametrize(
        "options", [{}, {"nodes": 12, "batch_size": 100}, {"method": "asynchronous"}]
    )
    def test_misfit_is_one_line(
        self, module: nn.Module, message: str, options: Any
    ) -> None:
        """Also with many nodes computed together, which raise other errors, and without a
        trial round.
        """
        with pytest.raises(UserError, match=message) as error:
            fedbudget.train(
                model=module,
                dataset="digits",
                budget="time=1s",
                costs="simulated",
                **options,
            )
        assert len(str(error.value).splitlines()) == 1

    def test_class_of_one_sample(self) -> None:
        """Mini-batches of 10 of 2000 samples would rarely contain it."""
        data = table(2000)
        y = data.y.astype(np.int64)
        y[1234] = 7
        rounds: list[int] = []
        with pytest.raises(
            UserError,
            match="scores of 3 classes, but there are samples of class 7; give it 8 "
            "outputs",
        ):
            fedbudget.train(
                model=network(),
                shards=[(data.x, y)],
                budget="time=1s",
                costs="simulated",
                batch_size=10,
                callbacks=[lambda record: rounds.append(record.round)],
            )
        assert rounds == []

    def test_class_only_in_test_data(self) -> None:
        data = table()
        y = data.y.astype(np.int64)
        message = "there are samples of class 3; give it 4 outputs"
        with pytest.raises(UserError, match=message):
            fedbudget.train(
                model=network(),
                shards=[(data.x, y)],
                test=(data.x, y + 1),
                budget="time=1s",
                costs="simulated",
            )

    @pytest.mark.parametrize(
        ("module", "shape"),
        [(nn.Linear(5, 3), "20, 3"), (nn.Unflatten(1, (5, 1)), "20, 5, 1")],
    )
    def test_output_shape_must_match_targets(self, module: nn.Module, shape: str) -> None:
        """PyTorch would broadcast, and compute a loss over wrong pairs."""
        data = table(20)
        module = nn.Sequential(nn.Linear(5, 5), module)
        message = (
            rf"returns \({shape}\), but targets are \(20,\): return one output per target"
        )
        with pytest.raises(UserError, match=message):
            fedbudget.train(
                model=module,
                shards=[(data.x, data.x[:, 0])],
                budget="time=1s",
                costs="simulated",
            )

    def test_check_does_not_change_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The check draws no random numbers and changes no running statistics."""

        def run() -> bytes:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                module = flattened(
                    nn.Linear(64, 20),
                    nn.BatchNorm1d(20),
                    nn.Dropout(0.2),
                    nn.Linear(20, 10),
                )
            return fedbudget.train(
                model=module, dataset="digits", budget="time=1s", costs="simulated"
            ).w.tobytes()

        checked = run()
        monkeypatch.setattr(TorchModel, "require_fit", lambda *_: None)
        assert run() == checked


class TestRequireFit:
    def test_buffers_and_random_state_unchanged(self) -> None:
        class Counts(nn.Linear):
            steps: Tensor

            def __init__(self) -> None:
                super().__init__(5, 3)
                self.register_buffer("steps", torch.zeros(()))
                self.seen: list[float] = []

            def forward(self, x: Tensor) -> Tensor:
                self.steps += 1
                self.seen.append(float(self.steps))
                return super().forward(x)

        model = TorchModel(Counts(), buffers=["steps"])
        before = torch.random.get_rng_state()
        model.require_fit("data", table(), 10)
        model.require_fit("data", table(), 10)
        module: Any = model._flat.module
        assert module.seen == [1, 1]
        assert float(module.steps) == 0
        assert torch.equal(before, torch.random.get_rng_state())

    @pytest.mark.parametrize(("batch", "samples"), [(10, 10), (100, 100), (None, 60)])
    def test_batch_size_equals_training(self, batch: int | None, samples: int) -> None:
        """A module may need batches of one size; smaller shards fill a batch by
        repetition.
        """
        seen: list[int] = []

        def loss(output: Tensor, y: Tensor) -> Tensor:
            seen.append(len(output))
            return output.mean()

        TorchModel(network(), loss=loss).require_fit("data", table(60), batch)
        assert seen == [samples]

    def test_custom_loss_allows_any_classes(self) -> None:
        model = TorchModel(
            nn.Linear(5, 2), loss=lambda output, y: (output.sum(dim=1) - y).square().mean()
        )
        model.require_fit("data", table(classes=3), None)

    def test_other_errors_are_not_caught(self) -> None:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            raise MemoryError("out of memory")

        with pytest.raises(MemoryError, match="out of memory"):
            TorchModel(network(), loss=loss).require_fit("data", table(), None)

    def test_pytorch_message_is_not_rewritten(self) -> None:
        """Backquoted words of PyTorch must not become command line options."""

        def loss(output: Tensor, y: Tensor) -> Tensor:
            raise RuntimeError("`weight`\n  is wrong")

        message = "raised RuntimeError: 'weight' is wrong; return"
        with pytest.raises(UserError, match=message) as error:
            TorchModel(network(), loss=loss).require_fit("data", table(), None)
        assert "--weight" not in error.value.spelled(lambda name: f"--{name}")

    def test_models_without_check_are_accepted(self) -> None:
        data = Table(np.zeros((4, 3), np.float32), np.zeros(4, np.float32))
        require_fit(Softmax(5, 2), "data", data, None)


def test_node_raises_same_error() -> None:
    """The first mini-batches of the node do not contain its highest class."""
    rng = np.random.default_rng(0)
    labels = np.zeros(300, np.int64)
    labels[250] = 3
    rows: Rows = [np.arange(300)]
    dataset = Dataset(
        "ward",
        Part(rng.normal(0, 1, (300, 5)).astype(np.float32), labels),
        classes=tuple("0123"),
    )
    data = NodeData(dataset, rows)
    model = TorchModel(network())
    samples = agree([data.samples()])
    task = Task(describe(model), model.parameters, 5, 0, {}, "none", 10, samples, ())
    message = "sequential cannot train on ward: .* samples of class 3; give it 4 outputs"
    with pytest.raises(UserError, match=message):
        Worker(data, model=model).start(Welcome("run", task, (0,)))
