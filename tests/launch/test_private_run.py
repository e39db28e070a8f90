"""Private runs from settings to result: in this process, alike on every engine."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget import train
from fedbudget.engines.in_process import SimulationState
from fedbudget.engines.noise import PAID, paid_in
from fedbudget.errors import UserError
from fedbudget.launch.method import build_method
from fedbudget.protocol.fleet import Fleet
from fedbudget.protocol.messages import Report
from fedbudget.resources.privacy import epsilon_of, rho_of
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.folder import Run
from fedbudget.runs.record import RoundRecord
from support.private_runs import OF_NODES, OF_SAMPLES, Died, dies_after, epsilon_by_library

OF_ANY_UNIT = pytest.mark.parametrize(
    "asked", [OF_NODES, OF_SAMPLES], ids=["nodes", "samples"]
)


@OF_ANY_UNIT
def test_epsilon_of_a_run_is_the_librarys(asked: dict[str, Any], tmp_path: Path) -> None:
    result = train(**asked, out=tmp_path / "run")
    epsilon = epsilon_by_library(tmp_path / "run", 1e-5)
    assert result.privacy_delta == 1e-5
    assert result.spent["privacy"] == pytest.approx(epsilon, abs=1e-4)
    assert epsilon <= 4
    assert result.rounds[-1].spent["privacy"] == pytest.approx(
        result.spent["privacy"], abs=1e-6
    )
    assert result.stopped_by == ("privacy" if asked is OF_NODES else "time")
    assert math.isnan(result.loss)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"] is None
    assert summary["spent"]["privacy"] <= 4


@OF_ANY_UNIT
def test_nothing_but_vectors_and_lengths_leaves_a_node(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Report] = []
    report = Fleet.report

    def seen(fleet: Fleet) -> Report:
        sent.append(report(fleet))
        return sent[-1]

    monkeypatch.setattr(Fleet, "report", seen)
    train(**asked, rounds=4)
    for each in sent:
        told = {name for name, value in vars(each).items() if value is not None}
        assert told <= {"round", "nodes", "sizes", "losses", "best_losses", "w", "length"}
        assert asked is OF_SAMPLES or (each.sizes == 1).all()
        assert not each.losses.any()
        assert not each.best_losses.any()


@OF_ANY_UNIT
def test_a_seeded_run_can_be_repeated_and_a_secret_one_cannot(
    asked: dict[str, Any],
) -> None:
    one, two = (train(**asked, rounds=4) for _ in range(2))
    assert one.w.tobytes() == two.w.tobytes()
    secret = train(**asked, rounds=4, privacy_noise="secret")
    assert not np.allclose(secret.w, one.w)
    assert secret.spent == pytest.approx(one.spent)


@pytest.mark.parametrize("attack", ["scale", "noise"])
def test_a_node_that_does_not_clip_is_clipped(attack: Any) -> None:
    """Updates of five are ten times as long as they may be, and take w no further than
    their share of 2C each.
    """
    honest, attacked = (
        train(**OF_NODES, rounds=2),
        train(**OF_NODES, rounds=2, attack=attack, attackers=5),
    )
    told = attacked.rounds[-1].private
    assert told is not None
    assert honest.rounds[-1].private == told
    apart = float(np.linalg.norm(honest.w - attacked.w))
    assert 0 < apart <= 5 * 2 * told["clip"] / 20


def test_what_was_paid_for_and_never_closed_is_told(tmp_path: Path) -> None:
    """As of a last round that nodes may have opened, and that was given up."""

    def pay(record: RoundRecord) -> None:
        if record.round == 2:
            with (tmp_path / "run" / PAID).open("a") as file:
                file.write(json.dumps({"round": 3, "rho": 0.01}) + "\n")

    result = train(
        **OF_NODES, rounds=3, out=tmp_path / "run", privacy_noise="secret", callbacks=[pay]
    )
    told = sum(
        record.private["rho"] for record in result.rounds if record.private is not None
    )
    assert result.spent["privacy"] == pytest.approx(epsilon_of(told + 0.01, 1e-5), abs=1e-6)


def test_a_round_is_paid_before_it_is_observed(tmp_path: Path) -> None:
    paid: list[int] = []

    def count(record: RoundRecord) -> None:
        paid.append(len((tmp_path / "run" / PAID).read_text().splitlines()))

    options = {**OF_NODES, "rounds": 3, "privacy_noise": "secret"}
    train(**options, out=tmp_path / "run", callbacks=[count])
    assert paid == [1, 2, 3]


def test_a_resumed_run_does_not_get_its_epsilon_back(tmp_path: Path) -> None:
    """Its checkpoint may be of a round long before, and all that it had made known since is
    paid for.
    """
    folder = tmp_path / "run"
    with pytest.raises(Died):
        train(**OF_NODES, out=folder, privacy_noise="secret", callbacks=dies_after(5))
    died_with = paid_in(folder)
    before = epsilon_of(died_with, 1e-5)
    assert 0 < before < 4
    result = train(resume=folder)
    assert [record.round for record in result.rounds] == list(
        range(1, len(result.rounds) + 1)
    )
    assert before < result.spent["privacy"] <= 4
    assert died_with < paid_in(folder) <= rho_of(4.0, 1e-5)
    assert epsilon_of(paid_in(folder), 1e-5) == pytest.approx(
        result.spent["privacy"], abs=1e-6
    )
    more = train(resume=folder, budget=["privacy=+1", "time=+6s"])
    assert 4 < more.spent["privacy"] <= 5


@pytest.mark.parametrize(
    "asked", [OF_NODES, {**OF_SAMPLES, "batch_size": 40}], ids=["nodes", "samples"]
)
def test_the_same_to_the_bit_when_it_goes_on(asked: dict[str, Any], tmp_path: Path) -> None:
    whole = train(**asked)
    with pytest.raises(Died):
        train(**asked, out=tmp_path / "run", callbacks=dies_after(6))
    assert train(resume=tmp_path / "run").w.tobytes() == whole.w.tobytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "paper"}, "method must be accelerated"),
        ({"method": "centralized", "step_size": 0.1}, "method must be accelerated"),
        ({"method": "asynchronous", "step_size": 0.1}, "method must be accelerated"),
        ({"drift_correction": True}, "drift_correction"),
        ({"combine": "median"}, "combine"),
        ({"until": "loss=0.1"}, "nodes report no loss"),
        ({"patience": 20}, "patience"),
        ({"privacy_delta": 1e-5, "budget": "time=2s"}, "need a budget of privacy"),
        ({"budget": "privacy=200"}, "protects nothing"),
        ({"tau_max": 7}, "tau_max has no effect in a private run"),
        ({"gamma": 2.0}, "gamma has no effect in a private run"),
        ({"rounds": 1}, "rounds 1 trains nothing"),
        (
            {"budget": ["privacy=4", "time=0.1s"]},
            r"one round costs about 0\.\d+s; use at least time=",
        ),
    ],
)
def test_what_would_tell_more_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(**{**OF_NODES, **options})


def test_absent_nodes_cost_nothing_but_their_updates() -> None:
    result = train(**{**OF_NODES, "nodes": 6}, participation=0.5, rounds=3)
    assert {record.nodes for record in result.rounds} != {6}
    assert result.spent["privacy"] <= 4


def test_a_checkpoint_has_nothing_of_a_node_alone(tmp_path: Path) -> None:
    with pytest.raises(Died):
        train(**OF_NODES, out=tmp_path / "run", callbacks=dies_after(6))
    checkpoint = Checkpoint.load(
        tmp_path / "run", build_method(Run.open(tmp_path / "run").settings)
    )
    state = checkpoint.engine_state(SimulationState)
    assert state.groups is not None
    for fleet in (
        fleet for group in state.groups for fleet in group.fleets if fleet is not None
    ):
        assert fleet.w is None
        assert fleet.best_known is None
        assert not fleet.losses.any()
