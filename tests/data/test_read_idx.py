"""IDX files, written byte by byte: valid contents are read back, false headers are
rejected.
"""

import gzip
import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.data.builtin import read_idx
from fedbudget.errors import UserError
from fedbudget.file_contents import open_contents

FILE = Path("some-idx")

# Two images of 2 x 3 pixels, and three labels.
IMAGES = (
    b"\0\0\x08\x03" + struct.pack(">III", 2, 2, 3) + bytes([*range(6), *range(250, 256)])
)
LABELS = b"\0\0\x08\x01" + struct.pack(">I", 3) + bytes([7, 0, 9])


def images(contents: bytes) -> object:
    return read_idx(io.BytesIO(contents), FILE, most=5, sides=(2, 3)).tolist()


def labels(contents: bytes) -> object:
    return read_idx(io.BytesIO(contents), FILE, most=5).tolist()


def header(magic: int, *sizes: int) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes)


class TestValid:
    def test_images_row_by_row(self) -> None:
        expected = [[[0, 1, 2], [3, 4, 5]], [[250, 251, 252], [253, 254, 255]]]
        assert images(IMAGES) == expected

    def test_sizes_are_big_endian(self) -> None:
        contents = header(2049, 258) + bytes(258)  # 258 is 1, 2 in its last bytes
        assert len(read_idx(io.BytesIO(contents), FILE, most=300)) == 258

    def test_sample_limit(self) -> None:
        assert labels(header(2049, 5) + bytes(5)) == [0] * 5
        message = r"some-idx claims to hold 6 bytes; expected at most 5"
        with pytest.raises(UserError, match=message):
            labels(header(2049, 6) + bytes(6))

    @pytest.mark.parametrize("zipped", [False, True])
    def test_plain_and_zipped_files(self, tmp_path: Path, zipped: bool) -> None:
        path = tmp_path / ("labels.gz" if zipped else "labels")
        path.write_bytes(gzip.compress(LABELS) if zipped else LABELS)
        with open_contents(path, "labels") as stream:
            assert read_idx(stream, path, most=5).tolist() == [7, 0, 9]

    def test_array_is_writable(self) -> None:
        result = read_idx(io.BytesIO(LABELS), FILE, most=5)
        result[0] = 1
        assert result.tolist() == [1, 0, 9]


class TestTruncated:
    @pytest.mark.parametrize("length", range(len(IMAGES)))
    def test_any_truncation_is_rejected(self, length: int) -> None:
        message = (
            "ends within its header"
            if length < 16
            else f"is truncated: {28 - length} of its last 12 bytes"
        )
        with pytest.raises(UserError, match=message):
            images(IMAGES[:length])
        if length < len(LABELS):
            with pytest.raises(UserError, match=r"ends within its header|is truncated"):
                labels(LABELS[:length])

    # Cut within the checksum of gzip, and before it.
    @pytest.mark.parametrize("lost", [1, 4, 8, 9, 15, 20])
    def test_truncated_gzip_is_rejected(self, tmp_path: Path, lost: int) -> None:
        path = tmp_path / "labels.gz"
        path.write_bytes(gzip.compress(LABELS)[:-lost])
        with (
            pytest.raises(UserError, match=r"labels\.gz is damaged"),
            open_contents(path, "labels") as stream,
        ):
            read_idx(stream, path, most=5)

    def test_wrong_gzip_checksum_is_rejected(self, tmp_path: Path) -> None:
        path, zipped = tmp_path / "labels.gz", bytearray(gzip.compress(LABELS))
        zipped[-8] ^= 1  # in the checksum
        path.write_bytes(zipped)
        with (
            pytest.raises(UserError, match=r"labels\.gz is damaged: CRC check failed"),
            open_contents(path, "") as stream,
        ):
            read_idx(stream, path, most=5)


class TestOversized:
    @pytest.mark.parametrize("more", [1, 100, 3_000_000])
    def test_trailing_bytes_are_rejected(self, more: int) -> None:
        message = "some-idx is larger than the expected 12 bytes"
        with pytest.raises(UserError, match=message):
            images(IMAGES + bytes(more))

    @pytest.mark.parametrize(
        "sizes",
        [
            (0, 2, 3),
            (6, 2, 3),
            (2**32 - 1, 2, 3),
            (2**32 - 1, 2**32 - 1, 2**32 - 1),
            (2, 3, 2),  # the same number of bytes, but other images
            (2, 0, 3),
            (2, 2, 2**32 - 1),
        ],
    )
    def test_wrong_sizes_are_rejected(self, sizes: tuple[int, int, int]) -> None:
        claimed = " x ".join(map(str, sizes))
        message = f"some-idx claims to hold {claimed} bytes; expected at most 5 x 2 x 3"
        with pytest.raises(UserError, match=message):
            images(header(2051, *sizes) + IMAGES[16:])

    @pytest.mark.parametrize(
        "magic",
        [
            2049,  # labels instead of images
            0,
            2**32 - 1,
            0x0803 << 16,  # little-endian
            0x0D03,  # floats
            0x0804,  # one dimension more
            0x10803,  # not 0 in the first bytes
        ],
    )
    def test_wrong_magic_number_is_rejected(self, magic: int) -> None:
        message = "some-idx is not the IDX file expected: its magic number should be 2051"
        with pytest.raises(UserError, match=message):
            images(header(magic, 2, 2, 3) + IMAGES[16:])

    def test_images_as_labels_are_rejected(self) -> None:
        with pytest.raises(UserError, match="its magic number should be 2049"):
            labels(IMAGES)


@given(contents=st.binary(max_size=60))
def test_random_bytes(contents: bytes) -> None:
    for sides in ((), (2, 3)):
        try:
            result = read_idx(io.BytesIO(contents), FILE, most=5, sides=sides)
        except UserError:
            continue
        assert result.shape[1:] == sides
        assert 1 <= len(result) <= 5


@given(
    sizes=st.tuples(*[st.integers(0, 4) | st.integers(0, 2**32 - 1)] * 3),
    magic=st.sampled_from([2051, 2051, 2049, 3]),
    pixels=st.binary(max_size=40),
)
def test_header_must_match_contents(
    sizes: tuple[int, int, int], magic: int, pixels: bytes
) -> None:
    true = (
        magic == 2051
        and 1 <= sizes[0] <= 5
        and sizes[1:] == (2, 3)
        and len(pixels) == 6 * sizes[0]
    )
    contents = header(magic, *sizes) + pixels
    if true:
        result = read_idx(io.BytesIO(contents), FILE, most=5, sides=(2, 3))
        assert result.shape == sizes
        assert result.tobytes() == pixels
    else:
        with pytest.raises(UserError):
            images(contents)


@given(
    contents=st.binary(max_size=30), damage=st.integers(0, 255), where=st.integers(0, 200)
)
def test_damaged_gzip(
    tmp_path_factory: pytest.TempPathFactory, contents: bytes, damage: int, where: int
) -> None:
    """One changed byte: the file is rejected, or its labels are right."""
    zipped = bytearray(gzip.compress(header(2049, len(contents)) + contents))
    zipped[where % len(zipped)] = damage
    path = tmp_path_factory.getbasetemp() / "damaged.gz"
    path.write_bytes(zipped)
    try:
        with open_contents(path, "damaged") as stream:
            result = read_idx(stream, path, most=100)
    except UserError:
        return
    assert result.tobytes() == contents


@pytest.mark.parametrize(
    ("count", "refusal"),
    [
        (60_000, "is larger than the expected 47040000 bytes"),
        (
            2**32 - 1,
            "claims to hold 4294967295 x 28 x 28 bytes; expected at most 60000 x 28 x 28",
        ),
    ],
)
def test_gzip_bomb_needs_little_memory(tmp_path: Path, count: int, refusal: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    zipper, zeros = zlib.compressobj(9, wbits=31), bytes(1 << 20)
    with path.open("wb") as file:
        file.write(zipper.compress(header(2051, count, 28, 28)))
        for _ in range(512):
            file.write(zipper.compress(zeros))
        file.write(zipper.flush())
    assert path.stat().st_size < 1_000_000
    code = f"""
import resource
from pathlib import Path
from fedbudget.file_contents import open_contents
from fedbudget.data.builtin import read_idx
from fedbudget.errors import UserError

def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

path, before = Path({str(path)!r}), peak_memory()
try:
    with open_contents(path, "train-images-idx3-ubyte") as stream:
        read_idx(stream, path, most=60_000, sides=(28, 28))
except UserError as error:
    print(error, peak_memory() - before, sep=chr(10))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    message, kilobytes = done.stdout.splitlines()
    assert message == f"{path} {refusal}"
    assert int(kilobytes) < 200_000


def test_header_alone_allocates_little() -> None:
    """A header of all 60,000 images without any pixels."""
    tracemalloc.start()
    with pytest.raises(UserError, match="47040000 of its last 47040000 bytes are missing"):
        read_idx(
            io.BytesIO(header(2051, 60_000, 28, 28)), FILE, most=60_000, sides=(28, 28)
        )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
