"""Benchmarks: `python -m benchmarks --help` lists them.

`make bench` runs all sections: speed, protocol overhead, growth, memory, start-up, networks
and Flower. Their results are written to benchmarks/results/w1.json. Other benchmarks have
options and output of their own.
"""

import json
import os
import platform
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numba
from rich.console import Console
from rich.table import Table

from benchmarks import (
    ablation,
    against,
    any_settings,
    budgets,
    calls,
    contenders,
    flower_simulation,
    forecasts,
    guard,
    memory,
    methods,
    network_step,
    networks,
    normalization,
    peers,
    privacy,
    rivals,
    rounds,
    scale,
    secure,
    slow_line,
    startup,
    unequal,
)
from benchmarks.measure import exponent, take_turns
from benchmarks.workload import FEATURES, NODES, SAMPLES, TAU, dataset, settings
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate
from fedbudget.settings.types import Tau

RESULTS = Path(__file__).parent / "results"
_ROUNDS = {False: {5: 1000, 50: 200, 500: 50}, True: {5: 20, 50: 50, 500: 50}}
"""Rounds of a run, with mini-batches and with whole shards, by number of nodes."""
_CONSOLE = Console()


def speed() -> list[dict[str, Any]]:
    """Measure node-steps per second of the three contenders.

    Rows cover mini-batches and whole shards, for 5, 50 and 500 nodes. A run lasts a second
    or more: its start and end are part of it, and take about a tenth of a second.
    """
    found = []
    for full in (False, True):
        for nodes in NODES:
            rounds = _ROUNDS[full][nodes]
            steps = nodes * TAU * rounds
            best = take_turns(
                {
                    "ours": contenders.ours(nodes, rounds, full=full),
                    "numpy": contenders.numpy_loop(nodes, rounds, full=full),
                    "bare": contenders.bare_kernel(nodes, rounds, full=full),
                },
                turns=3 if full else 9,
            )
            rates = {name: steps / seconds for name, seconds in best.items()}
            found.append(
                {
                    "batch": "full" if full else 100,
                    "nodes": nodes,
                    **{
                        f"{name}_node_steps_per_second": round(rate)
                        for name, rate in rates.items()
                    },
                    "ours_over_numpy": rates["ours"] / rates["numpy"],
                    "ours_over_bare": rates["ours"] / rates["bare"],
                }
            )
    return found


def adaptive_cost() -> dict[str, float]:
    """Measure the extra cost of adaptive τ in a round, for both methods.

    The unit is one evaluation of a mini-batch at every node. The paper needs one: the
    loss and gradient at w_i.
    """
    found = {}
    for nodes in NODES:
        rounds = max(10, 5000 // nodes)
        best = take_turns(
            {
                "fixed": contenders.ours(nodes, rounds),
                "adaptive": contenders.ours(nodes, rounds, tau="adaptive"),
                "frugal": contenders.ours(nodes, rounds, tau="adaptive", method="frugal"),
                "bare": contenders.bare_kernel(nodes, rounds),
            },
            turns=5,
        )
        evaluation = best["bare"] / (rounds * TAU)
        for label, name in (("", "adaptive"), ("frugal_", "frugal")):
            extra = (best[name] - best["fixed"]) / rounds / evaluation
            found[f"{label}extra_evaluations_per_round_{nodes}_nodes"] = extra
    return found


def protocol_cost() -> dict[str, float]:
    """Measure milliseconds per round outside the kernel, with 5 nodes.

    Covers fixed and adaptive τ; records are written to disk. A run of one round shows the
    cost of its start and end: evaluations on test samples, the first checkpoint, a summary.
    """
    once = take_turns({"run": contenders.ours(5, 1)}, turns=9)
    found = {"milliseconds_of_a_run_of_one_round": 1000 * once["run"]}
    taus: dict[str, Tau] = {"fixed": TAU, "adaptive": "adaptive"}
    for name, tau in taus.items():
        rounds, best = 1000, float("inf")
        for _ in range(9):
            plan = simulate(settings(5, rounds, tau=tau), Overrides(dataset=dataset()))
            inside = _Stopwatch(plan.model.descend)
            object.__setattr__(plan.model, "descend", inside)
            work = contenders.written(plan)
            began = time.perf_counter()
            work()
            best = min(best, (time.perf_counter() - began - inside.seconds) / rounds)
        found[f"{name}_milliseconds_per_round"] = 1000 * best
    return found


class _Stopwatch:
    """Accumulates the time spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.seconds = 0.0
        self._function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._function(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - began


def growth() -> dict[str, float]:
    """Fit k in time per round ~ size^k, for nodes, features and local updates.

    Each node has 120 samples, so that the shard size stays constant. With W1 itself,
    more nodes have smaller shards, which fit into the cores' caches, and time grows
    more slowly.
    """

    def seconds(
        nodes: int, tau: int = TAU, features: int = FEATURES, samples: int | None = None
    ) -> float:
        found = dataset(samples or 120 * nodes, features)
        rounds, best = max(5, 20_000 // (nodes * tau)), float("inf")
        for _ in range(5):
            plan = simulate(settings(nodes, rounds, tau=tau), Overrides(dataset=found))
            began = time.perf_counter()
            execute(plan)
            best = min(best, (time.perf_counter() - began) / rounds)
        return best

    nodes, taus, widths = [50, 100, 200, 500], [10, 20, 50, 100], [196, 392, 784, 1568]
    return {
        "nodes_50_to_500": exponent(nodes, [seconds(each) for each in nodes]),
        "nodes_50_to_500_sharing_60000_samples": exponent(
            nodes, [seconds(n, samples=SAMPLES) for n in nodes]
        ),
        "tau_10_to_100": exponent(taus, [seconds(50, tau) for tau in taus]),
        "features_196_to_1568": exponent(
            widths, [seconds(50, features=width) for width in widths]
        ),
    }


class Section(NamedTuple):
    """A measurement whose results are in benchmarks/results/w1.json.

    Args:
      title: what it measures.
      measure: returns the results.
    """

    title: str
    measure: Callable[[], Any]


SECTIONS: Mapping[str, Section] = {
    "speed": Section("node-steps per second, beside numpy and the bare kernel", speed),
    "protocol": Section("time of a round outside the kernel", protocol_cost),
    "adaptive": Section("additional cost of adaptive τ", adaptive_cost),
    "growth": Section("growth of a round's time with nodes, τ and features", growth),
    "memory_megabytes": Section(
        "peak memory of simulations",
        lambda: {
            f"{nodes} nodes, case {case}": memory.peak_megabytes(nodes, case)
            for nodes, case in ((5, 1), (50, 1), (500, 1), (500, 3))
        },
    ),
    "startup": Section("first round relative to imports", lambda: _startup()),
    "network": Section(
        "PyTorch models: overhead, and batched nodes",
        lambda: {**networks.network_speed(), **networks.batching()},
    ),
    "network_step": Section("a step of the paper's network", network_step.network_step),
    "rounds": Section("rounds over gRPC, beside a bare echo", rounds.round_trips),
    "large": Section("memory of an aggregator of large models", rounds.aggregator_memory),
    "secure": Section("masked rounds beside plain ones", secure.compare_plain),
    "simulation": Section(
        "W1 beside Flower's simulation", flower_simulation.compare_flower
    ),
    "scale": Section("a large simulated fleet, in process and on Ray", scale.large_fleet),
}


class Benchmark(NamedTuple):
    """A benchmark with its own options and output.

    Args:
      title: what it compares.
      run: called with the options.
    """

    title: str
    run: Callable[[Sequence[str]], None]


BENCHMARKS: Mapping[str, Benchmark] = {
    "guard": Benchmark(
        "ratios to the bare kernel and to a bare echo, in seconds", guard.main
    ),
    "calls": Benchmark("calls of Python functions in a round", calls.main),
    "against": Benchmark("this checkout and another one, side by side", against.main),
    "ablation": Benchmark("the default method without one of its parts", ablation.main),
    "budgets": Benchmark("overshoot and rest of budgets in random runs", budgets.main),
    "forecasts": Benchmark("coverage and error of forecasts", forecasts.main),
    "methods": Benchmark("the paper's method and frugal in many tasks", methods.main),
    "normalization": Benchmark("batch and group normalization", normalization.main),
    "peers": Benchmark("simulations of several frameworks", peers.main),
    "privacy": Benchmark("accuracy of private runs", privacy.main),
    "rivals": Benchmark("the default against methods tuned in hindsight", rivals.main),
    "settings": Benchmark("the default method with random settings", any_settings.main),
    "slow-line": Benchmark("compression on slow and fast lines", slow_line.main),
    "unequal": Benchmark("workload by node speed", unequal.main),
}


def main(asked: Sequence[str]) -> None:
    """Measure all sections, or only the named ones; keep the other results."""
    path = RESULTS / "w1.json"
    found: dict[str, Any] = json.loads(path.read_text()) if asked and path.exists() else {}
    found |= {
        "cores": os.cpu_count(),
        "threads": numba.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }
    for name in asked or SECTIONS:
        with _CONSOLE.status(f"measuring {name}"):
            found[name] = SECTIONS[name].measure()
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    _print(found)


def _startup() -> dict[str, float]:
    startup.first_round_seconds()  # fills the kernel cache
    imports = min(startup.import_seconds() for _ in range(5))
    first = min(startup.first_round_seconds() for _ in range(5))
    return {
        "import_seconds": imports,
        "first_round_seconds": first,
        "ratio": first / imports,
    }


def _print(found: dict[str, Any]) -> None:
    table = Table(
        title=f"W1 on {found['cores']} cores: node-steps per second",
        title_justify="left",
        box=None,
    )
    for heading in (
        "batch",
        "nodes",
        "numpy loop",
        "fedbudget",
        "bare kernel",
        "over numpy",
        "of bare",
    ):
        table.add_column(heading, justify="right")
    for row in found.get("speed", ()):
        rates = [
            f"{row[f'{name}_node_steps_per_second']:,}"
            for name in ("numpy", "ours", "bare")
        ]
        ratios = f"{row['ours_over_numpy']:.1f}x", f"{row['ours_over_bare']:.2f}"
        table.add_row(str(row["batch"]), str(row["nodes"]), *rates, *ratios)
    _CONSOLE.print(table)
    if "rounds" in found:
        _print_rounds(found["rounds"])
    if "simulation" in found:
        _CONSOLE.print(
            f"simulation: {_simulation_line(found['simulation'])}",
            highlight=False,
            markup=False,
        )
    for section in [
        name
        for name in SECTIONS
        if name in found and name not in ("speed", "rounds", "simulation")
    ]:
        for name, value in found[section].items():
            _CONSOLE.print(
                f"{section}: {name.replace('_', ' ')}: {value:.3g}", highlight=False
            )


def _print_rounds(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title="Rounds over a network: milliseconds beyond local work",
        title_justify="left",
        box=None,
    )
    for heading in (
        "nodes",
        "d",
        "method",
        "tau",
        "TLS",
        "fedbudget",
        "saving",
        "bare echo",
        "of bare",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        what = [str(row[name]) for name in ("nodes", "parameters", "method", "tau")]
        taken = [
            f"{row[f'{name}_milliseconds']:.1f}" for name in ("ours", "saving", "bare")
        ]
        table.add_row(
            *what, "yes" if row["tls"] else "no", *taken, f"{row['ours_over_bare']:.2f}"
        )
    _CONSOLE.print(table)
    for row in rows:
        if "flower" in row:
            _CONSOLE.print(f"rounds: {_flower_line(row)}", highlight=False, markup=False)


def _flower_line(row: dict[str, Any]) -> str:
    if "flower_milliseconds" not in row:
        return f"{row['flower']}; Flower's rounds were not measured"
    return (
        f"{row['flower']}, deployed, {row['nodes']} nodes, d={row['parameters']}:"
        f" {row['flower_milliseconds']:.0f} ms per round,"
        f" {row['flower_over_whole']:.0f} times fedbudget's"
        f" {row['whole_milliseconds']:.1f} ms"
    )


def _simulation_line(row: dict[str, Any]) -> str:
    ours = f"W1 with {row['nodes']} nodes: {row['ours_milliseconds']:.2f} ms per round"
    if "flower_milliseconds" not in row:
        return f"{ours}; {row['flower']}; Flower's rounds were not measured"
    return (
        f"{ours}; {row['flower']}, simulated: {row['flower_milliseconds']:.0f} ms,"
        f" {row['flower_over_ours']:.0f} times that"
    )


def _parser() -> ArgumentParser:
    lines = [
        "sections (all by default; results are written to benchmarks/results/w1.json):"
    ]
    lines += [f"  {name:<17} {each.title}" for name, each in SECTIONS.items()]
    lines += ["", "benchmarks with own options (`python -m benchmarks NAME --help`):"]
    lines += [f"  {name:<17} {each.title}" for name, each in BENCHMARKS.items()]
    parser = ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [SECTION ...]\n       %(prog)s BENCHMARK [options]",
        description="\n".join(lines),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help="sections to measure"
    )
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in BENCHMARKS:
        BENCHMARKS[sys.argv[1]].run(sys.argv[2:])
    else:
        parser = _parser()
        asked = parser.parse_args().sections
        if unknown := sorted({*asked} - SECTIONS.keys()):
            parser.error(f"unknown: {', '.join(unknown)}; `--help` lists all names")
        main(asked)
