"""What aggregators and nodes on a network need besides settings, each option declared once."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedbudget.errors import UserError
from fedbudget.settings.option import REQUIRED, option
from fedbudget.settings.types import LogFormat, LogLevel, Most, Names, PrivacyUnit

_OWN_DATA = ("serve", "join")


@dataclass(frozen=True)
class ListenOptions:
    """Where an aggregator is to be found."""

    address: str = option(
        "127.0.0.1:7700", "HOST:PORT to listen on.", "network", argument=True
    )
    max_nodes: int = option(1000, "The most nodes to let in.", "network")
    max_nodes_each: int = option(
        100,
        "The most nodes that one process may speak for, as of --shard 1-9/90.",
        "network",
    )
    max_classes: int = option(
        1000, "The most classes that a node may have samples of.", "network"
    )
    allow: Names = option(
        (),
        "Names of the nodes that may come: edge-1,edge-2.",
        "network",
        shown="any",
        commas=True,
    )
    metrics_port: str | None = option(
        None,
        "Where /metrics is, for Prometheus: PORT on this machine, or HOST:PORT.",
        "network",
    )


@dataclass(frozen=True)
class SecurityOptions:
    """How a side of a connection shows who it is."""

    cert: Path | None = option(
        None,
        "This side's certificate, for TLS; a node needs one for mutual TLS. See fedbudget certs.",
        "network",
    )
    key: Path | None = option(None, "Its key.", "network")
    ca: Path | None = option(
        None, "Who signed the aggregator's certificate, for TLS.", "network", ("join",)
    )
    client_ca: Path | None = option(
        None,
        "Who signs the certificates that nodes must have, for mutual TLS.",
        "network",
        ("serve",),
    )
    token_file: Path | None = option(
        None,
        "A file with the token of all nodes, or a line NAME TOKEN for each.",
        "network",
        shown="FEDBUDGET_TOKEN",
    )
    insecure: bool = option(
        False, "Plain text, readable by all, also beyond this machine.", "network"
    )


@dataclass(frozen=True)
class NodeOptions:
    """What a machine that holds data has."""

    data: Path | None = option(
        None,
        "The node's own samples: a .csv, a .npz, images in IDX (…-images-idx3-ubyte), or a Python file and a name in "
        "it, ward.py:samples: (x, y), or a function that gives them.",
        "most used",
        _OWN_DATA,
    )
    labels: Path | None = option(
        None, "The labels that go with --data in IDX.", "data", _OWN_DATA, shown="beside it"
    )
    shard: str | None = option(
        None,
        "For trials, in place of --data: of --dataset the share of node I among N, as I/N or I-J/N.",
        "data",
        _OWN_DATA,
    )
    energy_meter: str | None = option(
        None,
        "What tells a node's energy: rapl (its processors), codecarbon (an estimate), declared (the aggregator's "
        "--watts), or auto: rapl where it can be read, else declared.",
        "budget",
        shown="auto",
        values=("auto", "rapl", "codecarbon", "declared"),
    )


@dataclass(frozen=True)
class JoinOptions:
    """What a node has."""

    address: str = option(
        REQUIRED, "HOST:PORT of the aggregator.", "network", argument=True
    )
    name: str | None = option(
        None, "The node's name.", "network", shown="from this machine's, or the shard"
    )
    pace: float = option(
        1.0,
        "How many times as long as it could a local update takes: a slower machine.",
        "network",
    )
    delay: float = option(
        0.0,
        "Seconds that a message takes longer than it does, each way: a slower network.",
        "network",
    )
    min_batch: int = option(
        8,
        "The fewest samples in a mini-batch: the update of fewer would tell too much of each.",
        "network",
    )
    max_tau: int = option(
        10_000, "The most local updates in a round that it makes.", "network"
    )
    min_interval: float = option(
        0.0, "Seconds from one answer to the next, at least.", "network"
    )
    privacy_limit: float | None = option(
        None,
        "The most ε that this node tells in all private runs together; others it refuses.",
        "network",
    )
    privacy_account: Path | None = option(
        None,
        "The file that has what it told so far.",
        "network",
        shown="by the node's name, among the user's files",
    )
    privacy_delta: float = option(1e-5, "δ of that ε.", "network")
    privacy_unit: PrivacyUnit = option(
        "node",
        "What that ε is of: node (with all its samples) or sample (each).",
        "network",
    )
    secure_aggregation: bool = option(
        False,
        "Take part only where sums are masked, so that the aggregator sees no report by itself.",
        "network",
    )
    secure_threshold: Most | None = option(
        None,
        "The least share of a group, without which no sum is opened, that this node agrees to.",
        "network",
    )
    identity: Path | None = option(
        None,
        "This node's key for masked sums, where it has no certificate; it is made where there is none.",
        "network",
        shown="a new one each time",
    )
    known_nodes: Path | None = option(
        None,
        "A file with a line NAME KEY for each other node; for masked sums with no others.",
        "network",
        shown="the key that each shows first",
    )
    sent_log: Path | None = option(
        None, "A file that says what was sent, a line for each message.", "output"
    )
    give_up_after: float = option(
        600.0,
        "Seconds until an aggregator that is not there is given up; inf for never.",
        "network",
    )
    quiet: bool = option(False, "Say nothing but what is wrong.", "output")


@dataclass(frozen=True)
class LogOptions:
    """How an aggregator, or a node, says what happens."""

    log_format: LogFormat = option(
        "text", "How standard error is written: text, or json, a line for each.", "output"
    )
    log_level: LogLevel = option(
        "warning",
        "What of the network is told: debug, info, warning or error.",
        "output",
        helps={
            "join": "error says nothing but what ends the node; with the others it says what happens."
        },
    )


def require_network() -> None:
    """Says which extra to install where gRPC is missing; and gRPC itself speaks only of errors."""
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        raise UserError(
            "this needs gRPC; install it with: pip install 'fedbudget[network]', or [node] for join alone"
        )
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
