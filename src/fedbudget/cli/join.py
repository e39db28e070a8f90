"""`fedbudget join`."""

import sys

from fedbudget.cli.command import command
from fedbudget.cli.options import Given, NodeOptions, SecurityOptions
from fedbudget.errors import UserError
from fedbudget.option import REQUIRED, option


@command
def join(
    *,
    given: Given,
    address: str = option(REQUIRED, "HOST:PORT of the aggregator.", "network", argument=True),
    name: str | None = option(None, "The node's name.", "network", shown="from this machine's, or the shard"),
    pace: float = option(1.0, "How many times as long as it could a local update takes: a slower machine.", "network"),
    patience: float | None = option(
        None, "Seconds until an aggregator that is not there is given up.", "network", shown="never"
    ),
    quiet: bool = option(False, "Say nothing but what is wrong.", "output"),
    security: SecurityOptions,
    node: NodeOptions,
) -> None:
    """Be a node: train on this machine's data, for an aggregator.

    The aggregator was started by fedbudget serve. No sample leaves this machine. When the connection is lost, the node
    comes back by itself.

    Examples:

      fedbudget join gateway.local:7700 --data measurements.csv --target failure

      fedbudget join aggregator.example:7700 --data ward.npz --ca certs/ca.pem --token-file token

      fedbudget join 127.0.0.1:7700 --dataset digits --case 2 --shard 1/5

      fedbudget join 127.0.0.1:7700 --dataset digits --shard 2/5 --pace 4
    """
    from fedbudget.cli.network import node_data, require_network

    require_network()

    from fedbudget.launch.join import NodeConnection, node_name
    from fedbudget.launch.join import join as take_part

    connection = NodeConnection(
        node_name(name, node.shard),
        token_file=security.token_file,
        ca=security.ca,
        cert=security.cert,
        key=security.key,
        insecure=security.insecure,
        device=given["device"] or "auto",
        energy_meter=node.energy_meter,
        pace=pace,
        patience=patience,
    )

    def report(text: str) -> None:
        if not quiet:
            print(f"{connection.name}: {text}", file=sys.stderr, flush=True)

    data = node_data(given, given["seed"] or 0)
    if data is None:
        raise UserError("which data? Give --data FILE, or --dataset NAME --shard I/N for a trial")
    take_part(address, data, connection, report)
