"""Release files: packages, images and workflows agree with the program, without running
them.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedbudget
from support.processes import Command, Commands, commands, summary

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load(
    (ROOT / "examples" / "compose" / "compose.yaml").read_text(encoding="utf-8")
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


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


VERSIONED = ("src/fedbudget/__init__.py", "CITATION.cff", "CHANGELOG.md")


def released(tmp_path: Path) -> Path:
    """Return a copy of the files with a version, in which the changelog has a date."""
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        text = text.replace("(unreleased)", "(2030-01-01)", 1)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_release_notes_match_the_version(tmp_path: Path) -> None:
    notes = tool("release_notes").notes(fedbudget.__version__, released(tmp_path))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(notes) > 500
    assert notes.strip() in changelog
    assert "\n## " not in notes


def test_version_without_date_is_refused(tmp_path: Path) -> None:
    changelog = released(tmp_path) / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    heading = f"## {fedbudget.__version__} "
    dated = text.index(heading) + len(heading)
    changelog.write_text(text[:dated] + "(unreleased)" + text[text.index("\n", dated) :])
    with pytest.raises(SystemExit, match="add a date"):
        tool("release_notes").notes(fedbudget.__version__, tmp_path)


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
    changed = released(tmp_path) / file
    text = changed.read_text(encoding="utf-8")
    changed.write_text(text.replace(old, new, 1), encoding="utf-8")
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
    extra = re.search(r"^ARG EXTRAS=(\w+)$", text, re.MULTILINE)
    assert extra is None or extra[1] in EXTRAS


@pytest.mark.parametrize("image", ["aggregator", "node", "build"])
def test_images_have_locked_packages(image: str) -> None:
    """Each package has one version and hashes, and each requirement is met by one."""
    text = (ROOT / "docker" / f"{image}.lock").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[a-z])", text.partition("\n")[2], flags=re.MULTILINE)[1:]
    locked = {}
    for entry in entries:
        name, version = re.match(r"([\w.-]+)(?:\[\w+\])?==(\S+)", entry).groups()  # type: ignore[union-attr]
        assert "--hash=sha256:" in entry, name
        locked[canonicalize_name(name)] = version
    for each in requirements_of(image):
        assert each.specifier.contains(locked[canonicalize_name(each.name)]), str(each)


def requirements_of(image: str) -> list[Requirement]:
    """The direct requirements of an image, with those of the extras in its extra."""
    if image == "build":
        return list(map(Requirement, PYPROJECT["build-system"]["requires"]))
    found = list(map(Requirement, PROJECT["dependencies"]))
    extras = [tool("lock_images").EXTRAS[image]]
    while extras:
        for each in map(Requirement, EXTRAS[extras.pop()]):
            if each.name == "fedbudget":
                extras += sorted(each.extras)
            else:
                found.append(each)
    return found


def test_requirements_have_upper_bounds() -> None:
    every = [*PROJECT["dependencies"], *PYPROJECT["build-system"]["requires"]]
    every += [each for extra in EXTRAS.values() for each in extra]
    unbounded = [
        each
        for each in map(Requirement, every)
        if each.name != "fedbudget"
        and not any(part.operator in ("<", "==") for part in each.specifier)
    ]
    assert unbounded == []


def test_actions_are_pinned_by_commit() -> None:
    uses = [
        line.strip()
        for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if "uses: " in line and "uses: ./" not in line
    ]
    assert len(uses) > 10
    pinned = re.compile(r"(- )?uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+")
    assert [line for line in uses if not pinned.fullmatch(line)] == []


def test_release_uses_no_other_index() -> None:
    release = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))
    assert "INDEX_URL" not in release
    assert tests["env"]["PIP_EXTRA_INDEX_URL"].startswith("${{ github.ref_type != 'tag' &&")
    for file in (ROOT / "docker").iterdir():
        assert "index" not in file.read_text(encoding="utf-8")


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
    assert summary(tmp_path / "runs" / "compose")["stopped_by"] in {"time", "validation"}


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


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("sped", 2)])
def test_benchmarks_explain_their_use(word: str, code: int) -> None:
    """Help goes to standard output, and the use of a wrong name to standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", word], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == code
    shown, silent = (done.stderr, done.stdout) if code else (done.stdout, done.stderr)
    assert shown.startswith("usage: python -m benchmarks [SECTION ...]")
    assert not silent
