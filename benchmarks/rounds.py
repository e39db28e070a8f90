"""Overhead of a round over a network, compared with an echo of the same bytes.

The setup is on loopback, with and without TLS: one aggregator process, and two
processes that share the nodes, with one connection per node. fedbudget makes a whole
run through the public API: protocol, ledger, controller, and records and a checkpoint
on disk after every round. The echo is the minimum for gRPC: the same processes, streams
and messages, without any computation. The two take turns, and medians over rounds are
compared.

A round lasts from one last report to the next, at the aggregator, minus the local work
reported by the slowest node. If flwr is installed, the first case without TLS also runs
on Flower's deployment engine (flower.py), and whole rounds are compared.

`python -m benchmarks.rounds aggregator` and `... nodes` are the processes. They read
commands from standard input, one JSON line each, and answer the same way.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import echo, flower
from benchmarks.memory import process_peak
from fedbudget.settings.types import MethodName, Tau

TURNS = 3  # of each contender
WARMING_UP = 5  # rounds at the start of a turn that are not measured
PROCESSES = 2  # share the nodes: one per node would not fit on a small machine


@dataclass(frozen=True)
class Case:
    """One measured configuration.

    Args:
      nodes: Number of nodes.
      parameters: Number of model parameters.
      rounds: Rounds in one turn.
      method, tau: As in `Settings`.
      masked: Whether to use secure aggregation.
    """

    nodes: int
    parameters: int
    rounds: int
    method: MethodName = "paper"
    tau: Tau = 1
    masked: bool = False


CASES = (
    Case(5, 784, 200),
    Case(5, 784, 200, "frugal", "adaptive"),
    Case(50, 784, 60),
    Case(200, 784, 30),
    Case(5, 1_000_000, 20),
)
LARGE = (
    Case(20, 11_000_000, 3, "accelerated", "adaptive"),
    Case(200, 1_000_000, 3, "accelerated", "adaptive"),
)
"""Models of a size at which the aggregator's memory counts. Nodes hold some 17 vectors
each between rounds, and are on this machine as well: the first takes 16 GB in all."""


def round_trips(cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """Measure milliseconds per round of fedbudget and the echo, for all cases."""
    from fedbudget.engines.grpc import certificates

    found = []
    with tempfile.TemporaryDirectory() as folder, _processes() as processes:
        certificates.make(Path(folder), hosts=["localhost", "127.0.0.1"])
        for case in cases:
            for tls in (False, True):
                found.append(_measured(case, folder if tls else None, processes))
    found[0] |= _flower(cases[0], found[0]["whole_milliseconds"])
    return found


def plain_round_trips(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measure the same in one turn and without TLS."""
    with _processes() as processes:
        return [_measured(case, None, processes, turns=1) for case in cases]


def aggregator_memory(cases: Sequence[Case] = LARGE) -> dict[str, float]:
    """Measure the peak memory of the aggregator process, including all libraries."""
    found = {}
    for case in cases:
        with _processes() as processes:  # new processes, because a peak persists
            _turn("ours", case, None, processes)
            size = f"{case.nodes} nodes of {case.parameters:,} parameters"
            name = f"megabytes of the aggregator, {size}"
            found[name] = processes[0].peak_megabytes
    return found


def _measured(
    case: Case,
    certificates: str | None,
    processes: "list[_Process]",
    turns: int = TURNS,
) -> dict[str, Any]:
    taken: dict[str, list[float]] = {"ours": [], "whole": [], "saving": [], "bare": []}
    for _ in range(turns):
        for contender in ("ours", "bare"):
            for what, seconds in _turn(contender, case, certificates, processes).items():
                taken[what] += seconds[WARMING_UP:]
    medians = {what: 1000 * statistics.median(seconds) for what, seconds in taken.items()}
    return {
        "nodes": case.nodes,
        "parameters": case.parameters,
        "method": case.method,
        "tau": case.tau,
        "tls": certificates is not None,
        **{f"{what}_milliseconds": milliseconds for what, milliseconds in medians.items()},
        "ours_over_bare": medians["bare"] / medians["ours"],
    }


def _flower(case: Case, whole_milliseconds: float) -> dict[str, Any]:
    """Compare whole rounds with Flower's.

    If Flower is missing or fails, return the reason: Flower is optional.
    """
    version = flower.version()
    if version is None:
        return {"flower": "flwr is not installed"}
    try:
        milliseconds = flower.round_milliseconds(case.nodes, case.parameters)
    except flower.FlowerFailedError as error:
        return {"flower": f"flwr {version} has failed: {error}"}
    return {
        "flower": f"flwr {version}",
        "flower_milliseconds": milliseconds,
        "flower_over_whole": milliseconds / whole_milliseconds,
    }


def _turn(
    contender: str, case: Case, certificates: str | None, processes: "list[_Process]"
) -> dict[str, list[float]]:
    """Return seconds of each round; for fedbudget, also whole rounds and saving."""
    aggregator, *others = processes
    asked = {"contender": contender, "case": asdict(case), "certificates": certificates}
    aggregator.tell(asked)
    port = aggregator.hear()["port"]
    for index, process in enumerate(others):
        process.tell(
            {
                **asked,
                "port": port,
                "numbers": list(range(index, case.nodes, len(others))),
            }
        )
    taken: dict[str, list[float]] = aggregator.hear()
    for process in others:
        process.hear()
    return taken


class _Process:
    """One of the processes, with its input and output."""

    def __init__(self, role: str) -> None:
        # One thread for kernels: these nodes share two cores, unlike real ones.
        environment = {**os.environ, "NUMBA_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.rounds", role]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def tell(self, words: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark has ended; its output is above")
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def peak_megabytes(self) -> float:
        return process_peak(self._process.pid)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def _processes() -> Iterator[list[_Process]]:
    with ExitStack() as stack:
        found = []
        for role in ("aggregator", *["nodes"] * PROCESSES):
            found.append(_Process(role))
            stack.callback(found[-1].end)
        yield found


# Code of the processes.


def _aggregate(asked: dict[str, Any]) -> None:
    case, folder = Case(**asked["case"]), asked["certificates"]
    certificates = None if folder is None else Path(folder)

    def opened(port: int) -> None:
        _say({"port": port})

    aggregate = echo.aggregate if asked["contender"] == "bare" else _aggregate_ours
    _say(aggregate(case, certificates, opened))


def _attend(asked: dict[str, Any]) -> None:
    case, folder, address = (
        Case(**asked["case"]),
        asked["certificates"],
        f"127.0.0.1:{asked['port']}",
    )
    run_node = echo.answer if asked["contender"] == "bare" else _attend_ours
    asyncio.run(
        run_node(case, None if folder is None else Path(folder), address, asked["numbers"])
    )
    _say({})


def _say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def _aggregate_ours(
    case: Case, certificates: Path | None, opened: Callable[[int], None]
) -> dict[str, list[float]]:
    from fedbudget.engines.grpc.server import AggregatorServer
    from fedbudget.engines.remote.round import CollectedRound
    from fedbudget.launch.execute import execute
    from fedbudget.launch.serve import serving
    from fedbudget.runs.checkpoint import Checkpoint
    from fedbudget.settings.network import ListenOptions, SecurityOptions
    from fedbudget.settings.settings import Settings

    settings = Settings(
        model="nothing",
        nodes=case.nodes,
        method=case.method,
        tau=case.tau,
        batch_size=2,
        step_size=None if case.method == "accelerated" else 0.01,
        budget=("time=1000h",),
        rounds=case.rounds,
        tau_max=2,
        combine="mean" if case.method == "accelerated" else None,
        secure_aggregation=case.masked,
    )
    cert, key = (
        (None, None)
        if certificates is None
        else (certificates / f"aggregator.{end}" for end in ("pem", "key"))
    )
    ended: list[float] = []
    working: list[float] = []
    saving: list[float] = []

    def watch(server: AggregatorServer) -> None:
        finish = server.finish

        def finish_and_note() -> CollectedRound:
            gathered = finish()
            ended.append(time.perf_counter())
            working.append(max(answer.costs.seconds for answer in gathered.answers))
            return gathered

        server.finish = finish_and_note  # type: ignore[method-assign]
        opened(server.port)

    listening, security = (
        ListenOptions("127.0.0.1:0"),
        SecurityOptions(cert=cert, key=key),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            settings, listening, security, interrupted=lambda: False, opened=watch
        ) as plan,
    ):
        save = Checkpoint.save

        def save_and_note(checkpoint: Checkpoint, folder: Path) -> None:
            began = time.perf_counter()
            save(checkpoint, folder)
            saving.append(time.perf_counter() - began)

        Checkpoint.save = save_and_note  # type: ignore[method-assign, assignment]
        try:
            execute(plan, out=Path(folder) / "run", plot=False)
        finally:
            Checkpoint.save = save  # type: ignore[method-assign]
    whole = [after - before for before, after in pairwise(ended)]
    beyond = [seconds - work for seconds, work in zip(whole, working[1:], strict=True)]
    return {"ours": beyond, "whole": whole, "saving": saving}


async def _attend_ours(
    case: Case, certificates: Path | None, address: str, numbers: Sequence[int]
) -> None:
    import numpy as np

    from fedbudget.data.dataset import Dataset, Part
    from fedbudget.engines.grpc import node
    from fedbudget.engines.grpc.credentials import node_credentials
    from fedbudget.engines.remote.node_data import NodeData
    from fedbudget.engines.remote.worker import Worker

    samples = max(4, min(100, 10**7 // case.parameters))  # one feature per parameter
    dataset = Dataset("nothing", Part(np.zeros((samples, case.parameters), np.uint8)))
    credentials = node_credentials(
        None if certificates is None else certificates / "ca.pem", None, None
    )
    works = [Worker(NodeData(dataset, [np.arange(samples)])) for _ in numbers]
    # Nodes work one after the other: a round in progress takes memory, and real nodes
    # have their own machines.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await asyncio.gather(
        *(
            node.run_node(address, work, name=f"node-{number}", credentials=credentials)
            for number, work in zip(numbers, works, strict=True)
        )
    )


def _do_nothing() -> None:
    """Register the model "nothing", whose local updates keep w unchanged."""
    import numpy as np

    from fedbudget.arrays import Float32, Float64
    from fedbudget.data.sampling import BatchIndices
    from fedbudget.data.shards import Shards, Table
    from fedbudget.models import catalogue
    from fedbudget.models.base import BaseModel, Descent, Target

    class Nothing(BaseModel):
        name = "nothing"
        target: Target = "none"

        def __init__(self, parameters: int) -> None:
            self._parameters = parameters

        @property
        def parameters(self) -> int:
            return self._parameters

        def initial(self, seed: int) -> Float32:
            return np.zeros(self._parameters, np.float32)

        def losses(self, w: Float32, shards: Shards, indices: BatchIndices) -> Float64:
            return np.ones(len(shards))

        def descend(
            self,
            w: Float32,
            shards: Shards,
            indices: BatchIndices,
            eta: float | Float32,
            best: Float32 | None = None,
            shift: Float32 | None = None,
        ) -> Descent:
            losses = self.losses(w, shards, indices)
            same = np.repeat(w, len(shards) // len(w), axis=0)
            return Descent(
                same, losses, np.zeros_like(same), None if best is None else losses
            )

        def accuracy(self, w: Float32, table: Table) -> float | None:
            return None

    catalogue.MODELS = {
        **catalogue.MODELS,
        "nothing": catalogue.ModelEntry(lambda dataset, *_: Nothing(dataset.features)),
    }


def main(role: str) -> None:
    _do_nothing()
    work = {"aggregator": _aggregate, "nodes": _attend}[role]
    for line in sys.stdin:
        work(json.loads(line))


if __name__ == "__main__":
    main(sys.argv[1])
