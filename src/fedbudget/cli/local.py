"""`fedbudget local`."""

from fedbudget.cli.command import command
from fedbudget.cli.options import OutputOptions
from fedbudget.launch.options import NodeOptions, require_network
from fedbudget.option import option
from fedbudget.settings import Settings


@command
def local(
    *,
    settings: Settings,
    pace: tuple[float, ...] | None = option(
        None, "How many times as slow as it could each node is: 1,1,4,4,4.", "network", shown="1 for all"
    ),
    delay: float = option(
        0.0, "Seconds that a message between node and aggregator takes longer than it does, each way.", "network"
    ),
    node: NodeOptions,
    output: OutputOptions,
) -> None:
    """Try it on this machine: an aggregator and node processes.

    Each is a process of its own, and they talk over a real network stack.

    Examples:

      fedbudget local --nodes 5 --case 2 --budget time=15s

      fedbudget local --pace 1,1,4,4,4 --budget time=30s --budget bytes=20MB

      fedbudget local --pace 25,25,100,100,100 --delay 0.065 --dataset mnist --budget time=30s

      fedbudget local --nodes 5 --secure-aggregation --budget time=15s --budget privacy=8

      fedbudget local --tau 10 --rounds 20 --costs simulated --json
    """
    require_network()

    from fedbudget.cli.view import make_run, preparing, print_result
    from fedbudget.launch.local import on_this_machine
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    with preparing(on_this_machine(settings, paces=pace, delay=delay, energy_meter=node.energy_meter)) as prepared:
        result = make_run(prepared, output, trackers)
    print_result(result, json=output.json)
