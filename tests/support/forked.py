"""Commands of fedbudget in processes that start quickly.

A server process has imported everything, and each command is a fork of it.
"""

import contextlib
import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

_PRELOADED = [
    *("fedbudget.cli.main", "fedbudget.cli.nodes", "fedbudget.launch.serve"),
    *("fedbudget.launch.join", "fedbudget.engines.grpc.server", "fedbudget.runs.plot"),
    *("fedbudget.engines.grpc.node", "fedbudget.models.compiled.rows", "support.forked"),
]


def fork(folder: Path, log: str, *arguments: str) -> BaseProcess:
    """Start a command.

    Args:
      folder: working directory.
      log: name of the file for its output in this folder.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_execute, args=(folder, log, arguments), daemon=True)
    process.start()
    return process


def _execute(folder: Path, log: str, arguments: tuple[str, ...]) -> None:
    from fedbudget.cli.main import main

    os.chdir(folder)
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code: object = 0
    try:
        main(list(arguments))
    except SystemExit as ended:
        code = ended.code
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    sys.exit(code if isinstance(code, int) else 0)
