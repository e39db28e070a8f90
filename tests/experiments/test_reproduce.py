"""Figures from real runs on a small scale, and their report."""

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import pytest
from benchmarks.methods import Methods
from pyarrow import parquet

from fedbudget.data.published import DatasetMissing
from fedbudget.errors import UserError
from fedbudget.experiments import reproduce
from fedbudget.experiments.figures import FIGURES
from fedbudget.experiments.figures.figure import GridSize
from fedbudget.experiments.reproduce import write_report

QUICK = GridSize(1, quick=True)

# All tests share one folder, which takes long to create.
pytestmark = pytest.mark.xdist_group("reproduce")


@pytest.fixture(autouse=True)
def _no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def figures_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one figure of each kind, on digits."""
    out = tmp_path_factory.mktemp("reproduction")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDBUDGET_DATA", str(out / "nothing"))
        patch.setenv("XDG_CACHE_HOME", str(out / "cache"))
        for name in (
            "svm-sgd",
            "budget-dgd",
            "instantaneous-dgd",
            "phi-sgd",
            "asynchronous-dgd",
        ):
            reproduce.make(FIGURES[name], out, QUICK)
    return out


def test_pictures_and_results_of_figures(figures_folder: Path) -> None:
    for figure in reproduce.read_figures(figures_folder):
        folder = figures_folder / figure.name
        height, width, _ = matplotlib.image.imread(folder / f"{figure.name}.png").shape
        assert width > height > 300
        assert (
            ElementTree.parse(folder / f"{figure.name}.svg").getroot().tag.endswith("svg")
        )
        sweep = FIGURES[figure.name].sweep(FIGURES[figure.name].settings(None), QUICK)
        rows = parquet.read_table(folder / "results.parquet").num_rows
        assert rows == len(sweep.cells) or (
            sweep.each == "round" and rows > 4 * len(sweep.cells)
        )


def test_digits_replace_missing_mnist(figures_folder: Path) -> None:
    assert all(
        "on digits in place of MNIST" in figure.made_of
        for figure in reproduce.read_figures(figures_folder)
    )
    assert "digits in place of MNIST" in (
        figures_folder / "svm-sgd" / "svm-sgd.svg"
    ).read_text(encoding="utf-8")


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetMissing, match=r"energy was not found in .* fedbudget data get energy"
    ):
        reproduce.make(FIGURES["linear"], tmp_path, QUICK)


def test_only_available_tasks_are_run(tmp_path: Path) -> None:
    figure = Methods("methods", "Both methods", ("linear-energy", "svm-digits"))
    reproduce.make(figure, tmp_path, QUICK)
    rows = parquet.read_table(tmp_path / "methods" / "results.parquet").to_pylist()
    assert {(row["model"], row["dataset"]) for row in rows} == {("svm", "digits")}
    (result,) = reproduce.read_figures(tmp_path, [figure])
    assert result.made_of.endswith("on digits, methods paper, frugal")
    assert result.table is not None
    markdown, html = (
        page.read_text(encoding="utf-8") for page in write_report([result], tmp_path)
    )
    for row in result.table[1:]:
        assert f"| {' | '.join(row)} |" in markdown
        assert "".join(f"<td>{cell}</td>" for cell in row) in html


def test_finished_runs_are_reused(
    figures_folder: Path,
) -> None:
    results = figures_folder / "svm-sgd" / "results.parquet"
    before = _times(figures_folder / "svm-sgd" / "cells")
    bytes_before = results.read_bytes()
    reproduce.make(FIGURES["svm-sgd"], figures_folder, QUICK)
    assert _times(figures_folder / "svm-sgd" / "cells") == before
    assert results.read_bytes() == bytes_before


def test_cnn_figures_have_few_taus() -> None:
    for name, taus in (
        ("cnn-mnist", (1, 3, 10, 30, 100)),
        ("cnn-fashion", (1, 10, 100)),
        ("cnn-cifar", (1, 10, 100)),
    ):
        (figure,) = reproduce.choose([name], with_cnn=False)
        cells = figure.sweep(figure.settings(None), reproduce.grid_size(figure)).cells
        federated = {(cell.partition, cell.tau) for cell in cells if cell.method == "paper"}
        assert federated == {
            (f"case:{case}", tau) for case in (1, 2, 3, 4) for tau in ("adaptive", *taus)
        }
        assert len(cells) == len(federated) + 1  # the centralized descent
    assert reproduce.grid_size(figure, runs=3).runs == 3


def test_report_lists_all_claims(figures_folder: Path) -> None:
    figures = reproduce.read_figures(figures_folder)
    markdown, html = (
        page.read_text(encoding="utf-8") for page in write_report(figures, figures_folder)
    )
    claims = [claim for figure in figures for claim in figure.claims]
    assert len(claims) >= 4 + 2 + 6 + 4 + 4
    for claim in claims:
        lines = markdown.splitlines()
        line = next(line for line in lines if line.startswith(f"| {claim.text} |"))
        assert f"> {claim.quote}" in lines
        assert f"| {claim.measured} | {'yes' if claim.holds else 'no'} |" in line
    held = sum(claim.holds for claim in claims)
    assert f"{held} of {len(claims)} claims hold, in 5 figures" in markdown
    assert markdown.startswith("# Adaptive Federated Learning")
    assert html.count('class="yes"') == held
    for figure in figures:
        assert (
            figures_folder / re.findall(rf"!\[.*\]\(({figure.name}/.*)\)", markdown)[0]
        ).is_file()


def test_page_loads_nothing(figures_folder: Path) -> None:
    _, html = write_report(reproduce.read_figures(figures_folder), figures_folder)
    addresses = re.findall(r'(?:src|href)="([^"]*)"', html.read_text(encoding="utf-8"))
    assert addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)


def chosen(*names: str, with_cnn: bool = False, engine: str = "in-process") -> list[str]:
    return [
        figure.name for figure in reproduce.choose(names, with_cnn=with_cnn, engine=engine)
    ]


def test_all_omits_long_figures() -> None:
    here = {name for name, figure in FIGURES.items() if figure.engine == "in-process"}
    assert here - set(chosen("all")) == {
        "cnn-mnist",
        "cnn-fashion-mnist",
        "cnn-cifar-10",
        "natural",
    }
    assert set(chosen("all", with_cnn=True)) == here
    assert chosen("nodes", "cnn-mnist") == ["cnn-mnist", "nodes"]


def test_prefix_selects_figures() -> None:
    assert chosen("budget", "svm-sgd") == ["svm-sgd", "budget-dgd", "budget-sgd"]
    assert chosen("instantaneous") == ["instantaneous-dgd", "instantaneous-sgd"]
    assert chosen("instantaneous", engine="network") == [
        "instantaneous-dgd-network",
        "instantaneous-sgd-network",
    ]


@pytest.mark.parametrize(
    ("names", "engine", "message"),
    [
        ([], "in-process", "which figures"),
        (["sv"], "in-process", "unknown figure 'sv'; use all, or some"),
        (
            ["nodes"],
            "network",
            "unknown figure 'nodes'; use all, or some of instantaneous-dgd-network",
        ),
        (["nodes"], "ray", "engine must be one of in-process, network, not 'ray'"),
    ],
)
def test_unknown_figures_are_refused(names: list[str], engine: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reproduce.choose(names, with_cnn=False, engine=engine)


def _times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
