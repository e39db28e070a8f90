"""`fedbudget serve`.

`fedbudget join`.

`fedbudget local`.

What the commands serve, join and local have in common.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbudget.cli import options as o
from fedbudget.cli.options import RESUME, Given, OutputOptions, command, settings_from
from fedbudget.errors import UserError
from fedbudget.settings.network import (
    JoinOptions,
    ListenOptions,
    LogOptions,
    NodeOptions,
    SecurityOptions,
    require_network,
)
from fedbudget.settings.option import declarations, option
from fedbudget.settings.settings import Settings


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
    from fedbudget.cli.run import resumed_from

    require_network()
    if resume is not None:
        settings, checkpoint = resumed_from(given, "serve")
    else:  # the dataset, and how it is spread, are of the node's data here
        settings = settings_from(given, "serve", dataset=None, partition=None, case=None)
        checkpoint = None

    from fedbudget.cli.view import make_run, print_result
    from fedbudget.engines.engine import interruptible
    from fedbudget.launch.inputs import dataset_to_test_on
    from fedbudget.launch.serve import Interrupted, serving, waiting
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    own = node_data(given, settings.seed)
    tested = None if test is None else dataset_to_test_on(test, settings)
    wanted = settings.nodes or settings.min_nodes or 1
    waits_for = waiting(
        wanted, quiet=output.json, any_port=listen.address.endswith(":0"), logs=logs
    )
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

    require_network()

    from fedbudget.launch.join import join as take_part
    from fedbudget.launch.monitoring import teller

    data = node_data(given, given["seed"] or 0, test)
    if data is None:
        raise UserError(
            "which data? Give --data FILE, or --dataset NAME --shard I/N for a trial"
        )
    how: Any = {"model": given["model"], "device": given["device"] or "auto", "exits": True}
    take_part(joining, security, node, data, **how, tell=teller(logs))


@command
def local(
    *,
    settings: Settings,
    pace: tuple[float, ...] | None = option(
        None,
        "How many times as slow as it could each node is: 1,1,4,4,4.",
        "network",
        shown="1 for all",
    ),
    delay: float = option(
        0.0,
        "Seconds that a message between node and aggregator takes longer than it does, each way.",
        "network",
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
    with preparing(
        on_this_machine(settings, paces=pace, delay=delay, energy_meter=node.energy_meter)
    ) as prepared:
        result = make_run(prepared, output, trackers)
    print_result(result, json=output.json)


if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData

TABLES = ("target", "drop", "categorical", "impute", "classes")
"""The options that say what is in a table."""


def node_data(
    given: Mapping[str, Any], seed: int, test: str | None = None
) -> "NodeData | None":
    """What this machine holds itself, if anything.

    Args:
      test: what it evaluates on, besides that.
    """
    if given["data"] is None and given["shard"] is None:
        return None
    from fedbudget.launch.inputs import from_dataset, from_file

    if given["data"] is not None:
        if given["shard"] is not None or given["dataset"] is not None:
            raise UserError("give --data, or --dataset with --shard, not both")
        settings = o.settings_from({name: given[name] for name in (*TABLES, "standardise")})
        share = given["test_share"]
        share = (
            0.0
            if share is None
            else declarations(Settings)["test_share"].converted(share, text=True)
        )
        how: Any = {"labels": given["labels"], "standardise": settings.standardise}
        return from_file(
            given["data"], settings.table_options(), **how, test_share=share, test=test
        )
    if test is not None:
        raise UserError("--test goes with --data")
    chosen = (
        "dataset",
        "case",
        "partition",
        "data_dir",
        "test_share",
        "train_samples",
        "standardise",
        *TABLES,
    )
    settings = o.settings_from({name: given[name] for name in chosen})
    return from_dataset(replace(settings, seed=seed), given["shard"])
