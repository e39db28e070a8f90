"""The code blocks of Markdown pages, with their languages, markers and commands.

A block is fenced, with its language, or indented by four spaces; then its first line shows
the language. An HTML comment right before a block controls its test:

    <!-- parsed only: needs other machines -->      not run; its commands are checked
    <!-- slow: six processes -->                    run by `make test-slow` only

A block without such a comment is run. A block with a title is saved as a file of that name
for later blocks."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_FENCE = re.compile(r"(?P<fence>`{3,})(?P<language>\w*)(?: title=\"(?P<file>[\w.]+)\")?")
_MARKER = re.compile(r"<!-- (?P<kind>parsed only|slow): (?P<why>\S.*) -->")
_PLACEHOLDER = re.compile(r"<[a-z][a-z ]*>")
_LIST = re.compile(r"([-*]|\d+\.) ")
_NO_COMMAND = ("do", "done", "then", "fi", "else", "if", "exec", "!")
_ASSIGNMENT = re.compile(r"\w+=")
_PROGRAMS = re.compile(
    r"cd|chmod|fedbudget|flwr|for|git|head|kill|ls|make|mlflow|openssl|pip|python3?|ray|sudo|tensorboard"
)


@dataclass(frozen=True)
class Block:
    """One code block.

    Args:
      line: first line of the block in the page.
      language: `sh`, `console` (commands after `$ `, and their output), `python`, or the
        language of the fence; `text` for other indented blocks.
      marker: `parsed only`, `slow` or empty.
      why: the reason given with the marker.
      file: name of the file that the block defines, or empty.
    """

    page: Path
    line: int
    language: str
    text: str
    marker: str = ""
    why: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def steps(self) -> list[tuple[str, list[str]]]:
        """Shell scripts, each with the output lines shown on the page."""
        if self.language == "sh":
            return [(self.text, [])]
        steps: list[tuple[str, list[str]]] = []
        for line in (
            self.text.replace("\\\n", " ").splitlines()
            if self.language == "console"
            else ()
        ):
            if line.startswith("$ "):
                steps.append((line[2:], []))
            elif line.strip():
                steps[-1][1].append(line)
        return steps

    @property
    def commands(self) -> list[list[str]]:
        """All commands that a shell would start, as lists of words."""
        if self.language == "ini":
            return [words for script in _started(self.text) for words in _commands(script)]
        return [words for script, _ in self.steps for words in _commands(script)]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order. A marker without a block is an error."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    marker: re.Match[str] | None = None
    number, listed = 0, False
    while number < len(lines):
        line, begins = lines[number], number + 1
        if fence := _FENCE.match(line):
            end = next(
                at
                for at in range(number + 1, len(lines))
                if lines[at].startswith(fence["fence"])
            )
            block = _block(page, begins, fence["language"], lines[number + 1 : end], marker)
            found.append(replace(block, file=fence["file"] or ""))
            marker, number = None, end + 1
            continue
        if (
            line.startswith("    ")
            and not listed
            and (number == 0 or not lines[number - 1].strip())
        ):
            end = number
            while end < len(lines) and (
                lines[end].startswith("    ") or not lines[end].strip()
            ):
                end += 1
            inside = [each[4:] for each in lines[number:end]]
            found.append(_block(page, begins, _language(inside), inside, marker))
            marker, number = None, end
            continue
        if line.strip():
            assert marker is None, f"{page.name}:{number}: no block follows the marker"
            marker = _MARKER.fullmatch(line)
            assert marker or not re.match(r"<!-- *(parsed|slow)", line), (
                f"{page.name}:{begins}: the marker needs a reason: {line}"
            )
            listed = bool(_LIST.match(line)) or (listed and line.startswith(" "))
        number += 1
    return found


def runnable(script: str) -> str:
    """Return the script without `pip install`, which tests skip."""
    return "\n".join(
        ":" if line.startswith("pip install") else line for line in script.splitlines()
    )


def filled_in(script: str) -> str:
    """Return the script with its `<placeholders>` replaced by a word."""
    return _PLACEHOLDER.sub("FILLED-IN", script)


def _block(
    page: Path, line: int, language: str, inside: list[str], marker: re.Match[str] | None
) -> Block:
    text = "\n".join(inside).rstrip("\n") + "\n"
    return Block(
        page, line, language, text, *((marker["kind"], marker["why"]) if marker else ())
    )


def _language(inside: list[str]) -> str:
    first = inside[0].split()
    if first[0] == "$":
        return "console"
    if _PROGRAMS.fullmatch(first[0]):
        return "sh"
    try:
        tree = ast.parse("\n".join(inside))
    except SyntaxError:
        return "text"
    python = any(
        isinstance(node, ast.Call | ast.Import | ast.ImportFrom) for node in ast.walk(tree)
    )
    return "python" if python else "text"


def _commands(script: str) -> Iterator[list[str]]:
    for line in filled_in(script).replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
        words.whitespace_split = True
        command: list[str] = []
        redirected = False
        for word in [*words, ";"]:
            if word in ("<", ">", ">>"):
                redirected = True
            elif set(word) <= set(";&|()"):
                if command:
                    yield command
                command, redirected = [], False
            elif redirected:
                redirected = False
            elif word == "$@":
                continue  # the arguments are checked on the line that sets them
            elif command or not (word in _NO_COMMAND or _ASSIGNMENT.match(word)):
                command.append(word)


def _started(unit: str) -> Iterator[str]:
    """The commands that a systemd unit starts, as scripts."""
    for line in unit.splitlines():
        if line.startswith("ExecStart="):
            words = shlex.split(line.removeprefix("ExecStart="))
            yield words[2] if words[:2] == ["/bin/sh", "-c"] else shlex.join(words)
