"""Trackers: MLflow, TensorBoard and Weights & Biases, which follow the rounds of a run.

Each is an extra. A tracker never ends a run and never delays it; see tracker.py.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from fedbudget.errors import UserError
from fedbudget.trackers.mlflow import Mlflow
from fedbudget.trackers.tensorboard import TensorBoard
from fedbudget.trackers.tracker import Tracker
from fedbudget.trackers.wandb import WeightsAndBiases

_TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """Return a new tracker for each name, for one run.

    Args:
      names: mlflow, tensorboard or wandb; repetitions are ignored.

    Raises:
      UserError: a name is unknown, or its package is not installed.
    """
    trackers = []
    for name in dict.fromkeys(names):
        if name not in _TRACKERS:
            raise UserError(f"unknown tracker {name!r}; known are {', '.join(_TRACKERS)}")
        packages = [name]
        if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            packages += ["sqlalchemy", "alembic"]  # for MLflow's default store, a database
        for package in packages:
            if find_spec(package) is None:
                raise UserError(
                    f"track {name} needs {package}; install it with: "
                    f"pip install 'fedbudget[{name}]'"
                )
        trackers.append(_TRACKERS[name]())
    return trackers
