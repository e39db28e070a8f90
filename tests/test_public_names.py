"""What the package offers by name, and that offering it costs next to nothing."""

import subprocess
import sys

import pytest

import fedbudget
from fedbudget.budget import Budget
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError
from fedbudget.models.function import FunctionModel
from fedbudget.settings import Settings
from fedbudget.training import Result, train

SLOW = ("numba", "sklearn", "matplotlib", "scipy", "rich")


def loaded_after(code: str) -> list[str]:
    """Which of the packages that are slow to import are there after some code has run in a process of its own."""
    look = f"import sys; print(*[name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{look}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_public_names_are_these_and_what_they_say() -> None:
    assert {name: getattr(fedbudget, name) for name in fedbudget.__all__} == {
        "Budget": Budget,
        "Dataset": Dataset,
        "FunctionModel": FunctionModel,
        "Result": Result,
        "Settings": Settings,
        "UserError": UserError,
        "train": train,
    }


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedbudget' has no attribute 'fit'"):
        _ = fedbudget.fit


def test_importing_the_package_imports_nothing_slow() -> None:
    assert loaded_after("import fedbudget") == []


def test_the_command_line_imports_nothing_slow_until_it_trains() -> None:
    assert loaded_after("import fedbudget.cli.main") == []
