"""The notebooks of examples/ run from the first to the last cell, each in a new kernel."""

from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """A result is shown with its figures and its plot, and one line of progress."""
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs: list[Any] = [
        output for cell in notebook.cells for output in cell.get("outputs", ())
    ]
    assert not [each for each in outputs if each.get("name") == "stderr"]
    results = [each["data"] for each in outputs if "text/html" in each.get("data", {})]
    shown = [each["text/html"] for each in results if "stopped by" in each["text/html"]]
    assert shown
    assert all("accuracy" in each and "data:image/png" in each for each in shown)
    if path.stem != "real_federation":
        lines = [each["data"]["text/plain"] for each in outputs if "data" in each]
        assert any(
            "100% of the budget" in line or "% of the budget" in line for line in lines
        )


def test_three_notebooks() -> None:
    assert [each.stem for each in NOTEBOOKS] == [
        "first_run",
        "own_pytorch_model",
        "real_federation",
    ]
