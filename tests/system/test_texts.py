"""Texts of different lengths on real nodes: a classifier with attention.

Every machine has the same file with the model, the token IDs of each node, and a collate
function."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbudget
from fedbudget.models.own import load_model
from fedbudget.python_file import load
from fedbudget.runs.folder import Run
from support.processes import cli_options, commands

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEXTS = '''
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from fedbudget.models import TorchModel

WORDS, CLASSES = 20, 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=0)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.scores = nn.Linear(16, CLASSES)

    def forward(self, tokens, mask):
        words = self.embed(tokens)
        seen, _ = self.attend(
            words, words, words, key_padding_mask=~mask, need_weights=False
        )
        total = (seen * mask[..., None]).sum(dim=1)
        return self.scores(total / mask.sum(dim=1, keepdim=True))


def collate(samples):
    tokens = pad_sequence([torch.tensor(text) for text, _ in samples], batch_first=True)
    labels = torch.tensor([label for _, label in samples])
    return {"tokens": tokens, "mask": tokens > 0}, labels


model = TorchModel(Classifier, collate=collate)


def texts(seed, counts):
    """Texts of each class; a third of the words of a text are the word of its class."""
    rng, found = random.Random(seed), []
    for label, count in enumerate(counts):
        for _ in range(count):
            length = rng.randint(3, 12)
            text = [label + 1] * (1 + length // 3)
            text += [rng.randint(CLASSES + 1, WORDS - 1) for _ in range(length - len(text))]
            found.append((rng.sample(text, length), label))
    return found


def north():
    return texts(1, (60, 10, 10))


south = texts(2, (5, 40, 15))
test = texts(9, (50, 50, 50))
'''
TRAINED: dict[str, Any] = {
    "tau": 5,
    "rounds": 30,
    "seed": 3,
    "step_size": 0.5,
    "batch_size": 20,
    "compress": "none",
    "validation": 0.0,  # measured costs decide which rounds validate
}
OPTIONS = cli_options(**TRAINED)


def test_attention_over_network_equals_one_process(tmp_path: Path) -> None:
    file = tmp_path / "texts.py"
    file.write_text(TEXTS)
    with commands(tmp_path) as start:
        model = ["--model", "texts.py:model"]
        asked = cli_options(nodes=2, test="texts.py:test", budget="time=1h", out="run")
        aggregator = start.serve(*model, *asked, *OPTIONS)
        port = aggregator.port
        nodes = [
            start.join(port, *model, "--data", f"texts.py:{name}", name=name)
            for name in ("north", "south")
        ]
        assert [each.end() for each in (aggregator, *nodes)] == [0, 0, 0]

    shards, test = [load(f"{file}:north")(), load(f"{file}:south")], load(f"{file}:test")
    assert len({len(text) for text, _ in test}) > 5
    own: Any = load_model(f"{file}:model")
    whole = fedbudget.train(
        model=own, shards=shards, test=test, budget="time=1h", costs="measured", **TRAINED
    )
    run = Run.open(tmp_path / "run")
    assert run.model().w.tobytes() == whole.w.tobytes()
    assert run.summary is not None
    assert run.summary["accuracy"] == whole.accuracy

    inputs, y = load(f"{file}:collate")(test)
    with torch.no_grad():
        scores = own.trained(run.model().w)(**inputs)
    assert (scores.argmax(dim=1) == y).double().mean().item() == whole.accuracy
    # By chance, the accuracy is 1/3 and the loss log 3.
    assert run.summary["accuracy"] > 0.9
    assert torch.nn.functional.cross_entropy(scores, y).item() < 0.5 * math.log(3)
