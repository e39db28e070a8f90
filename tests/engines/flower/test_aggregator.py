"""Whole runs in this process, through both of the real apps and all of Flower's
serialisation.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

import fedbudget
from fedbudget.data.dataset import Dataset, Part
from fedbudget.engines.flower import grid
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.errors import UserError
from fedbudget.flower import client_app, server
from fedbudget.runs.folder import Run
from support.flower_grid import LocalGrid, asked, partitions
from support.flower_runs import FIXED, here, local, run


class TestTheSameBits:
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
    def test_as_in_one_process(self, how: dict[str, Any], tmp_path: Path) -> None:
        found, expected = run(tmp_path, **how), here(**how)
        assert found.w.tobytes() == expected.w.tobytes()
        assert [record.tau for record in found.rounds] == [
            record.tau for record in expected.rounds
        ]
        assert found.spent == expected.spent

    def test_whatever_order_flower_has_its_nodes_in(self, tmp_path: Path) -> None:
        config = asked(**FIXED, nodes=3)
        found = run(tmp_path, local=LocalGrid(config, partitions(3, [2, 0, 1])))
        assert found.w.tobytes() == here().w.tobytes()

    def test_with_nodes_that_have_files_of_their_own(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(5)
        shards = [
            (rng.normal(size=(size, 6)).astype(np.float32), rng.integers(0, 2, size))
            for size in (30, 40)
        ]
        for number, (x, y) in enumerate(shards):
            np.savez(tmp_path / f"{number}.npz", x=x, y=y)
        how: dict[str, Any] = {"method": "frugal", "model": "softmax", "batch_size": 8}
        config = asked(**{**FIXED, **how, "dataset": "", "partition": "", "nodes": 2})
        files = LocalGrid(
            config, [{"data": str(tmp_path / f"{number}.npz")} for number in (0, 1)]
        )
        found = run(tmp_path, 2, files, **how, dataset="", partition="")
        rest = {
            name: value
            for name, value in FIXED.items()
            if name not in ("dataset", "partition")
        }
        expected = fedbudget.train(shards=shards, **rest, **how)
        assert found.w.tobytes() == expected.w.tobytes()

    def test_with_data_that_a_person_makes_in_python(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(5)
        x, y = rng.normal(size=(60, 6)).astype(np.float32), rng.integers(0, 2, 60)
        dataset = Dataset("made", Part(x, y), classes=("no", "yes"))

        def data(context: Context) -> NodeData:
            first = 20 if context.node_config["which"] else 0
            gateway = [np.arange(20, 40), np.arange(40, 60)]
            return NodeData(dataset, gateway if first else [np.arange(20)])

        how: dict[str, Any] = {"method": "frugal", "model": "softmax", "batch_size": 8}
        config = asked(**{**FIXED, **how, "nodes": 2})
        made = LocalGrid(config, [{"which": 0}, {"which": 1}], client_app(data))
        found = run(tmp_path, 2, made, **how)
        rest = {
            name: value
            for name, value in FIXED.items()
            if name not in ("dataset", "partition")
        }
        expected = fedbudget.train(
            shards=[(x[at : at + 20], y[at : at + 20]) for at in (0, 20, 40)], **rest, **how
        )
        assert found.w.tobytes() == expected.w.tobytes()
        assert found.rounds[0].nodes == 3  # one, and a gateway with two


def test_a_run_is_on_disk_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(tmp_path, test="digits")
    found = Run.open(tmp_path / "run")
    assert found.model().w.tobytes() == result.w.tobytes()
    assert (found.settings.nodes, found.settings.dataset, found.settings.partition) == (
        3,
        "digits",
        "case:2",
    )
    assert [record.round for record in found.rounds] == [1, 2, 3, 4, 5, 6]
    assert found.summary is not None
    assert found.summary["network"]["sent"] > 0
    assert result.accuracy is not None
    assert result.accuracy > 0.5
    assert "stopped by rounds" in caplog.text
    assert str(tmp_path / "run") in caplog.text


def test_the_server_app_makes_the_same_run(tmp_path: Path) -> None:
    config = asked(**FIXED, nodes=3, out=str(tmp_path / "run"))
    server(LocalGrid(config, partitions(3)), Context(7, 1, {}, RecordDict(), config))
    assert Run.open(tmp_path / "run").model().w.tobytes() == here().w.tobytes()
    assert (tmp_path / "run" / "plot.png").exists()


def test_a_budget_in_bytes_is_of_what_messages_carry(tmp_path: Path) -> None:
    result = run(tmp_path, costs="measured", budget="bytes=60kB", rounds=1000, model="svm")
    network = json.loads((tmp_path / "run" / "summary.json").read_text())["network"]
    assert result.stopped_by == "bytes"
    assert 0.8 * 60e3 < result.spent["bytes"] <= 60e3
    assert (
        result.spent["bytes"] < network["sent"] + network["received"]
    )  # which has what came before the first round


def test_a_budget_in_processors_seconds_is_of_all_nodes(tmp_path: Path) -> None:
    result = run(tmp_path, costs="measured", budget="cpu=1000s")
    assert result.sources == {"cpu": "measured"}
    assert 0 < result.spent["cpu"] < 1000


def test_a_budget_that_is_too_small_for_a_round_is_refused_with_what_one_costs(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="budget"):
        run(tmp_path, costs="measured", budget="time=0.001s")


# People's mistakes.


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (
            [{}, {}],
            "0 of 2 nodes could describe their data, and 2 are needed; Flower's node 100: a node has no data",
        ),
        (
            [{"partition-id": 0, "num-partitions": 2}, {"data": "/no/such.csv"}],
            "1 of 2 nodes could describe their data, and 2 are needed; Flower's node 101: /no/such.csv",
        ),
    ],
)
def test_nodes_without_data_end_the_run_with_one_clear_line(
    nodes: list[Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = asked(**FIXED, nodes=2)
    with pytest.raises(UserError, match=reason):
        run(tmp_path, 2, LocalGrid(config, nodes))
    assert reason in caplog.text


def test_a_node_without_data_is_left_out_where_others_suffice(tmp_path: Path) -> None:
    config = asked(**FIXED, nodes=2)
    mixed = LocalGrid(config, [*partitions(2), {}])
    assert run(tmp_path, 2, mixed).rounds[0].nodes == 2


def test_a_node_that_cannot_load_the_app_is_told_of(tmp_path: Path) -> None:
    ours = local()
    ours.before = lambda number, message: (_ for _ in ()).throw(
        ImportError("no fedbudget here")
    )
    with pytest.raises(
        UserError,
        match=r"node 100: Flower error \d+: <class 'ImportError'>:<'no fedbudget here'>",
    ):
        run(tmp_path, local=ours)


def test_nodes_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grid, "_NODES_POLL", 0.0)
    ours = local()
    looked = [0]
    ids = ours.get_node_ids

    def come_one_by_one() -> Any:
        looked[0] += 1
        return list(ids())[: looked[0] // 2]

    ours.get_node_ids = come_one_by_one  # type: ignore[method-assign]
    assert run(tmp_path, local=ours).rounds[0].nodes == 3
    assert "0 of 3 nodes are connected" in caplog.text
    assert "2 of 3 nodes are connected" in caplog.text
