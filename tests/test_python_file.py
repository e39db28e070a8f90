"""Models and data in a user's Python file: lookup by name, one execution, and errors with
line numbers.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedbudget.errors import UserError
from fedbudget.python_file import load, modules, resolved


@pytest.fixture(autouse=True)
def restore_modules() -> Iterator[None]:
    before, path = dict(sys.modules), list(sys.path)
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.path[:] = path


def write(folder: Path, text: str, name: str = "ours.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_file_is_executed_once(tmp_path: Path) -> None:
    """Other files import it by its name."""
    path = write(tmp_path, "class Net: pass\nvalue = object()")
    other = write(tmp_path, "from ours import Net, value", "others.py")
    assert load(f"{other}:value") is load(f"{path}:value")
    assert load(f"{path}:Net").__module__ == "ours"


def test_same_file_name_in_two_folders(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
    one, two = (write(tmp_path / str(number), f"value = {number}") for number in (1, 2))
    assert [load(f"{path}:value") for path in (one, two, one)] == [1, 2, 1]


def test_file_never_replaces_a_package(tmp_path: Path) -> None:
    before = sys.modules["numpy"]
    assert load(write(tmp_path, "value = 5", "numpy.py") + ":value") == 5
    assert sys.modules["numpy"] is before is np


def test_modules_lists_the_users_files(tmp_path: Path) -> None:
    """Other processes cannot import these modules by themselves."""
    write(tmp_path, "value = 5", "helper.py")
    load(write(tmp_path, "import helper\nvalue = helper.value") + ":value")
    assert {"ours", "helper"} <= {module.__name__ for module in modules()}
    assert np not in modules()


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("class Net: pass", "Nett", "has no Nett; did you mean Net?"),
        ("", "Net", "has no Net; it has nothing"),
        (
            "x = 1\ny = x / 0",
            "y",
            "cannot be used: line 2: ZeroDivisionError: division by zero",
        ),
        ("def f(:\n  pass", "f", "cannot be used: line 1: SyntaxError: "),
        ("import sys\nsys.exit('no')", "f", "cannot be used: line 2: SystemExit: no"),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    with pytest.raises(UserError) as error:
        load(f"{write(tmp_path, text)}:{name}")
    assert message in str(error.value)


def test_incomplete_references_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"net\.py: name an object of the file, as in net\.py:NAME"
    ):
        load("net.py")
    with pytest.raises(UserError, match=r"nowhere\.py does not exist"):
        load("nowhere.py:Net")


def test_resolved_makes_paths_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A built-in name stays unchanged."""
    monkeypatch.chdir(tmp_path)
    assert resolved("net.py:Net") == f"{tmp_path.resolve()}/net.py:Net"
    assert resolved("softmax") == "softmax"
