"""Figures made from real runs on a small scale, and the report of them."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import pytest
from pyarrow import parquet

from fedbudget.data.published import DatasetMissing
from fedbudget.errors import UserError
from fedbudget.experiments import reproduce
from fedbudget.experiments.figures import FIGURES
from fedbudget.experiments.figures.figure import GridSize
from fedbudget.experiments.figures.methods import Methods
from fedbudget.experiments.figures.paper import LossAgainstTau
from fedbudget.experiments.reproduce import write_report
from fedbudget.settings.settings import Settings

QUICK = GridSize(1, quick=True)

pytestmark = pytest.mark.xdist_group(
    "reproduce"
)  # all look at one folder, which takes long to make


@pytest.fixture(autouse=True)
def _no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one figure of each kind, of digits."""
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


def test_every_figure_has_its_picture_twice_and_the_runs_behind_it(made: Path) -> None:
    for figure in reproduce.read_figures(made):
        folder = made / figure.name
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


def test_without_mnist_figures_of_the_svm_are_of_digits_and_say_so(made: Path) -> None:
    assert all(
        "on digits in place of MNIST" in figure.made_of
        for figure in reproduce.read_figures(made)
    )
    assert "digits in place of MNIST" in (made / "svm-sgd" / "svm-sgd.svg").read_text(
        encoding="utf-8"
    )


def test_other_figures_need_their_data(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetMissing, match=r"energy was not found in .* fedbudget data get energy"
    ):
        reproduce.make(FIGURES["linear"], tmp_path, QUICK)


def test_a_figure_of_many_tasks_has_those_whose_data_are_here(tmp_path: Path) -> None:
    figure = Methods("methods", "Both methods", ("linear-energy", "svm-digits"))
    reproduce.make(figure, tmp_path, QUICK)
    rows = parquet.read_table(tmp_path / "methods" / "results.parquet").to_pylist()
    assert {(row["model"], row["dataset"]) for row in rows} == {("svm", "digits")}
    (found,) = reproduce.read_figures(tmp_path)
    assert found.made_of.endswith("on digits, methods paper, frugal")
    assert found.table is not None
    markdown, html = (
        page.read_text(encoding="utf-8") for page in write_report([found], tmp_path)
    )
    for row in found.table.rows:
        assert f"| {' | '.join(row)} |" in markdown
        assert "".join(f"<td>{cell}</td>" for cell in row) in html


def test_a_second_time_no_run_is_made_again_and_the_results_are_the_same_bytes(
    made: Path,
) -> None:
    results = made / "svm-sgd" / "results.parquet"
    before, bytes_before = _times(made / "svm-sgd" / "cells"), results.read_bytes()
    reproduce.make(FIGURES["svm-sgd"], made, QUICK)
    assert _times(made / "svm-sgd" / "cells") == before
    assert results.read_bytes() == bytes_before


def test_a_long_figure_says_before_how_long_it_takes_and_has_one_run_of_each_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is missing counts: here another τ is asked for when one has been made."""
    monkeypatch.setattr(reproduce, "expected_seconds", lambda cells: 10.0 * len(cells))
    told: list[tuple[int, float]] = []
    for taus in ((10,), (10, 20)):
        figure = Short("short", "Short runs", ("svm-digits",), taus, long=True)
        reproduce.make(
            figure,
            tmp_path,
            reproduce.grid_size(figure),
            jobs=1,
            expect=lambda *expected: told.append(expected),
        )
    assert told == [(4 * 2 + 1, 90.0), (4, 40.0)]


def test_the_networks_have_the_few_tau_that_there_is_time_for() -> None:
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


def test_the_report_has_every_claim_with_its_verdict_and_every_figure(made: Path) -> None:
    figures = reproduce.read_figures(made)
    markdown, html = (
        page.read_text(encoding="utf-8") for page in write_report(figures, made)
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
    assert html.count('class="yes"') == held
    for figure in figures:
        assert (made / re.findall(rf"!\[.*\]\(({figure.name}/.*)\)", markdown)[0]).is_file()


def test_the_page_needs_nothing_from_elsewhere(made: Path) -> None:
    _, html = write_report(reproduce.read_figures(made), made)
    addresses = re.findall(r'(?:src|href)="([^"]*)"', html.read_text(encoding="utf-8"))
    assert addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)


class Short(LossAgainstTau):
    """With a budget of a few rounds."""

    def settings(self, data_dir: str | None) -> list[Settings]:
        return [
            replace(each, budget=("time=1s",), nodes=5)
            for each in super().settings(data_dir)
        ]


def chosen(*names: str, with_cnn: bool = False, engine: str = "in-process") -> list[str]:
    return [
        figure.name for figure in reproduce.choose(names, with_cnn=with_cnn, engine=engine)
    ]


def test_all_leaves_out_what_takes_hours_unless_asked_for() -> None:
    here = {name for name, figure in FIGURES.items() if figure.engine == "in-process"}
    assert here - set(chosen("all")) == {
        "cnn-mnist",
        "cnn-fashion-mnist",
        "cnn-cifar-10",
        "rivals",
        "more-rivals",
        "niid-bench",
    }
    assert set(chosen("all", with_cnn=True)) == here
    assert chosen("nodes", "cnn-mnist") == ["cnn-mnist", "nodes"]


def test_the_first_part_of_a_name_stands_for_all_that_begin_with_it() -> None:
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
def test_a_figure_that_does_not_exist_is_refused_with_those_that_do(
    names: list[str], engine: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        reproduce.choose(names, with_cnn=False, engine=engine)


def _times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
