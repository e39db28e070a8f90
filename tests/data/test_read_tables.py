"""Tables from a .csv and from DataFrames: what is read, and all that is wrong with one,
told at once.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbudget.data.read_tables import from_frame, parse_csv, read_csv
from fedbudget.data.tables import RawTable, TableOptions, TextColumn, require_usable
from fedbudget.errors import UserError, flag


def table(text: str, **options: object) -> RawTable:
    found = parse_csv(text.splitlines(keepends=True), "a.csv", TableOptions(**options))  # type: ignore[arg-type]
    require_usable([found])
    return found


def values(of: RawTable) -> list[list[float]]:
    return [
        list(row)
        for row in zip(
            *(np.asarray(each).tolist() for each in of.columns.values()), strict=True
        )
    ]


class TestNumbers:
    @pytest.mark.parametrize(
        "text",
        [
            "a,b,y\n1,2,3\n4,5,6\n",
            "a,b,y\r\n1,2,3\r\n4,5,6\r\n",  # CRLF
            "a,b,y\n1,2,3\n4,5,6",  # no newline at the end
            '"a","b","y"\n"1","2","3"\n"4","5","6"\n',  # quoted
            "a, b ,y\n 1,  2,3  \n4 ,5,\t6\n",  # padded
            "\ufeffa,b,y\n1,2,3\n4,5,6\n",  # byte order mark
            "a,b,y\n1,2,3\n\n4,5,6\n\n",  # empty lines
            "a,b,y\n1e0,2.0,+3\n4.,5,6e0\n",  # numbers written otherwise
            "a\tb\ty\n1\t2\t3\n4\t5\t6\n",  # tabs
            "a;b;y\n1,0;2;3,0\n4;5,0e0;6\n",  # semicolons, and decimal commas with them
        ],
    )
    def test_all_ways_to_write_the_same_numbers_read_the_same(
        self, tmp_path: Path, text: str
    ) -> None:
        (tmp_path / "a.csv").write_bytes(text.encode())
        found = read_csv(tmp_path / "a.csv", TableOptions("y"))
        assert values(found) == [[1, 2], [4, 5]]
        assert isinstance(found.targets, np.ndarray)
        assert found.targets.tolist() == [3, 6]

    def test_the_target_is_the_last_column_or_the_one_named(self) -> None:
        text = "a,b,c\n1,2,3\n4,5,6\n"
        last, named = table(text), table(text, target="b")
        assert (list(last.columns), last.target, np.asarray(last.targets).tolist()) == (
            ["a", "b"],
            "c",
            [3, 6],
        )
        assert (list(named.columns), named.target, np.asarray(named.targets).tolist()) == (
            ["a", "c"],
            "b",
            [2, 5],
        )

    def test_missing_cells_are_those_that_programs_write(self) -> None:
        ways = [
            "",
            "NA",
            "n/a",
            "NaN",
            "null",
            "NULL",
            "?",
            "None",
            "#N/A",
            "<NA>",
            "-",
            ".",
        ]
        found = table(
            "a,y\n" + "".join(f"{way},1\n" for way in ways) + "7,1\n", impute="mean"
        )
        column = found.columns["a"]
        assert isinstance(column, np.ndarray)
        assert np.isnan(column).tolist() == [True] * len(ways) + [False]


class TestWords:
    def test_words_with_commas_and_quotes_are_classes(self) -> None:
        found = table('a,y\n1,"big, red"\n2,"the ""one"""\n3,café\n')
        assert isinstance(found.targets, TextColumn)
        assert [found.targets.names[code] for code in found.targets.codes] == [
            "big, red",
            'the "one"',
            "café",
        ]

    def test_few_different_words_are_a_category_and_it_is_said(self) -> None:
        found = table("sex,y\n" + "m,1\nf,2\n" * 3)
        column = found.columns["sex"]
        assert isinstance(column, TextColumn)
        assert (column.names, column.codes.tolist()) == (("f", "m"), [1, 0] * 3)
        assert found.remarks == ("sex is treated as a category: f, m",)

    def test_numbers_that_are_given_as_a_category_are_one_however_they_are_written(
        self,
    ) -> None:
        column = table("ward,y\n1,1\n1.0,1\n02,1\n", categorical=("ward",)).columns["ward"]
        assert isinstance(column, TextColumn)
        assert (column.names, column.codes.tolist()) == (("1", "2"), [0, 0, 1])


class TestProblems:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,y\n1,2\n,4\n", "a has no value in 1 of 2 rows, such as row 3: impute mean"),
            ("a,y\n1,2\n3,\n", "y, the target, has no value in 1 of 2 rows, such as row 3"),
            (
                "a,y\n1,2\n\n\n3,  \n",
                "y, the target, has no value in 1 of 2 rows, such as row 5",
            ),
            (
                "a,y\n1,2\n3\n",
                "1 row does not have the header's 2 fields, such as row 3 with 1",
            ),
            (
                "a,y\n1,2,3\n",
                "1 row does not have the header's 2 fields, such as row 2 with 3",
            ),
            ("a,y\n1,2\n-inf,4\n", r"a is not finite in 1 row \(row 3\)"),
            (
                "a,y\n1,2\n\n3,nan\n",
                "y, the target, has no value in 1 of 2 rows, such as row 4",
            ),
            (
                'a,b,y\n1,"2\n",3\n4,5,inf\n',
                r"y, the target, is not finite in 1 row \(row 4\)",
            ),  # over two lines
            (
                "a,b,y\n1,2,3\n4,five,6\n",
                "b has numbers, but not in 1 of 2 rows, such as 'five' in row 3",
            ),
            ("a,a,y\n1,2,3\n", "two columns are called a"),
            (",a,y\n0,2,3\n", "column 1 has no name in the header: drop it"),
            (
                "when,y\n2024-05-31,3\n2024-06-01,3\n",
                r"when looks like a date \('2024-05-31' in row 2\): drop it",
            ),
            (
                "who,y\nann,3\nbob,3\ncid,1\n",
                r"who has a different text in every row, like an ID \('ann' in row 2\)",
            ),
            (
                "what,y\n" + "a,1\nb,1\nc,1\na,1\n",
                r"what is text with 3 different values in 4 rows \('a' in row 2\)",
            ),
            ("a,when\n1,31.5.2024\n2,1.6.2024\n", "when, the target, looks like a date"),
            ("a,y\n", "has a header but no rows"),
            ("", "needs a header line"),
            ("y\n1\n", "needs a header line with at least one feature and the target"),
        ],
    )
    def test_what_cannot_be_used_is_refused_with_its_row_as_an_editor_counts(
        self, text: str, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            table(text)

    def test_all_are_told_at_once_with_what_may_do(self) -> None:
        rows = "".join(
            f"P-{n},2024-01-{n:02},{'' if n == 3 else n},{n % 2}\n" for n in range(1, 9)
        )
        with pytest.raises(UserError) as error:
            table("who,when,age,y\n" + rows)
        first, *problems, cure = error.value.spelled(flag).split("\n")
        assert first == "a.csv cannot be used as it is:"
        assert [problem.split()[1] for problem in problems] == ["who", "when", "age"]
        assert cure == "Try: --drop who,when --impute mean"
        assert list(
            table("who,when,age,y\n" + rows, drop=("who", "when"), impute="mean").columns
        ) == ["age"]

    def test_the_same_problem_of_several_tables_is_told_once(self) -> None:
        tables = [
            parse_csv(["a,y\n", "x,1\n", "y,1\n", "z,1\n"], name)
            for name in ("a.csv", "b.csv", "c.csv")
        ]
        with pytest.raises(
            UserError,
            match=r"^a\.csv: a has .* in row 2\): drop it \(the same in 2 more files\)$",
        ):
            require_usable(tables)

    def test_labels_that_are_none_of_the_classes_are_refused_each_with_its_rows(
        self,
    ) -> None:
        with pytest.raises(UserError) as error:
            table("a,y\n1,ill\n2,Ill\n3,well\n4,Ill\n5,2\n", classes=("ill", "well"))
        assert (
            "y, the target, is 'Ill' in 2 rows, such as row 3, not one of the classes ill, well"
            in str(error.value)
        )
        assert "y, the target, is '2' in 1 row (row 6)" in str(error.value)
        assert table("a,y\n1,1.0\n2,0\n", classes=("0", "1")).problems == ()

    def test_an_unknown_target_is_refused_with_the_columns_there_are(self) -> None:
        with pytest.raises(UserError, match=r"has no column 'price'; it has a, b, y"):
            table("a,b,y\n1,2,3\n", target="price")

    def test_a_number_that_looks_like_an_id_is_remarked_on(self) -> None:
        rows = "".join(f"{1000 + n},{n % 2}\n" for n in range(12))
        assert table("patient_id,y\n" + rows).remarks == (
            "patient_id has a different number in every row: `drop` it if it is an ID",
        )
        assert table("age,y\n" + rows).remarks == ()


class TestFrames:
    def test_a_frame_reads_as_the_file_that_it_would_be_written_to(
        self, tmp_path: Path
    ) -> None:
        frame = pd.DataFrame(
            {
                "age": [41.5, None, 3.0, 9.0, 1.0, 2.0],
                "count": pd.array([1, 2, None, 4, 5, 6], dtype="Int64"),
                "sex": pd.Categorical(["f", "m", None, "f", "m", "f"]),
                "smoker": [True, False, True, True, False, False],
                "kind": ["ill", "well", "ill", "ill", "well", "well"],
            }
        )
        frame.to_csv(tmp_path / "a.csv", index=False)
        options = TableOptions("kind", impute="mean")
        one, other = (
            from_frame(frame, "frame", options),
            read_csv(tmp_path / "a.csv", options),
        )
        require_usable([one])
        assert list(one.columns) == list(other.columns)
        for name in (*one.columns, "kind"):
            here, there = (
                each.targets if name == "kind" else each.columns[name]
                for each in (one, other)
            )
            if isinstance(here, TextColumn):
                assert isinstance(there, TextColumn)
                assert (here.names, here.codes.tolist()) == (
                    there.names,
                    there.codes.tolist(),
                )
            else:
                np.testing.assert_array_equal(np.asarray(here), np.asarray(there))

    def test_dates_of_a_frame_are_refused_as_dates(self) -> None:
        frame = pd.DataFrame(
            {
                "when": pd.date_range("2024-01-01", periods=4),
                "a": [1, 2, 3, 4],
                "y": [0, 1, 0, 1],
            }
        )
        with pytest.raises(UserError, match="frame: when looks like a date"):
            require_usable([from_frame(frame, "frame")])
