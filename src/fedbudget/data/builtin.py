"""The named datasets.

- Images: digits (part of the package), and the paper's MNIST, Fashion-MNIST and CIFAR-10.
  Pixels stay bytes until they are used. digits.npz is the test set of "Optical Recognition
  of Handwritten Digits" by E. Alpaydin and C. Kaynak, from the UCI Machine Learning
  Repository (CC BY 4.0), as in scikit-learn.
- The paper's two tables of measurements, energy and user-knowledge, without test samples.
- Natural federations; see natural.py.
- Small datasets for many quick runs: three tables of scikit-learn, standardised by their
  training samples, and reduced images. The test samples are always the same.

Formats: an IDX file (MNIST) has a magic number, the size of each dimension as big-endian 32
bits, then bytes. A CIFAR-10 batch has records of a label byte and 3,072 bytes of an image:
red, then green, then blue.
"""

import csv
import io
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedbudget.data import natural
from fedbudget.data.columns import Columns, class_numbers
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.published import find
from fedbudget.data.read_tables import parse_csv
from fedbudget.data.tables import Layout, LayoutColumn, TableOptions, require_usable
from fedbudget.errors import UserError, requires_package
from fedbudget.file_contents import at_most, open_contents

SHAPE = (3, 32, 32)
"""The shape of a CIFAR-10 image."""

_DIGITS = tuple("0123456789")
_CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_OBJECTS = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_LEVELS = ("very_low", "Low", "Middle", "High")

_MNIST_TRAIN = 60_000  # samples
_MNIST_TEST = 10_000
_CIFAR_BATCHES = 5
_CIFAR_BATCH = 10_000
_CIFAR_RECORD = 1 + math.prod(SHAPE)  # bytes
_IDX_BYTES = 0x08  # the only element type in the published IDX files
_MOST_TABLE_BYTES = 50_000_000  # four times the larger table
_SMALL_TRAIN = 5000
_SMALL_TEST = 2000
_SMALL_SIDE = 14  # pixels


def digits(_: Path | None = None) -> Dataset:
    """1,797 handwritten digits, 8x8 pixels with 16 shades, part of the package."""
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        x = arrays["x"]
        y = arrays["y"]
    everything = Part(x, y.astype(np.int64), y.astype(np.float64))
    # Four fifths to train on; other writers wrote the rest.
    first, rest = np.split(np.arange(len(everything)), [1437])
    train = everything.rows(first)
    test = everything.rows(rest)
    shape = (1, 8, 8)
    dataset = Dataset("digits", train, test, _DIGITS, 1 / 16, parity=True, shape=shape)
    return replace(dataset, published=True)


def cifar_10(data_dir: Path | None) -> Dataset:
    """60,000 colour photographs of ten kinds of objects, 32x32 pixels.

    Some of the five training batches are enough.
    """
    paths = find("cifar-10", data_dir)
    names = [f"data_batch_{number}.bin" for number in range(1, _CIFAR_BATCHES + 1)]
    batches = [_cifar_batch(paths[name], name) for name in names if name in paths]
    if not batches:
        raise UserError(
            f"cifar-10: of its files only {', '.join(paths)} is here; "
            "a data_batch_N.bin is needed"
        )
    train = Part.join(batches)
    test = None
    if "test_batch.bin" in paths:
        test = _cifar_batch(paths["test_batch.bin"], "test_batch.bin")
    note = _note(train, _CIFAR_BATCHES * _CIFAR_BATCH, test, _CIFAR_BATCH)
    dataset = Dataset("cifar-10", train, test, _OBJECTS, 1 / 255, shape=SHAPE, note=note)
    return replace(dataset, published=True)


def from_idx(path: Path, labels: Path | None = None) -> Dataset:
    """Read the user's own images and labels in IDX format.

    The classes are numbers, at least the ten digits.

    Args:
      path: of the images.
      labels: of the labels; by default in the same folder, under the matching name.
    """
    if labels is None:
        labels = path.with_name(path.name.replace("images-idx3", "labels-idx1"))
        if labels == path:
            raise UserError(f"which labels belong to {path}? Pass `labels`")
    for each in (path, labels):
        if not each.is_file():
            raise UserError(f"{each} does not exist")
    with open_contents(path, path.name) as stream:
        count, *sides = _read_shape(stream, path, dimensions=3)
    part = _idx_part(path, labels, count, tuple(sides))
    assert part.labels is not None
    classes = tuple(map(str, range(max(10, int(part.labels.max()) + 1))))
    parity = len(classes) == 10
    shape = (1, *sides)
    return Dataset(path.name, part, None, classes, 1 / 255, parity=parity, shape=shape)


def energy(data_dir: Path | None) -> Dataset:
    """19,735 records of a house's sensors, to predict its appliances' energy in Wh.

    Features and target are standardised. There are no classes: the Cases distribute samples
    by clusters.
    """
    file = "energydata_complete.csv"
    options = TableOptions("Appliances", ("date",))
    columns, layout = _published_table("energy", file, data_dir, options)
    if columns.numbers is None:
        raise UserError("energy: Appliances must be numbers")
    part = Part(columns.x, values=columns.numbers)
    return Dataset("energy", part, layout=layout, published=True).standardised()


def user_knowledge(data_dir: Path | None) -> Dataset:
    """403 students with five scores in [0, 1], and one of four levels of knowledge."""
    file = "user_knowledge.csv"
    options = TableOptions("UNS")
    columns, layout = _published_table("user-knowledge", file, data_dir, options)
    names = [name.lower().replace(" ", "_") for name in columns.class_names or ()]
    levels = [level.lower() for level in _LEVELS]
    labels = class_numbers("user-knowledge", levels, names)
    part = Part(columns.x.astype(np.float32), labels)
    dataset = Dataset("user-knowledge", part, classes=_LEVELS, layout=layout)
    return replace(dataset, published=True)


def read_idx(
    stream: BinaryIO, path: Path, *, most: int, sides: tuple[int, ...] = ()
) -> NDArray[np.uint8]:
    """Read the array in an IDX stream, [samples, *sides].

    Args:
      path: of the file, for errors.
      most: largest number of samples, so that a header cannot demand all memory.
      sides: height and width of an image; empty for labels.
    """
    shape = _read_shape(stream, path, dimensions=1 + len(sides))
    if not 0 < shape[0] <= most or tuple(shape[1:]) != sides:
        raise UserError(
            f"{path} claims to hold {' x '.join(map(str, shape))} bytes; "
            f"expected at most {' x '.join(map(str, (most, *sides)))}"
        )
    size = math.prod(shape)
    contents = at_most(stream, size, path)
    if len(contents) < size:
        raise UserError(
            f"{path} is truncated: {size - len(contents)} of its last {size} bytes "
            "are missing"
        )
    return np.frombuffer(contents, np.uint8).reshape(shape)


def _read_shape(stream: BinaryIO, path: Path, *, dimensions: int) -> list[int]:
    """Read the header: the number of samples, and their height and width."""
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions:
        raise UserError(f"{path} is not an IDX file: it ends within its header")
    zero, kind, rank, *shape = struct.unpack(f">HBB{dimensions}I", header)
    if (zero, kind, rank) != (0, _IDX_BYTES, dimensions):
        raise UserError(
            f"{path} is not the IDX file expected: "
            f"its magic number should be {_IDX_BYTES << 8 | dimensions}"
        )
    return shape


def read_cifar(stream: BinaryIO, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read images, [samples, 3072], and labels, [samples]."""
    contents = at_most(stream, _CIFAR_BATCH * _CIFAR_RECORD, path)
    if not contents or len(contents) % _CIFAR_RECORD:
        raise UserError(
            f"{path} is truncated or not a CIFAR-10 batch: "
            f"{len(contents)} bytes are not whole records"
        )
    records = np.frombuffer(contents, np.uint8).reshape(-1, _CIFAR_RECORD)
    return np.ascontiguousarray(records[:, 1:]), records[:, 0].copy()


def _mnist_like(
    name: str, classes: tuple[str, ...], parity: bool, data_dir: Path | None
) -> Dataset:
    paths = find(name, data_dir)

    def part(stem: str, most: int) -> Part | None:
        images = paths.get(f"{stem}-images-idx3-ubyte")
        labels = paths.get(f"{stem}-labels-idx1-ubyte")
        if images is None or labels is None:
            return None
        return _idx_part(images, labels, most, (28, 28), len(classes))

    train = part("train", _MNIST_TRAIN)
    test = part("t10k", _MNIST_TEST)
    if train is None:
        raise UserError(
            f"{name}: train-images-idx3-ubyte or train-labels-idx1-ubyte is missing in "
            f"{next(iter(paths.values())).parent}; run fedbudget data get {name}"
        )
    note = _note(train, _MNIST_TRAIN, test, _MNIST_TEST)
    shape = (1, 28, 28)
    dataset = Dataset(name, train, test, classes, 1 / 255, parity, shape, note)
    return replace(dataset, published=True)


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
    return _image_part(pixels, numbers, labels, classes)


def _cifar_batch(path: Path, name: str) -> Part:
    with open_contents(path, name) as stream:
        images, labels = read_cifar(stream, path)
    return _image_part(images, labels, path, len(_OBJECTS))


def _image_part(
    images: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path, classes: int
) -> Part:
    if labels.max() >= classes:
        raise UserError(
            f"{path} has label {labels.max()}, but classes go from 0 to {classes - 1}"
        )
    flat = images.reshape(len(images), -1)
    return Part(flat, labels.astype(np.int64), labels.astype(np.float64))


def _note(train: Part, of_train: int, test: Part | None, of_test: int) -> str:
    """Describe what is missing; empty if the dataset is complete."""
    parts = []
    if len(train) < of_train:
        parts.append(f"{len(train):,} of {of_train:,} training samples")
    if test is None:
        parts.append("no test samples")
    elif len(test) < of_test:
        parts.append(f"{len(test):,} of {of_test:,} test samples")
    return ", ".join(parts)


def _reduced(name: str, data_dir: Path | None) -> Dataset:
    """5,000 training and 2,000 test images, reduced to means of 2x2 pixels."""
    dataset = DATASETS[name.removesuffix("-small")](data_dir)
    rng = np.random.default_rng(0)

    def part(full: Part, size: int) -> Part:
        rows = np.sort(rng.choice(len(full), min(size, len(full)), replace=False))
        chosen = full.rows(rows)
        blocks = chosen.x.reshape(-1, _SMALL_SIDE, 2, _SMALL_SIDE, 2).astype(np.float32)
        pixels = blocks.mean(axis=(2, 4)).round().astype(np.uint8)
        return replace(chosen, x=pixels.reshape(len(rows), -1))

    train = part(dataset.train, _SMALL_TRAIN)
    test = None if dataset.test is None else part(dataset.test, _SMALL_TEST)
    shape = (1, _SMALL_SIDE, _SMALL_SIDE)
    return replace(dataset, name=name, train=train, test=test, shape=shape)


def _published_table(
    name: str, file: str, data_dir: Path | None, options: TableOptions
) -> tuple[Columns, Layout]:
    path = find(name, data_dir)[file]
    with open_contents(path, file) as stream:
        contents = at_most(stream, _MOST_TABLE_BYTES, path)
    try:
        text = contents.decode("utf-8-sig")
        table = parse_csv(io.StringIO(text, newline=""), str(path), options)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    require_usable([table])
    layout = Layout(tuple(map(LayoutColumn, table.columns)), options.target, table.dropped)
    return table.samples(layout.encode(table)), layout


def _scikit_learn_table(name: str, _: Path | None) -> Dataset:
    with requires_package(f"{name}, a dataset of scikit-learn,"):
        from sklearn import datasets
    table = getattr(datasets, f"load_{name.replace('-', '_')}")()
    classes = tuple(map(str, getattr(table, "target_names", ())))
    labels = table.target.astype(np.int64) if classes else None
    everything = Part(table.data, labels, table.target.astype(np.float64))
    order = np.random.default_rng(0).permutation(len(everything))
    test, train = np.split(order, [len(order) // 5])
    dataset = Dataset(name, everything.rows(train), everything.rows(test), classes)
    return replace(dataset.standardised(), published=True)


DATASETS: Mapping[str, Callable[[Path | None], Dataset]] = {
    "digits": digits,
    # 70,000 handwritten digits, 28x28 pixels; binary models separate even from odd.
    "mnist": partial(_mnist_like, "mnist", _DIGITS, True),
    # 70,000 images of clothes, 28x28 pixels.
    "fashion-mnist": partial(_mnist_like, "fashion-mnist", _CLOTHES, False),
    "cifar-10": cifar_10,
    "energy": energy,
    "user-knowledge": user_knowledge,
    # 569 patients with 30 measurements of tumour cells, malignant or benign.
    "breast-cancer": partial(_scikit_learn_table, "breast-cancer"),
    # 442 patients with ten measurements, to predict their diabetes a year later.
    "diabetes": partial(_scikit_learn_table, "diabetes"),
    # 178 wines of three growers, with 13 measurements.
    "wine": partial(_scikit_learn_table, "wine"),
    "mnist-small": partial(_reduced, "mnist-small"),
    "fashion-mnist-small": partial(_reduced, "fashion-mnist-small"),
    **{name: partial(natural.load, name) for name in natural.SITES},
}
"""The named datasets; each function receives the data folder to search first."""
