"""Scores of models in a natural federation, site by site."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedbudget.data import natural
from fedbudget.data.dataset import Dataset, Part, Standardization
from fedbudget.experiments import federations
from fedbudget.experiments.federations import SplitFederation, load, measure
from fedbudget.models.builtin import LinearRegression, Softmax
from fedbudget.settings.settings import Settings
from fedbudget.trained.model import TrainedModel

HEART = Settings(dataset="heart-disease", budget=("time=1s",), evaluations=1)


def trained(model: Any, w: list[float], dataset: Dataset) -> TrainedModel:
    return TrainedModel(model.name, model, np.array(w, np.float32), dataset.empty())


class TestScores:
    def test_accuracy_of_each_site(self) -> None:
        """The second class has the score x; site two has no rows."""
        x = np.array([[1.0], [-1.0], [2.0], [3.0]], np.float32)
        part = Part(x, labels=np.array([1, 0, 0, 1]))
        dataset = Dataset("two", part, classes=("no", "yes"))
        sites = [np.array([0, 1, 2]), np.array([], np.int64), np.array([3])]
        federation = SplitFederation(dataset, tuple(part.rows(rows) for rows in sites))
        model = trained(Softmax(1, 2), [0, 0, 1, 0], dataset)
        scores = federation.scores([model] * 3)
        assert scores == [pytest.approx(2 / 3), None, 1.0]

    def test_r2_adds_up_to_that_of_all_rows(self) -> None:
        """Sites are compared with the variance of all rows, in the unit of the target."""
        rng = np.random.default_rng(1)
        x = rng.standard_normal((30, 1)).astype(np.float32)
        y = 50 + 20 * x[:, 0].astype(np.float64) + rng.standard_normal(30)
        dataset = Dataset("real", Part(x, values=y)).standardised(
            Standardization(np.zeros(1), np.ones(1), 50.0, 10.0)
        )
        sites = [np.arange(10), np.arange(10, 30)]
        part = dataset.train
        federation = SplitFederation(dataset, tuple(part.rows(rows) for rows in sites))
        model = trained(LinearRegression(1), [1.5], dataset)
        first, second = federation.scores([model] * 2)
        assert first is not None
        assert second is not None
        errors = y - (50 + 15 * x[:, 0])
        expected = 1 - np.square(errors).sum() / np.square(y - y.mean()).sum()
        assert (10 * first + 20 * second) / 30 == pytest.approx(expected, abs=1e-4)

    def test_shift_of_a_personal_model_counts(self) -> None:
        x = np.array([[0.0], [1.0], [2.0]], np.float32)
        dataset = Dataset("real", Part(x, values=np.array([7.0, 8.0, 9.0])))
        federation = SplitFederation(dataset, (dataset.train,))
        model = trained(LinearRegression(1), [1.0], dataset)
        (score,) = federation.scores([model.corrected(model.w, 7.0)])
        assert score == pytest.approx(1.0, abs=1e-6)


class TestLoad:
    def test_seeds_draw_other_test_rows(self) -> None:
        first = load("heart-disease", None, 0)
        other = load("heart-disease", None, 1)
        assert first.dataset.test_files == other.dataset.test_files == (60, 58, 24, 40)
        assert first.tests[0].x.tobytes() != other.tests[0].x.tobytes()

    def test_seed_zero_is_the_published_split(self) -> None:
        dataset = natural.load("heart-disease", None)
        loaded = load("heart-disease", None, 0).dataset
        assert dataset.test is not None
        assert loaded.test is not None
        assert loaded.test.x.tobytes() == dataset.test.x.tobytes()

    def test_large_sites_are_sampled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cleveland has 303 rows, 60 of them for testing."""
        monkeypatch.setattr(federations, "MOST_ROWS", 100)
        load.cache_clear()
        dataset = load("heart-disease", None, 0).dataset
        load.cache_clear()
        totals = np.add(dataset.files, dataset.test_files)
        assert totals.tolist() == [100, 100, 100, 100]
        assert dataset.test_files[0] == round(60 * 100 / 303)
        assert len(dataset.train) == sum(dataset.files)


def test_measure_has_four_models_of_the_default() -> None:
    columns = measure(replace(HEART, personal=True))
    hospitals = ["cleveland", "hungarian", "switzerland", "va"]
    assert columns["model"] == [name for name in federations.MODELS for _ in hospitals]
    assert columns["site"] == 4 * hospitals
    assert columns["rows"] == 4 * [60, 58, 24, 40]
    assert all(0.4 < score <= 1 for score in columns["score"])
    assert len({tuple(columns["score"][at : at + 4]) for at in range(0, 16, 4)}) > 1
    assert len(set(columns["validation"])) == 1


def test_rivals_have_the_validation_rows_of_the_default() -> None:
    """A run of one round is the same run, whichever models are measured."""
    common = replace(HEART, rounds=3)
    default = measure(replace(common, personal=True))
    plain = measure(common)
    assert plain["model"] == ["tuned"] * 4
    assert plain["score"] == default["score"][:4]
    assert plain["validation"] == default["validation"][:4]
