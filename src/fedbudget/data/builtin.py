"""The paper's two tables of measurements: appliances' energy use, and users' knowledge. All samples are trained on.

Reads files of images: IDX, the format of MNIST, and the binary batches of CIFAR-10.

IDX is a magic number, the size of each dimension as big-endian 32 bits, then bytes. A batch has records of a label byte
and 3,072 bytes of an image, red, then green, then blue.

The sets of images: small digits that come with the package, and the paper's MNIST, Fashion-MNIST and CIFAR-10.

Pixels stay bytes until they are used. digits.npz is the test set of "Optical Recognition of Handwritten Digits" by
E. Alpaydin and C. Kaynak, from the UCI Machine Learning Repository (CC BY 4.0), as scikit-learn has it too.

Small datasets, for many quick runs: three tables that come with scikit-learn, and images that are made smaller.

Which samples are tested on is the same everywhere and always. Tables are standardised by what is trained on.
"""

import csv
import io
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.columns import Columns
from fedbudget.data.contents import at_most, open_contents
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.published import find
from fedbudget.data.read_tables import parse_csv
from fedbudget.data.tables import Layout, LayoutColumn, TableOptions, require_usable
from fedbudget.errors import UserError, needing

_MOST_BYTES = 50_000_000  # four times the larger of the two
_LEVELS = ("very_low", "Low", "Middle", "High")


def energy(data_dir: Path | None) -> Dataset:
    """19,735 records of a house's sensors and weather, to predict the energy use of its appliances, in Wh.

    Features and target are standardised. There are no classes: the Cases distribute samples by clusters.
    """
    columns, layout = _read(
        "energy",
        "energydata_complete.csv",
        data_dir,
        target="Appliances",
        without=("date",),
    )
    if columns.numbers is None:
        raise UserError("energy: Appliances must be numbers")
    return Dataset(
        "energy", Part(columns.x, values=columns.numbers), layout=layout
    ).standardised()


def user_knowledge(data_dir: Path | None) -> Dataset:
    """403 students, each with five degrees of study and success in [0, 1], and one of four levels of knowledge."""
    columns, layout = _read("user-knowledge", "user_knowledge.csv", data_dir, target="UNS")
    number = {level.lower(): index for index, level in enumerate(_LEVELS)}
    names = [name.lower().replace(" ", "_") for name in columns.class_names or ()]
    unknown = sorted(set(names) - set(number))
    if unknown:
        raise UserError(
            f"user-knowledge: level {unknown[0]!r} is not one of {', '.join(_LEVELS)}"
        )
    labels = np.array([number[name] for name in names], dtype=np.int64)
    part = Part(columns.x.astype(np.float32), labels)
    return Dataset("user-knowledge", part, classes=_LEVELS, layout=layout)


def _read(
    name: str,
    file: str,
    data_dir: Path | None,
    *,
    target: str,
    without: tuple[str, ...] = (),
) -> tuple[Columns, Layout]:
    path = find(name, data_dir)[file]
    with open_contents(path, file) as stream:
        contents = at_most(stream, _MOST_BYTES, path)
    try:
        text = contents.tobytes().decode("utf-8-sig")
        table = parse_csv(
            io.StringIO(text, newline=""), str(path), TableOptions(target, without)
        )
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    require_usable([table])
    layout = Layout(tuple(map(LayoutColumn, table.columns)), target, table.dropped)
    return table.samples(layout.encode(table)), layout


SHAPE = (3, 32, 32)
"""Of an image of CIFAR-10."""

_RECORD = 1 + math.prod(SHAPE)
_MOST = 10_000  # records in a batch
_BYTES = 0x08  # the only type of element that the published IDX files use


def read_idx(
    stream: BinaryIO, path: Path, *, most: int, sides: tuple[int, ...] = ()
) -> NDArray[np.uint8]:
    """The array in a stream, [samples, *sides].

    Args:
      path: what to call it in errors.
      most: the most samples that it may hold, so that a header cannot ask for all the memory there is.
      sides: the height and width of an image; nothing for labels.
    """
    shape = read_shape(stream, path, dimensions=1 + len(sides))
    if not 0 < shape[0] <= most or tuple(shape[1:]) != sides:
        says, expected = (" x ".join(map(str, each)) for each in (shape, (most, *sides)))
        raise UserError(
            f"{path} says that it holds {says} bytes; expected are at most {expected}"
        )
    size = math.prod(shape)
    contents = at_most(stream, size, path)
    if len(contents) < size:
        raise UserError(
            f"{path} is truncated: {size - len(contents)} of its last {size} bytes are missing"
        )
    return contents.reshape(shape)


def read_shape(stream: BinaryIO, path: Path, *, dimensions: int) -> list[int]:
    """What a header says: how many samples, and their height and width."""
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions:
        raise UserError(f"{path} is not an IDX file: it ends within its header")
    zero, kind, rank, *shape = struct.unpack(f">HBB{dimensions}I", header)
    if (zero, kind, rank) != (0, _BYTES, dimensions):
        raise UserError(
            f"{path} is not the IDX file expected: its magic number should be {_BYTES << 8 | dimensions}"
        )
    return shape


def read_cifar(stream: BinaryIO, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images, [samples, 3072], and labels, [samples]."""
    contents = at_most(stream, _MOST * _RECORD, path)
    if not len(contents) or len(contents) % _RECORD:
        raise UserError(
            f"{path} is truncated or not a CIFAR-10 batch: {len(contents)} bytes are not whole records"
        )
    records = contents.reshape(-1, _RECORD)
    return np.ascontiguousarray(records[:, 1:]), records[:, 0].copy()


_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_OBJECTS = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_TRAIN = 60_000
_TEST = 10_000
_BATCHES = 5
_BATCH = 10_000


def digits(_: Path | None = None) -> Dataset:
    """1,797 real handwritten digits, 8x8 pixels with 16 shades, that come with the package."""
    with np.load(Path(__file__).with_name("digits.npz")) as found:
        x = found["x"]
        y = found["y"]
    everything = Part(x, y.astype(np.int64), y.astype(np.float64))
    first, rest = np.split(
        np.arange(len(everything)), [1437]
    )  # four fifths; the rest was written by other people
    return Dataset(
        "digits",
        everything.rows(first),
        everything.rows(rest),
        _DIGITS,
        1 / 16,
        True,
        (1, 8, 8),
    )


def mnist(data_dir: Path | None) -> Dataset:
    """70,000 handwritten digits, 28x28 pixels; classifiers of two classes tell even from odd ones."""
    return _idx("mnist", data_dir, _DIGITS, parity=True)


def fashion_mnist(data_dir: Path | None) -> Dataset:
    """70,000 pictures of clothes, 28x28 pixels."""
    return _idx("fashion-mnist", data_dir, _CLOTHES)


def cifar_10(data_dir: Path | None) -> Dataset:
    """60,000 photographs of ten kinds of objects, 32x32 pixels in colour; usable with some of its five batches."""
    paths = find("cifar-10", data_dir)
    names = [
        name
        for name in (f"data_batch_{number}.bin" for number in range(1, _BATCHES + 1))
        if name in paths
    ]
    if not names:
        raise UserError(
            f"cifar-10: of its files only {', '.join(paths)} is here; a data_batch_N.bin is needed"
        )
    train = Part.join([_cifar_batch(paths[name], name) for name in names])
    test = (
        _cifar_batch(paths["test_batch.bin"], "test_batch.bin")
        if "test_batch.bin" in paths
        else None
    )
    note = _note(train, _BATCHES * _BATCH, test, _BATCH)
    return Dataset("cifar-10", train, test, _OBJECTS, 1 / 255, shape=SHAPE, note=note)


def from_idx(path: Path, labels: Path | None = None) -> Dataset:
    """Images and labels of the user's own, in IDX as MNIST's are; classes are numbers, of which digits are there.

    Args:
      labels: beside the images when not given, under the name that goes with theirs.
    """
    if labels is None:
        labels = path.with_name(path.name.replace("images-idx3", "labels-idx1"))
        if labels == path:
            raise UserError(f"which labels belong to {path}? Give --labels")
    for each in (path, labels):
        if not each.is_file():
            raise UserError(f"{each} does not exist")
    with open_contents(path, path.name) as stream:
        count, *sides = read_shape(stream, path, dimensions=3)
    part = _idx_part(path, labels, count, tuple(sides))
    assert part.labels is not None
    classes = tuple(map(str, range(max(10, int(part.labels.max()) + 1))))
    return Dataset(
        path.name,
        part,
        classes=classes,
        scale=1 / 255,
        parity=len(classes) == 10,
        shape=(1, *sides),
    )


def _idx(
    name: str, data_dir: Path | None, classes: tuple[str, ...], *, parity: bool = False
) -> Dataset:
    paths = find(name, data_dir)

    def part(stem: str, most: int) -> Part | None:
        images = paths.get(f"{stem}-images-idx3-ubyte")
        labels = paths.get(f"{stem}-labels-idx1-ubyte")
        return (
            _idx_part(images, labels, most, (28, 28), len(classes))
            if images and labels
            else None
        )

    train = part("train", _TRAIN)
    test = part("t10k", _TEST)
    if train is None:
        raise UserError(f"{name}: train-images-idx3-ubyte or train-labels-idx1-ubyte is missing beside "
                        f"{next(iter(paths.values()))}; run fedbudget data get {name}")  # fmt: skip
    note = _note(train, _TRAIN, test, _TEST)
    return Dataset(
        name, train, test, classes, 1 / 255, parity, shape=(1, 28, 28), note=note
    )


def _idx_part(
    images: Path, labels: Path, most: int, sides: tuple[int, ...], classes: int = 256
) -> Part:
    with open_contents(images, images.name) as stream:
        pixels = read_idx(stream, images, most=most, sides=sides)
    with open_contents(labels, labels.name) as stream:
        numbers = read_idx(stream, labels, most=most)
    if len(pixels) != len(numbers):
        raise UserError(
            f"{images} has {len(pixels)} images, but {labels} {len(numbers)} labels"
        )
    return _part(pixels, numbers, labels, classes)


def _cifar_batch(path: Path, name: str) -> Part:
    with open_contents(path, name) as stream:
        images, labels = read_cifar(stream, path)
    return _part(images, labels, path, len(_OBJECTS))


def _part(
    images: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path, classes: int
) -> Part:
    if labels.max() >= classes:
        raise UserError(
            f"{path} has label {labels.max()}, but classes go from 0 to {classes - 1}"
        )
    return Part(
        images.reshape(len(images), -1), labels.astype(np.int64), labels.astype(np.float64)
    )


def _note(train: Part, of_train: int, test: Part | None, of_test: int) -> str:
    """What is missing, in words; nothing when the dataset is complete."""
    parts = (
        [f"{len(train):,} of {of_train:,} training samples"]
        if len(train) < of_train
        else []
    )
    if test is None:
        parts.append("no test samples")
    elif len(test) < of_test:
        parts.append(f"{len(test):,} of {of_test:,} test samples")
    return ", ".join(parts)


_TEST_SHARE = 5  # one in so many
_SMALL_TRAIN = 5000
_SMALL_TEST = 2000
_SIDE = 14


def breast_cancer(_: Path | None = None) -> Dataset:
    """569 patients, each with 30 measurements of the cells of a tumour, which is malignant or benign."""
    return _table("breast-cancer", "load_breast_cancer")


def diabetes(_: Path | None = None) -> Dataset:
    """442 patients, each with ten figures, to predict how far their diabetes has come a year later."""
    return _table("diabetes", "load_diabetes")


def wine(_: Path | None = None) -> Dataset:
    """178 wines of three growers, each with 13 measurements."""
    return _table("wine", "load_wine")


def mnist_small(data_dir: Path | None) -> Dataset:
    """5,000 and 2,000 of MNIST's images, with the means of 2x2 pixels."""
    return _smaller(mnist(data_dir), "mnist-small")


def fashion_mnist_small(data_dir: Path | None) -> Dataset:
    """The same of Fashion-MNIST."""
    return _smaller(fashion_mnist(data_dir), "fashion-mnist-small")


def _table(name: str, loader: str) -> Dataset:
    with needing(f"{name}, which comes with scikit-learn,"):
        from sklearn import datasets
    found = getattr(datasets, loader)()
    classes = tuple(map(str, getattr(found, "target_names", ())))
    labels = found.target.astype(np.int64) if classes else None
    everything = Part(found.data, labels, found.target.astype(np.float64))
    order = np.random.default_rng(0).permutation(len(everything))
    test, train = np.split(order, [len(order) // _TEST_SHARE])
    return Dataset(
        name, everything.rows(train), everything.rows(test), classes
    ).standardised()


def _smaller(dataset: Dataset, name: str) -> Dataset:
    rng = np.random.default_rng(0)

    def part(full: Part, size: int) -> Part:
        rows = np.sort(rng.choice(len(full), min(size, len(full)), replace=False))
        pixels = (
            np.asarray(full.x[rows])
            .reshape(-1, _SIDE, 2, _SIDE, 2)
            .astype(np.float32)
            .mean(axis=(2, 4))
        )
        return replace(
            full.rows(rows), x=pixels.round().astype(np.uint8).reshape(len(rows), -1)
        )

    train = part(dataset.train, _SMALL_TRAIN)
    test = None if dataset.test is None else part(dataset.test, _SMALL_TEST)
    return replace(dataset, name=name, train=train, test=test, shape=(1, _SIDE, _SIDE))
