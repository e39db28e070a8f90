"""Built-in datasets: hand-written files, the published counts of real ones, and the small
tables of scikit-learn.
"""

import gzip
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets

from fedbudget import data
from fedbudget.arrays import Int64
from fedbudget.data.dataset import Dataset, Part
from fedbudget.errors import UserError
from support.real_data import folder_with
from support.web import tar_of

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def pictures(count: int, first: int = 0) -> bytes:
    """Images of 28x28, each of one shade of grey, one brighter than the previous."""
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
    """Write files into a dataset's folder and return its parent."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in contents.items():
        (folder / name).write_bytes(gzip.compress(each) if name.endswith(".gz") else each)
    return folder.parent


def labels_of(part: Part | None) -> Int64:
    assert part is not None
    assert part.labels is not None
    return part.labels


def counts(part: Part | None) -> list[int]:
    return [int(count) for count in np.bincount(labels_of(part))]


def load_mnist(folder: Path, changes: Mapping[str, bytes | None] | None = None) -> Dataset:
    """Load a small MNIST with other contents of some files; None removes a file."""
    files = {name: each for name, each in {**SMALL, **(changes or {})}.items() if each}
    return data.load("mnist", data_dir=put(folder / "mnist", files))


class TestMnist:
    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
    def test_images_and_labels(self, tmp_path: Path, name: str) -> None:
        result = data.load(name, data_dir=put(tmp_path / name, SMALL))
        assert result.test is not None
        assert result.train.x.dtype == np.uint8
        assert result.train.x.tolist() == [[0] * 784, [1] * 784, [2] * 784]
        assert result.test.x.tolist() == [[254] * 784, [255] * 784]
        assert labels_of(result.train).tolist() == [4, 0, 9]
        assert labels_of(result.test).tolist() == [1, 8]
        assert result.shape == (1, 28, 28)
        assert len(result.classes) == 10
        assert result.note == "3 of 60,000 training samples, 2 of 10,000 test samples"

    def test_pixels_are_scaled(self, tmp_path: Path) -> None:
        result = load_mnist(tmp_path)
        assert result.test is not None
        pixels = result.table(result.test, "classes").scaled(np.arange(2))
        assert pixels[1].tolist() == [1.0] * 784
        assert pixels[0, 0] == pytest.approx(254 / 255)

    def test_parity_of_digits_only(self, tmp_path: Path) -> None:
        digits = load_mnist(tmp_path)
        assert digits.table(digits.train, "binary").y.tolist() == [1, 1, -1]
        clothes = data.load(
            "fashion-mnist", data_dir=put(tmp_path / "fashion-mnist", SMALL)
        )
        message = "fashion-mnist has 10 classes; model svm needs two"
        with pytest.raises(UserError, match=message):
            clothes.table(clothes.train, "binary")

    def test_torchvision_folder_and_zipped_files(self, tmp_path: Path) -> None:
        zipped = {f"{name}.gz": contents for name, contents in SMALL.items()}
        put(tmp_path / "MNIST/raw", zipped)
        assert labels_of(data.load("mnist", data_dir=tmp_path).train).tolist() == [4, 0, 9]

    @pytest.mark.parametrize("missing", [TEST_IMAGES, TEST_LABELS])
    def test_missing_test_file_is_noted(self, tmp_path: Path, missing: str) -> None:
        result = load_mnist(tmp_path, {missing: None})
        assert result.test is None
        assert result.note == "3 of 60,000 training samples, no test samples"

    @pytest.mark.parametrize("missing", [TRAIN_IMAGES, TRAIN_LABELS])
    def test_missing_training_file_names_command(
        self, tmp_path: Path, missing: str
    ) -> None:
        with pytest.raises(UserError) as error:
            load_mnist(tmp_path, {missing: None})
        text = str(error.value)
        assert text.startswith(
            f"mnist: {TRAIN_IMAGES} or {TRAIN_LABELS} is missing in {tmp_path / 'mnist'}"
        )
        assert text.endswith("; run fedbudget data get mnist")
        assert "\n" not in text

    def test_image_and_label_counts_differ(self, tmp_path: Path) -> None:
        message = rf"{TRAIN_IMAGES} has 3 images, but .*{TRAIN_LABELS} 2 labels"
        with pytest.raises(UserError, match=message):
            load_mnist(tmp_path, {TRAIN_LABELS: labels(4, 0)})

    @pytest.mark.parametrize("label", [10, 255])
    def test_invalid_label_is_rejected(self, tmp_path: Path, label: int) -> None:
        message = rf"{TEST_LABELS} has label {label}, but classes go from 0 to 9"
        with pytest.raises(UserError, match=message):
            load_mnist(tmp_path, {TEST_LABELS: labels(0, label)})

    @pytest.mark.parametrize(
        ("name", "most"),
        [
            (TRAIN_LABELS, 60_000),
            (TEST_LABELS, 10_000),
            (TRAIN_IMAGES, 60_000),
            (TEST_IMAGES, 10_000),
        ],
    )
    def test_too_many_samples_are_rejected(
        self, tmp_path: Path, name: str, most: int
    ) -> None:
        contents = bytearray(SMALL[name])
        contents[4:8] = struct.pack(">I", most + 1)
        message = rf"claims to hold {most + 1}.* expected at most {most}"
        with pytest.raises(UserError, match=message):
            load_mnist(tmp_path, {name: bytes(contents)})


class TestCifar:
    ONE = record(0, 1, 2, 3) + record(9, 4, 5, 6)
    TWO = record(5, 7, 8, 9)
    TEST = record(1, 255, 255, 255)

    def test_batches_are_joined_in_order(self, tmp_path: Path) -> None:
        put(
            tmp_path / "cifar-10",
            {"data_batch_4.bin": self.TWO, "data_batch_1.bin.gz": self.ONE},
        )
        result = data.load("cifar-10", data_dir=tmp_path)
        assert labels_of(result.train).tolist() == [0, 9, 5]
        expected = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        assert result.train.x.reshape(3, *result.shape)[:, :, 31, 0].tolist() == expected
        assert result.test is None
        assert result.note == "3 of 50,000 training samples, no test samples"

    def test_archive(self, tmp_path: Path) -> None:
        members = {
            f"cifar-10-batches-bin/data_batch_{number}.bin": record(number)
            for number in range(5, 0, -1)
        }
        members["cifar-10-batches-bin/test_batch.bin"] = self.TEST
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_of(members))
        result = data.load("cifar-10", data_dir=tmp_path)
        assert result.test is not None
        assert labels_of(result.train).tolist() == [1, 2, 3, 4, 5]
        assert result.test.x.tolist() == [[255] * 3072]
        assert result.classes[1] == "automobile"

    def test_training_batch_is_needed(self, tmp_path: Path) -> None:
        put(tmp_path / "cifar-10", {"test_batch.bin": self.TEST})
        with pytest.raises(
            UserError,
            match=r"of its files only test_batch\.bin is here; a data_batch_N\.bin is "
            r"needed",
        ):
            data.load("cifar-10", data_dir=tmp_path)

    def test_invalid_label_is_rejected(self, tmp_path: Path) -> None:
        put(tmp_path / "cifar-10", {"data_batch_2.bin": self.ONE + record(10)})
        message = r"data_batch_2\.bin has label 10, but classes go from 0 to 9"
        with pytest.raises(UserError, match=message):
            data.load("cifar-10", data_dir=tmp_path)


@pytest.mark.parametrize(
    "name", ["mnist", "fashion-mnist", "cifar-10", "energy", "user-knowledge"]
)
def test_missing_dataset_lists_searched_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
    with pytest.raises(UserError) as error:
        data.load(name, data_dir=tmp_path / "option")
    assert all(
        str(tmp_path / folder) in str(error.value)
        for folder in ("option", "variable", "cache")
    )
    assert str(error.value).endswith(f"download it with: fedbudget data get {name}")


class TestPublishedCounts:
    def test_mnist(self) -> None:
        result = data.load("mnist", data_dir=folder_with("mnist"))
        expected = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert counts(result.train) == expected
        assert counts(result.test) == [
            980,
            1135,
            1032,
            1010,
            982,
            892,
            958,
            1028,
            974,
            1009,
        ]
        assert result.test is not None
        even = [
            (result.table(part, "binary").y == 1).sum()
            for part in (result.train, result.test)
        ]
        assert even == [29_492, 4_926]
        assert result.note == ""
        assert labels_of(result.train)[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]

    def test_fashion_mnist(self) -> None:
        result = data.load("fashion-mnist", data_dir=folder_with("fashion-mnist"))
        assert (counts(result.train), counts(result.test)) == ([6000] * 10, [1000] * 10)
        assert result.note == ""
        assert result.classes[labels_of(result.train)[0]] == "Ankle boot"

    def test_cifar_10_batches(self) -> None:
        folder = folder_with("cifar-10")
        batches = [
            [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981],
            [984, 1007, 1010, 995, 1010, 988, 1008, 1026, 987, 985],
        ]
        result = data.load("cifar-10", data_dir=folder)
        if len(result.train) == 50_000:
            assert result.note == ""
        else:
            assert result.note == f"{len(result.train):,} of 50,000 training samples"
            assert len(result.train) >= 20_000
        by_batch = [
            np.bincount(labels_of(result.train)[at : at + 10_000]).tolist()
            for at in (0, 10_000)
        ]
        assert by_batch == batches
        assert counts(result.test) == [1000] * 10


# As published: every field in quotes, numbers padded with blanks, lines that end in CR LF.
ENERGY = (
    '"date","Appliances","lights","T1"\r\n'
    '"2016-01-11 17:00:00","60","30","19.89"\r\n'
    '"2016-01-11 17:10:00"," 40","  0"," 17.89"\r\n'
    '"2016-01-11 17:20:00","140"," 30","18.89"\r\n'
)
KNOWLEDGE = (
    "STG,SCG,UNS\n0,0.5,very_low\n0.25,1,High\n1,0,Low\n0.5,0.5,Middle\n0,0,Very Low\n"
)


def energy(folder: Path, text: str = ENERGY, *, zipped: bool = False) -> Dataset:
    (folder / "energy").mkdir()
    contents = text.encode()
    path = (
        folder
        / "energy"
        / ("energydata_complete.csv.gz" if zipped else "energydata_complete.csv")
    )
    path.write_bytes(gzip.compress(contents) if zipped else contents)
    return data.load("energy", data_dir=folder)


def knowledge(folder: Path, text: str | bytes) -> Dataset:
    (folder / "user-knowledge").mkdir()
    (folder / "user-knowledge/user_knowledge.csv").write_bytes(
        text.encode() if isinstance(text, str) else text
    )
    return data.load("user-knowledge", data_dir=folder)


class TestEnergy:
    @pytest.mark.parametrize("zipped", [False, True])
    def test_energy_number_formats(self, tmp_path: Path, zipped: bool) -> None:
        result = energy(tmp_path, zipped=zipped)
        # lights 30, 0, 30: mean 20, deviation √200
        # T1 19.89, 17.89, 18.89: mean 18.89, deviation √(2/3)
        expected = [
            [10 / 200**0.5, 1.5**0.5],
            [-20 / 200**0.5, -(1.5**0.5)],
            [10 / 200**0.5, 0],
        ]
        assert result.train.x == pytest.approx(np.array(expected), abs=1e-6)

    def test_energy_target_units(self, tmp_path: Path) -> None:
        """The target is stored in Wh, and standardised for a model."""
        result = energy(tmp_path)
        assert result.train.values is not None
        assert result.train.values.tolist() == [60, 40, 140]
        assert (result.classes, result.test, result.train.labels) == ((), None, None)
        deviation = ((20**2 + 40**2 + 60**2) / 3) ** 0.5  # about the mean, 80
        expected = np.array([-20, -40, 60]) / deviation
        assert result.table(result.train, "real").y == pytest.approx(expected, rel=1e-6)
        assert result.standardization is not None
        assert result.standardization.target_mean == 80
        assert result.standardization.target_deviation == pytest.approx(deviation)

    def test_quotes_are_optional(self, tmp_path: Path) -> None:
        (tmp_path / "quoted").mkdir()
        plain = energy(tmp_path, ENERGY.replace('"', "").replace("\r\n", "\n"))
        assert np.array_equal(plain.train.x, energy(tmp_path / "quoted").train.x)

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            (
                '"Appliances"',
                '"Washing"',
                "has no column 'Appliances'; it has date, Washing, lights, T1",
            ),
            (
                '"19.89"',
                '"warm"',
                "T1 has numbers, but not in 1 of 3 rows, such as 'warm' in row 2",
            ),
            ('"19.89"', '"nan"', "T1 has no value in 1 of 3 rows, such as row 2"),
            (
                '" 40"',
                '"   "',
                "Appliances, the target, has no value in 1 of 3 rows, such as row 3",
            ),
            ('" 40"', '"little"', "energy: Appliances must be numbers"),
            (
                '" 40"',
                '"inf"',
                "Appliances, the target, is not finite in 1 row \\(row 3\\)",
            ),
            (
                ',"18.89"',
                "",
                "1 row does not have the header's 4 fields, such as row 4 with 3",
            ),
        ],
    )
    def test_errors_name_row_and_column(
        self, tmp_path: Path, before: str, after: str, message: str
    ) -> None:
        assert ENERGY.count(before) == 1
        with pytest.raises(UserError, match=message):
            energy(tmp_path, ENERGY.replace(before, after))

    def test_oversized_file_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="is larger than the expected 50000000 bytes"):
            energy(tmp_path, ENERGY + " " * 60_000_000, zipped=True)

    def test_published_energy_figures(self) -> None:
        result = data.load("energy", data_dir=folder_with("energy"))
        assert result.train.x.shape == (19_735, 27)
        x = result.train.x.astype(np.float64)
        assert x.mean(axis=0) == pytest.approx(0, abs=1e-5)
        assert x.std(axis=0) == pytest.approx(1, abs=1e-5)
        scaling = result.standardization
        assert scaling is not None
        expected = (97.69, 102.52)
        assert (
            round(scaling.target_mean, 2),
            round(scaling.target_deviation, 2),
        ) == expected
        y = result.table(result.train, "real").y.astype(np.float64)
        assert (y.mean(), y.std()) == pytest.approx((0, 1), abs=1e-5)
        values = result.train.values
        assert values is not None
        assert [
            float(each) for each in (values.min(), np.median(values), values.max())
        ] == [10, 60, 1080]


class TestUserKnowledge:
    def test_levels_are_ordered(self, tmp_path: Path) -> None:
        """For any spelling of a level."""
        result = knowledge(tmp_path, KNOWLEDGE)
        assert result.train.labels is not None
        assert result.train.labels.tolist() == [0, 3, 1, 2, 0]
        assert result.classes == ("very_low", "Low", "Middle", "High")
        assert result.train.x.tolist() == [[0, 0.5], [0.25, 1], [1, 0], [0.5, 0.5], [0, 0]]

    @pytest.mark.parametrize("level", ["Higher", "3", "very-low"])
    def test_unknown_level_is_rejected(self, tmp_path: Path, level: str) -> None:
        message = f"class '{level.lower()}' is not one of very_low, low, middle, high"
        with pytest.raises(UserError, match=message):
            knowledge(tmp_path, KNOWLEDGE.replace("Middle", level))

    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            (b"", "needs a header line"),
            (b"STG,UNS\n", "has a header but no rows"),
            (
                b"STG,UNS\n\xff\xfe,High\n",
                "cannot be read: 'utf-8' codec can't decode byte 0xff",
            ),
            (
                b"STG,UNS\n" + b"1" * 200_000 + b",High\n",
                "cannot be read: field larger than field limit",
            ),
        ],
    )
    def test_invalid_table_is_rejected(
        self, tmp_path: Path, contents: bytes, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            knowledge(tmp_path, contents)

    def test_published_knowledge_counts(self) -> None:
        result = data.load("user-knowledge", data_dir=folder_with("user-knowledge"))
        assert result.train.labels is not None
        assert np.bincount(result.train.labels).tolist() == [50, 129, 122, 102]
        assert result.train.x.shape == (403, 5)
        assert (result.train.x.min(), result.train.x.max()) == (0, np.float32(0.99))
        assert result.test is None


@pytest.mark.parametrize(
    ("name", "original"),
    [("breast-cancer", "breast_cancer"), ("diabetes", "diabetes"), ("wine", "wine")],
)
def test_tables_match_scikit_learn(name: str, original: str) -> None:
    """Every row appears once, in training or test, standardised by the training rows."""
    result, published = data.load(name), getattr(datasets, f"load_{original}")()
    assert result.test is not None
    assert result.standardization is not None
    assert len(result.test) == len(published.data) // 5
    np.testing.assert_allclose(result.train.x.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(result.train.x.std(axis=0), 1, atol=1e-5)
    scaling = result.standardization
    x = np.concatenate([result.train.x, result.test.x]) * scaling.deviation + scaling.mean
    assert result.train.values is not None
    assert result.test.values is not None
    y = np.concatenate([result.train.values, result.test.values])
    ours, theirs = (
        np.column_stack([x, y]),
        np.column_stack([published.data, published.target]),
    )
    np.testing.assert_allclose(
        np.sort(ours, axis=0), np.sort(theirs, axis=0), rtol=1e-4, atol=1e-3
    )
    np.testing.assert_allclose(
        np.sort(ours.sum(axis=1)), np.sort(theirs.sum(axis=1)), rtol=1e-4, atol=1e-2
    )


def write_tiled_images(folder: Path, stem: str, count: int) -> None:
    """Images of repeated 2x2 blocks of 0, 10, 20 and 30, with the image number in the first
    pixel.
    """
    block = np.tile(np.array([[0, 10], [20, 30]], np.uint8), (14, 14))
    pixels = np.repeat(block[None], count, axis=0)
    pixels[:, 0, 0] = np.arange(count) % 200
    (folder / f"{stem}-images-idx3-ubyte").write_bytes(
        struct.pack(">4I", 2051, count, 28, 28) + pixels.tobytes()
    )
    labels = (np.arange(count) % 10).astype(np.uint8)
    (folder / f"{stem}-labels-idx1-ubyte").write_bytes(
        struct.pack(">2I", 2049, count) + labels.tobytes()
    )


def test_small_images_average_four_pixels(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    write_tiled_images(tmp_path / "mnist", "train", 7000)
    write_tiled_images(tmp_path / "mnist", "t10k", 100)
    result = data.load("mnist-small", data_dir=tmp_path)
    expected = ("mnist-small", (1, 14, 14), 5000)
    assert (result.name, result.shape, len(result.train)) == expected
    assert result.test is not None
    assert len(result.test) == 100  # all of them
    assert (result.test.x[:, 1:] == 15).all()
    number = np.arange(100)
    assert result.test.x[:, 0].tolist() == ((number + 60) / 4).round().astype(int).tolist()
    assert result.test.labels is not None
    assert result.test.labels.tolist() == (number % 10).tolist()
    assert (
        result.train.x.tobytes()
        == data.load("mnist-small", data_dir=tmp_path).train.x.tobytes()
    )


def test_small_images_need_full_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fashion-mnist was not found"):
        data.load("fashion-mnist-small", data_dir=tmp_path)
