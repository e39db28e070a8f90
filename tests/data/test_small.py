"""Small datasets: the tables by scikit-learn itself, the images by hand."""

import struct
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets

from fedbudget import data
from fedbudget.errors import UserError


@pytest.mark.parametrize(
    ("name", "original"),
    [("breast-cancer", "breast_cancer"), ("diabetes", "diabetes"), ("wine", "wine")],
)
def test_tables_are_those_of_scikit_learn(name: str, original: str) -> None:
    """Every row is there once, to train on or to test on, standardised by the former."""
    found, published = data.load(name), getattr(datasets, f"load_{original}")()
    assert found.test is not None
    assert found.standardization is not None
    assert len(found.test) == len(published.data) // 5
    np.testing.assert_allclose(found.train.x.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(found.train.x.std(axis=0), 1, atol=1e-5)
    how = found.standardization
    x = np.concatenate([found.train.x, found.test.x]) * how.deviation + how.mean
    assert found.train.values is not None
    assert found.test.values is not None
    y = np.concatenate([found.train.values, found.test.values])
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


def images(folder: Path, stem: str, count: int) -> None:
    """Images of which each has 2x2 pixels of 0, 10, 20 and 30 all over, and its number in
    the first of all.
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


def test_images_are_means_of_four_pixels(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    images(tmp_path / "mnist", "train", 7000)
    images(tmp_path / "mnist", "t10k", 100)
    found = data.load("mnist-small", data_dir=tmp_path)
    assert (found.name, found.shape, len(found.train)) == ("mnist-small", (1, 14, 14), 5000)
    assert found.test is not None
    assert len(found.test) == 100  # all that there are
    assert (found.test.x[:, 1:] == 15).all()
    number = np.arange(100)
    assert found.test.x[:, 0].tolist() == ((number + 60) / 4).round().astype(int).tolist()
    assert found.test.labels is not None
    assert found.test.labels.tolist() == (number % 10).tolist()
    assert (
        found.train.x.tobytes()
        == data.load("mnist-small", data_dir=tmp_path).train.x.tobytes()
    )


def test_what_they_are_made_of_must_be_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fashion-mnist was not found"):
        data.load("fashion-mnist-small", data_dir=tmp_path)
