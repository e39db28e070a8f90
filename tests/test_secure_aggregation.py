"""Secure aggregation from Python: runs come to what plain ones come to, and what does not
go together is refused.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

import fedbudget
from fedbudget.engines.grpc import certificates
from fedbudget.engines.noise import paid_in
from fedbudget.errors import UserError, WorkError
from fedbudget.protocol.combine import CoordinateMedian
from fedbudget.resources.privacy import epsilon_of
from fedbudget.result import Result
from fedbudget.runs.folder import Run

LONG = 60.0  # seconds that nothing takes
FEATURES, CLASSES = 5, 3


def made(seed: int, count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(count, FEATURES)) + seed % 3 / 3).astype(np.float32)
    scores = x @ np.random.default_rng(7).normal(size=(FEATURES, CLASSES)) + rng.normal(
        size=(count, CLASSES)
    )
    return x, scores.argmax(axis=1)


NODES = [
    {"data": made(seed, 40 + 10 * seed), "test": made(10 + seed, 30 + seed)}
    for seed in range(4)
]


@pytest.fixture
def nodes() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def served(
    pool: ThreadPoolExecutor, each: list[dict[str, Any]], joining: Any = None, **more: Any
) -> Result:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    how: Any = {"give_up_after": LONG, "quiet": True, **(joining or {})}
    parts = [
        pool.submit(fedbudget.join, address, name=f"n{i}", **{**how, **own})
        for i, own in enumerate(each)
    ]
    asked: Any = {
        "model": "softmax",
        "costs": "simulated",
        "budget": "time=3s",
        "seed": 3,
        "batch_size": 8,
    }
    asked["round_timeout"] = LONG
    result = fedbudget.serve(address, nodes=len(each), quiet=True, **{**asked, **more})
    for part in parts:
        part.result(LONG)
    return result


@pytest.mark.parametrize(
    "method", [{}, {"method": "frugal", "tau": 5}, {"speeds": (4.0, 4.0, 1.0, 1.0)}]
)
def test_a_run_comes_to_what_a_plain_one_does(
    nodes: ThreadPoolExecutor, method: dict[str, Any]
) -> None:
    """Losses to 1e-4 in all rounds, and all that was decided: τ, η, who takes part; and
    metrics of test samples.
    """
    insisting = {"secure_aggregation": True}
    masked = served(nodes, NODES, insisting, secure_aggregation=True, **method)
    plain = served(nodes, NODES, combine="mean", **method)
    assert [each.tau for each in masked.rounds] == [each.tau for each in plain.rounds]
    for ours, theirs in zip(masked.rounds, plain.rounds, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
        assert ours.eta == pytest.approx(theirs.eta, rel=1e-2)
        assert (ours.nodes, ours.corrected) == (theirs.nodes, theirs.corrected)
    assert masked.accuracy == pytest.approx(plain.accuracy, abs=0.02)
    assert masked.metrics.keys() == plain.metrics.keys()
    assert masked.metrics == pytest.approx(dict(plain.metrics), abs=0.02)


def test_a_private_run_is_accounted_as_the_library_does(
    nodes: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """With noise at nodes: ε of all that was made known, by dp-accounting, and the same in
    a node's own account.
    """
    account = tmp_path / "n0.json"
    each = [{**own, "secure_aggregation": True} for own in NODES]
    each[0] |= {"privacy_limit": 9.0, "privacy_account": account}
    asked: Any = {"budget": ["time=6s", "privacy=8"], "out": tmp_path / "run"}
    result = served(nodes, each, secure_aggregation=True, **asked)
    accountant = PLDAccountant()
    for record in result.rounds:
        assert record.private is not None
        assert record.nodes == 4
        for name in ("noise", "count_noise"):
            if name in record.private:
                accountant.compose(dp_accounting.GaussianDpEvent(record.private[name]))
    assert result.stopped_by == "privacy"
    assert result.spent["privacy"] == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-4)
    assert accountant.get_epsilon(1e-5) <= 8
    told = sum(
        record.private["rho"] for record in result.rounds if record.private is not None
    )
    assert paid_in(tmp_path / "run") == pytest.approx(told, rel=1e-12)
    assert json.loads(account.read_text())["rho"] == pytest.approx(told, rel=1e-12)


def test_a_node_with_a_limit_leaves_a_masked_run(
    nodes: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """It refuses beyond its limit, and says so; the others go on with the noise that is
    due.
    """
    each = [{**own, "secure_aggregation": True} for own in NODES]
    each[0] |= {"privacy_limit": 4.0, "privacy_account": tmp_path / "n0.json"}
    asked: Any = {
        "budget": ["time=6s", "privacy=8"],
        "secure_threshold": 0.51,
        "out": tmp_path / "run",
    }
    with pytest.raises(WorkError, match="privacy-limit is ε = 4"):
        served(nodes, each, secure_aggregation=True, **asked)
    found = [record.nodes for record in Run.open(tmp_path / "run").rounds]
    assert found[0] == 4
    assert found[-1] == 3
    assert epsilon_of(json.loads((tmp_path / "n0.json").read_text())["rho"], 1e-5) < 4


def test_certificates_say_whose_keys_are_right(
    nodes: ThreadPoolExecutor, tmp_path: Path
) -> None:
    names = [f"n{number}" for number in range(4)]
    certificates.make(tmp_path, hosts=["localhost", "127.0.0.1"], nodes=names)
    each = [
        {**own, "cert": tmp_path / f"{n}.pem", "key": tmp_path / f"{n}.key"}
        for n, own in zip(names, NODES, strict=True)
    ]
    joining = {"secure_aggregation": True, "ca": tmp_path / "ca.pem"}
    server = {
        "cert": tmp_path / "aggregator.pem",
        "key": tmp_path / "aggregator.key",
        "client_ca": tmp_path / "ca.pem",
    }
    result = served(nodes, each, joining, secure_aggregation=True, rounds=3, **server)
    assert [each.nodes for each in result.rounds] == [4] * 4


def test_nodes_that_are_known_are_the_only_ones(
    nodes: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A node whose list has another key for a name leaves, and says why."""
    files = [tmp_path / f"n{number}.key" for number in range(4)]
    (tmp_path / "known").write_text(f"# others\nn1 {'ab' * 32}\n")
    each = [{**own, "identity": file} for own, file in zip(NODES, files, strict=True)]
    each[0]["known_nodes"] = tmp_path / "known"
    with pytest.raises(WorkError, match="identity does not match the known one"):
        served(nodes, each, secure_aggregation=True, rounds=3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"combine": "clipped"},
            "combine clipped needs the report of every node.*combine must be mean",
        ),
        ({"combine": "trimmed", "drift_correction": False}, "combine trimmed needs the report"),
        (
            {"combine": CoordinateMedian(), "drift_correction": False},
            "combine median needs the report",
        ),
        ({"method": "paper"}, "estimates δ from the report of every node"),
        (
            {"method": "frugal", "drift_correction": False},
            "estimates δ from the report of every node",
        ),
        ({"compress": "8-bit"}, "compress 8-bit does not work with secure_aggregation"),
        (
            {"budget": ["privacy=4", "time=5s"], "privacy_noise": "seeded"},
            "privacy_noise seeded does not work with",
        ),
        (
            {"budget": ["privacy=4", "time=5s"], "privacy_unit": "sample"},
            "privacy_unit sample does not work with",
        ),
        ({"nodes": 2}, "needs at least 3 nodes"),
        ({"data": made(0, 20)}, "an aggregator that holds data"),
    ],
)
def test_what_needs_more_than_sums_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fedbudget.serve(
            "127.0.0.1:0", model="softmax", secure_aggregation=True, quiet=True, **options
        )


def test_a_node_says_in_python_what_its_limit_is_of(tmp_path: Path) -> None:
    (tmp_path / "told.json").write_text('{"rho": 0.1, "runs": {}, "unit": "sample"}')
    how: Any = {
        "data": made(0, 20),
        "privacy_limit": 4.0,
        "privacy_account": tmp_path / "told.json",
    }
    with pytest.raises(
        UserError,
        match=r"told\.json is not a node's account of privacy: it is for single samples",
    ):
        fedbudget.join("127.0.0.1:7", **how)
    with pytest.raises(
        UserError, match="privacy_unit must be node or sample, not 'nobody'"
    ):
        fedbudget.join("127.0.0.1:7", **how, privacy_unit="nobody")  # type: ignore[arg-type]
    with pytest.raises(WorkError, match="could not be reached"):
        fedbudget.join("127.0.0.1:7", **how, privacy_unit="sample", give_up_after=0.1)


def test_a_simulation_does_not_pretend_to_mask() -> None:
    with pytest.raises(UserError, match="works only over gRPC"):
        fedbudget.train(secure_aggregation=True, rounds=1)


def test_a_threshold_goes_with_masks() -> None:
    with pytest.raises(UserError, match="secure_threshold needs secure_aggregation"):
        fedbudget.serve("127.0.0.1:0", model="softmax", secure_threshold=0.8, quiet=True)
    with pytest.raises(UserError, match="secure_threshold must be"):
        fedbudget.serve(
            "127.0.0.1:0",
            model="softmax",
            secure_aggregation=True,
            secure_threshold=0.4,
            quiet=True,
        )
