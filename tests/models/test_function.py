"""A model of one's own: the squared-SVM written in numpy is the compiled one."""

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models import FunctionModel, SquaredSvm
from support.problems import problem, svm_gradient, svm_loss


def numpy_svm(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
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
def test_a_function_and_the_kernel_agree(batch: int | None, same_w: bool) -> None:
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


def test_it_is_named_after_its_function() -> None:
    assert OWN.name == "numpy_svm"


def test_nobody_can_change_where_it_starts() -> None:
    OWN.initial(0)[:] = 7
    assert OWN.initial(0).tolist() == [0] * 5


def test_without_a_prediction_there_is_no_accuracy() -> None:
    table = Table(np.zeros((2, 5), np.float32), np.zeros(2, np.float32))
    assert (
        FunctionModel(numpy_svm, initial=np.zeros(5)).accuracy(
            np.zeros(5, np.float32), table
        )
        is None
    )


def test_a_gradient_of_another_shape_is_refused_by_the_functions_name() -> None:
    def short_gradient(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        return 0.0, w[:3]

    model = FunctionModel(short_gradient, initial=np.zeros(5))
    with pytest.raises(
        UserError, match=r"short_gradient returned a gradient of shape \(3,\); w has \(5,\)"
    ):
        model.descend(
            model.initial(0)[None],
            Shards.whole(problem("svm", 0).table),
            BatchIndices.whole(1),
            0.1,
        )


@pytest.mark.parametrize("initial", [np.zeros((2, 3)), np.zeros(0), 3.0])
def test_w_is_a_flat_vector(initial: object) -> None:
    with pytest.raises(
        UserError, match="initial must be a flat vector of parameters, not of shape"
    ):
        FunctionModel(numpy_svm, initial=initial)  # type: ignore[arg-type]
