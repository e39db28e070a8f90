"""The report: one file without external resources, safe from text of a run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedbudget.dashboard.access import page_files
from fedbudget.dashboard.report import MAX_CURVES, bundled, figures, report
from fedbudget.dashboard.run_reader import RunReader, RunSnapshot
from fedbudget.runs.record import RoundRecord
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
    assert text.count("</script>") == 2  # figures and page
    assert "alert(1)</script" not in text
    assert "<b>run" not in text


def test_report_loads_nothing(tmp_path: Path) -> None:
    text = report([snapshot_of(make_run(tmp_path / "run"))])
    assert "default-src 'none'" in text
    assert re.search(r"""(src|href)=["'](?!#)""", text) is None
    assert "import " not in text[text.index('<script type="module">') :]


def test_long_run_keeps_some_curves(
    tmp_path: Path,
) -> None:
    (run,) = figures([snapshot_of(many_rounds(tmp_path / "run", 5000))])
    rounds = [choice["record"]["round"] for choice in run["choices"]]
    assert MAX_CURVES / 2 < len(rounds) <= MAX_CURVES + 1
    assert (rounds[0], rounds[-1]) == (1, 5000)
    assert rounds == sorted(set(rounds))


def test_last_choice_has_a_curve(tmp_path: Path) -> None:
    """The round after it only evaluates the loss; the page opens with the last choice."""
    run = many_rounds(tmp_path / "run", 5000)
    snapshot = snapshot_of(run)
    *records, last = snapshot.run.rounds
    ended = replace(snapshot.run, rounds=[*records, replace(last, tau=0)])
    (shown,) = figures([replace(snapshot, run=ended)])
    rounds = [each["record"]["round"] for each in shown["choices"]]
    assert rounds[-2:] == shown["columns"]["round"][-2:]


def test_bundle_resolves_imports() -> None:
    files = {
        "dom.js": "export function el() {}\nexport const A = 1;\n",
        "theme.js": 'import { el, A } from "./dom.js";\n',
        **dict.fromkeys(("plot.js", "charts.js", "run.js", "compare.js"), ""),
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


def test_report_is_small(tmp_path: Path) -> None:
    """A report of 10,000 rounds has at most 1.5 MB, and so has one of five such runs."""
    run = snapshot_of(many_rounds(tmp_path / "run", 10_000))
    for runs in ([run], [run] * 5):
        assert len(report(runs).encode()) < 1.5e6


def test_costs_of_rounds_are_drawn(tmp_path: Path) -> None:
    """The panel that explains τ has a curve for the default method."""
    settings = replace(SETTINGS, method="accelerated")

    def balanced(own: RoundRecord) -> RoundRecord:
        return replace(own, reason="aggregation cost", tau=7)

    path = make_run(tmp_path / "run", settings=settings, every=balanced)
    (run,) = figures([snapshot_of(path)])
    first, *others = run["choices"]
    assert first["curve"] == []  # a trial round chose it
    # Seconds and bytes of a round, as shares of 20 s and 2 MB, for one effective update.
    cost = {
        tau: max((0.01 * tau + 0.05) / 20, 5e3 / 2e6) * (1 / tau + 0.1)
        for tau in range(1, 101)
    }
    for choice in others:
        assert choice["minimum"] == min(cost, key=cost.__getitem__)
        assert choice["curve"] == pytest.approx(
            [cost[tau] for tau in choice["candidates"]], rel=1e-5
        )
