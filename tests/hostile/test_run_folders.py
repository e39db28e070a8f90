"""Run folders from untrusted sources: commands run no code that they name, follow no link
out of them, print no terminal escapes from them, and end without a traceback.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save

from fedbudget import UserError, load, train
from fedbudget.experiments.evaluate import Predictions
from fedbudget.runs import plot
from fedbudget.runs.folder import CHECKPOINT, MODEL
from fedbudget.runs.saved_model import SavedModel
from fedbudget.settings.types import MethodName
from support.commands import run_command
from support.hostile_folders import odd_tensors, read_tensors, replace_tensor

SLOW = pytest.mark.slow

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
    assert "summary.json" in err
    assert "metrics" in err


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ('=HYPERLINK("http://x")', '"\'=HYPERLINK(""http://x"")"'),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+x", "'+x"),
        ("-0.5", "-0.5"),
        ("a\x1b[2J\u202eb", "a\ufffd[2J\ufffdb"),
    ],
)
def test_cells_start_no_formula(text: str, cell: str) -> None:
    """Names of classes come from nodes, and reach spreadsheets as names and as cells."""
    table = Predictions({"prediction": [text], f"{text}": ["1"]}).to_csv()
    assert table == f"prediction,{cell}\n{cell},1\n"


CODE = """
from pathlib import Path
Path(__file__).with_name("executed").write_text("")
from torch import nn
Net = lambda: nn.Linear(64, 10)
"""


def test_code_in_folder_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder names a Python file as its model; only `--model` runs one."""
    monkeypatch.chdir(tmp_path)
    result = train(dataset="digits", budget="time=0.5s", out="run")
    (tmp_path / "net.py").write_text(CODE)
    path = tmp_path / "run" / "model.safetensors"
    saved = SavedModel.load(path)
    own = {**vars(saved), "model": f"{tmp_path}/net.py:Net"}
    path.write_bytes(SavedModel(**own).to_bytes())
    config = tmp_path / "run" / "config.toml"
    named = config.read_text().replace('"softmax"', f'"{tmp_path}/net.py:Net"')
    for text in (named, named.replace('"digits"', f'"{tmp_path}/net.py:Net"')):
        config.write_text(text)
        for command in (
            ["predict", "run", "--data", "new.npz"],
            ["export", "run", "--to", "numpy"],
            ["evaluate", "run", "--dataset", "digits"],
            ["run", "--resume", "run", "--budget", "time=+1s"],
            ["serve", "127.0.0.1:0", "--resume", "run", "--budget", "time=+1s"],
            ["run", "--config", "run/config.toml"],
            ["show", "run"],
            ["report", "run"],
        ):
            code, _, err = run_command(capsys, *command)
            assert "Traceback" not in err
            assert code in (0, 2)
            assert not (tmp_path / "executed").exists(), command
    with pytest.raises(UserError, match="pass it again, as model"):
        load("run")
    assert load("run", model="softmax").w.tobytes() == result.w.tobytes()


@pytest.mark.parametrize(
    "name", ["samples", "standardization", "tensors", "classes", "layout"]
)
def test_model_description_is_typed(name: str, tmp_path: Path) -> None:
    """Other types in the metadata of a model are refused."""
    train(budget="time=1000s", rounds=2, costs="simulated", out=tmp_path / "run")
    file = tmp_path / "run" / MODEL
    arrays, metadata = read_tensors(file)
    for other in (-1e308, [1], {"mean": "x"}, "text"):
        described = {**json.loads(metadata["fedbudget"]), name: other}
        file.write_bytes(save(arrays, {"fedbudget": json.dumps(described)}))
        with pytest.raises(UserError, match="the trained model cannot be read"):
            load(tmp_path / "run")


@pytest.mark.parametrize("method", ["frugal", pytest.param("accelerated", marks=SLOW)])
def test_checkpoints_with_odd_tensors(
    method: MethodName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor with other shapes and values: it is refused, or the run resumes."""
    monkeypatch.setattr(plot, "plot_run", lambda *given, **how: b"")
    base = tmp_path / "base"
    train(
        budget="time=1000s",
        rounds=4,
        tau="adaptive" if method == "accelerated" else 2,
        method=method,
        batch_size=16,
        compress="8-bit",
        participation=0.9,
        costs="simulated",
        out=base,
    )
    refused = 0
    arrays, _ = read_tensors(base / CHECKPOINT)
    for name, values in arrays.items():
        for number, other in enumerate(odd_tensors(values)):
            run = tmp_path / f"{name}-{number}"
            shutil.copytree(base, run)
            replace_tensor(run / CHECKPOINT, name, other)
            try:
                train(resume=run, rounds=6)
            except UserError as error:
                refused += "checkpoint" in str(error)
            shutil.rmtree(run)
    assert refused > 3 * len(arrays)


@pytest.mark.parametrize(("first", "last"), [(0, 25), pytest.param(25, 500, marks=SLOW)])
def test_hostile_folders(first: int, last: int, tmp_path: Path) -> None:
    """Generated folders: no traceback, no hang, no code, no change outside."""
    program = [sys.executable, "-m", "support.hostile_folders"]
    ended = subprocess.run(
        [*program, str(tmp_path), str(first), str(last)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
