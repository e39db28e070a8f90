"""`fedbudget run`."""

import json
from contextlib import ExitStack

from fedbudget.cli.command import command
from fedbudget.cli.options import EngineOptions, OutputOptions
from fedbudget.settings import Settings


@command
def run(settings: Settings, engine: EngineOptions, output: OutputOptions) -> None:
    """Train under a budget, and keep a record of it.

    Examples:

      fedbudget run --case 2 --budget time=15s

      fedbudget run --dataset homes.csv --model linear --budget time=1min --budget bytes=20MB

      fedbudget run --task cnn-mnist --case 4

      fedbudget run --tau 10 --costs measured --budget time=5s --json

      fedbudget run --engine ray --nodes 100000 --partition draw:30 --rounds 20 --method paper

      fedbudget run --config runs/NAME/config.toml
    """
    from fedbudget.cli.dashboard import beside
    from fedbudget.cli.view import preparing, watching
    from fedbudget.launch.launch import launch
    from fedbudget.trackers import make_trackers
    from fedbudget.training import default_folder, execute

    trackers, on_ray = make_trackers(output.track), engine.engine == "ray"
    wait = preparing("starting Ray, and giving its processes their nodes") if on_ray else preparing()
    with ExitStack() as stack:
        with wait:
            launched = launch(settings, engine=engine.engine, ray_address=engine.ray_address, actors=engine.actors)
            prepared = stack.enter_context(launched)
        folder = output.out or default_folder(prepared.settings)
        with beside(folder, wanted=output.dashboard), watching(prepared, quiet=output.json) as callbacks:
            result = execute(prepared, out=folder, callbacks=callbacks, trackers=trackers)
    if output.json:
        print(json.dumps(result.to_json()))
        return
    from fedbudget.cli.view import print_result

    print_result(result)
