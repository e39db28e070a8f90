"""Writes the exact versions and hashes of the packages in the container images.

    pip install uv
    python tools/lock_images.py

The files `docker/*.lock` change only with this command, so that an image contains what was
reviewed. Run it after a change of dependencies, and for updates.
"""

import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = (
    "# Exact versions and hashes of the packages in an image, written by "
    "tools/lock_images.py. Do not edit.\n"
)
EXTRAS = {"aggregator": "network", "node": "node"}
_OPTIONS = (
    *("--generate-hashes", "--universal", "--python-version", "3.13"),
    *("--no-header", "--no-annotate", "--quiet"),
)


def lock(name: str, *source: str) -> None:
    """Write the lock file of an image from requirements."""
    command = ["uv", "pip", "compile", *source, *_OPTIONS]
    text = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    (ROOT / "docker" / f"{name}.lock").write_text(HEAD + text, encoding="utf-8")


def main() -> None:
    for name, extra in EXTRAS.items():
        lock(name, "pyproject.toml", "--extra", extra, "--constraint", "constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with tempfile.NamedTemporaryFile("w", suffix=".in") as build:
        build.write("\n".join(project["build-system"]["requires"]))
        build.flush()
        lock("build", build.name)


if __name__ == "__main__":
    main()
