"""The paper's three sets of images: MNIST, Fashion-MNIST and CIFAR-10. Pixels stay bytes until they are used."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbudget.data.contents import open_contents
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.published.find import find
from fedbudget.data.read_cifar import SHAPE, read_cifar
from fedbudget.data.read_idx import read_idx, read_shape
from fedbudget.errors import UserError

_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_OBJECTS = "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck"
_TRAIN, _TEST = 60_000, 10_000
_BATCHES = 5
_BATCH = 10_000


def mnist(data_dir: Path | None) -> Dataset:
    """70,000 handwritten digits, 28x28 pixels; classifiers of two classes tell even from odd ones."""
    return _idx("mnist", data_dir, tuple("0123456789"), parity=True)


def fashion_mnist(data_dir: Path | None) -> Dataset:
    """70,000 pictures of clothes, 28x28 pixels."""
    return _idx("fashion-mnist", data_dir, tuple(_FASHION.split(",")), parity=False)


def cifar_10(data_dir: Path | None) -> Dataset:
    """60,000 photographs of ten kinds of objects, 32x32 pixels in colour; usable with some of its five batches."""
    paths = find("cifar-10", data_dir)
    names = [name for name in (f"data_batch_{number}.bin" for number in range(1, _BATCHES + 1)) if name in paths]
    if not names:
        raise UserError(f"cifar-10: of its files only {', '.join(paths)} is here; a data_batch_N.bin is needed")
    train = Part.join([_cifar_batch(paths[name], name) for name in names])
    test = _cifar_batch(paths["test_batch.bin"], "test_batch.bin") if "test_batch.bin" in paths else None
    return Dataset(
        "cifar-10",
        train,
        test,
        classes=tuple(_OBJECTS.split(",")),
        scale=1 / 255,
        shape=SHAPE,
        note=_note(len(train), _BATCHES * _BATCH, test, _BATCH),
    )


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
    with open_contents(path, path.name) as stream:
        images = read_idx(stream, path, most=count, sides=(sides[0], sides[1]))
    with open_contents(labels, labels.name) as stream:
        numbers = read_idx(stream, labels, most=count)
    if len(images) != len(numbers):
        raise UserError(f"{path} has {len(images)} images, but {labels} {len(numbers)} labels")
    classes = tuple(str(number) for number in range(max(10, int(numbers.max()) + 1)))
    part = _part(images, numbers, labels, len(classes))
    return Dataset(path.name, part, classes=classes, scale=1 / 255, parity=len(classes) == 10, shape=(1, *sides))


def _idx(name: str, data_dir: Path | None, classes: tuple[str, ...], *, parity: bool) -> Dataset:
    paths = find(name, data_dir)
    train = _idx_part(paths, "train", _TRAIN, classes)
    test = _idx_part(paths, "t10k", _TEST, classes)
    if train is None:
        raise UserError(f"{name}: train-images-idx3-ubyte or train-labels-idx1-ubyte is missing beside "
                        f"{next(iter(paths.values()))}; run fedbudget data get {name}")  # fmt: skip
    return Dataset(
        name,
        train,
        test,
        classes=classes,
        scale=1 / 255,
        parity=parity,
        shape=(1, 28, 28),
        note=_note(len(train), _TRAIN, test, _TEST),
    )


def _idx_part(paths: dict[str, Path], stem: str, most: int, classes: Sequence[str]) -> Part | None:
    image_file, label_file = f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"
    if image_file not in paths or label_file not in paths:
        return None
    with open_contents(paths[image_file], image_file) as stream:
        images = read_idx(stream, paths[image_file], most=most, sides=(28, 28))
    with open_contents(paths[label_file], label_file) as stream:
        labels = read_idx(stream, paths[label_file], most=most)
    if len(images) != len(labels):
        raise UserError(f"{paths[image_file]} has {len(images)} images, but {paths[label_file]} {len(labels)} labels")
    return _part(images, labels, paths[label_file], len(classes))


def _cifar_batch(path: Path, name: str) -> Part:
    with open_contents(path, name) as stream:
        images, labels = read_cifar(stream, path)
    return _part(images, labels, path, 10)


def _part(images: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path, classes: int) -> Part:
    if labels.max() >= classes:
        raise UserError(f"{path} has label {labels.max()}, but classes go from 0 to {classes - 1}")
    return Part(images.reshape(len(images), -1), labels.astype(np.int64), labels.astype(np.float64))


def _note(train: int, of_train: int, test: Part | None, of_test: int) -> str:
    """What is missing, in words; nothing when the dataset is complete."""
    parts = [f"{train:,} of {of_train:,} training samples"] if train < of_train else []
    if test is None:
        parts.append("no test samples")
    elif len(test) < of_test:
        parts.append(f"{len(test):,} of {of_test:,} test samples")
    return ", ".join(parts)
