"""Objects from the user's Python files, named by file and object: `net.py:Net`.

A file runs like a Python script: imports search its folder first, and other files can
import it by its name. It runs once per process, however many of its objects are used.
"""

import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbudget.errors import UserError, suggestion

_folders: set[Path] = set()  # of the files that ran in this process


def load(text: str) -> Any:
    """Run the file of a reference such as `net.py:Net` and return the named object."""
    path, name = _parts(text)
    objects = vars(_module(path.expanduser().resolve(), path))
    if name not in objects:
        public = [each for each in objects if not each.startswith("_")]
        listed = f"it has {', '.join(public) or 'nothing'}"
        raise UserError(f"{path} has no {name}; {suggestion(name, public) or listed}")
    return objects[name]


def is_reference(text: str) -> bool:
    """Return whether the text refers to a Python file.

    >>> is_reference("net.py:Net"), is_reference("net.py"), is_reference("softmax")
    (True, True, False)
    """
    return text.endswith(".py") or ".py:" in text


def resolved(text: str) -> str:
    """Return a reference with an absolute path, and any other text unchanged."""
    if not is_reference(text):
        return text
    path, name = _parts(text)
    return f"{path.expanduser().resolve()}:{name}"


def short(text: str) -> str:
    """Return the object's name of a reference, and any other text unchanged.

    >>> short("/home/ann/net.py:Net"), short("softmax")
    ('Net', 'softmax')
    """
    return _parts(text)[1] if is_reference(text) else text


def modules() -> list[ModuleType]:
    """Return the files that ran here and their imports from the same folders.

    Other processes cannot import these modules by name.
    """
    return [
        module
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None)) and Path(file).parent in _folders
    ]


def _parts(text: str) -> tuple[Path, str]:
    path, _, name = text.rpartition(":")
    if not path or not name or text.endswith(".py"):
        raise UserError(
            f"{text}: name an object of the file, as in {text.rstrip(':')}:NAME"
        )
    return Path(path), name


def _module(path: Path, shown: Path) -> ModuleType:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    if not path.is_file():
        raise UserError(f"{shown} does not exist")

    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.parent}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)

    _folders.add(path.parent)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{shown} cannot be used: {_description(error, path)}") from error
    return module


def _description(error: BaseException, path: Path) -> str:
    """Describe the error with the last line of the file that took part in it."""
    text = str(error)
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError):
        text = error.msg
        if error.filename == str(path):
            lines.append(error.lineno)

    place = f"line {lines[-1]}: " if lines and lines[-1] is not None else ""
    return f"{place}{type(error).__name__}: {text}"
