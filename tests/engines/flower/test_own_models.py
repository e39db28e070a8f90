"""Models of one's own over a grid, through both of the real apps and all of Flower's
serialisation.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from torch import nn

import fedbudget
from fedbudget.errors import UserError
from fedbudget.flower import aggregate, client_app, server_app
from fedbudget.result import Result
from fedbudget.runs.folder import Run
from support.flower_grid import LocalGrid, asked
from support.processes import made

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SHARDS = made(2)
HOW: dict[str, Any] = {
    "seed": 3,
    "tau": 4,
    "rounds": 4,
    "costs": "simulated",
    "budget": "time=1000s",
    "batch_size": 8,
}
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
"""


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def least_squares(w: Any, x: Any, y: Any) -> tuple[float, Any]:
    error = x @ w - y
    return 0.5 * float(np.mean(error**2)), x.T @ error / len(y)


def samples(context: Context) -> Any:
    return SHARDS[int(context.node_config["which"])]


def grid(config: dict[str, Any], model: Any) -> LocalGrid:
    return LocalGrid(config, [{"which": 0}, {"which": 1}], client_app(samples, model=model))


def here(model: Any) -> Result:
    return fedbudget.train(model=model, shards=SHARDS, **HOW)


@pytest.mark.parametrize(
    "model", [Net, fedbudget.FunctionModel(least_squares, initial=np.zeros(6))]
)
def test_it_is_trained_as_in_one_process(tmp_path: Path, model: Any) -> None:
    config: Any = asked(**HOW, nodes=2, out=str(tmp_path / "run"))
    server_app(model)(grid(config, model), Context(7, 1, {}, RecordDict(), config))
    assert Run.open(tmp_path / "run").model().w.tobytes() == here(model).w.tobytes()


def test_it_is_found_by_configurations_too(tmp_path: Path) -> None:
    """The aggregator's by the run's, each node's by its own: nothing is loaded that another
    machine names.
    """
    (tmp_path / "net.py").write_text(NET)
    model = f"{tmp_path}/net.py:Net"
    (tmp_path / "ward.py").write_text(
        "from support.processes import made\none, two = made(2)"
    )
    config: Any = asked(**HOW, nodes=2, out=str(tmp_path / "run"), model=model)
    nodes: list[Any] = [
        {"data": f"{tmp_path}/ward.py:{name}", "model": model} for name in ("one", "two")
    ]
    result = aggregate(
        LocalGrid(config, nodes), Context(7, 1, {}, RecordDict(), config), plot=False
    )
    assert result.w.tobytes() == here(Net).w.tobytes()
    assert Run.open(tmp_path / "run").settings.model == f"{tmp_path.resolve()}/net.py:Net"

    without = LocalGrid(config, [{"data": each["data"]} for each in nodes])
    with pytest.raises(
        UserError,
        match=r"it trains a named model, and the aggregator net \(TorchModel, 73 parameters",
    ):
        aggregate(without, Context(7, 1, {}, RecordDict(), config), plot=False)


def test_another_one_at_a_node_is_refused_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = asked(**HOW, nodes=2, out=str(tmp_path / "run"))
    wider = grid(config, nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)))
    words = "parameter 0.weight is 9 x 6 of float32 at the node, and 7 x 6 of float32 at the aggregator"
    with pytest.raises(UserError, match=words):
        aggregate(wider, Context(7, 1, {}, RecordDict(), config), model=Net, plot=False)
    assert words in caplog.text
