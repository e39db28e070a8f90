"""`fedbudget run`."""

from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import RESUME, EngineOptions, Given, OutputOptions, settings_from


@command
def run(*, given: Given, resume: Path | None = RESUME, engine: EngineOptions, output: OutputOptions) -> None:
    """Train under a budget, and keep a record of it.

    Where it has come to is saved every second or so: after a crash, or with more budget, --resume goes on from there.

    Examples:

      fedbudget run --case 2 --budget time=15s

      fedbudget run --dataset homes.csv --model linear --budget time=1min --budget bytes=20MB

      fedbudget run --task cnn-mnist --case 4

      fedbudget run --budget time=10min --until accuracy=0.95 --until loss=0.1 --patience 50

      fedbudget run --nodes 100 --budget time=15s --budget privacy=4

      fedbudget run --nodes 5 --privacy-unit sample --budget time=15s --budget privacy=4

      fedbudget run --tau 10 --costs measured --budget time=5s --json

      fedbudget run --engine ray --nodes 100000 --partition draw:30 --rounds 20 --method paper

      fedbudget run --config runs/NAME/config.toml

      fedbudget run --resume runs/NAME --budget time=+10min
    """
    if resume is None:
        settings, checkpoint = settings_from(given), None
    else:
        from fedbudget.cli.resume import resumed_from

        settings, checkpoint = resumed_from(given, "run")

    from fedbudget.cli.view import make_run, preparing, print_result
    from fedbudget.launch.launch import launch
    from fedbudget.trackers import make_trackers

    trackers = make_trackers(output.track)
    address, actors = engine.ray_address, engine.actors
    launched = launch(settings, engine=engine.engine, ray_address=address, actors=actors, resumed=checkpoint)
    ray = {"what": "starting Ray, and giving its processes their nodes"} if engine.engine == "ray" else {}
    with preparing(launched, **ray) as prepared:
        result = make_run(prepared, output, trackers, folder=resume)
    print_result(result, json=output.json)
