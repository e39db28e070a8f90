"""A local Ray cluster is closed to other users and other machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts a cluster

TRIED = 40  # seconds; without a token Ray goes on trying, and with one it takes a few

CLUSTER = """
import os
import sys
from fedbudget.engines.ray import cluster
with cluster(None):
    import ray
    print(os.getpgid(0), ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.readline()
"""
ATTACK = """
import sys
import ray
ray.init(address=sys.argv[1], logging_level="ERROR")
print(ray.get(ray.remote(lambda: "attacked").remote()))
"""


def listening(group: int) -> set[str]:
    """Local addresses of the listening TCP sockets of a group of processes, in hex."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()
            if int(state[2]) == group:
                sockets |= {str(each.readlink()) for each in (process / "fd").iterdir()}
        except OSError:
            continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def test_cluster_is_closed_to_others() -> None:
    """It listens on loopback only, and runs nothing for a process without its token."""
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert cluster.stdout is not None
        group, address = cluster.stdout.readline().split()
        addresses = listening(int(group))
        assert addresses
        loopback = {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}
        assert addresses <= loopback
        others = {name: os.environ[name] for name in os.environ if "RAY" not in name}
        try:
            printed = subprocess.run(
                [sys.executable, "-c", ATTACK, address],
                capture_output=True,
                text=True,
                check=False,
                timeout=TRIED,
                env=others,
            ).stdout
        except subprocess.TimeoutExpired as error:
            printed = str(error.stdout or "")
        assert "attacked" not in printed
    finally:
        cluster.communicate("end\n")
