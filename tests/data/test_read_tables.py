"""Tables from .csv files and DataFrames: valid forms, and one message with all problems."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbudget.data.read_tables import from_frame, parse_csv, read_file
from fedbudget.data.tables import RawTable, TableOptions, TextColumn, require_usable
from fedbudget.errors import UserError, flag


def table(text: str, **options: object) -> RawTable:
    result = parse_csv(text.splitlines(keepends=True), "a.csv", TableOptions(**options))  # type: ignore[arg-type]
    require_usable([result])
    return result


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
            "a,b,y\n1e0,2.0,+3\n4.,5,6e0\n",  # other notations of numbers
            "a\tb\ty\n1\t2\t3\n4\t5\t6\n",  # tabs
            "a;b;y\n1,0;2;3,0\n4;5,0e0;6\n",  # semicolons, and decimal commas with them
        ],
    )
    def test_number_formats(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.csv").write_bytes(text.encode())
        result = read_file(tmp_path / "a.csv", TableOptions("y"))
        assert values(result) == [[1, 2], [4, 5]]
        assert isinstance(result.targets, np.ndarray)
        assert result.targets.tolist() == [3, 6]

    def test_target_column(self) -> None:
        text = "a,b,c\n1,2,3\n4,5,6\n"
        last, named = table(text), table(text, target="b")
        expected = (["a", "b"], "c", [3, 6])
        assert (
            list(last.columns),
            last.target,
            np.asarray(last.targets).tolist(),
        ) == expected
        assert (list(named.columns), named.target, np.asarray(named.targets).tolist()) == (
            ["a", "c"],
            "b",
            [2, 5],
        )

    def test_missing_value_markers(self) -> None:
        markers = [
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
        result = table(
            "a,y\n" + "".join(f"{marker},1\n" for marker in markers) + "7,1\n",
            impute="mean",
        )
        column = result.columns["a"]
        assert isinstance(column, np.ndarray)
        assert np.isnan(column).tolist() == [True] * len(markers) + [False]


class TestText:
    def test_quoted_text_classes(self) -> None:
        result = table('a,y\n1,"big, red"\n2,"the ""one"""\n3,café\n')
        assert isinstance(result.targets, TextColumn)
        expected = ["big, red", 'the "one"', "café"]
        assert [result.targets.names[code] for code in result.targets.codes] == expected

    def test_category_is_detected_and_reported(self) -> None:
        result = table("sex,y\n" + "m,1\nf,2\n" * 3)
        column = result.columns["sex"]
        assert isinstance(column, TextColumn)
        assert (column.names, column.codes.tolist()) == (("f", "m"), [1, 0] * 3)
        assert result.remarks == ("sex is treated as a category: f, m",)

    def test_numeric_category_is_normalized(self) -> None:
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
            (
                ",a,y\n0,2,3\n",
                "column 1 has no name in the header, like the index of a DataFrame: drop",
            ),
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
    def test_problems_name_the_row(self, text: str, message: str) -> None:
        """Rows are counted as in a text editor."""
        with pytest.raises(UserError, match=message):
            table(text)

    def test_one_message_lists_all_problems(self) -> None:
        """The last line suggests options that help."""
        rows = "".join(
            f"P-{n},2024-01-{n:02},{'' if n == 3 else n},{n % 2}\n" for n in range(1, 9)
        )
        with pytest.raises(UserError) as error:
            table("who,when,age,y\n" + rows)
        first, *problems, suggestion = error.value.spelled(flag).split("\n")
        assert first == "a.csv cannot be used as it is:"
        assert [problem.split()[1] for problem in problems] == ["who", "when", "age"]
        assert suggestion == "Try: --drop who,when --impute mean"
        assert list(
            table("who,when,age,y\n" + rows, drop=("who", "when"), impute="mean").columns
        ) == ["age"]

    def test_suggested_markers_solve_everything(self) -> None:
        """Options of all tables together; many different words leave only `drop`."""
        cells = [f"{n},<0.5,{n}?,,{n % 2}\n" for n in range(1, 5)]
        cells += [f"{n},{n},{n}{'?' if n < 7 else ''},{n},{n % 2}\n" for n in range(5, 15)]
        text = "age,crp,my dose,bmi,y\n" + "".join(cells)
        other = text.replace("<0.5", "too much")
        tables = [
            parse_csv(each.splitlines(keepends=True), name)
            for each, name in ((text, "a.csv"), (other, "b.csv"))
        ]
        with pytest.raises(UserError) as error:
            require_usable(tables)
        suggestion = error.value.spelled(flag).split("\n")[-1]
        assert suggestion == (
            "Try: --missing '<0.5,too much' --impute mean --drop 'my dose'"
        )
        options: Any = {
            "missing": ("<0.5", "too much"),
            "impute": "mean",
            "drop": ("my dose",),
        }
        assert [*table(text, **options).columns] == ["age", "crp", "bmi"]
        assert [*table(other, **options).columns] == ["age", "crp", "bmi"]

    def test_suggestion_admits_work_by_hand(self) -> None:
        with pytest.raises(
            UserError, match=r"(?m)^Correct the rest in the data, then try: "
        ) as e:
            table("who,y\nann,1\nbob,\ncid,2\n")
        assert "y, the target, has no value" in str(e.value)

    def test_shared_problem_is_reported_once(self) -> None:
        tables = [
            parse_csv(["a,y\n", "x,1\n", "y,1\n", "z,1\n"], name)
            for name in ("a.csv", "b.csv", "c.csv")
        ]
        message = r"^a\.csv: a has .* in row 2\): drop it \(the same in 2 more files\)$"
        with pytest.raises(UserError, match=message):
            require_usable(tables)

    def test_unknown_labels_name_their_rows(self) -> None:
        with pytest.raises(UserError) as error:
            table("a,y\n1,ill\n2,Ill\n3,well\n4,Ill\n5,2\n", classes=("ill", "well"))
        assert (
            "y, the target, is 'Ill' in 2 rows, such as row 3, not one of the classes "
            "ill, well" in str(error.value)
        )
        assert "y, the target, is '2' in 1 row (row 6)" in str(error.value)
        assert table("a,y\n1,1.0\n2,0\n", classes=("0", "1")).problems == ()

    def test_unknown_target_lists_columns(self) -> None:
        with pytest.raises(UserError, match=r"has no column 'price'; it has a, b, y"):
            table("a,b,y\n1,2,3\n", target="price")

    def test_likely_id_column_is_reported(self) -> None:
        rows = "".join(f"{1000 + n},{n % 2}\n" for n in range(12))
        assert table("patient_id,y\n" + rows).remarks == (
            "patient_id has a different number in every row: `drop` it if it is an ID",
        )
        assert table("age,y\n" + rows).remarks == ()


class TestFrames:
    def test_frame_matches_its_csv(self, tmp_path: Path) -> None:
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
            read_file(tmp_path / "a.csv", options),
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

    def test_frame_dates_are_rejected(self) -> None:
        frame = pd.DataFrame(
            {
                "when": pd.date_range("2024-01-01", periods=4),
                "a": [1, 2, 3, 4],
                "y": [0, 1, 0, 1],
            }
        )
        with pytest.raises(UserError, match="frame: when looks like a date"):
            require_usable([from_frame(frame, "frame")])
