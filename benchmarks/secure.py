"""Rounds with masked sums beside plain ones, over a network on one machine: what secure aggregation costs.

As in rounds.py, an aggregator and two processes that share the nodes, with a model that does nothing. All nodes mask on
the same few cores, where each would have a machine of its own: with many nodes this is what the machine takes for all.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.rounds import Case, _processes, _turn

TURNS, WARMING_UP = (
    2,
    2,
)  # of each contender, and the rounds at the beginning of a turn that do not count

CASES = tuple(
    Case(nodes, parameters, rounds, "accelerated", "adaptive")
    for nodes, parameters, rounds in (
        (5, 784, 60),
        (50, 784, 20),
        (5, 1_000_000, 10),
        (50, 1_000_000, 5),
    )
)


def beside_plain(cases: Sequence[Case] = CASES) -> dict[str, float]:
    """Milliseconds of whole rounds, plain and masked, and how many times as long masked ones take."""
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
            where = f"{case.nodes} nodes of {case.parameters:,} parameters"
            found |= {
                f"milliseconds {name}, {where}": value
                for name, value in milliseconds.items()
            }
            found[f"times as long, {where}"] = (
                milliseconds["masked"] / milliseconds["plain"]
            )
    return found
