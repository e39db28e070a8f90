"""The figure of natural federations: tuning, claims and tables from rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedbudget.experiments import federations, reproduce
from fedbudget.experiments.cells import Columns
from fedbudget.experiments.figures import FIGURES, natural
from fedbudget.experiments.figures.figure import GridSize, Row
from fedbudget.experiments.figures.natural import Natural
from fedbudget.experiments.rivals import Rival
from fedbudget.settings.settings import Settings

FIGURE = Natural("natural", "Natural federations", ("heart-disease", "tcga-brca"))
SCORES = {
    "default": [(0.8, 0.6), (0.9, 0.5)],
    "personal": [(0.9, 0.7), (0.9, 0.7)],
    "alone": [(0.9, 0.7), (0.7, 0.3)],
    "pooled": [(0.9, 0.7), (0.9, 0.7)],
    "FedAvg": [(0.8, 0.6), (0.8, 0.6)],
}
"""Scores of two sites with 30 and 10 rows, by model and seed."""


def rows(scores: dict[str, list[tuple[float, float]]] = SCORES) -> list[Row]:
    return [
        {
            "dataset": "heart-disease",
            "seed": seed,
            "model": model,
            "site": site,
            "rows": count,
            "score": score,
            "knobs": f"tau={seed}" if model == "FedAvg" else "",
            "error": None,
        }
        for model, seeds in scores.items()
        for seed, own in enumerate(seeds)
        for (site, count), score in zip((("a", 30), ("b", 10)), own, strict=True)
    ]


class TestRows:
    def test_table_has_means_and_errors(self) -> None:
        """The default's totals are .75 and .8: mean .775, error .05/√2/√2."""
        table = FIGURE.table(rows())
        expected = ("heart-disease", "default", "0.775", "0.025", "0.550", "0.700", "")
        assert table[1] == expected
        assert (table[5][1], table[5][-1]) == ("FedAvg", "tau=0; tau=1")
        assert len(table) == 1 + len(SCORES) + len(natural.PUBLISHED["heart-disease"])

    def test_claims_compare_means(self) -> None:
        claims = {claim.text.split(": ")[-1]: claim for claim in FIGURE.claims(rows())}
        pooled = claims["default is at most 0.005 below pooled"]
        difference = "0.775, pooled 0.850, difference -0.075 ± 0.025"
        assert (pooled.measured, pooled.holds) == (difference, False)
        assert claims["default is at most 0.005 below FedAvg"].holds
        assert claims["personal is at most 0.005 below default, alone"].holds
        assert [claim.holds for claim in claims.values()] == [True, False, True, True, True]

    def test_low_worst_site_is_a_miss(self) -> None:
        low = {**SCORES, "personal": [(0.9, 0.5), (0.9, 0.5)]}
        (claim,) = [each for each in FIGURE.claims(rows(low)) if "worst" in each.text]
        assert (claim.measured, claim.holds) == ("0.500, default 0.550", False)

    def test_tiny_sites_are_not_the_worst(self) -> None:
        few = [{**row, "rows": 4} if row["site"] == "b" else row for row in rows()]
        assert FIGURE.table(few)[1][4] == "0.850"

    def test_sites_without_test_rows(self) -> None:
        none = [
            {**row, "rows": 0, "score": None} if row["site"] == "b" else row
            for row in rows()
        ]
        assert FIGURE.table(none)[1][2] == "0.850"

    def test_one_seed_has_no_error(self) -> None:
        first = [row for row in rows() if row["seed"] == 0]
        assert FIGURE.table(first)[1][2:4] == ("0.750", "")
        measured = [claim.measured for claim in FIGURE.claims(first)]
        assert "0.750, pooled 0.850, difference -0.100" in measured

    def test_picture_has_a_panel_per_federation(self) -> None:
        other = [{**row, "dataset": "tcga-brca"} for row in rows()]
        picture = FIGURE.draw([*rows(), *other])
        assert [axis.get_title() for axis in picture.axes] == list(FIGURE.tasks)


class OneKnob(Natural):
    """One rival with two step sizes."""

    def rivals(self, size: GridSize, dataset: str) -> Sequence[Rival]:
        settings = {"update": "average", "personal": False}
        return [Rival("FedAvg", settings, {"tau": (3,), "step_size": (0.1, 0.2)})]


def made_up(settings: Settings) -> Columns:
    """Return figures of two sites; the better step size depends on the seed."""
    names = ["tuned"] if not settings.personal else list(federations.MODELS)
    step = settings.step_size
    low = step == (0.1 if settings.seed == 0 else 0.2)
    validation = 0.3 if low else 0.4
    return {
        "model": [name for name in names for _ in "ab"],
        "site": ["a", "b"] * len(names),
        "rows": [30, 10] * len(names),
        "score": [0.8 if low else 0.9, 0.5] * len(names),
        "validation": [validation, validation] * len(names),
    }


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reproduction with made-up figures, without downloaded data."""
    monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(natural, "measure", made_up)
    figure = OneKnob("natural", "Natural federations", FIGURE.tasks)
    reproduce.make(figure, tmp_path / "out", GridSize(2), jobs=1)
    return tmp_path / "out"


class TestReproduction:
    def test_validation_chooses_not_the_score(self, out: Path) -> None:
        (result,) = reproduce.read_figures(out, [FIGURE])
        assert result.table is not None
        (line,) = [line for line in result.table if line[1] == "FedAvg"]
        knobs = "tau=3, step_size=0.1; tau=3, step_size=0.2"
        assert (line[2], line[-1]) == ("0.725", knobs)

    def test_page_names_missing_federations(self, out: Path) -> None:
        (result,) = reproduce.read_figures(out, [FIGURE])
        assert result.made_of == (
            "mean of 2 seeds, rivals tuned, on heart-disease; not on this "
            "machine, fetch with: `fedbudget data get tcga-brca`"
        )
        markdown, html = reproduce.write_report([result], out)
        text = markdown.read_text(encoding="utf-8")
        assert text.startswith("# Figures of fedbudget\n")
        assert result.made_of in text
        assert "FLamby, 254 test rows: pooled" in html.read_text(encoding="utf-8")


def test_small_grid_has_no_large_federations() -> None:
    figure = FIGURES["natural"]
    settings = figure.settings(None)
    quick = GridSize(1, quick=True)
    small = {cell.dataset for cell in figure.sweep(settings, quick).cells}
    everything = {cell.dataset for cell in figure.sweep(settings, GridSize(1)).cells}
    assert everything - small == set(natural.LARGE)
    text = figure.made_of(settings, quick, "everything")
    assert text.endswith("cmapss; without omniglot and shakespeare, which take minutes")
    assert figure.made_of(settings, GridSize(1), "everything").endswith("shakespeare")


def test_command_has_the_figure() -> None:
    figure = FIGURES["natural"]
    assert reproduce.choose(["natural"], with_cnn=False) == [figure]
    assert figure not in reproduce.choose(["all"], with_cnn=False)
    assert reproduce.grid_size(figure) == GridSize(5)
    assert reproduce.grid_size(figure, quick=True) == GridSize(2, quick=True)
    base = figure.settings(None)[0]
    cells = figure.runs(base, GridSize(1)).cells
    assert len(set(cells)) == len(cells) == 1 + 15 + 45 + 15
    large = replace(base, dataset="omniglot")
    assert len(figure.runs(large, GridSize(1)).cells) == 1 + 4 + 4 + 4
    assert {cell.personal for cell in cells[1:]} == {False}
    assert {cell.validation for cell in cells} == {None}
