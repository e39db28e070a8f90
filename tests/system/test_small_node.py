"""A node with only the packages of `fedbudget[node]` takes part with little memory."""

import sys
from pathlib import Path

from support.hidden import HEAVY, without_packages
from support.processes import cli_options, commands

MEGABYTES = 90

_JOIN = f"""
import atexit, re
from pathlib import Path

def report():
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak[1]) / 1024, *[name for name in {HEAVY} if name in sys.modules])

atexit.register(report)
from fedbudget.cli.main import main
main(sys.argv[1:])
"""


def test_small_node_trains_softmax(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        aggregator = start.serve(
            *cli_options(
                nodes=2, model="softmax", rounds=20, costs="simulated", budget="time=1h"
            ),
        )
        program = [sys.executable, "-c", without_packages(_JOIN)]
        shards = [["--dataset", "digits", "--shard", f"{node}/2"] for node in (1, 2)]
        nodes = [
            start.run("join", f"127.0.0.1:{aggregator.port}", *shard, program=program)
            for shard in shards
        ]
        assert [each.end() for each in (aggregator, *nodes)] == [0, 0, 0]
        for node in nodes:
            peak, *heavy = node.printed.split()
            assert not heavy
            assert float(peak) < MEGABYTES
