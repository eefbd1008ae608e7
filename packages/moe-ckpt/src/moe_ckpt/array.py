"""One array on disk: zarr version 3 through tensorstore, a checksum at the end of every chunk."""

import functools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from moe_ckpt import files
from moe_ckpt.errors import (
    CorruptChunkError,
    CorruptFileError,
    MissingChunkError,
    SwappedChunkError,
    TruncatedChunkError,
)
from moe_ckpt.grid import Grid
from moe_ckpt.objects import Place
from moe_ckpt.pack import PACKS, Member, digests, labels

CRC_BYTES = 4
WINDOW_BYTES = 64 << 20
"""Bytes that tensorstore may hold for one rank at a time, in either direction."""


@dataclass(frozen=True)
class ArrayInfo:
    """What a checkpoint says about one array: that of one tensor, or a pack.

    Attributes:
        name: Of the tensor; "packs" for a pack.
        kind: Of its values; the number of a pack, as five digits.
        dtype: "float32" or "float64".
        grid: Its shape and chunks.
        crcs: uint32, for each chunk in C order the CRC-32C of its bytes. Empty before the save.
        members: The tensors in a pack.
    """

    name: str
    kind: str
    dtype: str
    grid: Grid
    crcs: np.ndarray
    members: tuple[Member, ...] = ()

    @property
    def label(self) -> str:
        """How messages call the array."""
        return f"pack {self.kind}" if self.members else f"{self.name}/{self.kind}"

    @property
    def chunk_bytes(self) -> int:
        """Length of the file of a chunk, with its checksum."""
        return self.grid.chunk_size * np.dtype(self.dtype).itemsize + CRC_BYTES

    def directory(self, checkpoint: Any) -> Any:
        """Return where the array is in a checkpoint, a path or a place in an object store."""
        if self.members:
            return checkpoint / PACKS / self.kind
        return checkpoint / "arrays" / self.name / self.kind

    def chunk_file(self, checkpoint: Any, number: int) -> Any:
        """Return the file or object of a chunk: ``c.1.0``, or ``c`` for a scalar."""
        return self.directory(checkpoint) / ".".join(["c", *map(str, self.grid.index(number))])


def metadata(info: ArrayInfo) -> dict[str, Any]:
    """Return the zarr metadata. It follows from shape, dtype and chunk alone."""
    return {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(info.grid.chunk)}},
        # Flat keys: the default makes a directory of every row of chunks.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "data_type": info.dtype,
        # A reader that does not know that every chunk exists gets NaN where one is lost, not zero.
        "fill_value": "NaN",
        "node_type": "array",
        "shape": list(info.grid.shape),
        "zarr_format": 3,
    }


def metadata_bytes(info: ArrayInfo) -> bytes:
    """Return the contents of ``zarr.json``."""
    return json.dumps(metadata(info), indent=1, sort_keys=True).encode() + b"\n"


@functools.cache
def _context(synced: bool = True) -> Any:
    # A cache would pin every chunk written. Each chunk has one writer, so locks only cost.
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "file_io_locking": {"mode": "none"},
            "file_io_sync": synced,
        }
    )


def open_array(checkpoint: Path, info: ArrayInfo, *, synced: bool = True) -> Any:
    """Open the array for reading and writing, by what the manifest says and not by zarr.json.

    Args:
        checkpoint: Directory that holds ``arrays``.
        info: Of the array.
        synced: Whether a chunk that was written is durable.
    """
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{info.directory(checkpoint)}/"},
        "metadata": metadata(info),
        # By default a chunk of fill values is not written and a missing one is read as them.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, assume_metadata=True, context=_context(synced)).result()


class ChunkWriter:
    """Writes whole chunks and holds at most a window of them in flight.

    Args:
        checkpoint: Directory that holds ``arrays``.
        together: Whether to make chunks durable together, in ``finish``, which is for many small
            ones; otherwise each is when it has been written.
    """

    def __init__(self, checkpoint: Path, *, together: bool = False):
        self.checkpoint, self.together = checkpoint, together
        self._stores: dict[tuple[str, str, bool], Any] = {}
        self._flying: deque[tuple[Any, int]] = deque()
        self._bytes = 0  # of what is in flight

    def write(self, info: ArrayInfo, number: int, values: np.ndarray) -> None:
        """Start to write a chunk. ``values`` must stay as they are until ``wait`` returns."""
        key = (info.name, info.kind, bool(info.members))
        if key not in self._stores:
            self._stores = {key: open_array(self.checkpoint, info, synced=not self.together)}
        box = info.grid.box(number)
        values = values.reshape([part.stop - part.start for part in box])
        future = self._stores[key][box].write(values, can_reference_source_data_indefinitely=True)
        self._flying.append((future, values.nbytes))
        self._bytes += values.nbytes
        while self._bytes > WINDOW_BYTES:
            self._land()

    def wait(self) -> None:
        """Return when every chunk has been written."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        future, size = self._flying.popleft()
        self._bytes -= size
        future.result()

    def finish(self) -> None:
        """Return when every chunk is durable."""
        if self.together:
            files.sync_file_system(self.checkpoint)

    def drain(self) -> None:
        """Return when nothing is being written any more, whether it succeeded or not.

        After a failure: what is still in flight would read memory that the caller uses again, and
        make files in a directory that is being deleted.
        """
        for future, _ in self._flying:
            future.exception()
        self._flying.clear()
        self._bytes = 0

    def stored_crc(self, info: ArrayInfo, number: int) -> int:
        """Return the checksum at the end of a chunk that was written, from its file."""
        return stored_crc(self.checkpoint, info, number)


def stored_crc(checkpoint: Path, info: ArrayInfo, number: int) -> int:
    """Return the checksum at the end of the file of a chunk.

    Raises:
        MissingChunkError: If there is no file.
        TruncatedChunkError: If it has not the length of a chunk.
    """
    path = info.chunk_file(checkpoint, number)
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != info.chunk_bytes:
                raise TruncatedChunkError(
                    f"{chunk_label(info, number)}: {path} has {size} bytes, "
                    f"a chunk has {info.chunk_bytes}",
                    **chunk_details(info, number, path),
                )
            file.seek(size - CRC_BYTES)
            return int.from_bytes(file.read(CRC_BYTES), "little")
    except FileNotFoundError as error:
        raise MissingChunkError(
            f"{chunk_label(info, number)}: {path} is missing", **chunk_details(info, number, path)
        ) from error


def check_metadata(checkpoint: Place, info: ArrayInfo) -> None:
    """Raise unless ``zarr.json`` is, byte for byte, what the manifest implies.

    Raises:
        CorruptFileError: If it is missing or differs.
    """
    path = info.directory(checkpoint) / "zarr.json"
    try:
        found = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptFileError(f"{info.label}: {path} is missing") from error
    if found != metadata_bytes(info):
        raise CorruptFileError(
            f"{info.label}: {path} is not the metadata of a {info.dtype} array of "
            f"shape {info.grid.shape} in chunks of {info.grid.chunk}",
            tensor=info.name,
            file=str(path),
        )


def read_files(
    checkpoint: Path, info: ArrayInfo, numbers: Iterable[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield chunks as flat arrays, each checked against the manifest before it is yielded.

    Raises:
        ChunkError: Of the class that says what is wrong with the first bad chunk.
    """
    store = open_array(checkpoint, info)
    flying: list[tuple[int, Any]] = []
    most = max(1, WINDOW_BYTES // info.chunk_bytes)
    for number in numbers:
        flying.append((number, _start_reading(checkpoint, info, store, number)))
        if len(flying) >= most:
            yield _finish_reading(checkpoint, info, *flying.pop(0))
    for item in flying:
        yield _finish_reading(checkpoint, info, *item)


def _start_reading(checkpoint: Path, info: ArrayInfo, store: Any, number: int) -> Any:
    crc, future = stored_crc(checkpoint, info, number), store[info.grid.box(number)].read()
    if crc != info.crcs[number]:
        # Either the checksum on disk was hit, or the whole chunk is another, sound one.
        _finish_reading(checkpoint, info, number, future)
        raise swapped(checkpoint, info, number, crc, " is sound but")
    return future


def swapped(
    checkpoint: Place, info: ArrayInfo, number: int, crc: int, but: str
) -> SwappedChunkError:
    """Return the error of a chunk whose checksum is not that of the manifest."""
    path = info.chunk_file(checkpoint, number)
    like = [info.grid.index(int(n)) for n in np.flatnonzero(info.crcs == crc)]
    hint = f", which is that of chunk {like[0]}" if like else ""
    return SwappedChunkError(
        f"{chunk_label(info, number)}: {path}{but} is not the chunk that was saved: its "
        f"checksum is {crc:08x}{hint}, the manifest says {int(info.crcs[number]):08x}",
        **chunk_details(info, number, path),
    )


def corrupt(checkpoint: Place, info: ArrayInfo, number: int) -> CorruptChunkError:
    """Return the error of a chunk whose bytes do not give its checksum.

    Of a pack it names the tensors that were hit, by their digests.
    """
    path = info.chunk_file(checkpoint, number)
    label, details = chunk_label(info, number), chunk_details(info, number, path)
    if info.members:
        values = np.frombuffer(
            path.read_bytes()[:-CRC_BYTES], np.dtype(info.dtype).newbyteorder("<")
        )
        found = zip(info.members, digests(info.members, values), strict=True)
        hit = [member for member, digest in found if digest != member.digest]
        if hit:
            details |= {"tensor": hit[0].name, "kind": hit[0].kind, "tensors": labels(hit)}
            label = f"tensor {', '.join(details['tensors'])} in pack {info.kind}"
    return CorruptChunkError(f"{label}: the bytes of {path} do not give its checksum", **details)


def _finish_reading(
    checkpoint: Path, info: ArrayInfo, number: int, future: Any
) -> tuple[int, np.ndarray]:
    try:
        return number, np.asarray(future.result()).reshape(-1)
    except Exception as error:
        # tensorstore has no classes of errors: all are ValueError, told apart by their text.
        if "DATA_LOSS" not in str(error) and "Digest mismatch" not in str(error):
            raise
        raise corrupt(checkpoint, info, number) from error


def chunk_label(info: ArrayInfo, number: int) -> str:
    """Return how messages call a chunk."""
    if info.members:
        inside = labels(info.members)
        return f"pack {info.kind} of {len(inside)} tensors, {inside[0]} to {inside[-1]}"
    return f"tensor {info.name}/{info.kind}, chunk {info.grid.index(number)}"


def chunk_details(info: ArrayInfo, number: int, path: Place) -> dict[str, Any]:
    """Return the facts of an error about a chunk."""
    chunk = list(info.grid.index(number))
    if info.members:
        first, inside = info.members[0], labels(info.members)
        return {
            "tensor": first.name, "kind": first.kind, "tensors": inside,
            "pack": int(info.kind), "chunk": chunk, "file": str(path),
        }  # fmt: skip
    return {"tensor": info.name, "kind": info.kind, "chunk": chunk, "file": str(path)}
