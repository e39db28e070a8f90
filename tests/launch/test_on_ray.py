"""Simulated nodes on a Ray cluster of this machine give the bits of the in-process engine,
also when actors are killed.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn

import fedbudget
from fedbudget.arrays import Float32
from fedbudget.engines import ray as engine
from fedbudget.errors import UserError, WorkError
from fedbudget.experiments.sweep import Sweep, run
from fedbudget.launch.execute import execute
from fedbudget.launch.resume import load_resumed
from fedbudget.launch.simulate import GroupDefinition, on_ray, simulate
from fedbudget.protocol.messages import Broadcast
from fedbudget.result import Result
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import MethodName
from support import own_rules
from support.hand_made import FIRST
from support.networks import network, table

pytestmark = [
    pytest.mark.xdist_group("ray"),  # one cluster for all
    # Ray does not wait for its processes when it ends.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

SMALL = Settings(model="svm", nodes=11, partition="case:2", budget=("time=3s",))


@pytest.fixture(autouse=True, scope="module")
def one_cluster() -> Iterator[None]:
    """One cluster for all tests, because it takes seconds to start; `on_ray` reuses it."""
    # Actors cannot import this module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with engine.cluster(None):
        yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    # Close Ray's open files here, and not during another test that forbids the warning.
    gc.collect()


def on_cluster(settings: Settings, actors: int, **options: Any) -> Result:
    with on_ray(settings, actors=actors) as plan:
        return execute(plan, **options)


def assert_same_run(one: Result, other: Result) -> None:
    assert one.w.tobytes() == other.w.tobytes()
    assert [replace(record, wall=0.0) for record in one.rounds] == [
        replace(record, wall=0.0) for record in other.rounds
    ]
    figures = [each.to_json() for each in (one, other)]
    for each in figures:
        each.pop("sites", None)  # on Ray only sums over nodes arrive
        each.pop("warnings", None)  # of single nodes
    assert figures[0] == figures[1]


def test_personal_models_have_same_bits() -> None:
    settings = replace(SMALL, model="softmax", nodes=5, rounds=4, personal=True)
    one, other = on_cluster(settings, actors=2), execute(simulate(settings))
    assert one.site_report == other.site_report
    assert list(one.personal) == list(other.personal)
    for name, model in one.personal.items():
        assert model.w.tobytes() == other.personal[name].w.tobytes()


@pytest.mark.parametrize(
    "unit", [{}, {"privacy_unit": "sample", "partition": "case:1"}], ids=["node", "sample"]
)
def test_private_run_gives_same_bits(unit: dict[str, Any]) -> None:
    """The aggregator adds the noise for nodes, and each node its own for samples."""
    private = replace(SMALL, budget=("time=3s", "privacy=8"), rounds=4, **unit)
    one, other = on_cluster(private, actors=2), execute(simulate(private))
    assert one.w.tobytes() == other.w.tobytes()
    lines = [
        [replace(record, wall=0.0).to_json() for record in each.rounds]
        for each in (one, other)
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tau": 5, "rounds": 6}, id="fixed"),
        pytest.param(
            {"tau": 3, "rounds": 4, "partition": "draw:30", "nodes": 300},
            id="drawn",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"method": "paper", "batch_size": "full", "rounds": 8},
            id="paper",
            marks=pytest.mark.slow,
        ),
        pytest.param({"rounds": 8}, id="frugal", marks=pytest.mark.slow),
        pytest.param({"method": "accelerated", "rounds": 8}, id="accelerated"),
        pytest.param(
            {"participation": 0.3, "rounds": 10}, id="absent", marks=pytest.mark.slow
        ),
        pytest.param({"speeds": "lognormal:1.0", "rounds": 8}, id="by speed"),
        pytest.param(
            {"method": "accelerated", "compress": "8-bit", "rounds": 8}, id="fewer bits"
        ),
    ],
)
@pytest.mark.parametrize(
    "actors",
    [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def test_actors_give_in_process_bits(options: dict[str, Any], actors: int) -> None:
    settings = replace(SMALL, **options)
    here = execute(simulate(settings))
    assert len(here.rounds) > 4
    assert_same_run(on_cluster(settings, actors), here)


@pytest.mark.parametrize(
    ("method", "copies"),
    [
        pytest.param("frugal", "taken", marks=pytest.mark.slow),
        pytest.param("frugal", "lost", marks=pytest.mark.slow),
        pytest.param("frugal", "never", marks=pytest.mark.slow),
        pytest.param("paper", "taken", marks=pytest.mark.slow),
    ],
)
def test_killed_actor_changes_nothing(
    method: MethodName, copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors are killed before the first copy of their memory and twice after it. The last
    copy may be lost too.
    """
    monkeypatch.setattr(engine, "COPY_INTERVAL", 1000 if copies == "never" else 3)
    settings = replace(SMALL, method=method, rounds=12)
    here = execute(simulate(settings))
    killed: list[int] = []

    with on_ray(settings, actors=2) as plan:
        groups = plan.engine.nodes._groups  # type: ignore[attr-defined]

        def kill(record: RoundRecord) -> None:
            if record.round in (2, 7, 8):
                pid = ray.get(
                    groups[record.round % 2].actor.__ray_call__.remote(_process_id)
                )
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            if record.round == 7 and copies == "lost":
                for group in groups:
                    # The actors occupy all cores.
                    group.copies[-1] = (ray.remote(num_cpus=0)(_fail).remote(), 6)

        assert_same_run(execute(plan, callbacks=[kill]), here)
    assert len(set(killed)) == 3


def _fail() -> None:
    raise RuntimeError("there is no copy")


def _process_id(actor: object) -> int:
    return os.getpid()


@pytest.mark.slow
def test_repeatedly_lost_actor_ends_run() -> None:
    nodes = engine.RayNodes(CrashingDefinition(), nodes=6, actors=2, cpus=2.0)
    with pytest.raises(
        WorkError, match="the process of nodes 3 to 5 was lost 4 times in a row"
    ):
        nodes.answer(FIRST, None)


class CrashingDefinition:
    """A definition whose second group crashes in every round."""

    def group(self, first: int, end: int) -> Any:
        return _CrashingGroup(first)


class _CrashingGroup:
    def __init__(self, first: int) -> None:
        self._first = first

    def answer(self, broadcast: Broadcast, here: object) -> object:
        if self._first:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_run_resumes_with_more_budget(tmp_path: Path, participation: float) -> None:
    """The resumed run equals one in process, also if an actor is lost before the first copy
    of its memory.
    """
    options: dict[str, Any] = {
        "nodes": 11,
        "case": 2,
        "participation": participation,
        "budget": "time=3s",
    }

    fedbudget.train(**options, out=tmp_path / "here")
    fedbudget.train(**options, engine="ray", actors=2, out=tmp_path / "there")
    here = fedbudget.train(resume=tmp_path / "here", budget="time=+2s")
    with pytest.raises(UserError, match="has 2 actors, and cannot change to 3"):
        fedbudget.train(
            resume=tmp_path / "there", budget="time=+2s", engine="ray", actors=3
        )
    path = tmp_path / "there"
    settings, resumed = load_resumed(
        path, lambda config: Settings(**Settings.from_toml(config)), ["time=+2s"]
    )
    with on_ray(settings, resumed=resumed) as plan:
        groups = plan.engine.nodes._groups  # type: ignore[attr-defined]

        def kill(record: RoundRecord) -> None:
            if record.round == resumed.state.round + 2:
                os.kill(
                    ray.get(groups[1].actor.__ray_call__.remote(_process_id)),
                    signal.SIGKILL,
                )

        there = execute(plan, out=path, callbacks=[kill])
    assert_same_run(replace(there, run=None), replace(here, run=None))


def test_custom_rules() -> None:
    here = own_rules.train()
    assert_same_run(own_rules.train(engine="ray", actors=2), here)
    assert [record.tau for record in here.rounds] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 0]


def test_custom_model_and_shards() -> None:
    rng = np.random.default_rng(4)
    shards = [
        (rng.normal(size=(20 + node, 3)).astype(np.float32), rng.normal(size=20 + node))
        for node in range(5)
    ]

    def squared(w: Float32, x: Float32, y: Float32) -> tuple[float, Float32]:
        error = x @ w - y
        return float(np.mean(np.square(error)) / 2), np.asarray(
            x.T @ error / len(y), np.float32
        )

    model = fedbudget.FunctionModel(squared, initial=np.zeros(3))
    options: dict[str, Any] = {
        "shards": shards,
        "model": model,
        "budget": "time=2s",
        "costs": "simulated",
        "tau": 3,
        "rounds": 4,
    }
    assert_same_run(
        fedbudget.train(**options), fedbudget.train(**options, engine="ray", actors=2)
    )


@pytest.mark.usefixtures("one_torch_thread")
def test_custom_module_and_samples() -> None:
    """Each process builds the module and reads the samples of its nodes; running statistics
    are sent.

    Processes of Ray have one thread. With more threads, batch normalization of PyTorch adds
    in another order.
    """
    data = table(samples=40)
    samples = [(torch.from_numpy(x), int(y)) for x, y in zip(data.x, data.y, strict=True)]
    module = nn.Sequential(network(), nn.BatchNorm1d(3), nn.Dropout(0.2))
    options: dict[str, Any] = {
        "model": module,
        "dataset": samples,
        "nodes": 4,
        "budget": "time=1s",
        "costs": "simulated",
        "batch_size": 5,
    }
    assert_same_run(
        fedbudget.train(**options), fedbudget.train(**options, engine="ray", actors=2)
    )


def test_model_file_and_its_imports(tmp_path: Path) -> None:
    (tmp_path / "parts_of_a_net.py").write_text(
        "from torch import nn\ndef first(): return nn.Linear(64, 4)"
    )
    (tmp_path / "net_on_ray.py").write_text(
        "from parts_of_a_net import first\nfrom torch import nn\ndef net():\n"
        "    return nn.Sequential(nn.Flatten(), first(), nn.Tanh(), nn.Linear(4, 10))"
    )
    options: dict[str, Any] = {
        "model": f"{tmp_path}/net_on_ray.py:net",
        "costs": "simulated",
        "nodes": 4,
        "tau": 3,
        "rounds": 3,
    }
    assert_same_run(
        fedbudget.train(**options), fedbudget.train(**options, engine="ray", actors=2)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "centralized"}, "method centralized does not work with engine ray"),
        ({"batch_size": 10**6}, "larger than the largest shard"),
        ({"nodes": 10**4}, "more than the 1437 samples"),
        ({"actors": 0}, "actors must be at least 1"),
    ],
)
def test_errors_are_one_line(options: dict[str, Any], message: str) -> None:
    options = {"dataset": "digits", "partition": "case:1", "budget": "time=2s", **options}
    with pytest.raises(UserError, match=message) as caught:
        fedbudget.train(engine="ray", **options)
    assert "\n" not in str(caught.value)


def test_other_version_is_refused() -> None:
    plan = simulate(SMALL)
    with pytest.raises(
        UserError, match=r"a machine of the cluster has fedbudget .*, this one 0\.0"
    ):
        GroupDefinition(
            plan.settings,
            plan.dataset,
            plan.model,
            (),
            plan.meters.resources,
            version="0.0",
        ).group(0, 5)


def test_sweep_gives_the_same_file(tmp_path: Path) -> None:
    sweep = Sweep.of(replace(SMALL, rounds=3), {"tau": ["adaptive", 4], "seeds": 3})
    run(sweep, tmp_path / "here", jobs=1)
    done: list[int] = []
    run(
        sweep,
        tmp_path / "ray",
        engine="ray",
        progress=lambda now, of, failed: done.append(now),
    )
    assert done == [0, 1, 2, 3, 4, 5, 6]
    assert (tmp_path / "here/results.parquet").read_bytes() == (
        tmp_path / "ray/results.parquet"
    ).read_bytes()
    run(sweep, tmp_path / "ray", jobs=1, progress=lambda now, of, failed: done.append(now))
    assert done[-1:] == [6]  # finished cells of the cluster are reused
    assert len(done) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("network", {"proximal": 0.3}),
        ("ray", {"proximal": 0.3}),
        ("ray", {"workload": "by-data"}),
    ],
)
def test_engines_agree_on_published_methods(where: Any, change: dict[str, Any]) -> None:
    """Published methods that change local updates give the same bits on every engine."""
    options: dict[str, Any] = {
        "dataset": "digits",
        "model": "softmax",
        "nodes": 3,
        "partition": "dirichlet:0.3",
        "tau": 5,
        "step_size": 0.1,
        "rounds": 5,
        "budget": "time=1h",
        "costs": "simulated",
        "method": "frugal",
        "drift_correction": False,
    }
    here = fedbudget.train(**options, **change)
    assert here.w.tobytes() != fedbudget.train(**options).w.tobytes()
    there = fedbudget.train(**options, **change, engine=where)
    assert there.w.tobytes() == here.w.tobytes()
