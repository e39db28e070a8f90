"""Weights & Biases in offline mode writes the figures of the run folder."""

import json
import time
from pathlib import Path

import pytest

import fedbudget

pytest.importorskip("wandb", reason="needs wandb: pip install 'fedbudget[wandb]'")


@pytest.mark.filterwarnings("default")
def test_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """wandb's own file has every round; its summary is that of the last step."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    result = fedbudget.train(
        dataset="digits",
        budget="time=1s",
        costs="simulated",
        out=tmp_path / "one",
        track="wandb",
    )
    (offline,) = (tmp_path / "one" / "wandb").glob("offline-run-*")
    (log,) = offline.glob("*.wandb")
    # The program of wandb writes its file after `finish` has returned.
    limit = time.monotonic() + 30
    while b"stopped_by" not in log.read_bytes():
        assert time.monotonic() < limit, "the file has no summary"
        time.sleep(0.01)
    content = log.read_bytes()
    for name in ("best_loss", "spent/time", "final/accuracy"):
        assert name.encode() in content
    for record in result.rounds:
        assert json.dumps(record.best_loss).encode()[:12] in content
    assert {each.name for each in (offline / "files").iterdir()} >= {
        "model.safetensors",
        "plot.png",
        "config.toml",
    }
    assert not any(each.is_symlink() for each in (offline / "files").iterdir())
    assert "WARNING" not in capfd.readouterr().err
