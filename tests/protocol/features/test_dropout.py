"""Dropout in the second stage of a run."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fedbudget
from fedbudget.arrays import Float32, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models import TorchModel
from fedbudget.models.builtin import Softmax
from fedbudget.models.torch import networks
from fedbudget.protocol.features.dropout import Dropout, DropoutPart
from fedbudget.protocol.features.feature import report_layout
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import TrainRound


def overfitting_shards(nodes: int = 3, rows: int = 120) -> list[tuple[Float32, Int64]]:
    """Few rows with random classes for a tenth of them."""
    rng = np.random.default_rng(3)
    made = []
    for _ in range(nodes):
        x = rng.normal(size=(rows, 30)).astype(np.float32)
        y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
        made.append((x, np.where(rng.random(rows) < 0.2, 1 - y, y)))
    return made


def network() -> TorchModel:
    return TorchModel(partial(networks.mlp, 30, 2), target="classes")


def shards() -> Shards:
    parts = overfitting_shards()
    x = np.concatenate([x for x, _ in parts])
    y = np.concatenate([y for _, y in parts]).astype(np.float32)
    return Shards.of(Table(x, y), np.split(np.arange(360), 3))


def round_with(w: Float32, *parts: DropoutPart) -> TrainRound:
    layout = report_layout((), True)
    return TrainRound(round=1, w=w, report=layout, tau=4, eta=0.1, effective=4, parts=parts)


def test_evaluations_have_no_dropout() -> None:
    plain = network()
    random = plain.with_dropout(0.25)
    assert random is not None
    w = plain.initial(0)
    whole = BatchIndices.whole(3)
    expected = plain.losses(w[None], shards(), whole).tolist()
    assert random.losses(w[None], shards(), whole).tolist() == expected


def test_updates_have_dropout() -> None:
    """Without the part of the message a round is the usual one, to the bit."""
    model = network()
    w = model.initial(0)
    vectors = []
    for features, parts in (
        ((), ()),
        ((Dropout(),), ()),
        ((Dropout(),), (DropoutPart(0.25),)),
    ):
        fleet = Fleet(model, shards(), batch=10, seed=0, features=features)
        vectors.append(fleet.answer(round_with(w, *parts)).vectors["w"])
    assert (vectors[0] == vectors[1]).all()
    assert (vectors[1] != vectors[2]).any(axis=1).all()


def test_alone_and_together_same_bits() -> None:
    """A node draws the same masks whatever other nodes its process has."""
    w = network().initial(0)
    message = round_with(w, DropoutPart(0.25))
    together = Fleet(network(), shards(), batch=10, seed=0, features=(Dropout(),))
    expected = together.answer(message).vectors["w"]
    for node in range(3):
        own = Shards.of(shards().table, [shards().rows_of(node)])
        alone = Fleet(
            network(), own, batch=10, seed=0, features=(Dropout(),), numbers=[node]
        )
        assert (alone.answer(message).vectors["w"][0] == expected[node]).all()


def test_models_without_dropout_have_none() -> None:
    assert Softmax(30, 2).with_dropout(0.25) is None
    assert TorchModel(nn.Linear(30, 2)).with_dropout(0.25) is None


def test_own_dropout_is_kept() -> None:
    """A function whose own dropout is not 0 decides itself."""

    def own(dropout: float = 0.5) -> nn.Module:
        return nn.Sequential(nn.Linear(30, 8), nn.Dropout(dropout), nn.Linear(8, 2))

    assert TorchModel(own).with_dropout(0.25) is None
    assert TorchModel(partial(own, dropout=0)).with_dropout(0.25) is not None


@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_image_networks_keep_parameters(name: str) -> None:
    make = getattr(networks, name)
    plain = make((1, 28, 28), 10)
    random = make((1, 28, 28), 10, dropout=0.25)
    sizes = [tuple(each.shape) for each in plain.parameters()]
    assert [tuple(each.shape) for each in random.parameters()] == sizes
    x = torch.zeros(2, 1, 28, 28)
    random.load_state_dict(dict(zip(random.state_dict(), plain.parameters(), strict=True)))
    assert torch.equal(random.eval()(x), plain.eval()(x))


class TestRuns:
    def test_second_stage_begins_at_best(self) -> None:
        """Its first round starts from w^v, and the result is the best of both stages."""
        result = fedbudget.train(
            shards=overfitting_shards(),
            model="mlp",
            budget="time=60s",
            costs="simulated",
            batch_size=20,
        )
        dropout = [record.dropout is not None for record in result.rounds]
        begin = dropout.index(True)
        assert 0 < begin < len(dropout) - 1
        assert all(dropout[begin:-1])  # the final round makes no updates
        known = [each.validation for each in result.rounds if each.validation is not None]
        assert result.validation_loss == pytest.approx(min(known), rel=1e-6)
        first = result.rounds[begin]
        before = result.rounds[begin - 1]
        assert first.validation is not None
        assert before.validation is not None
        assert first.validation == pytest.approx(first.validation_best, rel=1e-6)
        assert before.validation > first.validation

    def test_no_second_stage_if_all_is_spent(self) -> None:
        result = fedbudget.train(
            shards=overfitting_shards(),
            model="mlp",
            budget="time=30s",
            costs="simulated",
            batch_size=20,
            spend_all=True,
        )
        assert all(record.dropout is None for record in result.rounds)


def test_node_without_dropout_refuses() -> None:
    fleet = Fleet(Softmax(30, 2), shards(), batch=10, seed=0, features=(Dropout(),))
    w = np.zeros(fleet.model.parameters, np.float32)
    with pytest.raises((UserError, ValueError, RuntimeError), match="no dropout"):
        fleet.answer(round_with(w, DropoutPart(0.25)))
