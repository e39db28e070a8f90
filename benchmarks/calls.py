"""`python -m benchmarks calls`: Python function calls of fedbudget in a round.

Counts the calls of functions in src/fedbudget, and the files that contain these functions.
Softmax regression on digits, the default method, mini-batches of 100, run folder on disk:

    in process    fedbudget.train with all nodes
    aggregator    fedbudget.serve in a process of its own, over gRPC on loopback
    node          fedbudget.join in a process of its own, for each node

A profile function (`sys.setprofile`) in every thread notes each call. A round lasts from
one callback to the next, at a node from one `Worker.answer` to the next. Work of other
threads, such as checkpoints, counts in the round in which it happens. Not counted:
comprehensions, which newer versions of Python inline; the continuation of a coroutine or
generator; methods that `dataclass` generates; and all other packages. The profile function
slows rounds down, so the benchmark measures no time.
"""

import inspect
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import fedbudget

WARM_UP = 20  # rounds that are not counted
LAST = 2  # rounds at the end that are not counted: they use up the run
PACKAGE = str(Path(fedbudget.__file__).parent) + "/"
_NODE_ROUND = "engines/remote/worker.py: Worker.answer"
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NOT_FUNCTIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")
_CONSOLE = Console(width=120)


@dataclass(frozen=True)
class Counts:
    """Calls of one process.

    Args:
      calls: number of calls in each counted round.
      files: number of files with a called function, in each counted round.
      functions: calls of each function per round, on average.
    """

    calls: list[int]
    files: list[int]
    functions: dict[str, float]


def main(arguments: Sequence[str]) -> None:
    """Count and print; options as on the command line."""
    parser = ArgumentParser(prog="python -m benchmarks calls")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100, help="counted rounds")
    parser.add_argument("--top", type=int, default=15, help="functions to list")
    given = parser.parse_args(arguments)
    counts = count_calls(given.nodes, given.rounds)
    _print(counts, given.nodes, given.rounds, given.top)


def count_calls(nodes: int, rounds: int) -> dict[str, Counts]:
    """Count the calls of both settings.

    Args:
      nodes: number of nodes.
      rounds: number of counted rounds.

    Returns:
      The counts "in process", of the "aggregator", and of a "node": the rounds of all
      nodes together.
    """
    total = WARM_UP + rounds + LAST
    shared = {"nodes": nodes, "rounds": total}
    in_process = _result_of(_start({"role": "in process", **shared}))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # free once it is closed
    aggregator = _start({"role": "aggregator", "port": port, **shared})
    joined = [
        _start({"role": "node", "port": port, "number": number, **shared})
        for number in range(nodes)
    ]
    return {
        "in process": in_process,
        "aggregator": _result_of(aggregator),
        "node": _pooled([_result_of(each) for each in joined]),
    }


def _pooled(counts: Sequence[Counts]) -> Counts:
    """Return the rounds of several nodes as one list."""
    names = {name for each in counts for name in each.functions}
    return Counts(
        [calls for each in counts for calls in each.calls],
        [files for each in counts for files in each.files],
        {
            name: statistics.fmean(each.functions.get(name, 0.0) for each in counts)
            for name in names
        },
    )


def _start(task: dict[str, Any]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.calls", json.dumps(task)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _result_of(process: "subprocess.Popen[str]") -> Counts:
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a process of the benchmark failed: {process.args!r}")
    return Counts(**json.loads(printed.splitlines()[-1]))


def _print(counts: dict[str, Counts], nodes: int, rounds: int, top: int) -> None:
    title = f"Calls of fedbudget's functions per round, {nodes} nodes"
    _CONSOLE.print(f"{title}, median of {rounds} rounds", highlight=False)
    table = Table(box=None)
    for heading in ("process", "calls", "smallest", "largest", "files", "functions"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for name, each in counts.items():
        numbers = [
            f"{statistics.median(each.calls):.0f}",
            str(min(each.calls)),
            str(max(each.calls)),
            f"{statistics.median(each.files):.0f}",
            str(len(each.functions)),
        ]
        table.add_row(name, *numbers)
    _CONSOLE.print(table)
    for name, each in counts.items():
        frequent = Table(title=f"\n{name}", title_justify="left", box=None)
        frequent.add_column("calls per round", justify="right")
        frequent.add_column("function")
        ranked = sorted(each.functions.items(), key=lambda item: (-item[1], item[0]))
        for function, number in ranked[:top]:
            frequent.add_row(f"{number:.1f}", function)
        _CONSOLE.print(frequent)


# Code of the child processes.


class CallLog:
    """Calls of fedbudget's functions in all threads, in order, with marks between rounds.

    One list for all threads: `append` is atomic, a counter is not.
    """

    def __init__(self) -> None:
        self._events: list[CodeType | None] = []

    def start(self) -> None:
        """Note the calls of this thread, and of all threads that start later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def mark(self) -> None:
        """Note the end of a round."""
        self._events.append(None)

    def counts(self, mark: str | None = None) -> Counts:
        """Count the calls between marks, without warm-up and end.

        Args:
          mark: function whose call begins a round; the calls of `mark` by default.
        """
        rounds: list[Counter[str]] = [Counter()]
        for code in self._events:
            name = None if code is None else function_name(code)
            if name == mark:
                rounds.append(Counter())
            if name is not None:
                rounds[-1][name] += 1
        counted = rounds[1 + WARM_UP : -1 - LAST]
        if not counted:
            raise RuntimeError(
                f"only {len(rounds)} rounds, marked by {mark or 'callbacks'}"
            )
        total = sum(counted, Counter[str]())
        return Counts(
            [each.total() for each in counted],
            [len({name.split(":")[0] for name in each}) for each in counted],
            {name: number / len(counted) for name, number in total.items()},
        )

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in _NOT_FUNCTIONS:
            return
        if code.co_flags & _RESUMABLE and _continues(frame):
            return
        self._events.append(code)


def function_name(code: CodeType) -> str:
    """Return file and name of a function, such as `api.py: train`."""
    return f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}"


def _continues(frame: FrameType) -> bool:
    """Whether a generator or coroutine resumes: RESUME has the argument 0 at its start."""
    return bool(frame.f_code.co_code[frame.f_lasti + 1] & 3)


def _measure(task: dict[str, Any]) -> Counts:
    log = CallLog()
    if task["role"] == "node":
        x, y = _digits(task["nodes"])[task["number"]]
        log.start()
        fedbudget.join(
            f"127.0.0.1:{task['port']}",
            data=(x, y),
            name=f"node-{task['number']}",
            quiet=True,
        )
        log.stop()
        return log.counts(_NODE_ROUND)

    given: Any = {
        "model": "softmax",
        "nodes": task["nodes"],
        "batch_size": 100,
        "budget": "time=1000h",
        "rounds": task["rounds"],
        "callbacks": [lambda record: log.mark()],
    }
    log.start()
    with tempfile.TemporaryDirectory() as folder:
        given["out"] = Path(folder) / "run"
        if task["role"] == "aggregator":
            fedbudget.serve(f"127.0.0.1:{task['port']}", quiet=True, **given)
        else:
            fedbudget.train(dataset="digits", **given)
        log.stop()
    return log.counts()


def _digits(nodes: int) -> list[tuple[Any, Any]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = x / 16  # as in the bundled digits
    return [(x[part], y[part]) for part in np.array_split(np.arange(len(y)), nodes)]


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(json.loads(sys.argv[1])))))
