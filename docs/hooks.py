"""Adds pages generated from the code: two references, and source files.

Pages link to source files and folders by their path in the repository
(`../src/fedbudget/budget/control.py`), so that links also work in a repository browser.
In the site, each linked file or folder becomes a page. A link to a missing file is a
warning, which fails a build with `--strict`.
"""

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import command_line
import compatibility

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?P<path>(?:\.\./)+(?:src|examples|benchmarks|docker)/[^)#\s]+)\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown"}
_log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated from the code."""
    pages = {
        "reference/command-line.md": command_line.markdown(),
        "reference/compatibility.md": compatibility.markdown(),
    }
    for file in files.documentation_pages():
        for found in _LINK.finditer(file.content_string):
            path = _in_repository(file.src_uri, found["path"])
            if not (_ROOT / path).exists():
                _log.warning("%s links to %s, which does not exist", file.src_uri, path)
                continue
            pages[_page_of(path)] = _source(path)
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turn links to source files into links to their pages."""
    here = page.file.src_uri

    def linked(found: re.Match[str]) -> str:
        target = _page_of(_in_repository(here, found["path"]))
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')})"

    return _LINK.sub(linked, markdown)


def _in_repository(page: str, link: str) -> str:
    """Return the path of a link's target, relative to the repository root."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _source(path: str) -> str:
    """Return a page with one file, or with all files of a folder."""
    files = (
        [_ROOT / path] if (_ROOT / path).is_file() else sorted((_ROOT / path).glob("*.*"))
    )
    page = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {path}\n"
    for file in files:
        language = _LANGUAGES.get(file.suffix, "text")
        title = "" if len(files) == 1 else f"\n## {file.name}\n"
        text = file.read_text(encoding="utf-8")
        page += f'{title}\n````{language} linenums="1"\n{text}````\n'
    return page
