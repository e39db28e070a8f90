"""`fedbudget run`."""

import json as jsonlib
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fedbudget.cli import options as o


def run(
    task: o.Task = None,
    model: o.Model = None,
    dataset: o.Dataset = None,
    data_dir: o.DataDir = None,
    nodes: o.Nodes = None,
    case: o.Case = None,
    partition: o.Partition = None,
    method: o.Method = None,
    drift_correction: o.DriftCorrection = None,
    delta: o.Delta = None,
    tau: o.Tau = None,
    budget: o.Budget = None,
    costs: o.Costs = None,
    aggregation_factor: o.AggregationFactor = None,
    speeds: o.Speeds = None,
    participation: o.Participation = None,
    batch_size: o.BatchSize = None,
    step_size: o.StepSize = None,
    phi: o.Phi = None,
    gamma: o.Gamma = None,
    tau_max: o.TauMax = None,
    seed: o.Seed = None,
    rounds: o.Rounds = None,
    evaluations: o.Evaluations = None,
    target: o.Target = None,
    test_share: o.TestShare = None,
    train_samples: o.TrainSamples = None,
    test_samples: o.TestSamples = None,
    clusters: o.Clusters = None,
    device: o.Device = None,
    watts: o.Watts = None,
    joules_per_byte: o.JoulesPerByte = None,
    price_per_hour: o.PricePerHour = None,
    price_per_gigabyte: o.PricePerGigabyte = None,
    config: o.Config = None,
    engine: o.Engine = None,
    ray_address: o.RayAddress = None,
    actors: o.Actors = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.  [default: a new one in runs/]")] = None,
    track: o.Track = None,
    dashboard: o.Dashboard = False,
    json: o.Json = False,
) -> None:
    """Train under a budget, and keep a record of it.

    Examples:

      fedbudget run --case 2 --budget time=15s

      fedbudget run --dataset homes.csv --model linear --budget time=1min --budget bytes=20MB

      fedbudget run --task cnn-mnist --case 4

      fedbudget run --tau 10 --costs measured --budget time=5s --json

      fedbudget run --engine ray --nodes 100000 --partition draw:30 --rounds 20 --method paper

      fedbudget run --config runs/NAME/config.toml
    """
    settings = o.settings_from(locals())

    from fedbudget.cli.dashboard import beside
    from fedbudget.cli.view import preparing, watching
    from fedbudget.launch.launch import launch
    from fedbudget.trackers import make_trackers
    from fedbudget.training import default_folder, execute

    trackers, makes = make_trackers(track or ()), o.engine(engine, ray_address)
    wait = preparing("starting Ray, and giving its processes their nodes") if makes == "ray" else preparing()
    with ExitStack() as stack:
        with wait:
            prepared = stack.enter_context(launch(settings, engine=makes, ray_address=ray_address, actors=actors))
        folder = out or default_folder(prepared.settings)
        with beside(folder, wanted=dashboard), watching(prepared, quiet=json) as callbacks:
            result = execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)
    if json:
        print(jsonlib.dumps(result.to_json()))
        return
    from fedbudget.cli.view import print_result

    print_result(result)
