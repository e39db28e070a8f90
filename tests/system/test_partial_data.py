"""A run on a part of a dataset notes that it used a part."""

import json
from pathlib import Path

import numpy as np
import pytest

from support.commands import run_command


def cifar_batch(path: Path, images: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (images, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(images) % 10
    path.write_bytes(records.tobytes())


def test_two_of_five_cifar_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number in (1, 4):
        cifar_batch(folder / f"data_batch_{number}.bin", 200, number)
    common = f"--dataset cifar-10 --data-dir {tmp_path / 'data'}".split()
    common += ["--model", "softmax", "--rounds", "2", "--batch-size", "10"]
    code, out, _ = run_command(
        capsys, "run", *common, "--json", "--out", str(tmp_path / "run")
    )
    printed = json.loads(out)
    assert code == 0
    assert printed["note"] == "400 of 50,000 training samples, no test samples"
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["note"]
        == printed["note"]
    )
    _, out, err = run_command(capsys, "run", *common, "--out", str(tmp_path / "again"))
    assert f"data: {printed['note']}\n" in out
    assert f"softmax on cifar-10 ({printed['note']})" in err
