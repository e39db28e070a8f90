"""`fedbudget join`."""

import sys

from fedbudget.cli.command import command
from fedbudget.cli.options import Given, JoinOptions, NodeOptions, SecurityOptions


@command
def join(given: Given, joining: JoinOptions, security: SecurityOptions, node: NodeOptions) -> None:
    """Be a node: train on this machine's data, for an aggregator.

    The aggregator was started by fedbudget serve. No sample leaves this machine. When the connection is lost, the node
    comes back by itself.

    Examples:

      fedbudget join gateway.local:7700 --data measurements.csv --target failure

      fedbudget join aggregator.example:7700 --data ward.npz --ca certs/ca.pem --token-file token

      fedbudget join 127.0.0.1:7700 --dataset digits --case 2 --shard 1/5

      fedbudget join 127.0.0.1:7700 --dataset digits --shard 2/5 --pace 4
    """
    from fedbudget.cli.network import join_node_data, require_network

    require_network()

    from fedbudget.launch.join import NodeConnection, node_name
    from fedbudget.launch.join import join as take_part

    connection = NodeConnection(
        node_name(joining.name, node.shard),
        token_file=security.token_file,
        ca=security.ca,
        cert=security.cert,
        key=security.key,
        insecure=security.insecure,
        device=given["device"] or "auto",
        energy_meter=node.energy_meter,
        pace=joining.pace,
        patience=joining.patience,
    )

    def report(text: str) -> None:
        if not joining.quiet:
            print(f"{connection.name}: {text}", file=sys.stderr, flush=True)

    take_part(joining.address, join_node_data(given), connection, report)
