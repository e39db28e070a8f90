"""Models and samples of other libraries: transformers with LoRA, Lightning, JAX, datasets.

None of these libraries is a dependency. A test is skipped if its library is not installed.
"""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedbudget
from fedbudget import TorchModel, UserError

EXAMPLES = Path(__file__).parents[3] / "examples"
RUN: dict[str, Any] = {
    "budget": "time=1h",
    "costs": "simulated",
    "rounds": 6,
}
X = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(np.int64)

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.slow
def test_transformer_with_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes send the adapters and the new classification layer, and both learn."""
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("peft", reason="needs peft")
    done = runpy.run_path(str(EXAMPLES / "lora_transformer.py"))
    result = done["result"]
    names = set(result.model.tensors)
    assert all("lora_" in name or "classifier" in name for name in names)
    assert len(result.w) < done["total"] / 5
    assert result.rounds[-1].best_loss < result.rounds[0].best_loss
    assert "parameters were sent" in capsys.readouterr().out


def test_lightning_module() -> None:
    """`forward` computes the outputs; the loss of `training_step` is passed as `loss`."""
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.layer(x)
            return scores

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss: Tensor = self.criterion(self(x), y)
            return loss

    module = Lit()
    model = TorchModel(module, loss=module.criterion)
    result = fedbudget.train(model=model, shards=[(X, Y)] * 2, validation=0, **RUN)
    trained = model.trained(result.w)
    with torch.no_grad():
        loss = trained.training_step((torch.tensor(X), torch.tensor(Y)), 0)  # type: ignore[operator]
    assert result.rounds[0].loss > result.loss
    assert isinstance(trained, Lit)
    assert float(loss) == pytest.approx(result.loss, rel=1e-4)


def test_function_of_jax() -> None:
    """JAX computes loss and gradient; PyTorch gives the same run."""
    jax = pytest.importorskip("jax", reason="needs jax")

    def loss(w: Any, x: Any, y: Any) -> Any:
        score = x @ w
        return jax.numpy.mean(jax.numpy.logaddexp(0, score) - y * score)

    both = jax.jit(jax.value_and_grad(loss))
    result = fedbudget.train(
        model=fedbudget.FunctionModel(both, initial=np.zeros(4)),
        shards=[(X, Y)] * 2,
        **RUN,
    )

    def by_hand(w: Any, x: Any, y: Any) -> tuple[float, Any]:
        score = x @ w
        chance = 1 / (1 + np.exp(-score))
        value = float(np.mean(np.logaddexp(0, score) - y * score))
        return value, x.T @ (chance - y) / len(y)

    expected = fedbudget.train(
        model=fedbudget.FunctionModel(by_hand, initial=np.zeros(4)),
        shards=[(X, Y)] * 2,
        **RUN,
    )
    np.testing.assert_allclose(result.w, expected.w, rtol=1e-3)


class TestHuggingFaceDatasets:
    def test_columns_are_a_table(self) -> None:
        datasets = pytest.importorskip("datasets", reason="needs datasets")
        columns = {f"x{number}": X[:, number] for number in range(4)}
        own = datasets.Dataset.from_dict({**columns, "y": Y})
        result = fedbudget.train(dataset=own, target="y", nodes=2, **RUN)
        assert result.model.feature_names == ("x0", "x1", "x2", "x3")
        assert result.accuracy is not None

    def test_samples_for_a_module(self) -> None:
        datasets = pytest.importorskip("datasets", reason="needs datasets")
        own = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
        own = own.with_format("torch")
        model = TorchModel(Named)
        result = fedbudget.train(model=model, dataset=own, nodes=2, **RUN)
        arrays = fedbudget.train(
            model=TorchModel(lambda: nn.Linear(4, 2)),
            dataset=(X, Y),
            test_share=0.0,
            nodes=2,
            **RUN,
        )
        assert len(result.w) == len(arrays.w)
        assert result.rounds[-1].best_loss < result.rounds[0].best_loss


class Named(nn.Linear):
    """A layer with a named input, as samples that are mappings need."""

    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_polars_frame() -> None:
    polars = pytest.importorskip("polars", reason="needs polars")
    frame = polars.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})
    result = fedbudget.train(dataset=frame, target="y", nodes=2, **RUN)
    assert result.model.feature_names == ("a", "b")


class TestLoaders:
    def test_loader_is_its_dataset(self) -> None:
        tensors = TensorDataset(torch.tensor(X), torch.tensor(Y))
        choices: list[list[Any]] = [
            [DataLoader(tensors, batch_size=7)] * 2,
            [tensors] * 2,
            [(X, Y)] * 2,
        ]
        runs = [
            fedbudget.train(model=Named, shards=shards, seed=3, **RUN) for shards in choices
        ]
        assert len({run.w.tobytes() for run in runs}) == 1

    def test_own_collate_function_is_refused(self) -> None:
        samples: Any = [(X[0], 1)]
        loader: Any = DataLoader(samples, collate_fn=lambda samples: samples)
        with pytest.raises(UserError, match=r"own collate_fn: pass its dataset, and Torch"):
            fedbudget.train(model=Named, shards=[loader], **RUN)


def test_estimator_of_scikit_learn_is_refused() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    for given in (linear.LogisticRegression, linear.SGDClassifier()):
        with pytest.raises(UserError, match=r"estimator of scikit-learn.*FedClassifier"):
            fedbudget.train(model=given, shards=[(X, Y)], **RUN)
