"""Private runs from settings to result, in this process, for both privacy units."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from fedbudget import export, load, train
from fedbudget.engines.engine import Engine
from fedbudget.engines.in_process import SimulationState
from fedbudget.engines.noise import PAID, SecretNodeNoise, SeededNodeNoise, paid_in
from fedbudget.errors import UserError
from fedbudget.launch.method import build_method
from fedbudget.launch.privacy import node_noise, with_privacy
from fedbudget.protocol.features.node_privacy import PrivateAggregator
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Report
from fedbudget.protocol.sums import NoisySums
from fedbudget.resources.privacy import epsilon_of, rho_of
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import MODEL, Run
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.text import run_title
from fedbudget.settings.settings import Settings
from support.private_runs import (
    OF_NODES,
    OF_SAMPLES,
    OF_SUMS,
    Died,
    die_after,
    epsilon_by_library,
)

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
def test_saved_model_carries_guarantee(options: dict[str, Any], tmp_path: Path) -> None:
    """The file of the model and its exports say what ε, δ and unit they have."""
    result = train(**{**options, "rounds": 3}, out=tmp_path / "run")
    unit = options.get("privacy_unit", "node")
    expected = {
        "epsilon": result.spent["privacy"],
        "epsilon_replacement": epsilon_of(4 * rho_of(result.spent["privacy"], 1e-5), 1e-5),
        "delta": 1e-5,
        "unit": unit,
        "adjacency": "zero-out",
        "simulated": True,
        "noise": "seeded",
        "added_by": "nodes" if unit == "sample" else "aggregator",
    }
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["privacy"] == pytest.approx(expected)
    model = load(tmp_path / "run")
    assert model.privacy == result.privacy
    with safe_open(tmp_path / "run" / MODEL, framework="numpy") as file:
        saved = json.loads(file.metadata()["fedbudget"])
    assert saved["privacy"] == summary["privacy"]
    export(model, "numpy", tmp_path / "model.npz")
    with np.load(tmp_path / "model.npz") as arrays:
        assert json.loads(str(arrays["privacy"])) == summary["privacy"]
    onnx = pytest.importorskip("onnx")
    export(model, "onnx", tmp_path / "model.onnx")
    properties = onnx.load(tmp_path / "model.onnx").metadata_props
    texts = {each.key: each.value for each in properties}
    assert json.loads(texts["privacy"]) == summary["privacy"]


@BOTH_UNITS
@pytest.mark.parametrize("kept", [True, False], ids=["folder", "no folder"])
def test_ledger_adds_up_runs(options: dict[str, Any], kept: bool, tmp_path: Path) -> None:
    """Two runs on the same data cost what a single run with both would cost."""
    ledger = tmp_path / "ward.json"
    options = {**options, "rounds": 3, "privacy_ledger": str(ledger)}
    spent = []
    for number in (1, 2):
        out = tmp_path / f"run{number}" if kept else None
        result = train(**options, seed=number, out=out)
        spent.append(rho_of(result.spent["privacy"], 1e-5))
        assert result.privacy is not None
        assert result.privacy.noise == "secret"
        assert result.privacy.all_runs == pytest.approx(epsilon_of(sum(spent), 1e-5))
    content = json.loads(ledger.read_text())
    assert content["rho"] == pytest.approx(sum(spent), rel=1e-6)
    assert [run["rho"] for run in content["runs"].values()] == pytest.approx(spent)


def test_ledgers_in_folder_follow_data(tmp_path: Path) -> None:
    """The same samples in another order have the same ledger, others another."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    common: Any = {
        "model": "softmax",
        "nodes": 3,
        "rounds": 2,
        "budget": ["time=2s", "privacy=4"],
        "privacy_ledger": str(tmp_path),
    }
    for rows, files in ((np.arange(60), 1), (np.arange(60)[::-1], 1), (np.arange(50), 2)):
        train(shards=[(x[part], y[part]) for part in np.array_split(rows, 3)], **common)
        assert len(list(tmp_path.glob("*.json"))) == files


def test_damaged_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ward.json").write_text("{")
    with pytest.raises(UserError, match="not an account of privacy"):
        train(**OF_NODES, privacy_ledger=str(tmp_path / "ward.json"))


def test_killed_run_stays_in_ledger(tmp_path: Path) -> None:
    """A resumed run is charged for all rounds that it published, also twice."""
    ledger = tmp_path / "ward.json"
    options = {**OF_NODES, "privacy_ledger": str(ledger)}
    with pytest.raises(Died):
        train(**options, out=tmp_path / "run", callbacks=die_after(5))
    assert json.loads(ledger.read_text())["rho"] == pytest.approx(paid_in(tmp_path / "run"))
    train(resume=tmp_path / "run")
    content = json.loads(ledger.read_text())
    assert content["rho"] == pytest.approx(paid_in(tmp_path / "run"))
    assert len(content["runs"]) == 1


def test_public_model_claims_no_privacy(tmp_path: Path) -> None:
    result = train(model="softmax", rounds=2, out=tmp_path / "run")
    assert result.privacy is None
    assert load(tmp_path / "run").privacy is None
    assert "privacy" not in json.loads((tmp_path / "run" / "summary.json").read_text())


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
    published = with_privacy(settings, published=True)
    assert isinstance(node_noise(published), SeededNodeNoise)
    assert isinstance(node_noise(with_privacy(settings)), SecretNodeNoise)
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


TABLE = "age,sex,y\n" + "".join(
    f"{20.123456789 + number},{'fm'[number % 2]},{['no', 'yes'][number % 3 == 0]}\n"
    for number in range(60)
)
SCHEMA = """
[target]
name = "y"
classes = ["no", "yes"]
[columns]
age = { range = [0, 120] }
sex = { categories = ["f", "m"] }
"""
ON_TABLE: dict[str, Any] = {
    "dataset": "rows.csv",
    "nodes": 3,
    "budget": ["time=0.5s", "privacy=4"],
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and a schema in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text(TABLE)
    Path("schema.toml").write_text(SCHEMA)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("standardise", [None, False])
def test_private_table_needs_schema(standardise: bool | None) -> None:
    with pytest.raises(UserError, match="fedbudget data schema"):
        train(**ON_TABLE, standardise=standardise)
    shards = [(np.eye(8), np.arange(8) % 2)] * 3
    with pytest.raises(UserError, match="would publish exact means"):
        train(shards=shards, budget=ON_TABLE["budget"], standardise=True)


@pytest.mark.usefixtures("table")
def test_private_model_holds_schema_only() -> None:
    """Two tables with the same schema have the same description in the saved model."""
    abouts = []
    for number, text in enumerate((TABLE, TABLE.replace("20.", "90.").replace("f,", "x,"))):
        Path("rows.csv").write_text(text)
        train(**ON_TABLE, schema="schema.toml", out=f"run{number}")
        with safe_open(f"run{number}/model.safetensors", framework="numpy") as file:
            abouts.append(json.loads(file.metadata()["fedbudget"]))
    first, second = abouts
    assert first["standardization"] == {
        "mean": [60, 0, 0, 0],
        "deviation": [60, 1, 1, 1],
        "target_mean": 0,
        "target_deviation": 1,
    }
    for about in abouts:
        about.pop("privacy", None)
    assert first == second


@pytest.mark.usefixtures("table")
def test_noise_on_own_data_is_secret() -> None:
    """Also without `privacy_noise`; a seeded ε is called simulated wherever it is shown."""
    own = train(**ON_TABLE, schema="schema.toml", out="own")
    assert Run.open(Path("own")).settings.privacy_noise == "secret"
    assert (Path("own") / PAID).exists()
    assert own.sources["privacy"] == "accounted"
    again = train(**ON_TABLE, schema="schema.toml")
    assert own.w.tobytes() != again.w.tobytes()

    seeded = train(**ON_TABLE, schema="schema.toml", privacy_noise="seeded", out="seeded")
    published = train(**{**OF_NODES, "budget": ["time=1s", "privacy=4"]})
    for result in (seeded, published):
        assert result.sources["privacy"] == "simulated"
    summary = json.loads(Path("seeded/summary.json").read_text())
    assert summary["sources"]["privacy"] == "simulated"
    assert "simulated ε" in run_title(Run.open(Path("seeded")).settings)
    assert "simulated ε" not in run_title(Run.open(Path("own")).settings)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("share", "tests"), [(0.25, 15), (0, None)])
def test_exact_metrics_are_counted(share: float, tests: int | None) -> None:
    """The guarantee has the number of one's own test samples, which ε does not cover."""
    result = train(**ON_TABLE, schema="schema.toml", test_share=share, out="run")
    assert result.privacy is not None
    assert result.privacy.exact_tests == tests
    assert (result.accuracy is None) == (tests is None)
    assert load("run").privacy == result.privacy
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["privacy"].get("exact_tests") == tests


MASKED = pytest.mark.parametrize(
    "options",
    [{**OF_NODES, "secure_aggregation": True}, OF_SUMS],
    ids=["nodes", "samples"],
)


@MASKED
def test_aggregator_sees_only_noisy_sums(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    received: list[Any] = []
    receive = PrivateAggregator.receive

    def record(self: Any, reports: Any, *others: Any, **more: Any) -> Any:
        received.append(reports)
        return receive(self, reports, *others, **more)

    monkeypatch.setattr(PrivateAggregator, "receive", record)
    result = train(**options, out=tmp_path / "run")
    assert received
    assert all(isinstance(each, NoisySums) for each in received)
    epsilon = epsilon_by_library(tmp_path / "run", 1e-5)
    assert result.spent["privacy"] == pytest.approx(epsilon, abs=1e-4)
    assert epsilon <= 4


@MASKED
def test_simulated_sums_pay_before_opening(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payment of a round is on disk before the aggregator has its sum."""
    folder = tmp_path / "run"
    paid: list[int] = []
    receive = PrivateAggregator.receive

    def count(self: Any, *arguments: Any, **more: Any) -> Any:
        paid.append(len((folder / PAID).read_text().splitlines()))
        return receive(self, *arguments, **more)

    monkeypatch.setattr(PrivateAggregator, "receive", count)
    result = train(**options, rounds=4, out=folder, privacy_noise="secret")
    assert paid == [1, 2, 3, 4]
    assert epsilon_of(paid_in(folder), 1e-5) == pytest.approx(
        result.spent["privacy"], abs=1e-6
    )


@MASKED
def test_only_seeded_sums_repeat(options: dict[str, Any]) -> None:
    one, two = (train(**options, rounds=4) for _ in range(2))
    assert one.w.tobytes() == two.w.tobytes()
    secret = train(**options, rounds=4, privacy_noise="secret")
    assert not np.allclose(secret.w, one.w)


def test_resumed_sums_have_same_bits(tmp_path: Path) -> None:
    options = {**OF_SUMS, "rounds": 9}
    whole = train(**options)
    with pytest.raises(Died):
        train(**options, out=tmp_path / "run", callbacks=die_after(5))
    assert train(resume=tmp_path / "run").w.tobytes() == whole.w.tobytes()


def test_partition_does_not_change_sums() -> None:
    """The sum over all samples is the same, whichever node has them; so is the noise."""
    one, two = (
        train(**OF_SUMS, rounds=5, partition=partition)
        for partition in ("case:1", "dirichlet:0.3")
    )
    assert one.w == pytest.approx(two.w, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "svm"},
        {"model": "linear", "dataset": "diabetes"},
        {"update": "average"},
        {"step_size": 0.05},
        {"secure_threshold": 1.0},
        {"budget": ["time=4s", "bytes=400kB", "privacy=2"]},
    ],
    ids=["svm", "linear", "average", "step", "threshold", "bytes"],
)
def test_sums_keep_their_budget(options: dict[str, Any]) -> None:
    result = train(**{**OF_SUMS, **options})
    assert all(
        result.spent[name] <= limit * (1 + 1e-12) for name, limit in result.budget.items()
    )
    assert np.isfinite(result.w).all()
    assert result.w.any()
    assert {record.tau for record in result.rounds} == {1}


def test_sums_of_torch_model() -> None:
    pytest.importorskip("torch")
    result = train(**{**OF_SUMS, "model": "mlp", "rounds": 12})
    assert result.accuracy is not None
    assert result.accuracy > 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 5}, "tau must be 1"),
        ({"batch_size": 20}, "batch_size must be full"),
        ({"participation": 0.5}, "participation must be 1"),
        ({"nodes": 2}, "at least 3 nodes"),
        ({"engine": "ray"}, "only over gRPC"),
        (
            {"budget": "time=2s", "privacy_unit": None},
            "needs a budget of privacy",
        ),
    ],
)
def test_unsupported_options_of_sums(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(**{**OF_SUMS, **options})
