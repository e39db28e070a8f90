"""Options of aggregators and nodes in addition to settings, each declared once."""

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
    """Address of an aggregator, and which nodes it admits."""

    address: str = option(
        "127.0.0.1:7700", "HOST:PORT to listen on.", "network", argument=True
    )
    max_nodes: int = option(1000, "Maximum number of nodes.", "network")
    max_nodes_each: int = option(
        100,
        "Maximum number of nodes in one process, such as --shard 1-9/90.",
        "network",
    )
    max_classes: int = option(
        1000, "Maximum number of classes in the data of a node.", "network"
    )
    allow: Names = option(
        (),
        "Names of the nodes that may join, such as edge-1,edge-2.",
        "network",
        shown="any",
        commas=True,
    )
    metrics_port: str | None = option(
        None,
        "Address of /metrics for Prometheus: PORT on this machine, or HOST:PORT.",
        "network",
    )


@dataclass(frozen=True)
class SecurityOptions:
    """Certificates and tokens of one side of a connection."""

    cert: Path | None = option(
        None,
        "Certificate of this machine for TLS; a node needs one for mutual TLS.",
        "network",
    )
    key: Path | None = option(None, "Private key of --cert.", "network")
    ca: Path | None = option(
        None, "Certificate authority of the aggregator, for TLS.", "network", ("join",)
    )
    client_ca: Path | None = option(
        None,
        "Certificate authority of the nodes, for mutual TLS.",
        "network",
        ("serve",),
    )
    token_file: Path | None = option(
        None,
        "File with one token for all nodes, or a line NAME TOKEN for each.",
        "network",
        shown="FEDBUDGET_TOKEN",
    )
    insecure: bool = option(
        False, "Allow unencrypted connections between machines.", "network"
    )


@dataclass(frozen=True)
class NodeOptions:
    """Data and meters of a machine that holds samples."""

    data: Path | None = option(
        None,
        "Samples of this node: a .csv, .parquet or .npz, IDX images "
        "(…-images-idx3-ubyte), or FILE:NAME, such as ward.py:samples, for (x, y) or a "
        "function that returns them.",
        "most used",
        _OWN_DATA,
    )
    labels: Path | None = option(
        None,
        "IDX file with the labels of --data.",
        "data",
        _OWN_DATA,
        shown="in the same folder",
    )
    shard: str | None = option(
        None,
        "For trials, instead of --data: the part of --dataset of node I of N, as I/N or "
        "I-J/N.",
        "data",
        _OWN_DATA,
    )
    energy_meter: str | None = option(
        None,
        "Energy meter of a node: rapl (its processors), codecarbon (an estimate), declared "
        "(--watts of the aggregator), or auto (rapl if readable, else declared).",
        "budget",
        shown="auto",
        values=("auto", "rapl", "codecarbon", "declared"),
    )


@dataclass(frozen=True)
class JoinOptions:
    """Options of a node."""

    address: str = option(
        REQUIRED, "HOST:PORT of the aggregator.", "network", argument=True
    )
    name: str | None = option(
        None, "Name of the node.", "network", shown="the host name, or from --shard"
    )
    pace: float = option(
        1.0,
        "Slow down local updates by this factor, to simulate a slower machine.",
        "network",
    )
    delay: float = option(
        0.0,
        "Seconds added to each message, to simulate a slower network.",
        "network",
    )
    min_batch: int = option(
        8,
        "Smallest accepted mini-batch; updates from fewer samples reveal too much of each.",
        "network",
    )
    max_tau: int = option(
        10_000, "Largest accepted number of local updates in a round.", "network"
    )
    min_interval: float = option(
        0.0, "Minimum number of seconds between two replies.", "network"
    )
    seeded_batches: bool = option(
        False,
        "Draw mini-batches from the aggregator's seed, so that a run can be repeated to "
        "the bit. The aggregator then knows which samples are in each.",
        "network",
    )
    privacy_limit: float | None = option(
        None,
        "Largest total ε of all private runs; the node refuses to exceed it.",
        "network",
    )
    privacy_account: Path | None = option(
        None,
        "File with the privacy spent so far.",
        "network",
        shown="two files in the user's state folder, for the node's name and for its data",
    )
    privacy_delta: float = option(1e-5, "δ of --privacy-limit.", "network")
    privacy_unit: PrivacyUnit = option(
        "node",
        "Unit of --privacy-limit: node (with all its samples) or sample.",
        "network",
    )
    secure_aggregation: bool = option(
        False,
        "Join only runs with secure aggregation.",
        "network",
    )
    secure_threshold: Most | None = option(
        None,
        "Smallest accepted fraction of a group needed to open a masked sum.",
        "network",
    )
    identity: Path | None = option(
        None,
        "File with the key of this node for secure aggregation, if it has no certificate; "
        "created if missing.",
        "network",
        shown="a new one each time",
    )
    known_nodes: Path | None = option(
        None,
        "File with a line NAME KEY for each node that secure aggregation may include.",
        "network",
        shown="certificates, or --trust-first",
    )
    secure_least: int | None = option(
        None,
        "Smallest number of nodes in a masked sum at the start of a round.",
        "network",
        shown="the nodes in --known-nodes, or 3",
    )
    trust_first: bool = option(
        False,
        "With --secure-aggregation, without a certificate and --known-nodes: trust the "
        "first key of each other node, which the aggregator could replace.",
        "network",
    )
    sent_log: Path | None = option(
        None, "File that lists time and size of each report that this node sends.", "output"
    )
    save_model: Path | None = option(
        None,
        "Folder for the models of this node at the end of a run with --personal.",
        "output",
    )
    keep_figures: bool = option(
        False,
        "Do not send figures of this node's personal model to the aggregator.",
        "network",
    )
    give_up_after: float = option(
        600.0,
        "Seconds to retry an unreachable aggregator; inf to retry forever.",
        "network",
    )
    quiet: bool = option(False, "Print only errors.", "output")


@dataclass(frozen=True)
class LogOptions:
    """Log of an aggregator or a node."""

    log_format: LogFormat = option(
        "text", "Format of standard error: text, or json (one object per line).", "output"
    )
    log_level: LogLevel = option(
        "warning",
        "Lowest level of network messages: debug, info, warning or error.",
        "output",
        helps={
            "join": "Messages of the node: error prints only why it stops; debug, info and "
            "warning print all.  [default: warning]"
        },
    )


def require_network() -> None:
    """Raise UserError if gRPC is missing; silence its own log."""
    if find_spec("grpc") is None:
        raise UserError(
            "this needs gRPC; install it with: pip install 'fedbudget[network]', or "
            "'fedbudget[node]' for join only"
        )
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
