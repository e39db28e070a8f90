"""Limits of a node: a node refuses excessive requests, and its privacy account covers all
runs.
"""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import platformdirs
import pytest

from fedbudget.engines.grpc.node import RefusedByAggregator
from fedbudget.engines.remote.messages import RoundRequest, Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.node_limits import BeyondLimits, NodeLimits, PrivacyAccount
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError, WorkError
from fedbudget.launch.join import privacy_account
from fedbudget.protocol.features.feature import FeatureSettings
from fedbudget.protocol.features.sample_privacy import SamplePrivacy
from fedbudget.protocol.messages import (
    PrivateRound,
    SampleNormRound,
    SampleRound,
    TrainRound,
)
from fedbudget.resources.privacy import epsilon_of, rho_of
from fedbudget.settings.network import JoinOptions
from support.hand_made import FIRST
from support.networked import (
    FEATURES,
    LONG,
    aggregator,
    network,
    node_data,
    task,
    wait_until,
)


def limited_worker(batch: int | None, **limits: Any) -> Worker:
    made = Worker(node_data(1), limits=NodeLimits(**limits))
    made.accept(Welcome("run", task(batch=batch), (0,)))
    return made


@pytest.mark.parametrize(("batch", "least"), [(None, 16), (16, 16), (20, 100)])
def test_large_batches_are_accepted(batch: int | None, least: int) -> None:
    """A full batch of 20 samples is always accepted."""
    limited_worker(batch, min_batch=least)


def test_small_batches_are_refused() -> None:
    with pytest.raises(
        BeyondLimits, match=r"mini-batches of 1 samples are requested.*min_batch is 16"
    ):
        limited_worker(1, min_batch=16)


def test_excessive_tau_is_refused() -> None:
    ours, request = limited_worker(None, max_tau=5), aggregator().start()
    assert isinstance(request, TrainRound)
    ours.answer(RoundRequest(replace(request, tau=5, effective=5), 0))
    with pytest.raises(
        BeyondLimits,
        match="6 local updates are requested in a round; this node's max_tau is 5",
    ):
        ours.answer(RoundRequest(replace(request, tau=6, effective=6), 0))


@pytest.mark.parametrize(
    "wrong", [{"min_batch": 0}, {"max_tau": 0}, {"min_interval": -1.0}]
)
def test_invalid_limits_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match="at least 1"):
        NodeLimits(**wrong)


def test_unknown_classes_are_refused() -> None:
    request = task()
    with pytest.raises(
        UserError, match="this node has class 'no', which the aggregator does not know"
    ):
        node_data(0).fleet(
            replace(request, samples=replace(request.samples, classes=("maybe", "yes"))),
            [0],
        )


def test_refusal_reaches_aggregator(caplog: pytest.LogCaptureFixture) -> None:
    """The other nodes continue."""
    with network(batch=2) as net:
        net.join(0)
        careful = net.join(1, worker=Worker(node_data(1), limits=NodeLimits(min_batch=16)))
        net.server.wait_for(2, lambda: False)
        net.server.start(net.task)
        with pytest.raises(
            RefusedByAggregator, match=r"mini-batches of 2 samples.*--min-batch is 16"
        ):
            careful.result(LONG)
        net.ready(1)
        net.aggregator.start()
        assert len(net.round().answers) == 1
        wait_until(
            lambda: (
                "is dropped: it will not take part: mini-batches of 2 samples"
                in caplog.text
            )
        )


def round_of(rho: float, number: int = 1) -> PrivateRound:
    w = np.zeros(3, np.float32)
    return PrivateRound(round=number, w=w, tau=1, eta=0.1, clip=1.0, rho=rho)


def test_account_sums_over_runs(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "account.json", 4.0, 1e-5)
    assert account.spent == 0
    for number in (1, 2):
        account.pay("one", round_of(0.05, number))
    PrivacyAccount(tmp_path / "account.json", 4.0, 1e-5).pay("two", round_of(0.1))
    assert account.spent == pytest.approx(epsilon_of(0.2, 1e-5))
    known = json.loads((tmp_path / "account.json").read_text())
    assert known["runs"] == {
        "one": {"rho": 0.1, "round": 2},
        "two": {"rho": 0.1, "round": 1},
    }


def test_round_beyond_limit_is_refused(tmp_path: Path) -> None:
    """A refused round is not paid for."""
    account = PrivacyAccount(tmp_path / "account.json", 2.0, 1e-5)
    account.pay("one", round_of(0.1))
    before = account.spent
    with pytest.raises(BeyondLimits, match=r"privacy_limit.* is ε = 2 .* in 1 runs"):
        account.pay("two", round_of(rho_of(2.0, 1e-5)))
    assert account.spent == before
    account.pay("two", round_of(0.02))


def test_rounds_without_noise_are_refused(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "account.json", 2.0, 1e-5)
    with pytest.raises(BeyondLimits, match="not private"):
        account.pay("one", FIRST)
    with pytest.raises(BeyondLimits, match="not private"):
        account.pay("one", round_of(0.0))


@pytest.mark.parametrize(
    "content", ["", "{}", '{"rho": -1, "runs": {}}', '{"rho": "a", "runs": {}}', "[1]"]
)
def test_damaged_account_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "account.json").write_text(content)
    with pytest.raises(UserError, match="not an account of privacy"):
        PrivacyAccount(tmp_path / "account.json", 2.0, 1e-5).pay("one", round_of(0.01))


def account_of(
    name: str, data: NodeData, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> PrivacyAccount:
    """The account that `fedbudget join` opens by default."""
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: folder)
    options = JoinOptions("127.0.0.1:7700", name=name, privacy_limit=4.0)
    account = privacy_account(options, name, data)
    assert account is not None
    return account


def test_new_name_has_same_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node cannot spend twice on the same samples under two names."""
    before = account_of("ward", node_data(0), monkeypatch, tmp_path)
    before.pay("one", round_of(0.2))
    renamed = account_of("ward-2", node_data(0), monkeypatch, tmp_path)
    assert renamed.spent == pytest.approx(epsilon_of(0.2, 1e-5))
    with pytest.raises(BeyondLimits, match="in 1 runs"):
        renamed.pay("two", round_of(rho_of(4.0, 1e-5) - 0.1))


def test_order_of_samples_keeps_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = node_data(0)
    account_of("a", data, monkeypatch, tmp_path).pay("one", round_of(0.2))
    data = replace(data, rows=[np.asarray(data.rows[0])[::-1]])
    assert account_of("b", data, monkeypatch, tmp_path).spent > 0


def test_new_samples_keep_named_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose samples change cannot spend twice either; other nodes are separate."""
    account_of("ward", node_data(0), monkeypatch, tmp_path).pay("one", round_of(0.2))
    assert account_of("ward", node_data(1), monkeypatch, tmp_path).spent > 0
    assert account_of("other", node_data(1), monkeypatch, tmp_path).spent == 0


def test_restarted_node_pays_again(tmp_path: Path) -> None:
    """Its noise is new. It pays before it answers, also if the answer is never sent."""
    path = tmp_path / "account.json"
    features = (FeatureSettings.of(SamplePrivacy()),)
    for process in (1, 2):
        account = PrivacyAccount(path, 4.0, 1e-5, per_sample=True)
        ours = Worker(node_data(1), account=account)
        ours.accept(Welcome("run", replace(task(batch=None), features=features), (0,)))
        w = np.zeros(FEATURES, np.float32)
        ours.answer(RoundRequest(SampleNormRound(round=1, w=w, rho=0.05), 0))
        assert json.loads(path.read_text())["rho"] == pytest.approx(0.05 * process)
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()
    with pytest.raises(WorkError, match="cannot be locked"):
        ours.answer(RoundRequest(SampleNormRound(round=2, w=w, rho=0.05), 0))


def _pay(path: Path) -> None:
    for number in range(10):
        PrivacyAccount(path, 8.0, 1e-5).pay("run", round_of(0.001, number + 1))


def test_account_is_locked_between_processes(tmp_path: Path) -> None:
    several = [
        multiprocessing.get_context("fork").Process(
            target=_pay, args=(tmp_path / "account.json",)
        )
        for _ in "abc"
    ]
    for process in several:
        process.start()
    for process in several:
        process.join()
    assert json.loads((tmp_path / "account.json").read_text())["rho"] == pytest.approx(0.03)


def test_invalid_privacy_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="privacy_limit is an ε of more than 0"):
        PrivacyAccount(tmp_path / "account.json", 0.0, 1e-5)
    with pytest.raises(UserError, match="privacy_delta"):
        PrivacyAccount(tmp_path / "account.json", 2.0, 1.0)


def test_account_has_one_privacy_unit(tmp_path: Path) -> None:
    """An account protects nodes or samples, not both."""
    account = PrivacyAccount(tmp_path / "account.json", 2.0, 1e-5, per_sample=True)
    with pytest.raises(
        BeyondLimits,
        match=r"protects nodes, and this node.s .?privacy_limit.? is for single samples",
    ):
        account.pay("one", round_of(0.01))
    w = np.zeros(3, np.float32)
    account.pay("one", SampleRound(round=1, w=w, tau=1, eta=0.1, clip=1.0, rho=0.02))
    assert account.spent == pytest.approx(epsilon_of(0.02, 1e-5))
    with pytest.raises(UserError, match="it is for single samples"):
        PrivacyAccount(tmp_path / "account.json", 2.0, 1e-5).pay("one", round_of(0.01))


def test_models_beyond_memory_are_refused() -> None:
    """A task with 10^9 clusters needs 240 GB, although both of its numbers agree."""
    clusters = 10**9
    model: dict[str, Any] = {
        "model": "kmeans",
        "parameters": clusters * FEATURES,
        "model_options": {"clusters": clusters},
    }
    with (
        patch("fedbudget.engines.remote.node_limits.memory_bytes", return_value=16e9),
        pytest.raises(BeyondLimits, match="a node needs at least 240 GB"),
    ):
        Worker(node_data(1)).accept(Welcome("run", replace(task(), **model), (0,)))
