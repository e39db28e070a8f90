"""CIFAR-10 batches, written byte by byte and read back: plain, zipped and from the
archive.
"""

import gzip
import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.data.builtin import SHAPE, read_cifar
from fedbudget.errors import UserError
from fedbudget.file_contents import open_contents
from support.web import tar_of

FILE = Path("some.bin")
RECORD = 3073

# Two records: a label, then 1,024 bytes each of red, green and blue. Two pixels are marked:
# the first red one, and the blue one in row 2, column 5.
FIRST = bytes([3, 77]) + bytes(1023) + b"\x01" * 1024 + b"\x02" * 1024
SECOND = (
    bytes([9]) + b"\xff" * 2048 + bytes(2 * 32 + 5) + b"\x63" + bytes(1024 - 2 * 32 - 6)
)


def read(
    contents: bytes,
) -> tuple[np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]], list[int]]:
    images, labels = read_cifar(io.BytesIO(contents), FILE)
    return images.reshape(len(images), 3, 32, 32), labels.tolist()


class TestValid:
    def test_record_layout(self) -> None:
        """A label, then red, green and blue, each row by row."""
        images, labels = read(FIRST + SECOND)
        assert labels == [3, 9]
        assert images[0, 0, 0, 0] == 77
        assert images[0].reshape(3, -1).sum(axis=1).tolist() == [77, 1024, 2 * 1024]
        assert images[1, 2, 2, 5] == 99
        assert images[1].reshape(3, -1).sum(axis=1).tolist() == [255 * 1024, 255 * 1024, 99]

    def test_array_shapes(self) -> None:
        images, labels = read_cifar(io.BytesIO(FIRST + SECOND), FILE)
        assert images.shape == (2, 3072)
        assert labels.shape == (2,)
        assert math.prod(SHAPE) == 3072
        assert images.flags.c_contiguous

    @pytest.mark.parametrize("form", ["some.bin", "some.bin.gz", "some.tar.gz"])
    def test_plain_zipped_and_archived(self, tmp_path: Path, form: str) -> None:
        contents, path = FIRST + SECOND, tmp_path / form
        path.write_bytes(
            tar_of(
                {
                    "batches/readme.html": b"<html>",
                    "batches/other.bin": SECOND,
                    "batches/some.bin": contents,
                }
            )
            if form.endswith(".tar.gz")
            else gzip.compress(contents)
            if form.endswith(".gz")
            else contents
        )
        with open_contents(path, "some.bin") as stream:
            images, labels = read_cifar(stream, path)
        assert labels.tolist() == [3, 9]
        assert images.tobytes() == FIRST[1:] + SECOND[1:]

    def test_at_most_ten_thousand_records(self) -> None:
        full = bytes(10_000 * RECORD)
        images, labels = read_cifar(io.BytesIO(full), FILE)
        assert (images.shape, labels.shape) == ((10_000, 3072), (10_000,))
        message = r"some\.bin is larger than the expected 30730000 bytes"
        with pytest.raises(UserError, match=message):
            read_cifar(io.BytesIO(full + b"\0"), FILE)


class TestRejected:
    @pytest.mark.parametrize("length", [0, 1, 2, 1024, 3072, 3074, 6145])
    def test_incomplete_record(self, length: int) -> None:
        with pytest.raises(
            UserError,
            match=rf"some\.bin is truncated or not a CIFAR-10 batch: {length} bytes are "
            rf"not whole records",
        ):
            read((FIRST + SECOND)[:length])

    @pytest.mark.parametrize("lost", [1, 8, 9, 30])
    @pytest.mark.parametrize("form", ["some.bin.gz", "some.tar.gz"])
    def test_truncated_gzip(self, tmp_path: Path, form: str, lost: int) -> None:
        contents = np.random.default_rng(0).bytes(2 * RECORD)  # not compressible
        zipped = (
            tar_of({"some.bin": contents})
            if form.endswith("tar.gz")
            else gzip.compress(contents)
        )
        path = tmp_path / form
        path.write_bytes(
            zipped[: -lost if form == "some.bin.gz" else len(zipped) // (lost + 1)]
        )
        damaged = pytest.raises(UserError, match=f"{form} (is damaged|is truncated)")
        with damaged, open_contents(path, "some.bin") as stream:
            read_cifar(stream, path)

    def test_archive_without_the_batch(self, tmp_path: Path) -> None:
        """A link is not a file."""
        path = tmp_path / "some.tar.gz"
        path.write_bytes(
            tar_of({"batches/other.bin": FIRST, "batches/some.bin": "other.bin"})
        )
        with (
            pytest.raises(UserError, match=r"some\.tar\.gz has no file some\.bin"),
            open_contents(path, "some.bin") as stream,
        ):
            read_cifar(stream, path)


@given(
    records=st.integers(0, 3),
    more=st.sampled_from([0, 0, 1, 3072]),
    seed=st.integers(0, 1000),
)
def test_random_bytes(records: int, more: int, seed: int) -> None:
    contents = np.random.default_rng(seed).bytes(records * RECORD + more)
    if records == 0 or more:
        with pytest.raises(UserError, match="are not whole records"):
            read(contents)
        return
    images, labels = read_cifar(io.BytesIO(contents), FILE)
    again = b"".join(
        bytes([label]) + image.tobytes()
        for label, image in zip(labels, images, strict=True)
    )
    assert again == contents
