"""A large simulated fleet, in process and on Ray, each in a new process.

Each node draws 30 of W1's samples, for 20 rounds of τ=10 with mini-batches of 10. The
measured time covers everything from settings to the outcome. Ray's start-up time is
measured with a fleet a hundred times smaller.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.memory import process_peak

NODES, FEW, ROUNDS, DRAWN, BATCH = 100_000, 1_000, 20, 30, 10


def large_fleet() -> dict[str, float]:
    """Measure seconds and megabytes; engines take turns, the faster of two counts."""
    _child("in-process", FEW)  # fills the kernel cache
    turns = [
        (_child("in-process", NODES), _child("ray", NODES), _child("ray", FEW))
        for _ in range(2)
    ]
    here, there, few = (
        min(found, key=lambda one: one["whole"]) for found in zip(*turns, strict=True)
    )
    if here["w"] != there["w"]:
        raise AssertionError("Ray's w differs from the w of the in-process engine")
    return {
        "nodes": NODES,
        "in_process_seconds": here["whole"],
        "in_process_seconds_a_round": here["rounds"] / ROUNDS,
        "ray_seconds": there["whole"],
        "ray_seconds_a_round": there["rounds"] / ROUNDS,
        "ray_seconds_to_start": few["start"],
        "ray_without_start_over_in_process": (there["whole"] - few["start"])
        / here["whole"],
        "in_process_megabytes": here["megabytes"],
        "ray_aggregator_megabytes": there["megabytes"],
        f"ray_aggregator_megabytes_with_{FEW}_nodes": few["megabytes"],
    }


def _child(engine: str, nodes: int) -> dict[str, Any]:
    """Measure in a new process."""
    command = [sys.executable, "-m", "benchmarks.scale", engine, str(nodes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(engine: str, nodes: int) -> dict[str, Any]:
    from benchmarks.workload import dataset, settings
    from fedbudget.launch.execute import execute
    from fedbudget.launch.prepared import Overrides
    from fedbudget.launch.simulate import launch
    from fedbudget.settings.types import EngineName

    name: EngineName = "ray" if engine == "ray" else "in-process"
    asked = replace(settings(nodes, ROUNDS), partition=f"draw:{DRAWN}", batch_size=BATCH)
    samples = dataset()
    began = time.perf_counter()
    with launch(asked, Overrides(dataset=samples), engine=name) as prepared:
        ready = time.perf_counter()
        result = execute(prepared)
        ended = time.perf_counter()
    return {
        "whole": ended - began,
        "start": ready - began,
        "rounds": ended - ready,
        "megabytes": process_peak(),
        "w": result.w.tobytes().hex(),
    }


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
