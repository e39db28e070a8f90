"""Random streams: one function creates them, no two are equal, and their numbers never
change.
"""

import ast
from pathlib import Path

import numpy as np
import pytest

import fedbudget
from fedbudget.randomness import Stream, generator

SOURCES = Path(fedbudget.__file__).parent
MAKERS = {
    "default_rng",
    "SeedSequence",
    "RandomState",
    "PCG64",
    "MT19937",
    "Philox",
    "SFC64",
}
CALLS = {
    "randomness.py": 1,
    # The first centres of k-means use the seed alone; another stream would change runs.
    "models/builtin.py": 1,
    "data/dataset.py": 1,  # test samples, the same for every seed of a run
    "experiments/federations.py": 1,  # test rows of federations, by a seed of their own
    "data/builtin.py": 2,  # choice of training and test samples in the small datasets
}


def test_stream_numbers_never_change() -> None:
    """A changed number changes runs. A repeated number gives two streams the same draws."""
    numbers = {name: stream.value for name, stream in Stream.__members__.items()}
    first = {
        "MINI_BATCHES": 0,
        "PARTITION": 1,
        "COSTS": 2,
        "SAMPLES": 3,
        "ABSENCE": 4,
        "FORECASTS": 5,
    }
    later = {"SPEEDS": 6, "ATTACK": 7, "PRIVACY": 8, "SAMPLE_PRIVACY": 9, "VALIDATION": 10}
    latest = {"PERSONAL": 11, "NOISE_SHARES": 12}
    assert numbers == {**first, **later, **latest}


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_streams_of_a_seed_differ(seed: int) -> None:
    draws = {generator(seed, stream).bytes(16) for stream in Stream}
    assert len(draws) == len(Stream)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_mini_batches_use_the_seed(seed: int) -> None:
    assert generator(seed, Stream.MINI_BATCHES).bytes(16) == np.random.default_rng(
        seed
    ).bytes(16)


def test_no_other_code_creates_generators() -> None:
    calls = {
        path.relative_to(SOURCES).as_posix(): sum(name in MAKERS for name in _names(path))
        for path in SOURCES.rglob("*.py")
    }
    assert {path: count for path, count in calls.items() if count} == CALLS


def test_names_include_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for line in (
        "np.random.default_rng(1)",
        "from numpy.random import default_rng as d",
        "default_rng([1, 2])",
    ):
        path.write_text(line)
        assert "default_rng" in _names(path)


def _names(path: Path) -> list[str]:
    """Every name, attribute and import in a file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names]
    return names
