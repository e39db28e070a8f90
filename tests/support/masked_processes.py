"""Node processes of secure aggregation that are killed during a round."""

import sys

from support.processes import Command, Commands

_KILLED = """
import os, sys
from fedbudget.cli.main import main
from fedbudget.engines.grpc.masking_node import NodeMasking

what, when, answer, rounds = sys.argv[1], int(sys.argv[2]), NodeMasking.answer, []

def killed(self, message):
    rounds.append(type(message).__name__)
    if rounds.count(what) == when:
        os.kill(os.getpid(), 9)
    return answer(self, message)

NodeMasking.answer = killed
main(sys.argv[3:])
"""


def join_killed_at(start: Commands, port: int, node: int, what: str, when: int) -> Command:
    """Start a node that kills itself at the `when`-th message of type `what`."""
    program = [sys.executable, "-c", _KILLED, what, str(when)]
    own = ["--data", f"n{node}.npz", "--name", f"n{node}", "--secure-aggregation"]
    own += ["--secure-threshold", "0.51", "--seeded-batches"]
    return start.run("join", f"127.0.0.1:{port}", *own, program=program)
