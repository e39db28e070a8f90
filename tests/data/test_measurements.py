"""The two tables of measurements: by hand with all their quirks, and the real ones against
what is known of them.
"""

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedbudget import data
from fedbudget.data.dataset import Dataset
from fedbudget.errors import UserError
from support.real_data import folder_with

# As published: every field in quotes, numbers padded with blanks, lines that end in CR LF.
ENERGY = (
    '"date","Appliances","lights","T1"\r\n'
    '"2016-01-11 17:00:00","60","30","19.89"\r\n'
    '"2016-01-11 17:10:00"," 40","  0"," 17.89"\r\n'
    '"2016-01-11 17:20:00","140"," 30","18.89"\r\n'
)
KNOWLEDGE = (
    "STG,SCG,UNS\n0,0.5,very_low\n0.25,1,High\n1,0,Low\n0.5,0.5,Middle\n0,0,Very Low\n"
)


def energy(folder: Path, text: str = ENERGY, *, zipped: bool = False) -> Dataset:
    (folder / "energy").mkdir()
    contents = text.encode()
    path = (
        folder
        / "energy"
        / ("energydata_complete.csv.gz" if zipped else "energydata_complete.csv")
    )
    path.write_bytes(gzip.compress(contents) if zipped else contents)
    return data.load("energy", data_dir=folder)


def knowledge(folder: Path, text: str | bytes) -> Dataset:
    (folder / "user-knowledge").mkdir()
    (folder / "user-knowledge/user_knowledge.csv").write_bytes(
        text.encode() if isinstance(text, str) else text
    )
    return data.load("user-knowledge", data_dir=folder)


class TestEnergy:
    @pytest.mark.parametrize("zipped", [False, True])
    def test_quotes_blanks_and_line_ends_are_no_part_of_a_number(
        self, tmp_path: Path, zipped: bool
    ) -> None:
        found = energy(tmp_path, zipped=zipped)
        # lights 30, 0, 30: mean 20, deviation √200; T1 19.89, 17.89, 18.89: mean 18.89,
        # deviation √(2/3)
        expected = [
            [10 / 200**0.5, 1.5**0.5],
            [-20 / 200**0.5, -(1.5**0.5)],
            [10 / 200**0.5, 0],
        ]
        assert found.train.x == pytest.approx(np.array(expected), abs=1e-6)

    def test_the_target_is_kept_in_wh_and_standardised_for_a_model(
        self, tmp_path: Path
    ) -> None:
        found = energy(tmp_path)
        assert found.train.values is not None
        assert found.train.values.tolist() == [60, 40, 140]
        deviation = ((20**2 + 40**2 + 60**2) / 3) ** 0.5  # about the mean, 80
        wanted = np.array([-20, -40, 60]) / deviation
        assert found.table(found.train, "real").y == pytest.approx(wanted, rel=1e-6)
        assert found.standardization is not None
        assert found.standardization.target_mean == 80
        assert found.standardization.target_deviation == pytest.approx(deviation)

    def test_there_are_no_classes_and_no_test_samples(self, tmp_path: Path) -> None:
        found = energy(tmp_path)
        assert (found.classes, found.test, found.train.labels) == ((), None, None)

    def test_quotes_are_not_needed(self, tmp_path: Path) -> None:
        (tmp_path / "quoted").mkdir()
        plain = energy(tmp_path, ENERGY.replace('"', "").replace("\r\n", "\n"))
        assert np.array_equal(plain.train.x, energy(tmp_path / "quoted").train.x)

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            (
                '"Appliances"',
                '"Washing"',
                "has no column 'Appliances'; it has date, Washing, lights, T1",
            ),
            (
                '"19.89"',
                '"warm"',
                "T1 has numbers, but not in 1 of 3 rows, such as 'warm' in row 2",
            ),
            ('"19.89"', '"nan"', "T1 has no value in 1 of 3 rows, such as row 2"),
            (
                '" 40"',
                '"   "',
                "Appliances, the target, has no value in 1 of 3 rows, such as row 3",
            ),
            ('" 40"', '"little"', "energy: Appliances must be numbers"),
            (
                '" 40"',
                '"inf"',
                "Appliances, the target, is not finite in 1 row \\(row 3\\)",
            ),
            (
                ',"18.89"',
                "",
                "1 row does not have the header's 4 fields, such as row 4 with 3",
            ),
        ],
    )
    def test_what_is_wrong_is_said_with_its_row_and_column(
        self, tmp_path: Path, before: str, after: str, message: str
    ) -> None:
        assert ENERGY.count(before) == 1
        with pytest.raises(UserError, match=message):
            energy(tmp_path, ENERGY.replace(before, after))

    def test_a_bomb_of_blanks_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="is larger than the expected 50000000 bytes"):
            energy(tmp_path, ENERGY + " " * 60_000_000, zipped=True)

    def test_the_real_one_is_what_its_authors_say(self) -> None:
        found = data.load("energy", data_dir=folder_with("energy"))
        assert found.train.x.shape == (19_735, 27)
        x = found.train.x.astype(np.float64)
        assert x.mean(axis=0) == pytest.approx(0, abs=1e-5)
        assert x.std(axis=0) == pytest.approx(1, abs=1e-5)
        how = found.standardization
        assert how is not None
        assert (round(how.target_mean, 2), round(how.target_deviation, 2)) == (
            97.69,
            102.52,
        )
        y = found.table(found.train, "real").y.astype(np.float64)
        assert (y.mean(), y.std()) == pytest.approx((0, 1), abs=1e-5)
        values = found.train.values
        assert values is not None
        assert [
            float(each) for each in (values.min(), np.median(values), values.max())
        ] == [
            10,
            60,
            1080,
        ]


class TestUserKnowledge:
    def test_levels_are_numbered_from_the_lowest_however_they_are_written(
        self, tmp_path: Path
    ) -> None:
        found = knowledge(tmp_path, KNOWLEDGE)
        assert found.train.labels is not None
        assert found.train.labels.tolist() == [0, 3, 1, 2, 0]
        assert found.classes == ("very_low", "Low", "Middle", "High")
        assert found.train.x.tolist() == [
            [0, 0.5],
            [0.25, 1],
            [1, 0],
            [0.5, 0.5],
            [0, 0],
        ]  # as they are

    @pytest.mark.parametrize("level", ["Higher", "3", "very-low"])
    def test_a_level_that_is_none_is_refused(self, tmp_path: Path, level: str) -> None:
        with pytest.raises(
            UserError,
            match=f"class '{level.lower()}' is not one of very_low, low, middle, high",
        ):
            knowledge(tmp_path, KNOWLEDGE.replace("Middle", level))

    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            (b"", "needs a header line"),
            (b"STG,UNS\n", "has a header but no rows"),
            (
                b"STG,UNS\n\xff\xfe,High\n",
                "cannot be read: 'utf-8' codec can't decode byte 0xff",
            ),
            (
                b"STG,UNS\n" + b"1" * 200_000 + b",High\n",
                "cannot be read: field larger than field limit",
            ),
        ],
    )
    def test_a_file_that_is_no_table_is_refused(
        self, tmp_path: Path, contents: bytes, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            knowledge(tmp_path, contents)

    def test_the_real_one_has_its_published_counts(self) -> None:
        found = data.load("user-knowledge", data_dir=folder_with("user-knowledge"))
        assert found.train.labels is not None
        assert np.bincount(found.train.labels).tolist() == [50, 129, 122, 102]
        assert found.train.x.shape == (403, 5)
        assert (found.train.x.min(), found.train.x.max()) == (0, np.float32(0.99))
        assert found.test is None


@pytest.mark.parametrize("name", ["energy", "user-knowledge"])
def test_a_table_that_is_nowhere_is_refused_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDBUDGET_DATA", raising=False)
    with pytest.raises(UserError, match=f"download it with: fedbudget data get {name}"):
        data.load(name, data_dir=tmp_path)
