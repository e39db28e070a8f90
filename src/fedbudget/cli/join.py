"""`fedbudget join`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedbudget.cli import options as o


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the aggregator.")],
    data: o.Data = None,
    labels: o.Labels = None,
    target: o.Target = None,
    dataset: o.Dataset = None,
    shard: o.Shard = None,
    case: o.Case = None,
    partition: o.Partition = None,
    seed: o.Seed = None,
    train_samples: o.TrainSamples = None,
    data_dir: o.DataDir = None,
    name: Annotated[
        str | None, typer.Option(help="The node's name.  [default: from this machine's, or the shard]")
    ] = None,
    token_file: o.TokenFile = None,
    ca: Annotated[Path | None, typer.Option(help="Who signed the aggregator's certificate, for TLS.")] = None,
    cert: Annotated[Path | None, typer.Option(help="The node's certificate, for mutual TLS.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text, readable by all, also beyond this machine.")
    ] = False,
    device: o.Device = None,
    energy_meter: o.EnergyMeter = None,
    pace: Annotated[
        float,
        typer.Option(
            help="How many times as long as it could a local update takes: a slower machine.  [default: 1]",
            show_default=False,
        ),
    ] = 1.0,
    patience: Annotated[
        float | None, typer.Option(help="Seconds until an aggregator that is not there is given up.  [default: never]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but what is wrong.")] = False,
) -> None:
    """Be a node: train on this machine's data, with an aggregator that was started by fedbudget serve.

    No sample leaves this machine. When the connection is lost, the node comes back by itself.

    Examples:

      fedbudget join gateway.local:7700 --data measurements.csv --target failure

      fedbudget join aggregator.example:7700 --data ward.npz --ca certs/ca.pem --token-file token

      fedbudget join 127.0.0.1:7700 --dataset digits --case 2 --shard 1/5

      fedbudget join 127.0.0.1:7700 --dataset digits --shard 2/5 --pace 4
    """
    from fedbudget.cli.network import join_node_data, require_network

    require_network()
    given = locals()

    from fedbudget.launch.join import NodeOptions, node_name
    from fedbudget.launch.join import join as take_part

    options = NodeOptions(
        node_name(name, shard),
        token_file=token_file,
        ca=ca,
        cert=cert,
        key=key,
        insecure=insecure,
        device=device or "auto",
        energy_meter=energy_meter,
        pace=pace,
        patience=patience,
    )

    def report(text: str) -> None:
        if not quiet:
            print(f"{options.name}: {text}", file=sys.stderr, flush=True)

    take_part(address, join_node_data(given), options, report)
