"""Secure aggregation from Python: the same results as plain runs, and refused
combinations.
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

LONG = 60.0  # timeout in seconds, never reached
FEATURES, CLASSES = 5, 3


def make_samples(seed: int, count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(count, FEATURES)) + seed % 3 / 3).astype(np.float32)
    scores = x @ np.random.default_rng(7).normal(size=(FEATURES, CLASSES)) + rng.normal(
        size=(count, CLASSES)
    )
    return x, scores.argmax(axis=1)


NODES = [
    {"data": make_samples(seed, 40 + 10 * seed), "test": make_samples(10 + seed, 30 + seed)}
    for seed in range(4)
]


@pytest.fixture
def nodes() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def serve_nodes(
    pool: ThreadPoolExecutor, each: list[dict[str, Any]], joining: Any = None, **more: Any
) -> Result:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    how: Any = {
        "give_up_after": LONG,
        "quiet": True,
        "seeded_batches": True,
        **(joining or {}),
    }
    parts = [
        pool.submit(fedbudget.join, address, name=f"n{i}", **{**how, **own})
        for i, own in enumerate(each)
    ]
    options: Any = {
        "model": "softmax",
        "costs": "simulated",
        "budget": "time=3s",
        "seed": 3,
        "batch_size": 8,
    }
    options["round_timeout"] = LONG
    result = fedbudget.serve(address, nodes=len(each), quiet=True, **{**options, **more})
    for part in parts:
        part.result(LONG)
    return result


@pytest.mark.parametrize(
    "method", [{}, {"method": "frugal", "tau": 5}, {"speeds": (4.0, 4.0, 1.0, 1.0)}]
)
def test_masked_run_matches_plain_run(
    nodes: ThreadPoolExecutor, method: dict[str, Any]
) -> None:
    """Losses agree in all rounds, as do τ, η, the nodes of each round, and test metrics.

    With masks, all nodes make the same number of updates, whatever their speeds.
    """
    required = {"secure_aggregation": True}
    masked = serve_nodes(nodes, NODES, required, secure_aggregation=True, **method)
    plain = serve_nodes(nodes, NODES, combine="mean", workload="equal", **method)
    assert [each.tau for each in masked.rounds] == [each.tau for each in plain.rounds]
    for ours, theirs in zip(masked.rounds, plain.rounds, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=5e-3)
        # The largest β̂ is known as a level, an eighth of a factor of two wide.
        assert ours.eta == pytest.approx(theirs.eta, rel=0.1)
        assert (ours.nodes, ours.corrected) == (theirs.nodes, theirs.corrected)
    assert masked.accuracy == pytest.approx(plain.accuracy, abs=0.02)
    assert masked.metrics.keys() == plain.metrics.keys()
    assert masked.metrics == pytest.approx(dict(plain.metrics), abs=0.02)


def test_workload_by_speed_is_refused() -> None:
    """Numbers of updates of its choice would let an aggregator single out a report."""
    with pytest.raises(UserError, match="workload by-speed does not work with secure"):
        fedbudget.serve(secure_aggregation=True, workload="by-speed", nodes=4)


def test_privacy_matches_dp_accounting(nodes: ThreadPoolExecutor, tmp_path: Path) -> None:
    """With noise on the nodes. ε of all published sums equals that of dp-accounting, and
    the node's own account agrees.
    """
    account = tmp_path / "n0.json"
    each = [{**own, "secure_aggregation": True} for own in NODES]
    each[0] |= {"privacy_limit": 9.0, "privacy_account": account}
    options: Any = {"budget": ["time=6s", "privacy=8"], "out": tmp_path / "run"}
    result = serve_nodes(nodes, each, secure_aggregation=True, **options)
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
    published = sum(
        record.private["rho"] for record in result.rounds if record.private is not None
    )
    assert paid_in(tmp_path / "run") == pytest.approx(published, rel=1e-12)
    assert json.loads(account.read_text())["rho"] == pytest.approx(published, rel=1e-12)


def test_node_leaves_at_its_privacy_limit(
    nodes: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The node refuses to exceed its limit and reports the reason. The other nodes continue
    with the required noise.
    """
    each = [{**own, "secure_aggregation": True, "secure_threshold": 0.51} for own in NODES]
    each[0] |= {"privacy_limit": 4.0, "privacy_account": tmp_path / "n0.json"}
    options: Any = {
        "budget": ["time=6s", "privacy=8"],
        "secure_threshold": 0.51,
        "out": tmp_path / "run",
    }
    with pytest.raises(WorkError, match="privacy-limit is ε = 4"):
        serve_nodes(nodes, each, secure_aggregation=True, **options)
    nodes_by_round = [record.nodes for record in Run.open(tmp_path / "run").rounds]
    assert nodes_by_round[0] == 4
    assert nodes_by_round[-1] == 3
    assert epsilon_of(json.loads((tmp_path / "n0.json").read_text())["rho"], 1e-5) < 4


def test_certificates_identify_nodes(nodes: ThreadPoolExecutor, tmp_path: Path) -> None:
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
    result = serve_nodes(nodes, each, joining, secure_aggregation=True, rounds=3, **server)
    assert [each.nodes for each in result.rounds] == [4] * 4


def test_keys_are_verified_over_a_network(tmp_path: Path) -> None:
    """On this machine, and with `trust_first`, the first key of each node is enough."""
    how: Any = {"data": make_samples(0, 20), "insecure": True, "give_up_after": 0.1}
    how |= {"secure_aggregation": True, "quiet": True}
    with pytest.raises(UserError, match="secure_aggregation needs verified keys"):
        fedbudget.join("192.0.2.1:7", **how)
    with pytest.raises(WorkError, match="could not be reached"):
        fedbudget.join("192.0.2.1:7", **how, trust_first=True)
    with pytest.raises(WorkError, match="could not be reached"):
        fedbudget.join("127.0.0.1:7", **how)
    (tmp_path / "known").write_text(f"n1 {'ab' * 32}\n")
    with pytest.raises(UserError, match="trust_first is for nodes without cert and known"):
        fedbudget.join(
            "192.0.2.1:7", **how, known_nodes=tmp_path / "known", trust_first=True
        )
    with pytest.raises(UserError, match="secure_least must be at least 3"):
        fedbudget.join("127.0.0.1:7", **how, secure_least=2)


def test_unknown_identity_is_refused(nodes: ThreadPoolExecutor, tmp_path: Path) -> None:
    """A node leaves if its list has another key for a name."""
    files = [tmp_path / f"n{number}.key" for number in range(4)]
    (tmp_path / "known").write_text(f"# others\nn1 {'ab' * 32}\n")
    each = [{**own, "identity": file} for own, file in zip(NODES, files, strict=True)]
    each[0]["known_nodes"] = tmp_path / "known"
    with pytest.raises(WorkError, match="identity does not match the known one"):
        serve_nodes(nodes, each, secure_aggregation=True, rounds=3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"combine": "clipped"},
            "combine clipped needs the report of every node.*combine must be mean",
        ),
        (
            {"combine": "trimmed", "drift_correction": False},
            "combine trimmed needs the report",
        ),
        (
            {"combine": CoordinateMedian()},
            "CoordinateMedian needs the report",
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
            {"budget": ["privacy=4", "time=5s"], "privacy_unit": "sample", "tau": 2},
            "make one update per round: tau must be 1",
        ),
        (
            {"budget": ["privacy=4", "time=5s"], "privacy_unit": "sample", "batch_size": 8},
            "make one update per round, with all samples .*: batch_size must be full",
        ),
        ({"nodes": 2}, "needs at least 3 nodes"),
        ({"data": make_samples(0, 20)}, "an aggregator that holds data"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, Any], reason: str) -> None:
    """Options that need single reports do not work with secure aggregation."""
    with pytest.raises(UserError, match=reason):
        fedbudget.serve(
            "127.0.0.1:0", model="softmax", secure_aggregation=True, quiet=True, **options
        )


def test_privacy_unit_of_a_nodes_account(tmp_path: Path) -> None:
    (tmp_path / "account.json").write_text('{"rho": 0.1, "runs": {}, "unit": "sample"}')
    how: Any = {
        "data": make_samples(0, 20),
        "privacy_limit": 4.0,
        "privacy_account": tmp_path / "account.json",
    }
    with pytest.raises(
        UserError,
        match=r"account\.json is not an account of privacy: it is for single samples",
    ):
        fedbudget.join("127.0.0.1:7", **how)
    with pytest.raises(UserError, match="privacy_unit must be node or sample, not 'group'"):
        fedbudget.join("127.0.0.1:7", **how, privacy_unit="group")  # type: ignore[arg-type]
    with pytest.raises(WorkError, match="could not be reached"):
        fedbudget.join("127.0.0.1:7", **how, privacy_unit="sample", give_up_after=0.1)


def test_simulation_is_refused() -> None:
    with pytest.raises(UserError, match="works only over gRPC"):
        fedbudget.train(secure_aggregation=True, rounds=1)


def test_threshold_needs_secure_aggregation() -> None:
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
