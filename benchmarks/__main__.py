"""Benchmarks that `make bench` runs.

They measure speed, protocol overhead, growth, memory, start-up, networks and Flower,
and write the results to benchmarks/results/w1.json.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
_CONSOLE = Console()


def speed() -> list[dict[str, Any]]:
    """Measure node-steps per second of the three contenders.

    Rows cover mini-batches and whole shards, for 5, 50 and 500 nodes.
    """
    found = []
    for full in (False, True):
        for nodes in NODES:
            rounds = 2 if full else max(10, 5000 // nodes)
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

    Covers fixed and adaptive τ; records are written to disk.
    """
    found = {}
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


SECTIONS: Mapping[str, Callable[[], Any]] = {
    "speed": speed,
    "protocol": protocol_cost,
    "adaptive": adaptive_cost,
    "growth": growth,
    "memory_megabytes": lambda: {
        f"{nodes} nodes, case {case}": memory.peak_megabytes(nodes, case)
        for nodes, case in ((5, 1), (50, 1), (500, 1), (500, 3))
    },
    "startup": lambda: _startup(),
    "network": lambda: {**networks.network_speed(), **networks.batching()},
    "network_step": network_step.network_step,
    "rounds": rounds.round_trips,
    "large": rounds.aggregator_memory,
    "secure": secure.compare_plain,
    "simulation": flower_simulation.compare_flower,
    "scale": scale.large_fleet,
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
            found[name] = SECTIONS[name]()
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
    for row in found["speed"]:
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


if __name__ == "__main__":
    runs = {
        "against": against.main,
        "budgets": budgets.main,
        "calls": calls.main,
        "forecasts": forecasts.main,
        "methods": methods.main,
        "rivals": rivals.main,
        "settings": any_settings.main,
        "ablation": ablation.main,
        "privacy": privacy.main,
        "normalization": normalization.main,
        "peers": peers.main,
        "unequal": unequal.main,
        "slow-line": slow_line.main,
    }  # benchmarks with their own options
    if sys.argv[1:2] and sys.argv[1] in runs:
        runs[sys.argv[1]](sys.argv[2:])
    elif unknown := [name for name in sys.argv[1:] if name not in SECTIONS]:
        print(f"usage: python -m benchmarks [{' '.join(SECTIONS)}]")
        print(f"   or: python -m benchmarks {{{','.join(runs)}}} [options]")
        sys.exit(0 if unknown == ["--help"] else 2)
    else:
        main(sys.argv[1:])
