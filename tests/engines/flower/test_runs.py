"""Whole runs in one process, through both Flower apps and Flower's serialisation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from torch import nn

import fedbudget
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.flower import grid
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.errors import UserError
from fedbudget.flower import aggregate, client_app, server, server_app, summary
from fedbudget.result import Result
from fedbudget.runs.folder import Run
from support.flower_grid import LocalGrid, partitions, run_config
from support.flower_runs import FIXED, local, run, train_in_process
from support.processes import sample_shards

WITHOUT_DATA: dict[str, Any] = {
    name: value for name, value in FIXED.items() if name not in ("dataset", "partition")
}
SEEDED: dict[str, Any] = {"seeded-batches": True}
"""Configuration of a node whose mini-batches follow from the seed of the run."""


class TestSameBits:
    @pytest.mark.parametrize(
        "how",
        [
            {"method": "paper"},
            {"method": "frugal"},
            {"method": "accelerated"},
            {"method": "frugal", "batch_size": "full"},
            {"method": "paper", "tau": "adaptive", "budget": "time=3s", "rounds": 12},
            {"method": "frugal", "tau": "adaptive", "budget": "time=3s", "rounds": 12},
            {
                "method": "accelerated",
                "tau": "adaptive",
                "budget": "time=3s",
                "rounds": 8,
                "speeds": "4,1,1",
            },
            {"method": "accelerated", "compress": "8-bit"},
            {"method": "paper", "compress": "16-bit"},
            {"method": "accelerated", "participation": 0.6},
            pytest.param(
                {
                    "method": "paper",
                    "model": "softmax",
                    "drift_correction": True,
                    "delta": "parameters",
                },
                marks=pytest.mark.slow,
            ),
        ],
        ids=str,
    )
    def test_run_matches_one_process(self, how: dict[str, Any], tmp_path: Path) -> None:
        result, expected = run(tmp_path, **how), train_in_process(**how)
        assert result.w.tobytes() == expected.w.tobytes()
        assert [record.tau for record in result.rounds] == [
            record.tau for record in expected.rounds
        ]
        assert result.spent == expected.spent

    def test_order_of_nodes_is_irrelevant(self, tmp_path: Path) -> None:
        config = run_config(**FIXED, nodes=3)
        result = run(tmp_path, local=LocalGrid(config, partitions(3, [2, 0, 1])))
        assert result.w.tobytes() == train_in_process().w.tobytes()

    def test_node_files(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(5)
        shards = [
            (rng.normal(size=(size, 6)).astype(np.float32), rng.integers(0, 2, size))
            for size in (30, 40)
        ]
        for number, (x, y) in enumerate(shards):
            np.savez(tmp_path / f"{number}.npz", x=x, y=y)
        how: dict[str, Any] = {"method": "frugal", "model": "softmax", "batch_size": 8}
        config = run_config(**{**FIXED, **how, "dataset": "", "partition": "", "nodes": 2})
        nodes: list[Any] = [
            {"data": str(tmp_path / f"{number}.npz"), **SEEDED} for number in (0, 1)
        ]
        files = LocalGrid(config, nodes)
        result = run(tmp_path, 2, files, **how, dataset="", partition="")
        expected = fedbudget.train(shards=shards, **WITHOUT_DATA, **how)
        assert result.w.tobytes() == expected.w.tobytes()

    def test_data_function(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(5)
        x, y = rng.normal(size=(60, 6)).astype(np.float32), rng.integers(0, 2, 60)
        dataset = Dataset("made", Part(x, y), classes=("no", "yes"))

        def data(context: Context) -> NodeData:
            first = 20 if context.node_config["which"] else 0
            gateway = [np.arange(20, 40), np.arange(40, 60)]
            return NodeData(dataset, gateway if first else [np.arange(20)])

        how: dict[str, Any] = {"method": "frugal", "model": "softmax", "batch_size": 8}
        config = run_config(**{**FIXED, **how, "nodes": 2})
        made = LocalGrid(
            config, [{"which": 0, **SEEDED}, {"which": 1, **SEEDED}], client_app(data)
        )
        result = run(tmp_path, 2, made, **how)
        expected = fedbudget.train(
            shards=[(x[at : at + 20], y[at : at + 20]) for at in (0, 20, 40)],
            **WITHOUT_DATA,
            **how,
        )
        assert result.w.tobytes() == expected.w.tobytes()
        assert result.rounds[0].nodes == 3  # one node, and a gateway with two


def test_run_is_saved_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = run(tmp_path, test="digits")
    saved = Run.open(tmp_path / "run")
    assert saved.model().w.tobytes() == result.w.tobytes()
    assert (saved.settings.nodes, saved.settings.dataset, saved.settings.partition) == (
        3,
        "digits",
        "case:2",
    )
    assert [record.round for record in saved.rounds] == [1, 2, 3, 4, 5, 6]
    assert saved.summary is not None
    assert saved.summary["network"]["sent"] > 0
    assert result.accuracy is not None
    assert result.accuracy > 0.5
    assert "stopped by rounds" in caplog.text
    assert str(tmp_path / "run") in caplog.text


def test_server_app_has_same_bits(tmp_path: Path) -> None:
    config = run_config(**FIXED, nodes=3, out=str(tmp_path / "run"))
    server(LocalGrid(config, partitions(3)), Context(7, 1, {}, RecordDict(), config))
    assert Run.open(tmp_path / "run").model().w.tobytes() == train_in_process().w.tobytes()
    assert (tmp_path / "run" / "plot.png").exists()


def test_byte_budget_counts_messages(tmp_path: Path) -> None:
    result = run(tmp_path, costs="measured", budget="bytes=60kB", rounds=1000, model="svm")
    network = json.loads((tmp_path / "run" / "summary.json").read_text())["network"]
    assert result.stopped_by == "bytes"
    assert 0.8 * 60e3 < result.spent["bytes"] <= 60e3
    # The network also counts messages before the first round.
    assert result.spent["bytes"] < network["sent"] + network["received"]


def test_cpu_budget_sums_over_nodes(tmp_path: Path) -> None:
    result = run(tmp_path, costs="measured", budget="cpu=1000s")
    assert result.sources == {"cpu": "measured"}
    assert 0 < result.spent["cpu"] < 1000


def test_budget_below_one_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="budget"):
        run(tmp_path, costs="measured", budget="time=0.001s")


# Mistakes of the user.


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (
            [{}, {}],
            "0 of 2 nodes could describe their data, and 2 are needed; "
            "Flower's node 100: a node has no data",
        ),
        (
            [{"partition-id": 0, "num-partitions": 2}, {"data": "/no/such.csv"}],
            "1 of 2 nodes could describe their data, and 2 are needed; "
            "Flower's node 101: /no/such.csv",
        ),
    ],
)
def test_nodes_without_data_stop_run(
    nodes: list[Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(**FIXED, nodes=2)
    with pytest.raises(UserError, match=reason):
        run(tmp_path, 2, LocalGrid(config, nodes))
    assert reason in caplog.text


def test_spare_node_without_data_is_skipped(tmp_path: Path) -> None:
    config = run_config(**FIXED, nodes=2)
    mixed = LocalGrid(config, [*partitions(2), {}])
    assert run(tmp_path, 2, mixed).rounds[0].nodes == 2


def test_import_error_of_node_is_reported(tmp_path: Path) -> None:
    ours = local()
    ours.before = lambda number, message: (_ for _ in ()).throw(
        ImportError("no fedbudget here")
    )
    with pytest.raises(
        UserError,
        match=r"node 100: Flower error \d+: <class 'ImportError'>:<'no fedbudget here'>",
    ):
        run(tmp_path, local=ours)


def test_run_waits_for_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local()
    polls = [0]
    ids = ours.get_node_ids

    def one_more_every_second_poll() -> Any:
        polls[0] += 1
        return list(ids())[: polls[0] // 2]

    ours.get_node_ids = one_more_every_second_poll  # type: ignore[method-assign]
    assert run(tmp_path, local=ours).rounds[0].nodes == 3
    assert "0 of 3 nodes are connected" in caplog.text
    assert "2 of 3 nodes are connected" in caplog.text


SHARDS = sample_shards(2)
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "tau": 4,
    "rounds": 4,
    "budget": "time=1000s",
    "batch_size": 8,
    "costs": "simulated",
}


def shard_of(context: Context) -> Any:
    return SHARDS[int(context.node_config["which"])]


def test_metrics_cover_all_held_out_samples(tmp_path: Path) -> None:
    config: Any = run_config(
        **SETTINGS, model="softmax", nodes=2, out=str(tmp_path / "run")
    )
    nodes: list[Any] = [{"which": 0, "test-share": 0.4}, {"which": 1, "test-share": 0.4}]
    result = aggregate(
        LocalGrid(config, nodes, client_app(shard_of)),
        Context(7, 1, {}, RecordDict(), config),
        plot=False,
    )
    right = []
    for x, y in SHARDS:
        held = np.random.default_rng(0).permutation(len(y))[: int(0.4 * len(y))]
        weights = result.w.reshape(3, -1)
        right.append(
            (x[held] @ weights[:, :-1].T + weights[:, -1]).argmax(axis=1) == y[held]
        )
    assert result.accuracy == np.mean(np.concatenate(right))
    assert result.spread["worst"] == min(map(np.mean, right))
    assert any("over 2 nodes: worst" in line for line in summary(result))


def test_invalid_test_share_is_refused(tmp_path: Path) -> None:
    config: Any = run_config(
        **SETTINGS, model="softmax", nodes=1, out=str(tmp_path / "run")
    )
    grid = LocalGrid(config, [{"which": 0, "test-share": 1.5}], client_app(shard_of))
    with pytest.raises(
        UserError, match=r"test-share = 1\.5 must be a number from 0 to below 1"
    ):
        aggregate(grid, Context(7, 1, {}, RecordDict(), config), plot=False)


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


def model_grid(config: dict[str, Any], model: Any) -> LocalGrid:
    nodes: list[Any] = [{"which": which, **SEEDED} for which in (0, 1)]
    return LocalGrid(config, nodes, client_app(shard_of, model=model))


def train_here(model: Any) -> Result:
    """The same run without Flower."""
    return fedbudget.train(model=model, shards=SHARDS, **SETTINGS)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    "model", [Net, fedbudget.FunctionModel(least_squares, initial=np.zeros(6))]
)
def test_custom_model_matches_one_process(tmp_path: Path, model: Any) -> None:
    config: Any = run_config(**SETTINGS, nodes=2, out=str(tmp_path / "run"))
    server_app(model)(model_grid(config, model), Context(7, 1, {}, RecordDict(), config))
    assert Run.open(tmp_path / "run").model().w.tobytes() == train_here(model).w.tobytes()


@pytest.mark.usefixtures("one_torch_thread")
def test_custom_model_from_configuration(tmp_path: Path) -> None:
    """The run configuration names the model of the aggregator, and each node configuration
    its own. No process loads code that another machine names.
    """
    (tmp_path / "net.py").write_text(NET)
    model = f"{tmp_path}/net.py:Net"
    (tmp_path / "ward.py").write_text(
        "from support.processes import sample_shards\none, two = sample_shards(2)"
    )
    config: Any = run_config(**SETTINGS, nodes=2, out=str(tmp_path / "run"), model=model)
    nodes: list[Any] = [
        {"data": f"{tmp_path}/ward.py:{name}", "model": model, **SEEDED}
        for name in ("one", "two")
    ]
    result = aggregate(
        LocalGrid(config, nodes), Context(7, 1, {}, RecordDict(), config), plot=False
    )
    assert result.w.tobytes() == train_here(Net).w.tobytes()
    assert Run.open(tmp_path / "run").settings.model == f"{tmp_path.resolve()}/net.py:Net"

    without = LocalGrid(config, [{"data": each["data"]} for each in nodes])
    with pytest.raises(
        UserError,
        match=r"a named model, and the aggregator net \(TorchModel, 73 parameters",
    ):
        aggregate(without, Context(7, 1, {}, RecordDict(), config), plot=False)


@pytest.mark.usefixtures("one_torch_thread")
def test_mismatched_custom_model_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = run_config(**SETTINGS, nodes=2, out=str(tmp_path / "run"))
    wider = model_grid(config, nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)))
    words = (
        "parameter 0.weight is 9 x 6 of float32 at the node, "
        "and 7 x 6 of float32 at the aggregator"
    )
    with pytest.raises(UserError, match=words):
        aggregate(wider, Context(7, 1, {}, RecordDict(), config), model=Net, plot=False)
    assert words in caplog.text


PRIVATE: dict[str, Any] = {"model": "softmax", "tau": 4, "rounds": 4}
BUDGET = "time=1000s,privacy=8"


def test_seeded_noise_matches_one_process(tmp_path: Path) -> None:
    result = run(tmp_path, **PRIVATE, budget=BUDGET, privacy_noise="seeded")
    expected = train_in_process(**PRIVATE, budget=BUDGET.split(","))
    assert result.w.tobytes() == expected.w.tobytes()
    assert result.spent["privacy"] == expected.spent["privacy"] <= 8


def test_noise_is_not_reproducible(tmp_path: Path) -> None:
    result = run(tmp_path, **PRIVATE, budget=BUDGET)
    assert not np.allclose(
        result.w, train_in_process(**PRIVATE, budget=BUDGET.split(",")).w
    )
    assert (tmp_path / "run" / "privacy.jsonl").is_file()


def test_sample_privacy_uses_node_noise(tmp_path: Path) -> None:
    """The parameters differ between runs. ε equals the ε of the same run in one process."""
    options = {**PRIVATE, "privacy_unit": "sample"}
    result = run(tmp_path, **options, budget=BUDGET)
    expected = train_in_process(**options, budget=BUDGET.split(","))
    assert result.spent["privacy"] == pytest.approx(expected.spent["privacy"], rel=1e-6)
    assert result.spent["privacy"] <= 8
    assert not np.allclose(result.w, expected.w)
