"""Where a run is followed besides its folder: MLflow, TensorBoard.

Each is an extra. A tracker never ends a run and never holds it up: see background.py.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from fedbudget.errors import UserError
from fedbudget.trackers.tracker import Tracker


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """A new tracker for each name, for one run; refuses a name that is unknown, or what is not installed."""
    trackers = []
    for name in dict.fromkeys(names):
        if name not in _MAKERS:
            raise UserError(f"unknown tracker {name!r}; known are {', '.join(_MAKERS)}")
        for module in _needs(name):
            if find_spec(module) is None:
                raise UserError(f"track {name} needs {module}; install it with: pip install 'fedbudget[{name}]'")
        trackers.append(_MAKERS[name]())
    return trackers


def _needs(name: str) -> tuple[str, ...]:
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        return ("mlflow", "sqlalchemy", "alembic")  # the store of its own choice is a database in a file
    return (name,)


def _mlflow() -> Tracker:
    from fedbudget.trackers.mlflow import Mlflow

    return Mlflow()


def _tensorboard() -> Tracker:
    from fedbudget.trackers.tensorboard import TensorBoard

    return TensorBoard()


_MAKERS: Mapping[str, Callable[[], Tracker]] = {"mlflow": _mlflow, "tensorboard": _tensorboard}
