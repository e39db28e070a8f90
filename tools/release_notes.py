"""Prints the changelog section of a version, for its release page.

    python tools/release_notes.py 1.2.3

Exits with an error, which stops the release, if the version differs from the one in the
code, in CITATION.cff, or in the newest section of the changelog. It needs only Python.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(version: str, root: Path = ROOT) -> str:
    """Return the text of the section.

    Raises:
      SystemExit: the files do not agree on the version.
    """
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = list(re.finditer(r"^## (\S+)(.*)$", changelog, re.MULTILINE))
    places = {
        "src/fedbudget/__init__.py": _found(
            root / "src/fedbudget/__init__.py", r'^__version__ = "(.+)"$'
        ),
        "CITATION.cff": _found(root / "CITATION.cff", r"^version: (.+)$"),
        "the newest section of CHANGELOG.md": headings[0][1] if headings else "",
    }
    for place, has in places.items():
        if has != version:
            raise SystemExit(
                f"release_notes: {place} has {has or 'no version'}, not {version}"
            )
    if "unreleased" in headings[0][2]:
        raise SystemExit(
            f"release_notes: CHANGELOG.md marks {version} as unreleased; add a date"
        )
    end = headings[1].start() if len(headings) > 1 else len(changelog)
    return changelog[headings[0].end() : end].strip() + "\n"


def _found(path: Path, pattern: str) -> str:
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(notes(sys.argv[1]), end="")
