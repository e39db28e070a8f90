"""Runs as one HTML file that opens from disk: charts, figures and texts.

Rules here:
- The file loads nothing; a content security policy enforces this.
- Figures are JSON inside the page, with every `<` escaped, so that no text of a run can
  end its script element.
"""

import html
import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fedbudget import __version__
from fedbudget.dashboard import series
from fedbudget.dashboard.access import page_files
from fedbudget.dashboard.run_reader import RunSnapshot

MAX_CURVES = 300
"""Maximum number of G curves of a report."""

MIN_ROUNDS = 300
"""Rounds of a chart if a report has many runs, about."""

# Modules in the order of their imports.
_MODULES = (
    *("dom.js", "theme.js", "plot.js", "charts.js"),
    *("run.js", "compare.js", "report.js"),
)
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
_IMPORT = re.compile(r'^import (?:\* as )?(.*) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function (\w+)|const (\w+))", re.MULTILINE)


def report(runs: Sequence[RunSnapshot]) -> str:
    """Return the text of the HTML file."""
    names = ", ".join(snapshot.name for snapshot in runs)
    files = {name: content for name, (content, _) in page_files().items()}
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="fedbudget {__version__}">
<title>{html.escape(names)} · fedbudget</title>
<style>{files["style.css"]}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header class="top">
  <span class="brand">fedbudget</span>
  <span class="muted" style="flex: 1">Report of {datetime.now():%Y-%m-%d %H:%M}</span>
  <button id="theme" type="button">Theme</button>
</header>
<main id="content" tabindex="-1"></main>
<script type="application/json" id="figures">{_embedded({"runs": figures(runs)})}</script>
<script type="module">{bundled(files)}</script>
</body>
</html>
"""


def figures(runs: Sequence[RunSnapshot]) -> list[dict[str, Any]]:
    """Return the figures of each run: those of the page, and G curves.

    Several runs share the limits of rounds and curves, and numbers have six digits, so that
    a report stays small.
    """
    others = [snapshot.run for snapshot in runs]
    most_rounds = max(MIN_ROUNDS, series.MAX_ROUNDS // len(runs))
    most_curves = max(2, MAX_CURVES // len(runs))
    result = []
    for snapshot in runs:
        kept = series.thinned(snapshot.run.rounds, most_rounds)
        chosen = [record for record in kept if record.tau > 0]
        every = max(1, -(-len(chosen) // (most_curves - 1)))
        drawn = [*chosen[:-1:every], *chosen[-1:]]
        drawn += [record for record in kept[-1:] if record.tau <= 0]
        own = {
            "columns": series.columns(kept),
            "paragraph": series.describe(snapshot.run, others),
            "choices": [series.choice(snapshot, record.round) for record in drawn],
        }
        result.append(_rounded(series.view(snapshot) | own))
    return result


def _rounded(value: Any) -> Any:
    """Return nested values with six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def bundled(files: dict[str, str]) -> str:
    """Return the page's modules as one script; a file opened from disk cannot import.

    Each module becomes a function scope that returns its exports as an object.

    Args:
      files: contents by name.
    """
    blocks = []
    for name in _MODULES:
        exports = [first or second for first, second in _EXPORT.findall(files[name])]
        body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = $\2;", files[name]))
        blocks.append(
            f"const ${name.removesuffix('.js')} = (() => {{\n{body}\n"
            f"return {{ {', '.join(exports)} }};\n}})();\n"
        )
    return "".join(blocks)


def _embedded(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
