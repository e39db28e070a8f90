"""Flower configuration: settings of a run, and data of a node."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.budget.step_size import FallingStep
from fedbudget.data.agreement import Moments
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.launch.flower import (
    Config,
    is_private_run,
    node_data,
    node_setup,
    partition_of,
    read_run,
)
from fedbudget.launch.method import build_method
from fedbudget.launch.simulate import simulate
from fedbudget.protocol.update import FedYogi
from fedbudget.settings.settings import Settings
from support.flower_processes import EXAMPLE


class TestRunConfig:
    def test_settings_and_measured_costs(self) -> None:
        settings = read_run(
            {
                "model": "softmax",
                "tau-max": 7,
                "step-size": 1,
                "batch-size": "full",
                "seed": 3,
            }
        ).settings
        assert settings == Settings(
            model="softmax",
            tau_max=7,
            step_size=1.0,
            batch_size="full",
            seed=3,
            costs="measured",
        )

    def test_update_rule(self) -> None:
        settings = read_run(
            {
                "update": "fedyogi",
                "server-step-size": 0.5,
                "step-size": 0.1,
                "step-fall": 0.35,
            }
        ).settings
        assert build_method(settings).update == FedYogi(step_size=0.5)
        assert build_method(settings).step_size == FallingStep(0.1, fall=0.35)

    def test_several_limits(self) -> None:
        assert read_run({"budget": "time=60s, bytes=20MB"}).settings.limits().limits == {
            "time": 60.0,
            "bytes": 20e6,
        }

    def test_empty_text_means_default(self) -> None:
        assert read_run(
            {"phi": "", "rounds": "", "out": "", "test": "", "target": ""}
        ) == read_run({})

    def test_output_folder_and_test_data(self) -> None:
        run = read_run({"out": "somewhere/else", "test": "digits"})
        assert run.out == Path("somewhere/else")
        assert run.test == "digits"

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ({"speed": 1}, "unknown key 'speed'"),
            ({"phi.a": 1}, "unknown key 'phi.a'"),
            (
                {"tau": 2.5},
                r"app.config\]: tau must be adaptive or a whole number .* not 2\.5",
            ),
            ({"budget": 3}, "budget must be a text or a list of texts, not 3"),
            ({"step-sise": 1}, r"unknown key 'step-sise'; did you mean step-size\?"),
            (
                {"method": "centralized", "step-size": "auto"},
                r"app.config\]: method centralized needs a step-size",
            ),
            ({"budget": "time=60s,love=3"}, "love"),
            (
                {"method": "centralized"},
                "method centralized does not work with engine flower",
            ),
            ({"compress": "7-bit"}, "compress must be none, 16-bit, 8-bit or auto"),
            ({"participation": 1.5}, "participation"),
            ({"out": 7}, "out = 7 must be a text"),
        ],
    )
    def test_errors_are_one_line(self, config: dict[str, Any], reason: str) -> None:
        with pytest.raises(UserError, match=reason) as caught:
            read_run(config)
        assert "\n" not in str(caught.value)

    def test_example_is_valid(self) -> None:
        import tomllib

        app = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
        run = read_run(app["config"])
        assert run.settings.limits().limits == {"time": 60.0}
        assert app["components"] == {
            "serverapp": "fedbudget.flower:server",
            "clientapp": "fedbudget.flower:client",
        }


class TestNodeData:
    def test_partition_equals_simulated_shard(self) -> None:
        config: Config = {"dataset": "digits", "partition": "case:4", "seed": 3}
        shards = simulate(
            Settings(dataset="digits", partition="case:4", seed=3, nodes=3)
        ).shards
        for number in range(3):
            data = node_data({"partition-id": number, "num-partitions": 3}, config)
            assert [rows.tolist() for rows in data.rows] == [
                shards.rows_of(number).tolist()
            ]

    def test_file_overrides_partition(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "mine.npz", x=np.eye(6, 4), y=np.arange(6) % 2)
        node: Config = {
            "data": str(tmp_path / "mine.npz"),
            "partition-id": 1,
            "num-partitions": 2,
        }
        assert len(node_data(node, {}).rows[0]) == 6
        assert partition_of(node) is None
        assert partition_of({"partition-id": 1, "num-partitions": 2}) == 1

    @pytest.mark.parametrize("source", ["node", "run"])
    def test_target_of_node_or_run(self, source: str, tmp_path: Path) -> None:
        (tmp_path / "mine.csv").write_text(
            "a,b,c\n" + "".join(f"{i},{i % 3},{i * i}\n" for i in range(12))
        )
        target = {"target": "a"}
        node = {"data": str(tmp_path / "mine.csv"), **(target if source == "node" else {})}
        data = node_data(node, target if source == "run" else {})
        assert data.dataset.train.x[:3].tolist() == [[0, 0], [1, 1], [2, 4]]
        assert data.standardise

    @pytest.mark.parametrize("source", ["node", "run"])
    def test_schema_of_node_or_run(self, source: str, tmp_path: Path) -> None:
        """A node of a private run introduces itself with a schema, and only with one."""
        rows = "".join(f"{i},{i % 3},{'ab'[i % 2]}\n" for i in range(12))
        (tmp_path / "mine.csv").write_text("a,b,c\n" + rows)
        path = tmp_path / "schema.toml"
        path.write_text(
            '[target]\nname = "c"\nclasses = ["a", "b"]\n'
            "[columns]\na = { range = [0, 8] }\nb = { range = [0, 2] }\n"
        )
        schema = {"schema": str(path)}
        data = {"data": str(tmp_path / "mine.csv")}
        node: Config = {**data, **(schema if source == "node" else {})}
        run: Config = {"budget": "time=1s,privacy=4", **(schema if source == "run" else {})}
        setup = node_setup(node, run)
        assert is_private_run(run)
        worker = Worker(setup.data)
        samples = worker.hello("x", private=True).samples
        assert samples.features == Moments(np.array([4.0, 1.0]), np.array([4.0, 1.0]))
        bare = node_setup(data, {"budget": "time=1s,privacy=4"})
        with pytest.raises(UserError, match="needs a public schema"):
            Worker(bare.data).hello("x", private=True)

    @pytest.mark.parametrize(
        ("node", "reason"),
        [
            (
                {},
                r"has no data: start its SuperNode with --node-config .*\(its keys: none\)",
            ),
            ({"gpu": True, "partition-id": 1}, r"\(its keys: gpu, partition-id\)"),
            ({"data": "/no/such/file.csv"}, "/no/such/file.csv"),
            ({"data": 5}, "data = 5 must be a text"),
            (
                {"partition-id": 3, "num-partitions": 3},
                "partitions are numbered from 0 to 2",
            ),
            (
                {"partition-id": "one", "num-partitions": 3},
                "partition-id = 'one' must be a whole number",
            ),
        ],
    )
    def test_missing_data_errors(self, node: dict[str, Any], reason: str) -> None:
        with pytest.raises(UserError, match=reason) as caught:
            node_data(node, {})
        assert "\n" not in str(caught.value)
