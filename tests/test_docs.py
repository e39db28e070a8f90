"""The documentation does what it says: every block of every page, and of the README, is run
or at least understood.

Blocks of a page are run in their order, in one empty folder, with the real command line;
Python blocks share their variables. What a page shows to be printed must be printed, with
about the same numbers. Commands of blocks that cannot be run here are parsed by the real
parser; pages say which these are, and why (tests/doc_blocks.py)."""

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
from fedbudget.errors import UserError
from support.browser import chromium, looking
from support.doc_blocks import Block, blocks_of, filled_in, runnable

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = [page for page in PAGES if any(block.marker == "slow" for block in blocks_of(page))]
LANGUAGES = {"sh", "console", "python", "ini", "toml", "text"}
ENDS = {
    ":",
    "base64",
    "cat",
    "chmod",
    "fedbudget",
    "head",
    "ls",
}  # programs that a test may start
GOES_ON = {"serve", "join", "dashboard"}  # commands that do not end by themselves
PATIENCE = 300.0  # seconds

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_every_block_is_of_a_kind_that_is_looked_at(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, (
            f"{block}: say what it is; text, if nothing can be done with it"
        )
        if block.language == "text":
            assert not re.search(r"^(\$ )?(fedbudget|pip) ", block.text, re.MULTILINE), (
                f"{block} has commands"
            )
        if block.language == "toml":
            tomllib.loads(block.text)


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
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
                understood(block, words[1:])
            if words[:2] == ["pip", "install"]:
                wanted = re.findall(r"\[([\w,]+)\]", " ".join(words))
                assert {extra for each in wanted for extra in each.split(",")} <= set(
                    extras
                ), f"{block}: {words}"
        if block.language == "python":
            compile(block.text, str(block), "exec")


@pages
def test_blocks_run_as_they_are_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([block for block in blocks_of(page) if not block.marker], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=lambda page: page.name)
def test_slow_blocks_run_too(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(
        [block for block in blocks_of(page) if block.marker != "parsed only"],
        tmp_path,
        monkeypatch,
    )


def test_the_reference_has_every_command_and_every_option() -> None:
    reference = of_docs("command_line").markdown()
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


def test_the_glossary_has_every_letter_and_word_once() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    rows = [re.sub(r"\(.*?\)", "", row) for row in rows if row not in ("letter", "word")]
    terms = [term.strip() for row in rows for term in row.split(",")]
    assert [term for term in terms if terms.count(term) > 1] == []
    letters = "w w^f F D N τ γ φ η ρ β δ h G T K M R s c b"
    words = "node, fleet, aggregator, round, local update, shard, budget, spent, estimate, controller, step size"
    words += ", update rule, engine, run, settings, task"
    assert {*letters.split(), *words.split(", ")} <= set(terms)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation's pages, built without a warning."""
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


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    made = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
    }
    assert {"index.html", "reference/command-line.html", "reference/python.html"} <= set(
        made
    )
    for name, html in made.items():
        loads = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", html)
        loads += re.findall(r"<link\b[^>]*\bhref=\"?([^\" >]+)", html)
        assert loads
        assert [each for each in loads if re.match(r"(\w+:)?//", each)] == [], name


@pytest.mark.slow
def test_pages_are_searched_from_disk_and_blocks_fit(site: Path) -> None:
    with chromium() as browser, looking(browser, width=1440) as look:
        page = look.page
        page.goto((site / "research" / "rivals.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("SCAFFOLD")
        page.wait_for_function(
            "/matching document/.test(document.querySelector('.md-search-result__meta').innerText)"
        )
        assert (
            look.complaints,
            [each for each in look.requests if not each.startswith("file:")],
        ) == ([], [])
        for file in [
            path
            for path in site.rglob("*.html")
            if "source" not in path.relative_to(site).parts
        ]:
            page.goto(file.as_uri())
            wide = "[...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
            assert page.evaluate(wide) == 0, file


def test_commands_are_found_wherever_a_shell_would_start_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n<!-- parsed only: why -->\n\n    for x in a b; do fedbudget data get $x; done   # fedbudget no\n"
        "    A=$(head -c 9 k) fedbudget run \\\n        --case 2 > out && fedbudget show runs/NAME | cat\n\n"
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
    "explain x",
)


@pytest.mark.parametrize("arguments", WRONG)
def test_a_command_that_is_wrong_is_not_understood(arguments: str) -> None:
    block = Block(Path("page.md"), 1, "sh", "")
    with pytest.raises((AssertionError, UserError)):
        understood(block, arguments.split())


def test_what_is_printed_may_differ_by_little_and_in_the_name_of_a_run_alone() -> None:
    assert alike("loss 0.2434,  run: runs/one", "loss 0.2431, run: runs/two")
    assert not alike("loss 0.2434", "loss 0.3434")
    assert not alike("loss 0.2434", "less 0.2434")


def understood(block: Block, arguments: list[str]) -> None:
    """Parsed as the command line does it, and made into settings where it has some; nothing
    is run.
    """
    command: Any = typer.main.get_command(app)
    names = ["fedbudget"]
    while hasattr(command, "commands") and arguments:
        assert arguments[0] in command.commands, (
            f"{block}: there is no {' '.join([*names, arguments[0]])}"
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


def run(blocks: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    variables: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, str(block), "exec"), variables)
        for script, shown in block.steps:
            for words in block.commands:
                ends = (words[0] in ENDS and not GOES_ON & set(words[1:2])) or words[
                    :2
                ] == [
                    "pip",
                    "install",
                ]
                assert ends, (
                    f"{block}: {' '.join(words[:2])} may not end here; say `parsed only`, and why"
                )
            printed = output_of(block, runnable(script), folder)
            position = 0
            for line in shown:
                found = [
                    at
                    for at, other in enumerate(printed[position:], position)
                    if alike(line, other)
                ]
                assert found, f"{block}: {line!r} is not printed, but\n" + "\n".join(
                    printed
                )
                position = found[0] + 1


def output_of(block: Block, script: str, folder: Path) -> list[str]:
    path = os.pathsep.join([str(Path(fedbudget()).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{block}: {script}\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def alike(shown: str, printed: str) -> bool:
    """The same words, and numbers that are the same but for what other processors may round
    differently.
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


def of_docs(name: str) -> Any:
    """A module that the site is built with."""
    spec = util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
