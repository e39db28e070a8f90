"""The file hashes.json: reference hashes and their environment.

The hashes hold for the packages in constraints.txt and for one type of CPU:

- Other versions of Python, numpy, numba, PyTorch or scikit-learn may round differently.
- Without numba the models run in plain numpy, which rounds differently.
- numba, BLAS and PyTorch choose instructions by CPU. Almost every hash depends on it.

A test is skipped if one of these differs from the stored environment. On such a
machine, create hashes from the last good commit and test later commits with them:

    GOLDEN_HASHES=/tmp/hashes.json PYTHONPATH=tests python -m golden.regenerate
    GOLDEN_HASHES=/tmp/hashes.json pytest tests/golden
"""

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from golden.cell import Cell
from golden.running import Hashes

PATH = Path(os.environ.get("GOLDEN_HASHES") or Path(__file__).with_name("hashes.json"))
CORE = ("python", "machine", "cpu", "numpy", "numba", "llvmlite", "scikit-learn")
INSTRUCTIONS = ("avx2", "avx512f", "fma")


def environment() -> dict[str, str | None]:
    """Return the versions and CPU features that change the bits of a run."""
    packages = ("numpy", "numba", "llvmlite", "scikit-learn", "torch")
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "cpu": _cpu(),
        **{name: _version(name) for name in packages},
    }


def difference(cell: Cell, stored: dict[str, Any]) -> str | None:
    """Return the differences from the stored environment that affect a cell, or None."""
    now = environment()
    then = stored["environment"]
    names = [*CORE, "torch"] if "torch" in cell.needs else [*CORE]
    differing = [
        f"{name} {now[name] or 'missing'} instead of {then[name] or 'missing'}"
        for name in names
        if now[name] != then[name]
    ]
    return ", ".join(differing) or None


def read() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return stored


def write(hashes: dict[str, Hashes]) -> None:
    """Replace hashes.json."""
    runs = {name: asdict(hashes[name]) for name in hashes}
    content = {"environment": environment(), "runs": runs}
    PATH.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str | None:
    """Return the CPU name of LLVM and the vector instructions."""
    try:
        from llvmlite import binding  # type: ignore[import-untyped]
    except ImportError:
        return None
    features = binding.get_host_cpu_features()
    found = [name for name in INSTRUCTIONS if features.get(name)]
    return " ".join([binding.get_host_cpu_name(), *found])
