"""Personal models of whole runs, in process, over gRPC and on Flower.

tests/launch/test_on_ray.py has runs on Ray.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedbudget
from fedbudget.errors import UserError
from support import flower_runs

OPTIONS: dict[str, Any] = {
    "budget": "time=1000000s",
    "costs": "simulated",
    "tau": 4,
    "rounds": 6,
    "seed": 3,
    "compress": "none",
    "model": "softmax",
}
LONG = 60.0  # timeout in seconds, never reached


def hospital(seed: int, rows: int = 120) -> tuple[Any, Any]:
    """Return a shard whose labels depend on the features in its own way."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 5)).astype(np.float32)
    score = x @ np.array([2, 0, 0, 0, 0]) + (-1) ** seed * 4 * x[:, 1]
    return x, (score > 0).astype(np.int64)


SHARDS = [hospital(0), hospital(1), hospital(2, rows=9)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fedbudget.Result:
    out = tmp_path_factory.mktemp("personal") / "run"
    return fedbudget.train(shards=SHARDS, personal=True, out=out, **OPTIONS)


class TestInProcess:
    def test_models_fit_their_node(self, trained: fedbudget.Result) -> None:
        """Labels differ between the nodes, so one model cannot serve both."""
        for number in (0, 1):
            x, y = hospital(number + 10)
            own = trained.personal[f"node {number}"]
            assert (own.predict(x) == y).mean() > 0.85
            assert (own.predict(x) == y).mean() > (trained.model.predict(x) == y).mean()
        few = trained.site_report["node 2"]
        assert (few.kept, few.rows, few.shared, few.personal) == ("few rows", 9, None, None)
        assert trained.personal["node 2"].w.tobytes() == trained.w.tobytes()

    def test_training_is_unchanged(self, trained: fedbudget.Result) -> None:
        plain = fedbudget.train(shards=SHARDS, **OPTIONS)
        assert plain.w.tobytes() == trained.w.tobytes()
        assert plain.spent == trained.spent
        assert not plain.site_report
        assert not plain.personal

    def test_run_folder_has_the_models(self, trained: fedbudget.Result) -> None:
        assert trained.run is not None
        loaded = fedbudget.load(trained.run, site="node 1")
        assert loaded.w.tobytes() == trained.personal["node 1"].w.tobytes()
        summary = json.loads((trained.run / "summary.json").read_text())
        figures = summary["site_report"]["node 1"]
        assert figures["rows"] == 120
        assert figures["personal"]["value"] > figures["shared"]["value"]

    def test_unknown_site_is_refused(self, trained: fedbudget.Result) -> None:
        assert trained.run is not None
        message = r"unknown site 'node 7'; .* has models of node 0, node 1, node 2"
        with pytest.raises(UserError, match=message):
            fedbudget.load(trained.run, site="node 7")

    def test_run_without_personal_models(self, tmp_path: Path) -> None:
        result = fedbudget.train(shards=SHARDS, out=tmp_path / "run", **OPTIONS)
        assert result.run is not None
        with pytest.raises(UserError, match="has no personal models"):
            fedbudget.load(result.run, site="node 1")

    def test_shift_of_a_linear_model(self, tmp_path: Path) -> None:
        """The nodes differ in their mean only, which the global model cannot express."""
        shards = []
        for number in range(2):
            x, _ = hospital(number, rows=200)
            shards.append((x, x[:, 0] + 10.0 * number + 0.1 * x[:, 1] ** 2))
        result = fedbudget.train(
            shards=shards,
            personal=True,
            out=tmp_path / "run",
            **{**OPTIONS, "model": "linear"},
        )
        for number, (x, y) in enumerate(shards):
            loaded = fedbudget.load(tmp_path / "run", site=f"node {number}")
            error = np.sqrt(np.mean((loaded.predict(x) - y) ** 2))
            assert error < 0.3
            figures = result.site_report[f"node {number}"]
            assert figures.personal is not None
            assert figures.personal.value == pytest.approx(error, abs=0.1)

    def test_private_run_reports_no_figures(self) -> None:
        """The privacy budget does not cover them; the models stay with the nodes."""
        options = {**OPTIONS, "budget": ["time=1000000s", "privacy=8"]}
        result = fedbudget.train(shards=SHARDS, personal=True, **options)
        assert not result.site_report
        assert len(result.personal) == 3

    def test_personal_models_claim_no_privacy(self, tmp_path: Path) -> None:
        """They follow from exact rows, unlike the global model."""
        options = {**OPTIONS, "budget": ["time=1000000s", "privacy=8"]}
        fedbudget.train(shards=SHARDS, personal=True, out=tmp_path / "run", **options)
        assert fedbudget.load(tmp_path / "run").privacy is not None
        assert fedbudget.load(tmp_path / "run", site="node 0").privacy is None

    def test_baseline_has_none(self) -> None:
        with pytest.raises(UserError, match="centralized has no personal models"):
            fedbudget.train(
                dataset="digits", model="svm", method="centralized", personal=True
            )

    def test_network_of_your_own(self) -> None:
        result = fedbudget.train(
            shards=SHARDS[:2],
            personal=True,
            **{
                **OPTIONS,
                "model": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)),
            },
        )
        x, y = hospital(11)
        better = (result.personal["node 1"].predict(x) == y).mean()
        assert better > (result.model.predict(x) == y).mean() + 0.1


class TestNetwork:
    @pytest.fixture
    def nodes(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(4) as pool:
            yield pool

    def test_nodes_keep_their_models(
        self, nodes: ThreadPoolExecutor, tmp_path: Path, trained: fedbudget.Result
    ) -> None:
        """The bits are those of one process; a node may keep its figures.

        It is the node without votes: votes that are missing change the other models.
        """
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        started = [
            nodes.submit(
                fedbudget.join,
                address,
                name=f"n{number}",
                data=shard,
                save_model=tmp_path / f"n{number}",
                keep_figures=number == 2,
                seeded_batches=True,
                give_up_after=LONG,
                quiet=True,
            )
            for number, shard in enumerate(SHARDS)
        ]
        result = fedbudget.serve(
            address, nodes=3, personal=True, quiet=True, combine="mean", **OPTIONS
        )
        assert [each.result(LONG) for each in started] == [len(result.rounds)] * 3
        assert result.w.tobytes() == trained.w.tobytes()
        assert not result.personal
        assert sorted(result.site_report) == ["n0", "n1"]
        assert result.site_report["n0"] == trained.site_report["node 0"]
        for number in range(3):
            own = fedbudget.load(tmp_path / f"n{number}")
            assert own.w.tobytes() == trained.personal[f"node {number}"].w.tobytes()
            shared = fedbudget.load(tmp_path / f"n{number}" / "global.safetensors")
            assert shared.w.tobytes() == trained.w.tobytes()


def test_flower_gives_same_figures(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "softmax", "personal": True, "combine": "mean"}
    result = flower_runs.run(tmp_path, **settings)
    expected = flower_runs.train_in_process(**settings)
    assert result.w.tobytes() == expected.w.tobytes()
    assert list(result.site_report.values()) == list(expected.site_report.values())
