"""`fedbudget join`."""

from typing import Any

from fedbudget.cli.command import command
from fedbudget.cli.options import Given
from fedbudget.errors import UserError
from fedbudget.launch.options import JoinOptions, LogOptions, NodeOptions, SecurityOptions, require_network
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
    logs: LogOptions,
) -> None:
    """Be a node: train on this machine's data, for an aggregator.

    The aggregator was started by fedbudget serve. What leaves this machine: how many samples there are, of which
    classes and columns, with means and deviations where they are standardised; in every round the parameters after
    training on them, losses, and what it cost. No sample is sent. But parameters tell of the samples they were trained
    on: an aggregator that means ill can infer some of them, the more the fewer samples are in a mini-batch and the
    fewer local updates in a round. So only join one that you trust as much as that; --min-batch says what is too few,
    and --sent-log keeps a record. With --secure-aggregation at both sides reports are masked, and it sees only sums.

    When the connection is lost, the node comes back by itself. A model of your own is in a file that both sides have;
    no code is sent. With --test-share or --test it holds samples back, and says what the model is worth on them, in
    sums, when the aggregator asks.

    Examples:

      fedbudget join gateway.local:7700 --data measurements.csv --target failure

      fedbudget join gateway.local:7700 --data measurements.csv --test-share 0.2

      fedbudget join aggregator.example:7700 --data ward.npz --ca certs/ca.pem --token-file token

      fedbudget join aggregator.example:7700 --model net.py:Net --data ward.py:samples --ca certs/ca.pem

      fedbudget join gateway.local:7700 --data ward.npz --privacy-limit 4

      fedbudget join gateway.local:7700 --data ward.npz --secure-aggregation --identity ward.key

      fedbudget join 127.0.0.1:7700 --dataset digits --case 2 --shard 1/5

      fedbudget join 127.0.0.1:7700 --dataset digits --shard 2/5 --pace 4
    """
    from fedbudget.cli.network import node_data

    require_network()

    from fedbudget.launch.join import join as take_part
    from fedbudget.launch.log_format import teller

    data = node_data(given, given["seed"] or 0, test)
    if data is None:
        raise UserError("which data? Give --data FILE, or --dataset NAME --shard I/N for a trial")
    how: Any = {"model": given["model"], "device": given["device"] or "auto", "exits": True}
    take_part(joining, security, node, data, **how, tell=teller(logs))
