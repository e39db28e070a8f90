"""`fedbudget predict` and `export`: from a file to a file."""

import csv
from pathlib import Path

import numpy as np
import pytest

import fedbudget
from fedbudget.errors import UserError
from fedbudget.experiments.evaluate import predict
from support.commands import run_command


@pytest.fixture(scope="module")
def wards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with an ID, a category and missing cells."""
    folder = tmp_path_factory.mktemp("wards")
    rng = np.random.default_rng(0)
    rows = [("id", "age", "sex", "outcome")]
    for number in range(80):
        age, sex = rng.normal(60, 10), rng.choice(["f", "m"])
        outcome = "ill" if age + 5 * (sex == "m") > 62 else "well"
        rows.append(
            (f"p{number}", "" if number % 9 == 0 else f"{age:.1f}", str(sex), outcome)
        )
    with (folder / "ward.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    how = {"drop": ("id",), "impute": "mean", "nodes": 2, "rounds": 20, "budget": "time=1h"}
    fedbudget.train(dataset=str(folder / "ward.csv"), out=folder / "run", **how)  # type: ignore[arg-type]
    return folder


def test_a_table_in_another_order_has_its_predictions_beside_its_id(
    wards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("sex,id,age\nm,p9,\nf,p3,30\n\nx,p4,90\n")
    out = tmp_path / "predictions.csv"
    code, said, remarks = run_command(
        capsys,
        "predict",
        str(wards / "run"),
        "--data",
        str(tmp_path / "new.csv"),
        "--out",
        str(out),
    )
    assert (code, said) == (0, f"{out}\n")
    assert "sex: 'x' was in no training sample" in remarks
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == ["id", "prediction", "probability_ill", "probability_well"]
    assert [(row["id"], row["prediction"]) for row in rows[1:]] == [
        ("p3", "well"),
        ("p4", "ill"),
    ]
    model = fedbudget.load(wards / "run")
    found = model.predict_proba({"age": [float("nan"), 30.0, 90.0], "sex": ["m", "f", "x"]})
    assert [float(row["probability_ill"]) for row in rows] == pytest.approx(
        found[:, 0], rel=1e-6
    )


def test_the_target_may_be_there(wards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(wards / "run")
    _, said, _ = run_command(capsys, "predict", run, "--data", str(wards / "ward.csv"))
    rows = list(csv.DictReader(said.splitlines()))
    right = np.mean([row["prediction"] == row["outcome"] for row in rows])
    _, judged, _ = run_command(
        capsys, "evaluate", run, "--dataset", str(wards / "ward.csv")
    )
    assert f"accuracy {right:.4f}" in judged


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("sex,id\nm,p9\n", "new.csv has no column age"),
        ("age,sex,weight\n50,m,70\n", "new.csv has the unknown column weight (--drop)"),
        ("age,sex\nold,m\n", "age"),
    ],
)
def test_columns_that_are_not_those_of_training_are_refused_by_name(
    wards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, wrong: str
) -> None:
    (tmp_path / "new.csv").write_text(text)
    code, _, said = run_command(
        capsys, "predict", str(wards / "run"), "--data", str(tmp_path / "new.csv")
    )
    assert code == 2
    assert wrong in said


def test_what_is_dropped_besides(
    wards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("age,sex,weight\n90,m,70\n")
    arguments = (
        "predict",
        str(wards / "run"),
        "--data",
        str(tmp_path / "new.csv"),
        "--drop",
        "weight",
    )
    _, said, _ = run_command(capsys, *arguments)
    assert said.splitlines()[1].startswith("70,ill,")


def test_arrays_of_a_file(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(0, 1, (40, 2))
    np.savez(tmp_path / "all.npz", x=x, y=x @ [1.0, -2.0])
    (tmp_path / "data.py").write_text(
        f"import numpy as np\ndef samples():\n    found = np.load({str(tmp_path / 'all.npz')!r})\n"
        "    return found['x'], found['y']\n"
    )
    model = fedbudget.train(
        dataset=str(tmp_path / "all.npz"), nodes=2, rounds=9, budget="time=1h"
    ).model
    found = predict(model, tmp_path / "all.npz")
    assert len(found) == 40
    assert [float(text) for text in found.columns["prediction"]] == pytest.approx(
        model.predict(x), rel=1e-6
    )
    assert predict(model, Path(f"{tmp_path}/data.py:samples")) == found
    with pytest.raises(UserError, match="it does not exist"):
        predict(model, tmp_path / "none.npz")
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="the model was trained on arrays"):
        predict(model, tmp_path / "new.csv")


def test_an_exported_file_is_in_the_run_s_folder(
    wards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, _ = run_command(capsys, "export", str(wards / "run"), "--to", "numpy")
    assert (code, said) == (0, f"{wards / 'run' / 'model.npz'}\n")
    with np.load(wards / "run" / "model.npz") as found:
        assert found["feature_names"].tolist() == ["age", "sex=f", "sex=m"]
