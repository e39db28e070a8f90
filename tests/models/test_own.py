"""A model of a person's own, given as what they have."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedbudget.errors import UserError
from fedbudget.models import FunctionModel, TorchModel
from fedbudget.models.own import as_model, load_model


class Scores(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


def slope(w: Any, x: Any, y: Any) -> tuple[float, Any]:
    return float(w.sum()), np.ones_like(w)


def function_model() -> FunctionModel:
    return FunctionModel(slope, initial=np.zeros(3))


@pytest.mark.parametrize(
    "given", [Scores, Scores(), lambda: Scores(), partial(nn.Linear, 3, 2)]
)
def test_a_module_or_what_makes_one_is_a_torch_model(given: Any) -> None:
    model = as_model(given)
    assert isinstance(model, TorchModel)
    assert model.parameters == 8


def test_what_makes_a_module_is_started_by_the_seed_and_a_module_as_it_is() -> None:
    for given in (Scores, lambda: Scores()):
        model = as_model(given)
        assert not np.array_equal(model.initial(0), model.initial(1))
    module = Scores()
    assert np.array_equal(
        as_model(module).initial(1)[:6], module.weight.detach().numpy().reshape(-1)
    )


def test_a_model_is_taken_as_it_is() -> None:
    for given in (TorchModel(Scores, target="real"), function_model()):
        assert as_model(given) is given
        assert as_model(lambda given=given: given) is given
    assert isinstance(as_model(function_model), FunctionModel)


def test_a_model_that_lacks_something_is_refused_with_what_it_lacks() -> None:
    class Half:
        name, parameters, target = "half", 3, "raw"

        def descend(self) -> None: ...
        def losses(self) -> None: ...
        def initial(self) -> None: ...
        def accuracy(self) -> None: ...

    for given in (Half, Half()):
        with pytest.raises(
            UserError,
            match=r"model Half has no statistics, outputs, metrics; fedbudget\.models\.Model",
        ):
            as_model(given)


@pytest.mark.parametrize("given", [5, lambda: 5, int])
def test_what_is_no_model_is_refused(given: Any) -> None:
    with pytest.raises(
        UserError, match="model must be a name, a PyTorch module or a model, not a int"
    ):
        as_model(given)


def test_what_cannot_be_made_is_refused_with_the_name(tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n  def __init__(self, n): ..."
    )
    with pytest.raises(
        UserError,
        match=r"needs_more\.py:Net: Net cannot be called without arguments: missing a required argument: 'n'",
    ):
        load_model(f"{tmp_path}/needs_more.py:Net")


def test_modules_made_by_several_threads_at_once_have_the_numbers_of_one_made_alone() -> (
    None
):
    """Nodes may be threads of one program, and PyTorch's random numbers are one sequence
    for all of them.
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
