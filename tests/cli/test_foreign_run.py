"""A run folder from an untrusted source: commands follow no link out of it and print no
terminal escapes from it.
"""

import json
import re
from pathlib import Path

import pytest

from fedbudget import train
from support.commands import run_command

EVIL = "\\u001b[2Jevil\\u0007"


def test_links_and_escapes_are_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train(budget="time=0.5s", out="run")
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.write_text("outside")
    for name in ("plot.png", "nodes.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside)
    for name, pattern, text in (
        ("rounds.jsonl", r'"reason":"[^"]*"', f'"reason":"{EVIL}"'),
        ("config.toml", r'dataset = "digits"', f'dataset = "dig{EVIL}its"'),
        ("summary.json", r'"stopped_by": "[^"]*"', f'"stopped_by": "{EVIL}"'),
    ):
        changed, count = re.subn(
            pattern, text.replace("\\", "\\\\"), (run / name).read_text()
        )
        assert count
        (run / name).write_text(changed)
    (tmp_path / "report.html").symlink_to(outside)
    for command in (
        ["show", "run"],
        ["report", "run"],
        ["explain", "run", "--round", "2"],
        ["runs", "."],
    ):
        code, out, err = run_command(capsys, *command)
        assert code == 0, err
        assert "\x1b[2J" not in out + err
        assert "\x07" not in out + err
    assert outside.read_text() == "outside"


@pytest.mark.parametrize("figures", ["[1]", '{"f1": []}', '{"f1": "0.9"}'])
def test_metrics_must_be_numbers(
    figures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(budget="time=0.5s", out=tmp_path / "run")
    summary = tmp_path / "run" / "summary.json"
    kept = {**json.loads(summary.read_text()), "metrics": json.loads(figures)}
    summary.write_text(json.dumps(kept))
    code, _, err = run_command(capsys, "show", str(tmp_path / "run"))
    assert code == 2
    assert "metrics must be numbers by name" in err
