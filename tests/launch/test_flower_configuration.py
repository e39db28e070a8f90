"""What a person has written for Flower becomes settings, and what a node holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.budget.step_size import FallingStep
from fedbudget.errors import UserError
from fedbudget.launch.flower import Config, node_data, partition_of, read_run
from fedbudget.launch.method import build_method
from fedbudget.launch.simulate import simulate
from fedbudget.protocol.update import FedYogi
from fedbudget.settings.settings import Settings
from support.flower_processes import EXAMPLE


class TestARun:
    def test_has_the_settings_of_a_config_file_and_measured_costs(self) -> None:
        found = read_run(
            {
                "model": "softmax",
                "tau-max": 7,
                "step-size": 1,
                "batch-size": "full",
                "seed": 3,
            }
        ).settings
        assert found == Settings(
            model="softmax",
            tau_max=7,
            step_size=1.0,
            batch_size="full",
            seed=3,
            costs="measured",
        )

    def test_may_name_an_update_rule(self) -> None:
        found = read_run(
            {
                "update": "fedyogi",
                "server-step-size": 0.5,
                "step-size": 0.1,
                "step-fall": 0.35,
            }
        ).settings
        assert build_method(found).update == FedYogi(step_size=0.5)
        assert build_method(found).step_size == FallingStep(0.1, fall=0.35)

    def test_has_several_limits_in_one_text(self) -> None:
        assert read_run({"budget": "time=60s, bytes=20MB"}).settings.limits().limits == {
            "time": 60.0,
            "bytes": 20e6,
        }

    def test_an_empty_text_is_not_given(self) -> None:
        assert read_run(
            {"phi": "", "rounds": "", "out": "", "test": "", "target": ""}
        ) == read_run({})

    def test_says_where_it_is_kept_and_what_is_tested_on(self) -> None:
        found = read_run({"out": "somewhere/else", "test": "digits"})
        assert (found.out, found.test) == (Path("somewhere/else"), "digits")

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ({"speed": 1}, "unknown key 'speed'"),
            ({"phi.a": 1}, "unknown key 'phi.a'"),
            (
                {"tau": 2.5},
                r"app.config\]: tau must be adaptive or a whole number of at least 1, not 2\.5",
            ),
            ({"budget": 3}, "budget must be a list of texts, not 3"),
            ({"step-sise": 1}, r"unknown key 'step-sise'; did you mean step-size\?"),
            (
                {"method": "centralized", "step-size": "auto"},
                r"app.config\]: centralized descent needs a step-size",
            ),
            ({"budget": "time=60s,love=3"}, "love"),
            ({"method": "centralized"}, "has no nodes; use accelerated, frugal or paper"),
            ({"compress": "7-bit"}, "compress must be none, 16-bit, 8-bit or auto"),
            ({"participation": 1.5}, "participation"),
            ({"out": 7}, "out = 7 must be a text"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line(
        self, config: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(UserError, match=reason) as caught:
            read_run(config)
        assert "\n" not in str(caught.value)

    def test_the_example_is_one(self) -> None:
        import tomllib

        app = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
        asked = read_run(app["config"])
        assert asked.settings.limits().limits == {"time": 60.0}
        assert app["components"] == {
            "serverapp": "fedbudget.flower:server",
            "clientapp": "fedbudget.flower:client",
        }


class TestANode:
    def test_with_a_partition_has_the_rows_that_a_node_of_one_process_would(self) -> None:
        settings: Config = {"dataset": "digits", "partition": "case:4", "seed": 3}
        whole = simulate(
            Settings(dataset="digits", partition="case:4", seed=3, nodes=3)
        ).shards
        for number in range(3):
            held = node_data({"partition-id": number, "num-partitions": 3}, settings)
            assert [rows.tolist() for rows in held.rows] == [whole.rows_of(number).tolist()]

    def test_with_a_file_has_all_of_it_whatever_partition_flower_gives_it(
        self, tmp_path: Path
    ) -> None:
        np.savez(tmp_path / "mine.npz", x=np.eye(6, 4), y=np.arange(6) % 2)
        node: Config = {
            "data": str(tmp_path / "mine.npz"),
            "partition-id": 1,
            "num-partitions": 2,
        }
        assert len(node_data(node, {}).rows[0]) == 6
        assert partition_of(node) is None
        assert partition_of({"partition-id": 1, "num-partitions": 2}) == 1

    @pytest.mark.parametrize("where", ["node", "run"])
    def test_predicts_the_column_that_it_or_the_run_names(
        self, where: str, tmp_path: Path
    ) -> None:
        (tmp_path / "mine.csv").write_text(
            "a,b,c\n" + "".join(f"{i},{i % 3},{i * i}\n" for i in range(12))
        )
        named = {"target": "a"}
        node = {"data": str(tmp_path / "mine.csv"), **(named if where == "node" else {})}
        held = node_data(node, named if where == "run" else {})
        assert held.dataset.train.x[:3].tolist() == [[0, 0], [1, 1], [2, 4]]
        assert held.standardise

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
    def test_that_has_none_is_told_what_to_do(
        self, node: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(UserError, match=reason) as caught:
            node_data(node, {})
        assert "\n" not in str(caught.value)
