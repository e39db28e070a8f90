"""Runs that protect single samples, from settings to result: in this process, and what is
refused.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.engines.noise import SecretNodeNoise, SeededNodeNoise, paid_in
from fedbudget.errors import UserError
from fedbudget.launch.privacy import node_noise, with_privacy
from fedbudget.resources.privacy import epsilon_of, rho_of
from fedbudget.settings.settings import Settings
from support.private_runs import OF_SAMPLES, Died, dies_after


def test_whole_shards_learn_digits(tmp_path: Path) -> None:
    result = train(**OF_SAMPLES, out=tmp_path / "run")
    assert result.accuracy is not None
    assert result.accuracy > 0.5
    assert 'batch-size = "full"' in (tmp_path / "run" / "config.toml").read_text()


def test_noise_is_of_the_settings() -> None:
    settings = Settings(budget=("privacy=4",), privacy_unit="sample", nodes=3)
    assert isinstance(node_noise(with_privacy(settings)), SeededNodeNoise)
    assert isinstance(node_noise(with_privacy(settings, simulated=False)), SecretNodeNoise)
    assert node_noise(Settings(budget=("privacy=4",))) is None
    assert node_noise(Settings()) is None
    assert with_privacy(settings, samples=60_000).privacy_delta == 1e-5
    assert with_privacy(settings, samples=2_000_000).privacy_delta == 1e-7


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 30},
        {"batch_size": 200, "partition": "dirichlet:0.3"},  # more than some nodes have
        {"model": "svm", "tau": 3},
        {"model": "linear", "dataset": "diabetes"},
        {"participation": 0.5},
        {"budget": ["time=4s", "bytes=200kB", "privacy=2"]},
    ],
    ids=["batches", "small nodes", "svm", "linear", "absent", "bytes"],
)
def test_any_run_keeps_its_budget(options: dict[str, Any]) -> None:
    result = train(**{**OF_SAMPLES, **options})
    assert result.spent["privacy"] <= result.budget["privacy"]
    assert all(
        result.spent[name] <= limit * (1 + 1e-12) for name, limit in result.budget.items()
    )
    assert np.isfinite(result.w).all()
    assert result.w.any()


def test_a_network() -> None:
    pytest.importorskip("torch")
    result = train(**{**OF_SAMPLES, "model": "mlp", "rounds": 6})
    assert result.accuracy is not None
    assert result.accuracy > 0.2


def test_a_resumed_run_does_not_get_its_epsilon_back(tmp_path: Path) -> None:
    """Nor that of the round which nodes had been asked for when it died."""
    folder = tmp_path / "run"
    with pytest.raises(Died):
        train(**OF_SAMPLES, out=folder, privacy_noise="secret", callbacks=dies_after(5))
    died_with = paid_in(folder)
    lines = [
        json.loads(line)["round"]
        for line in (folder / "privacy.jsonl").read_text().splitlines()
    ]
    assert lines == [1, 2, 3, 4, 5, 6]
    result = train(resume=folder)
    assert epsilon_of(died_with, 1e-5) < result.spent["privacy"] <= 4
    assert paid_in(folder) <= rho_of(4.0, 1e-5)
    assert epsilon_of(paid_in(folder), 1e-5) == pytest.approx(
        result.spent["privacy"], abs=1e-6
    )
    assert paid_in(folder) - died_with > 0
    more = train(resume=folder, budget=["privacy=+1", "time=+6s"])
    assert 4 < more.spent["privacy"] <= 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "kmeans"}, "K-means"),
        ({"partition": "case:3"}, "several nodes share some"),
        ({"proximal": 0.1}, "proximal"),
        ({"method": "paper"}, "method must be accelerated"),
        ({"combine": "median"}, "combine"),
        ({"until": "loss=0.1"}, "nodes report no loss"),
        ({"budget": "time=2s"}, "need a budget of privacy"),
    ],
)
def test_what_would_tell_more_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(**{**OF_SAMPLES, **options})


def test_a_noise_that_others_know_is_refused_where_nodes_are_real() -> None:
    settings = Settings(
        budget=("privacy=4",), privacy_unit="sample", privacy_noise="seeded"
    )
    with pytest.raises(UserError, match="nodes add secret noise"):
        with_privacy(settings, simulated=False)
