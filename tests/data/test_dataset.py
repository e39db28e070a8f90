"""Datasets: targets as models want them, standardisation by the training samples alone, and
what is held out.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from fedbudget import data
from fedbudget.data.dataset import Dataset, Part, Standardization, hold_out
from fedbudget.errors import UserError

FIVE = Part(
    np.arange(10, dtype=np.float32).reshape(5, 2),
    labels=np.array([0, 1, 2, 3, 1]),
    values=np.array([0.0, 10.0, 20.0, 30.0, 10.0]),
)
MANY = Dataset("many", FIVE, classes=("0", "10", "20", "30"))
TWO = Dataset("two", replace(FIVE, labels=np.array([0, 1, 1, 0, 1])), classes=("no", "yes"))


class TestTargets:
    def test_of_two_classes_the_second_is_plus_one(self) -> None:
        assert TWO.table(TWO.train, "binary").y.tolist() == [-1, 1, 1, -1, 1]

    def test_with_parity_even_class_numbers_are_plus_one(self) -> None:
        assert replace(MANY, parity=True).table(MANY.train, "binary").y.tolist() == [
            1,
            -1,
            1,
            -1,
            -1,
        ]

    def test_four_classes_without_parity_are_not_two(self) -> None:
        with pytest.raises(
            UserError, match="many has 4 classes; model svm needs two, softmax takes any"
        ):
            MANY.table(MANY.train, "binary")

    def test_classes_are_their_numbers(self) -> None:
        assert MANY.table(MANY.train, "classes").y.tolist() == [0, 1, 2, 3, 1]

    def test_real_targets_are_standardised_only_where_the_features_were(self) -> None:
        assert MANY.table(MANY.train, "real").y.tolist() == [0, 10, 20, 30, 10]
        how = Standardization(
            np.zeros(2), np.ones(2), target_mean=10.0, target_deviation=5.0
        )
        assert replace(MANY, standardization=how).table(MANY.train, "real").y.tolist() == [
            -2,
            0,
            2,
            4,
            0,
        ]

    def test_raw_targets_are_the_numbers_of_the_data_never_standardised(self) -> None:
        how = Standardization(
            np.zeros(2), np.ones(2), target_mean=10.0, target_deviation=5.0
        )
        assert replace(MANY, standardization=how).table(MANY.train, "raw").y.tolist() == [
            0,
            10,
            20,
            30,
            10,
        ]

    def test_raw_targets_are_class_numbers_where_classes_are_words(self) -> None:
        words = replace(TWO, train=replace(TWO.train, values=None))
        assert words.table(words.train, "raw").y.tolist() == [0, 1, 1, 0, 1]

    def test_no_target_is_zeros(self) -> None:
        assert MANY.table(MANY.train, "none").y.tolist() == [0, 0, 0, 0, 0]

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("real", "has no real-valued target"),
            ("binary", "has no classes"),
            ("classes", "has no classes"),
        ],
    )
    def test_what_the_data_does_not_have_is_refused(
        self, target: str, message: str
    ) -> None:
        bare = Dataset("bare", Part(FIVE.x))
        with pytest.raises(UserError, match=message):
            bare.table(bare.train, target)


class TestStandardization:
    def test_training_samples_get_mean_zero_and_deviation_one(self) -> None:
        part = Part(np.random.default_rng(1).normal(50.0, 7.0, (400, 3)))
        x = Standardization.of(part).apply(part).x.astype(np.float64)
        assert x.mean(axis=0) == pytest.approx(0, abs=1e-6)
        assert x.std(axis=0) == pytest.approx(1, abs=1e-6)

    def test_other_samples_are_moved_by_the_training_samples_mean_and_deviation(
        self,
    ) -> None:
        how = Standardization.of(Part(np.array([[1.0], [3.0]])))  # mean 2, deviation 1
        assert how.apply(Part(np.array([[2.0], [12.0]]))).x.ravel().tolist() == [0, 10]

    @pytest.mark.parametrize("constant", [0.0, 0.1, 123.456, 1e9 + 0.1])
    @pytest.mark.parametrize("samples", [1, 80, 1437])
    def test_a_column_that_never_changes_is_only_moved_to_zero(
        self, constant: float, samples: int
    ) -> None:
        """Its computed deviation may be next to 0 instead of 0; dividing by that would blow
        rounding up.
        """
        part = Part(np.full((samples, 2), constant))
        how = Standardization.of(part)
        assert how.deviation.tolist() == [1.0, 1.0]
        assert how.apply(part).x == pytest.approx(0, abs=1e-4)

    def test_the_target_is_brought_to_mean_zero_and_deviation_one_too(self) -> None:
        how = Standardization.of(FIVE)
        values = how.targets(np.array([0.0, 10.0, 20.0, 30.0, 10.0]))
        assert (values.mean(), values.std()) == pytest.approx((0, 1))


class TestHoldOut:
    @given(samples=st.integers(1, 300), share=st.floats(0, 1, exclude_max=True))
    def test_every_sample_is_on_one_side_and_training_is_never_empty(
        self, samples: int, share: float
    ) -> None:
        trained, tested = hold_out(samples, share)
        assert sorted([*trained.tolist(), *tested.tolist()]) == list(range(samples))
        assert len(trained) >= 1
        assert len(tested) <= samples * share < len(tested) + 1

    @pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
    def test_refuses_a_share_that_leaves_nothing_or_is_none(self, share: float) -> None:
        with pytest.raises(UserError, match="test_share must be at least 0 and below 1"):
            hold_out(5, share)


def test_parts_join_in_order_with_what_is_known_of_them() -> None:
    joined = Part.join([FIVE.rows(np.array([4, 0])), FIVE.rows(np.array([2]))])
    assert joined.x.tolist() == [[8, 9], [0, 1], [4, 5]]
    assert joined.labels is not None
    assert joined.values is not None
    assert joined.labels.tolist() == [1, 0, 2]
    assert joined.values.tolist() == [10, 0, 20]


def test_samples_without_classes_are_distributed_by_clusters_of_their_features() -> None:
    rng = np.random.default_rng(0)
    blobs = np.repeat(10.0 * np.eye(10), 20, axis=0) + rng.normal(0, 0.1, (200, 10))
    labels = Dataset("blobs", Part(blobs)).partition_labels(seed=0).reshape(10, 20)
    assert (labels == labels[:, :1]).all()
    assert len(np.unique(labels[:, 0])) > 5


def test_digits_are_scikit_learns_in_their_order_with_pixels_from_zero_to_one() -> None:
    known, dataset = load_digits(), data.load("digits")
    assert dataset.test is not None
    assert dataset.test.labels is not None
    assert dataset.train.labels is not None
    assert np.array_equal(np.concatenate([dataset.train.x, dataset.test.x]), known.data)
    assert np.array_equal(
        np.concatenate([dataset.train.labels, dataset.test.labels]), known.target
    )
    pixels = dataset.table(dataset.train, "binary").scaled(np.arange(len(dataset.train)))
    assert (pixels.min(), pixels.max()) == (0, 1)
