"""Datasets from tables, in files and DataFrames; unscaled features of arrays."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbudget import data
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import from_samples, from_shards, load, load_all
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class TestTables:
    """Two sites whose tables differ in order, categories and classes."""

    def sites(self, folder: Path) -> Path:
        folder.mkdir()
        rows = "".join(
            f"{n},{'' if n == 3 else n / 2},{'fm'[n % 2]},{'ill' if n % 3 else 'well'}\n"
            for n in range(10)
        )
        write(folder / "east.csv", "id,age,sex,state\n" + rows)
        other = "".join(
            f"{'Well' if n % 3 else 'ill'};{'mx'[n % 2]};{n},5;{n}\n" for n in range(10)
        )
        write(folder / "west.csv", "state;sex;age;id\n" + other)
        return folder

    OPTIONS = TableOptions("state", drop=("id",), impute="median")

    def test_layout_follows_the_first_file(self, tmp_path: Path) -> None:
        dataset = load(
            self.sites(tmp_path / "sites"), self.OPTIONS, test_share=0.0, standardise=False
        )
        assert dataset.layout is not None
        assert dataset.layout.feature_names == ("age", "sex=f", "sex=m", "sex=x")
        assert dataset.layout.dropped == ("id",)
        assert dataset.files == (10, 10)
        assert dataset.train.x[:2].tolist() == [[0, 1, 0, 0], [0.5, 0, 1, 0]]
        assert dataset.train.x[10:12].tolist() == [[0.5, 0, 1, 0], [1.5, 0, 0, 1]]
        # The medians are 2.5 and 5; the second one is of more rows.
        assert dataset.train.x[3].tolist() == [5.0, 0, 1, 0]

    def test_fill_uses_training_rows_only(self, tmp_path: Path) -> None:
        rows = "".join(f"{'' if n == 7 else n},{n % 2}\n" for n in range(20))
        dataset = load(
            write(tmp_path / "a.csv", "age,y\n" + rows),
            TableOptions(impute="mean"),
            standardise=False,
        )
        assert dataset.layout is not None
        assert dataset.test is not None
        known = [float(value) for value in dataset.train.x[:, 0]]
        tested = {float(value) for value in dataset.test.x[:, 0]}
        rows_trained = [value for value in range(20) if value not in tested and value != 7]
        assert dataset.layout.columns[0].fill == pytest.approx(np.mean(rows_trained))
        assert len(known) == 16

    def test_differing_classes_are_reported(self, tmp_path: Path) -> None:
        dataset = load(self.sites(tmp_path / "sites"), self.OPTIONS)
        assert (
            dataset.remarks[-1]
            == "classes that only some have: Well (west.csv); well (east.csv)"
        )
        assert dataset.remarks[0] == "sex is treated as a category: f, m"

    def test_given_classes_are_complete(self, tmp_path: Path) -> None:
        folder = self.sites(tmp_path / "sites")
        three = load(folder, replace(self.OPTIONS, classes=("well", "ill", "Well")))
        assert three.classes == ("well", "ill", "Well")
        message = r"west\.csv: state, the target, is 'Well' in 6 rows, such as row 3"
        with pytest.raises(UserError, match=message):
            load(folder, replace(self.OPTIONS, classes=("well", "ill")))
        np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=[0, 1, 2])
        expected = ("2", "1", "0")
        assert (
            load(tmp_path / "a.npz", TableOptions(classes=("2", "1", "0"))).classes
            == expected
        )
        with pytest.raises(UserError, match=r"a\.npz: class '2' is not one of 0, 1"):
            load(tmp_path / "a.npz", TableOptions(classes=("0", "1")))

    def test_unknown_column_to_drop(self, tmp_path: Path) -> None:
        message = "sites has no column 'di' to drop; it has age, sex"
        with pytest.raises(UserError, match=message):
            load(self.sites(tmp_path / "sites"), replace(self.OPTIONS, drop=("id", "di")))

    def test_new_rows_use_training_layout(self, tmp_path: Path) -> None:
        dataset = load(
            self.sites(tmp_path / "sites"), self.OPTIONS, test_share=0.0, standardise=False
        )
        new = write(tmp_path / "new.csv", "sex,state,age\nm,ill,4\nz,well,\n")
        result = load_all(new, classes=dataset.classes, layout=dataset.layout)
        assert result.train.x.tolist() == [[4, 0, 1, 0], [5, 0, 0, 0]]

    def test_category_of_one_file_applies(self, tmp_path: Path) -> None:
        """Alone, two words in two rows would look like an ID."""
        folder = self.sites(tmp_path / "sites")
        write(folder / "small.csv", "id,age,sex,state\n1,2,m,ill\n2,2,f,ill\n")
        assert load(folder, self.OPTIONS, test_share=0.0).files == (10, 2, 10)
        message = r"small\.csv: sex has a different text in every row"
        with pytest.raises(UserError, match=message):
            load(folder / "small.csv", self.OPTIONS)

    def test_mixed_files_are_rejected(self, tmp_path: Path) -> None:
        folder = self.sites(tmp_path / "sites")
        np.savez(folder / "a.npz", x=np.zeros((3, 2)))
        with pytest.raises(UserError, match=r"has \.csv and \.npz files"):
            load(folder)


@pytest.mark.parametrize(
    "options", [{"drop": ("a",)}, {"categorical": ("a",)}, {"impute": "mean"}]
)
def test_column_options_need_columns(tmp_path: Path, options: dict[str, Any]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)))
    option = next(iter(options))
    message = f"{option} is for tables; .*a.npz has no named columns"
    with pytest.raises(UserError, match=message):
        load(tmp_path / "a.npz", TableOptions(**options))
    message = f"{option} is for tables; shard 0 has no named columns"
    with pytest.raises(UserError, match=message):
        from_shards([(np.zeros((3, 2)), None)], None, TableOptions(**options))
    message = f"{option} is for tables; digits has no named columns"
    with pytest.raises(UserError, match=message):
        data.load("digits", TableOptions(**options))


def test_published_datasets_reject_options() -> None:
    with pytest.raises(UserError, match="classes is for your own data"):
        data.load("digits", TableOptions(classes=("1", "2")))
    with pytest.raises(UserError, match="standardise is for your own data"):
        data.load("digits", standardise=True)


class TestScales:
    """Unscaled features, from which a model learns slowly."""

    X = np.random.default_rng(0).normal(0, 1, (50, 5))

    @pytest.mark.parametrize(
        ("x", "warning"),
        [
            (X, None),
            (X * [1, 1, 1, 1, 20], None),
            (X * [1, 1, 1, 1, 40], "for feature 4, "),
            (X * [1e-9, 1, 1, 1, 1], None),  # a nearly constant feature does no harm
            (X + np.array([0, 0, 0, 0, 200]), "feature 4 is far from 0"),
            (X * [0, 0, 0, 0, 1], None),
            (np.ones((50, 5)), None),
            ((X * 50 + 100).clip(0, 255).astype(np.uint8), None),
        ],
    )
    def test_warning_suggests_standardise(
        self, x: np.ndarray[Any, Any], warning: str | None
    ) -> None:
        result = from_shards([(x, None)], None).warnings
        if warning is None:
            assert result == ()
        else:
            assert len(result) == 1
            assert warning in result[0]
            assert "`standardise`" in result[0]

    def test_no_warning_once_standardised(self) -> None:
        shards = [
            (self.X[:20] * [1, 1, 1, 1, 1000], None),
            (self.X[20:] * [1, 1, 1, 1, 1000], None),
        ]
        assert from_shards(shards, None).warnings != ()
        result = from_shards(shards, None, standardise=True)
        assert result.warnings == ()
        np.testing.assert_allclose(result.train.x.std(axis=0), 1, rtol=1e-5)


class TestFrames:
    ROWS = 20
    FRAME = pd.DataFrame(
        {
            "a": np.arange(ROWS) / 3,
            "sex": ["f", "m"] * 10,
            "y": ["no", "yes", "no", "no"] * 5,
        }
    )

    def test_frames_match_their_csv(self, tmp_path: Path) -> None:
        (tmp_path / "sites").mkdir()
        halves = [self.FRAME[:8], self.FRAME[8:][["y", "sex", "a"]]]
        for number, half in enumerate(halves):
            half.to_csv(tmp_path / "sites" / f"{number}.csv", index=False)
        options = TableOptions("y")
        result = from_shards(halves, None, options)
        read = load(tmp_path / "sites", options, test_share=0.0)
        expected = (read.layout, read.classes, read.files)
        assert (result.layout, result.classes, result.files) == expected
        np.testing.assert_allclose(result.train.x, read.train.x)

    def test_test_samples_of_frames(self) -> None:
        """A share is held out, or another frame holds the test samples."""
        whole = from_samples(self.FRAME, None, TableOptions("y"), test_share=0.25)
        assert whole.test is not None
        assert (len(whole.train), len(whole.test), whole.files) == (15, 5, ())
        tested = from_samples(self.FRAME[4:], self.FRAME[:4], TableOptions("y"))
        assert tested.test is not None
        assert (len(tested.train), len(tested.test)) == (16, 4)

    def test_frames_and_arrays_are_rejected(self) -> None:
        with pytest.raises(UserError, match="shard 1 is not a DataFrame, but others are"):
            from_shards([self.FRAME, (np.zeros((3, 2)), None)], None)


class TestSites:
    """Nodes are the values of a column."""

    ROWS = (*[("b", 1.0, "ill")] * 3, *[("a", 2.0, "well")] * 2, *[("10", 5.0, "ill")] * 5)
    BY_SITE = TableOptions("y", site="site")

    def table(self, path: Path, rows: Any = ROWS, header: str = "site,u,y") -> Path:
        lines = [header, *(",".join(map(str, row)) for row in rows)]
        return write(path, "\n".join(lines) + "\n")

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.ROWS, columns=["site", "u", "y"])

    def load(self, path: Path, **changes: Any) -> Dataset:
        options = replace(self.BY_SITE, **changes)
        return load(path, options, test_share=0.0, standardise=False)

    def test_sorted_values_are_nodes(self, tmp_path: Path) -> None:
        """Numbers come first; the column is no feature, and new tables may have it."""
        rows = [self.ROWS[number] for number in (0, 5, 3, 1, 6, 7, 4, 2, 8, 9)]
        dataset = self.load(self.table(tmp_path / "t.csv", rows))
        assert (dataset.sites, dataset.files) == (("10", "a", "b"), (5, 2, 3))
        assert dataset.train.x.ravel().tolist() == [5.0] * 5 + [2.0] * 2 + [1.0] * 3
        assert dataset.layout is not None
        assert (dataset.layout.names, dataset.layout.dropped) == (("u",), ("site",))
        assert dataset.site_column == "site"

    def test_every_form_is_equal(self, tmp_path: Path) -> None:
        """A `.csv`, Parquet, a DataFrame, and a site whose rows are in two files."""
        whole = self.load(self.table(tmp_path / "t.csv"))
        frame = self.frame()
        frame.to_parquet(tmp_path / "t.parquet")
        folder = tmp_path / "folder"
        folder.mkdir()
        self.table(folder / "1.csv", self.ROWS[:4])
        self.table(folder / "2.csv", [row[::-1] for row in self.ROWS[4:]], "y,u,site")
        options: dict[str, Any] = {"standardise": False}
        others = (
            self.load(tmp_path / "t.parquet"),
            self.load(folder),
            from_samples(frame, None, self.BY_SITE, test_share=0.0, **options),
            from_shards([frame[:4], frame[4:]], None, self.BY_SITE, **options),
        )
        for other in others:
            assert other.train.x.tolist() == whole.train.x.tolist()
            assert (other.sites, other.files) == (whole.sites, whole.files)
            assert other.classes == whole.classes == ("ill", "well")

    def test_sites_equal_separate_files(self, tmp_path: Path) -> None:
        """One table with a column gives the samples of one table per site."""
        folder = tmp_path / "folder"
        folder.mkdir()
        for site in ("10", "a", "b"):
            own = [row[1:] for row in self.ROWS if row[0] == site]
            self.table(folder / f"{site}.csv", own, "u,y")
        files = load(folder, TableOptions("y"), test_share=0.4)
        column = load(self.table(tmp_path / "t.csv"), self.BY_SITE, test_share=0.4)
        assert files.train.x.tolist() == column.train.x.tolist()
        assert files.test is not None
        assert column.test is not None
        assert files.test.x.tolist() == column.test.x.tolist()
        assert (files.sites, files.files) == (column.sites, column.files)

    def test_last_other_column_is_target(self, tmp_path: Path) -> None:
        path = self.table(tmp_path / "t.csv", [row[::-1] for row in self.ROWS], "y,u,site")
        dataset = self.load(path, target=None)
        assert dataset.layout is not None
        assert (dataset.layout.target, dataset.layout.names) == ("u", ("y",))

    @pytest.mark.parametrize(
        ("rows", "changes", "message"),
        [
            (ROWS, {"site": "zone"}, "has no column 'zone'; it has site, u, y"),
            (ROWS, {"target": "site"}, "site is the target; it cannot name the sites too"),
            (
                [*ROWS, ("", 1.0, "ill"), ("NA", 2.0, "ill")],
                {},
                "site, the site of each row, has no value in 2 of 12 rows, such as row 12: "
                "name the sites of these rows, or leave them out",
            ),
            (
                [*ROWS, ("c", 1.0, "ill"), ("9", 1.0, "ill")],
                {},
                "2 of 5 sites in site have fewer than 2 rows: 9, c. A node cannot train on "
                "them: leave these rows out, or give them the name of another site",
            ),
            (
                [(f"P-{number}", 1.0, "ill") for number in range(10)],
                {},
                "site has 10 different values in 10 rows, like an ID: name the column of "
                "the sites with partition by:COLUMN",
            ),
        ],
    )
    def test_unusable_columns_are_refused(
        self, tmp_path: Path, rows: Any, changes: dict[str, Any], message: str
    ) -> None:
        path = self.table(tmp_path / "t.csv", rows)
        with pytest.raises(UserError, match=re.escape(message)):
            self.load(path, **changes)

    def test_site_with_one_class(self, tmp_path: Path) -> None:
        """It can train; a remark names it."""
        remarks = self.load(self.table(tmp_path / "t.csv")).remarks
        assert remarks == ("classes that only some have: ill (10, b); well (a)",)

    def test_arrays_have_no_sites(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), y=np.ones(4))
        with pytest.raises(UserError, match=r"by:site is for tables; .*a\.npz has"):
            load(tmp_path / "a.npz", self.BY_SITE)
        with pytest.raises(UserError, match="by:site is for tables; samples has"):
            from_samples([([1.0], 0), ([2.0], 1)], None, self.BY_SITE)

    def test_damaged_parquet_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.parquet", "no Parquet")
        with pytest.raises(UserError, match=r"t\.parquet cannot be read: "):
            load(path)
