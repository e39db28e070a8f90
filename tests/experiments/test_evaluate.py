"""Evaluation and prediction with trained models, compared with numpy."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.special import logsumexp
from sklearn.datasets import load_digits
from torch import nn

import fedbudget
from fedbudget.data.tables import TableOptions
from fedbudget.errors import UserError
from fedbudget.experiments.evaluate import evaluate, predict
from fedbudget.runs.folder import Run
from support.commands import run_command

ROWS = 60


def train(folder: Path, **options: Any) -> Run:
    fedbudget.train(budget="time=2s", nodes=3, out=folder / "run", **options)
    return Run.open(folder / "run")


def write_homes(path: Path, seed: int, shift: float = 0.0) -> NDArray[np.float64]:
    """Write a CSV with two features and a price, and return its rows."""
    rng = np.random.default_rng(seed)
    size = rng.normal(100 + shift, 30, ROWS)
    age = rng.uniform(0, 50 + shift, ROWS)
    price = 3000 * size - 800 * age + rng.normal(0, 9000, ROWS)
    rows = np.column_stack([size, price, age])
    path.write_text(
        "size,price,age\n" + "".join(f"{a!r},{b!r},{c!r}\n" for a, b, c in rows.tolist())
    )
    return rows


def test_classifier_on_digits(
    tmp_path: Path,
) -> None:
    run = train(tmp_path, model="svm")
    w = load_file(run.path / "model.safetensors")["weight"].astype(np.float64)
    digits = load_digits()
    x, y = digits.data[1437:] / 16, np.where(digits.target[1437:] % 2 == 0, 1, -1)
    slack = np.maximum(0, 1 - y * (x @ w))
    result = evaluate(run, "digits")
    assert result.samples == 360
    assert result.loss == pytest.approx(0.05 * w @ w + 0.5 * np.mean(slack**2), rel=1e-5)
    assert result.accuracy == pytest.approx(np.mean(np.sign(x @ w) == y))


def test_new_rows_use_training_standardisation(
    tmp_path: Path,
) -> None:
    rows = write_homes(tmp_path / "homes.csv", seed=1)
    new = write_homes(tmp_path / "new.csv", seed=2, shift=40.0)
    run = train(
        tmp_path,
        model="linear",
        dataset=str(tmp_path / "homes.csv"),
        target="price",
        test_share=0.0,
        step_size=0.1,
    )
    w = load_file(run.path / "model.safetensors")["weight"].astype(np.float64)
    mean, deviation = rows.mean(axis=0), rows.std(axis=0)
    standard = (new - mean) / deviation
    errors = standard[:, [0, 2]] @ w - standard[:, 1]
    result = evaluate(run, str(tmp_path / "new.csv"))
    assert result.samples == ROWS
    assert result.loss == pytest.approx(0.5 * np.mean(errors**2), rel=1e-4)
    assert result.accuracy is None
    assert evaluate(run, str(tmp_path / "new.csv"), TableOptions("price")) == result
    lines = [line.split(",") for line in (tmp_path / "new.csv").read_text().splitlines()]
    other = [[*reversed(line), "x"] for line in lines]
    (tmp_path / "other.csv").write_text("\n".join(map(",".join, other)) + "\n")
    assert (
        evaluate(run, str(tmp_path / "other.csv"), TableOptions("price", drop=("x",)))
        == result
    )


def test_fewer_classes_keep_class_numbers(
    tmp_path: Path,
) -> None:
    """The only class of the new file alone would have number 0."""
    samples = np.random.default_rng(0).normal(0, 1, (ROWS, 2))
    kinds = np.where(samples[:, 0] > 0, "warm", "cold")
    text = [
        f"{a},{b},{kind}\n" for (a, b), kind in zip(samples.tolist(), kinds, strict=True)
    ]
    (tmp_path / "train.csv").write_text("a,b,kind\n" + "".join(text))
    (tmp_path / "warm.csv").write_text(
        "a,b,kind\n" + "".join(line for line in text[::-1] if "warm" in line)
    )
    run = train(
        tmp_path,
        model="svm",
        dataset=str(tmp_path / "train.csv"),
        test_share=0.0,
        step_size=0.1,
    )
    w = load_file(run.path / "model.safetensors")["weight"].astype(np.float64)
    standard = (samples - samples.mean(axis=0)) / samples.std(axis=0)
    warm = kinds == "warm"
    result = evaluate(run, str(tmp_path / "warm.csv"))
    assert result.samples == warm.sum()
    assert result.accuracy == pytest.approx(np.mean(standard[warm] @ w >= 0))
    assert np.mean(standard[warm] @ w >= 0) > 0.8


def test_data_must_fit_the_model(tmp_path: Path) -> None:
    write_homes(tmp_path / "homes.csv", seed=1)
    run = train(
        tmp_path, model="linear", dataset=str(tmp_path / "homes.csv"), target="price"
    )
    (tmp_path / "wide.csv").write_text("a,b,c,price\n1,2,3,4.5\n")
    with pytest.raises(
        UserError,
        match=r"wide\.csv has no column size, age and has the unknown columns a, b, c",
    ):
        evaluate(run, str(tmp_path / "wide.csv"))
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 3)), y=np.arange(3) / 2)
    with pytest.raises(UserError, match="has 3 features, the model was trained on 2"):
        evaluate(run, str(tmp_path / "wide.npz"))
    with pytest.raises(UserError, match="unknown dataset 'imagenet'"):
        evaluate(run, "imagenet")
    with pytest.raises(UserError, match=r"none\.csv does not exist"):
        evaluate(run, str(tmp_path / "none.csv"))
    with pytest.raises(
        UserError, match=r"digits does not fit the model of .*: it would need 64 parameters"
    ):
        evaluate(run, "digits")


def test_unknown_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,kind\n" + "1,cold\n2,warm\n" * 10)
    (tmp_path / "new.csv").write_text("a,kind\n1,hot\n")
    run = train(tmp_path, dataset=str(tmp_path / "train.csv"))
    with pytest.raises(UserError, match="class 'hot' is not one of cold, warm"):
        evaluate(run, str(tmp_path / "new.csv"))


def test_python_file_keeps_class_numbers(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).normal(0, 1, (ROWS, 2)).astype(np.float32)
    y = np.where(x[:, 0] > 0, 7, 3)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    np.savez(tmp_path / "some.npz", x=x[y == 7], y=y[y == 7])
    (tmp_path / "some_rows.py").write_text(
        f"import numpy as np\nfile = np.load({str(tmp_path / 'some.npz')!r})\n"
        "def samples():\n    return file['x'], file['y']\n"
        "other = file['x'], file['y'] + 1\n"
    )
    run = train(
        tmp_path,
        model="softmax",
        dataset=str(tmp_path / "all.npz"),
        test_share=0.0,
        step_size=0.5,
    )
    result = evaluate(run, f"{tmp_path}/some_rows.py:samples")
    assert result == evaluate(run, str(tmp_path / "some.npz"))
    assert result.accuracy is not None
    assert result.accuracy > 0.8
    with pytest.raises(
        UserError, match=r"some_rows\.py:other: class '8' is not one of 3, 7"
    ):
        evaluate(run, f"{tmp_path}/some_rows.py:other")


@pytest.fixture(scope="module")
def module_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a module passed from Python, and a file with equal modules."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "nets.py").write_text(
        "from torch import nn\n"
        "def flat(*sizes): return nn.Sequential(nn.Flatten(), nn.Linear(*sizes))\n"
        "def net(): return flat(64, 10)\n"
        "def wide(): return flat(64, 12)\n"
    )
    train(folder, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    return folder


def test_module_is_passed_again(
    module_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(module_run)
    code, written, _ = run_command(
        capsys, "evaluate", "run", "--dataset", "digits", "--model", "nets.py:net", "--json"
    )
    result = json.loads(written)
    tensors = load_file("run/model.safetensors")
    digits = load_digits()
    scores = (
        digits.data[1437:] / 16 @ tensors["1.weight"].T.astype(np.float64)
        + tensors["1.bias"]
    )
    y = digits.target[1437:]
    assert (code, result["samples"]) == (0, 360)
    assert result["loss"] == pytest.approx(
        np.mean(logsumexp(scores, axis=1) - scores[np.arange(360), y]), rel=1e-5
    )
    assert result["accuracy"] == pytest.approx(np.mean(scores.argmax(axis=1) == y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("digits",),
            "has a custom model, sequential. Files do not choose code that runs here: "
            "pass it again, as --model, or its file and name",
        ),
        (
            ("digits", "--model", "nets.py:wide"),
            "1.weight is 10 x 64 in run, and 12 x 64 in sequential",
        ),
        (("digits", "--model", "nets.py:none"), "nets.py has no none"),
        (
            ("wine", "--model", "nets.py:net"),
            "sequential cannot be evaluated on wine: RuntimeError: mat1 and mat2",
        ),
    ],
)
def test_other_module_is_refused(
    module_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(module_run)
    code, _, error = run_command(capsys, "evaluate", "run", "--dataset", *options)
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1


def test_function_model_cannot_be_loaded(tmp_path: Path) -> None:
    model = fedbudget.FunctionModel(
        lambda w, x, y: (float(w @ w), 2 * w), initial=np.ones(2)
    )
    x, y = np.ones((9, 2), np.float32), np.ones(9)
    fedbudget.train(model=model, shards=[(x, y)], budget="time=1s", out=tmp_path / "run")
    with pytest.raises(UserError, match=r"has a custom model, .*: pass it again"):
        evaluate(Run.open(tmp_path / "run"), "digits")
    with pytest.raises(UserError, match="has a model that was passed from Python"):
        fedbudget.train(shards=[(x, y)], resume=tmp_path / "run", budget="time=+1s")


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
    options = {
        "drop": ("id",),
        "impute": "mean",
        "nodes": 2,
        "rounds": 20,
        "budget": "time=1h",
    }
    fedbudget.train(dataset=str(folder / "ward.csv"), out=folder / "run", **options)  # type: ignore[arg-type]
    return folder


def test_predictions_keep_the_id(
    wards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("sex,id,age\nm,p9,\nf,p3,30\n\nx,p4,90\n")
    out = tmp_path / "predictions.csv"
    run = str(wards / "run")
    code, printed, remarks = run_command(
        capsys, "predict", run, "--dataset", str(tmp_path / "new.csv"), "--out", str(out)
    )
    assert (code, printed) == (0, f"{out}\n")
    assert "sex: 'x' was in no training sample" in remarks
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == ["id", "prediction", "probability_ill", "probability_well"]
    assert [(row["id"], row["prediction"]) for row in rows[1:]] == [
        ("p3", "well"),
        ("p4", "ill"),
    ]
    model = fedbudget.load(wards / "run")
    expected = model.predict_proba(
        {"age": [float("nan"), 30.0, 90.0], "sex": ["m", "f", "x"]}
    )
    assert [float(row["probability_ill"]) for row in rows] == pytest.approx(
        expected[:, 0], rel=1e-6
    )


def test_predictions_with_known_target(
    wards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(wards / "run")
    _, printed, _ = run_command(
        capsys, "predict", run, "--dataset", str(wards / "ward.csv")
    )
    rows = list(csv.DictReader(printed.splitlines()))
    right = np.mean([row["prediction"] == row["outcome"] for row in rows])
    _, evaluated, _ = run_command(
        capsys, "evaluate", run, "--dataset", str(wards / "ward.csv")
    )
    assert f"accuracy {right:.4f}" in evaluated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sex,id\nm,p9\n", "new.csv has no column age"),
        ("age,sex,weight\n50,m,70\n", "new.csv has the unknown column weight (--drop)"),
        ("age,sex\nold,m\n", "age"),
    ],
)
def test_wrong_columns_are_refused(
    wards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "new.csv").write_text(text)
    code, _, printed = run_command(
        capsys, "predict", str(wards / "run"), "--dataset", str(tmp_path / "new.csv")
    )
    assert code == 2
    assert message in printed


def test_dropped_columns(
    wards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("age,sex,weight\n90,m,70\n")
    data = str(tmp_path / "new.csv")
    _, printed, _ = run_command(
        capsys, "predict", str(wards / "run"), "--dataset", data, "--drop", "weight"
    )
    assert printed.splitlines()[1].startswith("70,ill,")


def test_predictions_for_arrays(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(0, 1, (40, 2))
    np.savez(tmp_path / "all.npz", x=x, y=x @ [1.0, -2.0])
    (tmp_path / "data.py").write_text(
        "import numpy as np\ndef samples():\n"
        f"    file = np.load({str(tmp_path / 'all.npz')!r})\n"
        "    return file['x'], file['y']\n"
    )
    model = fedbudget.train(
        dataset=str(tmp_path / "all.npz"), nodes=2, rounds=9, budget="time=1h"
    ).model
    predictions = predict(model, tmp_path / "all.npz")
    assert len(predictions) == 40
    assert [float(text) for text in predictions.columns["prediction"]] == pytest.approx(
        model.predict(x), rel=1e-6
    )
    assert predict(model, Path(f"{tmp_path}/data.py:samples")) == predictions
    with pytest.raises(UserError, match="it does not exist"):
        predict(model, tmp_path / "none.npz")
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="the model was trained on arrays"):
        predict(model, tmp_path / "new.csv")


def test_export_into_the_run_folder(
    wards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = run_command(capsys, "export", str(wards / "run"), "--to", "numpy")
    assert (code, printed) == (0, f"{wards / 'run' / 'model.npz'}\n")
    with np.load(wards / "run" / "model.npz") as file:
        assert file["feature_names"].tolist() == ["age", "sex=f", "sex=m"]
