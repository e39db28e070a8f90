"""The paper's network: layer sizes, a second implementation, and initial weights."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.sampling import Sampler
from fedbudget.data.shards import Shards, Table
from fedbudget.errors import UserError
from fedbudget.models import TorchModel, catalogue
from fedbudget.models.base import Descent, loss_over
from fedbudget.models.torch.networks import cnn, lenet

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def images(shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    return torch.rand((2, *shape), generator=torch.Generator().manual_seed(seed))


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


def image_dataset(shape: tuple[int, int, int], name: str = "images") -> Dataset:
    x = np.zeros((10, int(np.prod(shape))), np.uint8)
    return Dataset(name, Part(x, np.arange(10)), classes=tuple("abcdefghij"), shape=shape)


class TestLayers:
    @pytest.mark.parametrize(
        ("shape", "z", "layers"),
        [
            # weights and biases: 5·5·1·32 + 32, 5·5·32·32 + 32, 1568·256 + 256, 256·10 + 10
            (GREY, 1568, [(800, 32), (25_600, 32), (401_408, 256), (2_560, 10)]),
            # 5·5·3·32 + 32, 5·5·32·32 + 32, 2048·256 + 256, 256·10 + 10
            (COLOUR, 2048, [(2_400, 32), (25_600, 32), (524_288, 256), (2_560, 10)]),
        ],
    )
    def test_sizes_match_the_paper(
        self, shape: tuple[int, int, int], z: int, layers: list[tuple[int, int]]
    ) -> None:
        network = cnn(shape, 10)
        sizes = [parameter.numel() for parameter in network.parameters()]
        assert list(zip(sizes[::2], sizes[1::2], strict=True)) == layers
        assert linear_layers(network)[0].in_features == z

    @pytest.mark.parametrize(("shape", "total"), [(GREY, 430_698), (COLOUR, 555_178)])
    def test_catalogue_model_parameter_count(
        self, shape: tuple[int, int, int], total: int
    ) -> None:
        model = catalogue.build("cnn", image_dataset(shape))
        assert (model.parameters, model.name, model.target) == (total, "cnn", "classes")

    def test_lenet_sizes_match_benchmark(self) -> None:
        """5·5·1·6 + 6, 5·5·6·16 + 16, 256·120 + 120, 120·84 + 84, 84·10 + 10."""
        sizes = [parameter.numel() for parameter in lenet(GREY, 10).parameters()]
        assert sizes == [150, 6, 2_400, 16, 30_720, 120, 10_080, 84, 840, 10]

    def test_lenet_rejects_small_images(self) -> None:
        message = "model lenet needs images of 16 x 16 or more; tiny has 8 x 8"
        with pytest.raises(UserError, match=message):
            catalogue.build("lenet", image_dataset((1, 8, 8), "tiny"))

    def test_mlp_regression(self) -> None:
        """3 features by 64 and their biases, 64 by 1 and its bias; squared error as
        loss.
        """
        x = np.random.default_rng(0).normal(0, 1, (20, 3)).astype(np.float32)
        dataset = Dataset("homes", Part(x, values=x[:, 0].astype(np.float64)))
        model = catalogue.build("mlp", dataset)
        assert (model.parameters, model.target) == (3 * 64 + 64 + 64 + 1, "real")
        w, table = model.initial(0), dataset.table(dataset.train, model.target)
        outputs = model.outputs(w, table)
        assert outputs is not None
        assert outputs.shape == (20, 1)
        assert loss_over(model, w, table) == pytest.approx(
            np.mean((outputs[:, 0] - x[:, 0]) ** 2), rel=1e-5
        )

    def test_flat_rows_are_rejected(self) -> None:
        dataset = Dataset(
            "rows",
            Part(np.zeros((2, 7), np.uint8), labels=np.arange(2)),
            classes=("a", "b"),
        )
        with pytest.raises(
            UserError,
            match=r"model cnn needs images \[channels, height, width\]; rows has 7 "
            r"features",
        ):
            catalogue.build("cnn", dataset)

    # Halves of odd sides are rounded up.
    @pytest.mark.parametrize(
        ("network", "shapes"),
        [
            (cnn, [GREY, COLOUR, (1, 8, 8), (2, 9, 13)]),
            (lenet, [GREY, COLOUR, (1, 16, 16), (2, 17, 19)]),
        ],
    )
    def test_one_output_per_class(self, network: Any, shapes: list[Any]) -> None:
        for shape in shapes:
            assert network(shape, 7)(images(shape)).shape == (2, 7)

    def test_layer_order_matches_the_paper(self) -> None:
        """Convolution, pool, normalize, convolution, normalize, pool, two fully connected
        layers.
        """
        network = cnn(GREY, 10)
        first, second, third, fourth = [
            layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)
        ]
        normalize = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
        x = images(GREY)
        features = normalize(nn.functional.max_pool2d(torch.relu(first(x)), 2))
        features = nn.functional.max_pool2d(normalize(torch.relu(second(features))), 2)
        expected = fourth(torch.relu(third(features.flatten(1))))
        assert torch.allclose(network(x), expected, rtol=1e-4, atol=1e-4)


class TestStart:
    def test_initial_weights_and_biases(self) -> None:
        """Truncated normal weights, and biases of 0.1."""
        for name, parameter in cnn(GREY, 10).named_parameters():
            if name.endswith("bias"):
                assert (parameter == 0.1).all()
            else:
                assert parameter.abs().max() <= 0.2
        (weights, *_) = linear_layers(cnn(GREY, 10))
        # Normal distribution truncated at two deviations: √(1 - 4 φ(2) / (2 Φ(2) - 1)) =
        # 0.8796.
        assert weights.weight.std().item() == pytest.approx(0.08796, rel=0.01)
        assert weights.weight.mean().item() == pytest.approx(0, abs=0.001)

    def test_initial_weights_depend_on_seed(self) -> None:
        """The program's random state stays unchanged."""
        dataset = image_dataset((1, 8, 8))
        before = torch.random.get_rng_state()
        model = catalogue.build("cnn", dataset)
        first, again, other = (model.initial(seed) for seed in (1, 1, 2))
        assert torch.equal(torch.random.get_rng_state(), before)
        assert np.array_equal(first, again)
        assert (first != other).mean() > 0.9  # all but the biases
        assert np.array_equal(catalogue.build("cnn", dataset).initial(1), first)


def test_node_bits_independent_of_fleet() -> None:
    rng = np.random.default_rng(0)
    x, y = (
        rng.integers(0, 256, (60, 64), dtype=np.uint8),
        rng.integers(0, 10, 60).astype(np.float32),
    )
    table = Table(x, y, scale=1 / 255, shape=(1, 8, 8))
    model = TorchModel(lambda: cnn((1, 8, 8), 10))
    shards = Shards.of(table, [np.arange(20), np.arange(20, 40), np.arange(60)])
    w = model.initial(1)[None]

    def updates(own: Shards) -> Descent:
        return model.descend(w, own, Sampler(own.size, 7, seed=2).round(3), 0.05, best=w[0])

    together = updates(shards)
    for node in range(3):
        alone = updates(shards.only([node]))
        assert np.array_equal(alone.w[0], together.w[node])
        assert np.array_equal(alone.gradients[0], together.gradients[node])
        assert alone.losses[0] == together.losses[node]
