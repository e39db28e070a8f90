"""Model descriptions: equal for equal models; otherwise the first difference is
reported.
"""

import functools
from collections.abc import Callable
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


def test_tensors_in_parameter_order() -> None:
    result = describe(TorchModel(network()))
    assert [(each.name, each.shape) for each in result.tensors] == [
        ("0.weight", (4, 3)),
        ("0.bias", (4,)),
        ("2.weight", (2, 4)),
        ("2.bias", (2,)),
    ]
    expected = ("TorchModel", "the usual one", "auto", "")
    assert (result.kind, result.loss, result.target, result.frozen) == expected
    assert str(result) == "sequential (TorchModel, 26 parameters)"


def test_start_and_name_do_not_matter() -> None:
    assert (
        difference(TorchModel(network()), TorchModel(lambda: network(), name="another"))
        is None
    )


@pytest.mark.parametrize(
    ("one", "two", "message"),
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
            "CrossEntropyLoss(ignore_index=-100, label_smoothing=0.0, reduction='mean') "
            "there",
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
def test_first_difference_is_reported(one: Any, two: Any, message: str) -> None:
    assert difference(one, two) == message


def test_parameter_order_matters() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    one, two = (
        nn.ModuleDict({name: {"a": first, "b": last}[name] for name in names})
        for names in ("ab", "ba")
    )
    result = difference(TorchModel(one), TorchModel(two))
    assert result == (
        "the order differs: parameter a.weight here is in the place of "
        "parameter b.weight there"
    )


def frozen_weight(value: float) -> TorchModel:
    layer = nn.Linear(3, 4)
    nn.init.constant_(layer.weight, value)
    layer.weight.requires_grad_(False)
    return TorchModel(nn.Sequential(layer, nn.Linear(4, 2)))


def frozen_statistics(mean: float) -> TorchModel:
    """A normalization layer with frozen parameters keeps its statistics, which are
    never sent.
    """
    layer = nn.BatchNorm1d(4).requires_grad_(False)
    assert layer.running_mean is not None
    layer.running_mean.fill_(mean)
    return TorchModel(nn.Sequential(nn.Linear(3, 4), layer))


@pytest.mark.parametrize("frozen", [frozen_weight, frozen_statistics])
def test_frozen_values_must_match(frozen: Callable[[float], TorchModel]) -> None:
    assert difference(frozen(1.0), frozen(1.0)) is None
    message = "the frozen part has other values here than there ("
    assert str(difference(frozen(1.0), frozen(2.0))).startswith(message)


def test_loss_compared_by_its_code() -> None:
    """Losses of one name differ if their code differs; formatting and comments do not
    count.
    """

    def other() -> Any:
        def squares(output: Tensor, y: Tensor) -> Tensor:
            return ((output[:, 0] - y) ** 4).mean()

        return squares

    def spaced() -> Any:
        def squares(output: Tensor, y: Tensor) -> Tensor:
            # other formatting, same code
            return (
                (output[:, 0] - y) ** 2
            ).mean()  # fmt: skip

        return squares

    assert describe_function(squares) == describe_function(spaced())
    assert describe_function(squares) != describe_function(other())
    one, two = (TorchModel(network(), loss=loss) for loss in (squares, other()))
    assert str(difference(one, two)).startswith("the loss is squares, written as ")


def test_lambda_compared_by_its_code() -> None:
    """The line number does not count."""
    one = describe_function(lambda output, y: output - y)
    assert one.startswith("<lambda>, written as ")
    assert one == describe_function(lambda output, y: output - y)
    assert one != describe_function(lambda output, y: y - output)


def test_loss_arguments_are_described() -> None:
    weights = [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight])) for weight in (1.0, 3.0)
    ]
    assert describe_function(weights[0]) != describe_function(weights[1])
    assert (
        describe_function(functools.partial(F.huber_loss, delta=0.5))
        == "huber_loss with delta=0.5"
    )


def test_function_model_compared_by_function() -> None:
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


def test_running_statistics_follow_parameters() -> None:
    """With `statistics="local"` they are not part of the description."""
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
    reported = difference(TorchModel(module), TorchModel(module, statistics="local"))
    assert reported == "parameter 1.running_mean is 2 of float32 here, and missing there"
