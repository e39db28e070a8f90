"""`fedbudget serve`, `fedbudget join` and `fedbudget local`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbudget.cli.options import RESUME, Given, OutputOptions, command, settings_from
from fedbudget.cli.run import run_settings
from fedbudget.errors import UserError
from fedbudget.settings.compatibility import require_compatible
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

if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData

_TABLES = (
    "target",
    "drop",
    "categorical",
    "impute",
    "missing",
    "classes",
    "standardise",
    "schema",
)
"""Options that describe a table."""

_SHARD = ("dataset", "case", "partition", "data_dir", "test_share", "train_samples")
"""Options that describe a part of a dataset."""


@command
def serve(
    *,
    given: Given,
    listen: ListenOptions,
    resume: Path | None = RESUME,
    test: str | None = option(
        None,
        "Test samples: the name of a dataset, a .csv, a .npz, or FILE:NAME in Python.",
        "data",
        shown="none",
    ),
    security: SecurityOptions,
    node: NodeOptions,
    output: OutputOptions,
    logs: LogOptions,
) -> None:
    """Run the aggregator: wait for nodes and train with them.

    Nodes connect with fedbudget join. Their data stays with them; all settings are made
    here. Every round is saved. After a crash, or to spend more, continue with --resume. The
    file audit.jsonl of the run lists which nodes joined, left or were refused, and why.
    Create tokens for nodes with fedbudget tokens.

    Examples:

      fedbudget serve --nodes 5 --model softmax --budget time=10min --budget bytes=200MB

      fedbudget serve --model net.py:Net --nodes 3 --budget time=1h

      fedbudget serve 0.0.0.0:7700 --cert a.pem --key a.key --token-file tokens

      fedbudget serve --data hospital.csv --target outcome --min-nodes 3 --round-timeout 30

      fedbudget serve --nodes 20 --allow edge-1,edge-2 --combine trimmed

      fedbudget serve --nodes 100 --secure-aggregation --budget time=1h --budget privacy=4

      fedbudget serve --nodes 5 --privacy-unit sample --budget time=1h --budget privacy=4

      fedbudget serve --resume runs/NAME

      fedbudget serve --resume runs/NAME --budget time=+1h
    """
    require_network()
    settings, checkpoint = run_settings(given, "serve")
    require_compatible(
        settings,
        engine="network",
        data=given["data"] or given["shard"],
        energy_meter=node.energy_meter,
    )

    from fedbudget.cli.view import finish, make_run
    from fedbudget.launch.inputs import dataset_to_test_on
    from fedbudget.launch.serve import serve_run
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    result = serve_run(
        settings,
        listen,
        security,
        lambda prepared: make_run(prepared, output, trackers, folder=resume),
        own=node_data(given, settings.seed),
        energy_meter=node.energy_meter,
        test=None if test is None else dataset_to_test_on(test, settings),
        resumed=checkpoint,
        quiet=output.json,
        logs=logs,
    )
    finish(result, json=output.json)


@command
def join(
    *,
    given: Given,
    joining: JoinOptions,
    test: str | None = option(
        None,
        "Samples of this machine to evaluate on at the request of the aggregator, in a "
        "form of --data.",
        "data",
        shown="none, or --test-share of --data",
    ),
    security: SecurityOptions,
    node: NodeOptions,
    logs: LogOptions,
) -> None:
    """Run a node: train on the data of this machine.

    Start the aggregator with fedbudget serve. No sample leaves this machine. It sends the
    number of samples, their classes and columns, and the means and deviations of
    standardised columns; in every round, the parameters after training, losses and costs.
    With --schema, it sends a public schema instead of means, deviations and categories. A
    malicious aggregator may reconstruct some samples from parameters, most easily with
    small mini-batches and few local updates in a round. Join only an aggregator that you
    trust. --min-batch refuses small mini-batches, and --sent-log lists each report.
    With --secure-aggregation on both sides, reports are masked, and an aggregator that
    follows the protocol sees only their sum. Nodes verify each other by --cert or
    --known-nodes.

    If the aggregator runs with --personal, it sends its final model. This node corrects it
    with its own rows, keeps the result (--save-model), and sends figures of it unless
    --keep-figures is set.

    The node reconnects by itself. Your own model must be in a file on both sides: no code
    is sent. With --test-share or --test, the node holds samples out and reports sums of the
    evaluation on them at the request of the aggregator.

    Examples:

      fedbudget join gateway.local:7700 --data measurements.csv --target failure

      fedbudget join gateway.local:7700 --data measurements.csv --test-share 0.2

      fedbudget join aggregator.example:7700 --data ward.npz --ca ca.pem --token-file token

      fedbudget join gateway.local:7700 --model net.py:Net --data ward.py:samples

      fedbudget join gateway.local:7700 --data ward.csv --save-model ward-model

      fedbudget join gateway.local:7700 --data ward.npz --privacy-limit 4

      fedbudget join gateway.local:7700 --data x.npz --secure-aggregation --known-nodes ids

      fedbudget join hub:7700 --data x.npz --secure-aggregation --identity n --trust-first

      fedbudget join 127.0.0.1:7700 --dataset digits --case 2 --shard 1/5

      fedbudget join 127.0.0.1:7700 --dataset digits --shard 2/5 --pace 4
    """
    require_network()

    from fedbudget.launch.join import join as take_part
    from fedbudget.launch.logs import node_log

    data = node_data(given, given["seed"] or 0, test)
    if data is None:
        raise UserError(
            "a node needs data: give --data FILE, or --dataset NAME --shard I/N for a trial"
        )
    take_part(
        joining,
        security,
        node,
        data,
        model=given["model"],
        device=given["device"] or "auto",
        log=node_log(logs),
        exits=True,
    )


@command
def local(
    *,
    settings: Settings,
    pace: tuple[float, ...] | None = option(
        None,
        "Slow down the local updates of each node by a factor, such as 1,1,4,4,4.",
        "network",
        shown="1 for all",
    ),
    delay: float = option(
        0.0,
        "Seconds added to each message between node and aggregator.",
        "network",
    ),
    node: NodeOptions,
    output: OutputOptions,
) -> None:
    """Run an aggregator and node processes on this machine.

    Each node is a separate process and connects over gRPC.

    Examples:

      fedbudget local --nodes 5 --case 2 --budget time=15s

      fedbudget local --pace 1,1,4,4,4 --budget time=30s --budget bytes=20MB

      fedbudget local --pace 25,25,100,100,100 --delay 0.065 --budget time=30s

      fedbudget local --nodes 5 --secure-aggregation --budget time=15s --budget privacy=8

      fedbudget local --tau 10 --rounds 20 --costs simulated --json
    """
    require_network()

    from fedbudget.cli.view import finish, make_run, preparing
    from fedbudget.launch.local import on_this_machine
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    with preparing(
        on_this_machine(settings, paces=pace, delay=delay, energy_meter=node.energy_meter)
    ) as prepared:
        result = make_run(prepared, output, trackers)
    finish(result, json=output.json)


def node_data(
    given: Mapping[str, Any], seed: int, test: str | None = None
) -> "NodeData | None":
    """Return the samples that this machine holds, if any.

    Args:
      test: further samples to evaluate on.
    """
    if given["data"] is None and given["shard"] is None:
        return None
    options = {name: given[name] for name in ("data", "shard", "dataset")}
    require_compatible(**options, test=test)

    from fedbudget.launch.inputs import from_dataset, from_file

    if given["data"] is None:
        settings = settings_from({name: given[name] for name in (*_SHARD, *_TABLES)})
        return from_dataset(replace(settings, seed=seed), given["shard"])
    settings = settings_from({name: given[name] for name in _TABLES})
    share = given["test_share"]
    if share is not None:
        share = declarations(Settings)["test_share"].converted(share, text=True)
    return from_file(
        given["data"],
        settings.table_options(),
        labels=given["labels"],
        standardise=settings.standardise,
        test_share=share or 0.0,
        test=test,
    )
