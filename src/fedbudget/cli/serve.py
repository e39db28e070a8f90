"""`fedbudget serve`."""

from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import RESUME, Given, OutputOptions, settings_from
from fedbudget.launch.options import ListenOptions, LogOptions, NodeOptions, SecurityOptions, require_network
from fedbudget.option import option


@command
def serve(
    *,
    given: Given,
    listen: ListenOptions,
    resume: Path | None = RESUME,
    test: str | None = option(
        None,
        "What to test on: a dataset's name, a .csv, a .npz, or a Python file and a name in it.",
        "data",
        shown="nothing",
    ),
    security: SecurityOptions,
    node: NodeOptions,
    output: OutputOptions,
    logs: LogOptions,
) -> None:
    """Be the aggregator: wait for nodes, and train with them.

    Nodes come with fedbudget join. They bring their own data, which stays with them; all else is set here. After every
    round everything is on disk: after a crash, or with more budget, --resume goes on from there. Who came, left or was
    turned away, and why, is in the run's audit.jsonl. Tokens for nodes are made by fedbudget tokens.

    Examples:

      fedbudget serve --nodes 5 --model softmax --budget time=10min --budget bytes=200MB

      fedbudget serve --model net.py:Net --nodes 3 --budget time=1h

      fedbudget serve 0.0.0.0:7700 --cert certs/aggregator.pem --key certs/aggregator.key --token-file token

      fedbudget serve --data hospital.csv --target outcome --min-nodes 3 --round-timeout 30

      fedbudget serve 0.0.0.0:7700 --cert a.pem --key a.key --token-file tokens --allow edge-1,edge-2 --combine trimmed

      fedbudget serve --nodes 100 --secure-aggregation --budget time=1h --budget privacy=4

      fedbudget serve --nodes 5 --privacy-unit sample --budget time=1h --budget privacy=4

      fedbudget serve --resume runs/NAME

      fedbudget serve --resume runs/NAME --budget time=+1h
    """
    from fedbudget.cli.network import node_data
    from fedbudget.cli.resume import resumed_from

    require_network()
    if resume is not None:
        settings, checkpoint = resumed_from(given, "serve")
    else:  # the dataset, and how it is spread, are of the node's data here
        settings, checkpoint = settings_from(given, "serve", dataset=None, partition=None, case=None), None

    from fedbudget.cli.view import make_run, print_result
    from fedbudget.engines.interrupt import interruptible
    from fedbudget.launch.node_data import dataset_to_test_on
    from fedbudget.launch.serve import Interrupted, serving
    from fedbudget.launch.waiting import waiting
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    own = node_data(given, settings.seed)
    tested = None if test is None else dataset_to_test_on(test, settings)
    wanted = settings.nodes or settings.min_nodes or 1
    waits_for = waiting(wanted, quiet=output.json, any_port=listen.address.endswith(":0"), logs=logs)
    with waits_for as waits, interruptible(waits.wake) as asked:
        serve_run = serving(
            settings,
            listen,
            security,
            interrupted=asked,
            own=own,
            energy_meter=node.energy_meter,
            test=tested,
            resumed=checkpoint,
            opened=waits.opened,
            changed=waits.changed,
        )
        try:
            with serve_run as prepared:
                waits.over = True
                result = make_run(prepared, output, trackers, folder=resume)
        except Interrupted:
            raise KeyboardInterrupt from None
    print_result(result, json=output.json)
