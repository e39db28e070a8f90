"""Peak memory of a run of W1: `python -m benchmarks.memory NODES CASE`."""

import re
import subprocess
import sys
from pathlib import Path


def peak_megabytes(nodes: int, case: int) -> float:
    """Measure in a new process, including Python and all libraries."""
    command = [sys.executable, "-m", "benchmarks.memory", str(nodes), str(case)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def process_peak(process: int | str = "self") -> float:
    """Return the peak memory of a process in megabytes.

    getrusage would include the peak of the parent process.
    """
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert peak is not None
    return int(peak[1]) / 1024


def _measure(nodes: int, case: int) -> float:
    from benchmarks.workload import dataset, settings
    from fedbudget.launch.execute import execute
    from fedbudget.launch.prepared import Overrides
    from fedbudget.launch.simulate import simulate

    execute(simulate(settings(nodes, 3, case=case), Overrides(dataset=dataset())))
    return process_peak()


if __name__ == "__main__":
    print(_measure(int(sys.argv[1]), int(sys.argv[2])))
