"""An aggregator and node processes on this machine, for trials, tests and experiments."""

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fedbudget.data.dataset import Dataset
from fedbudget.engines.engine import interruptible
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import TOKEN_VARIABLE
from fedbudget.engines.remote.task import MOST_UPDATES
from fedbudget.errors import UserError
from fedbudget.launch.inputs import load_dataset, with_nodes
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun
from fedbudget.launch.privacy import is_private
from fedbudget.launch.serve import Interrupted, serving
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.network import ListenOptions
from fedbudget.settings.option import declarations
from fedbudget.settings.settings import Settings

_PATIENCE = 10.0
"""Seconds for node processes to end by themselves."""


@contextmanager
def on_this_machine(
    settings: Settings,
    overrides: Overrides = NOTHING,
    *,
    paces: Sequence[float] | None = None,
    delay: float = 0.0,
    energy_meter: str | None = None,
) -> Iterator[PreparedRun]:
    """Start node processes and yield a run with them.

    Args:
      paces: factor by which each node is slowed down.
      delay: seconds added to each message between node and aggregator.
      energy_meter: energy meter of the nodes; see `resources.energy`.
    """
    if overrides.dataset is not None or overrides.model is not None:
        raise UserError(
            "node processes cannot receive a dataset or model object: use a name, or a "
            "file such as net.py:Net"
        )
    if overrides.features:
        raise UserError(
            "node processes started here do not know your features: use fedbudget.serve, "
            "and fedbudget.join in programs that import them"
        )
    early = paces if settings.nodes is not None else None  # else the data decide
    require_compatible(settings, engine="network", pace=early)
    dataset = load_dataset(settings).sample(
        settings.train_samples, settings.test_samples, settings.seed
    )
    if is_private(settings):
        dataset.require_public()
    settings = with_nodes(settings, dataset)
    require_compatible(settings, engine="network", pace=paces)
    nodes = settings.nodes
    assert nodes is not None
    processes: list[subprocess.Popen[bytes]] = []
    before = os.environ.get(TOKEN_VARIABLE)
    # Every user of this machine can read command lines, so the token is not in one.
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(24)
    servers: list[AggregatorServer] = []

    def wake() -> None:
        for server in servers:
            server.wake()

    def start(server: AggregatorServer) -> None:
        servers.append(server)
        for number in range(1, nodes + 1):
            pace = None if paces is None else paces[number - 1]
            own = {"--pace": pace, "--delay": delay or None, "--energy-meter": energy_meter}
            own["--secure-threshold"] = settings.secure_threshold
            process = _start(server.port, settings, f"{number}/{nodes}", own)
            processes.append(process)
            threading.Thread(target=_tell_end, args=(process, server), daemon=True).start()

    try:
        with interruptible(wake) as asked:

            def interrupted() -> bool:
                return asked() or any(process.poll() is not None for process in processes)

            listen = ListenOptions("127.0.0.1:0", max_nodes=nodes)
            # These nodes are trusted: their updates need no clipping.
            trusted = replace(settings, combine=settings.combine or "mean")
            try:
                with serving(
                    trusted,
                    listen,
                    interrupted=interrupted,
                    overrides=overrides,
                    test=None if dataset.test is None else dataset,
                    opened=start,
                ) as prepared:
                    yield _with_all_data(prepared, settings, dataset)
            except Interrupted:
                for process in processes:
                    if process.poll():
                        raise UserError(
                            "a node could not start; see its error above"
                        ) from None
                raise KeyboardInterrupt from None
    finally:
        _end(processes)
        if before is None:
            os.environ.pop(TOKEN_VARIABLE, None)
        else:
            os.environ[TOKEN_VARIABLE] = before


def _start(
    port: int, settings: Settings, shard: str, own: Mapping[str, float | str | None]
) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "fedbudget",
        "join",
        f"127.0.0.1:{port}",
        "--shard",
        shard,
    ]
    command += [*node_arguments(settings), "--give-up-after", "30", "--quiet"]
    command += ["--min-batch", "1", "--max-tau", str(MOST_UPDATES), "--seeded-batches"]
    command += ["--secure-aggregation"] if settings.secure_aggregation else []
    for option, value in own.items():
        if value is not None:
            command += [option, str(value)]
    # One thread per process, so that they do not compete for cores.
    threads = dict.fromkeys(
        ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
    )
    return subprocess.Popen(
        command,
        env={**os.environ, **threads},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def node_arguments(settings: Settings) -> list[str]:
    """Return the options of `fedbudget join` that select the dataset of the settings."""
    known = declarations(Settings)
    shared = {
        name: value
        for name, value in vars(settings).items()
        if known[name].within("join") and value is not None
    }
    return [text for name, value in shared.items() for text in known[name].arguments(value)]


def _tell_end(process: "subprocess.Popen[bytes]", server: AggregatorServer) -> None:
    """Stop waiting for a node whose process has ended."""
    process.wait()
    server.check_waiting()


def _with_all_data(
    prepared: PreparedRun, settings: Settings, dataset: Dataset
) -> PreparedRun:
    """Add the data of all nodes, known on this machine, with the agreed classes."""
    target = prepared.model.target
    agreed = prepared.dataset.classes
    if agreed and dataset.train.labels is not None:
        dataset = dataset.with_classes(agreed)
    return replace(
        prepared,
        settings=replace(
            prepared.settings, dataset=settings.dataset, partition=settings.partition
        ),
        dataset=dataset,
        train=dataset.table(dataset.train, target),
        test=None if dataset.test is None else dataset.table(dataset.test, target),
    )


def _end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
