"""What the package offers by name, and that offering it costs next to nothing."""

import subprocess
import sys

import pytest

import fedbudget

SLOW = ("numba", "sklearn", "matplotlib", "scipy", "rich")


def loaded_after(code: str) -> list[str]:
    """Which of the packages that are slow to import are there after some code has run in a
    process of its own.
    """
    look = f"import sys; print(*[name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{look}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_every_public_name_is_there_and_shown() -> None:
    assert {name for name in dir(fedbudget) if not name.startswith("_")} == set(
        fedbudget.__all__
    )
    for name in fedbudget.__all__:
        assert getattr(fedbudget, name).__name__ == name
        assert getattr(fedbudget, name).__doc__


def test_what_decides_can_be_imported_from_the_package() -> None:
    """An own controller, step size, update or combination rule is written against these."""
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


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedbudget' has no attribute 'fit'"):
        _ = fedbudget.fit  # type: ignore[attr-defined]


def test_importing_the_package_imports_nothing_slow() -> None:
    assert loaded_after("import fedbudget") == []


def test_the_command_line_imports_nothing_slow_until_it_trains() -> None:
    assert loaded_after("import fedbudget.cli.main") == []
