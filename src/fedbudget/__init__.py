"""fedbudget: federated learning under a fixed budget, on data that stays on its nodes.

>>> import fedbudget
>>> result = fedbudget.train(model="svm", dataset="digits", case=1, budget="time=3s")
>>> result.stopped_by
'time'

`__init__.pyi` lists the public names and their modules, for type checkers and for this
file. A name is imported on first use, so that `fedbudget --help` does not load compilers.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.3.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
_HOME = {
    each.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for each in node.names
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedbudget' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
