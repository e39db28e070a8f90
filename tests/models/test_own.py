"""Custom models: PyTorch modules, functions, and models loaded from a Python file."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models import FunctionModel, SquaredSvm, TorchModel
from fedbudget.models.own import as_model, load_model
from support.problems import problem, svm_gradient, svm_loss


class Scores(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


def sum_loss(w: Any, x: Any, y: Any) -> tuple[float, Any]:
    return float(w.sum()), np.ones_like(w)


def function_model() -> FunctionModel:
    return FunctionModel(sum_loss, initial=np.zeros(3))


@pytest.mark.parametrize(
    "given", [Scores, Scores(), lambda: Scores(), partial(nn.Linear, 3, 2)]
)
def test_modules_and_factories_become_torch_models(given: Any) -> None:
    model = as_model(given)
    assert isinstance(model, TorchModel)
    assert model.parameters == 8


def test_seed_starts_factories_only() -> None:
    """A module keeps its own parameters."""
    for given in (Scores, lambda: Scores()):
        model = as_model(given)
        assert not np.array_equal(model.initial(0), model.initial(1))
    module = Scores()
    assert np.array_equal(
        as_model(module).initial(1)[:6], module.weight.detach().numpy().reshape(-1)
    )


def test_models_are_used_as_given() -> None:
    for given in (TorchModel(Scores, target="real"), function_model()):
        assert as_model(given) is given
        assert as_model(lambda given=given: given) is given
    assert isinstance(as_model(function_model), FunctionModel)


def test_incomplete_model_lists_missing_members() -> None:
    class Half:
        name, parameters, target = "half", 3, "raw"

        def descend(self) -> None: ...
        def losses(self) -> None: ...
        def initial(self) -> None: ...
        def accuracy(self) -> None: ...

    for given in (Half, Half()):
        with pytest.raises(
            UserError,
            match=r"model Half has no statistics, outputs, metrics; "
            r"fedbudget\.models\.Model",
        ):
            as_model(given)


@pytest.mark.parametrize("given", [5, lambda: 5, int])
def test_non_models_are_rejected(given: Any) -> None:
    message = "model must be a name, a PyTorch module or a model, not a int"
    with pytest.raises(UserError, match=message):
        as_model(given)


def test_uncallable_class_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n  def __init__(self, n): ..."
    )
    with pytest.raises(
        UserError,
        match=r"needs_more\.py:Net: Net cannot be called without arguments: missing a "
        r"required argument: 'n'",
    ):
        load_model(f"{tmp_path}/needs_more.py:Net")


def test_threads_build_identical_modules() -> None:
    """Nodes may be threads of one program, and PyTorch's random numbers are one global
    sequence.
    """

    def make() -> nn.Module:
        torch.manual_seed(5)
        layers = nn.Sequential(
            nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)
        )
        layers[:-1].requires_grad_(False)
        return layers

    def frozen(_: int) -> str:
        model = as_model(make)
        assert isinstance(model, TorchModel)
        return model.frozen

    with ThreadPoolExecutor(3) as pool:
        for _ in range(30):
            assert len({frozen(0), *pool.map(frozen, range(3))}) == 1


def numpy_svm(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
    """Squared SVM in numpy, to compare with the compiled one."""
    exact = (w.astype(np.float64), x.astype(np.float64), y.astype(np.float64))
    return svm_loss(*exact, 0.1), svm_gradient(*exact, 0.1).astype(np.float32)


OWN = FunctionModel(
    numpy_svm,
    initial=np.zeros(5),
    predict=lambda w, x: np.where(x @ w >= 0, 1, -1),
    target="binary",
)


@pytest.mark.parametrize("batch", [None, 6])
@pytest.mark.parametrize("same_w", [True, False])
def test_function_matches_compiled_kernel(batch: int | None, same_w: bool) -> None:
    case = problem("svm", seed=11)
    shards = Shards.of(case.table, [np.arange(0, 10), np.arange(10, 35), np.arange(35, 60)])
    indices = Sampler(shards.size, batch, seed=2).round(5)
    w = np.stack([case.start(seed) for seed in range(1 if same_w else 3)])
    best, shift = case.start(50), np.stack([case.start(seed) for seed in range(60, 63)])
    own, kernel = (
        model.descend(w, shards, indices, 0.1, best, shift)
        for model in (OWN, SquaredSvm(5))
    )
    np.testing.assert_allclose(own.w, kernel.w, atol=1e-5)
    np.testing.assert_allclose(own.losses, kernel.losses, rtol=1e-5)
    np.testing.assert_allclose(own.gradients, kernel.gradients, atol=1e-5)
    assert own.best_losses is not None
    assert kernel.best_losses is not None
    np.testing.assert_allclose(own.best_losses, kernel.best_losses, rtol=1e-5)
    np.testing.assert_allclose(OWN.losses(w, shards, indices), kernel.losses, rtol=1e-5)
    assert OWN.accuracy(w[0], case.table) == SquaredSvm(5).accuracy(w[0], case.table)


def test_function_model_name_and_start() -> None:
    assert OWN.name == "numpy_svm"
    OWN.initial(0)[:] = 7
    assert OWN.initial(0).tolist() == [0] * 5


def test_no_accuracy_without_predict() -> None:
    table = Table(np.zeros((2, 5), np.float32), np.zeros(2, np.float32))
    model = FunctionModel(numpy_svm, initial=np.zeros(5))
    assert model.accuracy(model.initial(0), table) is None


def test_gradient_shape_error_names_function() -> None:
    def short_gradient(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        return 0.0, w[:3]

    model = FunctionModel(short_gradient, initial=np.zeros(5))
    message = r"short_gradient returned a gradient of shape \(3,\); w has \(5,\)"
    with pytest.raises(UserError, match=message):
        model.descend(
            model.initial(0)[None],
            Shards.whole(problem("svm", 0).table),
            BatchIndices.whole(1),
            0.1,
        )


@pytest.mark.parametrize("initial", [np.zeros((2, 3)), np.zeros(0), 3.0])
def test_initial_must_be_flat_vector(initial: object) -> None:
    message = "initial must be a flat vector of parameters, not of shape"
    with pytest.raises(UserError, match=message):
        FunctionModel(numpy_svm, initial=initial)  # type: ignore[arg-type]
