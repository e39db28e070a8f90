"""`fedbudget serve`."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbudget.cli import options as o


def serve(
    address: Annotated[str, typer.Argument(help="HOST:PORT to listen on.", show_default=False)] = "127.0.0.1:7700",
    nodes: Annotated[
        int | None, typer.Option(help="How many nodes to wait for before the first round.  [default: --min-nodes]")
    ] = None,
    min_nodes: o.MinNodes = None,
    round_timeout: o.RoundTimeout = None,
    task: o.Task = None,
    model: o.Model = None,
    method: o.Method = None,
    drift_correction: o.DriftCorrection = None,
    delta: o.Delta = None,
    tau: o.Tau = None,
    budget: o.Budget = None,
    costs: Annotated[
        str | None,
        typer.Option(help="measured (all machines' meters) or simulated (the paper's prototype).  [default: measured]"),
    ] = None,
    compress: o.Compress = None,
    batch_size: o.BatchSize = None,
    step_size: o.StepSize = None,
    phi: o.Phi = None,
    gamma: o.Gamma = None,
    tau_max: o.TauMax = None,
    seed: o.Seed = None,
    rounds: o.Rounds = None,
    evaluations: o.Evaluations = None,
    clusters: o.Clusters = None,
    device: o.Device = None,
    watts: o.Watts = None,
    joules_per_byte: o.JoulesPerByte = None,
    price_per_hour: o.PricePerHour = None,
    price_per_gigabyte: o.PricePerGigabyte = None,
    energy_meter: o.EnergyMeter = None,
    config: o.Config = None,
    test: Annotated[
        str | None, typer.Option(help="What to test on: a dataset's name, a .csv or a .npz.  [default: nothing]")
    ] = None,
    data: o.Data = None,
    labels: o.Labels = None,
    target: o.Target = None,
    dataset: o.Dataset = None,
    shard: o.Shard = None,
    case: o.Case = None,
    partition: o.Partition = None,
    train_samples: o.TrainSamples = None,
    data_dir: o.DataDir = None,
    cert: Annotated[
        Path | None, typer.Option(help="The aggregator's certificate, for TLS; see fedbudget certs.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="Who signs the certificates that nodes must have, for mutual TLS.")
    ] = None,
    token_file: o.TokenFile = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text, readable by all, also beyond this machine.")
    ] = False,
    max_nodes: Annotated[
        int, typer.Option(help="The most nodes to let in.  [default: 1000]", show_default=False)
    ] = 1000,
    metrics_port: Annotated[
        str | None, typer.Option(help="Where /metrics is, for Prometheus: PORT on this machine, or HOST:PORT.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run, that was broken off, from its last round.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.  [default: a new one in runs/]")] = None,
    track: o.Track = None,
    dashboard: o.Dashboard = False,
    json: o.Json = False,
) -> None:
    """Be the aggregator: wait for nodes, train with them under a budget, and keep a record of it.

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
    given = locals()
    settings, checkpoint = resumed_from(given) if resume is not None else (_settings(given), None)

    from fedbudget.cli.dashboard import beside
    from fedbudget.cli.view import print_result, watching
    from fedbudget.engines.interrupt import interruptible
    from fedbudget.launch.node_data import dataset_to_test_on
    from fedbudget.launch.serve import Interrupted, ServerOptions, serving
    from fedbudget.trackers import make_trackers
    from fedbudget.training import default_folder, execute

    trackers = make_trackers(track or ())
    listening = ServerOptions(
        address,
        cert=cert,
        key=key,
        client_ca=client_ca,
        token_file=token_file,
        insecure=insecure,
        most=max_nodes,
        metrics=metrics_port,
    )
    own = own_node_data(given, settings)
    tested = None if test is None else dataset_to_test_on(test, settings)
    wanted = settings.nodes or settings.min_nodes or 1
    waits_for = waiting(wanted, quiet=json, any_port=address.endswith(":0"))
    with waits_for as waits, interruptible(waits.wake) as asked:
        serve_run = serving(
            settings,
            listening,
            interrupted=asked,
            own=own,
            energy_meter=energy_meter,
            test=tested,
            resumed=checkpoint,
            opened=waits.opened,
            changed=waits.changed,
        )
        try:
            with serve_run as prepared:
                waits.over()
                folder = resume or out or default_folder(prepared.settings)
                with beside(folder, wanted=dashboard), watching(prepared, quiet=json) as callbacks:
                    result = execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)
        except Interrupted:
            raise KeyboardInterrupt from None
    if json:
        print(jsonlib.dumps(result.to_json()))
        return
    print_result(result)


def _settings(given: dict[str, Any]) -> Any:
    return o.settings_from({**given, "dataset": None, "partition": None, "case": None}, costs="measured")
