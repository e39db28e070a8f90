"""Nodes of masked sums, as processes that are killed in the middle of a round."""

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


def killed_at(start: Commands, port: int, node: int, what: str, when: int) -> Command:
    """A node that is killed when it gets a message for the so many-th time."""
    program = [sys.executable, "-c", _KILLED, what, str(when)]
    own = ["--data", f"n{node}.npz", "--name", f"n{node}", "--secure-aggregation"]
    return start.run("join", f"127.0.0.1:{port}", *own, program=program)
