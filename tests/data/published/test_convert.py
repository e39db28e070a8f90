"""Other forms of a dataset become the published one, byte for byte."""

import csv
import hashlib
import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import xlwt

from fedbudget.data.download import (
    Unavailable,
    archive,
    knowledge_csv,
    knowledge_table,
)
from fedbudget.data.published import PUBLISHED, dataset_named, files_in, get
from fedbudget.errors import UserError
from support.real_data import folder_with
from support.web import dataset_of, serving

SPREADSHEET = "Data_User_Modeling_Dataset_Hamdi Tolga KAHRAMAN.xls"
HEADER = ["STG", "SCG", "STR", "LPR", "PEG", " UNS"]


class TestKnowledgeSheets:
    def test_sheets_become_one_table_without_remarks_and_with_one_word_for_very_low(
        self,
    ) -> None:
        train: list[list[object]] = [
            [*HEADER, "", "Remarks"],
            [0.0, 0.08, 1.0, 0.325, 0.9, "very_low", "", "of the authors"],
        ]
        blank: list[object] = ["", "", "", "", "", "", "", "more"]
        test: list[list[object]] = [
            ["remark", *HEADER],
            ["", 0.1, 0.2, 0.3, 0.4, 0.5, "Very Low"],
            ["", 1.0, 1.0, 1.0, 1.0, 1.0, " High "],
        ]
        assert knowledge_csv([[*train, blank], test]).splitlines() == [
            "STG,SCG,STR,LPR,PEG,UNS",
            "0,0.08,1,0.325,0.9,very_low",
            "0.1,0.2,0.3,0.4,0.5,very_low",
            "1,1,1,1,1,High",
        ]

    def test_sheets_of_another_form_are_refused(self) -> None:
        with pytest.raises(Unavailable, match="a sheet has no column PEG"):
            knowledge_csv([[["STG", "SCG", "STR", "LPR", "UNS"]]])
        with pytest.raises(Unavailable, match="instead of five numbers and a level"):
            knowledge_csv([[HEADER, [0.1, "", 0.2, 0.3, 0.4, "Low"]]])
        with pytest.raises(Unavailable, match="a sheet has no column LPR"):
            knowledge_csv([[]])

    def test_a_spreadsheet_from_a_server_becomes_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = b"STG,SCG,STR,LPR,PEG,UNS\n0.1,0.2,0.3,0.4,0.5,very_low\n0,0,1,0.25,0.5,Middle\n"
        monkeypatch.setitem(
            PUBLISHED, "small", dataset_of({"user_knowledge.csv": expected})
        )
        sheets = spreadsheet(
            [[0.1, 0.2, 0.3, 0.4, 0.5, "Very Low"]], [[0.0, 0.0, 1.0, 0.25, 0.5, "Middle"]]
        )
        found = got("small", sheets, tmp_path)
        assert found["user_knowledge.csv"].read_bytes() == expected

    def test_the_real_table_put_back_into_a_spreadsheet_becomes_the_published_file(
        self, tmp_path: Path
    ) -> None:
        path = files_in(dataset_named("user-knowledge"), folder_with("user-knowledge"))[
            "user_knowledge.csv"
        ]
        with path.open(newline="") as file:
            rows = [[*map(float, row[:5]), row[5]] for row in list(csv.reader(file))[1:]]
        tested = [
            [*row[:5], "Very Low" if row[5] == "very_low" else row[5]] for row in rows[258:]
        ]
        found = got("user-knowledge", spreadsheet(rows[:258], tested), tmp_path)
        checksum = hashlib.sha256(found["user_knowledge.csv"].read_bytes()).hexdigest()
        assert (
            checksum == "86f11893ad1be525c0c2fd8dda9983bd6bf52c42416bcacdd7a77016b43dec4c"
        )

    @pytest.mark.parametrize(
        "contents",
        [b"", b"not a spreadsheet", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)],
    )
    def test_a_damaged_spreadsheet_is_a_reason(
        self, contents: bytes, tmp_path: Path
    ) -> None:
        with pytest.raises(
            UserError, match=r"127.0.0.1:.*: the spreadsheet cannot be read: "
        ):
            got("user-knowledge", contents, tmp_path)

    def test_without_the_extra_the_reason_names_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "xlrd", None)
        with pytest.raises(UserError, match=r"needs pip install 'fedbudget\[xls\]'"):
            got("user-knowledge", spreadsheet([], []), tmp_path)


def spreadsheet(
    train: Sequence[Sequence[object]], test: Sequence[Sequence[object]]
) -> bytes:
    book = xlwt.Workbook()
    for name, rows in (("Information", []), ("Training_Data", train), ("Test_Data", test)):
        sheet = book.add_sheet(name)
        for number, row in enumerate([HEADER, *rows]):
            for column, cell in enumerate(row):
                sheet.write(number, column, cell)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def got(name: str, sheets: bytes, folder: Path) -> dict[str, Path]:
    """What comes of a spreadsheet that a server has in a zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(SPREADSHEET, sheets)
    with serving({"all.zip": buffer.getvalue()}) as web:
        url = f"{web.url}all.zip"
        source = archive(url, SPREADSHEET, 1_000_000, knowledge_table)
        return get(name, folder, sources=[source])
