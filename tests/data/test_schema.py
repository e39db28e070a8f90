"""Public schemas: the file, the encoding of a table by it, and the draft from a table."""

from pathlib import Path

import numpy as np
import pytest

from fedbudget.data.files import from_tables, load, public_scale, read_tables
from fedbudget.data.read_tables import parse_csv
from fedbudget.data.schema import draft_of, read_schema
from fedbudget.data.tables import OTHER, TableOptions, TableSchema
from fedbudget.errors import UserError

SCHEMA = """
drop = ["id"]
[target]
name = "y"
classes = [1, 2]
[columns]
age = { range = [0, 100] }
ward = { categories = ["north", 7] }
crp = { range = [-1, 3], missing = 0 }
"""
ROWS = """id,crp,ward,age,y
a,NA,7.0,150,1
b,9,south,-5,2
c,-4,,50,2
d,1,north,,1
"""


def schema_of(folder: Path, text: str = SCHEMA) -> TableSchema:
    path = folder / "schema.toml"
    path.write_text(text)
    return read_schema(path)


def written(folder: Path, text: str = ROWS) -> Path:
    path = folder / "rows.csv"
    path.write_text(text)
    return path


def test_values_outside_are_clipped(tmp_path: Path) -> None:
    """Clipped numbers, the column for other categories, and fills, worked out by hand."""
    options = schema_of(tmp_path).options
    dataset = load(written(tmp_path), options, test_share=0, standardise=False)
    assert dataset.layout is not None
    assert dataset.layout.feature_names == (
        "age",
        "ward=north",
        "ward=7",
        f"ward={OTHER}",
        "crp",
    )
    assert dataset.train.x.tolist() == [
        [100, 0, 1, 0, 0],
        [0, 0, 0, 1, 3],
        [50, 0, 0, 1, -1],
        [50, 1, 0, 0, 1],
    ]
    assert dataset.classes == ("1", "2")
    assert dataset.train.labels is not None
    assert dataset.train.labels.tolist() == [0, 1, 1, 0]
    assert set(dataset.remarks) == {
        "age: 2 values clipped to 0 ... 100",
        "ward: 1 row with other categories",
        "crp: 2 values clipped to -1 ... 3",
    }


def test_scale_follows_from_ranges(tmp_path: Path) -> None:
    """[low, high] becomes [-1, 1]; categories stay 0 and 1."""
    dataset = load(written(tmp_path), schema_of(tmp_path).options, test_share=0)
    assert dataset.train.x.tolist() == [
        [1, 0, 1, 0, -0.5],
        [-1, 0, 0, 1, 1],
        [0, 0, 0, 1, -1],
        [0, 1, 0, 0, 0],
    ]
    assert dataset.standardization is not None
    assert dataset.standardization.mean.tolist() == [50, 0, 0, 0, 1]
    assert dataset.standardization.deviation.tolist() == [50, 1, 1, 1, 2]


def test_real_target_is_clipped(tmp_path: Path) -> None:
    text = '[target]\nname = "y"\nrange = [0, 10]\n[columns]\nx = { range = [0, 1] }\n'
    options = schema_of(tmp_path, text).options
    table = parse_csv(["x,y\n", "0,-3\n", "1,4\n", "1,40\n"], "t.csv", options)
    dataset = from_tables("t", [table], options).standardised(public_scale(options))
    assert dataset.train.values is not None
    assert dataset.train.values.tolist() == [0, 4, 10]
    assert not dataset.classes
    assert dataset.table(dataset.train, "real").y.tolist() == pytest.approx([-1, -0.2, 1])


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ("id,crp,age,y", "has no column ward"),
        ("id,crp,ward,age,bmi,y", "not in the `schema`: bmi; add them to its key drop"),
        ("id,crp,ward,age,z", "has no column 'y'"),
    ],
)
def test_columns_must_match(header: str, error: str, tmp_path: Path) -> None:
    row = ",".join("1" for _ in header.split(","))
    path = written(tmp_path, f"{header}\n{row}\n{row}\n")
    with pytest.raises(UserError) as refused:
        load(path, schema_of(tmp_path).options)
    assert error in refused.value.args[0]


def test_class_outside_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS + "e,1,north,1,3\n")
    with pytest.raises(UserError, match="the target, is '3' in 1 row"):
        load(path, schema_of(tmp_path).options)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[columns]\nx = { range = [0, 1] }", "[target] is missing"),
        (SCHEMA.replace("classes = [1, 2]", ""), "either classes or a range"),
        (SCHEMA.replace("[1, 2]", "[1]"), "at least two classes"),
        (SCHEMA.replace("[1, 2]", "[1, 1.0]"), "a duplicate"),
        (SCHEMA.replace("[0, 100]", "[100, 0]"), "column age: range: 100 is above 0"),
        (SCHEMA.replace("[0, 100]", "[0, inf]"), "inf is not finite"),
        (SCHEMA.replace("[0, 100]", "[0]"), "must be [lowest, highest]"),
        (SCHEMA.replace("missing = 0", "missing = 4"), "missing = 4 is outside its range"),
        (SCHEMA.replace("missing", "mising"), "unknown key mising"),
        (SCHEMA.replace('"north"', '"(other)"'), "categories other than (other)"),
        (SCHEMA.replace('"id"', '"age"'), "age has two roles"),
        (SCHEMA.replace('"north", 7', '"a\\u0007"'), "control characters"),
        ("x = ", "not valid TOML"),
    ],
)
def test_invalid_schemas_are_refused(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        schema_of(tmp_path, text)
    assert error in refused.value.args[0]


def test_draft_fits_its_table(tmp_path: Path) -> None:
    """A draft reads its own table without clipping, and contains no exact extreme."""
    rng = np.random.default_rng(0)
    lines = ["name,temp °C,ward,price"]
    for number in range(40):
        ward = rng.choice(["a b", 'say "x"', "c"])
        quoted = ward.replace('"', '""')
        row = (f"n{number}", f"{rng.normal(37, 1):.5f}", f'"{quoted}"', f"{number + 0.5}")
        lines.append(",".join(row))
    path = written(tmp_path, "\n".join(lines) + "\n")
    options = TableOptions("price", ("name",), impute="mean")
    text = draft_of(path, options)
    schema = schema_of(tmp_path, text)
    assert text.startswith("# Schema drafted from rows.csv.")
    table = read_tables([path], schema.options, path)[0]
    assert schema.fitted(table).remarks == table.remarks
    assert schema.target_range == (0.0, 40.0)
    temperatures = table.columns["temp °C"]
    assert isinstance(temperatures, np.ndarray)
    low, high = schema.layout.columns[0].range or (0.0, 0.0)
    assert low < temperatures.min() < temperatures.max() < high
    assert f"{temperatures.min():.5f}" not in text
    assert schema.layout.columns[1].categories == ("a b", "c", 'say "x"', OTHER)


def test_schema_is_for_tables(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.zeros(4))
    with pytest.raises(UserError, match="schema is for tables"):
        load(tmp_path / "a.npz", schema_of(tmp_path).options)
