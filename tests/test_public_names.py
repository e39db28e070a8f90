"""Public names of the package, and the cost of importing it."""

import pydoc
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbudget
from fedbudget.arrays import Float32
from fedbudget.launch.method import build_method
from fedbudget.settings.settings import Settings

REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "python.md"
_PLAIN: Any = vars(pydoc)["plaintext"]  # typeshed lacks it
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
        "UpdateRule",
        "MovingRule",
        "RestartingRule",
        "CombineRule",
        "CappingRule",
        "Report",
    }
    assert seams | {"RoundRecord", "train"} <= set(fedbudget.__all__)


@pytest.mark.parametrize("model", ["softmax", "kmeans"])
@pytest.mark.parametrize("combine", ["mean", "clipped", "trimmed", "median"])
def test_rules_of_default_method_are_public(model: str, combine: str) -> None:
    """So are the classes of their states."""
    given: Any = {"model": model, "combine": combine, "clusters": 2}
    method = build_method(Settings(nodes=5, **given))
    w = np.zeros(4, np.float32)
    rules = [method.controller, method.step_size, method.update, method.combine]
    states = [
        method.controller.first(),
        method.step_size.first(),
        method.update.first(w),
    ]
    for each in (*rules, *states):
        assert getattr(fedbudget, type(each).__name__) is type(each)


def test_reference_has_every_public_name() -> None:
    entries = re.findall(r"^::: ([\w.]+)$", REFERENCE.read_text("utf-8"), re.MULTILINE)
    objects = {f"{getattr(fedbudget, n).__module__}.{n}" for n in fedbudget.__all__}
    assert objects - set(entries) == set()


@dataclass(frozen=True)
class Wrapper:
    """Calls the methods of another rule."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class MovingWrapper(Wrapper):
    """Has the methods of a `MovingRule` itself: `isinstance` may ignore `__getattr__`."""

    @property
    def carried(self) -> float:
        return float(self.inner.carried)

    def first(self, w: Float32) -> Any:
        return self.inner.first(w)

    def next(self, state: Any, w: Float32, mean: Float32) -> Any:
        return self.inner.next(state, w, mean)

    def trust(self, state: Any, rate: float) -> Any:
        return self.inner.trust(state, rate)


def test_wrapped_rules_make_the_same_run() -> None:
    """Nothing depends on the classes of the default method's rules."""
    given: Any = {"case": 2, "budget": "time=2s", "drift_correction": True}
    named = fedbudget.train(**given, combine="clipped")
    wrapped = fedbudget.train(
        **given,
        controller=Wrapper(fedbudget.BalancedTau()),
        step_size=Wrapper(fedbudget.SearchedStep()),
        update=MovingWrapper(fedbudget.Accelerate()),
        combine=Wrapper(fedbudget.ClippedMean()),
    )
    assert np.array_equal(named.w, wrapped.w)
    assert [each.tau for each in named.rounds] == [each.tau for each in wrapped.rounds]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedbudget' has no attribute 'fit'"):
        _ = fedbudget.fit  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["fedbudget", "fedbudget.cli.main"])
def test_import_loads_nothing_slow(module: str) -> None:
    assert loaded_after(f"import {module}") == []


def test_help_of_train_is_readable() -> None:
    """The signature names types by their names, and the first paragraph follows it."""
    text = pydoc.render_doc(fedbudget.train, renderer=_PLAIN)
    signature, rest = text.split("-> 'Result'", 1)
    assert rest.lstrip().startswith("Train a model under a budget")
    assert not re.search("numpy|ndarray|Literal|collections", signature)
    assert len(signature) < 1500
