"""A PyTorch module that does not go with the samples: said in one line before the first
round, and no run changed.
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
from fedbudget.protocol.messages import Request
from support.networks import network, table

IMAGES = r"samples \[100, 1, 8, 8\]"


class Deep(nn.Module):
    """Layers within layers, of which one is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 30), nn.Sequential(nn.Tanh(), nn.Linear(20, 10))
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


class Gives(nn.Module):
    """Something else than its ten scores."""

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
        rf"linear cannot train on digits: given a batch of {IMAGES}, it raised RuntimeError: mat1 and mat2 shapes "
        r"cannot be multiplied \(800x8 and 10x3\); the module must accept samples \[1, 8, 8\] of 64 numbers each; "
        r"nn.Flatten\(\) turns them into rows",
    ),
    (
        flattened(nn.Linear(10, 3)),
        rf"given a batch of {IMAGES}, its layer 1, Linear\(in_features=10, .*\), raised RuntimeError: .* numbers each$",
    ),
    (
        Deep(),
        r"its layer body\.2\.1, Linear\(in_features=20, out_features=10, bias=True\), raised RuntimeError",
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
        rf"for a batch of {IMAGES} the module returns \[100, 3\], scores of 3 classes, but there are samples of class 9; "
        "give it 10 outputs, or pass a loss",
    ),
    (
        Gives(lambda scores: scores[:5]),
        rf"for a batch of {IMAGES} the module returns \[5, 10\], targets are \[100\] of int64, and the loss raised "
        r"ValueError: Expected input batch_size \(5\) to match target batch_size \(100\); return one row",
    ),
    (
        Gives(lambda scores: scores[0]),
        r"the module returns \(10,\), which are not scores of classes; pass a loss",
    ),
]


class TestTrain:
    @pytest.mark.parametrize(("module", "message"), MISFITS)
    @pytest.mark.parametrize(
        "options", [{}, {"nodes": 12, "batch_size": 100}, {"method": "asynchronous"}]
    )
    def test_misfit_is_said_in_a_line(
        self, module: nn.Module, message: str, options: Any
    ) -> None:
        """As well where many nodes are computed at once, which has other errors, and where
        there is no trial round.
        """
        with pytest.raises(UserError, match=message) as error:
            fedbudget.train(model=module, dataset="digits", budget="time=1s", **options)
        assert len(str(error.value).splitlines()) == 1

    def test_a_class_that_only_one_sample_has(self) -> None:
        """Mini-batches of 10 of 2000 samples would not show it for long."""
        data = table(2000)
        y = data.y.astype(np.int64)
        y[1234] = 7
        rounds: list[int] = []
        with pytest.raises(
            UserError,
            match="scores of 3 classes, but there are samples of class 7; give it 8 outputs",
        ):
            fedbudget.train(
                model=network(),
                shards=[(data.x, y)],
                budget="time=1s",
                batch_size=10,
                callbacks=[lambda record: rounds.append(record.round)],
            )
        assert rounds == []

    def test_a_class_that_is_only_tested_on(self) -> None:
        data = table()
        y = data.y.astype(np.int64)
        with pytest.raises(
            UserError, match="there are samples of class 3; give it 4 outputs"
        ):
            fedbudget.train(
                model=network(),
                shards=[(data.x, y)],
                test=(data.x, y + 1),
                budget="time=1s",
            )

    @pytest.mark.parametrize(
        ("module", "shape"),
        [(nn.Linear(5, 3), "20, 3"), (nn.Unflatten(1, (5, 1)), "20, 5, 1")],
    )
    def test_real_targets_beside_outputs_of_another_shape(
        self, module: nn.Module, shape: str
    ) -> None:
        """PyTorch would repeat one beside the other, and give a loss of pairs that do not
        belong together.
        """
        data = table(20)
        module = nn.Sequential(nn.Linear(5, 5), module)
        message = rf"the module returns \({shape}\), but targets are \(20,\): return one output per target"
        with pytest.raises(UserError, match=message):
            fedbudget.train(model=module, shards=[(data.x, data.x[:, 0])], budget="time=1s")

    def test_no_result_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither by random numbers that were drawn, nor by running statistics that went
        on.
        """

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
                model=module, dataset="digits", budget="time=1s"
            ).w.tobytes()

        checked = run()
        monkeypatch.setattr(TorchModel, "require_fit", lambda *_: None)
        assert run() == checked


class TestRequireFit:
    def test_buffers_and_random_numbers_stay_as_they_were(self) -> None:
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
    def test_the_batch_is_as_large_as_those_of_training(
        self, batch: int | None, samples: int
    ) -> None:
        """A module may be made for batches of one size; shards that are smaller fill them
        by repetition.
        """
        seen: list[int] = []

        def loss(output: Tensor, y: Tensor) -> Tensor:
            seen.append(len(output))
            return output.mean()

        TorchModel(network(), loss=loss).require_fit("data", table(60), batch)
        assert seen == [samples]

    def test_a_loss_of_ones_own_may_have_any_classes(self) -> None:
        model = TorchModel(
            nn.Linear(5, 2), loss=lambda output, y: (output.sum(dim=1) - y).square().mean()
        )
        model.require_fit("data", table(classes=3), None)

    def test_what_is_no_fault_of_the_module_is_left_as_it_is(self) -> None:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            raise MemoryError("all of it")

        with pytest.raises(MemoryError, match="all of it"):
            TorchModel(network(), loss=loss).require_fit("data", table(), None)

    def test_words_of_pytorch_are_no_names_of_options(self) -> None:
        def loss(output: Tensor, y: Tensor) -> Tensor:
            raise RuntimeError("`weight`\n  is wrong")

        with pytest.raises(
            UserError, match="raised RuntimeError: 'weight' is wrong; return"
        ) as error:
            TorchModel(network(), loss=loss).require_fit("data", table(), None)
        assert "--weight" not in error.value.spelled(lambda name: f"--{name}")

    def test_a_model_that_cannot_tell_is_not_asked(self) -> None:
        data = Table(np.zeros((4, 3), np.float32), np.zeros(4, np.float32))
        require_fit(Softmax(5, 2), "data", data, None)


def test_a_node_is_told_the_same() -> None:
    """Its own samples have a class that none of the first mini-batches would."""
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
    task = Task(describe(model), model.parameters, 5, 0, {}, "none", 10, samples, Request())
    message = "sequential cannot train on ward: .* samples of class 3; give it 4 outputs"
    with pytest.raises(UserError, match=message):
        Worker(data, model=model).start(Welcome("run", task, (0,)))
