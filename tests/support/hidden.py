"""Programs that cannot import some packages, as if these were not installed."""

HEAVY = (
    "numba",
    "llvmlite",
    "scipy",
    "sklearn",
    "matplotlib",
    "pandas",
    "torch",
    "ray",
    "flwr",
    "cryptography",
)
"""Packages that a small node does not need."""

_PROGRAM = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path = [Without if each is PathFinder else each for each in sys.meta_path]
"""


def without_packages(code: str, hidden: tuple[str, ...] = HEAVY) -> str:
    """Return the program with an import hook that hides these packages."""
    return _PROGRAM.format(hidden=hidden) + code
