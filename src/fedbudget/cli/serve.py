"""`fedbudget serve`."""

import json

from fedbudget.cli.command import command
from fedbudget.cli.options import Given, NodeOptions, OutputOptions, SecurityOptions, ServeOptions, settings_from


@command
def serve(
    given: Given, server: ServeOptions, security: SecurityOptions, node: NodeOptions, output: OutputOptions
) -> None:
    """Be the aggregator: wait for nodes, and train with them.

    Nodes come with fedbudget join. They bring their own data, which stays with them; all else is set here. After every
    round everything is on disk: after a crash, --resume goes on from there.

    Examples:

      fedbudget serve --nodes 5 --model softmax --budget time=10min --budget bytes=200MB

      fedbudget serve 0.0.0.0:7700 --cert certs/aggregator.pem --key certs/aggregator.key --token-file token

      fedbudget serve --data hospital.csv --target outcome --min-nodes 3 --round-timeout 30

      fedbudget serve --resume runs/NAME
    """
    from fedbudget.cli.network import own_node_data, require_network, resumed_from, waiting

    require_network()
    if server.resume is not None:
        settings, checkpoint = resumed_from(given)
    else:  # the dataset, and how it is spread, are of the node's data here
        settings, checkpoint = settings_from(given, "serve", dataset=None, partition=None, case=None), None

    from fedbudget.cli.dashboard import beside
    from fedbudget.cli.view import print_result, watching
    from fedbudget.engines.interrupt import interruptible
    from fedbudget.launch.node_data import dataset_to_test_on
    from fedbudget.launch.serve import Interrupted, ServerOptions, serving
    from fedbudget.trackers import make_trackers
    from fedbudget.training import default_folder, execute

    trackers = make_trackers(output.track)
    listening = ServerOptions(
        server.address,
        cert=security.cert,
        key=security.key,
        client_ca=security.client_ca,
        token_file=security.token_file,
        insecure=security.insecure,
        most=server.max_nodes,
        metrics=server.metrics_port,
    )
    own = own_node_data(given, settings)
    tested = None if server.test is None else dataset_to_test_on(server.test, settings)
    wanted = settings.nodes or settings.min_nodes or 1
    waits_for = waiting(wanted, quiet=output.json, any_port=server.address.endswith(":0"))
    with waits_for as waits, interruptible(waits.wake) as asked:
        serve_run = serving(
            settings,
            listening,
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
                waits.over()
                folder = server.resume or output.out or default_folder(prepared.settings)
                with beside(folder, wanted=output.dashboard), watching(prepared, quiet=output.json) as callbacks:
                    result = execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)
        except Interrupted:
            raise KeyboardInterrupt from None
    if output.json:
        print(json.dumps(result.to_json()))
        return
    print_result(result)
