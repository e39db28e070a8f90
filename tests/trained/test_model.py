"""Trained models, from a result and from a run folder: predictions, accepted inputs and
errors.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor, nn

import fedbudget
from fedbudget.errors import UserError
from fedbudget.models import TorchModel

SHORT: dict[str, Any] = {"rounds": 6, "budget": "time=1h", "batch_size": "full"}


def two_classes(y: tuple[Any, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Points on the two sides of a line."""
    x = np.random.default_rng(0).normal(0, 1, (60, 2))
    return x, np.where(x[:, 0] > 0, y[1], y[0])


def write_table(
    path: Path, names: tuple[str, str] = ("cold", "warm")
) -> tuple[NDArray[Any], NDArray[Any]]:
    x, y = two_classes(names)
    x = x + np.array([50, -7])  # learnable only if standardised
    lines = [f"{a},{b},{kind}\n" for (a, b), kind in zip(x.tolist(), y, strict=True)]
    path.write_text("a,b,kind\n" + "".join(lines))
    return x, y


class TestPredict:
    def test_class_names_from_raw_features(self, tmp_path: Path) -> None:
        x, y = write_table(tmp_path / "t.csv")
        model = fedbudget.train(
            dataset=str(tmp_path / "t.csv"), nodes=2, test_share=0.0, **SHORT
        ).model
        assert np.mean(model.predict(x) == y) > 0.9
        assert model.classes == ("cold", "warm")
        assert model.feature_names == ("a", "b")
        probable = model.predict_proba(x)
        assert np.allclose(probable.sum(axis=1), 1)
        assert np.array_equal(probable.argmax(axis=1) == 1, model.predict(x) == "warm")

    def test_columns_by_name(self, tmp_path: Path) -> None:
        """In any order, with or without the target."""
        x, y = write_table(tmp_path / "t.csv")
        model = fedbudget.train(dataset=str(tmp_path / "t.csv"), nodes=2, **SHORT).model
        expected = model.predict(x).tolist()
        frame = pd.DataFrame({"kind": y, "b": x[:, 1], "a": x[:, 0]})
        assert model.predict(frame).tolist() == expected
        assert model.predict(frame[["b", "a"]]).tolist() == expected
        assert model.predict({"b": x[:, 1].tolist(), "a": x[:, 0]}).tolist() == expected
        assert model.predict(frame.assign(kind=None)).tolist() == expected
        with pytest.raises(UserError, match="x has no column a"):
            model.predict(frame[["b"]])
        with pytest.raises(UserError, match="unknown column c"):
            model.predict(frame.assign(c=1))

    @pytest.mark.parametrize("kinds", [(3, 7), (-1, 1)])
    def test_numeric_classes_stay_numbers(self, kinds: tuple[int, int]) -> None:
        x, y = two_classes(kinds)
        model = fedbudget.train(shards=[(x, y)], **SHORT).model
        assert model.predict(x).dtype == np.int64
        assert np.mean(model.predict(x) == y) > 0.9

    def test_regression_in_original_units(self, tmp_path: Path) -> None:
        x = two_classes((0, 1))[0] + np.array([50, -7])
        price = 3000 * x[:, 0] - 800 * x[:, 1]
        frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "price": price})
        frame.to_csv(tmp_path / "t.csv", index=False)
        result = fedbudget.train(
            dataset=str(tmp_path / "t.csv"), nodes=2, rounds=60, budget="time=1h"
        )
        assert result.model.name == "linear"
        np.testing.assert_allclose(result.model.predict(x), price, rtol=1e-3)
        message = "linear has no probabilities: it returns no scores of classes"
        with pytest.raises(UserError, match=message):
            result.model.predict_proba(x)

    def test_module_keeps_unused_classes(self) -> None:
        x, y = two_classes((1, 3))
        model = fedbudget.train(
            model=nn.Linear(2, 5), shards=[(x.astype(np.float32), y)], **SHORT
        ).model
        assert model.classes == ("0", "1", "2", "3", "4")
        assert set(model.predict(x)) <= set(range(5))
        assert model.predict_proba(x).shape == (60, 5)

    def test_module_with_two_inputs(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 2)

            def forward(self, left: Tensor, right: Tensor) -> Tensor:
                scores: Tensor = self.layer(torch.cat([left, right], dim=1))
                return scores

        left, right = np.random.default_rng(1).normal(0, 1, (2, 40, 2)).astype(np.float32)
        y = (left[:, 0] > 0).astype(int)
        model = fedbudget.train(
            model=Two, shards=[((left, right), y)], rounds=3, budget="time=1h"
        ).model
        result = model.predict((left, right))
        assert model.predict({"right": right, "left": left}).tolist() == result.tolist()
        samples = [((left[row], right[row]), 0) for row in range(40)]
        model = fedbudget.train(
            model=TorchModel(Two, collate=collate),
            shards=[samples],
            rounds=1,
            budget="time=1h",
        ).model
        assert model.predict(samples).shape == (40,)

    def test_function_model_predictions(self) -> None:
        def mean_of_data(w: Any, x: Any, y: Any) -> Any:
            return 0.5 * float(((x - w) ** 2).sum(axis=1).mean()), w - x.mean(axis=0)

        x = np.ones((9, 2), np.float32)
        without_predict = fedbudget.FunctionModel(
            mean_of_data, initial=np.zeros(2), target="none"
        )
        with pytest.raises(UserError, match="has no predictions"):
            fedbudget.train(
                model=without_predict, shards=[(x, None)], rounds=1, budget="time=1h"
            ).model.predict(x)
        with_predict = fedbudget.FunctionModel(
            mean_of_data,
            initial=np.zeros(2),
            target="none",
            predict=lambda w, x: x[:, 0] * 3,
        )
        model = fedbudget.train(
            model=with_predict, shards=[(x, None)], rounds=1, budget="time=1h"
        ).model
        assert model.predict(x).tolist() == [3] * 9

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (np.zeros((3, 63)), "x has 63 features, but the model was trained on 64"),
            (np.zeros(64), r"must be \[samples, ...\], not of shape \(64,\)"),
            (np.full((1, 64), np.nan), "is not finite"),
            (
                np.full((1, 64), 0.5),
                "trained on integers, such as pixels of 0 to 16, .*; x has 0.5",
            ),
        ],
    )
    def test_invalid_inputs_are_rejected(
        self, digits: fedbudget.TrainedModel, x: Any, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            digits.predict(x)

    def test_images_keep_or_lose_shape(self, digits: fedbudget.TrainedModel) -> None:
        x = np.random.default_rng(0).integers(0, 17, (5, 64))
        assert (
            digits.outputs(x.reshape(5, 8, 8)).tobytes()
            == digits.outputs(x.astype(np.uint8)).tobytes()
        )


def collate(samples: list[Any]) -> Any:
    left, right = (
        torch.from_numpy(np.stack(each))
        for each in zip(*(x for x, _ in samples), strict=True)
    )
    return left, right, torch.tensor([y for _, y in samples])


@pytest.fixture(scope="module")
def digits() -> fedbudget.TrainedModel:
    return fedbudget.train(dataset="digits", rounds=2, budget="time=1h").model


class TestLoad:
    def test_python_model_must_be_passed(self, tmp_path: Path) -> None:
        """Also if its name equals that of a built-in model."""
        x, y = two_classes((0, 1))
        fedbudget.train(
            model=nn.Linear(2, 2),
            shards=[(x.astype(np.float32), y)],
            out=tmp_path / "run",
            **SHORT,
        )
        message = "has a custom model, own-linear. .* pass it again, as model"
        with pytest.raises(UserError, match=message):
            fedbudget.load(tmp_path / "run")
        expected = fedbudget.load(tmp_path / "run", model=nn.Linear(2, 2)).outputs(x)
        again = fedbudget.load(
            tmp_path / "run" / "model.safetensors", model=lambda: nn.Linear(2, 2)
        )
        assert again.outputs(x).tobytes() == expected.tobytes()
        with pytest.raises(UserError, match=r"weight is 2 x 2 in .*, and 3 x 2 in linear"):
            fedbudget.load(tmp_path / "run", model=nn.Linear(2, 3))
        with pytest.raises(UserError, match=r"bias is 2 in .*, and missing in linear"):
            fedbudget.load(tmp_path / "run", model=nn.Linear(2, 2, bias=False))

    def test_model_options_are_restored(self, tmp_path: Path) -> None:
        x, _ = two_classes((0, 1))
        result = fedbudget.train(
            model="kmeans", clusters=3, shards=[(x, None)], out=tmp_path / "run", **SHORT
        )
        assert (
            fedbudget.load(tmp_path / "run").predict(x).tolist()
            == result.model.predict(x).tolist()
        )

    def test_file_of_earlier_version(self, tmp_path: Path) -> None:
        header = {"fedbudget": '{"model": "svm", "classes": ["a", "b"]}'}
        (tmp_path / "model.safetensors").write_bytes(
            save({"w": np.ones(2, np.float32)}, header)
        )
        with pytest.raises(UserError, match="written by an earlier version"):
            fedbudget.load(tmp_path)

    def test_folder_without_model(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="does not exist: no run has ended there"):
            fedbudget.load(tmp_path)
