"""Arrays as a file of the safetensors format, in parts that are not copied: a checkpoint of a large model is many.

8 bytes      the length of the header, little-endian
header       JSON: of each tensor its type, shape and place; padded with spaces to a multiple of 8 bytes
tensors      one after the other, those of wider numbers first, and so each where its numbers are aligned
"""

import json
from collections.abc import Mapping

import numpy as np

from fedbudget.protocol.structure import Arrays

_TYPES = {
    "f8": "F64",
    "f4": "F32",
    "i8": "I64",
    "i4": "I32",
    "u8": "U64",
    "u4": "U32",
    "u1": "U8",
    "i1": "I8",
    "b1": "BOOL",
}


def in_parts(arrays: Arrays, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """What a file of these has in it, one part after the other.

    Args:
      arrays: little-endian, and contiguous.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    ordered, end = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])), 0
    for name, values in ordered:
        begin, end = end, end + values.nbytes
        kind = _TYPES[f"{values.dtype.kind}{values.dtype.itemsize}"]
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    return parts + [np.ravel(values).data.cast("B") for _, values in ordered if values.size]
