"""Time of `fedbudget run` to its first round, compared with importing its libraries."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path


def import_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy, numba, sklearn"], check=True)
    return time.perf_counter() - began


def first_round_seconds() -> float:
    """Measure from the start of the process to the line of its first round."""
    command = [
        str(Path(sys.executable).with_name("fedbudget")),
        "run",
        "--dataset",
        "digits",
    ]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--out", f"{folder}/run"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.split()[:1] == ["1"]:
                seconds = time.perf_counter() - began
                break
        else:
            raise RuntimeError("fedbudget run showed no round")
        process.communicate()
    return seconds
