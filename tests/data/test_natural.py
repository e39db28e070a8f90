"""Natural federations: made-up files in the published formats, and the real ones."""

import io
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget import data
from fedbudget.arrays import Float64
from fedbudget.data import natural
from fedbudget.data.download import archive, mirror, plain_text
from fedbudget.data.published import PUBLISHED, get
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError
from support.real_data import folder_with
from support.web import dataset_of, serving

CONTENTS = {"a.csv": b"No,wd\n1,NW\n", "b.csv": b"No,wd\n2,N\n"}
EXPECTED = {
    "tcga-brca": (6, 39, ("Canada", "Europe", "Midwest")),
    "beijing-air": (12, 11, ("Aotizhongxin", "Changping", "Dingling")),
    "parkinsons": (42, 18, ("1", "2", "3")),
    "cmapss": (100, 25, ("1", "2", "3")),
    "shakespeare": (99, 520, ("ANGELO", "ANTIGONUS", "ARIEL")),
    "omniglot": (20, 1225, ("1", "2", "3")),
}
"""Nodes, features and the first nodes."""


def put(folder: Path, dataset: str, name: str, text: str | bytes) -> Path:
    """Write a file of a dataset and return the data folder."""
    (folder / dataset).mkdir(parents=True, exist_ok=True)
    contents = text.encode() if isinstance(text, str) else text
    (folder / dataset / name).write_bytes(contents)
    return folder


def png(ink: Float64, depth: int = 1) -> bytes:
    """A black and white image, black where there is ink [105, 105]."""
    rows = np.packbits(ink == 0, axis=1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 105, 105, depth, 0, 0, 0, 0),
        b"IDAT": zlib.compress(body),
        b"IEND": b"",
    }
    parts = [
        struct.pack(">I", len(chunk)) + kind + chunk + struct.pack(">I", 0)
        for kind, chunk in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, contents in members.items():
            file.writestr(name, contents)
    return buffer.getvalue()


class TestHeartDisease:
    def test_published_counts(self) -> None:
        """Patients and patients with disease of each hospital, as published."""
        columns = natural.heart_disease(None)
        hospital = np.array(columns["hospital"])
        ill = np.array(columns["disease"]) == "yes"
        counts = {
            name: (int((hospital == name).sum()), int((ill & (hospital == name)).sum()))
            for name in ("cleveland", "hungarian", "switzerland", "va")
        }
        assert counts == {
            "cleveland": (303, 139),
            "hungarian": (294, 106),
            "switzerland": (123, 115),
            "va": (200, 149),
        }
        first = {name: values[0] for name, values in columns.items()}
        assert (first["age"], first["chol"], first["disease"]) == ("63", "233", "no")

    def test_zero_is_a_missing_value(self) -> None:
        """All cholesterols of Switzerland, 49 of va and one blood pressure are 0."""
        columns = natural.heart_disease(None)
        hospital = np.array(columns["hospital"])
        missing = np.array(columns["chol"]) == ""
        expected = {"cleveland": 0, "hungarian": 23, "switzerland": 123, "va": 56}
        found = {name: int(missing[hospital == name].sum()) for name in expected}
        assert found == expected
        assert "0" not in columns["trestbps"]

    def test_hospitals_are_nodes(self) -> None:
        dataset = data.load("heart-disease")
        assert dataset.sites == ("cleveland", "hungarian", "switzerland", "va")
        assert dataset.files == (243, 236, 99, 160)
        assert dataset.test is not None
        assert len(dataset.test) == 60 + 58 + 24 + 40
        assert dataset.classes == ("no", "yes")
        assert np.isfinite(dataset.train.x).all()

    def test_licence_is_in_the_package(self) -> None:
        text = (Path(natural.__file__).parent / "heart-disease-licence.txt").read_text()
        assert "CC BY 4.0" in text
        assert "Changes:" in text

    def test_exported_tables_are_equal(self, tmp_path: Path) -> None:
        """A folder with the tables gives the dataset of that name."""
        paths = natural.write_tables("heart-disease", None, tmp_path / "hospitals")
        assert [path.stem for path in paths] == [
            "cleveland",
            "hungarian",
            "switzerland",
            "va",
        ]
        federation = natural.FEDERATIONS["heart-disease"]
        options = replace(federation.options, site=None)
        folder = data.load(str(tmp_path / "hospitals"), options)
        named = data.load("heart-disease")
        assert folder.train.x.tobytes() == named.train.x.tobytes()
        assert (folder.sites, folder.files) == (named.sites, named.files)
        with pytest.raises(UserError, match="hospitals exists already"):
            natural.write_tables("heart-disease", None, tmp_path / "hospitals")


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"site": "sex"},
                "partition by:sex does not fit heart-disease: it has by:hosp",
            ),
            ({"drop": ("age",)}, "drop is for your own tables; heart-disease is used unch"),
        ],
    )
    def test_other_columns_are_refused(self, options: object, message: str) -> None:
        with pytest.raises(UserError, match=message):
            data.load("heart-disease", TableOptions(**options))  # type: ignore[arg-type]

    def test_own_site_column_is_accepted(self) -> None:
        options = TableOptions(site="hospital")
        named = data.load("heart-disease", options, test_share=0.0)
        assert (len(named.train), named.test) == (920, None)

    def test_arrays_have_no_tables(self, tmp_path: Path) -> None:
        message = "omniglot has no tables by site; use heart-disease, tcga-brca, "
        with pytest.raises(UserError, match=message):
            natural.write_tables("omniglot", None, tmp_path / "new")


def test_survival_after_five_years(tmp_path: Path) -> None:
    """Death after five years is survival; a shorter observation has no known class."""
    put(tmp_path, "tcga-brca", "centers.csv", "TSS Code,Region\nA1,South\nB2,Other\n")
    rows = (
        "A1-1,50,1,100",
        "A1-2,60,1,2000",
        "A1-3,70,0,100",
        "A1-4,80,0,1900",
        "B2-5,1,1,1",
    )
    text = "pid,age,E,T\n" + "".join(f"TCGA-{row}\n" for row in rows)
    put(tmp_path, "tcga-brca", "brca.csv", text)
    columns = natural.FEDERATIONS["tcga-brca"].read(tmp_path)
    assert {name: list(values) for name, values in columns.items()} == {
        "region": ["South"] * 3,
        "age": [50.0, 60.0, 80.0],
        "death": ["yes", "no", "no"],
    }


def test_air_columns_are_directions(tmp_path: Path) -> None:
    header = "No,hour,month,PM2.5,SO2,TEMP,PRES,DEWP,RAIN,wd,WSPM,station\n"
    rows = "1,6,12,0,9,-1,1000,-5,0,E,2,North\n2,7,12,NA,9,-1,1000,-5,0,N,2,North\n"
    for name in PUBLISHED["beijing-air"].files:
        put(tmp_path, "beijing-air", name.name, header + rows)
    columns = natural.FEDERATIONS["beijing-air"].read(tmp_path)
    first = {name: values[0] for name, values in columns.items()}
    assert len(columns["station"]) == 12
    assert "SO2" not in columns
    assert (first["station"], first["log_PM2.5"], first["TEMP"]) == ("North", 0.0, -1.0)
    assert [first["hour_sin"], first["wind_sin"]] == pytest.approx([1.0, 1.0])
    assert first["month_cos"] == pytest.approx(1.0)


def test_scores_do_not_reveal_target(tmp_path: Path) -> None:
    header = "subject#,age,test_time,motor_UPDRS,total_UPDRS,PPE\n"
    text = header + "2,70,5.6,28.1,34.3,0.1\n"
    put(tmp_path, "parkinsons", "parkinsons_updrs.data", text)
    columns = natural.FEDERATIONS["parkinsons"].read(tmp_path)
    assert list(columns) == ["patient", "age", "PPE", "motor_UPDRS"]


class TestEngines:
    def engines(self, folder: Path, lines: list[str]) -> natural.TableColumns:
        put(folder, "cmapss", "train_FD001.txt", "\n".join(lines) + "\n")
        return natural.FEDERATIONS["cmapss"].read(folder)

    def test_remaining_cycles(self, tmp_path: Path) -> None:
        """Counted to the last cycle of the engine, at most 125."""
        rest = " ".join(["1.5"] * 24)
        cycles = [(1, 1), (1, 2), (1, 200), (2, 1), (2, 3)]
        columns = self.engines(tmp_path, [f"{one} {two} {rest}  " for one, two in cycles])
        assert list(columns["remaining"]) == [125, 125, 0, 2, 0]
        assert len(columns) == 1 + 1 + 3 + 21 + 1

    def test_incomplete_row_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="must have 26 numbers in every row"):
            self.engines(tmp_path, ["1 1 0.5"])


def test_roles_with_enough_text(tmp_path: Path) -> None:
    """A sample has one 1 for each of the eight characters before the next one."""
    speech = "abcdefghij" * 200
    text = f"HAMLET:\n{speech}\n\nGHOST:\nshort\n\nHAMLET:\n{speech}\n"
    folder = put(tmp_path, "shakespeare", "input.txt", text)
    dataset = natural.shakespeare(folder, 0.0)
    assert dataset.sites == ("HAMLET",)
    assert dataset.files == (2000,)
    symbols = len(dataset.classes)
    assert dataset.train.x.shape == (2000, 8 * symbols)
    assert dataset.train.labels is not None
    first = dataset.train.x[0].reshape(8, symbols)
    spelled = [dataset.classes[number] for number in first.argmax(axis=1)]
    assert "".join(spelled) == "abcdefgh"
    assert first.sum() == 8
    assert dataset.classes[dataset.train.labels[0]] == "i"


class TestOmniglot:
    def archive(self, folder: Path, images: dict[str, bytes]) -> Path:
        members = {f"small/{name}": contents for name, contents in images.items()}
        name = "images_background_small1.zip"
        return put(folder, "omniglot", name, zipped(members))

    def test_drawers_and_ink(self, tmp_path: Path) -> None:
        ink = np.zeros((105, 105))
        ink[:3, :2] = 1  # six of the nine pixels of the first block
        images = {
            f"{alphabet}/character0{one}/0001_0{drawer}.png": png(ink)
            for alphabet in ("Greek", "Latin")
            for one in (1, 2)
            for drawer in (1, 2, 3)
        }
        dataset = natural.omniglot(self.archive(tmp_path, images), 0.25)
        assert (dataset.sites, dataset.files) == (("1", "2", "3"), (3, 3, 3))
        assert dataset.shape == (1, 35, 35)
        assert dataset.classes[0] == "Greek/character01"
        assert dataset.train.x[0, :2].tolist() == [170, 0]
        assert dataset.train.x.sum() == 170 * 9
        assert dataset.test is not None
        assert dataset.test.labels is not None
        assert len(set(dataset.test.labels.tolist())) == 3, "each tests another character"

    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            (png(np.zeros((105, 105)), depth=8), "is not a black and white PNG of 105x105"),
            (b"no image", "cannot be read as a PNG"),
        ],
    )
    def test_other_images_are_refused(
        self, tmp_path: Path, contents: bytes, message: str
    ) -> None:
        folder = self.archive(tmp_path, {"Greek/character01/0001_01.png": contents})
        with pytest.raises(UserError, match=message):
            natural.omniglot(folder, 0.2)

    def test_damaged_archive_is_refused(self, tmp_path: Path) -> None:
        folder = put(tmp_path, "omniglot", "images_background_small1.zip", b"PK no archive")
        with pytest.raises(UserError, match="is damaged"):
            natural.omniglot(folder, 0.2)


class TestDownloads:
    """From a server on this machine, with the forms of the publishers' files."""

    def test_archive_in_an_archive(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files with quotes and carriage returns become the published form."""
        quoted = {
            "in/a.csv": b'"No","wd"\r\n1,"NW"\r\n',
            "in/b.csv": b'"No","wd"\r\n2,"N"\r\n',
        }
        monkeypatch.setitem(PUBLISHED, "small", dataset_of(CONTENTS))
        outer = zipped({"other.txt": b"", "inner.zip": zipped(quoted)})
        with serving({"all.zip": outer}) as web:
            source = archive(
                f"{web.url}all.zip",
                "in/{name}",
                limit=100_000,
                convert=plain_text,
                inner="inner.zip",
            )
            paths = get("small", tmp_path, sources=[source])
        found = {name: path.read_bytes() for name, path in paths.items()}
        assert found == CONTENTS

    def test_missing_inner_archive(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next source is used."""
        monkeypatch.setitem(PUBLISHED, "small", dataset_of(CONTENTS))
        with serving({"all.zip": zipped({"x": b""}), **CONTENTS}) as web:
            one = archive(f"{web.url}all.zip", "{name}", limit=10_000, inner="inner.zip")
            with pytest.raises(UserError, match=r"127\.0\.0\.1:\d+: has no inner\.zip"):
                get("small", tmp_path, sources=[one])
            assert len(get("small", tmp_path, sources=[one, mirror(web.url)])) == 2


@pytest.mark.parametrize("name", [name for name in natural.SITES if name in PUBLISHED])
class TestRealFiles:
    def test_sites_and_features(self, name: str) -> None:
        dataset = data.load(name, data_dir=folder_with(name))
        nodes, features, first = EXPECTED[name]
        assert len(dataset.files) == len(dataset.sites) == nodes
        assert dataset.sites[:3] == first
        assert dataset.features == features
        assert dataset.test is not None
        assert len(dataset.train) + len(dataset.test) == PUBLISHED[name].samples
        assert np.isfinite(dataset.train.x).all()
        assert sum(dataset.files) == len(dataset.train)
