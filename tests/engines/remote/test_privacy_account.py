"""A node's own limit of privacy, over several runs."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget.engines.remote.node_limits import BeyondLimits, PrivacyAccount
from fedbudget.errors import UserError
from fedbudget.protocol.messages import Broadcast, Private, Request
from fedbudget.resources.privacy import epsilon_of, rho_of


def round_of(rho: float, number: int = 1) -> Broadcast:
    first = Broadcast.first(np.zeros(3, np.float32), 0.1, Request(private=True))
    return replace(first, round=number, private=Private(1.0, rho))


def test_rounds_of_several_runs_add_up(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "told.json", 4.0, 1e-5)
    assert account.spent == 0
    for number in (1, 2):
        account.pay("one", round_of(0.05, number))
    PrivacyAccount(tmp_path / "told.json", 4.0, 1e-5).pay("two", round_of(0.1))
    assert account.spent == pytest.approx(epsilon_of(0.2, 1e-5))
    known = json.loads((tmp_path / "told.json").read_text())
    assert known["runs"] == {
        "one": {"rho": 0.1, "round": 2},
        "two": {"rho": 0.1, "round": 1},
    }


def test_what_would_go_beyond_is_refused_and_not_paid(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "told.json", 2.0, 1e-5)
    account.pay("one", round_of(0.1))
    before = account.spent
    with pytest.raises(BeyondLimits, match=r"privacy_limit.* is ε = 2 .* in 1 runs"):
        account.pay("two", round_of(rho_of(2.0, 1e-5)))
    assert account.spent == before
    account.pay("two", round_of(0.02))


def test_a_round_that_is_not_private_is_refused(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "told.json", 2.0, 1e-5)
    with pytest.raises(BeyondLimits, match="not private"):
        account.pay("one", Broadcast.first(np.zeros(3, np.float32), 0.1, Request()))
    with pytest.raises(BeyondLimits, match="not private"):
        account.pay("one", round_of(0.0))


@pytest.mark.parametrize(
    "content", ["", "{}", '{"rho": -1, "runs": {}}', '{"rho": "a", "runs": {}}', "[1]"]
)
def test_a_damaged_account_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "told.json").write_text(content)
    with pytest.raises(UserError, match="not a node's account"):
        PrivacyAccount(tmp_path / "told.json", 2.0, 1e-5).pay("one", round_of(0.01))


def _pay(path: Path) -> None:
    for number in range(10):
        PrivacyAccount(path, 8.0, 1e-5).pay("run", round_of(0.001, number + 1))


def test_processes_take_turns(tmp_path: Path) -> None:
    several = [
        multiprocessing.get_context("fork").Process(
            target=_pay, args=(tmp_path / "told.json",)
        )
        for _ in "abc"
    ]
    for process in several:
        process.start()
    for process in several:
        process.join()
    assert json.loads((tmp_path / "told.json").read_text())["rho"] == pytest.approx(0.03)


def test_a_limit_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="privacy_limit is an ε of more than 0"):
        PrivacyAccount(tmp_path / "told.json", 0.0, 1e-5)
    with pytest.raises(UserError, match="privacy_delta"):
        PrivacyAccount(tmp_path / "told.json", 2.0, 1.0)


def test_an_account_is_of_nodes_or_of_samples(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "told.json", 2.0, 1e-5, per_sample=True)
    with pytest.raises(
        BeyondLimits,
        match=r"protects nodes, and this node.s .?privacy_limit.? is for single samples",
    ):
        account.pay("one", round_of(0.01))
    first = Broadcast.first(
        np.zeros(3, np.float32), 0.1, Request(private=True, per_sample=True)
    )
    account.pay("one", replace(first, private=Private(1.0, 0.02, 100)))
    assert account.spent == pytest.approx(epsilon_of(0.02, 1e-5))
    with pytest.raises(UserError, match="it is for single samples"):
        PrivacyAccount(tmp_path / "told.json", 2.0, 1e-5).pay("one", round_of(0.01))
