"""`fedbudget local`."""

import json
from contextlib import ExitStack

from fedbudget.cli.command import command
from fedbudget.cli.options import LocalOptions, NodeOptions, OutputOptions
from fedbudget.settings import Settings


@command
def local(settings: Settings, processes: LocalOptions, node: NodeOptions, output: OutputOptions) -> None:
    """Try it on this machine: an aggregator and node processes.

    Each is a process of its own, and they talk over a real network stack.

    Examples:

      fedbudget local --nodes 5 --case 2 --budget time=15s

      fedbudget local --pace 1,1,4,4,4 --budget time=30s --budget bytes=20MB

      fedbudget local --tau 10 --rounds 20 --costs simulated --json
    """
    from fedbudget.cli.network import require_network

    require_network()

    from fedbudget.cli.dashboard import beside
    from fedbudget.cli.view import preparing, print_result, watching
    from fedbudget.launch.local import on_this_machine
    from fedbudget.trackers import make_trackers
    from fedbudget.training import default_folder, execute

    trackers = make_trackers(output.track)
    with ExitStack() as stack:
        with preparing():
            started = on_this_machine(settings, paces=processes.pace, energy_meter=node.energy_meter)
            prepared = stack.enter_context(started)
        folder = output.out or default_folder(prepared.settings)
        stack.enter_context(beside(folder, wanted=output.dashboard))
        callbacks = stack.enter_context(watching(prepared, quiet=output.json))
        result = execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)
    if output.json:
        print(json.dumps(result.to_json()))
        return
    print_result(result)
