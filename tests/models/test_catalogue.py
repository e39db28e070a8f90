"""Models by name and their options."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.shards import SampleStore
from fedbudget.engines.remote.wire import task_from_text, task_to_text
from fedbudget.errors import UserError
from fedbudget.models import KMeans, catalogue
from fedbudget.models.base import ModelOptions
from fedbudget.models.builtin import SquaredSvm
from support.networked import node_data, small_dataset, task


def test_options_reach_the_model() -> None:
    model = catalogue.build("kmeans", small_dataset(), {"clusters": 7})
    assert isinstance(model, KMeans)
    assert model.clusters == 7
    assert catalogue.build("kmeans", small_dataset()) == KMeans(6, 4)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("unknown", {}, "unknown model 'unknown'; use one of svm, linear, kmeans"),
        ("svm", {"clusters": 3}, "model svm has no option clusters, only: none"),
        ("kmeans", {"cluster": 3}, "model kmeans has no option cluster, only: clusters"),
        (
            "kmeans",
            {"clusters": "3"},
            "clusters of model kmeans must be of type int, not '3'",
        ),
        ("kmeans", {"clusters": True}, "must be of type int, not True"),
        ("kmeans", {"clusters": 2.5}, "must be of type int, not 2.5"),
        ("kmeans", {"clusters": 0}, "clusters must be at least 1, not 0"),
    ],
)
def test_invalid_options_are_rejected(
    name: str, options: ModelOptions, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        catalogue.build(name, small_dataset(), options)


@pytest.mark.parametrize(
    ("labels", "values", "name"),
    [(True, False, "softmax"), (True, True, "softmax"), (False, True, "linear")],
)
def test_target_chooses_default_model(labels: bool, values: bool, name: str) -> None:
    part = Part(
        np.zeros((2, 3)),
        np.arange(2) if labels else None,
        np.arange(2.0) if values else None,
    )
    assert catalogue.default(Dataset("a", part)) == name


def test_no_target_is_rejected() -> None:
    message = "homes has nothing to predict; for clusters, use model kmeans"
    with pytest.raises(UserError, match=message):
        catalogue.default(Dataset("homes", Part(np.zeros((2, 3)))))
    with pytest.raises(UserError, match="need a custom PyTorch model"):
        catalogue.default(
            Dataset("any", Part(np.zeros((2, 1), np.int64)), store=SampleStore([]))
        )


# A new option needs two changes: in the model itself, as below, and a field of that name in
# settings.py.


@dataclass(frozen=True)
class SoftSvm(SquaredSvm):
    """An SVM with a custom option."""

    OPTIONS: ClassVar[ModelOptions] = {"regularization": 0.1}


@pytest.fixture
def soft_svm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the model as `fedbudget.models.catalogue` registers the built-in ones."""
    entry = catalogue.ModelEntry(
        lambda dataset, options, _: SoftSvm(dataset.features, **options), SoftSvm.OPTIONS
    )
    monkeypatch.setattr(catalogue, "MODELS", {**catalogue.MODELS, "soft-svm": entry})


@pytest.mark.usefixtures("soft_svm")
def test_new_option_reaches_remote_nodes() -> None:
    """No message, task or engine names the option."""
    options = catalogue.options(
        "soft-svm", {"model": "soft-svm", "regularization": 0.5, "seed": 3}
    )
    sent = replace(task(), model="soft-svm", model_options=options)
    received = task_from_text(task_to_text(sent))
    fleet = node_data(0).fleet(received, [0])
    assert isinstance(fleet.model, SoftSvm)
    assert fleet.model.regularization == 0.5
