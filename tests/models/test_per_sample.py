"""Per-sample gradients: closed forms, torch.func and finite differences; sensitivity to one
sample.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.arrays import Float32, Float64
from fedbudget.data.shards import Table
from fedbudget.errors import UserError
from fedbudget.models import per_sample
from fedbudget.models.base import Model
from fedbudget.models.builtin import KMeans, LinearRegression, Softmax, SquaredSvm
from fedbudget.models.own import FunctionModel
from fedbudget.models.per_sample import (
    OuterGradients,
    clipped_sum,
    gradients_in_turn,
    sample_gradients,
)

FEATURES, CLASSES = 5, 3
EXTREMES = [
    0.0,
    1.0,
    -1.0,
    1e-30,
    1e19,
    -1e30,
    3e38,
    float("inf"),
    -float("inf"),
    float("nan"),
]


def table_for(model: Model, samples: int, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, FEATURES)).astype(np.float32)
    targets = {
        "classes": rng.integers(0, CLASSES, samples),
        "binary": rng.choice([-1.0, 1.0], samples),
    }
    return Table(
        x, np.asarray(targets.get(model.target, rng.standard_normal(samples)), np.float32)
    )


def models() -> list[Model]:
    return [Softmax(FEATURES, CLASSES), SquaredSvm(FEATURES), LinearRegression(FEATURES)]


def sample_loss(model: Model, w: Float64, x: Float64, y: float) -> float:
    """Loss of one sample from the formula in the model's docstring, without
    regularization.
    """
    if isinstance(model, Softmax):
        weights = w.reshape(CLASSES, -1)
        scores = weights[:, :-1] @ x + weights[:, -1]
        return float(np.log(np.exp(scores).sum()) - scores[int(y)])
    score = float(w @ x)
    return (
        0.5 * (y - score) ** 2
        if isinstance(model, LinearRegression)
        else 0.5 * max(0.0, 1 - y * score) ** 2
    )


def finite_difference_gradient(model: Model, w: Float64, x: Float64, y: float) -> Float64:
    step = 1e-6 * np.eye(len(w))
    return np.array(
        [
            (sample_loss(model, w + e, x, y) - sample_loss(model, w - e, x, y)) / 2e-6
            for e in step
        ]
    )


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_closed_forms_match_finite_differences(model: Model) -> None:
    table, rows = table_for(model, 12), np.arange(12, dtype=np.int32)
    w = np.random.default_rng(1).standard_normal(model.parameters).astype(np.float32)
    explicit = np.array(
        [
            finite_difference_gradient(
                model, w.astype(float), table.x[row].astype(float), float(table.y[row])
            )
            for row in rows
        ]
    )
    lengths = np.linalg.norm(explicit, axis=1)
    assert isinstance(sample_gradients(model, w, table, rows), OuterGradients)
    assert per_sample.lengths(model, w, table, rows) == pytest.approx(lengths, abs=1e-6)
    for clip in (
        0.5 * lengths.min() + 1e-3,
        float(np.median(lengths)) + 1e-3,
        2 * lengths.max(),
    ):
        scale = np.minimum(1, clip / np.maximum(lengths, 1e-9))
        assert clipped_sum(model, w, table, rows, clip) == pytest.approx(
            (explicit * scale[:, None]).sum(axis=0), abs=1e-4
        )


def test_function_model_matches_builtin_model() -> None:
    """A custom function has the same clipped sum as the equal built-in model."""

    def squares(w: Float32, x: Float32, y: Float32) -> tuple[float, Any]:
        errors = x @ w - y
        return 0.5 * float((errors**2).mean()), errors @ x / len(y)

    own, built_in = (
        FunctionModel(squares, initial=np.zeros(FEATURES)),
        LinearRegression(FEATURES),
    )
    table, rows = table_for(built_in, 30), np.arange(30, dtype=np.int32)
    w = np.ones(FEATURES, np.float32)
    assert clipped_sum(own, w, table, rows, 0.7) == pytest.approx(
        clipped_sum(built_in, w, table, rows, 0.7), abs=1e-5
    )


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_vectorized_gradients_match_sequential_gradients(name: str) -> None:
    torch = pytest.importorskip("torch")
    from fedbudget.models.torch.model import TorchModel

    nn = torch.nn
    networks = {
        "mlp": lambda: nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
        "cnn": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 3, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12, CLASSES),
        ),
    }
    model, rng = TorchModel(networks[name], target="classes"), np.random.default_rng(0)
    table = Table(
        rng.standard_normal((20, 16)).astype(np.float32),
        rng.integers(0, CLASSES, 20).astype(np.float32),
    )
    w, rows = model.initial(3), np.arange(20, dtype=np.int32)
    result = sample_gradients(model, w, table, rows)
    assert isinstance(result, per_sample.GradientRows)
    assert result.rows == pytest.approx(
        gradients_in_turn(model, w, table, rows).rows, abs=1e-6
    )
    assert len(np.unique(result.lengths)) == 20


def effect_of_sample_4(model: Model, w: Float32, table: Table, clip: float) -> Any:
    """Difference that sample 4 of 9 makes to the clipped sum."""
    others = np.array([0, 1, 2, 3, 5, 6, 7, 8], np.int32)
    whole = clipped_sum(model, w, table, np.arange(9, dtype=np.int32), clip)
    return whole - clipped_sum(model, w, table, others, clip)


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, 2),
    odd=st.lists(st.sampled_from(EXTREMES), min_size=FEATURES, max_size=FEATURES),
    target=st.sampled_from([0.0, 1.0]),
    clip=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
)
def test_clip_bounds_one_samples_effect(
    which: int, odd: list[float], target: float, clip: float, seed: int
) -> None:
    """For any features of that sample: huge, tiny or not a number."""
    model = models()[which]
    table = table_for(model, 9, seed)
    table.x[4], table.y[4] = odd, target if model.target == "classes" else 2 * target - 1
    w = np.random.default_rng(seed).standard_normal(model.parameters).astype(np.float32)
    change = effect_of_sample_4(model, w, table, clip)
    assert np.isfinite(change).all()
    assert np.linalg.norm(change) <= clip


def test_clip_bounds_effect_with_module() -> None:
    torch = pytest.importorskip("torch")
    from fedbudget.models.torch.model import TorchModel

    model = TorchModel(lambda: torch.nn.Linear(FEATURES, CLASSES), target="classes")
    table = table_for(Softmax(FEATURES, CLASSES), 9)
    w = model.initial(0)
    for odd in EXTREMES:
        table = Table(table.x.copy(), table.y)
        table.x[4] = odd
        assert np.linalg.norm(effect_of_sample_4(model, w, table, 0.3)) <= 0.3


def test_block_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Softmax(FEATURES, CLASSES)
    table, rows = table_for(model, 50), np.arange(50, dtype=np.int32)
    w = np.ones(model.parameters, np.float32)
    whole = clipped_sum(model, w, table, rows, 0.5)
    monkeypatch.setattr(per_sample, "_MOST_ROWS", 7)
    assert clipped_sum(model, w, table, rows, 0.5) == pytest.approx(whole, abs=1e-12)


def test_models_mixing_samples_are_rejected() -> None:
    torch = pytest.importorskip("torch")
    from fedbudget.models.torch.model import TorchModel

    with pytest.raises(UserError, match="K-means"):
        per_sample.require_per_sample(KMeans(FEATURES))
    layers = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    for statistics in ("average", "local"):
        with pytest.raises(UserError, match="group normalization"):
            per_sample.require_per_sample(
                TorchModel(layers, target="classes", statistics=statistics)
            )
    per_sample.require_per_sample(Softmax(FEATURES, CLASSES))
