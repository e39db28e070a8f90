"""A run by any engine that this machine can start by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from fedbudget.errors import UserError
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun
from fedbudget.launch.simulate import simulate
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.setting_types import EngineName
from fedbudget.settings import Settings


@contextmanager
def launch(
    settings: Settings,
    overrides: Overrides = NOTHING,
    *,
    engine: EngineName = "in-process",
    ray_address: str | None = None,
    actors: int | None = None,
    resumed: Checkpoint | None = None,
) -> Iterator[PreparedRun]:
    """A run that is ready to start, as long as what makes it is there.

    Args:
      ray_address: of the Ray cluster; this machine when not given.
      actors: how many of Ray's processes share the nodes; one per core when not given.
      resumed: where to go on from.
    """
    if engine != "ray" and (ray_address is not None or actors is not None):
        raise UserError("a Ray address, or a number of actors, goes with engine ray")
    if engine != "in-process" and settings.attack is not None:
        raise UserError("`attack` is simulated in one process: leave `engine` out")
    if engine == "ray":
        from fedbudget.launch.on_ray import on_ray  # Ray is an extra

        with on_ray(settings, overrides, address=ray_address, actors=actors, resumed=resumed) as prepared:
            yield prepared
    elif engine == "network":
        from fedbudget.launch.local import on_this_machine  # gRPC is an extra

        if resumed is not None:
            raise UserError("node processes are gone with their run: go on with fedbudget serve and fedbudget join")
        with on_this_machine(settings, overrides) as prepared:
            yield prepared
    elif engine == "in-process":
        yield simulate(settings, overrides, resumed=resumed)
    else:
        raise UserError(f"unknown engine {engine!r}; use one of {', '.join(get_args(EngineName))}")
