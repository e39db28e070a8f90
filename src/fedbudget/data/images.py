"""The sets of images: small digits that come with the package, and the paper's MNIST, Fashion-MNIST and CIFAR-10.

Pixels stay bytes until they are used. digits.npz is the test set of "Optical Recognition of Handwritten Digits" by
E. Alpaydin and C. Kaynak, from the UCI Machine Learning Repository (CC BY 4.0), as scikit-learn has it too.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.contents import open_contents
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.published.find import find
from fedbudget.data.read_images import SHAPE, read_cifar, read_idx, read_shape
from fedbudget.errors import UserError

_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TRAIN, _TEST = 60_000, 10_000
_BATCHES, _BATCH = 5, 10_000


def digits(_: Path | None = None) -> Dataset:
    """1,797 real handwritten digits, 8x8 pixels with 16 shades, that come with the package."""
    with np.load(Path(__file__).with_name("digits.npz")) as found:
        x, y = found["x"], found["y"]
    everything = Part(x, y.astype(np.int64), y.astype(np.float64))
    first, rest = np.split(np.arange(len(everything)), [1437])  # four fifths; the rest was written by other people
    return Dataset("digits", everything.rows(first), everything.rows(rest), _DIGITS, 1 / 16, True, (1, 8, 8))


def mnist(data_dir: Path | None) -> Dataset:
    """70,000 handwritten digits, 28x28 pixels; classifiers of two classes tell even from odd ones."""
    return _idx("mnist", data_dir, _DIGITS, parity=True)


def fashion_mnist(data_dir: Path | None) -> Dataset:
    """70,000 pictures of clothes, 28x28 pixels."""
    return _idx("fashion-mnist", data_dir, _CLOTHES)


def cifar_10(data_dir: Path | None) -> Dataset:
    """60,000 photographs of ten kinds of objects, 32x32 pixels in colour; usable with some of its five batches."""
    paths = find("cifar-10", data_dir)
    names = [name for name in (f"data_batch_{number}.bin" for number in range(1, _BATCHES + 1)) if name in paths]
    if not names:
        raise UserError(f"cifar-10: of its files only {', '.join(paths)} is here; a data_batch_N.bin is needed")
    train = Part.join([_cifar_batch(paths[name], name) for name in names])
    test = _cifar_batch(paths["test_batch.bin"], "test_batch.bin") if "test_batch.bin" in paths else None
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
    return Dataset(path.name, part, classes=classes, scale=1 / 255, parity=len(classes) == 10, shape=(1, *sides))


def _idx(name: str, data_dir: Path | None, classes: tuple[str, ...], *, parity: bool = False) -> Dataset:
    paths = find(name, data_dir)

    def part(stem: str, most: int) -> Part | None:
        images, labels = paths.get(f"{stem}-images-idx3-ubyte"), paths.get(f"{stem}-labels-idx1-ubyte")
        return _idx_part(images, labels, most, (28, 28), len(classes)) if images and labels else None

    train, test = part("train", _TRAIN), part("t10k", _TEST)
    if train is None:
        raise UserError(f"{name}: train-images-idx3-ubyte or train-labels-idx1-ubyte is missing beside "
                        f"{next(iter(paths.values()))}; run fedbudget data get {name}")  # fmt: skip
    note = _note(train, _TRAIN, test, _TEST)
    return Dataset(name, train, test, classes, 1 / 255, parity, shape=(1, 28, 28), note=note)


def _idx_part(images: Path, labels: Path, most: int, sides: tuple[int, ...], classes: int = 256) -> Part:
    with open_contents(images, images.name) as stream:
        pixels = read_idx(stream, images, most=most, sides=sides)
    with open_contents(labels, labels.name) as stream:
        numbers = read_idx(stream, labels, most=most)
    if len(pixels) != len(numbers):
        raise UserError(f"{images} has {len(pixels)} images, but {labels} {len(numbers)} labels")
    return _part(pixels, numbers, labels, classes)


def _cifar_batch(path: Path, name: str) -> Part:
    with open_contents(path, name) as stream:
        images, labels = read_cifar(stream, path)
    return _part(images, labels, path, len(_OBJECTS))


def _part(images: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path, classes: int) -> Part:
    if labels.max() >= classes:
        raise UserError(f"{path} has label {labels.max()}, but classes go from 0 to {classes - 1}")
    return Part(images.reshape(len(images), -1), labels.astype(np.int64), labels.astype(np.float64))


def _note(train: Part, of_train: int, test: Part | None, of_test: int) -> str:
    """What is missing, in words; nothing when the dataset is complete."""
    parts = [f"{len(train):,} of {of_train:,} training samples"] if len(train) < of_train else []
    if test is None:
        parts.append("no test samples")
    elif len(test) < of_test:
        parts.append(f"{len(test):,} of {of_test:,} test samples")
    return ", ".join(parts)
