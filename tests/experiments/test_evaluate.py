"""A trained model applied to data, against the same figures worked out in numpy from the
files alone.
"""

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
from fedbudget.experiments.evaluate import evaluate
from fedbudget.runs.folder import Run
from support.commands import run_command

ROWS = 60


def train(folder: Path, **options: Any) -> Run:
    fedbudget.train(budget="time=2s", nodes=3, out=folder / "run", **options)
    return Run.open(folder / "run")


def write_homes(path: Path, seed: int, shift: float = 0.0) -> NDArray[np.float64]:
    """A CSV with two features and a price between them."""
    rng = np.random.default_rng(seed)
    size = rng.normal(100 + shift, 30, ROWS)
    age = rng.uniform(0, 50 + shift, ROWS)
    price = 3000 * size - 800 * age + rng.normal(0, 9000, ROWS)
    rows = np.column_stack([size, price, age])
    path.write_text(
        "size,price,age\n" + "".join(f"{a!r},{b!r},{c!r}\n" for a, b, c in rows.tolist())
    )
    return rows


def test_a_classifier_on_digits_has_the_loss_and_accuracy_of_its_test_samples(
    tmp_path: Path,
) -> None:
    run = train(tmp_path, model="svm")
    w = load_file(run.path / "model.safetensors")["weight"].astype(np.float64)
    known = load_digits()
    x, y = known.data[1437:] / 16, np.where(known.target[1437:] % 2 == 0, 1, -1)
    slack = np.maximum(0, 1 - y * (x @ w))
    found = evaluate(run, "digits")
    assert found.samples == 360
    assert found.loss == pytest.approx(0.05 * w @ w + 0.5 * np.mean(slack**2), rel=1e-5)
    assert found.accuracy == pytest.approx(np.mean(np.sign(x @ w) == y))


def test_new_rows_of_a_csv_are_standardised_as_the_training_rows_were(
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
    found = evaluate(run, str(tmp_path / "new.csv"))
    assert found.samples == ROWS
    assert found.loss == pytest.approx(0.5 * np.mean(errors**2), rel=1e-4)
    assert found.accuracy is None
    assert evaluate(run, str(tmp_path / "new.csv"), TableOptions("price")) == found
    lines = [line.split(",") for line in (tmp_path / "new.csv").read_text().splitlines()]
    other = [[*reversed(line), "x"] for line in lines]
    (tmp_path / "other.csv").write_text("\n".join(map(",".join, other)) + "\n")
    assert (
        evaluate(run, str(tmp_path / "other.csv"), TableOptions("price", drop=("x",)))
        == found
    )


def test_rows_in_another_order_with_fewer_classes_keep_the_class_numbers_of_training(
    tmp_path: Path,
) -> None:
    """Alone, the new file would call its only class number 0."""
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
    found = evaluate(run, str(tmp_path / "warm.csv"))
    assert found.samples == warm.sum()
    assert found.accuracy == pytest.approx(np.mean(standard[warm] @ w >= 0))
    assert np.mean(standard[warm] @ w >= 0) > 0.8


def test_data_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
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


def test_a_class_that_the_model_never_saw_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,kind\n" + "1,cold\n2,warm\n" * 10)
    (tmp_path / "new.csv").write_text("a,kind\n1,hot\n")
    run = train(tmp_path, dataset=str(tmp_path / "train.csv"))
    with pytest.raises(UserError, match="class 'hot' is not one of cold, warm"):
        evaluate(run, str(tmp_path / "new.csv"))


def test_samples_of_a_python_file_keep_the_class_numbers_of_training(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).normal(0, 1, (ROWS, 2)).astype(np.float32)
    y = np.where(x[:, 0] > 0, 7, 3)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    np.savez(tmp_path / "some.npz", x=x[y == 7], y=y[y == 7])
    (tmp_path / "some_rows.py").write_text(
        f"import numpy as np\nfound = np.load({str(tmp_path / 'some.npz')!r})\n"
        "def samples():\n    return found['x'], found['y']\nother = found['x'], found['y'] + 1\n"
    )
    run = train(
        tmp_path,
        model="softmax",
        dataset=str(tmp_path / "all.npz"),
        test_share=0.0,
        step_size=0.5,
    )
    found = evaluate(run, f"{tmp_path}/some_rows.py:samples")
    assert found == evaluate(run, str(tmp_path / "some.npz"))
    assert found.accuracy is not None
    assert found.accuracy > 0.8
    with pytest.raises(
        UserError, match=r"some_rows\.py:other: class '8' is not one of 3, 7"
    ):
        evaluate(run, f"{tmp_path}/some_rows.py:other")


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a module that was passed from Python, and a file that has the
    like.
    """
    folder = tmp_path_factory.mktemp("own")
    (folder / "nets.py").write_text(
        "from torch import nn\n"
        "def flat(*sizes): return nn.Sequential(nn.Flatten(), nn.Linear(*sizes))\n"
        "def net(): return flat(64, 10)\n"
        "def wide(): return flat(64, 12)\n"
    )
    train(folder, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    return folder


def test_a_module_that_was_given_from_python_is_given_again(
    own_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own_run)
    code, written, _ = run_command(
        capsys, "evaluate", "run", "--dataset", "digits", "--model", "nets.py:net", "--json"
    )
    found, tensors, known = (
        json.loads(written),
        load_file("run/model.safetensors"),
        load_digits(),
    )
    scores = (
        known.data[1437:] / 16 @ tensors["1.weight"].T.astype(np.float64)
        + tensors["1.bias"]
    )
    y = known.target[1437:]
    assert (code, found["samples"]) == (0, 360)
    assert found["loss"] == pytest.approx(
        np.mean(logsumexp(scores, axis=1) - scores[np.arange(360), y]), rel=1e-5
    )
    assert found["accuracy"] == pytest.approx(np.mean(scores.argmax(axis=1) == y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("digits",),
            "has a model that was passed from Python, sequential: pass it again, as --model, or its file and name",
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
def test_another_module_is_refused_in_a_line(
    own_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(own_run)
    code, _, complaint = run_command(capsys, "evaluate", "run", "--dataset", *options)
    assert code == 2
    assert message in complaint
    assert len(complaint.splitlines()) == 1


def test_a_model_that_was_given_from_python_is_said_to_be(tmp_path: Path) -> None:
    model = fedbudget.FunctionModel(
        lambda w, x, y: (float(w @ w), 2 * w), initial=np.ones(2)
    )
    x, y = np.ones((9, 2), np.float32), np.ones(9)
    fedbudget.train(model=model, shards=[(x, y)], budget="time=1s", out=tmp_path / "run")
    with pytest.raises(UserError, match="has a model that was passed from Python"):
        evaluate(Run.open(tmp_path / "run"), "digits")
    with pytest.raises(UserError, match="has a model that was passed from Python"):
        fedbudget.train(shards=[(x, y)], resume=tmp_path / "run", budget="time=+1s")
