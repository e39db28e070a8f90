"""`fedbudget local`."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from fedbudget.cli import options as o


def local(
    nodes: Annotated[int, typer.Option(help="How many node processes to start.  [default: 5]", show_default=False)] = 5,
    pace: Annotated[
        str | None,
        typer.Option(help="How many times as slow as it could each node is: 1,1,4,4,4.  [default: 1 for all]"),
    ] = None,
    task: o.Task = None,
    model: o.Model = None,
    dataset: o.Dataset = None,
    train_samples: o.TrainSamples = None,
    data_dir: o.DataDir = None,
    case: o.Case = None,
    partition: o.Partition = None,
    method: o.Method = None,
    drift_correction: o.DriftCorrection = None,
    delta: o.Delta = None,
    tau: o.Tau = None,
    budget: o.Budget = None,
    costs: Annotated[
        str | None,
        typer.Option(
            help="measured (this machine's clocks) or simulated (the paper's prototype).  [default: measured]"
        ),
    ] = None,
    compress: o.Compress = None,
    min_nodes: o.MinNodes = None,
    round_timeout: o.RoundTimeout = None,
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
    out: Annotated[Path | None, typer.Option(help="The run's folder.  [default: a new one in runs/]")] = None,
    track: o.Track = None,
    dashboard: o.Dashboard = False,
    json: o.Json = False,
) -> None:
    """Try it on this machine: an aggregator and its nodes, each a process of its own, over a real network stack.

    Examples:

      fedbudget local --nodes 5 --case 2 --budget time=15s

      fedbudget local --pace 1,1,4,4,4 --budget time=30s --budget bytes=20MB

      fedbudget local --tau 10 --rounds 20 --costs simulated --json
    """
    from fedbudget.cli.network import require_network

    require_network()
    settings = o.settings_from(locals(), costs="measured")

    from contextlib import ExitStack

    from fedbudget.cli.dashboard import beside
    from fedbudget.cli.view import preparing, print_result, watching
    from fedbudget.launch.local import on_this_machine
    from fedbudget.trackers import make_trackers
    from fedbudget.training import default_folder, execute

    trackers = make_trackers(track or ())
    paces = None if pace is None else [o.number("pace", part) for part in pace.split(",")]
    with ExitStack() as stack:
        with preparing():
            prepared = stack.enter_context(on_this_machine(settings, paces=paces, energy_meter=energy_meter))
        folder = out or default_folder(prepared.settings)
        stack.enter_context(beside(folder, wanted=dashboard))
        callbacks = stack.enter_context(watching(prepared, quiet=json))
        result = execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)
    if json:
        print(jsonlib.dumps(result.to_json()))
        return
    print_result(result)
