"""The sets of images: small ones made by hand, whole ones against the published counts, and
samples of them.
"""

import gzip
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget import data
from fedbudget.arrays import Int64
from fedbudget.data.dataset import Dataset, Part
from fedbudget.errors import UserError
from support.real_data import folder_with
from support.web import tar_of

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def pictures(count: int, first: int = 0) -> bytes:
    """Images of 28x28, the first all of one shade of grey, the second of the next."""
    pixels = b"".join(bytes([first + number]) * 784 for number in range(count))
    return struct.pack(">4I", 2051, count, 28, 28) + pixels


def labels(*numbers: int) -> bytes:
    return struct.pack(">2I", 2049, len(numbers)) + bytes(numbers)


def record(label: int, red: int = 0, green: int = 0, blue: int = 0) -> bytes:
    return (
        bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024
    )


SMALL = {
    TRAIN_IMAGES: pictures(3),
    TRAIN_LABELS: labels(4, 0, 9),
    TEST_IMAGES: pictures(2, first=254),
    TEST_LABELS: labels(1, 8),
}


def put(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """A folder of data with some files in one folder of a dataset; gives the folder of
    data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in contents.items():
        (folder / name).write_bytes(gzip.compress(each) if name.endswith(".gz") else each)
    return folder.parent


def known(part: Part | None) -> Int64:
    assert part is not None
    assert part.labels is not None
    return part.labels


def counts(part: Part | None) -> list[int]:
    return [int(count) for count in np.bincount(known(part))]


class TestMnist:
    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
    def test_images_are_rows_of_bytes_with_their_labels(
        self, tmp_path: Path, name: str
    ) -> None:
        found = data.load(name, data_dir=put(tmp_path / name, SMALL))
        assert found.test is not None
        assert found.train.x.dtype == np.uint8
        assert found.train.x.tolist() == [[0] * 784, [1] * 784, [2] * 784]
        assert found.test.x.tolist() == [[254] * 784, [255] * 784]
        assert known(found.train).tolist() == [4, 0, 9]
        assert known(found.test).tolist() == [1, 8]
        assert found.shape == (1, 28, 28)
        assert len(found.classes) == 10

    def test_white_is_one_and_black_is_zero_for_a_model(self, tmp_path: Path) -> None:
        found = data.load("mnist", data_dir=put(tmp_path / "mnist", SMALL))
        assert found.test is not None
        pixels = found.table(found.test, "classes").scaled(np.arange(2))
        assert pixels[1].tolist() == [1.0] * 784
        assert pixels[0, 0] == pytest.approx(254 / 255)

    def test_digits_are_even_or_odd_and_clothes_are_not(self, tmp_path: Path) -> None:
        digits = data.load("mnist", data_dir=put(tmp_path / "mnist", SMALL))
        assert digits.table(digits.train, "binary").y.tolist() == [1, 1, -1]
        clothes = data.load(
            "fashion-mnist", data_dir=put(tmp_path / "fashion-mnist", SMALL)
        )
        with pytest.raises(
            UserError, match="fashion-mnist has 10 classes; model svm needs two"
        ):
            clothes.table(clothes.train, "binary")

    def test_torchvisions_folder_and_zipped_files_will_do(self, tmp_path: Path) -> None:
        zipped = {f"{name}.gz": contents for name, contents in SMALL.items()}
        put(tmp_path / "MNIST/raw", zipped)
        assert known(data.load("mnist", data_dir=tmp_path).train).tolist() == [4, 0, 9]

    def test_a_note_says_how_much_of_it_is_here(self, tmp_path: Path) -> None:
        found = data.load("mnist", data_dir=put(tmp_path / "mnist", SMALL))
        assert found.note == "3 of 60,000 training samples, 2 of 10,000 test samples"

    @pytest.mark.parametrize("missing", [TEST_IMAGES, TEST_LABELS])
    def test_without_a_test_file_there_are_no_test_samples_and_a_note_says_so(
        self, tmp_path: Path, missing: str
    ) -> None:
        put(
            tmp_path / "mnist",
            {name: contents for name, contents in SMALL.items() if name != missing},
        )
        found = data.load("mnist", data_dir=tmp_path)
        assert found.test is None
        assert found.note == "3 of 60,000 training samples, no test samples"

    @pytest.mark.parametrize("missing", [TRAIN_IMAGES, TRAIN_LABELS])
    def test_without_a_training_file_the_error_says_what_to_do(
        self, tmp_path: Path, missing: str
    ) -> None:
        put(
            tmp_path / "mnist",
            {name: contents for name, contents in SMALL.items() if name != missing},
        )
        with pytest.raises(UserError) as error:
            data.load("mnist", data_dir=tmp_path)
        text = str(error.value)
        assert text.startswith(
            f"mnist: {TRAIN_IMAGES} or {TRAIN_LABELS} is missing in {tmp_path / 'mnist'}"
        )
        assert text.endswith("; run fedbudget data get mnist")
        assert "\n" not in text

    def test_more_images_than_labels_are_refused_with_both_counts(
        self, tmp_path: Path
    ) -> None:
        put(tmp_path / "mnist", {**SMALL, TRAIN_LABELS: labels(4, 0)})
        with pytest.raises(
            UserError, match=rf"{TRAIN_IMAGES} has 3 images, but .*{TRAIN_LABELS} 2 labels"
        ):
            data.load("mnist", data_dir=tmp_path)

    @pytest.mark.parametrize("label", [10, 255])
    def test_a_label_that_is_no_class_is_refused(self, tmp_path: Path, label: int) -> None:
        put(tmp_path / "mnist", {**SMALL, TEST_LABELS: labels(0, label)})
        with pytest.raises(
            UserError, match=rf"{TEST_LABELS} has label {label}, but classes go from 0 to 9"
        ):
            data.load("mnist", data_dir=tmp_path)

    @pytest.mark.parametrize(
        ("name", "most"),
        [
            (TRAIN_LABELS, 60_000),
            (TEST_LABELS, 10_000),
            (TRAIN_IMAGES, 60_000),
            (TEST_IMAGES, 10_000),
        ],
    )
    def test_more_samples_than_were_published_are_refused(
        self, tmp_path: Path, name: str, most: int
    ) -> None:
        contents = bytearray(SMALL[name])
        contents[4:8] = struct.pack(">I", most + 1)
        put(tmp_path / "mnist", {**SMALL, name: bytes(contents)})
        with pytest.raises(
            UserError, match=rf"claims to hold {most + 1}.* expected at most {most}"
        ):
            data.load("mnist", data_dir=tmp_path)


class TestCifar:
    ONE = record(0, 1, 2, 3) + record(9, 4, 5, 6)
    TWO = record(5, 7, 8, 9)
    TEST = record(1, 255, 255, 255)

    def test_batches_are_joined_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        put(
            tmp_path / "cifar-10",
            {"data_batch_4.bin": self.TWO, "data_batch_1.bin.gz": self.ONE},
        )
        found = data.load("cifar-10", data_dir=tmp_path)
        assert known(found.train).tolist() == [0, 9, 5]
        assert found.train.x.reshape(3, *found.shape)[:, :, 31, 0].tolist() == [
            [1, 2, 3],
            [4, 5, 6],
            [7, 8, 9],
        ]
        assert found.test is None
        assert found.note == "3 of 50,000 training samples, no test samples"

    def test_an_archive_holds_all_of_it(self, tmp_path: Path) -> None:
        members = {
            f"cifar-10-batches-bin/data_batch_{number}.bin": record(number)
            for number in range(5, 0, -1)
        }
        members["cifar-10-batches-bin/test_batch.bin"] = self.TEST
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_of(members))
        found = data.load("cifar-10", data_dir=tmp_path)
        assert found.test is not None
        assert known(found.train).tolist() == [1, 2, 3, 4, 5]
        assert found.test.x.tolist() == [[255] * 3072]
        assert found.classes[1] == "automobile"

    def test_test_samples_alone_are_not_enough(self, tmp_path: Path) -> None:
        put(tmp_path / "cifar-10", {"test_batch.bin": self.TEST})
        with pytest.raises(
            UserError,
            match=r"of its files only test_batch\.bin is here; a data_batch_N\.bin is needed",
        ):
            data.load("cifar-10", data_dir=tmp_path)

    def test_a_label_that_is_no_class_is_refused(self, tmp_path: Path) -> None:
        put(tmp_path / "cifar-10", {"data_batch_2.bin": self.ONE + record(10)})
        with pytest.raises(
            UserError, match=r"data_batch_2\.bin has label 10, but classes go from 0 to 9"
        ):
            data.load("cifar-10", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar-10"])
def test_a_dataset_that_is_nowhere_is_refused_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
    with pytest.raises(UserError) as error:
        data.load(name, data_dir=tmp_path / "option")
    assert all(
        str(tmp_path / place) in str(error.value)
        for place in ("option", "variable", "cache")
    )
    assert str(error.value).endswith(f"download it with: fedbudget data get {name}")


class TestAsPublished:
    def test_mnist_has_its_published_counts(self) -> None:
        found = data.load("mnist", data_dir=folder_with("mnist"))
        assert counts(found.train) == [
            5923,
            6742,
            5958,
            6131,
            5842,
            5421,
            5918,
            6265,
            5851,
            5949,
        ]
        assert counts(found.test) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        assert found.test is not None
        even = [
            (found.table(part, "binary").y == 1).sum() for part in (found.train, found.test)
        ]
        assert even == [29_492, 4_926]
        assert found.note == ""
        assert known(found.train)[:10].tolist() == [
            5,
            0,
            4,
            1,
            9,
            2,
            1,
            3,
            1,
            4,
        ]  # as everybody has seen them drawn

    def test_fashion_mnist_has_as_many_of_each_class(self) -> None:
        found = data.load("fashion-mnist", data_dir=folder_with("fashion-mnist"))
        assert (counts(found.train), counts(found.test)) == ([6000] * 10, [1000] * 10)
        assert found.note == ""
        assert found.classes[known(found.train)[0]] == "Ankle boot"

    def test_cifar_10_has_the_counts_of_the_batches_that_are_here(self) -> None:
        folder = folder_with("cifar-10")
        batches = [
            [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981],
            [984, 1007, 1010, 995, 1010, 988, 1008, 1026, 987, 985],
        ]
        found = data.load("cifar-10", data_dir=folder)
        if len(found.train) == 50_000:
            assert found.note == ""
        else:
            assert found.note == f"{len(found.train):,} of 50,000 training samples"
            assert len(found.train) >= 20_000
        by_batch = [
            np.bincount(known(found.train)[at : at + 10_000]).tolist() for at in (0, 10_000)
        ]
        assert by_batch == batches
        assert counts(found.test) == [1000] * 10


EVERY = Dataset(
    "many",
    Part(
        np.arange(40, dtype=np.uint8)[:, None], labels=np.arange(40), values=np.arange(40.0)
    ),
    Part(np.arange(100, 120, dtype=np.uint8)[:, None], labels=np.arange(100, 120)),
    shape=(1,),
    files=(10, 30),
)


class TestSample:
    @given(train=st.integers(1, 40), test=st.integers(1, 20), seed=st.integers(0, 2**32))
    def test_takes_so_many_without_taking_one_twice(
        self, train: int, test: int, seed: int
    ) -> None:
        found = EVERY.sample(train, test, seed)
        assert found.test is not None
        assert (len(found.train), len(found.test)) == (train, test)
        for part, every in ((found.train, EVERY.train), (found.test, EVERY.test)):
            assert every is not None
            assert len(set(known(part).tolist())) == len(part)
            assert set(known(part).tolist()) <= set(known(every).tolist())
            assert part.x[:, 0].tolist() == known(part).tolist()  # each with its own label
        assert found.train.values is not None
        assert found.train.values.tolist() == known(found.train).tolist()

    def test_is_the_same_for_the_same_seed_and_another_for_another(self) -> None:
        first, again, other = (
            known(EVERY.sample(20, 10, seed).train).tolist() for seed in (1, 1, 2)
        )
        assert first == again
        assert first != other
        tests = [known(EVERY.sample(20, 10, seed).test).tolist() for seed in (1, 1, 2)]
        assert tests[0] == tests[1] != tests[2]

    def test_every_sample_is_taken_as_often_as_another(self) -> None:
        """Of 800 samples of 10 of 40, each is in about 200, with a deviation of √(800 · ¼ ·
        ¾) ≈ 12.
        """
        taken = np.concatenate(
            [known(EVERY.sample(10, None, seed).train) for seed in range(800)]
        )
        assert np.abs(np.bincount(taken, minlength=40) - 200).max() < 5 * 12.25

    def test_none_is_all(self) -> None:
        found = EVERY.sample(None, None, 3)
        assert found == EVERY
        assert EVERY.sample(None, 5, 3).train is EVERY.train
        assert EVERY.sample(None, 5, 3).files == (10, 30)
        assert EVERY.sample(5, None, 3).test is EVERY.test

    def test_of_files_nothing_is_known_any_more(self) -> None:
        assert EVERY.sample(20, None, 0).files == ()

    def test_without_test_samples_there_are_none_to_take(self) -> None:
        assert replace(EVERY, test=None).sample(5, 5, 0).test is None

    @pytest.mark.parametrize(
        ("train", "test", "message"),
        [
            (41, None, "41 training samples of many were requested; there are 40"),
            (0, None, "0 training samples of many were requested"),
            (None, 21, "21 test samples of many were requested; there are 20"),
            (-1, 3, "-1 training samples of many were requested"),
        ],
    )
    def test_refuses_more_than_there_are(
        self, train: int | None, test: int | None, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            EVERY.sample(train, test, 0)
