"""Runs the whole example on one machine: an aggregator and three nodes over TLS.

    python run.py FOLDER --budget time=30s

The script writes certificates, and images/LABEL/*.png to one folder per machine: north,
south, east and aggregator. Each node has mostly its own digits. The aggregator uses its
images for testing. Options after the folder are passed to `fedbudget serve`.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HERE = Path(__file__).parent.resolve()
FEDBUDGET = [sys.executable, "-m", "fedbudget"]
NODES = ("north", "south", "east")


def make_images(folder: Path) -> None:
    digits, rng = load_digits(), np.random.default_rng(0)
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        own = NODES[label % 3] if rng.random() < 0.7 else NODES[rng.integers(3)]
        path = (
            folder
            / ("aggregator" if number % 5 == 0 else own)
            / "images"
            / str(label)
            / f"{number:04}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(path)


def train(folder: Path, options: list[str]) -> int:
    """Start the processes of four machines; return the highest exit code."""
    model, images = ["--model", f"{HERE}/net.py:net"], f"{HERE}/ward.py:Images"
    subprocess.run(
        [*FEDBUDGET, "certs", str(folder / "certs")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    tls = ["--cert", "../certs/aggregator.pem", "--key", "../certs/aggregator.key"]
    serve = [
        *FEDBUDGET,
        "serve",
        "127.0.0.1:0",
        *model,
        "--test",
        images,
        "--nodes",
        "3",
        *tls,
        *options,
    ]
    aggregator = subprocess.Popen(
        serve, cwd=folder / "aggregator", stderr=subprocess.PIPE, text=True
    )
    processes: list[subprocess.Popen[Any]] = [aggregator]
    assert aggregator.stderr is not None
    for line in aggregator.stderr:
        print(line, end="", file=sys.stderr)
        if port := re.search(r"listening on port (\d+)", line):
            join = [
                *FEDBUDGET,
                "join",
                f"127.0.0.1:{port[1]}",
                *model,
                "--data",
                images,
                "--ca",
                "../certs/ca.pem",
            ]
            processes += [
                subprocess.Popen([*join, "--name", name], cwd=folder / name)
                for name in NODES
            ]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    make_images(Path(sys.argv[1]))
    sys.exit(train(Path(sys.argv[1]).resolve(), sys.argv[2:]))
