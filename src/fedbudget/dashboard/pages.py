"""The files that the page is made of, and the pages that are made without JavaScript."""

import html
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fedbudget.errors import UserError

_TYPES = {".css": "text/css", ".js": "text/javascript", ".html": "text/html", ".svg": "image/svg+xml"}


@cache
def page_files() -> dict[str, tuple[str, str]]:
    """Contents and media type of each, by name."""
    folder = files("fedbudget.dashboard").joinpath("page")
    return {
        file.name: (file.read_text(encoding="utf-8"), _TYPES[Path(file.name).suffix])
        for file in folder.iterdir()
        if Path(file.name).suffix in _TYPES
    }


def plotly_js() -> Path:
    """The charts' library, as the installed plotly carries it."""
    spec = find_spec("plotly")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, "package_data", "plotly.min.js")
        if path.is_file():
            return path
    raise UserError("this needs plotly; install it with: pip install 'fedbudget[dashboard]'")


def error_page(status: int, why: str) -> str:
    """A page that says what is wrong."""
    style = page_files()["style.css"][0]  # in the page itself: who is not let in gets no other file
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{status}</title>
<style>{style}</style>
<main class="complaint"><h1>{status}</h1><p>{html.escape(why)}</p><p><a href="/">All runs</a></p></main>
</html>
"""
