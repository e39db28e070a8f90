"""Two machines know by a description whether their models are the same, and the first
difference in words.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbudget.models import FunctionModel, Softmax, TorchModel
from fedbudget.models.description import describe, describe_function


def network(width: int = 4, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2, bias=bias))


def squares(output: Tensor, y: Tensor) -> Tensor:
    return ((output[:, 0] - y) ** 2).mean()


def difference(one: Any, two: Any) -> str | None:
    return describe(one).difference(describe(two), "here", "there")


def test_the_tensors_of_a_module_are_told_in_the_order_of_w() -> None:
    found = describe(TorchModel(network()))
    assert [(each.name, each.shape) for each in found.tensors] == [
        ("0.weight", (4, 3)),
        ("0.bias", (4,)),
        ("2.weight", (2, 4)),
        ("2.bias", (2,)),
    ]
    assert (found.kind, found.loss, found.target, found.frozen) == (
        "TorchModel",
        "the usual one",
        "auto",
        "",
    )
    assert str(found) == "sequential (TorchModel, 26 parameters)"


def test_modules_that_start_elsewhere_are_the_same_model() -> None:
    assert (
        difference(TorchModel(network()), TorchModel(lambda: network(), name="another"))
        is None
    )


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (
            TorchModel(network(4)),
            TorchModel(network(5)),
            "parameter 0.weight is 4 x 3 of float32 here, and 5 x 3 of float32 there",
        ),
        (
            TorchModel(network(bias=False)),
            TorchModel(network()),
            "parameter 2.bias is missing here, and 2 of float32 there",
        ),
        (
            TorchModel(network()),
            TorchModel(network(), loss=nn.CrossEntropyLoss()),
            "the loss is the usual one here, and "
            "CrossEntropyLoss(ignore_index=-100, label_smoothing=0.0, reduction='mean') there",
        ),
        (
            TorchModel(network(), target="real"),
            TorchModel(network(), target="raw"),
            "the kind of target is real here, and raw there",
        ),
        (
            TorchModel(network()),
            Softmax(3, 2),
            "the kind of model is TorchModel here, and Softmax there",
        ),
        (
            Softmax(3, 2),
            Softmax(4, 2),
            "parameter weight is 2 x 3 of float32 here, and 2 x 4 of float32 there",
        ),
    ],
)
def test_the_first_difference_is_said(one: Any, two: Any, words: str) -> None:
    assert difference(one, two) == words


def test_the_same_parameters_in_another_order_are_another_model() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    one, two = (
        nn.ModuleDict({name: {"a": first, "b": last}[name] for name in names})
        for names in ("ab", "ba")
    )
    found = difference(TorchModel(one), TorchModel(two))
    assert found == (
        "the order differs: parameter a.weight here is in the place of "
        "parameter b.weight there"
    )


def test_what_is_frozen_must_have_the_same_values() -> None:
    def frozen(value: float) -> TorchModel:
        module = network()
        with torch.no_grad():
            module[0].weight.fill_(value)  # type: ignore[index]
        module[0].weight.requires_grad_(False)  # type: ignore[index]
        return TorchModel(module)

    assert difference(frozen(1.0), frozen(1.0)) is None
    assert str(difference(frozen(1.0), frozen(2.0))).startswith(
        "the frozen part has other values here than there ("
    )


def test_statistics_that_are_frozen_must_have_the_same_values() -> None:
    """A normalization layer whose parameters are frozen keeps its statistics, of which
    nothing is sent.
    """

    def frozen(mean: float) -> TorchModel:
        layer = nn.BatchNorm1d(4).requires_grad_(False)
        assert layer.running_mean is not None
        layer.running_mean.fill_(mean)
        return TorchModel(nn.Sequential(nn.Linear(3, 4), layer))

    assert difference(frozen(1.0), frozen(1.0)) is None
    assert str(difference(frozen(1.0), frozen(2.0))).startswith(
        "the frozen part has other values here than there ("
    )


def test_losses_of_one_name_that_are_written_otherwise_differ() -> None:
    def other() -> Any:
        def squares(output: Tensor, y: Tensor) -> Tensor:
            return ((output[:, 0] - y) ** 4).mean()

        return squares

    def spaced() -> Any:
        def squares(output: Tensor, y: Tensor) -> Tensor:
            # said otherwise, and the same
            return (
                (output[:, 0] - y) ** 2
            ).mean()  # fmt: skip

        return squares

    assert describe_function(squares) == describe_function(spaced())
    assert describe_function(squares) != describe_function(other())
    one, two = (TorchModel(network(), loss=loss) for loss in (squares, other()))
    assert str(difference(one, two)).startswith("the loss is squares, written as ")


def test_a_lambda_is_told_from_another_and_not_by_the_line_that_it_is_in() -> None:
    one = describe_function(lambda output, y: output - y)
    assert one.startswith("<lambda>, written as ")
    assert one == describe_function(lambda output, y: output - y)
    assert one != describe_function(lambda output, y: y - output)


def test_what_a_loss_was_made_with_is_told() -> None:
    weights = [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight])) for weight in (1.0, 3.0)
    ]
    assert describe_function(weights[0]) != describe_function(weights[1])
    assert (
        describe_function(functools.partial(F.huber_loss, delta=0.5))
        == "huber_loss with delta=0.5"
    )


def test_a_function_model_is_known_by_its_function() -> None:
    def slope(w: Any, x: Any, y: Any) -> tuple[float, Any]:
        return float(w.sum()), np.ones_like(w)

    def steep(w: Any, x: Any, y: Any) -> tuple[float, Any]:
        return 2 * float(w.sum()), 2 * np.ones_like(w)

    model = FunctionModel(slope, initial=np.zeros(3))
    assert difference(model, FunctionModel(slope, initial=np.ones(3))) is None
    assert "the loss is slope, written as" in str(
        difference(model, FunctionModel(steep, initial=np.zeros(3)))
    )
    assert "parameter w is 3 of float32" in str(
        difference(model, FunctionModel(slope, initial=np.zeros(4)))
    )


def test_running_statistics_are_told_behind_the_parameters_where_they_are_in_w() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    names = [each.name for each in describe(TorchModel(module)).tensors]
    assert names == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
    ]
    apart = difference(TorchModel(module), TorchModel(module, statistics="local"))
    assert apart == "parameter 1.running_mean is 2 of float32 here, and missing there"
