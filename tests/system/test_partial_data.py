"""A part of a dataset can be trained on, and the run says that it was a part."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedbudget.cli.main import main


def cifar_batch(path: Path, images: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (images, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(images) % 10
    path.write_bytes(records.tobytes())


def test_two_batches_of_cifar_10(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number in (1, 4):
        cifar_batch(folder / f"data_batch_{number}.bin", 200, number)
    common = f"--dataset cifar-10 --data-dir {tmp_path / 'data'} --model softmax --rounds 2 --batch-size 10".split()
    with pytest.raises(SystemExit) as end:
        main(["run", *common, "--json", "--out", str(tmp_path / "run")])
    printed = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert printed["note"] == "400 of 50,000 training samples, no test samples"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["note"] == printed["note"]
    with pytest.raises(SystemExit):
        main(["run", *common, "--out", str(tmp_path / "again")])
    shown = capsys.readouterr()
    assert f"data: {printed['note']}\n" in shown.out
    assert f"softmax on cifar-10 ({printed['note']})" in shown.err
