"""Every code block of the README and of the documentation runs, or at least parses.

The blocks of a page run in order, in one empty folder, with the installed command. Python
blocks share their variables. The output that a page shows must be printed, with about the
same numbers. Blocks that cannot run here are only parsed; a comment in the page gives the
reason (tests/support/doc_blocks.py).
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import typer

from fedbudget.cli.main import app
from fedbudget.cli.options import settings_from
from fedbudget.errors import UserError, flag
from fedbudget.settings.compatibility import CONFLICTS
from support.browser import chromium, open_page
from support.doc_blocks import Block, blocks_of, filled_in, runnable

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = [page for page in PAGES if any(block.marker == "slow" for block in blocks_of(page))]
LANGUAGES = {"sh", "console", "python", "ini", "toml", "text"}
PROGRAMS = {":", "base64", "cat", "chmod", "fedbudget", "head", "ls"}  # may be started
ENDLESS = {"serve", "join", "dashboard"}  # commands that do not end by themselves
TIMEOUT = 300.0  # seconds

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_page_starts_with_its_title(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1


@pages
def test_blocks_have_a_known_language(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, (
            f"{block}: name its language; use text for everything else"
        )
        if block.language == "text":
            assert not re.search(r"^(\$ )?(fedbudget|pip) ", block.text, re.MULTILINE), (
                f"{block} has commands"
            )
        if block.language == "toml":
            tomllib.loads(block.text)


@pages
def test_commands_and_options_exist(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]["optional-dependencies"]
    for block in blocks_of(page):
        for script, _ in block.steps:
            assert (
                subprocess.run(["bash", "-n", "-c", filled_in(script)]).returncode == 0
            ), f"{block}: {script}"
        for words in block.commands:
            if Path(words[0]).name == "fedbudget":
                parse(block, words[1:])
            if words[:2] == ["pip", "install"]:
                wanted = re.findall(r"\[([\w,]+)\]", " ".join(words))
                assert {extra for each in wanted for extra in each.split(",")} <= set(
                    extras
                ), f"{block}: {words}"
        if block.language == "python":
            compile(block.text, str(block), "exec")


@pages
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(
        [block for block in blocks_of(page) if not block.marker], tmp_path, monkeypatch
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=lambda page: page.name)
def test_slow_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_blocks(
        [block for block in blocks_of(page) if block.marker != "parsed only"],
        tmp_path,
        monkeypatch,
    )


def test_compatibility_page_lists_every_conflict() -> None:
    page = docs_module("compatibility").markdown()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    headings = page.count("| value |")
    assert len(rows) - headings == len(CONFLICTS)
    for row in CONFLICTS:
        assert all(f"`{flag(name)}`" in page for name in row.options)


def test_reference_lists_every_option() -> None:
    reference = docs_module("command_line").markdown()
    section = re.compile(
        r"^## fedbudget ([\w ]+) \{.*?\}\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
    )
    sections = dict(section.findall(reference))
    for words in ("run", "serve", "join", "explain", "data get"):
        options = set(re.findall(r"^  (--[\w-]+)", help_of(words), re.MULTILINE)) - {
            "--help"
        }
        assert options
        assert options <= set(re.findall(r"`(--[\w-]+)", sections[words])), words
    commands = re.findall(r"^  (\w+)  ", help_of().split("Commands:")[1], re.MULTILINE)
    assert {name.split()[0] for name in sections} == set(commands)


def test_glossary_has_every_term_once() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    rows = [re.sub(r"\(.*?\)", "", row) for row in rows if row not in ("letter", "word")]
    terms = [term.strip() for row in rows for term in row.split(",")]
    assert [term for term in terms if terms.count(term) > 1] == []
    letters = "w w^f F D N τ γ φ η ρ β δ h G T K M R s c b"
    words = "node, fleet, aggregator, round, local update, shard, budget, spent, estimate"
    words += ", controller, step size, update rule, engine, run, settings, task"
    assert {*letters.split(), *words.split(", ")} <= set(terms)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation without warnings."""
    folder = tmp_path_factory.mktemp("site")
    mkdocs = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    built = subprocess.run(
        mkdocs,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    html_pages = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
    }
    assert {"index.html", "reference/command-line.html", "reference/python.html"} <= set(
        html_pages
    )
    for name, html in html_pages.items():
        loads = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", html)
        loads += re.findall(r"<link\b[^>]*\bhref=\"?([^\" >]+)", html)
        assert loads
        assert [each for each in loads if re.match(r"(\w+:)?//", each)] == [], name


@pytest.mark.slow
def test_search_works_and_blocks_fit(site: Path) -> None:
    """Search works for pages opened from disk, and no code block needs a scroll bar."""
    with chromium() as browser, open_page(browser, width=1440) as opened:
        page = opened.page
        page.goto((site / "research" / "rivals.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("SCAFFOLD")
        page.wait_for_function(
            "/matching document/.test("
            "document.querySelector('.md-search-result__meta').innerText)"
        )
        assert (
            opened.console_errors,
            [each for each in opened.requests if not each.startswith("file:")],
        ) == ([], [])
        for file in [
            path
            for path in site.rglob("*.html")
            if "source" not in path.relative_to(site).parts
        ]:
            page.goto(file.as_uri())
            wide = "[...document.querySelectorAll('pre > code')]"
            wide += ".filter(e => e.scrollWidth > e.clientWidth + 1).length"
            assert page.evaluate(wide) == 0, file


def test_commands_are_extracted_from_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n<!-- parsed only: why -->\n\n"
        "    for x in a b; do fedbudget data get $x; done   # fedbudget no\n"
        "    A=$(head -c 9 k) fedbudget run \\\n"
        "        --case 2 > out && fedbudget show runs/NAME | cat\n\n"
        "- a list\n\n    fedbudget is in this item's text\n\n"
        "```ini\nExecStart=/bin/sh -c 'exec /opt/bin/fedbudget serve \"$@\"'\n```\n\n"
        "```console\n$ fedbudget tasks\nsvm-digits\n```\n"
    )
    first, unit, console = blocks_of(page)
    assert (first.line, first.language, first.marker, first.why) == (
        5,
        "sh",
        "parsed only",
        "why",
    )
    assert [words for words in first.commands if words[0] == "fedbudget"] == [
        ["fedbudget", "data", "get", "$x"],
        ["fedbudget", "run", "--case", "2"],
        ["fedbudget", "show", "runs/NAME"],
    ]
    assert unit.commands == [["/opt/bin/fedbudget", "serve"]]
    assert console.steps == [("fedbudget tasks", ["svm-digits"])]


WRONG = (
    "runn",
    "run --budgets time=1s",
    "run --nodes five",
    "run --budget time=1parsec",
    "data get",
    "explain x --round one",
)


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_commands_are_refused(arguments: str) -> None:
    block = Block(Path("page.md"), 1, "sh", "")
    with pytest.raises((AssertionError, UserError)):
        parse(block, arguments.split())


def test_output_may_differ_slightly() -> None:
    """Numbers may differ by 5 %, and run folders may have other names."""
    assert matches("loss 0.2434,  run: runs/one", "loss 0.2431, run: runs/two")
    assert not matches("loss 0.2434", "loss 0.3434")
    assert not matches("loss 0.2434", "less 0.2434")


def parse(block: Block, arguments: list[str]) -> None:
    """Parse arguments like the command line and create their settings, without running."""
    command: Any = typer.main.get_command(app)
    names = ["fedbudget"]
    while hasattr(command, "commands") and arguments:
        assert arguments[0] in command.commands, (
            f"{block}: unknown command {' '.join([*names, arguments[0]])}"
        )
        names.append(arguments[0])
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        given = command.make_context(" ".join(names), list(arguments)).params
    except Exception as error:
        raise AssertionError(f"{block}: {' '.join(names)}: {error}") from error
    if (
        names[-1] in ("run", "local", "serve", "compare")
        and given["config"] is None
        and given.get("resume") is None
    ):
        settings_from(
            {name: None if value == () else value for name, value in given.items()}
        )


def run_blocks(blocks: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    variables: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, str(block), "exec"), variables)
        for script, shown in block.steps:
            for words in block.commands:
                finite = words[0] in PROGRAMS and not ENDLESS & set(words[1:2])
                assert finite or words[:2] == ["pip", "install"], (
                    f"{block}: {' '.join(words[:2])} may never end; mark it `parsed only`"
                )
            printed = output_of(block, runnable(script), folder)
            position = 0
            for line in shown:
                matching = [
                    at
                    for at, other in enumerate(printed[position:], position)
                    if matches(line, other)
                ]
                assert matching, f"{block}: {line!r} is not in the output:\n" + "\n".join(
                    printed
                )
                position = matching[0] + 1


def output_of(block: Block, script: str, folder: Path) -> list[str]:
    path = os.pathsep.join([str(Path(fedbudget()).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{block}: {script}\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def matches(shown: str, printed: str) -> bool:
    """Return whether two lines have the same words and about the same numbers.

    Processors round differently, and run folders have different names.
    """
    shown, printed = (
        re.sub(r"runs/\S+", "runs", " ".join(line.split())) for line in (shown, printed)
    )
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    numbers = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(
        float(one) == pytest.approx(float(other), rel=0.05, abs=0.02)
        for one, other in numbers
    )


def help_of(words: str = "") -> str:
    return subprocess.run(
        [fedbudget(), *words.split(), "--help"], check=True, capture_output=True, text=True
    ).stdout


def fedbudget() -> str:
    return str(Path(sys.executable).with_name("fedbudget"))


def docs_module(name: str) -> Any:
    """Import a module that builds the site."""
    spec = util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
