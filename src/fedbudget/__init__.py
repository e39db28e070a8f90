"""fedbudget: the best model that a fixed budget can buy, from data that stays on its nodes.

>>> import fedbudget
>>> result = fedbudget.train(model="svm", dataset="digits", case=1, budget="time=3s")
>>> result.stopped_by
'time'
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Budget", "Dataset", "FunctionModel", "Result", "Settings", "UserError", "train"]

if TYPE_CHECKING:
    from fedbudget.budget import Budget
    from fedbudget.data.dataset import Dataset
    from fedbudget.errors import UserError
    from fedbudget.models.function import FunctionModel
    from fedbudget.settings import Settings
    from fedbudget.training import Result, train

_HOMES = {
    "Budget": "fedbudget.budget",
    "Dataset": "fedbudget.data.dataset",
    "FunctionModel": "fedbudget.models.function",
    "Result": "fedbudget.training",
    "Settings": "fedbudget.settings",
    "UserError": "fedbudget.errors",
    "train": "fedbudget.training",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `fedbudget --help` need not wait for compilers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedbudget' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
