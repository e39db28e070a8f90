"""Programs in processes in which some packages are not installed, as far as they can tell."""

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
"""All that a small node does without."""

_PROGRAM = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else PathFinder.find_spec(name, path, target)

sys.meta_path = [Without if each is PathFinder else each for each in sys.meta_path]
"""


def without(code: str, hidden: tuple[str, ...] = HEAVY) -> str:
    """The program, which finds none of these packages."""
    return _PROGRAM.format(hidden=hidden) + code
