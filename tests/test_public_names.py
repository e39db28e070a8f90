"""Public names of the package, and the cost of importing it."""

import subprocess
import sys

import pytest

import fedbudget

SLOW = ("numba", "sklearn", "matplotlib", "scipy", "rich")


def loaded_after(code: str) -> list[str]:
    """Return which slow packages a new process has loaded after running this code."""
    look = f"import sys; print(*[name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{look}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_public_names_exist_with_docstrings() -> None:
    assert {name for name in dir(fedbudget) if not name.startswith("_")} == set(
        fedbudget.__all__
    )
    for name in fedbudget.__all__:
        assert getattr(fedbudget, name).__name__ == name
        assert getattr(fedbudget, name).__doc__


def test_extension_interfaces_are_public() -> None:
    """Custom controllers, step sizes, update rules and combination rules implement
    these.
    """
    seams = {
        "Controller",
        "ControlInputs",
        "Decision",
        "StepSize",
        "StepSizeInputs",
        "StepSizeState",
    }
    assert seams | {"UpdateRule", "CombineRule", "RoundRecord", "train"} <= set(
        fedbudget.__all__
    )


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedbudget' has no attribute 'fit'"):
        _ = fedbudget.fit  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["fedbudget", "fedbudget.cli.main"])
def test_import_loads_nothing_slow(module: str) -> None:
    assert loaded_after(f"import {module}") == []
