"""Inputs of PyTorch models: integers, several inputs, sequences, Datasets with transforms
and workers, and mixed precision.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedbudget
from fedbudget.data.files import from_shards
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards
from fedbudget.errors import UserError
from fedbudget.models import TorchModel, loss_over
from support.networks import network, random_w, table, three_nodes

WORDS, CLASSES = 20, 3


class TextClassifier(nn.Module):
    """Embedding, attention over the tokens that are present, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=0)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.scores = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        words = self.embed(tokens)
        attended, _ = self.attend(
            words, words, words, key_padding_mask=~mask, need_weights=False
        )
        mean = (attended * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        scores: Tensor = self.scores(mean)
        return scores


def texts(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Token ids of different lengths. The class is the most frequent of the first words."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        label = int(rng.integers(CLASSES))
        length = int(rng.integers(3, 12))
        tokens = rng.integers(CLASSES + 1, WORDS, length)
        tokens[: 1 + length // 3] = label + 1
        samples.append((rng.permutation(tokens).tolist(), label))
    return samples


def collate(samples: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    tokens = pad_sequence([torch.tensor(each) for each, _ in samples], batch_first=True)
    return {"tokens": tokens, "mask": tokens > 0}, torch.tensor(
        [label for _, label in samples]
    )


class TestText:
    def test_attention_learns_variable_lengths(self) -> None:
        model = TorchModel(TextClassifier, collate=collate)
        shards = [texts(120, seed) for seed in range(3)]
        result = fedbudget.train(
            model=model,
            shards=shards,
            test=texts(200, 9),
            budget="time=3s",
            costs="simulated",
            batch_size=20,
        )
        assert result.accuracy is not None
        assert result.accuracy > 0.95
        module = model.trained(result.w)
        inputs, y = collate(texts(200, 9))
        with torch.no_grad():
            assert (
                module(**inputs).argmax(dim=1) == y
            ).double().mean().item() == result.accuracy

    def test_batch_loss_matches_samples(self) -> None:
        model = TorchModel(TextClassifier, collate=collate)
        dataset = from_shards([texts(10, 0), texts(14, 1)], None)
        shards = Shards.of(
            dataset.table(dataset.train, model.target), [np.arange(10), np.arange(10, 24)]
        )
        indices = Sampler(shards.size, 4, seed=0).round(1)
        result = model.losses(model.initial(0)[None], shards, indices)
        module, samples = model.trained(model.initial(0)), [*texts(10, 0), *texts(14, 1)]
        for node in range(2):
            rows = shards.rows_of(node)[indices.of(node, 0, 0)]
            inputs, y = collate([samples[row] for row in rows])
            with torch.no_grad():
                expected = nn.functional.cross_entropy(module.train()(**inputs), y).item()
            assert result[node] == pytest.approx(expected, rel=1e-5)


class TestIntegers:
    def test_module_receives_integers(self) -> None:
        module = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
        x = np.random.default_rng(0).integers(0, 9, (40, 3))
        y = (x[:, 0] > 4).astype(np.int64)
        result = fedbudget.train(
            model=module,
            shards=[(x[:20], y[:20]), (x[20:], y[20:])],
            budget="time=4s",
            costs="simulated",
        )
        module = TorchModel(module).trained(result.w)  # type: ignore[assignment]
        with torch.no_grad():
            expected = nn.functional.cross_entropy(
                module(torch.from_numpy(x)), torch.from_numpy(y)
            ).item()
        assert result.loss == pytest.approx(expected, rel=1e-5)

    def test_input_dtypes(self) -> None:
        """Pixels and floats arrive as float32, other integers as int64."""
        kinds = []

        class RecordsDtype(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                kinds.append(x.dtype)
                return super().forward(x)

        for x in (np.ones((4, 2), np.uint8), np.ones((4, 2)), np.ones((4, 2), np.int16)):
            dataset, model = (
                from_shards([(x, [0, 1, 0, 1])], None),
                TorchModel(RecordsDtype(2, 2)),
            )
            try:
                model.accuracy(model.initial(0), dataset.table(dataset.train, model.target))
            except RuntimeError:  # a linear layer accepts no integers
                assert x.dtype == np.int16
        assert kinds == [torch.float32, torch.float32, torch.int64]

    def test_builtin_models_convert_to_float(self) -> None:
        x = np.random.default_rng(0).integers(0, 9, (40, 3))
        y = (x[:, 0] > 4).astype(np.int64)
        whole, real = (
            fedbudget.train(
                model="softmax", shards=[(each, y)], budget="time=1s", costs="simulated"
            )
            for each in (x, x.astype(np.float32))
        )
        assert whole.w.tobytes() == real.w.tobytes()


class Two(nn.Module):
    """Adds the scores of two inputs, one argument each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        scores: Tensor = self.left(left) + self.right(right)
        return scores


class TestSeveralInputs:
    X = np.random.default_rng(1).normal(size=(30, 5)).astype(np.float32)
    Y = np.random.default_rng(2).integers(0, 3, 30)

    def shard(self, kind: str) -> Any:
        left, right, y = self.X[:, :2], self.X[:, 2:], self.Y
        rows = range(len(y))
        return {
            "tuple of arrays": ((left, right), y),
            "mapping of arrays": ({"right": right, "left": left}, y),
            "tuples": [(left[i], right[i], y[i]) for i in rows],
            "nested": [((left[i], right[i]), int(y[i])) for i in rows],
            "mappings": [
                {"left": left[i], "labels": y[i], "right": right[i]} for i in rows
            ],
            "dataset": TensorDataset(
                *(torch.from_numpy(each) for each in (left, right, y))
            ),
        }[kind]

    @pytest.mark.parametrize(
        "kind",
        ["tuple of arrays", "mapping of arrays", "tuples", "nested", "mappings", "dataset"],
    )
    def test_inputs_become_arguments(self, kind: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = Two()
        result = fedbudget.train(
            model=module,
            shards=[self.shard(kind)] * 2,
            test=self.shard(kind),
            budget="time=1s",
            costs="simulated",
            batch_size=10,
        )
        with torch.no_grad():
            x = torch.from_numpy(self.X)
            output = TorchModel(module).trained(result.w)(x[:, :2], x[:, 2:])
        expected = nn.functional.cross_entropy(output, torch.from_numpy(self.Y)).item()
        assert result.loss == pytest.approx(expected, rel=1e-5)
        assert result.accuracy == (output.argmax(dim=1).numpy() == self.Y).mean()

    def test_arrays_and_samples_same_run(self) -> None:
        """Arrays of rows and the same samples one by one."""
        results = [
            fedbudget.train(
                model=network(),
                shards=[shard, shard],
                budget="time=1s",
                costs="simulated",
                batch_size=10,
            ).w.tobytes()
            for shard in ((self.X, self.Y), list(zip(self.X, self.Y, strict=True)))
        ]
        assert results[0] == results[1]


class Noisy(Dataset[Any]):
    """Samples with noise from each random generator that transforms may use."""

    def __init__(self, reads: list[int] | None = None) -> None:
        data = table(samples=90)
        self.x, self.targets = torch.from_numpy(data.x), data.y.astype(int).tolist()
        self.reads = reads

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.reads is not None:
            self.reads.append(index)
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1)  # noqa: NPY002
        return self.x[index] + noise + 0.1 * torch.randn(5), self.targets[index]


class TestDatasets:
    def test_samples_are_read_on_demand(self) -> None:
        reads: list[int] = []
        model, dataset = TorchModel(network()), from_shards([Noisy(reads)], None)
        shards = Shards.whole(dataset.table(dataset.train, model.target))
        assert not reads
        indices = Sampler(shards.size, 7, seed=0).round(3)
        model.descend(model.initial(0)[None], shards, indices, 0.1)
        assert reads == indices.positions.reshape(-1).tolist()

    def test_workers_do_not_change_results(self) -> None:
        """Random numbers of transforms depend only on the mini-batch, and the program's
        random state stays unchanged.
        """
        actual = []
        for workers in (0, 2):
            random.seed(workers)
            np.random.seed(workers)  # noqa: NPY002
            before = _random_states()
            model = TorchModel(network(), workers=workers)
            result = fedbudget.train(
                model=model,
                dataset=Noisy(),
                nodes=3,
                case=2,
                budget="time=0.5s",
                costs="simulated",
                batch_size=5,
            )
            actual.append(result.w.tobytes())
            assert _random_states() == before
        assert actual[0] == actual[1]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_transforms_independent_of_fleet(self, workers: int) -> None:
        model = TorchModel(network(), workers=workers)

        def last_of(count: int) -> Any:
            """w of the last of `count` nodes that each hold all samples."""
            dataset = from_shards([Noisy()] * count, None)
            rows = np.split(np.arange(90 * count), count)
            shards = Shards.of(dataset.table(dataset.train, model.target), rows)
            return model.descend(
                random_w(model, 7)[None],
                shards,
                Sampler(shards.size, 7, seed=0).round(2),
                0.1,
            ).w[-1]

        np.testing.assert_array_equal(last_of(1), last_of(2))

    def test_dataset_is_partitioned_by_class(self) -> None:
        model = TorchModel(network())
        result = fedbudget.train(
            model=model,
            dataset=Noisy(),
            test=Noisy(),
            nodes=3,
            case=2,
            budget="time=4s",
            costs="simulated",
            validation=0,
        )
        assert result.accuracy is not None
        assert result.loss < loss_over(model, model.initial(1), table(samples=90))


def _random_states() -> list[Any]:
    """States of all global random generators."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), numpy[1].tolist(), torch.random.get_rng_state().tolist()]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from iter([])


class TestRefused:
    @pytest.mark.parametrize(
        ("shard", "message"),
        [
            ([], "shard 0 has no samples"),
            (Endless(), "shard 0 has no length; mini-batches need a map-style Dataset"),
            (np.zeros((3, 2)), "shard 0 must be .* a Dataset or a list, not a ndarray"),
            ("file.csv", "shard 0 must be .* not a str"),
            (
                ({"a": [[1], [2]]}, [1, 2, 3]),
                r"an input has shape \(2, 1\), but there are 3 targets",
            ),
            (
                ([[1, 2], [3]], [0, 1]),
                "shard 0: samples have different shapes; pass a list of samples",
            ),
            (
                [{"a": 1}],
                "a mini-batch that is a mapping needs its target as `?labels`?; it has a",
            ),
            ([(1,)], r"a mini-batch must be \(inputs, target\) .*, not a list of 1"),
            ([1, 2], "a mini-batch must be .*, not a Tensor"),
            (
                [(torch.zeros(5), "yes")],
                "the target of a mini-batch must be a tensor, not a ",
            ),
        ],
    )
    def test_invalid_shards(self, shard: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            fedbudget.train(
                model=network(), shards=[shard], budget="time=1s", costs="simulated"
            )

    def test_builtin_models_need_arrays(self) -> None:
        message = "only a PyTorch model accepts samples that are read one by one"
        with pytest.raises(UserError, match=message):
            fedbudget.train(
                model="softmax", shards=[Noisy()], budget="time=1s", costs="simulated"
            )


class TestAutocast:
    def test_bfloat16_outputs_float32_parameters(self) -> None:
        kinds = set()

        class RecordsDtype(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                output = super().forward(x)
                kinds.add(output.dtype)
                return output

        data = table()
        shards, results = three_nodes(data), {}
        for autocast in (False, True):
            model = TorchModel(
                lambda: nn.Sequential(RecordsDtype(5, 7), nn.Tanh(), nn.Linear(7, 3)),
                autocast=autocast,
            )
            w = random_w(model, 0)
            results[autocast] = model.descend(
                w[None], shards, BatchIndices.whole(3, 3), 0.1, best=w
            )
        assert kinds == {torch.float32, torch.bfloat16}
        assert not np.array_equal(results[True].w, results[False].w)
        # bfloat16 has 8 bits.
        np.testing.assert_allclose(results[True].w, results[False].w, atol=0.02)
        np.testing.assert_allclose(results[True].losses, results[False].losses, rtol=0.02)

    def test_convolutional_network_learns(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10)
            )

        result = fedbudget.train(
            model=TorchModel(make, autocast=True),
            dataset="digits",
            budget="time=4s",
            costs="simulated",
        )
        assert result.accuracy is not None
        assert result.accuracy > 0.8


def test_output_with_logits() -> None:
    """Models of transformers return such an object."""

    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    plain, wrapped = nn.Linear(5, 3), Wrapped(5, 3)
    wrapped.load_state_dict(plain.state_dict())
    data: Mapping[str, Any] = {
        "shards": [(table().x, table().y)],
        "budget": "time=0.5s",
        "costs": "simulated",
    }
    assert (
        fedbudget.train(model=wrapped, **data).w.tobytes()
        == fedbudget.train(model=plain, **data).w.tobytes()
    )
