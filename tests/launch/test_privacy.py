"""Private runs from settings to result, in this process, for both privacy units."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import SimulationState
from fedbudget.engines.noise import PAID, SecretNodeNoise, SeededNodeNoise, paid_in
from fedbudget.errors import UserError
from fedbudget.launch.method import build_method
from fedbudget.launch.privacy import node_noise, with_privacy
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Report
from fedbudget.resources.privacy import epsilon_of, rho_of
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from support.private_runs import OF_NODES, OF_SAMPLES, Died, die_after, epsilon_by_library

BOTH_UNITS = pytest.mark.parametrize(
    "options", [OF_NODES, OF_SAMPLES], ids=["nodes", "samples"]
)


@BOTH_UNITS
def test_epsilon_agrees_with_library(options: dict[str, Any], tmp_path: Path) -> None:
    result = train(**options, out=tmp_path / "run")
    epsilon = epsilon_by_library(tmp_path / "run", 1e-5)
    assert result.privacy_delta == 1e-5
    assert result.spent["privacy"] == pytest.approx(epsilon, abs=1e-4)
    assert epsilon <= 4
    assert result.rounds[-1].spent["privacy"] == pytest.approx(
        result.spent["privacy"], abs=1e-6
    )
    assert result.stopped_by == ("privacy" if options is OF_NODES else "time")
    assert math.isnan(result.loss)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"] is None
    assert summary["spent"]["privacy"] <= 4


@BOTH_UNITS
def test_reports_hold_only_private_vectors(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Report] = []
    report = Fleet.report

    def record_report(fleet: Fleet) -> Report:
        sent.append(report(fleet))
        return sent[-1]

    monkeypatch.setattr(Fleet, "report", record_report)
    train(**options, rounds=4)
    for each in sent:
        if options is OF_NODES:
            assert each.numbers.keys() == {"lengths"}
            assert each.vectors.keys() <= {"updates"}
        else:
            assert each.numbers.keys() <= {"octaves"}
            assert each.vectors.keys() <= {"w"}


@BOTH_UNITS
def test_only_seeded_runs_repeat(
    options: dict[str, Any],
) -> None:
    one, two = (train(**options, rounds=4) for _ in range(2))
    assert one.w.tobytes() == two.w.tobytes()
    secret = train(**options, rounds=4, privacy_noise="secret")
    assert not np.allclose(secret.w, one.w)
    assert secret.spent == pytest.approx(one.spent)


@pytest.mark.parametrize("attack", ["scale", "noise"])
def test_aggregator_clips_long_updates(attack: Any) -> None:
    """Five attackers send updates ten times too long. Each moves w by at most 2C / n."""
    plain = train(**OF_NODES, rounds=2)
    attacked = train(**OF_NODES, rounds=2, attack=attack, attackers=5)
    private = attacked.rounds[-1].private
    assert private is not None
    assert plain.rounds[-1].private == private
    distance = float(np.linalg.norm(plain.w - attacked.w))
    assert 0 < distance <= 5 * 2 * private["clip"] / 20


def test_abandoned_round_counts_as_spent(tmp_path: Path) -> None:
    """Nodes may have received the last round, so it is paid even if it was given up."""

    def pay(record: RoundRecord) -> None:
        if record.round == 2:
            with (tmp_path / "run" / PAID).open("a") as file:
                file.write(json.dumps({"round": 3, "rho": 0.01}) + "\n")

    result = train(
        **OF_NODES, rounds=3, out=tmp_path / "run", privacy_noise="secret", callbacks=[pay]
    )
    recorded = sum(
        record.private["rho"] for record in result.rounds if record.private is not None
    )
    assert result.spent["privacy"] == pytest.approx(
        epsilon_of(recorded + 0.01, 1e-5), abs=1e-6
    )


def test_payment_precedes_the_round_record(tmp_path: Path) -> None:
    paid: list[int] = []

    def count(record: RoundRecord) -> None:
        paid.append(len((tmp_path / "run" / PAID).read_text().splitlines()))

    options = {**OF_NODES, "rounds": 3, "privacy_noise": "secret"}
    train(**options, out=tmp_path / "run", callbacks=[count])
    assert paid == [1, 2, 3]


@BOTH_UNITS
def test_resumed_run_keeps_spent_epsilon(options: dict[str, Any], tmp_path: Path) -> None:
    """A resumed run pays for rounds after its last checkpoint, and for the round that
    nodes had received when it died.
    """
    folder = tmp_path / "run"
    with pytest.raises(Died):
        train(**options, out=folder, privacy_noise="secret", callbacks=die_after(5))
    lines = (folder / PAID).read_text().splitlines()
    rounds = [json.loads(line)["round"] for line in lines]
    assert rounds == list(range(1, 6 if options is OF_NODES else 7))
    paid_before = paid_in(folder)
    before = epsilon_of(paid_before, 1e-5)
    assert 0 < before < 4
    result = train(resume=folder)
    assert [record.round for record in result.rounds] == list(
        range(1, len(result.rounds) + 1)
    )
    assert before < result.spent["privacy"] <= 4
    assert paid_before < paid_in(folder) <= rho_of(4.0, 1e-5)
    assert epsilon_of(paid_in(folder), 1e-5) == pytest.approx(
        result.spent["privacy"], abs=1e-6
    )
    more = train(resume=folder, budget=["privacy=+1", "time=+6s"])
    assert 4 < more.spent["privacy"] <= 5


@pytest.mark.parametrize(
    "options", [OF_NODES, {**OF_SAMPLES, "batch_size": 40}], ids=["nodes", "samples"]
)
def test_resumed_run_gives_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    whole = train(**options)
    with pytest.raises(Died):
        train(**options, out=tmp_path / "run", callbacks=die_after(6))
    assert train(resume=tmp_path / "run").w.tobytes() == whole.w.tobytes()


@pytest.mark.parametrize(
    ("unit", "options", "message"),
    [
        (OF_NODES, {"method": "paper"}, "method must be accelerated"),
        (
            OF_NODES,
            {"method": "centralized", "step_size": 0.1},
            "method must be accelerated",
        ),
        (
            OF_NODES,
            {"method": "asynchronous", "step_size": 0.1},
            "method must be accelerated",
        ),
        (OF_NODES, {"drift_correction": True}, "drift_correction"),
        (OF_NODES, {"combine": "median"}, "combine"),
        (OF_NODES, {"until": "loss=0.1"}, "nodes report no loss"),
        (OF_NODES, {"patience": 20}, "patience"),
        (
            OF_NODES,
            {"privacy_delta": 1e-5, "budget": "time=2s"},
            "needs a budget of privacy",
        ),
        (OF_NODES, {"budget": "privacy=200"}, "protects nothing"),
        (OF_NODES, {"tau_max": 7}, "tau_max has no effect in a private run"),
        (OF_NODES, {"gamma": 2.0}, "gamma has no effect in a private run"),
        (OF_NODES, {"rounds": 1}, "rounds 1 trains nothing"),
        (
            OF_NODES,
            {"budget": ["privacy=4", "time=0.1s"]},
            r"one round costs about 0\.\d+s; use at least time=",
        ),
        (OF_SAMPLES, {"model": "kmeans"}, "K-means"),
        (OF_SAMPLES, {"partition": "case:3"}, "several nodes share some"),
        (OF_SAMPLES, {"proximal": 0.1}, "proximal"),
        (OF_SAMPLES, {"method": "paper"}, "method must be accelerated"),
        (OF_SAMPLES, {"combine": "median"}, "combine"),
        (OF_SAMPLES, {"until": "loss=0.1"}, "nodes report no loss"),
        (OF_SAMPLES, {"budget": "time=2s"}, "needs a budget of privacy"),
    ],
)
def test_options_that_leak_are_refused(
    unit: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(**{**unit, **options})


def test_absent_nodes_keep_the_budget() -> None:
    result = train(**{**OF_NODES, "nodes": 6}, participation=0.5, rounds=3)
    assert {record.nodes for record in result.rounds} != {6}
    assert result.spent["privacy"] <= 4


def test_checkpoint_holds_no_node_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "checkpoint_interval", 0.0)  # of every round
    with pytest.raises(Died):
        train(**OF_NODES, out=tmp_path / "run", callbacks=die_after(6))
    checkpoint = Checkpoint.load(
        tmp_path / "run", build_method(Run.open(tmp_path / "run").settings)
    )
    state = checkpoint.engine_state(SimulationState)
    assert state.groups is not None
    fleets = [
        fleet for group in state.groups for fleet in group.fleets if fleet is not None
    ]
    assert fleets
    for fleet in fleets:
        assert fleet.w is None
        assert fleet.best_known is None
        assert fleet.losses is None


def test_sample_run_learns_digits(tmp_path: Path) -> None:
    result = train(**OF_SAMPLES, out=tmp_path / "run")
    assert result.accuracy is not None
    assert result.accuracy > 0.5
    assert 'batch-size = "full"' in (tmp_path / "run" / "config.toml").read_text()


def test_node_noise_and_delta_of_settings() -> None:
    settings = Settings(budget=("privacy=4",), privacy_unit="sample", nodes=3)
    assert isinstance(node_noise(with_privacy(settings)), SeededNodeNoise)
    assert isinstance(node_noise(with_privacy(settings, simulated=False)), SecretNodeNoise)
    assert node_noise(Settings(budget=("privacy=4",))) is None
    assert node_noise(Settings()) is None
    assert with_privacy(settings, samples=60_000).privacy_delta == 1e-5
    assert with_privacy(settings, samples=2_000_000).privacy_delta == 1e-7


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 30},
        {"batch_size": 200, "partition": "dirichlet:0.3"},  # larger than some shards
        {"model": "svm", "tau": 3},
        {"model": "linear", "dataset": "diabetes"},
        {"participation": 0.5},
        {"budget": ["time=4s", "bytes=200kB", "privacy=2"]},
    ],
    ids=["batches", "small nodes", "svm", "linear", "absent", "bytes"],
)
def test_sample_runs_keep_their_budget(options: dict[str, Any]) -> None:
    result = train(**{**OF_SAMPLES, **options})
    assert result.spent["privacy"] <= result.budget["privacy"]
    assert all(
        result.spent[name] <= limit * (1 + 1e-12) for name, limit in result.budget.items()
    )
    assert np.isfinite(result.w).all()
    assert result.w.any()


def test_sample_run_of_torch_model() -> None:
    pytest.importorskip("torch")
    result = train(**{**OF_SAMPLES, "model": "mlp", "rounds": 6})
    assert result.accuracy is not None
    assert result.accuracy > 0.2
