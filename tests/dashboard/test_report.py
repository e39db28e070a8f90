"""The report is one file, with all in it, that no text of a run can break out of."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbudget.dashboard.access import page_files
from fedbudget.dashboard.report import MAX_CURVES, bundled, figures, report
from fedbudget.dashboard.run_reader import RunReader, RunSnapshot
from support.made_runs import SETTINGS, make_run, many_rounds


def snapshot_of(path: Path) -> RunSnapshot:
    return RunReader(path).read()


def embedded(text: str) -> Any:
    found = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


def test_the_figures_in_the_file_are_those_of_the_runs(tmp_path: Path) -> None:
    looks = [snapshot_of(make_run(tmp_path / name)) for name in ("one", "two")]
    text = report(looks)
    assert embedded(text) == json.loads(json.dumps({"runs": figures(looks)}))
    assert [run["name"] for run in embedded(text)["runs"]] == ["one", "two"]


def test_text_of_a_run_cannot_end_the_script_it_is_in(tmp_path: Path) -> None:
    evil = "/data/</script><script>alert(1)</script><!--.csv"
    text = report(
        [
            snapshot_of(
                make_run(tmp_path / "<b>run", settings=replace(SETTINGS, dataset=evil))
            )
        ]
    )
    assert embedded(text)["runs"][0]["settings"]["dataset"] == evil
    assert text.count("</script>") == 3  # the figures', the library's and the page's own
    assert "alert(1)</script" not in text
    assert "<b>run" not in text


def test_nothing_in_the_file_is_loaded_from_anywhere(tmp_path: Path) -> None:
    text = report([snapshot_of(make_run(tmp_path / "run"))])
    assert "default-src 'none'" in text
    page = text.replace(
        text[text.index("<script>") : text.index('<script type="module">')], ""
    )  # but for the library
    assert re.search(r"""(src|href)=["'](?!#)""", page) is None
    assert "import " not in text[text.index('<script type="module">') :]


def test_curves_of_a_long_run_are_kept_for_some_rounds_with_the_first_and_the_last(
    tmp_path: Path,
) -> None:
    (run,) = figures([snapshot_of(many_rounds(tmp_path / "run", 5000))])
    rounds = [choice["record"]["round"] for choice in run["choices"]]
    assert MAX_CURVES / 2 < len(rounds) <= MAX_CURVES + 1
    assert (rounds[0], rounds[-1]) == (1, 5000)
    assert rounds == sorted(set(rounds))


def test_the_pages_modules_become_one_that_gives_each_what_it_imports() -> None:
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


def test_no_module_of_the_page_is_forgotten() -> None:
    text = bundled({name: content for name, (content, _) in page_files().items()})
    assert re.search(r"^(import|export) ", text, re.MULTILINE) is None
    taken = set(re.findall(r"= \$(\w+);", text))
    assert taken <= set(re.findall(r"^const \$(\w+) = ", text, re.MULTILINE))
