"""Cost of secure aggregation: masked and plain rounds over a network on one machine.

As in rounds.py, there are an aggregator and two processes that share the nodes, with a
model that computes nothing. All nodes mask on the same few cores, while real nodes have
their own machines. With many nodes, the time is that of one machine for all of them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.rounds import Case, _processes, _turn

TURNS = 2  # of each contender
WARMING_UP = 2  # rounds at the start of a turn that are not measured

CASES = tuple(
    Case(nodes, parameters, rounds, "accelerated", "adaptive")
    for nodes, parameters, rounds in (
        (5, 784, 60),
        (50, 784, 20),
        (5, 1_000_000, 10),
        (50, 1_000_000, 5),
    )
)


def compare_plain(cases: Sequence[Case] = CASES) -> dict[str, float]:
    """Measure milliseconds of whole rounds, plain and masked, and their ratio."""
    found: dict[str, float] = {}
    with _processes() as processes:
        for case in cases:
            taken: dict[str, list[float]] = {"plain": [], "masked": []}
            for _ in range(TURNS):
                for name, seconds in taken.items():
                    turn = _turn(
                        "ours", replace(case, masked=name == "masked"), None, processes
                    )
                    seconds += turn["whole"][WARMING_UP:]
            milliseconds = {
                name: 1000 * statistics.median(seconds) for name, seconds in taken.items()
            }
            size = f"{case.nodes} nodes of {case.parameters:,} parameters"
            found |= {
                f"milliseconds {name}, {size}": value
                for name, value in milliseconds.items()
            }
            found[f"times as long, {size}"] = milliseconds["masked"] / milliseconds["plain"]
    return found
