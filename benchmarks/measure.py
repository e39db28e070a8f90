"""Timing: contenders take turns in one process, and the best of several turns counts.

Turns alternate, so that a busy machine slows all contenders. The best turn is the least
disturbed one.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.contenders import Worker


def take_turns(
    contenders: Mapping[str, Callable[[], Worker]],
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the shortest time of each, in seconds."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(turns):
        for name, ready in contenders.items():
            work = ready()
            began = clock()
            work()
            best[name] = min(best[name], clock() - began)
    return best


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Fit k in seconds ~ sizes^k, by least squares on logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
