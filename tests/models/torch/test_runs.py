"""PyTorch models in runs: initial and trained parameters, metrics, and a program without
PyTorch.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbudget
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.experiments.compare import compare
from fedbudget.models import TorchModel, loss_over
from fedbudget.settings.settings import Settings
from support.networks import by_autograd, flat, network, random_w, table


class TestFlatStart:
    """With PyTorch's default weights, a deep network returns nearly the same output for all
    samples.
    """

    @pytest.mark.parametrize("partition", ["dirichlet:0.5", "labels:2"])
    def test_five_layer_network_is_trained(self, partition: str) -> None:
        """Too long first steps would leave a loss of log 10 = 2.30: the same scores for all
        classes. With two labels per node, losses vary between 0.2 and 1.3.
        """
        losses = [trained_from(seed, partition) for seed in range(3)]
        assert np.mean(losses) < np.log(10) / 2


def trained_from(seed: int, partition: str) -> float:
    """Training loss of a network with five layers from PyTorch's weights of a seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 48), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(48, 48), nn.ReLU()]
    result = fedbudget.train(
        model=nn.Sequential(*layers, nn.Linear(48, 10)),
        dataset="digits",
        nodes=10,
        partition=partition,
        budget="time=10s",
        costs="simulated",
    )
    return result.loss


class TestStart:
    def test_factory_depends_on_seed(self) -> None:
        before = torch.random.get_rng_state()
        model = TorchModel(lambda: nn.Linear(5, 3))
        first, again, other = (model.initial(seed) for seed in (1, 1, 2))
        assert torch.equal(torch.random.get_rng_state(), before)
        assert np.array_equal(first, again)
        assert not np.isin(first, other).any()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            assert np.array_equal(first, flat(list(nn.Linear(5, 3).parameters())))

    def test_initial_returns_a_copy(self) -> None:
        model = TorchModel(network())
        start = model.initial(0)
        model.initial(0)[:] = 7
        model.descend(start[None], Shards.whole(table()), BatchIndices.whole(1, 3), 0.5)
        assert np.array_equal(model.initial(0), start)


class TestTrained:
    def test_given_module_is_not_changed(self) -> None:
        module = network()
        before, data = copy.deepcopy(module.state_dict()), table()
        model = TorchModel(module)
        model.descend(
            random_w(model, 0)[None], Shards.whole(data), BatchIndices.whole(1, 3), 0.5
        )
        model.accuracy(random_w(model, 1), data)
        assert all(
            torch.equal(value, before[name]) for name, value in module.state_dict().items()
        )
        assert all(parameter.grad is None for parameter in module.parameters())
        assert module.training

    def test_outputs_match_hand_computation(self) -> None:
        model, data = TorchModel(network()), table()
        w = random_w(model, 4)
        first, hidden, second, last = np.split(w, [35, 42, 63])  # 5 x 7, 7, 7 x 3, 3
        expected = (
            np.tanh(data.x @ first.reshape(7, 5).T + hidden) @ second.reshape(3, 7).T + last
        )
        module = model.trained(w)
        with torch.no_grad():
            np.testing.assert_allclose(
                module(torch.from_numpy(data.x)).numpy(), expected, atol=1e-5
            )
        assert not module.training

    def test_trained_modules_are_independent(self) -> None:
        model, data = TorchModel(network()), table()
        w = random_w(model, 4)
        kept = w.copy()
        one, other = model.trained(w), model.trained(w)
        before = loss_over(model, w, data)
        for parameter in one.parameters():
            assert parameter.grad is None
            with torch.no_grad():
                parameter.fill_(3.0)
        assert np.array_equal(flat(list(other.parameters())), kept)
        assert np.array_equal(w, kept)
        assert loss_over(model, w, data) == before
        model.descend(w[None], Shards.whole(data), BatchIndices.whole(1), 0.1)
        assert all((parameter == 3.0).all() for parameter in one.parameters())

    def test_trained_module_trains_and_saves(self, tmp_path: Path) -> None:
        model, data = TorchModel(network()), table()
        module = model.trained(random_w(model, 4))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        before, _ = by_autograd(module, data, np.arange(60))
        F.cross_entropy(
            module(torch.from_numpy(data.x)), torch.from_numpy(data.y).long()
        ).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after, _ = by_autograd(module, data, np.arange(60))
        assert after < before
        torch.save(module.state_dict(), tmp_path / "state.pt")
        again = network(seed=9)
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert by_autograd(again, data, np.arange(60))[0] == pytest.approx(after)


class TestMetrics:
    def test_accuracy_of_classes(self) -> None:
        x = np.eye(3, dtype=np.float32)[[0, 1, 2, 2]]  # the identity predicts 0, 1, 2, 2
        model = TorchModel(nn.Linear(3, 3, bias=False))
        right = model.accuracy(
            np.eye(3, dtype=np.float32).ravel(),
            Table(x, np.array([0, 1, 2, 0], np.float32)),
        )
        assert right == 0.75

    @pytest.mark.parametrize("columns", [1, 0])
    def test_binary_accuracy_by_sign(self, columns: int) -> None:
        module: nn.Module = nn.Linear(1, 1, bias=False)
        if columns == 0:
            module = nn.Sequential(module, nn.Flatten(0))
        model = TorchModel(module, loss=F.soft_margin_loss, target="binary")
        data = Table(
            np.array([[2], [-1], [3], [-4]], np.float32),
            np.array([1, 1, 1, -1], np.float32),
        )
        w = np.ones(1, np.float32)
        assert model.accuracy(w, data) == 0.75
        margins = np.array([2, -1, 3, 4])
        assert loss_over(model, w, data) == pytest.approx(
            np.log1p(np.exp(-margins)).mean(), rel=1e-6
        )

    def test_real_target_needs_custom_accuracy(self) -> None:
        data = table()
        without = TorchModel(nn.Linear(5, 1), target="real")
        assert without.accuracy(without.initial(0), data) is None
        given = TorchModel(
            nn.Linear(5, 1), target="real", metrics={"accuracy": lambda output, y: 0.25}
        )
        assert given.accuracy(given.initial(0), data) == 0.25

    def test_custom_metrics_in_result(self) -> None:
        def errors(output: Tensor, y: Tensor) -> Tensor:
            return (output.argmax(dim=1) != y).sum()

        model = TorchModel(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
            metrics={"errors": errors},
        )
        result = fedbudget.train(
            model=model, dataset="digits", budget="time=1s", costs="simulated"
        )
        assert result.accuracy is not None
        test_samples = 360
        assert result.metrics["errors"] == round(test_samples * (1 - result.accuracy))
        assert json.loads(json.dumps(result.to_json()))["metrics"] == dict(result.metrics)

    def test_custom_accuracy_replaces_default(self) -> None:
        def of_zeros(output: Tensor, y: Tensor) -> Tensor:
            return (output[y == 0].argmax(dim=1) == 0).double().mean()

        make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
        own, usual = (
            fedbudget.train(
                model=TorchModel(make, metrics=metrics),
                dataset="digits",
                budget="time=1s",
                costs="simulated",
            )
            for metrics in ({"accuracy": of_zeros}, None)
        )
        np.testing.assert_array_equal(own.w, usual.w)
        module = TorchModel(make).trained(own.w)
        digits = fedbudget.data.load("digits")
        assert digits.test is not None
        assert digits.test.labels is not None
        x = torch.from_numpy(digits.test.x[digits.test.labels == 0] / np.float32(16))
        assert own.accuracy == pytest.approx(
            (module(x).argmax(dim=1) == 0).double().mean().item()
        )
        assert own.accuracy != usual.accuracy
        assert own.rounds[-1].accuracy == own.accuracy

    def test_output_column_matches_target_vector(self) -> None:
        """[n, 1] - [n] would be [n, n]. With y = x, the error is 0 only if each output is
        compared with its own target.
        """
        x = np.arange(4, dtype=np.float32)[:, None]
        data = Table(x, x[:, 0].copy())
        error = {"error": lambda output, y: (output - y).abs().max()}
        model = TorchModel(nn.Linear(1, 1, bias=False), target="real", metrics=error)
        assert loss_over(model, np.ones(1, np.float32), data) == 0
        assert loss_over(model, np.full(1, 3, np.float32), data) == pytest.approx(
            (0 + 4 + 16 + 36) / 4
        )
        assert model.metrics(np.ones(1, np.float32), data) == {"error": 0}

    @pytest.mark.parametrize(
        ("loss", "returned"),
        [
            (lambda output, y: F.cross_entropy(output, y, reduction="none"), r"\(60,\)"),
            (lambda output, y: F.cross_entropy(output, y)[None], r"\(1,\)"),
            (lambda output, y: F.cross_entropy(output, y).item(), "float"),
        ],
    )
    def test_loss_must_be_one_number(self, loss: Any, returned: str) -> None:
        model = TorchModel(nn.Linear(5, 3), loss=loss)
        message = f"linear's loss must be a tensor of one number, .*, not {returned}"
        with pytest.raises(UserError, match=message):
            model.descend(
                model.initial(0)[None], Shards.whole(table()), BatchIndices.whole(1), 0.1
            )

    @pytest.mark.parametrize("target", ["binary", "none"])
    def test_target_without_default_loss(self, target: Any) -> None:
        message = f"TorchModel needs a loss for target '{target}'"
        with pytest.raises(UserError, match=message):
            TorchModel(nn.Linear(5, 1), target=target)

    @pytest.mark.parametrize("device", ["abacus", "cuda:77", "meta"])
    def test_unavailable_device_is_rejected(self, device: str) -> None:
        with pytest.raises(UserError, match=f"device '{device}' cannot be used") as error:
            TorchModel(nn.Linear(5, 3), device=device)
        assert "\n" not in str(error.value)

    def test_model_name(self) -> None:
        assert TorchModel(nn.Linear(5, 3)).name == "linear"
        assert TorchModel(network, name="mine").name == "mine"


class TestRuns:
    def test_compare_trains_catalogue_network(self) -> None:
        settings = Settings(
            model="cnn", dataset="digits", budget=("time=0.5s",), step_size=0.05, phi=5e-5
        )
        (result,) = compare(settings, cases=[2], taus=[5], seeds=[1])
        alone = fedbudget.train(
            model="cnn",
            dataset="digits",
            case=2,
            budget="time=0.5s",
            costs="simulated",
            step_size=0.05,
            method="paper",
            tau=5,
            seed=1,
        )
        expected = (alone.loss, alone.accuracy)
        assert (result.fixed[0].loss, result.fixed[0].accuracy) == expected
        assert result.adaptive.loss < 3.0


class TestWithoutPyTorch:
    INSTALL = "needs PyTorch; install it with: pip install 'fedbudget[torch]'"

    def test_network_error_names_the_extra(self, tmp_path: Path) -> None:
        """Models that do not need PyTorch still run."""
        done = _python(
            """
            import sys
            from importlib.machinery import PathFinder

            class WithoutTorch(PathFinder):
                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    if name.partition(".")[0] == "torch":
                        return None
                    return PathFinder.find_spec(name, path, target)

            sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
            from fedbudget.cli.main import main
            from fedbudget.errors import UserError

            def code_of(*arguments):
                try:
                    main(["run", "--budget", "time=0.5s", "--json", *arguments])
                except SystemExit as end:
                    return end.code

            print(code_of("--model", "cnn", "--out", "cnn"))
            print(code_of("--model", "svm", "--out", "svm"))
            try:
                from fedbudget.models import TorchModel
            except UserError as error:
                print(error)
            """,
            tmp_path,
        )
        code, result, plain, refused = done.stdout.splitlines()
        assert (code, plain) == ("2", "0")
        assert done.stderr == f"fedbudget: --model cnn {self.INSTALL}\n"
        assert refused == f"TorchModel {self.INSTALL}"
        assert json.loads(result)["loss"] < 0.5
        assert not (tmp_path / "cnn").exists()

    @pytest.mark.parametrize(
        "code",
        [
            "import fedbudget, fedbudget.models, fedbudget.models.catalogue, "
            "fedbudget.api, fedbudget.cli.main",
            "import fedbudget; fedbudget.train(budget='time=0.5s')",
        ],
    )
    def test_torch_is_imported_lazily(self, tmp_path: Path, code: str) -> None:
        assert (
            _python(f"{code}\nimport sys; print('torch' in sys.modules)", tmp_path).stdout
            == "False\n"
        )


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        timeout=120,
    )
