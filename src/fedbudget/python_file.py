"""What a person has written in a Python file, by the file and a name in it: `net.py:Net`.

The file is run as Python runs a program: its folder is where it imports from first, and it is the module that others
import by its name. It is run once in a process, however many names are taken from it.
"""

import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbudget.errors import UserError, suggestion

_folders: set[Path] = set()  # of files that were run


def is_reference(text: str) -> bool:
    """
    >>> is_reference("net.py:Net"), is_reference("net.py"), is_reference("softmax")
    (True, True, False)
    """
    return text.endswith(".py") or ".py:" in text


def resolved(text: str) -> str:
    """The same from any folder, and any other text as it is."""
    if not is_reference(text):
        return text
    path, name = _parts(text)
    return f"{path.expanduser().resolve()}:{name}"


def short(text: str) -> str:
    """
    >>> short("/home/ann/net.py:Net"), short("softmax")
    ('Net', 'softmax')
    """
    return _parts(text)[1] if is_reference(text) else text


def load(text: str) -> Any:
    """What the name in the file stands for."""
    path, name = _parts(text)
    found = vars(_module(path.expanduser().resolve(), path))
    if name not in found:
        own = [each for each in found if not each.startswith("_")]
        raise UserError(
            f"{path} has no {name}; {suggestion(name, own) or 'it has ' + (', '.join(own) or 'nothing')}"
        )
    return found[name]


def modules() -> list[ModuleType]:
    """Files that were run here, and what these have imported from beside them: what no other process could find."""
    files = [
        (module, getattr(module, "__file__", None)) for module in list(sys.modules.values())
    ]
    return [
        module
        for module, file in files
        if file is not None and Path(file).parent in _folders
    ]


def _parts(text: str) -> tuple[Path, str]:
    path, _, name = text.rpartition(":")
    if not path or not name or text.endswith(".py"):
        raise UserError(
            f"{text}: say what of the file is meant, as {text.rstrip(':')}:NAME"
        )
    return Path(path), name


def _module(path: Path, shown: Path) -> ModuleType:
    for known in list(sys.modules.values()):
        if getattr(known, "__file__", None) == str(path):
            return known
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
        raise UserError(f"{shown} cannot be used: {_in_words(error, path)}") from error
    return module


def _in_words(error: BaseException, path: Path) -> str:
    """What went wrong, and in which line of the file."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    line = (
        error.lineno
        if isinstance(error, SyntaxError) and error.filename == str(path)
        else (lines or [None])[-1]
    )
    what = (
        f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    )
    return what if line is None else f"line {line}: {what}"
