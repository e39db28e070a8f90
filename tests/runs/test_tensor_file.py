"""A file of tensors that is written in parts is what the safetensors package reads, and
aligned.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors import safe_open
from safetensors.numpy import load

from fedbudget import durable_files
from fedbudget.runs.checkpoint import safetensors_parts

ANY = st.one_of(
    *(
        arrays(kind, array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4))
        for kind in ("<f4", "<f8", "<i8", "?")
    )
)


@given(
    st.dictionaries(st.text("abc.", min_size=1, max_size=4), ANY, max_size=5),
    st.text(max_size=20),
)
def test_what_is_written_is_read(tensors: dict[str, np.ndarray], text: str) -> None:
    content = b"".join(safetensors_parts(tensors, {"text": text}))
    read = load(content)
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        assert (read[name].dtype, read[name].shape, read[name].tobytes()) == (
            values.dtype,
            values.shape,
            values.tobytes(),
        )
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == {"text": text}
    assert all(
        header[name]["data_offsets"][0] % max(1, values.dtype.itemsize) == 0
        for name, values in tensors.items()
    )


def test_vectors_are_not_copied_on_their_way_to_the_file(tmp_path: Path) -> None:
    w = np.arange(5, dtype=np.float32)
    *_, part = parts = safetensors_parts({"w": w}, {})
    assert np.shares_memory(np.frombuffer(part, np.uint8), w)
    durable_files.replace(tmp_path / "file", parts)
    with safe_open(tmp_path / "file", framework="numpy") as file:
        assert file.get_tensor("w").tolist() == w.tolist()


def test_a_type_that_is_not_known_is_no_file() -> None:
    with pytest.raises(KeyError):
        safetensors_parts({"w": np.zeros(2, np.complex64)}, {})
