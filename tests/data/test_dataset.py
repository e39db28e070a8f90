"""Datasets: targets for each kind of model, standardization by training samples, held-out
and sampled parts.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from fedbudget import data
from fedbudget.arrays import Int64
from fedbudget.data.dataset import Dataset, Part, Standardization, hold_out
from fedbudget.errors import UserError

FIVE = Part(
    np.arange(10, dtype=np.float32).reshape(5, 2),
    labels=np.array([0, 1, 2, 3, 1]),
    values=np.array([0.0, 10.0, 20.0, 30.0, 10.0]),
)
MANY = Dataset("many", FIVE, classes=("0", "10", "20", "30"))
TWO = Dataset("two", replace(FIVE, labels=np.array([0, 1, 1, 0, 1])), classes=("no", "yes"))


STANDARDISED = replace(
    MANY,
    standardization=Standardization(
        np.zeros(2), np.ones(2), target_mean=10.0, target_deviation=5.0
    ),
)
TEXT = replace(TWO, train=replace(TWO.train, values=None))


class TestTargets:
    @pytest.mark.parametrize(
        ("dataset", "target", "expected"),
        [
            (TWO, "binary", [-1, 1, 1, -1, 1]),  # the second class is +1
            (replace(MANY, parity=True), "binary", [1, -1, 1, -1, -1]),  # even is +1
            (MANY, "classes", [0, 1, 2, 3, 1]),
            (MANY, "real", [0, 10, 20, 30, 10]),
            (STANDARDISED, "real", [-2, 0, 2, 4, 0]),
            (STANDARDISED, "raw", [0, 10, 20, 30, 10]),
            (TEXT, "raw", [0, 1, 1, 0, 1]),  # class numbers
            (MANY, "none", [0, 0, 0, 0, 0]),
        ],
    )
    def test_targets(self, dataset: Dataset, target: str, expected: list[float]) -> None:
        assert dataset.table(dataset.train, target).y.tolist() == expected

    def test_binary_target_needs_two_classes(self) -> None:
        message = "many has 4 classes; model svm needs two, softmax takes any"
        with pytest.raises(UserError, match=message):
            MANY.table(MANY.train, "binary")

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("real", "has no real-valued target"),
            ("binary", "has no classes"),
            ("classes", "has no classes"),
        ],
    )
    def test_missing_target_is_rejected(self, target: str, message: str) -> None:
        bare = Dataset("bare", Part(FIVE.x))
        with pytest.raises(UserError, match=message):
            bare.table(bare.train, target)


class TestStandardization:
    def test_training_moments_are_normalized(self) -> None:
        part = Part(np.random.default_rng(1).normal(50.0, 7.0, (400, 3)))
        x = Standardization.of(part).apply(part).x.astype(np.float64)
        assert x.mean(axis=0) == pytest.approx(0, abs=1e-6)
        assert x.std(axis=0) == pytest.approx(1, abs=1e-6)

    def test_other_samples_use_training_moments(self) -> None:
        scaling = Standardization.of(Part(np.array([[1.0], [3.0]])))  # mean 2, deviation 1
        assert scaling.apply(Part(np.array([[2.0], [12.0]]))).x.ravel().tolist() == [0, 10]

    @pytest.mark.parametrize("constant", [0.0, 0.1, 123.456, 1e9 + 0.1])
    @pytest.mark.parametrize("samples", [1, 80, 1437])
    def test_constant_column_becomes_zero(self, constant: float, samples: int) -> None:
        """The computed deviation may be close to 0 instead of 0; division by it would
        amplify rounding.
        """
        part = Part(np.full((samples, 2), constant))
        scaling = Standardization.of(part)
        assert scaling.deviation.tolist() == [1.0, 1.0]
        assert scaling.apply(part).x == pytest.approx(0, abs=1e-4)

    def test_target_is_standardised(self) -> None:
        scaling = Standardization.of(FIVE)
        values = scaling.targets(np.array([0.0, 10.0, 20.0, 30.0, 10.0]))
        assert (values.mean(), values.std()) == pytest.approx((0, 1))


class TestHoldOut:
    @given(samples=st.integers(1, 300), share=st.floats(0, 1, exclude_max=True))
    def test_split_is_complete(self, samples: int, share: float) -> None:
        """The training part is never empty."""
        trained, tested = hold_out(samples, share)
        assert sorted([*trained.tolist(), *tested.tolist()]) == list(range(samples))
        assert len(trained) >= 1
        assert len(tested) <= samples * share < len(tested) + 1

    def test_seed_draws_other_rows(self) -> None:
        first, again, other = (hold_out(50, 0.2, seed)[1].tolist() for seed in (0, 0, 1))
        assert first == again
        assert first != other
        assert hold_out(50, 0.2)[1].tolist() == first

    @pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
    def test_invalid_share_is_rejected(self, share: float) -> None:
        with pytest.raises(UserError, match="test_share must be at least 0 and below 1"):
            hold_out(5, share)


def test_joined_parts_keep_order() -> None:
    joined = Part.join([FIVE.rows(np.array([4, 0])), FIVE.rows(np.array([2]))])
    assert joined.x.tolist() == [[8, 9], [0, 1], [4, 5]]
    assert joined.labels is not None
    assert joined.values is not None
    assert joined.labels.tolist() == [1, 0, 2]
    assert joined.values.tolist() == [10, 0, 20]


def test_unlabelled_samples_are_clustered() -> None:
    rng = np.random.default_rng(0)
    blobs = np.repeat(10.0 * np.eye(10), 20, axis=0) + rng.normal(0, 0.1, (200, 10))
    labels = Dataset("blobs", Part(blobs)).partition_labels(seed=0).reshape(10, 20)
    assert (labels == labels[:, :1]).all()
    assert len(np.unique(labels[:, 0])) > 5


def test_digits_match_scikit_learn() -> None:
    """In the original order, with pixels from 0 to 1."""
    original = load_digits()
    dataset = data.load("digits")
    assert dataset.test is not None
    assert dataset.test.labels is not None
    assert dataset.train.labels is not None
    assert np.array_equal(np.concatenate([dataset.train.x, dataset.test.x]), original.data)
    assert np.array_equal(
        np.concatenate([dataset.train.labels, dataset.test.labels]), original.target
    )
    pixels = dataset.table(dataset.train, "binary").scaled(np.arange(len(dataset.train)))
    assert (pixels.min(), pixels.max()) == (0, 1)


FORTY = Dataset(
    "many",
    Part(
        np.arange(40, dtype=np.uint8)[:, None], labels=np.arange(40), values=np.arange(40.0)
    ),
    Part(np.arange(100, 120, dtype=np.uint8)[:, None], labels=np.arange(100, 120)),
    shape=(1,),
    files=(10, 30),
)


def labels_of(part: Part | None) -> Int64:
    assert part is not None
    assert part.labels is not None
    return part.labels


class TestSample:
    @given(train=st.integers(1, 40), test=st.integers(1, 20), seed=st.integers(0, 2**32))
    def test_no_sample_is_drawn_twice(self, train: int, test: int, seed: int) -> None:
        result = FORTY.sample(train, test, seed)
        assert result.test is not None
        assert (len(result.train), len(result.test)) == (train, test)
        for part, every in ((result.train, FORTY.train), (result.test, FORTY.test)):
            assert every is not None
            assert len(set(labels_of(part).tolist())) == len(part)
            assert set(labels_of(part).tolist()) <= set(labels_of(every).tolist())
            assert (
                part.x[:, 0].tolist() == labels_of(part).tolist()
            )  # still paired with its label
        assert result.train.values is not None
        assert result.train.values.tolist() == labels_of(result.train).tolist()

    def test_sample_depends_on_seed(self) -> None:
        first, again, other = (
            labels_of(FORTY.sample(20, 10, seed).train).tolist() for seed in (1, 1, 2)
        )
        assert first == again
        assert first != other
        tests = [labels_of(FORTY.sample(20, 10, seed).test).tolist() for seed in (1, 1, 2)]
        assert tests[0] == tests[1] != tests[2]

    def test_sampling_is_uniform(self) -> None:
        """800 draws of 10 of 40: each sample about 200 times, with a deviation of √(800 · ¼
        · ¾) ≈ 12.
        """
        taken = np.concatenate(
            [labels_of(FORTY.sample(10, None, seed).train) for seed in range(800)]
        )
        assert np.abs(np.bincount(taken, minlength=40) - 200).max() < 5 * 12.25

    def test_none_keeps_all_samples(self) -> None:
        result = FORTY.sample(None, None, 3)
        assert result == FORTY
        assert FORTY.sample(None, 5, 3).train is FORTY.train
        assert FORTY.sample(None, 5, 3).files == (10, 30)
        assert FORTY.sample(5, None, 3).test is FORTY.test

    def test_files_keep_their_samples(self) -> None:
        """The first ten samples are those of the first file."""
        result = FORTY.sample(20, None, 0)
        first = int(np.isin(labels_of(result.train), labels_of(FORTY.train)[:10]).sum())
        assert result.files == (first, 20 - first)
        assert 0 < first < 10

    def test_test_files_keep_their_samples(self) -> None:
        split = replace(FORTY, test_files=(5, len(FORTY.test or ()) - 5))
        result = split.sample(None, 10, 0)
        assert result.test is not None
        assert FORTY.test is not None
        own = labels_of(FORTY.test)[:5]
        first = int(np.isin(labels_of(result.test), own).sum())
        assert result.test_files == (first, 10 - first)
        assert split.sample(None, None, 0).test_files == split.test_files

    def test_dataset_without_test_samples(self) -> None:
        assert replace(FORTY, test=None).sample(5, 5, 0).test is None

    @pytest.mark.parametrize(
        ("train", "test", "message"),
        [
            (41, None, "41 training samples of many were requested; there are 40"),
            (0, None, "0 training samples of many were requested"),
            (None, 21, "21 test samples of many were requested; there are 20"),
            (-1, 3, "-1 training samples of many were requested"),
        ],
    )
    def test_invalid_counts_are_rejected(
        self, train: int | None, test: int | None, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            FORTY.sample(train, test, 0)
