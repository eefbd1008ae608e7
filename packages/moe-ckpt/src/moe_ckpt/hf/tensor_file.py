"""safetensors files, a tensor at a time: they may be larger than memory, and hold 8-bit floats.

A file is the length of a header (8 bytes, little-endian), the header (JSON: dtype, shape and place
of each tensor) and the tensors, one after the other.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moe_ckpt.errors import CorruptFileError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000


class TensorFile:
    """A file to read from.

    Args:
        path: Of the file.

    Raises:
        CorruptFileError: If it is not a safetensors file, or has not the length its header says.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(LARGEST_HEADER, path.stat().st_size - 8):
                raise CorruptFileError(f"{path} is not a safetensors file", file=str(path))
            try:
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                self._rows = {name: _row(path, name, row) for name, row in header.items()}
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise CorruptFileError(f"{path} has a damaged header: {error}") from error
        self._begin = 8 + length
        end = self._begin + max((stop for _, _, _, stop in self._rows.values()), default=0)
        if path.stat().st_size != end:
            raise CorruptFileError(
                f"{path} has {path.stat().st_size} bytes, its header says {end}", file=str(path)
            )

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._rows[name][1]

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as a view of the file; its bytes are read when they are used."""
        dtype, shape, start, stop = self._rows[name]
        if start == stop:
            return np.empty(shape, dtype)
        place = {"offset": self._begin + start, "shape": (stop - start,)}
        raw = np.memmap(self.path, np.uint8, "r", **place)
        return np.asarray(raw).view(dtype).reshape(shape)


def _row(
    path: Path, name: str, row: Mapping[str, Any]
) -> tuple[np.dtype, tuple[int, ...], int, int]:
    if row["dtype"] not in DTYPES:
        raise ValueError(f"{name} is {row['dtype']}, known are {', '.join(DTYPES)}")
    dtype, shape, (start, stop) = DTYPES[row["dtype"]], tuple(row["shape"]), row["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or start < 0:
        raise ValueError(f"{name} of shape {shape} has {stop - start} bytes")
    return dtype, shape, start, stop


def write_tensors(
    path: Path,
    forms: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, np.ndarray]],
    metadata: Mapping[str, str],
) -> None:
    """Write a durable file, with one tensor in memory at a time.

    Args:
        path: File to make.
        forms: Dtype and shape of each tensor, in order.
        tensors: The tensors by name, in the same order.
        metadata: Text to keep with them.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in forms.items():
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), (wanted, (dtype, shape)) in zip(tensors, forms.items(), strict=True):
            if (name, tensor.dtype, tensor.shape) != (wanted, dtype, shape):
                raise ValueError(
                    f"{name} {tensor.dtype} {tensor.shape}, not {wanted} {dtype} {shape}"
                )
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data if tensor.size else b"")
        file.flush()
        os.fsync(file.fileno())
