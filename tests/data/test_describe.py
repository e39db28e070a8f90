"""The description of tables by site, and its findings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedbudget
from fedbudget.data.describe import ColumnSummary, Description, describe
from fedbudget.errors import UserError

RNG = np.random.default_rng(5)
HEIGHT = RNG.normal(170, 10, (3, 40)).round(1)


def site(**columns: Any) -> pd.DataFrame:
    """A table of 40 rows with two classes and other columns."""
    return pd.DataFrame({**columns, "ill": ["no", "yes"] * 20})


def findings(*frames: pd.DataFrame, **options: Any) -> tuple[str, ...]:
    names = ("north", "south", "west")[: len(frames)]
    return describe(list(frames), names=names, **options).findings


def same(text: str) -> Sequence[str]:
    return [text] * 40


class TestFigures:
    def test_totals_equal_pooled_rows(self) -> None:
        """Computed from the sites' summaries, and by pandas from all rows."""
        frames = [
            site(height=np.where(HEIGHT[0] > 180, np.nan, HEIGHT[0])),
            site(height=HEIGHT[1]),
        ]
        described = describe(frames, names=["north", "south"])
        pooled = pd.concat(frames).height
        total = described.total("height")
        assert (total.rows, total.missing) == (80, int(pooled.isna().sum()))
        expected = (pooled.mean(), pooled.std(ddof=0), pooled.min(), pooled.max())
        found = (total.mean, total.deviation, total.smallest, total.largest)
        assert found == pytest.approx(expected)
        north = described.columns["height"]["north"]
        assert north.mean == pytest.approx(frames[0].height.mean())
        assert described.columns["ill"]["south"].counts == {"no": 20, "yes": 20}
        assert described.rows == {"north": 40, "south": 40}

    def test_column_names_the_sites(self, tmp_path: Path) -> None:
        frames = [site(place=same(name), height=HEIGHT[0]) for name in ("b", "a")]
        frame = pd.concat(frames)
        frame.to_csv(tmp_path / "t.csv", index=False)
        one = describe(frame, nodes="place")
        assert one.sites == ("a", "b")
        assert list(one.columns) == ["height", "ill"]
        assert describe(tmp_path / "t.csv", nodes="place").columns == one.columns

    def test_folder_and_published_name(self, tmp_path: Path) -> None:
        folder = tmp_path / "hospitals"
        fedbudget.data.natural.write_tables("heart-disease", None, folder)
        named = describe("heart-disease")
        read = describe(folder, categorical=("cp", "restecg"))
        assert read.columns == named.columns
        assert read.rows == {
            "cleveland": 303,
            "hungarian": 294,
            "switzerland": 123,
            "va": 200,
        }
        assert read.findings == named.findings

    def test_json_has_all_figures(self) -> None:
        described = describe([site(height=HEIGHT[0])], names=["north"])
        plain = described.to_json()
        own = plain["columns"]["height"]["sites"]["north"]
        assert own["smallest"] == HEIGHT[0].min()
        assert "counts" not in own
        assert plain["columns"]["ill"]["total"]["counts"] == {"no": 20, "yes": 20}
        assert (plain["target"], plain["rows"]) == ("ill", {"north": 40})


class TestFindings:
    def test_ordinary_tables_have_none(self) -> None:
        frames = [site(height=own, sex=["f", "m"] * 20) for own in HEIGHT]
        assert findings(*frames) == ()

    def test_other_unit(self) -> None:
        frames = [
            site(height=HEIGHT[0]),
            site(height=HEIGHT[1]),
            site(height=HEIGHT[2] / 2.54),
        ]
        (found,) = findings(*frames)
        west = HEIGHT[2].mean() / 2.54
        others = HEIGHT[:2]
        assert found == (
            f"height has the mean {west:.4g} at west and {others.mean():.4g} elsewhere "
            f"(sd {others.std():.4g}): is it another unit?"
        )

    def test_other_unit_around_zero(self) -> None:
        """Means are equal, but one deviation is a thousand times the others."""
        frames = [site(shift=own - own.mean()) for own in (*HEIGHT[:2], 1000 * HEIGHT[2])]
        (found,) = findings(*frames)
        assert found.startswith("shift has the sd ")

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (np.full(40, np.nan), "height is empty at south"),
            (np.full(40, 170.0), "height has the same value in all rows of south (170)"),
            (
                np.where(np.arange(40) < 25, np.nan, HEIGHT[1]),
                "height is mostly missing at south (62%)",
            ),
        ],
    )
    def test_useless_column_of_a_site(self, values: Any, message: str) -> None:
        frames = [site(height=HEIGHT[0]), site(height=values), site(height=HEIGHT[2])]
        assert findings(*frames) == (message,)

    def test_useless_column_everywhere(self) -> None:
        assert findings(site(a=np.full(40, 2.5)), site(a=np.full(40, 2.5))) == (
            "a has the same value in all rows: 2.5",
        )
        empty = site(a=np.full(40, np.nan), b=HEIGHT[0])
        assert findings(empty, empty) == ("a is empty at every site",)

    def test_category_of_one_site(self) -> None:
        frames = [site(smoker=["yes", "no"] * 20) for _ in range(2)]
        frames.append(site(smoker=["Yes", "no"] * 20))
        assert findings(*frames) == ("smoker: only west has the category Yes",)

    def test_class_of_one_site(self) -> None:
        frames = [site(height=own) for own in HEIGHT]
        frames[1]["ill"] = "no"
        frames[2]["ill"] = ["no", "Yes"] * 20
        assert findings(*frames) == (
            "ill: only north has the class yes",
            "ill: all rows of south are no",
            "ill: only west has the class Yes",
        )

    def test_column_of_some_sites(self) -> None:
        frames = [site(height=HEIGHT[0], age=HEIGHT[1]), site(height=HEIGHT[0])]
        assert findings(*frames) == ("age is not in the table of south",)

    def test_text_at_one_site(self) -> None:
        frames = [site(grade=HEIGHT[0]), site(grade=["high", "low"] * 20)]
        (found,) = findings(*frames)
        assert found.startswith("grade has text at ")

    def test_problems_of_a_table(self) -> None:
        """Reading goes on: dates and IDs are findings, and are not summarised."""
        dates = [f"2024-05-{1 + day % 28:02}" for day in range(40)]
        frames = [site(height=HEIGHT[0], visit=dates)] * 2
        described = describe(frames, names=["north", "south"])
        assert list(described.columns) == ["height", "ill"]
        (found,) = described.findings
        assert found.startswith("north: visit looks like a date ('2024-05-01' in row 0)")
        assert found.endswith(" (the same in 1 more)")

    def test_missing_targets(self) -> None:
        frame = site(height=HEIGHT[0])
        frame.loc[3, "ill"] = None
        (found,) = findings(frame)
        assert "ill, the target, has no value in 1 of 40 rows, such as row 3" in found


class TestText:
    def lines(self, described: Description) -> list[str]:
        lines = str(described).splitlines()
        assert max(map(len, lines)) <= 80
        return lines

    def test_lines_of_each_site(self) -> None:
        frames = [site(height=np.arange(40.0)), site(height=np.arange(40.0) + 1)]
        lines = self.lines(describe(frames, names=["north", "south"]))
        assert lines[0] == "tables: 80 rows at 2 sites, 1 column, target ill"
        assert lines[-1].split() == ["south", "40", "20.5", "11.54", "1", "to", "40"]
        assert lines[2].split() == ["ill", "all", "80", "no", "50%,", "yes", "50%"]

    def test_many_sites_and_long_names(self) -> None:
        """Only the sites with the smallest and the largest mean are listed."""
        long = "a very long name of a column that goes on and on"
        frames = [site(**{long: HEIGHT[0] + turn}) for turn in range(20)]
        lines = self.lines(describe(frames, names=[f"{long} {turn}" for turn in range(20)]))
        assert len(lines) == 3 + 2 * 3
        assert lines[-3].startswith("a very long n…")

    def test_long_findings_are_wrapped(self) -> None:
        frames = [site(height=HEIGHT[0]) for _ in range(2)]
        frames.append(site(height=1e6 * HEIGHT[0]))
        *_, first, second = self.lines(describe(frames))
        assert first.startswith("- height has the mean 1.67e+08 at table 2 and ")
        assert second.startswith("  ")


class TestBadInput:
    @pytest.mark.parametrize("name", ["digits", "none.csv"])
    def test_no_table(self, name: str) -> None:
        with pytest.raises(UserError, match=f"{name} is no table: describe takes a .csv, "):
            describe(name)

    def test_other_site_column(self) -> None:
        with pytest.raises(UserError, match="heart-disease has the sites by:hospital, not"):
            describe("heart-disease", nodes="sex")

    def test_unknown_target(self) -> None:
        with pytest.raises(UserError, match="has no column 'dead'; it has height, ill"):
            describe([site(height=HEIGHT[0])], target="dead")

    def test_no_tables(self) -> None:
        with pytest.raises(UserError, match="no tables to describe"):
            describe([])


def test_summary_of_nothing() -> None:
    empty = ColumnSummary.of(np.full(3, np.nan))
    assert (empty.rows, empty.present, empty.mean) == (3, 0, None)
    assert ColumnSummary.total([empty, empty]) == ColumnSummary(6, 6)
