"""Release files: packages, images and workflows agree with the program, without running
them.
"""

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import fedbudget
from support.processes import Command, Commands, commands, summary

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load(
    (ROOT / "examples" / "compose" / "compose.yaml").read_text(encoding="utf-8")
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_module_is_the_command(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        shown = start.run("--version", program=[sys.executable, "-m", "fedbudget"])
        assert shown.end() == 0
        assert shown.printed.strip() == f"fedbudget {fedbudget.__version__}"


def test_release_notes_match_the_version() -> None:
    notes = tool("release_notes").notes(fedbudget.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(notes) > 500
    assert notes.strip() in changelog
    assert "\n## " not in notes


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("src/fedbudget/__init__.py", fedbudget.__version__, "9.9.9"),
        ("CITATION.cff", fedbudget.__version__, "9.9.9"),
        ("CHANGELOG.md", f"## {fedbudget.__version__}", "## 9.9.9"),
        ("CHANGELOG.md", "\n## ", "\n## 9.9.9 (2030-01-01)\n\n## "),
    ],
)
def test_different_versions_are_refused(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    for name in ("src/fedbudget/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(
            text.replace(old, new, 1) if name == file else text, encoding="utf-8"
        )
    with pytest.raises(SystemExit, match=r"9\.9\.9"):
        tool("release_notes").notes(fedbudget.__version__, tmp_path)


def test_every_extra_is_tested() -> None:
    """`tools/try_wheel.py` must use every extra, not only install it."""
    trial = tool("try_wheel")
    idle = [
        extra
        for extra in EXTRAS
        if not {extra} & {*trial._COMMANDS, *trial._PROGRAMS, "node", "dev"}
    ]
    assert idle == []


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda file: file.stem
)
def test_images_use_existing_files(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored
    installed = re.search(r"/source\[(\w+|\$EXTRAS)\]", text)
    assert installed is not None
    extra = re.search(r"^ARG EXTRAS=(\w+)$", text, re.MULTILINE)
    assert (extra[1] if extra else installed[1]) in EXTRAS


def test_workflows_call_existing_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for file in sorted((ROOT / ".github").rglob("*.yml")):
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
        steps = [
            step for job in read.get("jobs", {}).values() for step in job.get("steps", ())
        ]
        for line in [step["run"] for step in steps if "run" in step]:
            words = shlex.split(line)
            if words[0] == "make":
                assert f"\n{words[1]}:" in makefile, line
            for word in words:
                if word.startswith(("tools/", "examples/")):
                    assert (ROOT / word).is_file(), line


@pytest.mark.slow
def test_compose_example_trains(tmp_path: Path) -> None:
    """Run the commands of the containers as processes of this machine."""
    with commands(tmp_path) as start:
        assert start.run("certs", "secrets", "--host", "localhost").end() == 0
        (tmp_path / "secrets" / "token").write_text("a-secret-that-is-long-enough\n")
        (tmp_path / "secrets" / "token").chmod(0o600)
        started = [_container(start, name) for name in COMPOSE["services"]]
        assert [each.end() for each in started] == [0] * 4
    assert summary(tmp_path / "runs" / "compose")["stopped_by"] == "time"


_BUDGET = "${BUDGET:-30s}"


def _container(start: Commands, name: str) -> Command:
    service = COMPOSE["services"][name]
    file = (ROOT / "docker" / Path(service["build"]["dockerfile"]).name).read_text(
        encoding="utf-8"
    )
    entry = re.search(r"^ENTRYPOINT \[(.+)\]$", file, re.MULTILINE)
    assert entry is not None
    command = " ".join([*re.findall(r'"([^"]+)"', entry[1])[1:], service["command"]])
    here = re.sub(r"(0\.0\.0\.0|aggregator):7700", "localhost:7792", command)
    return start.run(
        *shlex.split(
            here.replace("/secrets", "secrets")
            .replace("/runs", "runs")
            .replace(_BUDGET, "3s")
        )
    )
