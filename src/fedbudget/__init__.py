"""fedbudget: the best model that a fixed budget can buy, from data that stays on its nodes.

>>> import fedbudget
>>> result = fedbudget.train(model="svm", dataset="digits", case=1, budget="time=3s")
>>> result.stopped_by
'time'
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "AdaptiveTau",
    "AutoStep",
    "Average",
    "Budget",
    "CombineRule",
    "ControlInputs",
    "Controller",
    "Dataset",
    "Decision",
    "Estimates",
    "FedbudgetError",
    "FixedStep",
    "FixedTau",
    "FunctionModel",
    "Reason",
    "Result",
    "RoundRecord",
    "ServerMomentum",
    "Settings",
    "StepSize",
    "StepSizeInputs",
    "StepSizeState",
    "UpdateRule",
    "UserError",
    "WeightedMean",
    "WorkError",
    "train",
]

if TYPE_CHECKING:
    from fedbudget.budget import Budget
    from fedbudget.control import AdaptiveTau, ControlInputs, Controller, Decision, Estimates, FixedTau, Reason
    from fedbudget.data.dataset import Dataset
    from fedbudget.errors import FedbudgetError, UserError, WorkError
    from fedbudget.models.function import FunctionModel
    from fedbudget.protocol.combine import CombineRule, WeightedMean
    from fedbudget.protocol.update import Average, ServerMomentum, UpdateRule
    from fedbudget.runs.record import RoundRecord
    from fedbudget.settings import Settings
    from fedbudget.step_size import AutoStep, FixedStep, StepSize, StepSizeInputs, StepSizeState
    from fedbudget.training import Result, train

_HOMES = {
    "fedbudget.budget": ["Budget"],
    "fedbudget.control": ["AdaptiveTau", "Controller", "ControlInputs", "Decision", "Estimates", "FixedTau", "Reason"],
    "fedbudget.data.dataset": ["Dataset"],
    "fedbudget.errors": ["FedbudgetError", "UserError", "WorkError"],
    "fedbudget.models.function": ["FunctionModel"],
    "fedbudget.protocol.combine": ["CombineRule", "WeightedMean"],
    "fedbudget.protocol.update": ["Average", "ServerMomentum", "UpdateRule"],
    "fedbudget.runs.record": ["RoundRecord"],
    "fedbudget.settings": ["Settings"],
    "fedbudget.step_size": ["AutoStep", "FixedStep", "StepSize", "StepSizeInputs", "StepSizeState"],
    "fedbudget.training": ["Result", "train"],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `fedbudget --help` need not wait for compilers."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedbudget' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
