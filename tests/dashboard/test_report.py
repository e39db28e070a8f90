"""The report: one file without external resources, safe from text of a run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbudget.dashboard.access import page_files
from fedbudget.dashboard.report import MAX_CURVES, bundled, figures, report
from fedbudget.dashboard.run_reader import RunReader, RunSnapshot
from support.synthetic_runs import SETTINGS, make_run, many_rounds


def snapshot_of(path: Path) -> RunSnapshot:
    return RunReader(path).read()


def embedded(text: str) -> Any:
    match = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL
    )
    assert match is not None
    return json.loads(match[1])


def test_embedded_figures_equal_the_runs(tmp_path: Path) -> None:
    snapshots = [snapshot_of(make_run(tmp_path / name)) for name in ("one", "two")]
    text = report(snapshots)
    assert embedded(text) == json.loads(json.dumps({"runs": figures(snapshots)}))
    assert [run["name"] for run in embedded(text)["runs"]] == ["one", "two"]


def test_run_text_cannot_inject_scripts(tmp_path: Path) -> None:
    evil = "/data/</script><script>alert(1)</script><!--.csv"
    text = report(
        [
            snapshot_of(
                make_run(tmp_path / "<b>run", settings=replace(SETTINGS, dataset=evil))
            )
        ]
    )
    assert embedded(text)["runs"][0]["settings"]["dataset"] == evil
    assert text.count("</script>") == 3  # figures, library and page
    assert "alert(1)</script" not in text
    assert "<b>run" not in text


def test_report_loads_nothing(tmp_path: Path) -> None:
    text = report([snapshot_of(make_run(tmp_path / "run"))])
    assert "default-src 'none'" in text
    library = text[text.index("<script>") : text.index('<script type="module">')]
    page = text.replace(library, "")
    assert re.search(r"""(src|href)=["'](?!#)""", page) is None
    assert "import " not in text[text.index('<script type="module">') :]


def test_long_run_keeps_some_curves(
    tmp_path: Path,
) -> None:
    (run,) = figures([snapshot_of(many_rounds(tmp_path / "run", 5000))])
    rounds = [choice["record"]["round"] for choice in run["choices"]]
    assert MAX_CURVES / 2 < len(rounds) <= MAX_CURVES + 1
    assert (rounds[0], rounds[-1]) == (1, 5000)
    assert rounds == sorted(set(rounds))


def test_bundle_resolves_imports() -> None:
    files = {
        "dom.js": "export function el() {}\nexport const A = 1;\n",
        "theme.js": 'import { el, A } from "./dom.js";\n',
        **dict.fromkeys(("charts.js", "run.js", "compare.js"), ""),
        "report.js": 'import * as dom from "./dom.js";\ndom.el();\n',
    }
    text = bundled(files)
    assert (
        "const $dom = (() => {\nfunction el() {}\nconst A = 1;\n\nreturn { el, A };\n})();"
        in text
    )
    assert "const { el, A } = $dom;" in text
    assert "const dom = $dom;\ndom.el();" in text


def test_bundle_has_all_modules() -> None:
    text = bundled({name: content for name, (content, _) in page_files().items()})
    assert re.search(r"^(import|export) ", text, re.MULTILINE) is None
    imported = set(re.findall(r"= \$(\w+);", text))
    assert imported <= set(re.findall(r"^const \$(\w+) = ", text, re.MULTILINE))
