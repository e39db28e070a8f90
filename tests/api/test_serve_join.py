"""`fedbudget.serve` and `fedbudget.join` over a real network stack, with custom models and
data.

The nodes are threads of this process. tests/system/test_own_models.py has runs with
separate processes.
"""

import logging
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbudget
from fedbudget.errors import UserError, WorkError
from fedbudget.models import TorchModel
from fedbudget.result import Result
from support.processes import sample_shards

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OPTIONS: dict[str, Any] = {
    "budget": "time=1000000s",
    "tau": 4,
    "rounds": 5,
    "seed": 3,
    "batch_size": 8,
    "compress": "none",
    "validation": 0.0,  # measured costs decide which rounds validate
}
LONG = 60.0  # timeout in seconds, never reached


class Net(nn.Sequential):
    def __init__(self, width: int = 7) -> None:
        super().__init__(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def wide() -> nn.Module:
    return Net(9)


def deep() -> nn.Sequential:
    torch.manual_seed(5)  # frozen layers must be equal everywhere
    return nn.Sequential(
        nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)
    )


def last_layer_only() -> nn.Sequential:
    """The same network with all layers frozen except the last."""
    net = deep()
    net[:-1].requires_grad_(False)
    return net


def smooth(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, label_smoothing=0.1)


def least_squares(w: Any, x: Any, y: Any) -> tuple[float, Any]:
    error = x @ w - y
    return 0.5 * float(np.mean(error**2)), x.T @ error / len(y)


class Words(nn.Module):
    """Scores of texts of any length, from the mean of their word vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 4)
        self.score = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        scores: Tensor = self.score(self.words(tokens, starts))
        return scores


def texts(seed: int, count: int) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, 20, rng.integers(1, 9)).tolist() for _ in range(count)]
    return [(text, int(sum(text) / len(text) > 9)) for text in drawn]


def collate_texts(samples: list[tuple[list[int], int]]) -> tuple[Any, Tensor]:
    ends = np.cumsum([len(text) for text, _ in samples])
    tokens = torch.tensor([word for text, _ in samples for word in text])
    return (tokens, torch.tensor([0, *ends[:-1]])), torch.tensor(
        [label for _, label in samples]
    )


@pytest.fixture
def nodes() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_node(
    pool: ThreadPoolExecutor, address: str, name: str, **more: Any
) -> "Future[int]":
    return pool.submit(
        fedbudget.join,
        address,
        name=name,
        give_up_after=LONG,
        quiet=True,
        seeded_batches=True,
        **more,
    )


def run(
    pool: ThreadPoolExecutor, address: str, model: Any, shards: Sequence[Any], **more: Any
) -> Result:
    """Run an aggregator with one node per shard."""
    started = [
        start_node(pool, address, f"n{i}", model=model, data=shard)
        for i, shard in enumerate(shards)
    ]
    result = fedbudget.serve(
        address, model=model, nodes=len(shards), quiet=True, **{**OPTIONS, **more}
    )
    assert [each.result(LONG) for each in started] == [len(result.rounds)] * len(shards)
    return result


@pytest.mark.parametrize(
    ("model", "shards"),
    [
        (Net, sample_shards(2)),
        (TorchModel(Net, loss=smooth), sample_shards(2)),
        (
            lambda: nn.Sequential(
                nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)
            ),
            sample_shards(2),
        ),
        (fedbudget.FunctionModel(least_squares, initial=np.zeros(6)), sample_shards(2)),
        (TorchModel(Words, collate=collate_texts), [texts(1, 30), texts(2, 20)]),
    ],
    ids=["class", "loss", "batch normalization", "function", "texts"],
)
def test_same_bits_as_in_process(
    nodes: ThreadPoolExecutor, address: str, model: Any, shards: Any
) -> None:
    over_network = run(nodes, address, model, shards)
    whole = fedbudget.train(model=model, shards=shards, costs="measured", **OPTIONS)
    assert over_network.w.tobytes() == whole.w.tobytes()
    assert [record.loss for record in over_network.rounds] == [
        record.loss for record in whole.rounds
    ]


@pytest.mark.parametrize(("method", "vectors"), [("frugal", 2), ("accelerated", 3)])
def test_frozen_layers_are_not_sent(
    nodes: ThreadPoolExecutor, address: str, method: str, vectors: int
) -> None:
    """Checked with the bytes on the wire: four per parameter in each vector of a round."""
    options = {"method": method, "budget": ["time=1h", "bytes=1GB"]}
    whole, reduced = (
        run(nodes, address, model, sample_shards(2), **options)
        for model in (deep, last_layer_only)
    )
    frozen = sum(
        each.numel() for each in last_layer_only().parameters() if not each.requires_grad
    )
    assert whole.w.size - reduced.w.size == frozen
    rounds = [
        np.diff([record.spent["bytes"] for record in result.rounds[:-1]])
        for result in (whole, reduced)
    ]
    # Two nodes. Headers make up the difference.
    np.testing.assert_allclose(rounds[0] - rounds[1], 2 * vectors * 4 * frozen, rtol=1e-3)
    # 183 of 4,263 parameters are 4.3 %, plus headers.
    assert reduced.spent["bytes"] < 0.06 * whole.spent["bytes"]

    before = last_layer_only()
    after = TorchModel(last_layer_only).trained(reduced.w)
    changed = [
        not torch.equal(*pair)
        for pair in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert changed == [False] * 4 + [True] * 2
    assert reduced.rounds[-1].loss < reduced.rounds[0].loss


@pytest.mark.parametrize("model", ["softmax", Net])
def test_workload_by_speed_as_in_process(
    nodes: ThreadPoolExecutor, address: str, model: Any
) -> None:
    options = {
        "tau": "adaptive",
        "costs": "simulated",
        "speeds": (4.0, 1.0, 2.0),
        "budget": "time=20s",
        "rounds": 8,
    }
    own = {} if isinstance(model, str) else {"model": model}
    shards = sample_shards(3)
    started = [
        start_node(nodes, address, f"n{i}", data=shard, **own)
        for i, shard in enumerate(shards)
    ]
    over_network = fedbudget.serve(
        address, model=model, nodes=3, quiet=True, **{**OPTIONS, **options}
    )
    assert [each.result(LONG) for each in started] == [len(over_network.rounds)] * 3
    whole = fedbudget.train(
        model=model, shards=shards, combine="clipped", **{**OPTIONS, **options}
    )  # as serve does
    assert [record.work for record in over_network.rounds] == [
        record.work for record in whole.rounds
    ]
    assert any(
        record.work and len(set(record.work["updates"])) == 3 for record in whole.rounds
    )
    assert over_network.w.tobytes() == whole.w.tobytes()
    assert over_network.spent == whole.spent


def test_module_instance_starts_from_the_aggregator(
    nodes: ThreadPoolExecutor, address: str
) -> None:
    ours, theirs = Net(), Net()
    started = start_node(nodes, address, "n1", model=theirs, data=sample_shards(1)[0])
    result = fedbudget.serve(
        address, model=ours, quiet=True, **{**OPTIONS, "rounds": 1, "step_size": 1e-12}
    )
    assert started.result(LONG) == 2
    expected = torch.cat([each.detach().reshape(-1) for each in ours.parameters()]).numpy()
    np.testing.assert_allclose(result.w, expected, rtol=1e-6)


def test_aggregator_with_data_and_test_samples(
    nodes: ThreadPoolExecutor, address: str
) -> None:
    one, two = sample_shards(2)
    started = start_node(nodes, address, "n1", model=Net, data=lambda: two)
    result = fedbudget.serve(
        address, model=Net, data=one, test=two, nodes=2, quiet=True, **OPTIONS
    )
    assert started.result(LONG) == len(result.rounds)
    whole = fedbudget.train(
        model=Net, shards=[one, two], test=two, costs="measured", **OPTIONS
    )
    assert (result.w.tobytes(), result.accuracy) == (whole.w.tobytes(), whole.accuracy)


@pytest.mark.parametrize(
    ("trained", "wrong", "words"),
    [
        (
            Net,
            wide,
            "parameter 0.weight is 9 x 6 of float32 at the node, "
            "and 7 x 6 of float32 at the aggregator",
        ),
        (Net, TorchModel(Net, loss=smooth), "the loss is smooth, written as "),
        (
            TorchModel(Net, loss=smooth),
            Net,
            "the loss is the usual one at the node, and smooth, written as ",
        ),
        (
            Net,
            None,
            "it trains a named model, and the aggregator net (TorchModel, 73 parameters)",
        ),
        (
            Net,
            "softmax",
            "it trains softmax, and the aggregator net (TorchModel, 73 parameters)",
        ),
        (
            "softmax",
            Net,
            "it trains net (TorchModel, 73 parameters), and the aggregator softmax",
        ),
        ("softmax", "svm", "it trains svm, and the aggregator softmax"),
    ],
)
def test_node_with_other_model_is_refused(
    nodes: ThreadPoolExecutor,
    address: str,
    caplog: pytest.LogCaptureFixture,
    trained: Any,
    wrong: Any,
    words: str,
) -> None:
    """Both before the first round and during the run. The other nodes continue."""
    samples = sample_shards(1)[0]
    early = start_node(nodes, address, "early", model=wrong, data=samples)
    late: list[Future[int]] = []
    right: list[Future[int]] = []

    def next_round(record: fedbudget.RoundRecord) -> bool:
        if not late:
            late.append(start_node(nodes, address, "late", model=wrong, data=samples))
        return late[0].done()

    def join_when_early_is_refused() -> None:
        assert early.exception(LONG) is not None
        right.append(start_node(nodes, address, "right", model=trained, data=samples))

    nodes.submit(join_when_early_is_refused)
    with caplog.at_level(logging.WARNING, "fedbudget.network"):
        options = {**OPTIONS, "rounds": None, "callbacks": [next_round]}
        result = fedbudget.serve(address, model=trained, nodes=1, quiet=True, **options)
    assert right[0].result(LONG) >= 2
    assert result.stopped_by == "callback"
    for name, refused in (("early", early), ("late", late[0])):
        error = refused.exception(LONG)
        assert isinstance(error, WorkError)
        assert str(error).startswith(f"{address} refused {name}: {name} cannot take part: ")
        assert words in str(error)
        assert any(name in each and words in each for each in caplog.messages)


def test_nodes_refuse_samples_without_finite_loss(
    nodes: ThreadPoolExecutor, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples = list(zip(*sample_shards(1)[0], strict=True))  # a list is read lazily
    not_finite = [(row * np.float32("nan"), label) for row, label in samples]
    words = "the loss of net is nan before training: the samples contain non-finite numbers"
    invalid = start_node(nodes, address, "invalid", model=Net, data=not_finite)

    def join_when_invalid_left() -> int:
        assert words in str(invalid.exception(LONG))
        return start_node(nodes, address, "valid", model=Net, data=samples).result(LONG)

    valid = nodes.submit(join_when_invalid_left)
    with caplog.at_level(logging.WARNING, "fedbudget.network"):
        result = fedbudget.serve(address, model=Net, nodes=1, quiet=True, **OPTIONS)
    assert valid.result(LONG) == len(result.rounds)
    assert [each.split(" at ")[0] for each in caplog.messages] == ["invalid"]
    assert words in caplog.messages[0]
    with pytest.raises(UserError, match=words):
        fedbudget.train(model=Net, shards=[not_finite], budget="time=1s")


def test_late_node_takes_part(nodes: ThreadPoolExecutor, address: str) -> None:
    shards = sample_shards(3)
    started = [
        start_node(nodes, address, f"n{i}", model=Net, data=shards[i]) for i in (0, 1)
    ]

    def next_round(record: fedbudget.RoundRecord) -> bool:
        if record.round == 3:
            started.append(start_node(nodes, address, "n2", model=Net, data=shards[2]))
        return record.nodes == 3

    options = {**OPTIONS, "rounds": None, "callbacks": [next_round]}
    result = fedbudget.serve(address, model=Net, nodes=2, quiet=True, **options)
    first, second, last = [each.result(LONG) for each in started]
    assert abs(first - second) <= 1  # the run ended in the middle of a round
    assert min(first, second) > last >= 1
    assert [record.nodes for record in result.rounds[:-1]] == [2] * (len(result.rounds) - 1)


def test_mixed_targets_are_regression_everywhere(
    nodes: ThreadPoolExecutor, address: str
) -> None:
    """If one node has integers and another has other numbers, all nodes predict numbers."""
    x = sample_shards(1)[0][0]
    shards = [(x, np.arange(len(x)) % 3), (x, np.linspace(0.5, 2.5, len(x)))]
    model = TorchModel(lambda: nn.Linear(6, 1))
    whole = fedbudget.train(model=model, shards=shards, costs="measured", **OPTIONS)
    assert run(nodes, address, model, shards).w.tobytes() == whole.w.tobytes()


def test_wrong_data_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="must be"):
        fedbudget.join(address, data=5)  # type: ignore[arg-type]


def test_private_tables_share_a_schema(
    nodes: ThreadPoolExecutor, address: str, tmp_path: Path
) -> None:
    """The model holds the scale of the file; a node with another one is refused."""
    (tmp_path / "schema.toml").write_text(
        '[target]\nname = "y"\nclasses = ["a", "b"]\n[columns]\nx = { range = [0, 8] }\n'
    )
    (tmp_path / "other.toml").write_text(
        '[target]\nname = "y"\nclasses = ["a", "b"]\n[columns]\nx = { range = [0, 9] }\n'
    )
    for number in range(2):
        rows = "".join(f"{i * 0.7},{'ab'[i % 2]}\n" for i in range(20 + number))
        (tmp_path / f"{number}.csv").write_text("x,y\n" + rows)
    tables: dict[str, Any] = {
        "schema": tmp_path / "schema.toml",
        "privacy_limit": 9.0,
        "privacy_delta": 1e-5,
    }
    started = [
        start_node(
            nodes,
            address,
            f"n{number}",
            data=str(tmp_path / f"{number}.csv"),
            privacy_account=tmp_path / f"account{number}.json",
            **tables,
        )
        for number in range(2)
    ]
    odd = start_node(
        nodes,
        address,
        "odd",
        data=str(tmp_path / "0.csv"),
        schema=tmp_path / "other.toml",
    )
    result = fedbudget.serve(
        address,
        model="softmax",
        nodes=2,
        schema=str(tmp_path / "schema.toml"),
        budget=["time=1000000s", "privacy=8"],
        rounds=3,
        tau=2,
        quiet=True,
    )
    with pytest.raises(WorkError, match="another schema or scale"):
        odd.result(LONG)
    assert [each.result(LONG) for each in started] == [3, 3]
    scale = result.model.samples.standardization
    assert scale is not None
    assert (scale.mean.tolist(), scale.deviation.tolist()) == ([4.0], [4.0])
    assert result.sources["privacy"] == "accounted"
