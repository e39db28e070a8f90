"""Where a run is followed besides its folder: MLflow, TensorBoard.

Each is an extra. A tracker never ends a run and never holds it up: see background.py.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from fedbudget.errors import UserError
from fedbudget.trackers.mlflow import Mlflow
from fedbudget.trackers.tensorboard import TensorBoard
from fedbudget.trackers.tracker import Tracker

_TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
}


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """A new tracker for each name, for one run; refuses a name that is unknown, or what is not installed."""
    trackers = []
    for name in dict.fromkeys(names):
        if name not in _TRACKERS:
            raise UserError(f"unknown tracker {name!r}; known are {', '.join(_TRACKERS)}")
        needed = [name]
        if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            needed += [
                "sqlalchemy",
                "alembic",
            ]  # the store of its own choice is a database in a file
        for module in needed:
            if find_spec(module) is None:
                raise UserError(
                    f"track {name} needs {module}; install it with: pip install 'fedbudget[{name}]'"
                )
        trackers.append(_TRACKERS[name]())
    return trackers
