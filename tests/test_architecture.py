"""Architecture: imports point one way, a file is one idea, a name means one thing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedbudget

ROOT = Path(fedbudget.__file__).parent
PROJECT = Path(__file__).parents[1]

LAYERS = (
    {
        "arrays",
        "codec",
        "durable_files",
        "file_contents",
        "errors",
        "frozen",
        "node_status",
        "python_file",
        "randomness",
    },
    {"tasks", "settings.option", "settings.types"},
    {"resources", "budget"},
    {"data"},
    {"models"},
    {"evaluation.metrics", "evaluation.points", "evaluation.targets", "evaluation.kept"},
    {"protocol"},
    {"secure"},
    {"engines"},
    {"settings"},
    {"runs"},
    {"trained", "forecasts", "trackers"},
    {"result"},
    {"launch", "evaluation.evaluator"},
    {"api"},
    {"estimators"},
    {"dashboard", "doctor", "experiments", "flower"},
    {"cli"},
    {"__main__", "__init__"},
)
"""Packages and modules, lowest first. Each imports its own layer and the layers below."""

EXCEPTIONS = {
    ("budget.budget", "resources"),
    ("evaluation.targets", "runs.record"),
    ("settings.settings", "evaluation.targets"),
    ("engines.grpc.certificates", "settings.option"),
}
"""Pairs that are allowed although the layers forbid them; keep this list short."""


def modules() -> dict[str, Path]:
    """Path of every module of the package, by its dotted name without `fedbudget.`."""
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        names[name or "__init__"] = path
    return names


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Modules of fedbudget that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("fedbudget."):
                short = name.removeprefix("fedbudget.")
                yield short if short in MODULES else short.rpartition(".")[0] or "__init__"


EDGES = {
    (module, other)
    for module, path in MODULES.items()
    for other in imports(path)
    if other != module and other in MODULES
}


def layer(module: str) -> int:
    """Index of the layer of a module; the longest matching entry decides."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for index, names in enumerate(LAYERS):
            if prefix in names:
                return index
    raise AssertionError(f"{module} is in no layer")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    wrong = sorted(
        other
        for one, other in EDGES
        if one == module
        and other != "__init__"
        and layer(other) > layer(one)
        and (one, other) not in EXCEPTIONS
    )
    assert not wrong


def test_no_import_cycle() -> None:
    """Late imports count too. The package itself resolves its public names on first use."""
    below = {
        module: {other for one, other in EDGES if one == module and other != "__init__"}
        for module in MODULES
    }
    while leaves := [module for module, others in below.items() if not others]:
        for leaf in leaves:
            del below[leaf]
        for others in below.values():
            others.difference_update(leaves)
    assert not below, f"cycles among {sorted(below)}"


def test_no_repeated_blocks() -> None:
    """No two places share more than twelve lines of code."""
    places: dict[tuple[str, ...], str] = {}
    repeated = []
    for module, path in MODULES.items():
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [
            line
            for line in lines
            if line and not line.startswith(("#", "import ", "from "))
        ]
        for first in range(len(lines) - 12):
            block = tuple(lines[first : first + 13])
            if block in places:
                repeated.append(f"{places[block]} and {module}: {block[0]}")
            places[block] = module
    assert not repeated


def test_file_length() -> None:
    """No Python file has more than 700 lines."""
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    paths = [path for folder in folders for path in (PROJECT / folder).rglob("*.py")]
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in paths
    }
    assert {name: length for name, length in lengths.items() if length > 700} == {}


def test_folder_size() -> None:
    """No folder of the package has more than 16 Python files."""
    folders = {path.parent for path in MODULES.values()}
    counts = {
        str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders
    }
    assert {name: count for name, count in counts.items() if count > 16} == {}


def test_one_assignment_per_statement() -> None:
    """No `a, b = x, y` that only saves a line; a swap is allowed."""
    places = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and is_line_saver(node):
                places.append(f"{module}:{node.lineno}")
    assert not places


def is_line_saver(node: ast.Assign) -> bool:
    """Return whether a tuple assignment could be separate statements."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    stored = {ast.unparse(each) for each in target.elts}
    loaded = {
        ast.unparse(each)
        for each in ast.walk(node.value)
        if isinstance(each, ast.Name | ast.Attribute)
    }
    return not stored & loaded


def test_class_names_are_unique() -> None:
    """One public class name means one thing."""
    homes: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_core_imports_no_extra() -> None:
    """`import fedbudget.protocol.fleet` loads none of the optional libraries."""
    extras = ("torch", "grpc", "ray", "flwr", "matplotlib", "cryptography", "numba")
    code = "import sys, fedbudget.protocol.fleet\n"
    code += f"print([name for name in {extras} if name in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"
