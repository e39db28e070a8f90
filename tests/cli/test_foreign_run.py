"""A run folder that came from elsewhere: nothing but the folder is touched, and nothing in
it reaches the terminal.
"""

import json
import re
from pathlib import Path

import pytest

from fedbudget import train
from support.commands import run_command

EVIL = "\\u001b[2Jevil\\u0007"


def test_links_escapes_and_a_reason_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train(budget="time=0.5s", out="run")
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    for name in ("plot.png", "nodes.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
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
    (tmp_path / "report.html").symlink_to(mine)
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
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("figures", ["[1]", '{"f1": []}', '{"f1": "0.9"}'])
def test_figures_that_are_no_numbers(
    figures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(budget="time=0.5s", out=tmp_path / "run")
    summary = tmp_path / "run" / "summary.json"
    kept = {**json.loads(summary.read_text()), "metrics": json.loads(figures)}
    summary.write_text(json.dumps(kept))
    code, _, err = run_command(capsys, "show", str(tmp_path / "run"))
    assert code == 2
    assert "metrics are not numbers by name" in err
