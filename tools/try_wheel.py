"""Installs the wheel in dist/ into clean environments and tests it there.

    python tools/try_wheel.py [EXTRA ...]

Without names, it tests the core. With `--all`, it tests the core, every extra alone,
and all extras together. Each environment lives in a temporary folder, uses the versions
of constraints.txt, and must pass `pip check`. Each extra is tested with the commands it
exists for. This script needs only Python.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

_MODULE = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
_SWEEP = "rounds = 2\n\n[grid]\ntau = [1, 10]\n"
_CORE = (
    ["--version"],
    ["run", "--case", "2", "--rounds", "5", "--out", "first"],
    ["show", "first"],
    ["explain", "first", "--round", "3"],
    ["export", "first", "--to", "numpy", "--out", "first.npz"],
    ["run", "--nodes", "50", "--budget", "privacy=8", "--out", "private"],
)
_LOCAL = [
    "local",
    "--nodes",
    "2",
    "--rounds",
    "3",
    "--budget",
    "time=1min",
    "--out",
    "nodes",
]
_ADDRESS = "127.0.0.1:7791"
_SERVE = [
    "serve",
    _ADDRESS,
    "--nodes",
    "1",
    "--model",
    "softmax",
    "--rounds",
    "3",
    "--out",
    "served",
]
_JOIN = [
    "join",
    _ADDRESS,
    "--dataset",
    "digits",
    "--shard",
    "1/1",
    "--give-up-after",
    "60",
]
_PARQUET = """
import fedbudget, pyarrow, pyarrow.parquet

rows = {"site": ["a", "b"] * 40, "x": range(80), "y": [row // 2 % 2 for row in range(80)]}
pyarrow.parquet.write_table(pyarrow.table(rows), "sites.parquet")
options = {"target": "y", "partition": "by:site", "rounds": 3}
result = fedbudget.train(dataset="sites.parquet", budget="time=1s", **options)
assert sorted(result.sites) == ["a", "b"], result.sites
"""
_COMMANDS: dict[str, tuple[list[str], ...]] = {
    "full": (
        [
            "compare",
            "--taus",
            "1,10",
            "--cases",
            "1",
            "--seeds",
            "1",
            "--budget",
            "time=1s",
        ],
    ),
    "onnx": (["export", "first", "--to", "onnx", "--out", "first.onnx"],),
    "torch": (["run", "--model", "net.py:net", "--rounds", "3", "--out", "module"],),
    "sweep": (["sweep", "sweep.toml", "--out", "swept"],),
    "network": (["certs", "certs"], _LOCAL),
    "ray": (
        ["run", "--engine", "ray", "--nodes", "20", "--rounds", "3", "--out", "on-ray"],
    ),
    "dashboard": (["report", "first", "--out", "first.html"],),
    "mlflow": (["run", "--track", "mlflow", "--rounds", "3", "--out", "followed"],),
    "tensorboard": (
        ["run", "--track", "tensorboard", "--rounds", "3", "--out", "followed-too"],
    ),
    "wandb": (["run", "--track", "wandb", "--rounds", "3", "--out", "followed-offline"],),
}
_PROGRAMS = {
    "flower": "import fedbudget.flower",
    "docs": "import mkdocs, mkdocstrings",
    "parquet": _PARQUET,
    "xls": "import xlrd",
    "codecarbon": ("from fedbudget.resources.carbon import CodeCarbon; CodeCarbon.start()"),
}
"""Python code that tests extras without a fedbudget command."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "extras",
        nargs="*",
        metavar="EXTRA",
        help="one extra, such as full, or several, such as full,torch",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="test the core, each extra, and all extras together",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="continue after a failure"
    )
    asked = parser.parse_args(arguments)
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"try_wheel: dist/ has {len(wheels)} wheels; run `make dist`")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    names = [name for name in known if name != "dev"]
    failed = []
    for extras in ["", *names, ",".join(names)] if asked.all else asked.extras or [""]:
        try:
            try_extras(wheels[0], extras)
        except subprocess.CalledProcessError as error:
            failed.append(extras or "the core")
            print(f"FAILED: {' '.join(map(str, error.cmd))}", flush=True)
            if not asked.keep_going:
                break
    if failed:
        raise SystemExit(f"try_wheel: failed with {'; '.join(failed)}")


def try_extras(wheel: Path, extras: str) -> None:
    """Install the wheel with extras and run their commands.

    Args:
      wheel: The wheel file.
      extras: Names of extras, separated by commas; empty for the core.

    Raises:
      subprocess.CalledProcessError: A command failed.
    """
    with tempfile.TemporaryDirectory(prefix="fedbudget-") as name:
        folder = Path(name)
        python = _installed(wheel, extras, folder, "venv")
        (folder / "net.py").write_text(_MODULE, encoding="utf-8")
        (folder / "sweep.toml").write_text(_SWEEP, encoding="utf-8")
        for command in _commands(extras):
            _run(folder, python, *command)
        if extras == "node":  # a node needs an aggregator
            _join(folder, python, _installed(wheel, "network", folder, "aggregator"))
    print(f"ok: {extras or 'the core alone'}", flush=True)


def _installed(wheel: Path, extras: str, folder: Path, name: str) -> Path:
    """Create an environment with the wheel; return its Python."""
    venv.create(folder / name, with_pip=True)
    python = folder / name / "bin" / "python"
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    limits = ["--constraint", str(ROOT / "constraints.txt")]
    _run(folder, python, "-m", "pip", "install", "--quiet", *limits, what)
    _run(folder, python, "-m", "pip", "check")
    return python


def _join(folder: Path, python: Path, aggregator: Path) -> None:
    """Let a node join a run."""
    served = subprocess.Popen(
        [aggregator, "-m", "fedbudget", *_SERVE], cwd=folder, env=_environment()
    )
    try:
        _run(folder, python, "-m", "fedbudget", *_JOIN)
        if served.wait(60):
            raise subprocess.CalledProcessError(served.returncode, served.args)
    finally:
        served.kill()


def _commands(extras: str) -> Iterator[list[str]]:
    """Yield the arguments of `python` that test the extras."""
    yield from (["-m", "fedbudget", *command] for command in _CORE)
    for extra in filter(None, extras.split(",")):
        yield from (["-m", "fedbudget", *command] for command in _COMMANDS.get(extra, ()))
        if extra in _PROGRAMS:
            yield ["-c", _PROGRAMS[extra]]


def _run(folder: Path, *command: str | Path) -> None:
    """Run a command in the folder; print its output if it fails."""
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    done.check_returncode()


def _environment() -> dict[str, str]:
    """Return the environment without variables that point to other installations."""
    foreign = ("PYTHONPATH", "VIRTUAL_ENV", "FEDBUDGET_DATA")
    return {name: value for name, value in os.environ.items() if name not in foreign}


if __name__ == "__main__":
    main(sys.argv[1:])
