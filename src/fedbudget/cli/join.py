"""`fedbudget join`."""

from fedbudget.cli.command import command
from fedbudget.cli.options import Given
from fedbudget.errors import UserError
from fedbudget.launch.options import JoinOptions, NodeOptions, SecurityOptions, require_network
from fedbudget.option import option


@command
def join(
    *,
    given: Given,
    joining: JoinOptions,
    test: str | None = option(
        None,
        "Samples of this machine's own to evaluate on, when the aggregator asks: a file as of --data.",
        "data",
        shown="nothing, or the --test-share of --data",
    ),
    security: SecurityOptions,
    node: NodeOptions,
) -> None:
    """Be a node: train on this machine's data, for an aggregator.

    The aggregator was started by fedbudget serve. No sample leaves this machine. When the connection is lost, the node
    comes back by itself. A model of your own is in a file that both sides have: no code is sent. With --test-share or
    --test it holds samples back, and says what the model is worth on them, in sums, when the aggregator asks.

    Examples:

      fedbudget join gateway.local:7700 --data measurements.csv --target failure

      fedbudget join gateway.local:7700 --data measurements.csv --test-share 0.2

      fedbudget join aggregator.example:7700 --data ward.npz --ca certs/ca.pem --token-file token

      fedbudget join aggregator.example:7700 --model net.py:Net --data ward.py:samples --ca certs/ca.pem

      fedbudget join 127.0.0.1:7700 --dataset digits --case 2 --shard 1/5

      fedbudget join 127.0.0.1:7700 --dataset digits --shard 2/5 --pace 4
    """
    from fedbudget.cli.network import node_data

    require_network()

    from fedbudget.launch.join import join as take_part

    data = node_data(given, given["seed"] or 0, test)
    if data is None:
        raise UserError("which data? Give --data FILE, or --dataset NAME --shard I/N for a trial")
    take_part(joining, security, node, data, model=given["model"], device=given["device"] or "auto")
