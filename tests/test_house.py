"""The rooms of the house: every import points the way that it should, and no module imports itself by a detour."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedbudget

ROOT = Path(fedbudget.__file__).parent

BOTTOM = {"errors", "python_file", "arrays", "atomic_file", "persistence", "randomness", "node_status", "option"}
CORE = {"theory", "resources", "budget", "control", "spending", "step_size", "protocol", "models", "data", "meters"}
SETTINGS = {"setting_checks", "setting_types", "settings"}
BELOW: dict[str, set[str]] = {
    "theory": set(),
    "resources": set(),
    "budget": {"resources"},
    "control": {"theory"},
    "spending": {"budget", "control"},
    "step_size": set(),
    "data": set(),
    "models": {"data"},
    "meters": {"budget", "resources"},
    "protocol": {"control", "spending", "step_size", "budget", "theory", "models", "data"},
    "secure": {"protocol", "models"},
    "targets": set(),
    "setting_types": set(),
    "setting_checks": {"data", "resources"},
    "settings": {"setting_checks", "setting_types", "budget", "resources", "data", "tasks", "targets"},
    "engines": {"protocol", "secure", *CORE},
    "runs": {"settings", *CORE},
    "forecasts": {"runs", "settings", "targets", *CORE},
    "tasks": set(),
    "trackers": {"runs", "settings", *CORE},
    "launch": {"engines", "runs", "secure", *SETTINGS, *CORE},
    "judge": {"launch", "runs", "settings", "targets", *CORE},
    "trained": {"runs", *CORE},
    "result": {"runs", "trained"},
    "network": {"training", "result", "launch", "trackers", "engines", *SETTINGS, *CORE},
    "training": {
        *("result", "trained", "judge", "launch", "forecasts", "trackers", "tasks", "engines", "runs"),
        *SETTINGS,
        *CORE,
    },
}
"""What a room may import besides itself and what is at the bottom; the rooms that are not here may import all."""

TOP = {"cli", "dashboard", "experiments", "flower", "__main__", "__init__"}
"""They import one another only downwards: cli imports the other three, and nobody imports cli."""


def modules() -> dict[str, Path]:
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(("fedbudget", *(part for part in parts if part != "__init__")))] = path
    return names


MODULES = modules()


def imports(module: str, path: Path) -> Iterator[str]:
    """Modules of ours that it imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in whole)


def room(module: str) -> str:
    return [*module.split("."), "__init__"][1]


EDGES = {(module, other) for module, path in MODULES.items() for other in imports(module, path) if other != module}


@pytest.mark.parametrize("name", sorted({room(module) for module in MODULES}))
def test_imports_point_down(name: str) -> None:
    allowed = BELOW.get(name, {room(module) for module in MODULES} - {"cli"} if name != "__main__" else {"cli"})
    allowed = {*BOTTOM} if name in BOTTOM else allowed | {name, *BOTTOM, "__init__"}
    wrong = sorted(f"{one} -> {other}" for one, other in EDGES if room(one) == name and room(other) not in allowed)
    assert not wrong


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in MODULES} == BOTTOM | TOP | BELOW.keys()


def test_no_module_imports_itself_by_a_detour() -> None:
    """Over all imports, also late ones; but the package itself looks its public names up when they are asked for."""
    below = {module: {other for one, other in EDGES if one == module and other != "fedbudget"} for module in MODULES}
    while leaves := [module for module, others in below.items() if not others]:
        for leaf in leaves:
            del below[leaf]
        for others in below.values():
            others.difference_update(leaves)
    assert not below, f"cycles among {sorted(below)}"


def test_no_two_places_share_more_than_twelve_lines() -> None:
    """Of code: blank lines, comments and imports do not count, and white space at the ends of lines neither."""
    places: dict[tuple[str, ...], str] = {}
    twice = []
    for module, path in MODULES.items():
        if path.name == "wire_pb2.py":
            continue
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
        for first in range(len(lines) - 12):
            block = tuple(lines[first : first + 13])
            if block in places:
                twice.append(f"{places[block]} and {module}: {block[0]}")
            places[block] = module
    assert not twice


def test_files_have_one_idea() -> None:
    """None has more than 400 lines, of tests and benchmarks too."""
    project = Path(__file__).parents[1]
    paths = [
        path for room in ("src", "tests", "benchmarks", "examples", "docs") for path in (project / room).rglob("*.py")
    ]
    long = {path.name for path in paths if len(path.read_text(encoding="utf-8").splitlines()) > 400}
    assert not long


def test_class_names_mean_one_thing() -> None:
    """Private ones may be repeated: they are seen in one file only."""
    homes: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}
