"""An aggregator and nodes from Python, over a real network stack: models and data of one's
own, whatever they are.

Nodes are threads of this process. What processes do to each other is in
tests/system/test_own_models.py."""

import logging
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from support.processes import made

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ASKED: dict[str, Any] = {
    "budget": "time=1000000s",
    "tau": 4,
    "rounds": 5,
    "seed": 3,
    "batch_size": 8,
    "compress": "none",
}
LONG = 60.0  # seconds that nothing takes


class Net(nn.Sequential):
    def __init__(self, width: int = 7) -> None:
        super().__init__(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def wide() -> nn.Module:
    return Net(9)


def deep() -> nn.Sequential:
    torch.manual_seed(5)  # layers that are frozen have to be the same everywhere
    return nn.Sequential(
        nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)
    )


def only_scores() -> nn.Sequential:
    """The same with all but its last layer frozen."""
    net = deep()
    net[:-1].requires_grad_(False)
    return net


def smooth(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, label_smoothing=0.1)


def least_squares(w: Any, x: Any, y: Any) -> tuple[float, Any]:
    error = x @ w - y
    return 0.5 * float(np.mean(error**2)), x.T @ error / len(y)


class Words(nn.Module):
    """Scores of texts of any length, from the mean of their words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 4)
        self.score = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        scores: Tensor = self.score(self.words(tokens, starts))
        return scores


def texts(seed: int, count: int) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, 20, rng.integers(1, 9)).tolist() for _ in range(count)]
    return [(text, int(sum(text) / len(text) > 9)) for text in found]


def several_texts(samples: list[tuple[list[int], int]]) -> tuple[Any, Tensor]:
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


def joined(pool: ThreadPoolExecutor, address: str, name: str, **more: Any) -> "Future[int]":
    return pool.submit(
        fedbudget.join, address, name=name, give_up_after=LONG, quiet=True, **more
    )


def run(
    pool: ThreadPoolExecutor, address: str, model: Any, shards: Sequence[Any], **more: Any
) -> Result:
    """With a node for each shard."""
    taking_part = [
        joined(pool, address, f"n{i}", model=model, data=shard)
        for i, shard in enumerate(shards)
    ]
    result = fedbudget.serve(
        address, model=model, nodes=len(shards), quiet=True, **{**ASKED, **more}
    )
    assert [each.result(LONG) for each in taking_part] == [len(result.rounds)] * len(shards)
    return result


@pytest.mark.parametrize(
    ("model", "shards"),
    [
        (Net, made(2)),
        (TorchModel(Net, loss=smooth), made(2)),
        (
            lambda: nn.Sequential(
                nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)
            ),
            made(2),
        ),
        (fedbudget.FunctionModel(least_squares, initial=np.zeros(6)), made(2)),
        (TorchModel(Words, collate=several_texts), [texts(1, 30), texts(2, 20)]),
    ],
    ids=["class", "loss", "batch normalization", "function", "texts"],
)
def test_w_is_the_same_as_in_process(
    nodes: ThreadPoolExecutor, address: str, model: Any, shards: Any
) -> None:
    over_network = run(nodes, address, model, shards)
    whole = fedbudget.train(model=model, shards=shards, costs="measured", **ASKED)
    assert over_network.w.tobytes() == whole.w.tobytes()
    assert [record.loss for record in over_network.rounds] == [
        record.loss for record in whole.rounds
    ]


@pytest.mark.parametrize(("method", "vectors"), [("frugal", 2), ("accelerated", 3)])
def test_layers_that_are_frozen_are_not_sent(
    nodes: ThreadPoolExecutor, address: str, method: str, vectors: int
) -> None:
    """By the bytes that were counted on the line, of which each parameter has four in each
    vector of a round.
    """
    asked = {"method": method, "budget": ["time=1h", "bytes=1GB"]}
    whole, part = (
        run(nodes, address, model, made(2), **asked) for model in (deep, only_scores)
    )
    frozen = sum(
        each.numel() for each in only_scores().parameters() if not each.requires_grad
    )
    assert whole.w.size - part.w.size == frozen
    rounds = [
        np.diff([record.spent["bytes"] for record in result.rounds[:-1]])
        for result in (whole, part)
    ]
    np.testing.assert_allclose(
        rounds[0] - rounds[1], 2 * vectors * 4 * frozen, rtol=1e-3
    )  # two nodes; headers
    assert (
        part.spent["bytes"] < 0.06 * whole.spent["bytes"]
    )  # 183 of 4,263 parameters are 4.3 %, besides headers

    before, after = only_scores(), TorchModel(only_scores).trained(part.w)
    changed = [
        not torch.equal(*pair)
        for pair in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert changed == [False] * 4 + [True] * 2
    assert part.rounds[-1].loss < part.rounds[0].loss


@pytest.mark.parametrize("model", ["softmax", Net])
def test_nodes_of_different_speeds_share_rounds_as_in_process(
    nodes: ThreadPoolExecutor, address: str, model: Any
) -> None:
    asked = {
        "tau": "adaptive",
        "costs": "simulated",
        "speeds": (4.0, 1.0, 2.0),
        "budget": "time=20s",
        "rounds": 8,
    }
    own = {} if isinstance(model, str) else {"model": model}
    shards = made(3)
    taking_part = [
        joined(nodes, address, f"n{i}", data=shard, **own) for i, shard in enumerate(shards)
    ]
    over_network = fedbudget.serve(
        address, model=model, nodes=3, quiet=True, **{**ASKED, **asked}
    )
    assert [each.result(LONG) for each in taking_part] == [len(over_network.rounds)] * 3
    whole = fedbudget.train(
        model=model, shards=shards, combine="clipped", **{**ASKED, **asked}
    )  # as serve does
    assert [record.work for record in over_network.rounds] == [
        record.work for record in whole.rounds
    ]
    assert any(
        record.work and len(set(record.work["updates"])) == 3 for record in whole.rounds
    )
    assert over_network.w.tobytes() == whole.w.tobytes()
    assert over_network.spent == whole.spent


def test_a_module_that_is_made_already_starts_as_the_aggregators(
    nodes: ThreadPoolExecutor, address: str
) -> None:
    ours, theirs = Net(), Net()
    taking_part = joined(nodes, address, "n1", model=theirs, data=made(1)[0])
    result = fedbudget.serve(
        address, model=ours, quiet=True, **{**ASKED, "rounds": 1, "step_size": 1e-12}
    )
    assert taking_part.result(LONG) == 2
    expected = torch.cat([each.detach().reshape(-1) for each in ours.parameters()]).numpy()
    np.testing.assert_allclose(result.w, expected, rtol=1e-6)


def test_the_aggregator_holds_data_and_tests_too(
    nodes: ThreadPoolExecutor, address: str
) -> None:
    one, two = made(2)
    taking_part = joined(nodes, address, "n1", model=Net, data=lambda: two)
    result = fedbudget.serve(
        address, model=Net, data=one, test=two, nodes=2, quiet=True, **ASKED
    )
    assert taking_part.result(LONG) == len(result.rounds)
    whole = fedbudget.train(
        model=Net, shards=[one, two], test=two, costs="measured", **ASKED
    )
    assert (result.w.tobytes(), result.accuracy) == (whole.w.tobytes(), whole.accuracy)


@pytest.mark.parametrize(
    ("trained", "wrong", "words"),
    [
        (
            Net,
            wide,
            "parameter 0.weight is 9 x 6 of float32 at the node, and 7 x 6 of float32 at the aggregator",
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
def test_a_node_with_another_model_is_refused_and_the_others_go_on(
    nodes: ThreadPoolExecutor,
    address: str,
    caplog: pytest.LogCaptureFixture,
    trained: Any,
    wrong: Any,
    words: str,
) -> None:
    """Before the first round, and while there are rounds."""
    samples = made(1)[0]
    early = joined(nodes, address, "early", model=wrong, data=samples)
    late: list[Future[int]] = []
    right: list[Future[int]] = []

    def next_round(record: fedbudget.RoundRecord) -> bool:
        if not late:
            late.append(joined(nodes, address, "late", model=wrong, data=samples))
        return late[0].done()

    def join_when_early_is_refused() -> None:
        assert early.exception(LONG) is not None
        right.append(joined(nodes, address, "right", model=trained, data=samples))

    nodes.submit(join_when_early_is_refused)
    with caplog.at_level(logging.WARNING, "fedbudget.network"):
        asked = {**ASKED, "rounds": None, "callbacks": [next_round]}
        result = fedbudget.serve(address, model=trained, nodes=1, quiet=True, **asked)
    assert right[0].result(LONG) >= 2
    assert result.stopped_by == "callback"
    for name, refused in (("early", early), ("late", late[0])):
        error = refused.exception(LONG)
        assert isinstance(error, WorkError)
        assert str(error).startswith(f"{address} refused {name}: {name} cannot take part: ")
        assert words in str(error)
        assert any(name in each and words in each for each in caplog.messages)


def test_samples_without_a_finite_loss_are_refused_by_their_own_node(
    nodes: ThreadPoolExecutor, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples = list(
        zip(*made(1)[0], strict=True)
    )  # in a list, of which each is looked at when it is needed
    no_numbers = [(row * np.float32("nan"), label) for row, label in samples]
    words = "the loss of net is nan before training: the samples contain non-finite numbers"
    ill = joined(nodes, address, "ill", model=Net, data=no_numbers)

    def join_when_ill_is_gone() -> int:
        assert words in str(ill.exception(LONG))
        return joined(nodes, address, "well", model=Net, data=samples).result(LONG)

    well = nodes.submit(join_when_ill_is_gone)
    with caplog.at_level(logging.WARNING, "fedbudget.network"):
        result = fedbudget.serve(address, model=Net, nodes=1, quiet=True, **ASKED)
    assert well.result(LONG) == len(result.rounds)
    assert [each.split(" at ")[0] for each in caplog.messages] == [
        "ill"
    ]  # one line, which says why
    assert words in caplog.messages[0]
    with pytest.raises(UserError, match=words):
        fedbudget.train(model=Net, shards=[no_numbers], budget="time=1s")


def test_one_that_joins_late_takes_part_with_a_number_of_its_own(
    nodes: ThreadPoolExecutor, address: str
) -> None:
    shards = made(3)
    taking_part = [
        joined(nodes, address, f"n{i}", model=Net, data=shards[i]) for i in (0, 1)
    ]

    def next_round(record: fedbudget.RoundRecord) -> bool:
        if record.round == 3:
            taking_part.append(joined(nodes, address, "n2", model=Net, data=shards[2]))
        return record.nodes == 3

    asked = {**ASKED, "rounds": None, "callbacks": [next_round]}
    result = fedbudget.serve(address, model=Net, nodes=2, quiet=True, **asked)
    first, second, last = [each.result(LONG) for each in taking_part]
    assert abs(first - second) <= 1  # the run ended in the middle of a round
    assert min(first, second) > last >= 1
    assert [record.nodes for record in result.rounds[:-1]] == [2] * (len(result.rounds) - 1)


def test_classes_of_nodes_are_put_together_and_other_targets_are_not(
    nodes: ThreadPoolExecutor, address: str
) -> None:
    """Whole numbers here and others there are numbers to predict everywhere."""
    x = made(1)[0][0]
    shards = [(x, np.arange(len(x)) % 3), (x, np.linspace(0.5, 2.5, len(x)))]
    model = TorchModel(lambda: nn.Linear(6, 1))
    whole = fedbudget.train(model=model, shards=shards, costs="measured", **ASKED)
    assert run(nodes, address, model, shards).w.tobytes() == whole.w.tobytes()


def test_what_is_no_data_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="must be"):
        fedbudget.join(address, data=5)  # type: ignore[arg-type]
