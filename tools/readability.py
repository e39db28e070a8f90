"""Count what makes fedbudget hard or easy to read, and compare it with limits.

    python tools/readability.py             the counts and their limits
    python tools/readability.py --examples  also a few sentences behind every count of words

Two things are counted. Code: files, tokens without comments and docstrings, tokens per line
of code, the longest file and the largest folder of the package. Prose: words that make a
sentence hard to follow, per 10,000 words of docstrings, comments, messages and pages.
The exit code is 1 when a limit is exceeded; `make check` runs this script. The number of
code tokens has a goal instead of a limit, which does not fail the check.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "src" / "fedbudget"

MOST_FILES = 240
MOST_TOKENS = 245_000
MOST_TOKENS_PER_LINE = 8.5
LONGEST_FILE = 700
LARGEST_FOLDER = 16

SIGNS = {
    "where": (r"where", 35.0),
    "told, tells, said, says": (r"told|tells|said|says", 3.0),
    "nobody, somebody, whoever": (r"nobody|somebody|whoever", 1.0),
}
"""A name, a pattern of whole words, and the most per 10,000 words."""

_LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True)
class CodeSize:
    """Size of one file.

    Args:
      tokens: tokens of code, without comments and docstrings.
      code_lines: lines that hold such tokens.
      lines: all lines.
    """

    tokens: int
    code_lines: int
    lines: int


@dataclass(frozen=True)
class Check:
    """A measured value and its limit.

    Args:
      name: what is measured.
      value: the measured value.
      limit: the largest accepted value.
      goal: whether the limit is a goal, which does not fail the check.
    """

    name: str
    value: float
    limit: float
    goal: bool = False

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def main() -> int:
    """Print all checks. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument(
        "--examples", action="store_true", help="show sentences with the words"
    )
    arguments = parser.parse_args()
    text = list(prose())
    checks = [*code_checks(), *prose_checks(text)]
    for check in checks:
        kind = "goal" if check.goal else "limit"
        mark = "ok" if check.passed else "EXCEEDED"
        print(f"{check.name:45} {check.value:10,.1f}  {kind:5} {check.limit:9,.1f}  {mark}")
    if arguments.examples:
        print_examples(text)
    return 0 if all(check.passed or check.goal for check in checks) else 1


def code_checks() -> list[Check]:
    """Measure the package."""
    sizes = {path: code_size(path) for path in python_files(PACKAGE)}
    folders = {path.parent for path in sizes}
    tokens = sum(size.tokens for size in sizes.values())
    code_lines = sum(size.code_lines for size in sizes.values())
    return [
        Check("files", len(sizes), MOST_FILES),
        Check("code tokens", tokens, MOST_TOKENS, goal=True),
        Check("code tokens per line", tokens / code_lines, MOST_TOKENS_PER_LINE),
        Check(
            "lines of the longest file",
            max(s.lines for s in sizes.values()),
            LONGEST_FILE,
        ),
        Check(
            "files in a folder",
            max(len(list(f.glob("*.py"))) for f in folders),
            LARGEST_FOLDER,
        ),
    ]


def prose_checks(text: list[str]) -> list[Check]:
    """Count the words of `SIGNS` per 10,000 words of text."""
    whole = "\n".join(text)
    words = len(re.findall(r"[A-Za-zÀ-ÿ']+", whole))
    checks = []
    for name, (pattern, limit) in SIGNS.items():
        count = len(re.findall(rf"\b(?:{pattern})\b", whole, re.IGNORECASE))
        checks.append(Check(f"{name}, per 10,000 words", 1e4 * count / words, limit))
    return checks


def print_examples(text: list[str], most: int = 12) -> None:
    """Print pieces of text that hold a counted word."""
    for name, (pattern, _) in SIGNS.items():
        found = [
            piece
            for piece in text
            if re.search(rf"\b(?:{pattern})\b", piece, re.IGNORECASE)
        ]
        print(f"\n{name}: {len(found)} pieces of text")
        for piece in found[:most]:
            match = re.search(rf"\b(?:{pattern})\b", piece, re.IGNORECASE)
            assert match is not None
            begin = max(0, match.start() - 60)
            print("   ", " ".join(piece[begin : match.end() + 60].split()))


def python_files(folder: Path) -> Iterator[Path]:
    """Python files below a folder."""
    yield from sorted(folder.rglob("*.py"))


def code_size(path: Path) -> CodeSize:
    """Count the tokens and lines of a file."""
    source = path.read_text(encoding="utf-8")
    skipped = {
        line
        for node in docstrings(ast.parse(source))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT_TOKENS or token.start[0] in skipped:
            continue
        tokens += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    return CodeSize(tokens, len(lines), len(source.splitlines()))


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """String statements: docstrings of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node.value


def prose() -> Iterator[str]:
    """All text for readers: docstrings, comments and messages of the package, and pages."""
    for path in python_files(PACKAGE):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if node.value.count(" ") >= 2:
                yield node.value
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    pages = [*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")]
    for path in sorted(pages):
        yield without_code(path.read_text(encoding="utf-8"))


def without_code(page: str) -> str:
    """A page without its fenced and indented blocks of code."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", page, flags=re.MULTILINE)


class _Help(argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())
